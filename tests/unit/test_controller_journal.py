"""The journal: what was decided can be read back, however the run that wrote it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.controller.journal import FILES, Entry, Journal, read_journal
from sentinel.decide.state.events import Deroute, Record, Tick
from sentinel.model import Drain, Response


def tick(n: int) -> Entry:
    return Entry(event=Tick(id=f"ev-1-{n}", at=float(n)))


def full() -> Entry:
    drain = Drain(id="d1", worker="w", response=Response.DRAIN, reason="ada: test", requested_at=1.0)
    return Entry(
        event=Tick(id="ev-1-0", at=0.0),
        instructions=(
            Record(id="drain/d1", cause="ev-1-0", kind="drain", key="d1", value=drain),
            Deroute(id="d1/deroute/0", cause="ev-1-0", lane="worker:w", worker="w"),
        ),
    )


class TestJournal:
    def test_it_reads_back_equal(self, tmp_path: Path) -> None:
        """Events, instructions and an error come back as the values they were, in order."""
        entries = [full(), tick(1), Entry(event=Tick(id="x", at=2.0), error="KeyError: 'a'")]
        journal = Journal(tmp_path, 1 << 20)
        journal.write(entries[:1])
        journal.write(entries[1:])
        journal.close()
        assert list(read_journal(tmp_path)) == entries

    def test_it_is_bounded_and_gives_up_the_oldest(self, tmp_path: Path) -> None:
        """However much is written, the files stay within the bound and hold the newest entries without a hole."""
        bound = 8 * 1024
        journal = Journal(tmp_path, bound)
        for n in range(2000):
            journal.write([tick(n)])
        journal.close()
        sizes = [p.stat().st_size for p in tmp_path.iterdir()]
        assert len(sizes) <= FILES
        assert sum(sizes) <= bound + 200 * FILES
        numbers = [int(e.event.at) for e in read_journal(tmp_path)]
        assert numbers == list(range(numbers[0], 2000))

    def test_a_line_cut_short_by_a_crash_is_left_out(self, tmp_path: Path) -> None:
        """The last line of a file may be half; the next run goes on in another file and everything else is read."""
        first = Journal(tmp_path, 1 << 20)
        first.write([tick(1), tick(2)])
        first.close()
        file = next(tmp_path.iterdir())
        file.write_bytes(file.read_bytes()[:-9])
        second = Journal(tmp_path, 1 << 20)
        second.write([tick(3)])
        second.close()
        assert [e.event.at for e in read_journal(tmp_path)] == [1.0, 3.0]

    def test_a_hole_is_not_passed_over(self, tmp_path: Path) -> None:
        """A broken line in the middle is an error with file and line: what follows would replay to something else."""
        journal = Journal(tmp_path, 1 << 20)
        journal.write([tick(1)])
        journal.close()
        file = next(tmp_path.iterdir())
        file.write_bytes(b"{garbage\n" + file.read_bytes())
        with pytest.raises(ValueError, match="line 1"):
            list(read_journal(tmp_path))

    def test_a_disk_that_refuses_does_not_stop_decisions(self, tmp_path: Path) -> None:
        """What cannot be written is counted; when the disk is back, the journal goes on."""
        blocked = tmp_path / "journal"
        blocked.write_text("a file where a directory should be")
        journal = Journal(blocked, 1 << 20)
        journal.write([tick(1), tick(2)])
        assert journal.errors == 2
        blocked.unlink()
        journal.write([tick(3)])
        journal.close()
        assert [e.event.at for e in read_journal(blocked)] == [3.0]

    def test_two_controllers_in_one_directory_share_no_file(self, tmp_path: Path) -> None:
        """A misconfigured pair on one disk still writes whole lines into files of their own."""
        a, b = Journal(tmp_path, 1 << 20), Journal(tmp_path, 1 << 20)
        for n in range(20):
            a.write([tick(n)])
            b.write([tick(100 + n)])
        a.close()
        b.close()
        assert sorted(e.event.at for e in read_journal(tmp_path)) == [*range(20), *range(100, 120)]

    def test_nothing_to_read_is_nothing(self, tmp_path: Path) -> None:
        """A directory that is not there has no entries."""
        assert list(read_journal(tmp_path / "none")) == []
