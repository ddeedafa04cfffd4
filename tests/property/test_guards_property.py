"""The scripts of the shared guards, step by step against models, on real servers whose clock the test turns by hand."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis import Redis as Blocking
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sentinel.durations import Duration
from sentinel.gateway.breaker_rules import Record
from sentinel.settings_gateway import BreakerSettings
from sentinel.store import StoreError
from sentinel.store.admission import TURN_S, AdmissionRecords, Grant, Need
from sentinel.store.breakers import BreakerRecords
from sentinel.store.door import Door, _script
from sentinel.store.embedded import _binary

TIME = "redis.call('TIME')"
FEW = settings(max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


class HandClock(Door):
    """The door, but the server's clock in every script is a key that the test sets."""

    async def run(self, script: str, keys: Any, args: Any, *, sure: bool = True) -> Any:
        text, _ = _script(script)
        assert text.count(TIME) == 1
        turned = text.replace(TIME, f"redis.call('HMGET', '{self.key('clock')}', 's', 'us')")
        async with self._asking(script):
            return await self._client.eval(turned, len(keys), *keys, *args)


class Machine(RuleBasedStateMachine):
    """A prefix of its own on the server, and a clock that begins at a full second."""

    socket = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.prefix = uuid.uuid4().hex
        self.raw = Blocking(unix_socket_path=self.socket)
        self.client = Redis(unix_socket_path=self.socket)
        self.door = HandClock(self.client, "the server", self.prefix, 5.0)
        self.store: Any = types.SimpleNamespace(_door=self.door)
        self.now = 1_800_000_000_000
        self.go(0)

    def go(self, ms: int) -> None:
        self.now += ms
        self.raw.hset(f"{{{self.prefix}}}:clock", mapping={"s": self.now // 1000, "us": self.now % 1000 * 1000})

    def ask(self, question: Any) -> Any:
        return self.runner.run(question)

    def forget(self) -> None:
        for key in self.raw.scan_iter(f"{{{self.prefix}}}:*", count=1000):
            if not key.endswith(b":clock"):
                self.raw.delete(key)

    def teardown(self) -> None:
        self.ask(self.client.aclose())
        self.runner.close()
        self.forget()
        self.raw.close()

    @rule(ms=st.one_of(st.integers(1, 1500), st.sampled_from([5_000, 11_000, 40_000])))
    def time_passes(self, ms: int) -> None:
        self.go(ms)


POLICY = BreakerSettings(
    window=Duration(4.0), min_requests=4, base_open=Duration(2.0), max_open=Duration(5.0), jitter=0.5, probes=2,
    probe_lease=Duration(3.0),
)  # fmt: skip
NAMES = ("w0", "w1", "w2", "w3")
WORKER = st.sampled_from(["w0", "w0", "w0", "w1", "w2"])  # the fourth only belongs to the pool
REPORTER = st.sampled_from(["h1/a", "h1/b", "h2/a"])
COUNT = st.integers(0, 4)
DRAW = st.sampled_from([0.0, 0.25, 0.5])
PROBE = st.sampled_from(["p1", "p2", "p3", "p4"])


class Breakers(Machine):
    """Against ``breaker_rules.Record``, which is also what a gateway goes by alone."""

    def __init__(self) -> None:
        super().__init__()
        self.records = BreakerRecords(self.store, POLICY)
        self.model = {name: Record(POLICY) for name in NAMES}

    def sweeps(self) -> int:
        """How often a whole record was read on this server."""
        return int(self.raw.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0))

    def version(self, worker: str, stale: bool) -> int:
        return self.model[worker].version - stale

    @rule(worker=WORKER, reporter=REPORTER, fine=COUNT, stale=st.booleans())
    def seen(self, worker: str, reporter: str, fine: int, stale: bool) -> None:
        told = self.ask(self.records.seen(reporter, [(worker, self.version(worker, stale), fine)]))
        assert told == {worker: self.model[worker].version}
        self.model[worker].seen(self.now, reporter, self.version(worker, stale), fine)

    @rule(worker=WORKER, reporter=REPORTER, fine=COUNT, failed=COUNT, draw=DRAW, stale=st.sampled_from([False, False, False, True]))
    def failed(self, worker: str, reporter: str, fine: int, failed: int, *, draw: float, stale: bool) -> None:
        version, others = self.version(worker, stale), [n for n in NAMES if n != worker]
        told = self.ask(self.records.failed(worker, "p", others, reporter, version=version, fine=fine, failed=failed, draw=draw))
        out = sum(self.model[n].out(self.now) for n in others)
        heard = self.model[worker].failed(self.now, reporter, version, fine, failed, draw=draw, others_out=out, total=len(NAMES))
        if heard == "panic":
            assert told.panic_left > 0
        if heard == "opened":
            assert (out + 1) / len(NAMES) <= POLICY.max_share and told.state == "open"

    @rule(worker=WORKER, probe=PROBE)
    def permit(self, worker: str, probe: str) -> None:
        _, given = self.ask(self.records.permit(worker, "p", probe))
        assert given == self.model[worker].permit(self.now, probe)

    @rule(worker=WORKER, probe=PROBE, outcome=st.sampled_from(["fine", "fine", "failed", "neutral"]), draw=DRAW)
    def ended(self, worker: str, probe: str, outcome: Any, draw: float) -> None:
        self.ask(self.records.ended(worker, "p", probe, outcome, draw))
        self.model[worker].ended(self.now, probe, outcome, draw)

    @rule(worker=WORKER, probes=st.lists(PROBE, max_size=3, unique=True))
    def renew(self, worker: str, probes: list[str]) -> None:
        assert self.ask(self.records.renew(worker, "p", probes)) == self.model[worker].renew(self.now, probes)

    @rule(worker=WORKER, pin=st.sampled_from(["open", "closed", ""]), lasts=st.sampled_from([1.0, 6.0]))
    def pin(self, worker: str, pin: Any, lasts: float) -> None:
        self.ask(self.records.pin(worker, "p", pin, lasts_s=lasts, by="ada"))
        self.model[worker].hold(self.now, pin, round(lasts * 1000))

    # Ways to the states that chance alone would seldom reach.

    @rule(ms=st.sampled_from([700, 1_500, 3_000, 60_000]))
    def the_clock_is_set_back(self, ms: int) -> None:
        """Or a server whose clock is behind takes over."""
        self.go(-ms)

    @rule(worker=WORKER, draw=DRAW, hosts=st.sampled_from(["h1/a h2/a", "h1/a h1/b"]))
    def breaks(self, worker: str, draw: float, hosts: str) -> None:
        """Two hosts see it fail; or one does, by two processes, while the other sees it work."""
        if hosts == "h1/a h1/b":
            self.seen(worker, "h2/a", 1, False)
        for reporter in hosts.split():
            self.failed(worker, reporter, 0, 4, draw=draw, stale=False)

    @rule(worker=WORKER, late=st.sampled_from([0, 1, 5_100]))
    def is_over_its_time(self, worker: str, late: int) -> None:
        self.go(max(0, self.model[worker].ends - self.now) + late)

    @rule(worker=WORKER, probe=PROBE, late=st.sampled_from([-1, 0]))
    def a_probes_lease_ends(self, worker: str, probe: str, late: int) -> None:
        self.go(max(0, self.model[worker].permits.get(probe, 0) - self.now + late))

    @rule(worker=WORKER, draw=DRAW, fine=st.integers(0, 2), late=st.sampled_from([-1, 0]))
    def is_rushed(self, worker: str, draw: float, fine: int, late: int) -> None:
        """It breaks, its time is over, everybody asks for a probe, some succeed, everybody asks again; and the leases end."""
        self.breaks(worker, draw, "h1/a h2/a")
        self.is_over_its_time(worker, 0)
        for n in range(5):
            self.permit(worker, f"p{n}")
        for n in range(fine):
            self.ended(worker, f"p{n}", "fine", draw)
        for n in range(5):
            self.permit(worker, f"q{n}")
        for probe in ("p1", "q0"):
            self.a_probes_lease_ends(worker, probe, late)
            for n in range(3):
                self.permit(worker, f"r{n}")

    @rule(worker=WORKER, rest=st.sampled_from([0, 4_990, 5_010]))
    def heals(self, worker: str, rest: int) -> None:
        self.breaks(worker, 0.0, "h1/a h2/a")
        self.is_over_its_time(worker, 0)
        for probe in ("p1", "p2"):
            self.permit(worker, probe)
            self.ended(worker, probe, "fine", 0.0)
        self.go(rest)

    @rule(worker=WORKER, draw=DRAW, rest=st.sampled_from([0, 1_100]))
    def begins_well_and_breaks(self, worker: str, draw: float, rest: int) -> None:
        """One probe's answer has begun, and breaks when its lease may be over, before or after others closed the breaker."""
        self.breaks(worker, 0.0, "h1/a h2/a")
        self.is_over_its_time(worker, 0)
        self.permit(worker, "p1")
        self.ended(worker, "p1", "fine", draw)
        if draw == 0.25:
            self.permit(worker, "p2")
            self.ended(worker, "p2", "fine", draw)
        self.go(rest)
        self.ended(worker, "p1", "failed", draw)

    @precondition(lambda self: any(r.version for r in self.model.values()))
    @rule(lost=st.integers(0, 9))
    def the_store_forgets(self, lost: int) -> None:
        if lost == 0:
            self.forget()
            self.model = {name: Record(POLICY) for name in NAMES}

    @invariant()
    def they_agree(self) -> None:
        for told in self.ask(self.records.listing(dict.fromkeys(NAMES, "p"), evidence=True)):
            r = self.model[told.worker]
            assert {f"r:{reporter}".encode() for reporter in r.reports} == {
                field for field in self.raw.hkeys(f"{{{self.prefix}}}:breaker:{told.worker}") if field.startswith(b"r:")
            }
            pin = r.pinned(self.now)
            assert (told.state, told.version, told.trips, told.since, told.wins) == (r.state, r.version, r.trips, r.since, r.wins)
            assert told.left == max(0, r.ends - self.now) and told.pin == pin
            assert told.pin_left == (r.pin_ends - self.now if pin else 0)
            first = self.now // 1000 - 3
            counts = [n for seconds in r.reports.values() for s, n in seconds.items() if first <= s <= first + 4]
            assert (told.volume, told.failed) == (sum(map(sum, counts)), sum(n[1] for n in counts))
            live = sum(ends > self.now for ends in r.permits.values())
            assert live + r.wins <= POLICY.probes or r.state != "half_open"


OWNERS = ("a", "b", "c")
LIMITS = {"requests": 7, "tokens": 1000}
LEASE_MS = 9000


class Owner:
    """A gateway as it should be: it uses no more than it may, and promises no less than it uses."""

    def __init__(self, name: str) -> None:
        self.name, self.seq = name, 0
        self.used = dict.fromkeys(LIMITS, 0)
        self.cap = dict.fromkeys(LIMITS, 0)
        self.waits = dict.fromkeys(LIMITS, 0)
        self.ready = 0


class Admissions(Machine):
    """Against the definition: what may be handed out of a limit, by what each living owner said last."""

    def __init__(self) -> None:
        super().__init__()
        self.records = AdmissionRecords(self.store, LEASE_MS / 1000)
        self.owners = [Owner(n) for n in OWNERS]
        self.serial = 0
        self.alive: dict[str, int] = {}  # owner → end of its lease
        self.said: dict[str, dict[str, tuple[int, int, int]]] = {k: {} for k in LIMITS}  # limit → owner → allotment, demand, head
        self.settled, self.fence, self.known = 0, 0, False

    @rule(who=st.integers(0, 2), limit=st.sampled_from(list(LIMITS)), waits=st.integers(0, 9), ready=st.integers(0, 4))
    def wants(self, who: int, limit: str, waits: int, ready: int) -> None:
        self.owners[who].waits[limit] = waits * (1 if limit == "requests" else 90)
        self.owners[who].ready = ready

    @rule(who=st.integers(0, 2), limit=st.sampled_from(list(LIMITS)))
    def admits(self, who: int, limit: str) -> None:
        """As many as it may, while its lease lasts."""
        o = self.owners[who]
        if self.alive.get(o.name, 0) > self.now:
            more = min(o.waits[limit], max(0, o.cap[limit] - o.used[limit]))
            o.used[limit] += more
            o.waits[limit] -= more

    @rule(who=st.integers(0, 2), limit=st.sampled_from(list(LIMITS)), share=st.integers(1, 3))
    def ends(self, who: int, limit: str, share: int) -> None:
        self.owners[who].used[limit] -= self.owners[who].used[limit] // share

    @rule(who=st.integers(0, 2), full=st.booleans(), only=st.sampled_from([*LIMITS, ""]))
    def says(self, who: int, full: bool, only: str) -> None:
        o = self.owners[who]
        o.seq += 1
        limits = [k for k in LIMITS if full or only in ("", k)]
        needs = []
        for k in limits:
            demand = o.used[k] + o.waits[k]
            o.cap[k] = max(o.used[k], min(o.cap[k], o.used[k] + o.ready))
            needs.append(Need(k, LIMITS[k], o.cap[k], demand, demand + o.ready, o.waits[k] and min(o.waits[k], 90)))
        grant = self.ask(self.records.state(o.name, o.seq, needs, full=full, owners=2))
        wanted = self.expected(o.name, needs, full)
        assert grant == wanted
        if grant is None:
            o.cap = dict(o.used)  # it is not registered: nothing more until it is
        else:
            o.cap.update(zip(limits, grant.caps, strict=True))

    @rule()
    def everybody_goes_on(self) -> None:
        """For longer than a lease: after that the store knows what everybody holds."""
        for _ in range(4):
            self.go(LEASE_MS // 3)
            for who in range(3):
                self.says(who, True, "")

    @rule(limit=st.sampled_from(list(LIMITS)), waits=st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def everybody_wants(self, limit: str, waits: list[int]) -> None:
        for who in range(3):
            self.wants(who, limit, waits[who], self.owners[who].ready)
            self.says(who, False, limit)
            self.admits(who, limit)

    @rule(who=st.integers(0, 2))
    def repeats_itself(self, who: int) -> None:
        """A statement that was overtaken, and arrives after all, changes nothing."""
        o = self.owners[who]
        if o.seq and self.alive.get(o.name, 0) > self.now:
            with pytest.raises(StoreError):
                self.ask(self.records.state(o.name, o.seq, [Need("requests", 7, 7, 7, 7, 1)], full=True, owners=2))

    @rule(who=st.integers(0, 2))
    def dies(self, who: int) -> None:
        """kill -9: a new process, with another name and nothing running."""
        self.serial += 1
        self.owners[who] = Owner(f"{OWNERS[who]}{self.serial}")

    @rule(who=st.integers(0, 2))
    def leaves(self, who: int) -> None:
        self.ask(self.records.leave(self.owners[who].name))
        self.alive.pop(self.owners[who].name, None)
        self.dies(who)

    @rule(lost=st.integers(0, 9))
    def the_store_forgets(self, lost: int) -> None:
        if lost == 0:
            self.forget()
            self.alive, self.said, self.settled, self.fence, self.known = {}, {k: {} for k in LIMITS}, 0, 0, False

    def expected(self, name: str, needs: list[Need], full: bool) -> Grant | None:
        """The definition in the words of ``admission.lua``'s head, without its way of reckoning."""
        living = {o for o, ends in self.alive.items() if ends > self.now}
        if not full and name not in living:
            return None
        if full and (not self.known or not living):
            self.settled, self.known = self.now + LEASE_MS, True
        living |= {name}
        self.alive[name] = self.now + LEASE_MS
        self.fence += 1
        caps = []
        for need in needs:
            said = self.said[need.limit]
            others = {o: v for o, v in said.items() if o in living and o != name}
            before = sum(v[0] for o, v in said.items() if o in living)
            free = need.at_most - sum(v[0] for v in others.values())
            wanted = need.demand + sum(v[1] for v in others.values())
            if self.now < self.settled:
                part = max(1, need.at_most // max(len(living), 2))
                part = min(need.want, part if need.keep else max(part, need.head))
            elif wanted <= need.at_most:
                part = min(need.want, need.demand + (need.at_most - wanted) // (2 * len(living)))
            else:
                all_of_them = {**others, name: (0, need.demand, need.head)}
                part = min(need.demand, self.fair(need.at_most, name, {o: v[1:] for o, v in all_of_them.items() if v[1]}))
            allotted = max(need.keep, min(part, free))
            had = said.get(name, (0, 0, 0))[0]
            if need.keep <= had:
                assert allotted + need.at_most - free <= max(need.at_most, before), "only what runs may stand above the limit"
            said[name] = (allotted, need.demand, need.head)
            self.said[need.limit] = {o: v for o, v in said.items() if o in living}
            caps.append(min(allotted, part))
        return Grant(self.fence, max(0, self.settled - self.now) / 1000, len(living), caps)

    def fair(self, limit: int, name: str, wants: dict[str, tuple[int, int]]) -> int:
        """Who wants least is served first, for as long as that is no more than an equal part of what is left."""
        left = limit
        while wants and (least := min(wants, key=lambda o: (wants[o][0], o))) and wants[least][0] * len(wants) <= left:
            left -= wants.pop(least)[0]
            if least == name:
                return 10**9  # all that it wants
        order = sorted(wants)
        turn = order[self.now // round(TURN_S * 1000) % len(order)]
        each = left // len(order)
        top = left - each * (len(order) - 1)
        head = min(wants[turn][1], left)
        if head > top and len(order) > 1:
            top, each = head, (left - head) // (len(order) - 1)
        return top if name == turn else each if name in wants else 0

    @invariant()
    def nobody_uses_what_is_not_its_own(self) -> None:
        for limit in LIMITS:
            living = {o for o, ends in self.alive.items() if ends > self.now}
            for o in self.owners:
                if o.name in living and o.name in self.said[limit]:
                    assert max(o.used[limit], o.cap[limit]) <= self.said[limit][o.name][0]


@pytest.fixture(scope="module", params=["redis", "embedded"])
def socket(request: pytest.FixtureRequest, program: Callable[[str], Path]) -> Iterator[str]:
    directory = Path(tempfile.mkdtemp(prefix="sentinel-"))
    wanted = request.param == "redis"
    binary = program("redis-server") if wanted else Path(_binary())
    argv, where = [str(binary), "--port", "0", "--unixsocket", "s", "--save", ""], str(directory / "s")
    server = subprocess.Popen(argv, cwd=directory, stdout=subprocess.DEVNULL)
    while True:
        try:
            Blocking(unix_socket_path=where).ping()
            break
        except (RedisError, OSError):
            time.sleep(0.01)
    yield where
    server.kill()
    server.wait()
    shutil.rmtree(directory)


def test_breakers_do_what_the_rules_say(socket: str) -> None:
    """After any sequence of reports, probes, pins, pauses and losses the script's records are those of the plain rules."""
    run_state_machine_as_test(type("On", (Breakers,), {"socket": socket}), settings=FEW)


@pytest.fixture
def breakers(socket: str) -> Iterator[Breakers]:
    """Records that no property has touched yet, by a clock that only the test turns."""
    machine: Breakers = type("On", (Breakers,), {"socket": socket})()
    yield machine
    machine.teardown()


@pytest.mark.parametrize("failed", [0, 1])
def test_a_record_forgets_reporters_that_fell_silent(breakers: Breakers, failed: int) -> None:
    """However many gateways have told of a worker in their time, its record holds those of the last two windows, whether its
    evidence is counted or nobody ever asks for it."""
    sizes = []
    for boot in range(200):
        breakers.go(500)
        if failed:
            told = breakers.ask(
                breakers.records.failed("w0", "p", NAMES[1:], f"h/{boot}", version=0, fine=9, failed=failed, draw=0.0)
            )
            assert told.state == "closed"
        else:
            breakers.ask(breakers.records.seen(f"h/{boot}", [("w0", 0, 1)]))
        sizes.append(breakers.raw.hlen(f"{{{breakers.prefix}}}:breaker:w0"))
    assert max(sizes) <= 2 * 4 * 2 + 2 and max(sizes[100:]) <= max(sizes[:100])


def test_a_flush_looks_through_few_records(breakers: Breakers) -> None:
    """When those of a fleet are due all at once, a flush takes some of them and the next flushes the rest: the store has others to
    serve meanwhile."""
    fleet = [f"w{n}" for n in range(100)]
    breakers.ask(breakers.records.seen("h/old", [(worker, 0, 1) for worker in fleet]))
    breakers.go(11_000)
    before, flushes = breakers.sweeps(), 0
    while any(breakers.raw.hexists(f"{{{breakers.prefix}}}:breaker:{worker}", "r:h/old") for worker in fleet):
        breakers.ask(breakers.records.seen("h/new", [(worker, 0, 1) for worker in fleet]))
        flushes += 1
        assert breakers.sweeps() - before <= 8 * flushes and flushes < 20


def test_a_record_is_swept_once_a_window(breakers: Breakers) -> None:
    """A flush looks through the whole record of a worker that works hardly ever: the rest of the time only into its own field."""
    before = breakers.sweeps()
    for _ in range(400):
        breakers.go(100)
        breakers.ask(breakers.records.seen("h/1", [("w0", 0, 1)]))
    assert 9 <= breakers.sweeps() - before <= 11


def test_a_probe_that_says_nothing_is_news_ten_times_a_second(breakers: Breakers) -> None:
    """Where a full pool gives every probe back at once, all gateways hear of it at first, and then no more than that; each probe
    is free for whoever asks."""
    breakers.breaks("w0", 0.0, "h1/a h2/a")
    breakers.is_over_its_time("w0", 0)
    breakers.permit("w0", "p1")
    before = breakers.raw.info("commandstats")["cmdstat_publish"]["calls"]
    heard = []
    for number in range(300):
        breakers.permit("w0", f"q{number}")
        breakers.ended("w0", f"q{number}", "neutral", 0.0)
        heard.append(breakers.raw.info("commandstats")["cmdstat_publish"]["calls"] - before)
        breakers.go(1)
    assert (heard[0], heard[-1]) == (1, 3)


def test_limits_are_shared_as_defined(socket: str) -> None:
    """Whatever owners want, hold, lose and repeat, each answer is the one of the definition, and nothing is lent twice."""
    run_state_machine_as_test(type("On", (Admissions,), {"socket": socket}), settings=FEW)
