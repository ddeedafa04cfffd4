"""A newer agent, a hostile one, and a careless operator against a running controller: nothing stops and nothing grows."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from sentinel.controller import bounds
from sentinel.controller.ingest import FAULTS
from sentinel.controller.ledger import Ledger
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Action, Finding, Fleet, Kind, Pool, Severity, Suspect, Worker, WorkerState, gpu_component
from sentinel.testing.control import Caller, RedisServer, running_controller, until
from sentinel.testing.decisions import PCIS, rack

FINDING = {"id": "t03:1", "check": "gpu.odd", "component": {"node": "t03", "device": f"gpu@{PCIS[0]}"}, "at": 1.0}


def body(*findings: Any, **fields: Any) -> bytes:
    return json.dumps({"node": "t03", "session": "s", "seq": 1, "at": time.time(), "findings": findings, **fields}).encode()


class TestWordsOfANewerAgent:
    @pytest.mark.parametrize(
        ("word", "value", "becomes"),
        [
            ("severity", "apocalyptic", Severity.WARNING), ("action", "exorcise", Action.INSPECT),
            ("suspect", "gremlin", Suspect.PEER), ("kind", "wave", Kind.EVENT),
        ],
    )  # fmt: skip
    def test_a_word_is_lost_and_the_finding_is_not(self, word: str, value: str, becomes: object) -> None:
        """The finding stands in doubt, says which word was not understood, and its neighbours are as they were."""
        odd = FINDING | {word: value, "summary": "odd"}
        found = bounds.decode(body(odd, FINDING | {"id": "t03:2"})).findings
        assert getattr(found[0], word) is becomes
        assert found[0].certainty == bounds.DOUBT
        assert found[0].facts == {"not_understood": {word: value}}
        assert (found[0].summary, found[1]) == ("odd", msgspec.convert(FINDING | {"id": "t03:2"}, Finding))

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            (b"\xff", "invalid character"), (b'{"node":"\xff"}', "UTF-8"), (b'{"facts":' * 100_000, "nested"),
            (body(FINDING | {"severity": "x", "count": "many"}), "$.findings[0].count"),
            (body(FINDING).replace(b"1.0", b"1e400"), "out of range"),
            (body(FINDING | {"count": 7}).replace(b'"count": 7', b'"count": ' + b"9" * 100_000), "$.findings[0].count"),
            (body(FINDING | {"summary": "\ud800"}), ""), (body(5), "$.findings[0]"),
        ],
        ids=["binary", "no text", "deep", "two things wrong", "infinite", "digits", "half a character", "no finding"],
    )  # fmt: skip
    def test_what_is_no_report_is_one_sentence(self, wrong: bytes, says: str) -> None:
        """Whatever comes is a report or NotAReport, never another exception."""
        with pytest.raises(bounds.NotAReport) as caught:
            bounds.decode(wrong)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


class TestBounds:
    def test_text_is_cut_and_names_stay_distinct(self) -> None:
        """A megabyte of anything becomes what a node can have to say, and two long names are still two."""
        big = "x" * 1_000_000
        report = bounds.decode(
            body(
                FINDING | {"summary": big, "evidence": [big] * 50, "facts": {"a": big}, "check": big + "1", "id": big + "1"},
                FINDING | {"check": big + "2", "id": big + "2", "component": {"node": "t03", "device": big}},
                version=big, probes={f"{big[:200]}{i}": None for i in range(1000)}, workers=[{"worker": big, "gpus": ["x"] * 1000}],
            )
        )  # fmt: skip
        small = bounds.bounded(report)
        assert len(msgspec.json.encode(small)) < 150_000
        assert len({f.check for f in small.findings}) == len({f.id for f in small.findings}) == 2
        assert bounds.bounded(small) == small

    @pytest.mark.parametrize(("count", "certainty"), [(10**30, 99.0), (-5, -1.0), (0, 0.5)])
    def test_numbers_are_brought_back_into_their_range(self, count: int, certainty: float) -> None:
        """Counts are at least one and bounded, certainties are shares."""
        f = bounds.bounded(bounds.decode(body(FINDING | {"count": count, "certainty": certainty}))).findings[0]
        assert 1 <= f.count <= bounds.COUNT_MAX
        assert 0.0 <= f.certainty <= 1.0

    @pytest.mark.parametrize("device", ["a/b/c/d", "/", "gpu@x/y"])
    def test_a_component_can_be_written_and_read_back(self, device: str) -> None:
        """A device's name holds no slash, so that what is written down about it leads back to it."""
        odd = FINDING | {"component": {"node": "t03", "device": device, "part": "p/q"}}
        c = bounds.bounded(bounds.decode(body(odd))).findings[0].component
        assert type(c).parse(str(c)) == c

    def test_a_place_is_no_larger_than_a_node(self) -> None:
        """Names are cut, lists end, and a GPU at what is no PCI address is left out."""
        big = "x" * 100_000
        gpus = [{"pci": big}, {"pci": "0009:01:00.0", "uuid": big}, *({"pci": f"{n:04x}:01:00.0"} for n in range(1000))]
        place = {"chassis": big, "domain": big, "gpus": gpus, "ports": [big] * 300, "addresses": [big] * 300}
        small = bounds.bounded(bounds.decode(body(place=place)))
        assert len(msgspec.json.encode(small)) < 50_000
        assert small.place is not None
        assert small.place.gpus[0].pci == "0009:01:00.0"
        assert bounds.bounded(small) == small

    def test_an_ordinary_report_is_left_as_it_is(self) -> None:
        """What is within its bounds is not touched."""
        report = bounds.decode(body(FINDING, FINDING | {"present": False}, probes={"gpu": True}, workers=[{"worker": "decode-1"}]))
        assert bounds.bounded(report) == report


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[tuple[Any, Caller]]:
    server = RedisServer(program("redis-server"))
    try:
        await server.start()
        store = await server.open()
        decider = partial(Decider, default_policy())
        async with running_controller(store, tmp_path, fleet=rack(), decider=decider, nodes=("t03", "t04")) as (controller, caller):
            await until(lambda: controller.term, "the controller leads")
            yield controller, caller
        await store.close()
    finally:
        server.close()


async def outcome(caller: Caller, name: str) -> float:
    _, text = await caller.get("/metrics", who=None)
    line = f'sentinel_reports_total{{outcome="{name}"}} '
    return next(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line))


class TestController:
    async def test_a_bomb_of_compressed_bytes_is_refused_unopened(self, site: tuple[Any, Caller]) -> None:
        """A few hundred kilobytes that unfold into gigabytes cost neither memory nor the lease."""
        controller, caller = site
        epoch = controller.epoch
        bomb = await asyncio.to_thread(gzip.compress, b"[" * (100 << 20), 1)
        for path, who in (("/v1/report", "t03"), ("/v1/results", "t03"), ("/v1/ask", "ada")):
            status, answer = await caller.call("POST", path, who, data=bomb, headers={"Content-Encoding": "gzip"})
            assert (status, "compressed" in answer["error"]) == (415, True)
        assert controller.epoch == epoch

    @pytest.mark.parametrize("path", ["/v1/report", "/v1/results", "/v1/ask"])
    async def test_brackets_without_end_are_400(self, site: tuple[Any, Caller], path: str) -> None:
        """Depth is the sender's mistake, not a bug of ours."""
        who = "ada" if path == "/v1/ask" else "t03"
        nested = b'{"node": "t03", "facts": ' + b"[" * 200_000
        assert (await site[1].call("POST", path, who, data=nested))[0] == 400

    async def test_a_token_of_any_bytes_is_401(self, site: tuple[Any, Caller]) -> None:
        """Bytes that are no text are nobody's token."""
        _, caller = site
        status, _ = await caller.call("GET", "/v1/status", None, headers={"Authorization": "Bearer \udcff\udcfe"})
        assert status == 401

    async def test_what_is_not_its_own_is_left_out_and_counted(self, site: tuple[Any, Caller]) -> None:
        """A node that speaks of another node's GPU, or of a worker that runs elsewhere, changes nothing; the rest is taken."""
        controller, caller = site
        dead = {"severity": "fatal", "check": "worker.dead", "component": {"node": "t03", "device": "worker@decode-2"}}
        foreign = {"severity": "fatal", "check": "gpu.lost", "component": {"node": "t04", "device": f"gpu@{PCIS[0]}"}}
        own = FINDING | {"severity": "fatal", "check": "gpu.lost", "kind": "event"}
        status, _ = await caller.call("POST", "/v1/report", "t03", data=body(FINDING | dead, FINDING | foreign, own))
        assert status == 200
        assert await outcome(caller, "foreign") == 2
        states = {name: state for name, state in controller.term.ledger.states().items() if state is not WorkerState.ACTIVE}
        assert states == {"decode-1": WorkerState.OUT, "spill-2": WorkerState.STANDBY}

    async def test_a_node_that_invents_faults_without_end_is_bounded(self, site: tuple[Any, Caller]) -> None:
        """Past what a node can have, findings are counted and left out; it is still heard, and others are not disturbed."""
        controller, caller = site
        places = ({"node": "t03", "device": f"gpu@{i:08x}:01:00"} for i in range(FAULTS + 500))
        many = [FINDING | {"id": f"{i}", "severity": "warning", "component": c} for i, c in enumerate(places)]
        status, _ = await caller.call("POST", "/v1/report", "t03", data=body(*many))
        assert status == 200
        assert await outcome(caller, "absurd") == 500
        assert len(controller.term.ledger.incidents) <= FAULTS
        lost = {"severity": "fatal", "check": "gpu.lost", "component": {"node": "t04", "device": f"gpu@{PCIS[0]}"}, "kind": "event"}
        await caller.call("POST", "/v1/report", "t04", data=body(FINDING | lost, node="t04"))
        assert controller.term.ledger.states()["decode-2"] is WorkerState.OUT

    @pytest.mark.parametrize(
        ("ask", "says"),
        [
            ({"verb": "hold", "target": "decode-1", "reason": "x", "until": 1e300}, "until"),
            ({"verb": "drain", "target": "decode-1", "reason": "x", "deadline_s": 1e308}, "deadline_s"),
            ({"verb": "drain", "target": "x" * 1_000_000, "reason": "x"}, "target"),
        ],
    )
    async def test_a_time_or_name_beyond_belief_is_400(self, site: tuple[Any, Caller], ask: dict[str, Any], says: str) -> None:
        """A hold until the year 10^292 would break every clock that shows it."""
        status, answer = await site[1].post("/v1/ask", ask)
        assert status == 400
        assert answer["error"].startswith(says)

    async def test_a_result_of_megabytes_is_cut(self, site: tuple[Any, Caller]) -> None:
        """What a command printed goes into the history of a drain, which is small."""
        controller, caller = site
        result = {"id": "k", "node": "t03", "ok": False, "detail": "d" * 2_000_000}
        assert (await caller.post("/v1/results", result, who="t03"))[0] == 204
        kept = await controller._desk.run("t03", "reset_gpu", {}, key="k", why="x", deadline_s=1)
        assert len(kept.detail) <= bounds.LINE_MAX


def test_a_misspelt_name_is_answered_at_once_among_sixty_thousand() -> None:
    """The names that come close are found among those that begin and end alike, wherever the slip is."""
    nodes = [f"r{i:05d}" for i in range(10_000)]
    workers = tuple(Worker(name=f"decode-{n}", pool="p", url="u", gpus=tuple(gpu_component(n, p) for p in PCIS)) for n in nodes)
    ledger = Ledger(Fleet(pools=(Pool(name="p"),), workers=workers))

    def nothing(node: str) -> tuple[()]:
        return ()

    assert "decode-r04711" in ledger.unknown("decode-r004711", nothing)
    assert "decode-r04711" in ledger.unknown("decod-r04711", nothing)
    assert f"r04711/gpu@{PCIS[1]}" in ledger.unknown("r04711/gpu@0009:01:00.1", nothing)
    assert ledger.unknown(f"r04711/gpu@{PCIS[1]}", nothing) == ""


def test_every_word_of_a_finding_is_known_here() -> None:
    """An enumeration that a later version adds to a finding needs a word of its own for what is not understood."""
    words = {f.name for f in msgspec.structs.fields(Finding) if isinstance(f.type, type) and issubclass(f.type, Enum)}
    assert words == set(bounds._WORDS)
