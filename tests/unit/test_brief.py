"""What the journal keeps of a route table."""

from __future__ import annotations

import msgspec

from sentinel.decide.state.brief import Brief
from sentinel.decide.state.events import Record, Restored, Tick
from sentinel.model import Action, Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.testing.decisions import World, rack

ROWS = tuple(RouteEntry(worker=f"w{n}", url=f"http://w{n}", role=Role.DECODE, state=WorkerState.ACTIVE) for n in range(5))


def table(version: int, *pools: RoutePool) -> Record:
    return Record(id="routes/routes", cause="c", kind="routes", key="routes", value=Routes(version=version, pools=pools))


def kept(brief: Brief, record: Record) -> tuple[RoutePool, ...]:
    (n,) = brief.of(Tick(id="t", at=1.0), [record])
    assert isinstance(n, Record)
    assert isinstance(n.value, Routes)
    assert isinstance(record.value, Routes)
    assert n.value.version == record.value.version
    return n.value.pools


def test_the_first_is_whole_and_the_next_are_what_changed() -> None:
    """A row that changed, or a weight, and pools in which nothing did not at all; whole again for another fleet or leader."""
    brief, a, b = Brief(), RoutePool(pool="a", weight=1.0, workers=ROWS), RoutePool(pool="b", weight=0.0, workers=ROWS)
    assert kept(brief, table(1, a, b)) == (a, b)
    out = msgspec.structs.replace(ROWS[2], state=WorkerState.OUT)
    rows = (*ROWS[:2], out, *ROWS[3:])
    assert kept(brief, table(2, msgspec.structs.replace(a, workers=rows), b)) == (msgspec.structs.replace(a, workers=(out,)),)
    half = RoutePool(pool="a", weight=0.5, workers=rows)
    assert kept(brief, table(3, half, b)) == (msgspec.structs.replace(half, workers=()),)
    fewer = msgspec.structs.replace(half, workers=rows[1:])
    assert kept(brief, table(4, fewer, b)) == (fewer,)
    other = msgspec.structs.replace(half, workers=(*rows[2:], rows[0]))
    assert kept(brief, table(5, other, b)) == (other,)
    brief.of(Restored(id="r", at=2.0, epoch=2), [])
    assert kept(brief, table(6, other, b)) == (other, b)


def test_rows_read_back_are_the_same_as_rows_that_never_left() -> None:
    """What counts is what a row says, so that a recording and its replay come out alike."""
    brief, a = Brief(), RoutePool(pool="a", weight=1.0, workers=ROWS)
    kept(brief, table(1, a))
    again = msgspec.json.decode(msgspec.json.encode(a), type=RoutePool)
    assert kept(brief, table(2, again)) == ()


def test_what_the_decider_says_has_changed_is_what_has() -> None:
    """Its word gives what comparing the tables gives, through evictions, returns, weights and another fleet."""
    world = World(rack(decoders=6, standby=2))
    for node in world.fleet.nodes[:3]:
        world.report(world.xid(79, node, action=Action.REBOOT_NODE))
        world.settle()
    world.ask("drain", "decode-4")
    world.settle()
    world.ask("undrain", "decode-4")
    world.pass_time(30.0)
    world.reload(rack(decoders=5, standby=2))
    world.pass_time(5.0)
    world.ask("drain", "decode-2")
    world.settle()
    by_word, by_comparing, said = Brief(), Brief(), 0
    for event, instructions in world.journal:
        bare = [msgspec.structs.replace(n, news=None) if isinstance(n, Record) else n for n in instructions]
        said += bare != list(instructions)
        assert by_word.of(event, instructions) == by_comparing.of(event, bare)
    assert said > 5
