"""One simulated compute tray at report level: its hardware's readings, the real probes' judgement of them, and its reports.

This module exists so that what a fleet reports is what real agents would report: only readings are made up here; ``assess`` of the
probes judges them and the agent's own ``Known`` decides what is news. What always holds:

* A healthy tray costs nothing: a probe is run only once something it looks at has been touched, and then at its own cadence, more
  rarely while nothing changes. Its first look is at healthy hardware, so that what was up before is known to have been up.
* News is kept until it is delivered, in order; a snapshot carries every known state.
* A reboot begins a new boot id, new counters and an empty memory of every probe; whatever served there is gone.
* Nothing here reads a clock: time comes in with every call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from probes import Context, imex, infiniband, kernel_episodes, standing
from probes.gpu import GpuProbe
from probes.worker import WorkerProbe
from sentinel.agent.known import Known
from sentinel.agent.place import identities, place_of
from sentinel.model import Action, Component, Finding, Place, Reading, Report, Severity, Suspect
from sentinel.sim.readings import NICS, RAILS, ImexDomain, Process, Values, healthy_gpu, network_adapter
from sentinel.testing.decisions import PCIS

DRIVER = "580.159.04"
CADENCE = {"kernel_log": 0.0, "worker": 2.0, "gpu": 5.0, "infiniband": 10.0, "imex": 30.0}  # seconds, the probes' own
SETTLED, RARELY = 12, 6  # after so many looks without news, a probe looks at every so many beats of its cadence only
PATIENCE = 3  # failed reads in a row before the agent's runner says that a probe fails


@dataclass
class Looking:
    """One probe of one tray: its memory, when it is due, and whether anything it looks at was ever touched."""

    memory: dict[str, Any] = field(default_factory=dict)
    due: float | None = None  # None: never needed so far
    broken: str = ""  # why it cannot look
    failed: int = 0
    quiet: int = 0  # looks in a row without news


class Tray:
    """``number``: from 1 within its rack. ``domain``: the rack's IMEX domain, shared by its trays."""

    def __init__(self, node: str, rack: str, number: int, domain: ImexDomain, workers: tuple[str, ...]) -> None:
        self.node, self.rack, self.number, self.domain = node, rack, number, domain
        self.processes = {w: Process(w) for w in workers}
        self.gpus: dict[str, Values] = {}  # PCI → values of its reading that differ; a callable gets the time
        self.ports: dict[str, Values] = {}  # rail → values of its port that differ; "gone": the adapter is not there
        self.driver: Values = {}  # what differs of the whole driver's answer
        self.clock_off = 0.0
        self.boots = self.sessions = 1
        self.powered = self.agent = True
        self.outbox: list[tuple[Finding, ...]] = []
        self.known = Known()
        self._looks = {name: Looking() for name in CADENCE}
        self._kernel: list[tuple[float, str]] = []
        self._printed = self._seq = 0
        self._states: dict[str, dict[str, Any]] = {}  # worker → as the worker probe's own half keeps it
        self._place: Place | None = None
        domain.join(node, f"10.{number}.{int(hashlib.sha256(rack.encode()).hexdigest()[:2], 16)}.1")

    # -- what happens to it -------------------------------------------------------------------------------------------

    def touch(self, probe: str, now: float) -> None:
        """Something that this probe looks at is about to change: from now on it looks."""
        looking = self._looks[probe]
        if looking.due is not None:
            self._wake(probe)
        else:
            looking.due = now
            if probe != "kernel_log" and self.agent:
                self._look(probe, now - CADENCE[probe])
                looking.due = now

    def set_gpu(self, gpu: int, now: float, **values: Any) -> None:
        """Let values of one GPU's reading differ, by their names in ``probes.nvml``; ``lost=True``: it answers no more."""
        self.touch("gpu", now)
        self.gpus.setdefault(PCIS[gpu], {}).update(values)

    def links(self, gpu: int, down: tuple[int, ...], now: float) -> None:
        self.set_gpu(gpu, now, links=[0 if n in down else 1 for n in range(18)])

    def port(self, rail: int, now: float, **values: Any) -> None:
        self.touch("infiniband", now)
        self.ports.setdefault(RAILS[rail], {}).update(values)

    def mend_gpu(self, gpu: str) -> None:
        self.gpus.pop(gpu, None)
        self._wake("gpu")

    def _wake(self, probe: str) -> None:
        """It looks again at its next beat, however long nothing has changed."""
        looking = self._looks[probe]
        if looking.due is not None and looking.quiet >= SETTLED:
            looking.due = 0.0  # long ago
        looking.quiet = 0

    def mend_driver(self) -> None:
        self.driver = {}
        self._wake("gpu")

    def kernel(self, line: str, now: float) -> None:
        """The kernel prints a line."""
        self.touch("kernel_log", now)
        self._kernel.append((now, line))

    def xid(self, gpu: int, rest: str, now: float) -> None:
        """``rest``: from the code on, as the driver prints it."""
        self.kernel(f"NVRM: Xid (PCI:{PCIS[gpu].rsplit('.', 1)[0]}): {rest}", now)

    def break_probe(self, probe: str, why: str, now: float) -> None:
        """This probe can look no more; "": it can again."""
        self.touch(probe, now)
        self._looks[probe].broken = why

    def restart_agent(self, now: float) -> None:
        """A new run of the agent: it knows nothing, and every probe looks anew once something was touched."""
        self.agent, self.sessions, self._seq, self.known = True, self.sessions + 1, 0, Known()
        for looking in self._looks.values():
            looking.memory, looking.due, looking.failed = {}, None if looking.due is None else now, 0
        self._states = {}

    def reboot(self, now: float) -> None:
        self.boots += 1
        self.powered = True
        self.driver, self._kernel = {}, []
        for process in self.processes.values():
            process.up = False
        self.restart_agent(now)
        for probe in CADENCE:  # everything is measured anew, so that what was wrong before can be said to be over
            self._looks[probe].due = now

    # -- what its agent says ------------------------------------------------------------------------------------------

    @property
    def talks(self) -> bool:
        return self.powered and self.agent

    @property
    def touched(self) -> bool:
        return any(looking.due not in (None, float("inf")) for looking in self._looks.values())

    def look(self, now: float) -> bool:
        """Run what is due. Says whether there is news to send."""
        for probe, looking in self._looks.items():
            if looking.due is not None and now >= looking.due and self.talks and (probe != "kernel_log" or self._kernel):
                before = len(self.outbox)
                self._look(probe, now)
                looking.quiet = 0 if len(self.outbox) > before or looking.broken else looking.quiet + 1
                still = looking.quiet >= SETTLED and not self._moving(probe)
                looking.due = now + CADENCE[probe] * (RARELY if still and probe in ("gpu", "infiniband") else 1)
                if looking.quiet >= SETTLED * RARELY and still and not any(s.present for s in self.known.states.values()):
                    looking.due = float("inf")  # all is well: until something is touched
        return bool(self.outbox)

    def _moving(self, probe: str) -> bool:
        """Whether what it reads changes by itself."""
        if probe == "worker":
            return any(p.frozen or not p.up for p in self.processes.values())
        differ = self.gpus if probe == "gpu" else self.ports if probe == "infiniband" else {}
        return any(callable(v) or k == "hung_since" for values in differ.values() for k, v in values.items())

    def report(self, now: float, findings: tuple[Finding, ...] | None = None) -> Report:
        """One report: these findings, or a snapshot. Its time is the node's own clock's."""
        self._seq += 1
        snapshot = findings is None
        return Report(
            node=self.node, session=f"{self.node}-{self.sessions}", seq=self._seq, at=now + self.clock_off,
            boot_id=f"{self.node}-boot-{self.boots}", version="simulated", snapshot=snapshot,
            findings=self.known.snapshot(now + self.clock_off) if findings is None else findings,
            probes={p: not k.broken for p, k in self._looks.items()}, place=self.place if snapshot else None,
        )  # fmt: skip

    @property
    def place(self) -> Place:
        """Where it stands, out of its own readings."""
        if self._place is None:
            data = {"gpus": [{**healthy_gpu(n, self.rack, self.number), **self._named(pci)} for n, pci in enumerate(PCIS)]}
            self._place = place_of(dict(identities(data)), RAILS, (self.node, self.domain.addresses[self.node]))
        return self._place

    def stand(self, **identity: Any) -> None:
        """Its first GPU says another identity (``uuid``, ``fabric_cluster``, ``platform``)."""
        self.gpus.setdefault(PCIS[0], {}).update(identity)
        self._place = None

    def _named(self, pci: str) -> Values:
        return {k: v for k, v in self.gpus.get(pci, {}).items() if k in ("uuid", "fabric_cluster", "fabric_clique", "platform")}

    def _look(self, probe: str, now: float) -> None:
        looking, at = self._looks[probe], now + self.clock_off
        if looking.broken:
            looking.failed += 1
            if looking.failed == PATIENCE:
                self._tell("agent", [self._failing(probe, looking, at)])
            return
        if looking.failed >= PATIENCE:
            self._tell("agent", [msgspec.structs.replace(self._failing(probe, looking, at), present=False)])
        looking.failed = 0
        found = _ASSESS[probe](self, Reading(probe=probe, node=self.node, at=at, boot_id=f"{self.node}-boot-{self.boots}",
                                             data=_READ[probe](self, now)), looking.memory)  # fmt: skip
        self._tell(probe, found)

    def _tell(self, probe: str, found: list[Finding]) -> None:
        news = tuple(n.finding for n in self.known.take(probe, found))
        if news:
            self.outbox.append(news)

    def _failing(self, probe: str, looking: Looking, at: float) -> Finding:
        """As the agent's runner words it (sentinel/agent/runner.py)."""
        return Finding(
            id=f"{self.node}/probe.failed/{probe}", check="probe.failed", at=at,
            component=Component(node=self.node, device=f"probe@{probe}"),
            severity=Severity.WARNING, action=Action.FIX_MONITOR, suspect=Suspect.MONITOR,
            summary=f"The probe {probe} failed {looking.failed} times in a row: {looking.broken}",
        )  # fmt: skip

    # -- readings -----------------------------------------------------------------------------------------------------

    def _read_gpu(self, now: float) -> Values:
        gpus = [self._gpu(n, pci, now) for n, pci in enumerate(PCIS)]
        return {"error": None, "driver": DRIVER, "nvml": __name__, "gpus": gpus, "bound": [], "mono": now} | self.driver

    def _gpu(self, index: int, pci: str, now: float) -> Values:
        differs = dict(self.gpus.get(pci, {}))
        if differs.pop("lost", False):
            return {"pci": pci, "index": index, "error": {"code": 15, "text": "GPU is lost"}}
        if "hung_since" in differs:
            return {"pci": pci, "index": index, "hung_s": now - differs["hung_since"]}
        values = {name: value(now) if callable(value) else value for name, value in differs.items()}
        return {**healthy_gpu(index, self.rack, self.number), "slow_at": now, "links_at": now, **values}

    def _read_kernel(self, now: float) -> Values:
        records = [[4, self._printed + n, int((at + 1e6) * 1e6), line] for n, (at, line) in enumerate(self._kernel)]
        self._printed += len(records)
        self._kernel = []
        return {"records": records, "repeats": {}, "lines": len(records), "lost": 0, "booted_at": self.clock_off - 1e6}

    def _read_infiniband(self, now: float) -> Values:
        return {"present": True, "default_route": [], "devices": [
            network_adapter(name, NICS[n], {k: v(now) if callable(v) else v for k, v in self.ports.get(name, {}).items()})
            for n, name in enumerate(RAILS) if not self.ports.get(name, {}).get("gone")
        ]}  # fmt: skip

    def _read_worker(self, now: float) -> Values:
        workers = []
        for name, process in self.processes.items():
            seen, limits = process.look(now), standing.by({})
            state = standing.fold(self._states.get(name, {}), seen)
            if standing.wants_token(state, limits):
                ok = not process.frozen
                seen["token"] = {"ok": ok, "how": "answered" if ok else "timeout", "why": "" if ok else "timeout", "seconds": 5.0}
            self._states[name] = standing.fold(self._states.get(name, {}), seen)
            workers.append(seen)
        return {"workers": workers, "limits": {}}

    def _read_imex(self, now: float) -> Values:
        return self.domain.seen_by(self.node)


# -- the probes ------------------------------------------------------------------------------------------------------------------


_GPU, _WORKER = GpuProbe(Context(node="simulated")), WorkerProbe(Context(node="simulated"))  # only their judging halves are used
_READ: dict[str, Callable[[Tray, float], Values]] = {
    "kernel_log": Tray._read_kernel, "worker": Tray._read_worker, "gpu": Tray._read_gpu, "infiniband": Tray._read_infiniband,
    "imex": Tray._read_imex,
}  # fmt: skip
_ASSESS: dict[str, Callable[[Tray, Reading, dict[str, Any]], list[Finding]]] = {
    "kernel_log": lambda t, r, m: kernel_episodes.assess(r, m),
    "worker": lambda t, r, m: _WORKER.assess(r, m, {}),
    "gpu": lambda t, r, m: _GPU.assess(r, m, {"gpus": 4}),
    "infiniband": lambda t, r, m: infiniband.assess(r, m, {}),
    "imex": lambda t, r, m: imex.assess(r, m, {"imex_nodes": len(t.domain.addresses)}),
}
