"""What one finding can be a sign of beyond the part that shows it, and what it is looked at together with.

This module exists so that which findings correlate, and by which fact of the wiring, stands in one place. What always holds:

* Most findings are no sign of anything else: they cost one look here and nothing more.
* Signs are looked at together only by a fact that is known and that nobody contradicts; a node whose NVLink domain is unknown
  or disputed is looked at alone.
* What was injected on purpose is a sign of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sentinel.decide.faults.culprit import is_pattern
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.picture import Picture
from sentinel.model import Component, Finding, Incident, Kind, Severity, Suspect

Key = tuple[Component, str]

APPLICATIONS = "applications"  # the field of every application's fault: a job does not follow the wiring

_APP_XIDS = ("xid.13", "xid.31", "xid.43", "xid.45")
ECHOES = ("xid.43", "xid.45")  # a channel torn down: by the application's own fault, or by somebody else's
_LINK_DOWN = ("gpu.nvlink_down", "xid.149", "xid.74")  # 145 and kin tell of lost packets, which any link can lose to a dead peer
_RAIL = ("ib.port_down", "ib.link_flapping", "ib.port_not_set_up")
_IMEX = ("imex.peer", "imex.slots", "imex.path", "imex.domain", "imex.isolated")  # not its versions or node lists: software
_OF_NODE = ("node.down", "node.unreachable")
_OF_GPU = ("gpu.lost", "gpu.recovery_action")  # beside every fatal Xid that accuses its own GPU
_LINKS_MOST = 64  # link numbers above are no link's (NVLink 5 has 18)


class Sort(StrEnum):
    LINK = "link"  # a link of a GPU is down
    OWN = "own"  # a fatal fault of the GPU or node itself: what its neighbours see may be its echo
    PEER = "peer"  # it accuses a peer or a switch
    IMEX = "imex"  # the IMEX domain, as one of its members sees it
    RAIL = "rail"  # an InfiniBand device has lost its link
    APP = "app"  # an application's channel was torn down


@dataclass(slots=True, eq=False)
class Sign:
    finding: Finding  # the latest
    rule: Rule
    sort: Sort
    field: str  # what it is looked at together with
    at: float  # when it was raised, or happened last, by the controller's clock
    incident: str = ""  # the one that explains it, where that is not simply its own
    guessed: bool = False  # it joined that without a look, to be confirmed on the next tick
    alone: bool = False  # such a guess was wrong once
    near: tuple[str, ...] = ()  # of an application: the domain and the serving groups of its node

    @property
    def key(self) -> Key:
        return (self.finding.component, self.finding.check)

    @property
    def node(self) -> str:
        return self.finding.component.node

    @property
    def place(self) -> str:
        """The GPU, or the node where it is about none."""
        c = self.finding.component
        return f"{c.node}/{c.device}" if c.gpu is not None else c.node


def sort_of(f: Finding) -> Sort | None:
    """What it may be a sign of; None: of nothing but itself."""
    c = f.component
    if f.check in _OF_NODE:
        return Sort.OWN
    if f.facts.get("injected") or f.facts.get("history"):
        return None
    if f.check in _IMEX:
        return Sort.IMEX
    if f.check in _RAIL or (f.check.startswith("nic.") and f.severity is Severity.FATAL):
        return Sort.RAIL if c.device.startswith(("ib@", "nic@")) else None
    if c.gpu is None and not c.device.startswith("nvswitch@"):
        return None
    if f.suspect in (Suspect.PEER, Suspect.SWITCH):
        return Sort.PEER if f.severity is not Severity.INFO else None
    if f.suspect is Suspect.APP:
        return Sort.APP if f.check in _APP_XIDS else None
    if f.severity is not Severity.FATAL or f.suspect is not Suspect.SELF or c.gpu is None:
        return None
    if f.check in _LINK_DOWN and links_of(f) and (c.part or f.check == "gpu.nvlink_down"):
        return Sort.LINK
    return Sort.OWN if f.check.startswith("xid.") or f.check in _OF_GPU else None


def links_of(f: Finding) -> tuple[int, ...]:
    """The NVLinks that it says are down; none for what tells of anything else."""
    if f.check not in _LINK_DOWN:
        return ()
    part = f.component.part.removeprefix("nvlink")
    if part.isascii() and part.isdigit():
        return (int(part),) if int(part) < _LINKS_MOST else ()
    named = f.facts.get("links")
    numbers = named if isinstance(named, list) else []
    return tuple(sorted({n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _LINKS_MOST}))


def domain_of(p: Picture, node: str) -> str:
    """Its NVLink domain; "" where it is unknown or somebody contradicts it."""
    domain = p.topology.domain(node)
    return domain if domain and not p.topology.contradictions.of_domain(node) else ""


def field_of(p: Picture, f: Finding, sort: Sort) -> str:
    """What it is looked at together with; "" for nothing."""
    node = f.component.node
    if sort is Sort.APP:
        return APPLICATIONS
    if sort is Sort.RAIL:
        kind, _, device = f.component.device.partition("@")
        leaf = p.topology.leaf(node, device)
        if leaf:
            return f"leaf:{leaf}"
        return f"rail:{device}" if kind == "ib" and rack_of(p, node) else ""
    domain = domain_of(p, node)
    return f"domain:{domain}" if domain else f"node:{node}"


def rack_of(p: Picture, node: str) -> str:
    """Its rack, or what stands for one: its NVLink domain; "" where neither is known."""
    return domain_of(p, node) or p.topology.rack(node)


def happened_since(p: Picture, sign: Sign, since: float) -> bool:
    """Whether it is still so: a state while it is measured bad, an event when it happened since then."""
    return sign.at >= since if sign.finding.kind is Kind.EVENT else p.conditions.stands(sign.finding)


class Signs:
    """Every sign that counts, by what it is about and by what it is looked at together with."""

    def __init__(self, picture: Picture) -> None:
        self.p = picture
        self._all: dict[Key, Sign] = {}
        self._fields: dict[str, dict[Key, Sign]] = {}
        self._near: dict[str, dict[Key, Sign]] = {}

    def __iter__(self) -> Iterator[Sign]:
        return iter(list(self._all.values()))

    def get(self, finding: Finding) -> Sign | None:
        return self._all.get((finding.component, finding.check))

    def field(self, field: str) -> list[Sign]:
        return list(self._fields.get(field, {}).values())

    def read(self, rule: Rule, finding: Finding, *, field: str = "") -> Sign | None:
        """Take in a finding; None when it is no sign, or is looked at with nothing else."""
        sort = sort_of(finding)
        field = field or (field_of(self.p, finding, sort) if sort is not None else "")
        if sort is None or not field:
            return None
        sign = Sign(finding, rule, sort, field, self.p.now)
        self._all[sign.key] = self._fields.setdefault(field, {})[sign.key] = sign
        if sort is Sort.APP:
            domain, groups = domain_of(self.p, sign.node), (f"worker:{w.name}" for w in self.p.on_node(sign.node))
            sign.near = (*((f"domain:{domain}",) if domain else ()), *groups)
            for name in sign.near:
                self._near.setdefault(name, {})[sign.key] = sign
        return sign

    def beside(self, sign: Sign) -> list[Sign]:
        """The signs of applications in its domain, and of the serving groups on its node, itself among them."""
        near = {key: s for name in sign.near for key, s in self._near.get(name, {}).items()}
        return list(near.values()) or [sign]

    def drop(self, sign: Sign) -> None:
        self._all.pop(sign.key, None)
        for table, name in ((self._fields, sign.field), *((self._near, name) for name in sign.near)):
            there = table.get(name, {})
            there.pop(sign.key, None)
            if not there:
                table.pop(name, None)

    def move(self, sign: Sign, field: str) -> None:
        """By now it is known to be looked at together with others."""
        self.drop(sign)
        sign.field = field
        self._all[sign.key] = self._fields.setdefault(field, {})[sign.key] = sign

    def fresh(self, sign: Sign) -> bool:
        return self.p.now - sign.at <= self.p.policy.correlation.window and not self.mended(sign)

    def mended(self, sign: Sign) -> bool:
        """Whether what happened has been repaired and its worker tested, or its incident has ended: kernel lines never say so."""
        if sign.finding.kind is not Kind.EVENT or sign.at >= self.p.now:
            return False
        for worker in self.p.touching(sign.finding.component):
            drain = self.p.open_drain(worker.name)
            if drain and drain.verified and drain.since >= sign.at and {sign.place, sign.node} & set(drain.repaired):
                return True
        mine = [i for i in self.p.incidents_on(sign.node) if any((f.component, f.check) == sign.key for f in i.findings)]
        ended = [i for i in mine if i.closed_at is not None and i.closed_at >= sign.at and not i.merged_into]
        return bool(ended) and all(i.closed_at is not None for i in mine)

    def explained(self, sign: Sign) -> Incident | None:
        """The open incident that explains it."""
        incident = self.p.incidents.get(sign.incident)
        return incident if incident is not None and incident.closed_at is None else None

    def lives(self, sign: Sign) -> bool:
        """Whether it counts in the next look: fresh, or explained by a pattern that is still open."""
        if self.mended(sign):
            return False
        incident = self.explained(sign)
        if incident is not None and is_pattern(incident):
            rule = self.p.rules.rule_for(incident.findings[0])
            return happened_since(self.p, sign, self.p.now - (rule.close_after if rule else 0.0))
        if not self.fresh(sign) or not happened_since(self.p, sign, 0.0):
            return False
        if incident is None or sign.guessed:
            return True
        fault = self.get(incident.findings[0])  # what an older fault explained stays explained by it
        return fault is not None and self.fresh(fault)
