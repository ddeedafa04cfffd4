"""How an engine is looked at over HTTP: metrics read, health understood, one token asked."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from probes import engine
from probes.engine import Answer
from tests.unit.standin_worker import StandInVllm, standing

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 99.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 8676.0
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.795971928424681e+09
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 487.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
"""


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def test_vllm_load_and_progress_are_read_and_lookalikes_are_not() -> None:
    """Only the wanted families count; one whose name merely begins the same is another family."""
    got = engine.parse(VLLM)
    assert (got.running, got.waiting, got.load, got.progress, got.model) == (3, 2, 5, 9163.0, "tiny")


def test_ranks_are_kept_apart_and_summed() -> None:
    """Each data-parallel engine is seen by itself; the worker's load is their sum."""
    got = engine.parse(VLLM + VLLM.replace(b'engine="0"', b'engine="1"'))
    assert set(got.ranks) == {"0", "1"}
    assert got.running == 6


def test_absent_families_are_none_and_not_zero() -> None:
    """What a server does not export was not measured."""
    got = engine.parse(b"go_goroutines 7\n")
    assert (got.running, got.waiting, got.load, got.progress, got.in_flight, got.instance) == (None, None, None, None, None, "")


@pytest.mark.parametrize(
    "bad",
    [
        b"vllm:num_requests_running{engine=\"0\" 3\n",
        b"vllm:num_requests_running many\n",
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running +Inf\n",
        b"\x00\xff\xfe vllm:num_requests_running 3\n",
        b"vllm:num_requests_running\n",
        b"{" * 100_000,
    ],
)
def test_bad_lines_are_skipped(bad: bytes) -> None:
    """Garbage in an exposition neither raises nor becomes a number, and what stands beside it is still read."""
    assert engine.parse(bad).running is None
    assert engine.parse(bad + b"\n" + VLLM).waiting == 2


def test_labels_may_hold_braces_quotes_and_exemplars_may_follow() -> None:
    """The format allows both inside a label's value, and OpenMetrics writes more after the number."""
    got = engine.parse(b'vllm:num_requests_running{engine="0",model_name="a}b\\"c"} 4 # {id="x"} 1\r\n')
    assert got.running == 4


def test_only_the_endpoint_that_takes_requests_counts_in_dynamo() -> None:
    """In flight is that of "generate"; the instance id is its label."""
    line = 'dynamo_component_inflight_requests{{dynamo_endpoint="{}",worker_id="2cd8a17d4531f6d6"}} {}\n'
    got = engine.parse((line.format("generate", 4) + line.format("worker_kv_query_source_1", 9)).encode())
    assert (got.in_flight, got.load, got.instance) == (4, 4, "2cd8a17d4531f6d6")


@pytest.mark.parametrize(
    ("kind", "status", "body", "means"),
    [
        ("vllm", 200, b"", True),
        ("vllm", 503, b"", False),
        ("vllm", 503, b'{"error":"The model is currently scaling. Please try again later."}', None),
        ("vllm", 404, b"", None),
        ("dynamo", 200, b"", True),
        ("dynamo", 503, b'{"status":"notready","endpoints":{"generate":"ready"}}', True),
        ("dynamo", 503, b'{"status":"notready","endpoints":{"generate":"notready"}}', False),
        ("dynamo", 404, b"", None),
    ],
)
def test_health_is_read_as_each_engine_means_it(kind: str, status: int, body: bytes, means: bool | None) -> None:
    """A rescaling vLLM and a bare Dynamo worker answer 503 and are not sick."""
    assert engine.healthy(kind, Answer(how="answered", status=status, body=body)) is means


async def test_every_way_a_call_can_end_is_a_value(http: aiohttp.ClientSession) -> None:
    """Answered, refused, too slow, too much: none of them raises."""
    server = StandInVllm()
    async with standing(server):
        assert (await engine.ask(http, "GET", f"{server.url}/health", deadline_s=5)).how == "answered"
        assert (await engine.ask(http, "GET", f"{server.url}/metrics", deadline_s=5, limit=10)).how == "broken"
        server.mute = True
        assert (await engine.ask(http, "GET", f"{server.url}/health", deadline_s=0.1)).how == "timeout"
    assert (await engine.ask(http, "GET", f"{server.url}/health", deadline_s=5)).how == "refused"
    assert (await engine.ask(http, "GET", "http://", deadline_s=5)).how == "broken"


async def test_one_token_is_right_wrong_or_not_known(http: aiohttp.ClientSession) -> None:
    """An answer is right; a 500 and nonsense are wrong; busy is neither; silence is wrong and says so."""
    server = StandInVllm()
    async with standing(server):
        assert (await engine.one_token(http, server.url, deadline_s=5)).ok is True
        server.text = None
        assert (await engine.one_token(http, server.url, deadline_s=5)).ok is False
        for status, means in ((503, None), (429, None), (400, None), (500, False)):
            server.refuses = (status, "no")
            assert (await engine.one_token(http, server.url, deadline_s=5)).ok is means
        server.refuses, server.frozen = None, True
        token = await engine.one_token(http, server.url, deadline_s=0.2)
        assert (token.ok, token.how) == (False, "timeout")
    assert (await engine.one_token(http, server.url, deadline_s=5)).how == "refused"
