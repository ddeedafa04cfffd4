"""What one host's TOML file may hold, table by table, with the values that hold when it says nothing.

This module exists so that every part of sentinel is handed typed settings. What always holds: these are plain values, checked
by ``sentinel.config.load``; a part that is built from settings made by hand (a test) gets the same defaults.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sentinel.durations import Duration
from sentinel.model import Component, Fleet, NodePlace, Pool, Role, Worker, gpu_component
from sentinel.settings_gateway import AdmissionSettings, BreakerSettings, TenantLimits

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Worth = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class StoreSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "embedded:"  # "embedded:" or "embedded:/dir" starts a Valkey child; a server, or Redis Sentinels (store_url)
    prefix: str = "sentinel"
    timeout: Duration = Duration(2.0)  # one command; past it the answer is "could not tell"
    password_file: Path | None = None
    sentinels_password_file: Path | None = None  # of the Redis Sentinels, where they want one


class AgentSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str = msgspec.field(default_factory=lambda: socket.gethostname().split(".")[0])
    controllers: tuple[str, ...] = ()  # base URLs; the agent finds the leader among them
    token_file: Path | None = None
    ca_file: Path | None = None  # trust for https controllers
    state_dir: Path = Path("/var/lib/sentinel")
    listen: str = "127.0.0.1:9456"  # /metrics and /healthz
    snapshot: Duration = Duration(5.0)
    driver_deadline: Duration = Duration(10.0)  # an NVML read past this is driver.hung
    spool_max_bytes: Count = 64 * 1024 * 1024
    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    kmsg: Path = Path("/dev/kmsg")
    probes: dict[str, dict[str, Any]] = {}  # name → {enabled = true, interval = "5s", … the probe's own options}
    thresholds: Path | None = None  # the numbers of probes/thresholds.toml that this site changes
    expected: dict[str, Any] = {}  # what a healthy node looks like: gpus = 4, nvlinks = 18, driver = "580.159.04"
    actions: dict[str, tuple[str, ...]] = {}  # allow-list: action → argument vector with {placeholders}; empty: none allowed


class ControllerSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = msgspec.field(default_factory=lambda: socket.gethostname().split(".")[0])
    listen: str = "127.0.0.1:9455"
    advertise: str = ""  # base URL that agents and other controllers reach this one by; default: http://<listen>
    tls_cert: Path | None = None
    tls_key: Path | None = None
    node_tokens: Path | None = None  # file: one "node sha256-of-token" per line
    operator_tokens: Path | None = None  # file: one "operator sha256-of-token" per line
    journal_dir: Path = Path("/var/lib/sentinel/journal")
    journal_max_bytes: Count = 256 * 1024 * 1024
    lease: Duration = Duration(3.0)
    tick: Duration = Duration(0.5)
    watch: Duration = Duration(2.0)  # how often each worker is looked at over the network
    policy: Path | None = None  # overrides the policy shipped with the package
    scale_out: tuple[str, ...] = ()  # argument vector that asks for more workers; empty: nothing can be asked


class GatewaySettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = msgspec.field(default_factory=lambda: socket.gethostname().split(".")[0])
    listen: str = "127.0.0.1:8000"  # OpenAI's API
    admin: str = "127.0.0.1:9457"  # /metrics, /healthz, /routes; process k listens on this port + k
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keys: Path | None = None  # file: one "tenant sha256-of-key" per line
    anonymous: bool = False  # without keys: let everybody in, also from outside this host
    worker_key_file: Path | None = None  # what the workers want as bearer token; none: the client's header goes on untouched
    processes: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    body_max: Count = 32 * 1024 * 1024  # bytes of a request
    receive: Duration = Duration(60.0)  # a request's body must have come by then
    keepalive: Duration = Duration(75.0)  # a client's connection without a request, or with an unfinished head
    connect: Duration = Duration(2.0)
    first_byte: Duration = Duration(60.0)  # of a stream: queueing and prefill
    answer: Duration = Duration(600.0)  # of an answer that comes as a whole
    stall: Duration = Duration(30.0)  # between two pieces; also how long a client may take nothing
    idle: Duration = Duration(4.0)  # a kept connection to a worker; below uvicorn's own 5 s
    queue: Duration = Duration(2.0)  # how long a request may wait to be let in
    retry_share: Fraction = 0.2  # of the requests, in the long run, that may be tried a second time
    retry_reserve: Count = 100  # second tries at once
    unready: Duration = Duration(0.0)  # on a stop: how long /healthz says so before connections are refused
    drain: Duration = Duration(120.0)  # on a stop: how long answers may go on
    poll: Duration = Duration(1.0)  # for a route table whose push was lost
    presence: Duration = Duration(3.0)  # a gateway not heard of for this long does not count any more
    xds_dir: Path | None = None  # where Envoy's endpoint files are kept; none: nowhere
    breakers: BreakerSettings = BreakerSettings()
    admission: AdmissionSettings = AdmissionSettings()
    tenants: dict[str, TenantLimits] = {}


class PagingSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pagerduty_key_file: Path | None = None
    pagerduty_url: str = "https://events.pagerduty.com/v2/enqueue"
    webhook_url: str = ""
    webhook_token_file: Path | None = None
    runbooks: str = ""  # base of the links in pages; default: the controller's own /runbooks/
    client: str = "sentinel"


class DynamoSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    discovery: str = ""  # "file:/path/to/DYN_FILE_KV" or "etcd:http://127.0.0.1:2379"
    namespace: str = "dynamo"
    frontend: str = ""  # base URL of a Dynamo frontend, for pinned one-token probes
    frontends: tuple[str, ...] = ()  # further ones over the same workers: gateways share requests out among all of them

    @property
    def every_frontend(self) -> tuple[str, ...]:
        return tuple(url for url in (self.frontend, *self.frontends) if url)


class PoolSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: str = ""
    floor: Fraction = 0.5
    overflow: tuple[str, ...] = ()
    primary: bool = True
    max_doubtful_drains: Count = 2
    max_domain_share: Fraction = 0.34
    max_share: Fraction = 1.0
    decode_per_prefill: Worth = 4.0
    sessions_per_prefill: Worth = 66.0
    context_tokens: Count = 8000


class WorkerSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    pool: str
    url: str
    adapter: str = "vllm"
    role: Role = Role.BOTH
    gpus: tuple[str, ...] = ()  # "t01/gpu@0008:01:00.0"
    nodes: tuple[str, ...] = ()
    domain: str = ""
    capacity: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    standby: bool = False
    instance: str = ""
    system_url: str = ""


class NodeSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    site: str = ""
    rack: str = ""
    domain: str = ""  # NVLink domain
    tray: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None  # as NVML counts it (trayIndex, a byte)
    addresses: tuple[str, ...] = ()
    leaves: dict[str, str] = {}  # InfiniBand device → leaf switch


class TopologySettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    asics: tuple[str, ...] = ()  # NVLink index → switch ASIC


class Settings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    agent: AgentSettings | None = None
    controller: ControllerSettings | None = None
    gateway: GatewaySettings | None = None
    store: StoreSettings = StoreSettings()
    paging: PagingSettings = PagingSettings()
    dynamo: DynamoSettings = DynamoSettings()
    pools: tuple[PoolSettings, ...] = ()
    workers: tuple[WorkerSettings, ...] = ()
    nodes: tuple[NodeSettings, ...] = ()
    topology: TopologySettings = TopologySettings()

    def fleet(self) -> Fleet:
        """The configured picture in the model's nouns."""
        pools = tuple(Pool(**msgspec.structs.asdict(p)) for p in self.pools)
        workers = []
        for w in self.workers:
            gpus = tuple(gpu_component(c.node, c.gpu or "") for c in map(Component.parse, w.gpus))
            nodes = w.nodes or tuple(dict.fromkeys(g.node for g in gpus))
            workers.append(Worker(**{**msgspec.structs.asdict(w), "gpus": gpus, "nodes": nodes}))
        places = (NodePlace(node=n.name, **{k: v for k, v in msgspec.structs.asdict(n).items() if k != "name"}) for n in self.nodes)
        return Fleet(
            pools=pools,
            workers=tuple(workers),
            nodes=tuple(n.name for n in self.nodes),
            places=tuple(p for p in places if p != NodePlace(node=p.node)),  # those that the file says something about
            asics=self.topology.asics,
        )
