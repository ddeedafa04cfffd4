"""The spool against a model of what a disk, a crash and a controller can do to it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sentinel.agent.spool import Spool
from sentinel.model import Component, Finding, Kind, Severity


class SpoolMachine(RuleBasedStateMachine):
    """Any interleaving of append, write, acknowledge, failing disk and crash."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "findings.spool"
        self.made = 0
        self.unacked: list[str] = []  # what must still be sent, in order
        self.unwritten: set[str] = set()  # added since the last write that succeeded: a crash may lose them
        self.unwritten_acks: list[str] = []  # acknowledged since then: a crash may bring them back
        self.broken = False
        self.spool = self.open()

    def open(self) -> Spool:
        def fsync(_: int) -> None:
            if self.broken:
                raise OSError(5, "Input/output error")

        return Spool(self.path, 1 << 20, fsync=fsync)

    def teardown(self) -> None:
        self.spool.close()
        self.folder.cleanup()

    @rule(severities=st.lists(st.sampled_from(list(Severity)), min_size=1, max_size=4), event=st.booleans())
    def add(self, severities: list[Severity], event: bool) -> None:
        findings = []
        for severity in severities:
            self.made += 1
            kind = Kind.EVENT if event else Kind.STATE
            findings.append(
                Finding(id=f"f{self.made}", check="c", component=Component(node="n"), at=1.0, severity=severity, kind=kind)
            )
        self.spool.add(findings)
        self.unacked += [f.id for f in findings]
        self.unwritten |= {f.id for f in findings}

    @rule()
    def write(self) -> None:
        try:
            self.spool.write()
        except OSError:
            return
        self.unwritten.clear()
        self.unwritten_acks.clear()

    @rule(broken=st.booleans())
    def disk(self, broken: bool) -> None:
        self.broken = broken

    @rule(count=st.integers(1, 5))
    def acknowledge(self, count: int) -> None:
        batch = self.spool.batch(count)
        sent = [f.id for f in batch.findings]
        assert sent == self.unacked[: len(sent)]
        if sent:
            self.spool.ack(batch.upto)
            del self.unacked[: len(sent)]
            self.unwritten_acks += sent

    @rule(torn=st.integers(0, 40))
    def crash(self, torn: int) -> None:
        """SIGKILL: memory is gone, the file stays; perhaps with the beginning of a record that was being written."""
        self.spool.close()
        if torn and self.path.exists():
            with self.path.open("ab") as file:
                file.write(b'0badc0de f99999 {"id":"half a record", "check":'[:torn])
        self.broken = False
        self.spool = self.open()
        ids = [f.id for f in self.spool.batch(10_000).findings]
        assert len(ids) == len(set(ids)), "nothing is repeated within one run"
        kept = [i for i in self.unacked if i not in self.unwritten]
        assert [i for i in ids if i in set(kept)] == kept, "everything written and unacknowledged is there, in order"
        extra = set(ids) - set(kept)
        assert extra <= self.unwritten | set(self.unwritten_acks), "only what was not surely acknowledged comes again"
        self.unacked = ids
        self.unwritten.clear()
        self.unwritten_acks.clear()

    @invariant()
    def counted(self) -> None:
        assert len(self.spool) == len(self.unacked)
        assert (self.spool.bytes == 0) == (not self.unacked)


TestSpoolMachine = SpoolMachine.TestCase
TestSpoolMachine.__doc__ = "Nothing unacknowledged is lost and only the unacknowledged is repeated, whatever happens in between."
TestSpoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
