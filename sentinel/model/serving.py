"""What serves: workers, pools and the fleet as configured, and the route table as published."""

from __future__ import annotations

from enum import StrEnum

from sentinel.model.words import Base, Component


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Worker(Base, frozen=True, kw_only=True, omit_defaults=True):
    """One serving group: everything that lives and dies together (a TP4 decoder, a DEP8 prefill group over two trays)."""

    name: str
    pool: str
    url: str
    adapter: str = "vllm"  # "vllm" or "dynamo"
    role: Role = Role.BOTH
    gpus: tuple[Component, ...] = ()  # its ranks; empty: learned from the agents' reports
    nodes: tuple[str, ...] = ()  # where it runs; the first one carries out start and stop
    domain: str = ""  # NVLink domain (rack)
    capacity: float = 1.0  # sessions it is worth; a share of the pool's capacity
    standby: bool = False  # kept stopped until overflow needs it
    instance: str = ""  # Dynamo instance id (hex), when fixed; otherwise learned
    system_url: str = ""  # Dynamo system server (/health, /metrics) when it differs from url


class Pool(Base, frozen=True, kw_only=True, omit_defaults=True):
    """Workers that can stand in for each other, per role."""

    name: str
    model: str = ""
    floor: float = 0.5  # share of a role's capacity that automatic, doubtful drains never go below
    overflow: tuple[str, ...] = ()  # pools that take over, in order
    primary: bool = True
    max_doubtful_drains: int = 2  # per role in ten minutes
    max_domain_share: float = 0.34  # of one NVLink domain's capacity out at once on doubt
    max_share: float = 1.0  # of one role's capacity out at once on doubt, beside the floor
    decode_per_prefill: float = 4.0  # decode groups that one prefill group feeds; each role's worth is reckoned against it
    sessions_per_prefill: float = 66.0  # at 100 tokens/s/user
    context_tokens: int = 8000  # of an average session: what a moved one has to recompute


class NodePlace(Base, frozen=True, kw_only=True, omit_defaults=True):
    """Where a node stands, as the site says; it completes what the node reports, and where both speak they must agree."""

    node: str
    site: str = ""
    rack: str = ""
    domain: str = ""  # NVLink domain: any name that its nodes share
    tray: int | None = None
    addresses: tuple[str, ...] = ()
    leaves: dict[str, str] = {}  # InfiniBand device → the leaf switch its cable ends at


class Fleet(Base, frozen=True, kw_only=True, omit_defaults=True):
    """The configured picture: pools, workers, the nodes that are expected to report and where they stand."""

    pools: tuple[Pool, ...] = ()
    workers: tuple[Worker, ...] = ()
    nodes: tuple[str, ...] = ()
    places: tuple[NodePlace, ...] = ()
    asics: tuple[str, ...] = ()  # NVLink index → switch ASIC it ends at; empty: identity (not verified on hardware)


class WorkerState(StrEnum):
    """Where a worker stands in the route table."""

    ACTIVE = "active"  # takes requests
    CORDONED = "cordoned"  # keeps its sessions, gets no new ones
    OUT = "out"  # gets nothing new
    STANDBY = "standby"  # stopped, may be started


class RouteEntry(Base, frozen=True, kw_only=True, omit_defaults=True):
    worker: str
    url: str
    role: Role
    state: WorkerState
    capacity: float = 1.0


class RoutePool(Base, frozen=True, kw_only=True, omit_defaults=True):
    pool: str
    weight: float  # share of new sessions, 0..1
    workers: tuple[RouteEntry, ...] = ()


class Routes(Base, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The published route table; ``version`` only rises. Gateways and clients obey the newest they have seen."""

    version: int = 0
    at: float = 0.0
    why: str = ""
    pools: tuple[RoutePool, ...] = ()
