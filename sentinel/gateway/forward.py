"""A request's way: read it, choose a worker, try, perhaps once more elsewhere, pass the answer on.

This module exists as the one place where these steps follow each other; each of them is a module of its own. What always holds:

* Nothing is written to a client before a worker's answer has begun: until then, and once, another worker may be tried.
* Whatever happens (an answer, a refusal, a client that leaves, a bug), the try that is under way ends, and with it its slot.
* A worker's answer is passed on as it is, its errors too; an error of ours has OpenAI's shape and says what is wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import structlog
from aiohttp.web_request import BaseRequest

from sentinel.gateway.answers import Answers, head_of, word_of
from sentinel.gateway.ask import Kind
from sentinel.gateway.attempt import Attempt
from sentinel.gateway.classify import Budget, Trouble, elsewhere
from sentinel.gateway.errors import ApiError
from sentinel.gateway.front import CLOSE, KEEP, Client, Sent
from sentinel.gateway.guards import Outcome, Permit, Refusal
from sentinel.gateway.incoming import MODELS, Incoming, receive
from sentinel.gateway.order import Order
from sentinel.gateway.prefill import Prefill
from sentinel.gateway.sessions import first_id, response_id
from sentinel.gateway.stream import Relay
from sentinel.model import Role, RouteEntry, Routes

if TYPE_CHECKING:
    from sentinel.gateway.desk import Desk

log = structlog.get_logger(__name__)

SAY_S = 1.0
LOOK_S = 0.1  # for which even who may not wait looks for a place, where one worker after the other has to be asked about


class Forward:
    """The handler of the public port. ``desk``: everything that is the same for all requests."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._own = desk, Answers(desk)
        s = desk.settings
        self._budget = Budget(float(s.retry_share), float(s.retry_reserve))
        self._first_s, self._answer_s, self._queue_s = float(s.first_byte), float(s.answer), float(s.queue)
        self._stall_s = float(s.stall)
        self._prefill = Prefill(desk, self._budget, self._first_s, self._say)
        self._workers = Order(desk)
        self._said: dict[tuple[str, str], float] = {}  # worker, what → when it was said last
        self._unsaid: Counter[tuple[str, str]] = Counter()

    async def __call__(self, request: BaseRequest, client: Client) -> Sent:
        client.begun, client.request_id = False, b""
        began = time.monotonic()
        try:
            if request.raw_path.startswith(MODELS) and request.method in ("GET", "HEAD"):
                return self._own.models(request, client)
            desk = self._desk
            x = await receive(request, client, desk.settings, desk.keys, began=began, own_key=bool(desk.worker_key))
            return await self._serve(x, client)
        except ApiError as error:
            return self._own.tell(error, request, client)
        except ConnectionError:
            return CLOSE
        except Exception:  # a bug; without this aiohttp would write a second head after whatever was written
            log.exception("a request failed in a way that nobody foresaw", path=request.raw_path[:200])
            if client.begun:
                client.out.abort()
                return CLOSE
            return self._own.tell(ApiError(500, "this gateway failed", kind="server_error"), request, client)

    # -- the way of one request ---------------------------------------------------------------------------------------

    async def _serve(self, x: Incoming, client: Client) -> Sent:
        if self._desk.plan.pools(x.ask.model) is None:
            raise ApiError(404, f"the model {x.ask.model[:200]!r} is not served here", code="model_not_found", param="model")
        if over := await self._desk.guards.admission.enter(x.tenant):
            raise self._refused(x, over, 0)
        self._budget.earn()
        attempt = await self._place(x)
        outcome = "gone"
        try:
            await self._begin(x, attempt)
            if attempt.outcome is not Outcome.FINE and not attempt.adopted:
                other = await self._another(x, attempt)
                if other is not None:
                    attempt.end()
                    attempt = other
                    await self._begin(x, attempt)
                    if attempt.absent:
                        self._workers.nowhere(x)
            sent, outcome = await self._answer(x, attempt, client)
            return sent
        except ApiError:
            outcome = "failed"
            raise
        finally:
            if outcome == "gone" and attempt.outcome is Outcome.FINE:
                attempt.outcome = Outcome.IGNORED  # what had failed before the client left has failed
            attempt.end()
            self._desk.meters.requests[attempt.pool, attempt.entry.worker, x.tenant, outcome] += 1

    async def _place(self, x: Incoming, *, left_s: float | None = None, but: str = "") -> Attempt:
        """A permit and a slot on the first worker of the table of now that gives both. ``left_s``: of the waiting. ``but``: the
        one that failed. Raises ApiError."""
        wait_s = self._queue_s if left_s is None else left_s
        until = time.monotonic() + (wait_s or LOOK_S)
        full: RouteEntry | None = None
        refusal: Refusal | None = None
        opened, without = list[RouteEntry](), set[str]()
        for entry in await self._workers.of(x, self._desk.plan.pools(x.ask.model) or Routes()):
            pool = self._desk.plan.pool_of.get(entry.worker, "")
            if pool in without or entry.worker == but:
                continue
            got = await self._try_place(x, entry, pool, 0.0)
            if isinstance(got, Attempt):
                return got
            if got is None:
                opened.append(entry)
            else:
                full, refusal = full or entry, got
                if got.limit == "pool":
                    without.add(pool)
                elif got.limit != "worker":
                    break
            if full is not None and time.monotonic() > until:  # of whom a probe was asked in vain, that took its own time
                break
        for entry in opened if full is None and not but else ():
            got = await self._try_place(x, entry, self._desk.plan.pool_of.get(entry.worker, ""), 0.0, last=True)
            if isinstance(got, Attempt):
                return got
            refusal = got or refusal
        if full is not None and refusal is not None and wait_s > 0 and refusal.limit != "fenced":
            got = await self._try_place(x, full, self._desk.plan.pool_of.get(full.worker, ""), max(0.0, until - time.monotonic()))
            if isinstance(got, Attempt):
                return got
            if got is None:  # it is not to be had any more, but others may be
                return await self._place(x, left_s=max(0.0, until - time.monotonic()), but=but)
            refusal = got
        raise self._refused(x, refusal, len(opened), counted=not but)

    async def _try_place(
        self, x: Incoming, entry: RouteEntry, pool: str, wait_s: float, *, last: bool = False
    ) -> Attempt | Refusal | None:
        """None: its breaker is open, or it does not stand in the table any more as it did when it was chosen. ``last``: nobody
        else is left, so the breaker is passed over."""
        breakers, admission = self._desk.guards.breakers, self._desk.guards.admission
        if not (last or breakers.closed(entry.worker)):
            return None
        got = await admission.admit(pool, entry.worker, x.tenant, x.ask.tokens, wait_s)
        if isinstance(got, Refusal):
            return got
        permit: Permit | None = None
        try:  # after the slot: a probe that nobody can use would be taken from the store and given back for each request
            permit = breakers.last(entry.worker) if last else await breakers.permit(entry.worker)
        finally:
            if permit is None:
                admission.release(got)
        if permit is None:
            return None
        attempt = Attempt(self._desk.guards, entry, permit, got)
        if self._desk.plan.state_of.get(entry.worker) is not entry.state:  # while it waited
            attempt.end()
            return None
        return attempt

    def _refused(self, x: Incoming, refusal: Refusal | None, opened: int, *, counted: bool = True) -> ApiError:
        if refusal is not None:
            limit, why, after = refusal.limit, refusal.why, refusal.retry_after_s
        elif opened:
            limit, why, after = "breaker", f"every worker of {x.ask.model!r} has failed a moment ago; try again", 2.0
        else:
            limit, why, after = "none", f"no worker of {x.ask.model!r} takes requests just now; try again", 2.0
        pool = next(iter(self._desk.plan.names(x.ask.model)), "")
        self._desk.meters.refused[pool, x.tenant, limit] += counted
        if refusal is not None and refusal.never:
            return ApiError(400, f"{why} Ask for fewer.", code="too_many_tokens", param="max_tokens")
        if limit in ("tenant", "rate"):
            return ApiError(429, why, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=after)
        return ApiError(503, why, kind="server_error", code="overloaded", retry_after_s=after)

    async def _begin(self, x: Incoming, attempt: Attempt) -> None:
        worker = attempt.entry.worker
        origin = self._desk.origin(attempt.entry.url)
        patience = self._first_s if x.ask.stream else self._answer_s
        body = b""
        if attempt.entry.role is Role.DECODE:
            legged = await self._prefill.leg(x, attempt)
            if legged is None:
                return
            body = legged
        await attempt.begin(x, origin, self._desk.worker_key, patience, body=body)
        attempt.judge(out=self._desk.plan.out(worker))
        busy = attempt.outcome is Outcome.BUSY and not (attempt.absent and self._workers.absent(x))
        if busy or attempt.trouble is Trouble.REFUSED:
            self._workers.busy(worker)

    async def _another(self, x: Incoming, failed: Attempt) -> Attempt | None:
        """A second try elsewhere, if there is an elsewhere and the budget has one left."""
        meters, worker = self._desk.meters, failed.entry.worker
        self._say("a try failed", worker, failed.why, x)
        if not elsewhere(failed.outcome, failed.trouble) or (failed.absent and self._workers.absent(x)):
            return None
        if failed.reached and not self._budget.spend():
            meters.unretried["budget"] += 1
            return None
        failed.make_room()
        try:
            other = await self._place(x, but=worker)
        except BaseException as error:
            if failed.reached:
                self._budget.give_back()
            if not isinstance(error, ApiError):
                raise
            meters.unretried["nowhere"] += 1
            self._say("a failed try had nowhere else to go", worker, str(error), x)
            return None
        meters.retries[failed.pool, worker, failed.reason] += 1
        return other

    def _say(self, what: str, worker: str, why: str, x: Incoming) -> None:
        """At most one line a second for each thing that happens to a worker: a dying one has a thousand requests."""
        now = time.monotonic()
        self._unsaid[worker, what] += 1
        if now - self._said.get((worker, what), -SAY_S) >= SAY_S:
            self._said[worker, what] = now
            times = self._unsaid.pop((worker, what))
            log.warning(what, worker=worker, why=why, request_id=x.request_id.decode(), times=times)

    # -- the answer ---------------------------------------------------------------------------------------------------

    async def _answer(self, x: Incoming, attempt: Attempt, client: Client) -> tuple[Sent, str]:
        head, connection = attempt.head, attempt.connection
        if attempt.trouble is not None or head is None or connection is None:
            status = 504 if attempt.trouble is Trouble.FIRST_BYTE else 502
            raise ApiError(
                status, f"the worker gave no answer: {attempt.why}", kind="server_error",
                code=f"upstream_{attempt.trouble or Trouble.EARLY}",
            )  # fmt: skip
        worker, desk = attempt.entry.worker, self._desk
        if head.status < 300:
            desk.homes.settle(x.session, worker)
        keep = x.keep and not desk.stopping
        body = connection.whole()
        if body is not None:
            connection.done()
            attempt.connection = None
            if x.kind is Kind.RESPONSE and head.status < 300:
                await desk.holders.keep(x.tenant, response_id(body), worker)
            client.begun = True
            client.out.write(head_of(x, head, len(body), keep=keep) + body)
            return (KEEP if keep else CLOSE), word_of(head.status, attempt)
        connection.go_on()
        keep = keep and not (x.old and head.size is None)
        if x.kind is Kind.RESPONSE and head.status < 300:
            desk.holders.keep_soon(x.tenant, first_id(connection.early), worker)
        flow = desk.meters.flow(attempt.pool, worker)
        relay = Relay(
            client, connection, head, flow, stall_s=self._stall_s, old=x.old, responses=x.kind is Kind.RESPONSE
        )
        client.begun = True
        client.out.write(head_of(x, head, head.size, keep=keep))
        x.body = b""  # it can be of use no more
        attempt.connection = None  # the relay gives it back
        relay.start()
        try:
            trouble = await relay.ended
        finally:
            relay.leave()
            if head.sse and relay.first_at:
                flow.first.add(relay.first_at - x.began)
        if head.sse and relay.events > 1:
            flow.rate.add(relay.events / max(1e-6, time.monotonic() - x.began))
        if trouble is None:
            return (KEEP if keep else CLOSE), word_of(head.status, attempt)
        attempt.broke(trouble, out=desk.plan.out(worker), told=relay.told if trouble is Trouble.WORKER_ERROR else 0)
        if trouble is Trouble.CLIENT:
            return CLOSE, "gone"
        if trouble is Trouble.WORKER_ERROR and attempt.outcome is Outcome.FINE:
            return (KEEP if keep else CLOSE), "client_error"
        desk.meters.broken[attempt.pool, worker, trouble.value] += 1
        self._say("an answer broke after it had begun", worker, trouble.value, x)
        return (KEEP if keep and trouble is not Trouble.STOPPING else CLOSE), "broken"  # it has ended as its head said
