"""The spool's bounds and its file, one property at a time."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.agent.spool import Flusher, Spool
from sentinel.model import Component, Finding, Kind, Severity


def finding(name: str, severity: Severity = Severity.WARNING, kind: Kind = Kind.STATE, pad: int = 0) -> Finding:
    return Finding(id=name, check="c", component=Component(node="n"), at=1.0, severity=severity, kind=kind, summary="x" * pad)


def ids(spool: Spool) -> list[str]:
    return [f.id for f in spool.batch(100_000, 1 << 30).findings]


def test_a_half_written_record_is_skipped_and_counted(tmp_path: Path) -> None:
    """A tail cut anywhere costs that one record, is counted, and what is added afterwards is read back."""
    path = tmp_path / "s"
    spool = Spool(path, 1 << 20)
    spool.add([finding("a")])
    spool.write()
    first = path.stat().st_size + 1  # with the newline that the next one begins with
    spool.add([finding("b")])
    spool.write()
    whole = path.read_bytes()
    for cut in range(first + 1, len(whole)):
        path.write_bytes(whole[:cut])
        again = Spool(path, 1 << 20)
        assert (ids(again), again.damaged) == (["a"], 1)
    again.add([finding("c")])
    again.write()
    assert ids(Spool(path, 1 << 20)) == ["a", "c"]


def test_damage_in_the_middle_costs_one_record(tmp_path: Path) -> None:
    """A flipped byte fails its record's checksum and no other's."""
    path = tmp_path / "s"
    spool = Spool(path, 1 << 20)
    spool.add([finding(n) for n in "abc"])
    spool.write()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    again = Spool(path, 1 << 20)
    assert (ids(again), again.damaged) == (["a", "c"], 1)


@pytest.mark.parametrize(
    "harm",
    [
        lambda d, i: d[:i] + d[i + 1 :],
        lambda d, i: d[:i] + bytes([d[i] ^ 0x41]) + d[i + 1 :],
        lambda d, i: d[:i] + b"\n" + d[i:],
        lambda d, i: d[:i] + b"\0" * 500 + d[i:],
    ],
    ids=["a byte lost", "a byte changed", "a newline added", "zeros added"],
)
def test_damage_anywhere_costs_at_most_one_record(tmp_path: Path, harm: Callable[[bytes, int], bytes]) -> None:
    """Wherever one place of the file is damaged, between two records too, every other record is read back, in order."""
    path = tmp_path / "s"
    spool = Spool(path, 1 << 20)
    spool.add([finding(n) for n in "abc"])
    spool.ack(1)
    spool.write()
    spool.add([finding("d")])
    spool.write()
    good = path.read_bytes()
    everything = ids(Spool(path, 1 << 20))
    for place in range(len(good)):
        path.write_bytes(harm(good, place))
        left = ids(Spool(path, 1 << 20))
        assert len(set(everything) - set(left)) <= 1, place
        assert [n for n in left if n in everything] == [n for n in everything if n in left]


def test_binary_garbage_is_counted_not_fatal(tmp_path: Path) -> None:
    """A file that is no spool at all opens empty, with its damage counted."""
    path = tmp_path / "s"
    path.write_bytes(os.urandom(4096) + b"\n\n\n")
    spool = Spool(path, 1 << 20)
    assert ids(spool) == []
    assert spool.damaged > 0


def test_the_bound_drops_info_first_and_counts(tmp_path: Path) -> None:
    """Past the bound the oldest info goes, never a fatal one while info is left, and every drop is counted."""
    spool = Spool(tmp_path / "s", 40_000)
    spool.add([finding("fatal-first", Severity.FATAL, pad=500)])
    for i in range(200):
        spool.add([finding(f"info{i}", Severity.INFO, pad=500)])
        spool.add([finding(f"warning{i}", pad=10)] if i % 20 == 0 else [])
        spool.write()
    left = ids(spool)
    assert left[0] == "fatal-first"
    assert sum(i.startswith("warning") for i in left) == 10
    assert spool.dropped["info"] == 200 - sum(i.startswith("info") for i in left) > 0
    assert spool.dropped["warning"] == spool.dropped["fatal"] == 0
    assert "info199" in left, "the newest stays"
    assert (tmp_path / "s").stat().st_size <= 40_000
    assert ids(Spool(tmp_path / "s", 40_000)) == left


def test_the_file_stays_small_while_all_is_acknowledged(tmp_path: Path) -> None:
    """A spool that is emptied again and again does not grow, and fatal ones survive even when only they are left."""
    spool = Spool(tmp_path / "s", 20_000)
    for i in range(500):
        spool.add([finding(f"f{i}", Severity.FATAL, pad=200)])
        spool.ack(spool.batch().upto)
        spool.write()
    assert (tmp_path / "s").stat().st_size < 20_000
    assert spool.dropped == {"info": 0, "warning": 0, "fatal": 0}


def test_weight_is_synced_and_the_rest_is_not(tmp_path: Path) -> None:
    """A fatal finding and an event reach the platter before write returns; a mere transition does not pay for that."""
    synced: list[int] = []
    spool = Spool(tmp_path / "s", 1 << 20, fsync=synced.append)
    spool.add([finding("w")])
    spool.write()
    assert not synced
    spool.add([finding("f", Severity.FATAL)])
    spool.write()
    spool.add([finding("e", Severity.INFO, Kind.EVENT)])
    spool.write()
    assert len(synced) == 2


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """What could not be written stays in memory and is written once there is room."""
    full = True

    def fsync(_: int) -> None:
        if full:
            raise OSError(28, "No space left on device")

    spool = Spool(tmp_path / "s", 1 << 20, fsync=fsync)
    spool.add([finding("a", Severity.FATAL)])
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            spool.write()
    full = False
    spool.write()
    assert ids(Spool(tmp_path / "s", 1 << 20)) == ["a"]


def test_set_aside_keeps_a_copy(tmp_path: Path) -> None:
    """What the controller never takes leaves the queue, is counted, and can still be read in a file beside it."""
    spool = Spool(tmp_path / "s", 1 << 20)
    spool.add([finding("poison"), finding("good")])
    spool.set_aside(spool.batch(1).upto)
    spool.write()
    assert ids(spool) == ["good"]
    assert spool.dropped["warning"] == 1
    assert b"poison" in (tmp_path / "s.refused").read_bytes()


async def test_a_stuck_disk_does_not_stop_the_loop(tmp_path: Path) -> None:
    """While a write hangs, findings are still taken in and can be sent; the waiter is told once the disk answers."""
    answer = threading.Event()
    spool = Spool(tmp_path / "s", 1 << 20, fsync=lambda _: answer.wait(10) and None)
    flusher = Flusher(spool)
    spool.add([finding("a", Severity.FATAL)])
    first = flusher.flush()
    await asyncio.sleep(0.05)
    spool.add([finding("b", Severity.FATAL)])
    second = flusher.flush()
    assert not first.done()
    assert ids(spool) == ["a", "b"]
    answer.set()
    await asyncio.wait_for(asyncio.gather(first, second), 5)
    assert ids(Spool(tmp_path / "s", 1 << 20)) == ["a", "b"]
    flusher.close()


async def test_a_failed_write_reaches_every_waiter(tmp_path: Path) -> None:
    """Whoever waits for the disk learns that it failed, in words, and the next write that succeeds clears it."""
    broken = True

    def fsync(_: int) -> None:
        if broken:
            raise OSError(5, "Input/output error")

    flusher = Flusher(Spool(tmp_path / "s", 1 << 20, fsync=fsync))
    flusher._spool.add([finding("a", Severity.FATAL)])
    with pytest.raises(OSError, match="Input/output"):
        await flusher.flush()
    assert flusher.error is not None
    assert "Input/output" in flusher.error
    broken = False
    await flusher.flush()
    assert flusher.error is None
    flusher.close()
