"""The kernel log's Xids compared with NVML's: what is missed on either side, and all the times when nothing is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probes.crosscheck import DELIVERED, KINDS, PENDING, compare
from sentinel.agent.assembly import Agent
from sentinel.agent.comparing import Comparing
from sentinel.config import AgentSettings
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Action, Component, Finding, Kind, Reading, Severity, Suspect

BOOTED = 1_700_000_000.0
PCI = "0000:00:06.0"
WINDOW_S, KEEP_S, AGAIN_S = 60.0, 300.0, 3600.0  # as shipped


class Node:
    """One node's two readings, at seconds since its boot. The log is read and its GPU listened to from second 1000 on."""

    def __init__(self, *, listening: float | None = 1000.0) -> None:
        self.memory: dict[str, Any] = {}
        self.listening = {} if listening is None else {PCI: listening}
        self.heard: dict[tuple[str, int], dict[str, Any]] = {}
        self.seq = 0
        self.found: list[Finding] = []
        self.log(1000)
        self.gpu(1000)

    def reading(self, probe: str, now: float, data: dict[str, Any], *, boot: str = "b", shift: float = 0.0) -> list[Finding]:
        made = Reading(probe=probe, node="n", at=BOOTED + now + shift, boot_id=boot, data=data)
        found = compare(made, self.memory)
        self.memory = json.loads(json.dumps(self.memory))  # plain JSON values, always
        self.found += found
        return found

    def log(self, now: float, *lines: tuple[float, str], shift: float = 0.0, boot: str = "b", **data: Any) -> list[Finding]:
        records = []
        for at, text in lines:
            self.seq += 1
            records.append([4, self.seq, int(at * 1e6), text])
        held = {"records": records, "repeats": {}, "lost": 0, "overruns": 0, "skipped": {}, "more": False}
        return self.reading("kernel_log", now, {**held, "booted_at": BOOTED + shift, **data}, shift=shift, boot=boot)

    def gpu(self, now: float, *events: tuple[float, int], since: float = 1000.0, shift: float = 0.0) -> list[Finding]:
        for at, xid in events:
            told = self.heard.setdefault((PCI, xid), {"pci": PCI, "xid": xid, "count": 0})
            told |= {"count": told["count"] + 1, "since": since, "after": at - 1, "at": at}
        heard = [dict(h) for h in self.heard.values()]
        data = {"xid_events": {"now": now, "listening": dict(self.listening), "heard": heard}}
        return self.reading("gpu", now, data, shift=shift)

    def run(self, start: float, end: float) -> list[Finding]:
        """Both probes look every five seconds and there is nothing new."""
        found, now = [], start
        while now <= end:
            found += [*self.log(now), *self.gpu(now + 1)]
            now += 5
        return found


def xid(code: int, pci: str = "0000:00:06") -> str:
    return f"NVRM: Xid (PCI:{pci}): {code}, pid=7, name=python, something"


def test_a_number_and_its_line_are_one_fault_and_nothing_is_said() -> None:
    """In either order, up to a minute apart, whichever spelling of the address: no finding."""
    for line, number in ((1200.0, 1200.4), (1200.4, 1200.0), (1259.0, 1200.0), (1200.0, 1259.0)):
        for lines_first in (True, False):
            node = Node()
            for probe in (0, 1) if lines_first else (1, 0):
                if probe == 0:
                    node.log(1262, (line, xid(31)))
                else:
                    node.gpu(1262, (number, 31))
            assert node.run(1265, 1600) == []


def test_a_number_without_a_line_says_that_the_log_is_not_heard() -> None:
    """After a minute without its line: one warning about the monitor, with what the code means, never about hardware."""
    node = Node()
    node.gpu(1201, (1200.0, 79))
    assert node.run(1205, 1259) == []
    [told] = node.run(1260, 1600)
    assert (told.check, told.severity, told.action) == ("kernel_log.missed_xid", Severity.WARNING, Action.FIX_MONITOR)
    assert (told.suspect, told.kind, str(told.component)) == (Suspect.MONITOR, Kind.EVENT, "n/kernel_log")
    assert told.facts == {"xid": 79, "gpu": PCI}
    assert told.at == BOOTED + 1200
    assert "fallen off the bus" in told.summary
    rule = default_policy().rule_for(told)
    assert rule is not None
    assert (rule.fault, rule.response.value) == ("monitor", "none")


def test_a_number_that_no_catalogue_knows_is_only_on_record() -> None:
    """An Xid 999 has been seen as an event and in no document: info, and nothing to mend."""
    node = Node()
    node.gpu(1201, (1200.0, 999))
    [told] = node.run(1205, 1600)
    assert (told.severity, told.action) == (Severity.INFO, Action.NONE)


def test_a_line_without_a_number_is_on_record_for_codes_that_nvml_delivers() -> None:
    """Of a GPU that was listened to all the while, and of no other code."""
    node = Node()
    node.log(1201, (1200.0, xid(31)), (1200.0, xid(154)), (1200.0, xid(31, "0000:00:07")))
    [told] = node.run(1205, 1600)
    assert (told.check, told.suspect) == ("nvml.untold_xid", Suspect.MONITOR)
    assert (told.severity, told.action) == (Severity.INFO, Action.NONE)
    assert told.facts == {"xid": 31, "gpu": PCI}
    assert 154 not in DELIVERED


@pytest.mark.parametrize("code", [31, 43, 79])
def test_a_line_of_another_gpu_or_code_answers_for_nothing(code: int) -> None:
    """By GPU and code: what another GPU said, or this one of another fault, is no answer."""
    node = Node()
    node.gpu(1201, (1200.0, code))
    node.log(1202, (1200.0, xid(code, "0000:00:07")), (1200.0, xid(62)))
    assert [f.check for f in node.run(1205, 1300)] == ["kernel_log.missed_xid"]


@pytest.mark.parametrize("line", [
    "NVRM: Xid (00000000_0006): 31, pid=7", "NVRM: Xid (PCI:0000:00:06): ",
])  # fmt: skip
def test_a_line_that_is_not_whole_may_be_the_one(line: str) -> None:
    """Without an address, or broken off before its number, it may be the number's: doubt is not a miss."""
    node = Node()
    node.gpu(1201, (1200.0, 31))
    node.log(1202, (1200.0, line))
    assert node.run(1205, 1600) == []


def test_a_gpu_that_fell_off_the_bus_in_words_answers_for_79() -> None:
    """The driver says it with and without the number."""
    node = Node()
    node.gpu(1201, (1200.0, 79))
    node.log(1202, (1200.0, "NVRM: GPU 0000:00:06.0: GPU has fallen off the bus."))
    assert node.run(1205, 1600) == []


def test_nothing_is_missed_in_the_first_minute() -> None:
    """Neither after the log's reader began, nor after the listener did."""
    node = Node()
    node.gpu(1031, (1030.0, 31))  # the log is read since 1000
    node.gpu(1211, (1210.0, 43), since=1180.0)
    node.log(1031, (1030.0, xid(13)))  # listened to since 1000
    assert node.run(1215, 1600) == []
    node = Node(listening=1180.0)
    node.log(1201, (1200.0, xid(31)))
    assert node.run(1205, 1600) == []


def test_while_the_log_cannot_be_read_nothing_is_judged_and_late_lines_answer() -> None:
    """The probe's own failure is told by itself; when it reads again, old lines answer old numbers."""
    node = Node()
    node.gpu(1201, (1200.0, 31))
    for now in range(1205, 1900, 5):
        assert node.gpu(now) == []
    assert node.log(1900, (1200.0, xid(31)), more=True) == []
    assert node.run(1905, 2300) == []


def test_a_batch_that_is_not_the_last_judges_nothing() -> None:
    """In a flood the line may still be behind."""
    node = Node()
    node.gpu(1201, (1200.0, 31))
    assert node.log(1290, more=True) == []
    assert node.log(1291, (1200.0, xid(31))) == []
    assert node.run(1295, 1600) == []


@pytest.mark.parametrize("loss", [{"lost": 3}, {"overruns": 1}, {"skipped": {"malformed": 1}}, {"skipped": {"oversized": 1}}])
def test_what_the_log_lost_is_not_missed_twice(loss: dict[str, Any]) -> None:
    """Records that were lost have a finding; the number whose line may be among them has none. A later one has."""
    node = Node()
    node.gpu(1201, (1200.0, 31))
    node.log(1203, **loss)
    assert node.run(1205, 1400) == []
    node.gpu(1401, (1400.0, 31))
    assert [f.check for f in node.run(1405, 1600)] == ["kernel_log.missed_xid"]


def test_lines_of_user_space_answer_for_nothing() -> None:
    """They are counted and never reach the comparison, so a forged line hides no deaf log."""
    node = Node()
    node.gpu(1201, (1200.0, 31))
    node.log(1202, skipped={"user_space": 5})
    assert [f.check for f in node.run(1205, 1600)] == ["kernel_log.missed_xid"]


def test_a_gpu_that_is_not_listened_to_is_not_asked() -> None:
    """Not supported, lost, or a listener that was made anew since: a line alone says nothing."""
    node = Node(listening=None)
    node.log(1201, (1200.0, xid(31)))
    assert node.run(1205, 1205 + 2 * KEEP_S) == []
    assert node.memory["lines_missing_numbers"] == []
    node = Node()
    node.log(1201, (1200.0, xid(31)))
    node.listening = {PCI: 1230.0}
    assert node.run(1205, 1600) == []


def test_a_reading_without_a_listener_is_not_measured() -> None:
    """An older recording, or a driver that is no child of ours: nothing is compared and nothing grows."""
    node = Node()
    node.log(1201, (1200.0, xid(31)))
    for now in range(1205, 1600, 5):
        assert node.reading("gpu", now, {"gpus": []}) == []
        assert node.log(now) == []


def test_a_wall_clock_that_is_set_misses_nothing() -> None:
    """Both sides count from boot: an hour forth or back between line and number is no hour."""
    for shift in (3600.0, -3600.0):
        node = Node()
        node.log(1201, (1200.0, xid(31)))
        node.gpu(1202, (1200.5, 31), shift=shift)
        for now in range(1205, 1400, 5):
            assert node.log(now, shift=shift) == []
            assert node.gpu(now, shift=shift) == []


def test_an_event_that_waited_in_a_queue_may_be_as_old_as_the_queue() -> None:
    """Heard late in a storm, it happened at any time since nothing was waiting: a line of that time answers."""
    node = Node()
    node.log(1401, (1300.0, xid(31)))
    node.heard[PCI, 31] = {"pci": PCI, "xid": 31, "count": 1, "since": 1000.0, "after": 1299.0, "at": 1400.0}
    node.gpu(1402)
    assert node.run(1405, 1800) == []


def test_repeats_are_presence_and_the_same_is_said_once_an_hour() -> None:
    """A thousand events and one line are no miss; a driver that never tells of a code is on record once an hour."""
    node = Node()
    node.log(1201, (1200.0, xid(31)))
    node.gpu(1202, *[(1200.0 + n / 1000, 31) for n in range(1000)])
    assert node.run(1205, 1500) == []
    node = Node()
    for at in range(2000, 2000 + 2 * int(AGAIN_S), 300):
        node.log(at, (at, xid(13)))
        node.run(at + 5, at + 100)
    assert len(node.found) == 2
    assert len({f.id for f in node.found}) == 2


def test_counts_that_begin_anew_are_new() -> None:
    """After an agent's restart the record starts at one again; that is an event, not the old one."""
    node = Node()
    node.gpu(1201, (1200.0, 31), (1200.0, 31))
    node.log(1202, (1200.0, xid(31)))
    node.run(1205, 1500)
    node.heard.clear()
    node.gpu(1601, (1600.0, 31))
    assert [f.check for f in node.run(1605, 1800)] == ["kernel_log.missed_xid"]


def test_another_boot_begins_with_nothing() -> None:
    """Seconds since another boot mean nothing here."""
    node = Node()
    node.gpu(1201, (1200.0, 31))
    assert node.log(5000, boot="other") == []


def test_a_flood_of_distinct_lines_and_numbers_is_bounded() -> None:
    """Two thousand kinds, four times what is kept: memory stays within its bounds."""
    node = Node()
    for n in range(2_000):
        node.log(2000 + n / 1000, (2000.0, xid(31, f"{n:04x}:00:06")))
    for n in range(300):
        one = {"pci": PCI, "count": 1, "since": 1.0, "after": 2010.0, "at": 2011.0}
        node.heard = {(PCI, c): {**one, "xid": c} for c in range(n, n + 256)}
        node.gpu(2012)
    assert len(node.memory["lines"]) <= KINDS
    assert len(node.memory["numbers"]) <= KINDS
    assert len(node.memory["lines_missing_numbers"]) <= PENDING
    assert len(node.memory["numbers_missing_lines"]) <= PENDING
    assert len(node.memory["counts"]) <= 256
    node.run(2100, 2100 + KEEP_S + WINDOW_S)
    assert len(node.found) <= 2 * KINDS


def test_a_broken_reading_costs_only_the_comparison() -> None:
    """A site's own probe of that name may say anything: no exception leaves the comparison, and it goes on."""
    comparing = Comparing()
    for data in ({"xid_events": 7}, {"xid_events": {"now": "x"}}, {"booted_at": "y"}, {"booted_at": 1.0, "records": [3]}):
        for probe in ("gpu", "kernel_log", "host"):
            assert comparing(Reading(probe=probe, node="n", at=1.0, data=data)) == []


async def test_the_agent_compares_what_passes_by_and_loses_nothing_for_it(tmp_path: Path) -> None:
    """Both probes' readings meet in the agent: the miss goes to the controller beside what the probes themselves found."""
    (tmp_path / "token").write_text("t")
    (tmp_path / "token").chmod(0o600)
    settings = AgentSettings(
        node="n", controllers=("http://127.0.0.1:1",), token_file=tmp_path / "token", state_dir=tmp_path / "state", listen=""
    )
    node = Node()
    own = Finding(id="own", check="gpu.count", component=Component(node="n"), at=BOOTED, severity=Severity.WARNING)
    agent = Agent(settings, [], clock=lambda: BOOTED + 1300)
    await agent.start()
    try:
        node.reading = lambda probe, now, data, **_: readings.append(Reading(probe=probe, node="n", at=BOOTED + now, data=data))  # type: ignore[method-assign,assignment,return-value]
        readings: list[Reading] = []
        node.log(1000)
        node.gpu(1201, (1200.0, 79))
        node.log(1270)
        for reading in readings:
            await agent.take(reading.probe, reading, [own] if reading.probe == "gpu" else [])
        told = [f.check for f in agent.spool.batch(count=100, size=1 << 20).findings]
    finally:
        await agent.stop()
    assert told == ["gpu.count", "kernel_log.missed_xid"]
