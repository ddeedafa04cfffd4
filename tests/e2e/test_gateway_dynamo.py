"""Clients as they are → ``sentinel gateway`` → two real Dynamo frontends over four mockers, whose engines are Dynamo's simulator.

100 streams, whole answers and curl run while workers and a frontend are drained, killed and frozen; what a retry or a migration
could save has to come whole, and the rest ends with an error that clients understand. Minutes: ``make test-long``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.e2e.dynamo import MODEL, DynamoRig, rig
from tests.e2e.gateway_clients import everyday, load
from tests.e2e.gateway_serving import Front
from tests.e2e.gateway_trials import MIGRATE, MOCKERS, PATIENCE, DynamoTrials, trial

pytestmark = [pytest.mark.long, pytest.mark.timeout(240), pytest.mark.needs("curl")]


@pytest_asyncio.fixture
async def dynamo(tmp_path: Path) -> AsyncIterator[tuple[DynamoRig, Front]]:
    async with rig(tmp_path, 4, mock_args=MOCKERS, front_env=MIGRATE) as made:
        second = await made.another_frontend()
        async with Front({"one": made.frontend, "two": second}, MODEL, more=PATIENCE) as front:
            yield made, front


async def test_every_kind_of_request_passes_unchanged(dynamo: tuple[DynamoRig, Front]) -> None:
    """Chat, completions, responses and models, whole and streamed, and the errors of each: the SDK reads them as Dynamo's own."""
    await everyday(dynamo[1])


@pytest.mark.parametrize("fault", ["worker_drained", "worker_killed", "worker_frozen", "frontend_drained"])
async def test_nothing_fails(dynamo: tuple[DynamoRig, Front], fault: str) -> None:
    """A mocker drained, killed or frozen, a frontend drained by the route table, under 100 streams: all come whole."""
    trials = DynamoTrials(*dynamo)
    async with load(dynamo[1]) as clients:
        told = await trial(dynamo[1], clients, getattr(trials, fault), migrates=True, frontends=trials.frontends)
    assert told["failed"] == 0 and told["requests"] > 100, json.dumps(told)
    assert told["migrated"] > 0 or fault not in ("worker_killed", "worker_frozen"), json.dumps(told)


@pytest.mark.parametrize("fault", ["frontend_killed", "frontend_frozen"])
async def test_a_lost_frontend_costs_only_what_it_had_begun(dynamo: tuple[DynamoRig, Front], fault: str) -> None:
    """Streams that it was passing on end with an error event; whole answers and what had not begun are saved by the other one."""
    trials = DynamoTrials(*dynamo)
    async with load(dynamo[1]) as clients:
        told = await trial(dynamo[1], clients, getattr(trials, fault), migrates=False, frontends=trials.frontends)
    assert (told["could_have_been_saved"], told["failed_without_an_error"]) == (0, 0), json.dumps(told)
    assert told["retried"] > 0 and told["failed"] == told["broken_after_the_first_byte"] > 0, json.dumps(told)


async def test_a_sites_frontends_stand_in_for_each_other(tmp_path: Path) -> None:
    """Dynamo workers in the route table, two frontends in ``[dynamo]``: when one is killed the other takes its requests."""
    async with rig(tmp_path, 4, mock_args=MOCKERS, front_env=MIGRATE) as made:
        second = await made.another_frontend()
        dynamo = msgspec.structs.replace(made.settings, frontends=(second,))
        workers = {w.name: w.system_url for w in made.workers}
        async with Front(workers, MODEL, more=PATIENCE, dynamo=dynamo) as front, load(front) as clients:
            told = await trial(front, clients, DynamoTrials(made, front).frontend_killed, migrates=False)
    assert (told["could_have_been_saved"], told["failed_without_an_error"]) == (0, 0), json.dumps(told)
    assert told["failed"] == told["broken_after_the_first_byte"] > 0, json.dumps(told)
