"""What clients lose when workers behind the gateway are drained, killed and frozen: 100 streams, whole answers and curl.

Real: ``sentinel gateway`` (two processes), its store, ai-dynamo's two frontends, discovery and request plane over four workers; two
vLLM servers on CPU. Simulated: Dynamo's engines (its own mocker). vLLM's weights are random. Clients: OpenAI's SDK with its own
second tries off, and curl; closed loop. For each trial: requests, how many came whole, how many failed and why, and how many of
those could have been saved (by a retry: nothing was shown yet; by migration: only a worker behind a frontend was lost). Needs the
packages of requirements/dynamo.txt and vllm.txt, installed on first use (330 MB and 6 GB), and for vLLM 9 GB of memory.

usage: gateway_serving.py [--streams 100] [--trial NAME ...] [dynamo] [vllm]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.dynamo import MODEL as DYNAMO_MODEL
from tests.e2e.dynamo import rig
from tests.e2e.gateway_clients import load
from tests.e2e.gateway_serving import Front
from tests.e2e.gateway_trials import MIGRATE, MOCKERS, PATIENCE, PATIENCE_VLLM, TOKENS, DynamoTrials, VllmTrials, trial
from tests.e2e.vllm import MODEL as VLLM_MODEL
from tests.e2e.vllm import NotHere, Vllm, servers

WORKERS = ("worker_drained", "worker_killed", "worker_frozen")
FRONTENDS = ("frontend_drained", "frontend_killed", "frontend_frozen")
ENGINES = ("worker_drained", "engine_frozen", "engine_killed", "server_killed")


async def dynamo(streams: int, only: set[str], folder: Path) -> dict[str, Any]:
    async with rig(folder, 4, mock_args=MOCKERS, front_env=MIGRATE) as made:
        workers = {"one": made.frontend, "two": await made.another_frontend()}
        async with Front(workers, DYNAMO_MODEL, more=PATIENCE) as front, load(front, streams=streams) as clients:
            trials = DynamoTrials(made, front)

            async def run(name: str) -> dict[str, Any]:
                fault = getattr(trials, name)
                return await trial(front, clients, fault, migrates=name in WORKERS, frontends=trials.frontends)

            return {name: said(f"dynamo {name}", await run(name)) for name in (*WORKERS, *FRONTENDS) if not only or name in only}


async def vllm(streams: int, only: set[str], there: dict[str, Vllm]) -> dict[str, Any]:
    workers = {name: server.url for name, server in there.items()}
    async with Front(workers, VLLM_MODEL, more=PATIENCE_VLLM) as front, load(front, streams=streams, tokens=TOKENS) as clients:
        trials = VllmTrials(there, front, "b")
        names = [name for name in ENGINES if not only or name in only]
        return {name: said(f"vllm {name}", await trial(front, clients, getattr(trials, name), migrates=False)) for name in names}


def said(name: str, told: dict[str, Any]) -> dict[str, Any]:
    print(name, json.dumps(told), flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--trial", action="append", default=[], choices=sorted({*WORKERS, *FRONTENDS, *ENGINES}))
    parser.add_argument("what", nargs="*", default=["dynamo", "vllm"])
    given = parser.parse_args()
    result: dict[str, Any] = {"bench": "gateway_serving", "streams": given.streams}
    with tempfile.TemporaryDirectory() as folder:
        if "dynamo" in given.what:
            result["dynamo"] = asyncio.run(dynamo(given.streams, set(given.trial), Path(folder) / "dynamo"))
        if "vllm" in given.what:
            try:
                with servers(Path(folder) / "vllm") as there:
                    result["vllm"] = asyncio.run(vllm(given.streams, set(given.trial), there))
            except NotHere as why:
                result["vllm"] = f"left out: needs {why}"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
