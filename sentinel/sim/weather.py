"""Random weather: faults come to a simulated fleet at published rates, a person mends what is paged, and it is all counted.

This module exists so that a change of policy can be judged over months of rack time and not over one scenario. What always holds:

* The same fleet, seed and days give the same weather and the same decisions.
* A fault counts as caught only when an incident names its culprit; a page counts as false when nothing that it could be about is
  broken; a drain is wrong when nothing that lives under the worker is broken.
* What no probe can see (silent data corruption: 6 of Llama 3's 419) is left out and named in ``NOT_HERE``, not counted as caught.

Rates: hardware.md §6. Llama 3 (54 days, 16,384 H100 in 2,048 nodes): 419 unexpected interruptions by cause, that is 3.8 per 1,000
node-days; Meta's RSC-1 saw 6.5, so ``scale=1.7`` is its weather. No rates of GB200 racks are published. How a cause splits into
what this fleet can show, and everything that is no failure (application crashes, congestion, lost agents), is our judgement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sentinel.model import Action, DrainState, Incident
from sentinel.sim import faults as x
from sentinel.sim.fleet import SimFleet
from sentinel.sim.hands import Fault
from sentinel.sim.wiring import nodes_of
from sentinel.testing.decisions import PCIS

LLAMA3_NODE_DAYS = 54.0 * 2048
NOT_HERE = {"silent data corruption": 6}
PERSON_S = 2 * 3600.0  # from a page to a mended fault: judgement
ROUND_S = 24 * 3600.0  # from what is on record only to somebody who looks: judgement
TIDY_S = 900.0  # after which a person resolves what is still open though it was mended
MISSED_S = 1800.0  # a fault without its incident after so long is missed

Strike = Callable[[SimFleet, str], Fault | None]


@dataclass(frozen=True)
class Sort:
    """One way in which it rains. ``rate``: per node-day."""

    name: str
    rate: float
    strike: Strike
    nobody: bool = False  # no fault: nothing may come of it but a record


def _llama(count: float) -> float:
    return count / LLAMA3_NODE_DAYS


def _gpu(f: SimFleet) -> int:
    return f.rng.randrange(4)


def _worker(f: SimFleet, node: str, strike: Callable[[SimFleet, str], Fault]) -> Fault | None:
    here = [w for w in f.on(node) if f.process(w).up]
    return strike(f, f.rng.choice(here)) if here else None


def _maintained(f: SimFleet, node: str) -> None:
    """Host maintenance: a window of an hour in which the node is rebooted."""
    f.world.ask("maintain", node, "planned work on the host", until=f.now + 3600)
    f.at(600, lambda: setattr(f.trays[node], "powered", False))
    f.at(1500, lambda: f.trays[node].reboot(f.now))


def _flaps(f: SimFleet, node: str) -> Fault:
    fault = f.broken("nic-fatal", node, mend=f.trays[node].ports.clear)

    def falls(times: int) -> None:
        if fault.ended is None:
            f.trays[node].port(0, f.now, link_downed=times)

    for n in range(1, 6):
        f.at(300.0 * n, partial(falls, n))
    return fault


def _link(f: SimFleet, node: str) -> Fault:
    fault = x.gpu_links(f, node, _gpu(f), (f.rng.randrange(18),))
    if f.rng.random() < 0.42:  # Delta: 42 % of NVLink errors reach other GPUs
        rack = f.trays[node].rack
        x.peer_echo(f, [n for n in nodes_of(rack) if n != node and f.trays[n].talks])
        f.at(60, lambda: x.echo_over(f))
    return fault


def _crash(f: SimFleet, node: str) -> None:
    """A program ends: its group's GPUs say 13 or 31 once, then 43 and 45."""
    for worker in f.on(node):
        gpus = f.worker(worker).gpus
        first = f.rng.choice(gpus)
        code, unit = f.rng.choice((13, 31)), f"(GPC {f.rng.randrange(8)}, TPC {f.rng.randrange(9)}, SM 0)"
        for gpu in gpus:
            n = PCIS.index(gpu.gpu or "")
            if gpu == first:
                x.xid(f, gpu.node, n, code, x.XIDS[code].replace("(GPC 2, TPC 1, SM 0)", unit))
            x.xid(f, gpu.node, n, f.rng.choice((43, 45)))


def _blink(f: SimFleet, node: str) -> None:
    """An agent is restarted: away for less than a silence."""
    f.trays[node].agent = False
    f.at(6, lambda: f.trays[node].restart_agent(f.now))


def _some(f: SimFleet, node: str, least: int) -> Sequence[str]:
    there = nodes_of(f.trays[node].rack)
    return f.rng.sample(there, f.rng.randint(least, len(there)))


SORTS = (
    # Llama 3: 148 "faulty GPU"
    Sort("gpu-off-bus", _llama(45), lambda f, n: x.off_bus(f, n, _gpu(f))),
    Sort("gpu-fatal", _llama(58), lambda f, n: x.fatal(f, n, _gpu(f), f.rng.choice((48, 62, 95)))),
    Sort("nvlink-link", _llama(35), _link),
    Sort("nvlink-gpu", _llama(10), lambda f, n: x.gpu_links(f, n, _gpu(f))),
    # 72 HBM3, 19 SRAM, 17 GPU system processor
    Sort("row-remap", _llama(55), lambda f, n: x.row_remap(f, n, _gpu(f))),
    Sort("ecc-storm", _llama(17), lambda f, n: x.ecc_storm(f, n, _gpu(f))),
    Sort("sram", _llama(19), lambda f, n: x.fatal(f, n, _gpu(f), 95)),
    Sort("gsp-hang", _llama(17), lambda f, n: x.gsp_hang(f, n, _gpu(f))),
    # 54 software, 7 NCCL time-outs
    Sort("engine-dead", _llama(27), lambda f, n: _worker(f, n, x.engine_dead)),
    Sort("engine-frozen", _llama(34), lambda f, n: _worker(f, n, x.engine_frozen)),
    # 35 switches and cables, 7 NICs
    Sort("rail-down", _llama(14), lambda f, n: x.rail_down(f, n, _gpu(f))),
    Sort("port-flaps", _llama(7), _flaps),
    Sort("cartridge", _llama(6), lambda f, n: x.cartridge(f, n, tuple(sorted(f.rng.sample(range(18), 2))))),
    Sort("switch-asic", _llama(5), lambda f, n: x.switch_asic(f, f.trays[n].rack, f.rng.randrange(18), _some(f, n, 6))),
    Sort("leaf-switch", _llama(3), lambda f, n: x.leaf_down(f, f.trays[n].rack, _gpu(f), nodes_of(f.trays[n].rack))),
    Sort("nic-lost", _llama(7), lambda f, n: x.nic_lost(f, n, _gpu(f))),
    # 6 thermal, 8 of SSD, power supply and CPU, 32 host maintenance
    Sort("thermal", _llama(6), lambda f, n: x.hot(f, n, _gpu(f))),
    Sort("node-dead", _llama(8), x.power_off),
    Sort("maintenance", _llama(32), _maintained, nobody=True),
    # judgement: nothing of this is a fault of the fleet
    Sort("imex-daemon", 5e-5, x.imex_lost),
    Sort("application-crash", 0.05, _crash, nobody=True),
    Sort("agent-restart", 0.02, _blink, nobody=True),
)


@dataclass
class Struck:
    """One fault as it was injected, and what came of it."""

    sort: str
    fault: Fault
    caught_s: float | None = None  # after it began
    missed: bool = False


@dataclass
class Season:
    """What a run has counted."""

    fleet: SimFleet
    struck: list[Struck] = field(default_factory=list)
    weather: dict[str, int] = field(default_factory=dict)  # what was no fault
    by_hand: int = 0  # incidents that a person had to resolve though everything was mended

    @property
    def missed(self) -> list[Struck]:
        return [s for s in self.struck if s.missed]

    def false_pages(self) -> list[str]:
        """Pages that nothing broken explains."""
        return [f"{p.fault} on {p.component}" for p in self.fleet.pages() if not self._explains(p.component, p.at, p.fault)]

    def _explains(self, culprit: str, at: float, fault: str) -> bool:
        if fault == "capacity-short" or culprit == "fleet":  # of everything that is out together
            return any(s.fault.at <= at for s in self.struck)
        lately = (s.fault for s in self.struck if s.fault.at <= at and (s.fault.ended is None or at - s.fault.ended < TIDY_S))
        return any(named(self.fleet, f, culprit) for f in lately)


def named(f: SimFleet, fault: Fault, culprit: str) -> bool:
    """Whether an incident about this culprit is about this fault: its part or node, or a worker that it takes down."""
    node, mine = culprit.partition("/")[0], fault.where.partition("/")[0]
    return culprit == fault.where or culprit in fault.hurts or (node == mine and node in f.trays)


class Weather:
    """``scale``: times the published rates of failures. ``run`` may be called again; the season goes on."""

    def __init__(self, fleet: SimFleet, *, scale: float = 1.0, sorts: Sequence[Sort] = SORTS) -> None:
        self.fleet, self.scale, self.sorts = fleet, scale, sorts
        self.season = Season(fleet)
        self._rates = [s.rate if s.nobody else s.rate * scale for s in sorts]
        self._total = sum(self._rates) / 86_400

    def run(self, days: float) -> Season:
        f, end = self.fleet, self.fleet.now + days * 86_400
        while True:
            wait = f.rng.expovariate(self._total * len(f.trays))
            if f.now + wait > end:
                f.run(end - f.now)
                return self.season
            f.run(wait)
            self._strike(f.rng.choices(self.sorts, self._rates)[0])

    def _strike(self, sort: Sort) -> None:
        """On a tray that is well: two faults of one part would be told as one."""
        f = self.fleet
        well = [n for n in f.trays if self._well(n)]
        if not well:
            return
        fault = sort.strike(f, f.rng.choice(well))
        f.stir()
        if fault is None:
            self.season.weather[sort.name] = self.season.weather.get(sort.name, 0) + 1
            return
        struck = Struck(sort.name, fault)
        self.season.struck.append(struck)
        self._watch(struck)

    def _well(self, node: str) -> bool:
        f, tray = self.fleet, self.fleet.trays[node]
        here = set(f.on(node))
        broken = (s.fault for s in self.season.struck if s.fault.ended is None)
        busy = any(here & fault.hurts or named(f, fault, node) for fault in broken)
        return tray.talks and not busy and node not in f.world.decider.p.holds

    def _watch(self, struck: Struck) -> None:
        """See whether it is caught, and let a person mend what is left."""
        f, fault = self.fleet, struck.fault
        found = [i for i in f.incidents.values() if _blamed_at(i) >= fault.at - 1 and named(f, fault, i.culprit)]
        if found and struck.caught_s is None:
            struck.caught_s = min(map(_blamed_at, found)) - fault.at
        age = f.now - fault.at
        if struck.caught_s is None and age > MISSED_S:
            struck.missed = True
        paged = any(i.paged for i in found)
        if fault.ended is None and (age >= ROUND_S or (paged and age >= PERSON_S) or (struck.missed and age >= PERSON_S)):
            self._mend(struck)
        stays = any(i.closed_at is None for i in found)  # mended by itself, and told as if it were not
        if fault.ended is not None and stays and paged and f.now - fault.ended >= PERSON_S:
            self._tidy(struck, last=True)
        elif fault.ended is None or stays or (struck.caught_s is None and not struck.missed):
            f.at(5.0 if age < 120 else 300.0, lambda: self._watch(struck))

    def _mend(self, struck: Struck) -> None:
        f, fault = self.fleet, struck.fault
        node = fault.where.partition("/")[0]
        f.end(fault)
        if node in f.trays and fault.no_start and Action.REBOOT_NODE in fault.cured_by and f.trays[node].powered:
            f.trays[node].reboot(f.now)
        f.at(60, lambda: self._tidy(struck, last=False))
        f.at(TIDY_S, lambda: self._tidy(struck, last=True))

    def _tidy(self, struck: Struck, *, last: bool) -> None:
        """What a person does when the part is mended: let workers return, and at last resolve what nothing else ends."""
        f, fault = self.fleet, struck.fault
        for worker in sorted(fault.hurts):
            drain = f.world.decider.p.open_drain(worker)
            if drain is not None and drain.state is DrainState.OUT and not drain.returns:
                f.world.ask("undrain", worker, "mended")
        for incident in [i for i in f.incidents.values() if i.closed_at is None and named(f, fault, i.culprit)] if last else []:
            self.season.by_hand += 1
            f.world.ask("resolve", incident.id, "mended and well")
            for worker in incident.victims:
                f.world.ask("undrain", worker, "mended and well")


def _blamed_at(incident: Incident) -> float:
    """Since when it names its culprit: an incident about a domain may be revised when the culprit shows itself."""
    return max([incident.opened_at, *(step.at for step in incident.history if step.what == "revised")])
