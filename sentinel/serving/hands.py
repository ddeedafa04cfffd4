"""Starting and stopping a worker through its node's agent: the one place that names the actions and their deadlines.

This module exists so that every adapter stops a worker the same way. What always holds: the first of a worker's nodes
carries it out; ``key`` makes repeating it harmless; a refusal is False and in the log, never silence.
"""

from __future__ import annotations

import structlog

from sentinel.model import Worker
from sentinel.serving import Hands

log = structlog.get_logger(__name__)

# Seconds. A vLLM that ends by itself takes its own --shutdown-timeout and about 15 s of teardown (measured on 0.32: 6.4 s
# of work, gone after 16.7 s); what starts a worker answers when the process is there, long before the model is loaded.
STOP_S = 60.0
KILL_S = 15.0
START_S = 60.0


async def stop(hands: Hands, worker: Worker, *, hard: bool, key: str) -> bool:
    if hard:
        return await _run(hands, worker, "kill_worker", KILL_S, key=key, why=f"{worker.name} must end at once")
    return await _run(hands, worker, "stop_worker", STOP_S, key=key, why=f"{worker.name} is out of rotation and is to end")


async def start(hands: Hands, worker: Worker, *, key: str) -> bool:
    return await _run(hands, worker, "start_worker", START_S, key=key, why=f"{worker.name} is wanted again")


async def _run(hands: Hands, worker: Worker, action: str, deadline_s: float, *, key: str, why: str) -> bool:
    if not worker.nodes:
        log.warning("a worker has no node that could act for it", worker=worker.name, action=action)
        return False
    result = await hands.run(worker.nodes[0], action, {"worker": worker.name}, key=key, why=why, deadline_s=deadline_s)
    if not result.ok:
        log.warning("an action was not done", worker=worker.name, action=action, refused=result.refused, detail=result.detail)
    return result.ok
