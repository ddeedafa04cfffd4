"""What nobody can carry: overflow and standbys are exhausted, and more has to come from outside.

This module exists so that a shortage is one incident with one answer. What always holds:

* More is asked for only when a shortage has lasted ``capacity.scale_out_after``, once per level of it; the number asked for
  is of all workers of the role and only rises during one shortage, so that asking again is harmless.
* A person is paged when nothing can be asked for more, or when what was asked for has not come (the rule's ``page_after``).
* It is over when the pool, its overflow and what is on its way carry the demand again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.events import Done, ScaleOut
from sentinel.decide.state.mode import acts
from sentinel.decide.state.picture import Picture, effect_key
from sentinel.decide.supply.table import Table
from sentinel.decide.supply.worth import NEAR
from sentinel.model import Component, Finding, Incident, Role, Severity, Urgency

CHECK = "capacity.short"


class Shortage:
    def __init__(self, picture: Picture, incidents: Incidents, table: Table) -> None:
        self.p = picture
        self.incidents = incidents
        self.table = table
        self._lacks: dict[str, dict[Role, float]] = {}  # pool → sessions by role
        self._since: dict[str, float] = {}
        self._again: dict[str, tuple[ScaleOut, float]] = {}  # key → what had no answer, and when it is asked again

    def tell(self, pool: str, lacks: Mapping[Role, float]) -> None:
        """What a pool lacks now, everything that can carry it counted; empty: nothing."""
        if lacks:
            self._lacks[pool] = dict(lacks)
            self._since.setdefault(pool, self.p.now)
        else:
            self._lacks.pop(pool, None)
            self._since.pop(pool, None)

    def tick(self) -> Iterator[Finding]:
        """Findings about pools that have lacked capacity for too long, or no longer do."""
        for name in self.p.pools:
            where = Component(node=name, device="pool")
            if name not in self._lacks:
                if self.p.conditions.get(where, CHECK):
                    yield Finding(id=f"{name}:{CHECK}", check=CHECK, component=where, at=self.p.now, present=False)
            elif self._due(name):
                yield Finding(
                    id=f"{name}:{CHECK}",
                    check=CHECK,
                    component=where,
                    at=self.p.now,
                    severity=Severity.WARNING,
                    summary=f"pool {name} {self.table.standing(name).sentence()}; {self._lacking(name)} that nobody else can carry",
                )

    def ask(self) -> None:
        """On ticks: ask for more where the shortage has reached a level that was not asked for yet."""
        for key, (effect, at) in list(self._again.items()):
            if self.p.now >= at:
                del self._again[key]
                self.p.effect(effect)
        for name in self._lacks:
            incident = self._incident(name) if self._due(name) else None
            if incident is not None:
                self._ask(incident, name)

    def done(self, event: Done) -> None:
        """How a request for more ended."""
        verb, incident_id, role, count = [*effect_key(event.instruction).split("/"), "", "", ""][:4]
        incident = self.p.incidents.get(incident_id)
        if verb != "scale" or incident is None or incident.closed_at is not None:
            return
        wanted = f"{count} {role} workers"
        if event.ok:
            self.incidents.note(incident, "scale-out accepted", event.detail or wanted)
            return
        tries = int(event.instruction.partition("#")[2] or 0) + 1
        if event.ok is None and tries < self.p.policy.timing.unknown_tries:
            more = self._effect(incident, incident.culprit, Role(role), int(count), f"#{tries}")
            self._again[effect_key(more)] = more, self.p.now + self.p.policy.timing.retry
            return
        said = event.detail or ("no answer" if event.ok is None else "refused")
        incident = self.incidents.note(incident, "scale-out failed", f"{wanted}: {said}")
        self.incidents.page(incident, Urgency.CRITICAL.value, f"overflow exhausted, and no more can be asked for: {said}")

    # -----------------------------------------------------------------------------------------------------------------

    def _due(self, pool: str) -> bool:
        return self.p.now - self._since[pool] >= self.p.policy.capacity.scale_out_after

    def _lacking(self, pool: str) -> str:
        return " and ".join(f"{n:g} {role.value} sessions" for role, n in self._lacks[pool].items())

    def _incident(self, pool: str) -> Incident | None:
        mine = (i for i in self.p.incidents_on(pool) if i.closed_at is None and i.culprit == pool)
        return next((i for i in mine if any(f.check == CHECK for f in i.findings)), None)

    def _ask(self, incident: Incident, pool: str) -> None:
        finding = next(f for f in incident.findings if f.check == CHECK)
        asked: dict[str, int] = dict(finding.facts.get("asked", {}))
        for role, lack in self._lacks[pool].items():
            groups = self.table.groups[pool, role]
            each = self.table.regular[pool, role] / groups if groups else 0.0
            count = groups + math.ceil(lack / each - NEAR) if each > 0 else 0
            if count <= asked.get(role.value, 0):
                continue
            if not acts(self.p):
                incident = self.incidents.would(incident, f"ask for {count} {role.value} workers", f"{lack:g} sessions are lacking")
                continue
            asked[role.value] = count
            facts = {**finding.facts, "asked": dict(asked)}
            findings = tuple(msgspec.structs.replace(f, facts=facts) if f.check == CHECK else f for f in incident.findings)
            lasted = self.p.now - self._since[pool]
            why = f"{lack:g} {role.value} sessions have been lacking for {lasted:.0f} s: {count} workers instead of {groups}"
            incident = self.incidents.note(msgspec.structs.replace(incident, findings=findings), "scale-out", why)
            self.p.effect(self._effect(incident, pool, role, count, ""))

    def _effect(self, incident: Incident, pool: str, role: Role, count: int, again: str) -> ScaleOut:
        return ScaleOut(
            id=f"scale/{incident.id}/{role.value}/{count}{again}",
            cause=self.p.cause,
            lane=f"scale:{pool}",
            why=incident.summary,
            pool=pool,
            role=role,
            count=count,
        )
