"""Clients as they are → ``sentinel gateway`` → two real vLLM servers on CPU, with a model of random weights.

100 streams, whole answers and curl run while one of them is drained, frozen and killed; what a retry could save has to come
whole, and a stream that had begun ends with an error that clients understand. Minutes, and 6 GB of packages: ``make test-long``.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.conftest import leave_out
from tests.e2e.gateway_clients import everyday, load, sdk_of
from tests.e2e.gateway_serving import RETRIES, Front
from tests.e2e.gateway_trials import PATIENCE_VLLM, TOKENS, VllmTrials, trial
from tests.e2e.vllm import MODEL, NotHere, Vllm, servers

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.needs("curl")]


@pytest.fixture(scope="module")
def vllm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Vllm]]:
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 9e9:
        leave_out(pytestconfig, "needs 9 GB of free memory for two vLLM servers")
    try:
        with servers(tmp_path_factory.mktemp("vllm")) as made:
            yield made
    except NotHere as why:
        leave_out(pytestconfig, f"needs {why}")


@pytest_asyncio.fixture
async def front(vllm: dict[str, Vllm]) -> AsyncIterator[Front]:
    async with Front({name: server.url for name, server in vllm.items()}, MODEL, more=PATIENCE_VLLM) as made:
        yield made


async def test_every_kind_of_request_passes_unchanged(front: Front) -> None:
    """Chat, completions, responses and models, whole and streamed, and the errors of each: the SDK reads them as vLLM's own."""
    await everyday(front)


async def test_a_conversation_goes_on_where_its_last_response_is(vllm: dict[str, Vllm], front: Front) -> None:
    """vLLM keeps responses in one process's memory: whichever gateway is asked next, whole or streamed, finds the right server. One
    that is nowhere is the client's own 404, told once, and blames nobody."""

    async def ask(**more: Any) -> Any:
        async with sdk_of(front) as sdk:
            made = await sdk.responses.create(model=MODEL, max_output_tokens=8, store=True, **more)
            return [event async for event in made] if more.get("stream") else made

    for n in range(12):
        first = await ask(input=f"{n}: how fares the rack?")
        events = await ask(input="and now?", previous_response_id=first.id, stream=True)
        last = await ask(input="so?", previous_response_id=events[0].response.id)
        assert last.status in ("completed", "incomplete")
    with pytest.raises(openai.NotFoundError):
        await ask(input="x", previous_response_id="resp_nobodys")
    counted = await front.counted()
    asked = {name: sum(n for key, n in counted.items() if "requests_total" in key and f'worker="{name}"' in key) for name in vllm}
    assert all(asked.values()), asked  # they were spread, so finding the right one was no accident
    assert not [key for key, n in counted.items() if key.startswith(RETRIES) and n]


async def test_a_drained_server_costs_nothing(vllm: dict[str, Vllm], front: Front) -> None:
    """Out by the route table, idle, ended, started anew and back, under 100 streams: every request comes whole, without a retry."""
    async with load(front, tokens=TOKENS) as clients:
        told = await trial(front, clients, VllmTrials(vllm, front, "b").worker_drained, migrates=False)
    assert (told["failed"], told["retried"]) == (0, 0) and told["requests"] > 100, json.dumps(told)


@pytest.mark.parametrize("fault", ["engine_frozen", "engine_killed", "server_killed"])
async def test_a_lost_engine_costs_only_what_it_had_begun(vllm: dict[str, Vllm], front: Front, fault: str) -> None:
    """Streams that it had begun end with an error event; whole answers and what had not begun are saved by the other server."""
    async with load(front, tokens=TOKENS) as clients:
        told = await trial(front, clients, getattr(VllmTrials(vllm, front, "b"), fault), migrates=False)
    assert (told["could_have_been_saved"], told["failed_without_an_error"]) == (0, 0), json.dumps(told)
    assert told["retried"] > 0, json.dumps(told)  # in a lucky moment nothing had begun there, and then nothing fails
