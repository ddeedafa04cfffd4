"""The runner: isolation, cadence, descriptors, and when a cursor may move."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from probes import ProbeError
from sentinel.agent.runner import Runner
from sentinel.model import Component, Finding, Kind, Reading, Severity, Suspect


class P:
    """A probe that does what the test says."""

    def __init__(self, name: str, read: Callable[[], Any] = dict, interval_s: float = 0.02) -> None:
        self.name, self.interval_s = name, interval_s
        self._read = read
        self.reads = 0
        self.committed: list[Reading] = []
        self.closed = False

    async def read(self) -> Reading:
        self.reads += 1
        data = self._read()
        if asyncio.iscoroutine(data):
            data = await data
        return Reading(probe=self.name, node="n", at=1.0, data=data)

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        memory["seen"] = memory.get("seen", 0) + 1
        if reading.data.get("assess_fails"):
            raise ValueError("cannot judge")
        return [
            Finding(id=i, check="c", component=Component(node="n"), at=1.0, kind=Kind.EVENT) for i in reading.data.get("events", ())
        ]

    def commit(self, reading: Reading) -> None:
        self.committed.append(reading)

    async def close(self) -> None:
        self.closed = True


class Stream(P):
    """A probe on a socket: each read takes at most 10 bytes."""

    def __init__(self) -> None:
        super().__init__("stream", self._take, interval_s=60)
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.got = b""

    def fileno(self) -> int:
        return self.ours.fileno()

    def _take(self) -> dict[str, Any]:
        with suppress(BlockingIOError):
            self.got += self.ours.recv(10)
        return {}


class Sunk:
    """A sink that keeps what came."""

    def __init__(self, safe: bool = True) -> None:
        self.safe = safe
        self.findings: list[Finding] = []
        self.event = asyncio.Event()

    async def __call__(self, probe: str, reading: Reading | None, findings: list[Finding]) -> bool:
        self.findings += findings
        if findings:
            self.event.set()
        return self.safe


@asynccontextmanager
async def running(*probes: Any, sink: Any = None, **options: Any) -> AsyncIterator[Runner]:
    runner = Runner("n", probes, sink or Sunk(), clock=lambda: 100.0, **options)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.stop()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_failing_probe_costs_only_itself() -> None:
    """One that raises on every read shows as failed with its sentence; the other goes on and is committed."""

    def fail() -> dict[str, Any]:
        raise ProbeError("tried /x, but it is not there")

    bad, good = P("bad", fail), P("good")
    async with running(bad, good) as runner:
        await until(lambda: bad.reads >= 3 and good.reads >= 3)
        assert runner.status == {"bad": False, "good": True}
        assert runner.errors == {"bad": "tried /x, but it is not there"}
    assert not bad.committed
    assert good.committed
    assert bad.closed
    assert good.closed


async def test_every_probe_is_told_what_is_usual_here() -> None:
    """What the gpu probe knows of the kind of node reaches the others as hints, below what the site expects."""
    seen: list[Mapping[str, Any]] = []

    class Curious(P):
        def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
            seen.append(expected)
            return []

    known = {"gpu": {"kind": {"profile": ["H200"]}}}
    async with running(Curious("pcie"), expected={"ib_gbps": 200}, memories=known):
        await until(lambda: bool(seen))
    assert (seen[0]["ib_gbps"], seen[0]["hints"]["pcie_width"]) == (200, 16)
    assert "ib_gbps" not in seen[0]["hints"]


async def test_repeated_failure_is_one_finding_about_the_monitor() -> None:
    """After three failures in a row there is one state about the monitor, the same id each time, ended by the next success."""
    broken = True

    def read() -> dict[str, Any]:
        if broken:
            raise PermissionError(13, "Permission denied", "/dev/x")
        return {}

    sink, probe = Sunk(), P("p", read)
    async with running(probe, sink=sink):
        await until(lambda: probe.reads == 2)
        assert not sink.findings
        await until(lambda: len(sink.findings) >= 3)
        broken = False
        await until(lambda: not sink.findings[-1].present)
    assert len({f.id for f in sink.findings}) == 1
    first = sink.findings[0]
    assert (first.check, first.severity, first.suspect) == ("probe.failed", Severity.WARNING, Suspect.MONITOR)
    assert "Permission denied" in first.summary


async def test_a_judgement_that_raises_is_a_failure_too() -> None:
    """What assess raises is isolated like what read raises, and the cursor stays."""
    probe = P("p", lambda: {"assess_fails": True})
    async with running(probe) as runner:
        await until(lambda: probe.reads >= 2)
        assert runner.status == {"p": False}
    assert not probe.committed


async def test_one_reading_at_a_time_and_a_deadline() -> None:
    """A probe that does not come back is not read again meanwhile, is given up at its deadline, and is read again later."""
    hung = P("hung", lambda: asyncio.sleep(60))
    other = P("other")
    async with running(hung, other, deadline_s=0.2) as runner:
        await until(lambda: other.reads >= 4)
        assert hung.reads == 1
        assert runner.status["hung"] is None
        await until(lambda: hung.reads >= 2)
        assert "deadline" in runner.errors["hung"]


async def test_the_cursor_moves_only_when_all_is_safe() -> None:
    """commit is called when the sink says that the findings are safe, and not otherwise."""
    sink, probe = Sunk(safe=False), P("p", lambda: {"events": ["a"]})
    async with running(probe, sink=sink):
        await until(lambda: probe.reads >= 2)
        assert not probe.committed
        sink.safe = True
        await until(lambda: bool(probe.committed))


async def test_a_descriptor_wakes_its_probe() -> None:
    """What is written to a probe's descriptor is read long before its interval, in batches, to the last byte."""
    stream = Stream()
    async with running(stream):
        await until(lambda: stream.reads >= 1)
        stream.theirs.send(b"x" * 95)
        await until(lambda: len(stream.got) == 95)
        assert stream.reads >= 11


async def test_a_flood_does_not_starve_the_others() -> None:
    """While a descriptor never runs dry, other probes keep being read."""
    stream, other = Stream(), P("other")
    stream._read = dict  # never takes anything: the descriptor stays readable
    stream.theirs.send(b"x")
    async with running(stream, other):
        await until(lambda: stream.reads >= 50)
        before = other.reads
        await until(lambda: other.reads >= before + 5)


async def test_a_failing_descriptor_does_not_spin() -> None:
    """A probe that fails while its descriptor stays readable is asked again with a pause, not in a loop."""
    stream = Stream()

    def fail() -> dict[str, Any]:
        raise OSError(5, "Input/output error")

    stream._read = fail
    stream.theirs.send(b"x")
    async with running(stream):
        await until(lambda: stream.reads >= 1)
        await asyncio.sleep(0.2)
        assert stream.reads <= 3


async def test_a_plain_file_is_read_by_interval(tmp_path: Any) -> None:
    """A descriptor that epoll refuses (a regular file) leaves the probe to its interval."""
    fd = os.open(tmp_path / "f", os.O_CREAT | os.O_RDONLY)

    class OnFile(P):
        def fileno(self) -> int:
            return fd

    probe = OnFile("f")
    async with running(probe):
        await until(lambda: probe.reads >= 3)
    os.close(fd)


async def test_memory_is_the_probes_own_and_outlives_a_reload() -> None:
    """Each probe has one memory by name, handed on to the next runner."""
    memories: dict[str, dict[str, Any]] = {}
    async with running(P("a"), P("b"), memories=memories):
        await until(lambda: memories["a"].get("seen", 0) >= 2 and "seen" in memories["b"])
    seen = memories["a"]["seen"]
    again = P("a")
    async with running(again, memories=memories):
        await until(lambda: bool(again.reads))
    assert memories["a"]["seen"] > seen


async def test_the_wall_clock_set_back_does_not_stop_the_probes() -> None:
    """After rephase everything runs now, wherever the schedule had been moved to by a clock that was set."""
    probe = P("p", interval_s=3600)
    async with running(probe) as runner:
        await until(lambda: probe.reads == 1)
        runner.rephase()
        await until(lambda: probe.reads == 2)


async def test_the_configured_interval_wins() -> None:
    """An interval of the configuration overrides the probe's own."""
    probe = P("p", interval_s=3600)
    async with running(probe, intervals={"p": 0.02}):
        await until(lambda: probe.reads >= 3)


async def test_a_probe_that_would_end_the_agent_only_fails() -> None:
    """SystemExit, and the cancellation of something that it waited for, are a probe's failures like any other."""

    def leave() -> dict[str, Any]:
        raise SystemExit(3)

    async def wait() -> dict[str, Any]:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner
        return {}

    one, two, good = P("one", leave), P("two", wait), P("good")
    async with running(one, two, good) as runner:
        await until(lambda: min(p.reads for p in (one, two, good)) >= 3)
        assert runner.status == {"one": False, "two": False, "good": True}
        assert runner.errors["one"] == "it tried to end the agent"


async def test_stopping_is_no_error(caplog: Any) -> None:
    """Readings that are cut off by a stop or a reload leave no error in the log, whenever it comes."""
    for step in range(12):
        slow = P("slow", lambda: asyncio.sleep(0.01, {}), interval_s=0.003)
        async with running(slow, P("quick", interval_s=0.001)):
            await asyncio.sleep(0.001 * step)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []
