"""One TOML file per host, checked into typed settings before anything starts.

This module exists so that a wrong configuration costs one clear sentence instead of a wrong drain. What always holds:

* Every error is a ConfigError naming the file, the key, what was wanted and what was found; no traceback reaches a user.
* Unknown keys are errors: a misspelt threshold must not silently keep its default.
* Durations are written ``"250ms"``, ``"5s"``, ``"10m"``, ``"2h"``; inside sentinel they are seconds.
* Secrets are never in this file: it names files that hold them.
"""

from __future__ import annotations

import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sentinel.durations import Duration, parse_duration
from sentinel.model import Component, Fleet, Pool, Role, Worker, gpu_component

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class ConfigError(Exception):
    """The configuration cannot be used; the text says where, what was found, and what was wanted."""


def _hook(kind: type, value: Any) -> Any:
    if kind is Duration:
        return parse_duration(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class StoreSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "embedded:"  # "embedded:" or "embedded:/dir" starts a Valkey child; redis://, rediss://, unix:// use a server
    prefix: str = "sentinel"
    timeout: Duration = Duration(2.0)  # one command; past it the answer is "could not tell"
    password_file: Path | None = None


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


class PoolSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: str = ""
    floor: Fraction = 0.5
    overflow: tuple[str, ...] = ()
    primary: bool = True
    max_doubtful_drains: Count = 2
    max_domain_share: Fraction = 0.34


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


class Settings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    agent: AgentSettings | None = None
    controller: ControllerSettings | None = None
    store: StoreSettings = StoreSettings()
    paging: PagingSettings = PagingSettings()
    dynamo: DynamoSettings = DynamoSettings()
    pools: tuple[PoolSettings, ...] = ()
    workers: tuple[WorkerSettings, ...] = ()
    nodes: tuple[NodeSettings, ...] = ()

    def fleet(self) -> Fleet:
        """The configured picture in the model's nouns."""
        pools = tuple(Pool(**msgspec.structs.asdict(p)) for p in self.pools)
        workers = []
        for w in self.workers:
            gpus = tuple(gpu_component(c.node, c.gpu or "") for c in map(Component.parse, w.gpus))
            nodes = w.nodes or tuple(dict.fromkeys(g.node for g in gpus))
            workers.append(Worker(**{**msgspec.structs.asdict(w), "gpus": gpus, "nodes": nodes}))
        return Fleet(pools=pools, workers=tuple(workers), nodes=tuple(n.name for n in self.nodes))


def load(path: Path) -> Settings:
    """Read and check one file. Raises ConfigError with one sentence when it cannot be used."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    try:
        settings = msgspec.convert(raw, Settings, dec_hook=_hook)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_where(str(error))}") from None
    for problem in _problems(settings):
        raise ConfigError(f"{path}: {problem}")
    return settings


def _where(text: str) -> str:
    """Turn msgspec's ``… - at `$.pools[0].floor``` into ``pools[0].floor: …``."""
    message, _, place = text.partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    return f"{place}: {message[0].lower()}{message[1:]}" if place else message


def _problems(s: Settings) -> list[str]:
    """What no single key can show: names that clash, references that lead nowhere, files that are missing."""
    found: list[str] = []
    for kind, names in (
        ("pools", [p.name for p in s.pools]),
        ("workers", [w.name for w in s.workers]),
        ("nodes", [n.name for n in s.nodes]),
    ):
        for name in sorted({n for n in names if names.count(n) > 1}):
            found.append(f"{kind}: the name {name!r} is used {names.count(name)} times; wanted: each name once")
        found.extend(f"{kind}: {n!r} is no name; wanted letters, digits, '-', '_' or '.'" for n in names if not _NAME.fullmatch(n))
    pools = {p.name for p in s.pools}
    for p in s.pools:
        if not any(w.pool == p.name for w in s.workers):
            found.append(f"pools: {p.name!r} has no workers; wanted at least one [[workers]] with pool = {p.name!r}")
        found.extend(f"pools.{p.name}.overflow: no pool is called {o!r}" for o in p.overflow if o not in pools)
        if p.name in p.overflow:
            found.append(f"pools.{p.name}.overflow: a pool cannot overflow into itself")
    nodes = {n.name for n in s.nodes}
    holder: dict[str, str] = {}
    for w in s.workers:
        if w.pool not in pools:
            found.append(f"workers.{w.name}.pool: no pool is called {w.pool!r}")
        if w.adapter not in ("vllm", "dynamo"):
            found.append(f"workers.{w.name}.adapter: expected \"vllm\" or \"dynamo\", got {w.adapter!r}")
        if not w.url.startswith(("http://", "https://")) and w.adapter == "vllm":
            found.append(f"workers.{w.name}.url: expected http://… or https://…, got {w.url!r}")
        for text in w.gpus:
            try:
                named = Component.parse(text)
                gpu = gpu_component(named.node, named.gpu or "")
            except ValueError:
                found.append(f"workers.{w.name}.gpus: {text!r} is not a GPU; wanted node/gpu@dddd:bb:dd.f")
                continue
            if nodes and gpu.node not in nodes:
                found.append(f"workers.{w.name}.gpus: no node is called {gpu.node!r}")
            if not w.standby and holder.setdefault(str(gpu), w.name) != w.name:
                found.append(f"workers.{w.name}.gpus: {gpu} already belongs to worker {holder[str(gpu)]!r}")
    if s.dynamo.discovery and not s.dynamo.discovery.startswith(("file:", "etcd:")):
        found.append(f'dynamo.discovery: expected "file:/path" or "etcd:http://host:port", got {s.dynamo.discovery!r}')
    for key, file in _files(s):
        if file is not None and not file.is_file():
            found.append(f"{key}: no such file: {file}")
    return found


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _files(s: Settings) -> list[tuple[str, Path | None]]:
    files: list[tuple[str, Path | None]] = [
        ("store.password_file", s.store.password_file),
        ("paging.pagerduty_key_file", s.paging.pagerduty_key_file),
        ("paging.webhook_token_file", s.paging.webhook_token_file),
    ]
    if s.agent:
        files += [("agent.token_file", s.agent.token_file), ("agent.ca_file", s.agent.ca_file)]
    if s.controller:
        c = s.controller
        files += [(f"controller.{k}", getattr(c, k)) for k in ("tls_cert", "tls_key", "node_tokens", "operator_tokens", "policy")]
    return files


def read_secret(path: Path, key: str) -> str:
    """The first line of a secret's file. Raises ConfigError when it is missing, empty, or readable by everyone."""
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    if mode & 0o007:
        raise ConfigError(f"{key}: {path} can be read by everyone (mode {mode & 0o777:o}); wanted 0640 or stricter")
    if not text:
        raise ConfigError(f"{key}: {path} is empty")
    return text.splitlines()[0]
