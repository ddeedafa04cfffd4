"""Prefill and decode on separate plain vLLM workers: the first leg, whose KV the decoder then pulls.

This module exists because outside Dynamo nobody else would ask the prefill worker. The convention is that of vLLM's own proxy for
disaggregated serving (its examples' toy_proxy_server.py): the prefill worker gets the request with one token to make and
``kv_transfer_params``, and the decoder gets the request with the ``kv_transfer_params`` of the answer. What always holds:

* The decoder is chosen first (a session's KV is there), and its slot covers both legs: limits count requests, not legs.
* A prefill worker that fails is blamed by itself; one other is tried, within the same budget as any second try.
* A breaker never refuses alone: where every prefill worker's is open, one of them is asked all the same.
* What a prefill worker says about the request itself (a 4xx) is the answer.
* The client's other fields are kept as they are; only here is a body built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from sentinel.gateway.attempt import Attempt
from sentinel.gateway.classify import Budget
from sentinel.gateway.errors import ApiError
from sentinel.gateway.guards import Outcome, Permit, Slot
from sentinel.gateway.incoming import Incoming
from sentinel.gateway.routing import choose
from sentinel.model import Role, RouteEntry, Routes

if TYPE_CHECKING:
    from sentinel.gateway.desk import Desk

TRIES = 2
# What vLLM's NIXL connector wants of whoever asks for a remote decode (vllm 0.32, nixl_connector).
ASK: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip

Say = Callable[[str, str, str, Incoming], None]


class Prefill:
    def __init__(self, desk: Desk, budget: Budget, patience_s: float, say: Say) -> None:
        self._desk, self._budget, self._patience_s, self._say = desk, budget, patience_s, say

    async def leg(self, x: Incoming, decode: Attempt) -> bytes | None:
        """The body for the decoder. None: ``decode`` holds the prefill worker's answer, or its trouble, instead of its own."""
        body: dict[str, Any] = msgspec.json.decode(x.body)
        asked = msgspec.json.encode(_first(body))
        routes = self._desk.plan.pool(decode.pool)
        order = choose(routes or Routes(), Role.PREFILL, x.session or x.request_id.hex(), load=self._desk.guards.load)
        last: Attempt | None = None
        opened: list[RouteEntry] = []
        try:
            for _ in range(TRIES):
                if last is not None and last.reached and not self._budget.spend():
                    self._desk.meters.unretried["budget"] += 1
                    break
                one = await self._next(x, order, decode.pool, opened)
                if one is None and last is None:
                    one = self._last(x, decode.pool, opened)
                if one is None:
                    if last is not None:
                        if last.reached:
                            self._budget.give_back()
                        self._desk.meters.unretried["nowhere"] += 1
                    break
                if last is not None:
                    self._desk.meters.retries[last.pool, last.entry.worker, last.reason] += 1
                    last.end()
                last = one
                await one.begin(x, self._desk.origin(one.entry.url), self._desk.worker_key, self._patience_s, body=asked)
                one.judge(out=self._desk.plan.out(one.entry.worker))
                if one.outcome is Outcome.FINE:
                    return self._second(one, decode, body)
                self._say("a prefill failed", one.entry.worker, one.why, x)
            if last is None:
                self._desk.meters.refused[decode.pool, x.tenant, "prefill"] += 1
                raise ApiError(
                    503, f"no prefill worker of {x.ask.model!r} takes requests just now; try again", kind="server_error",
                    code="overloaded", retry_after_s=2.0,
                )  # fmt: skip
            decode.adopt(last)
            return None
        finally:
            if last is not None:
                last.end()

    async def _next(self, x: Incoming, order: Iterator[RouteEntry], pool: str, opened: list[RouteEntry]) -> Attempt | None:
        for entry in order:
            if entry.role is Role.PREFILL and not self._desk.plan.out(entry.worker):  # by the table of now
                permit = await self._desk.guards.breakers.permit(entry.worker)
                if permit is not None:
                    return self._attempt(x, entry, permit, pool)
                opened.append(entry)
        return None

    def _last(self, x: Incoming, pool: str, opened: list[RouteEntry]) -> Attempt | None:
        """Nobody else is left, so breakers are passed over, as they are for whoever decodes."""
        for entry in opened:
            permit = self._desk.guards.breakers.last(entry.worker)
            if permit is not None and not self._desk.plan.out(entry.worker):
                return self._attempt(x, entry, permit, pool)
        return None

    def _attempt(self, x: Incoming, entry: RouteEntry, permit: Permit, pool: str) -> Attempt:
        return Attempt(self._desk.guards, entry, permit, Slot(id="", pool=pool, worker=entry.worker, tenant=x.tenant))

    @staticmethod
    def _second(one: Attempt, decode: Attempt, body: dict[str, Any]) -> bytes | None:
        assert one.connection is not None and one.head is not None  # noqa: S101  (its outcome is fine)
        if one.head.status >= 300:
            decode.adopt(one)
            return None
        answer = one.connection.whole()
        if answer is None:
            raise ApiError(502, "the prefill worker's answer has no length", kind="server_error", code="upstream_garbled")
        one.connection.done()
        one.connection = None
        try:
            told: dict[str, Any] = msgspec.json.decode(answer, type=dict)
        except msgspec.MsgspecError:
            raise ApiError(502, "the prefill worker's answer is no JSON", kind="server_error", code="upstream_garbled") from None
        if told.get("kv_transfer_params"):
            body["kv_transfer_params"] = told["kv_transfer_params"]
        return msgspec.json.encode(body)


def _first(body: dict[str, Any]) -> dict[str, Any]:
    """The request as the prefill worker gets it: whole, and one token of an answer."""
    asked = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": ASK}
    asked.pop("stream_options", None)
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked
