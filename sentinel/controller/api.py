"""The controller's HTTP face: who may ask what, and how refusals read.

This module exists so that docs/architecture.md's table of calls is one table here. What always holds:

* Every error is ``{"error": "<one sentence>"}`` with the status that says whose it is; no traceback reaches a caller.
* A controller that does not lead answers 421 and names who does, as far as the store could tell; nothing is done for it.
* Without token files every call that needs a token is refused. A node's token speaks for that node only.
* Bodies are bounded; a full queue answers 503 with Retry-After instead of growing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sentinel.controller import bounds
from sentinel.controller.answers import BODY_MAX, answer, http_error, read_body, seconds
from sentinel.controller.asks import TARGET_MAX, Ask, asked, refusal, unknown, written
from sentinel.controller.auth import Refused, Tokens
from sentinel.controller.commands import CommandDesk
from sentinel.controller.core import Busy, DeciderFailed, SteppedDown
from sentinel.controller.metrics import Metrics
from sentinel.controller.status import status_of
from sentinel.controller.term import Term
from sentinel.decide.state.events import Record
from sentinel.model import CommandResult, Drain
from sentinel.shipped import runbook

log = structlog.get_logger(__name__)

WAIT_MAX = 60.0  # seconds a long poll is held at most

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Seat(Protocol):
    """What the API needs of the process: the leadership that is there now, if any, and where else to look."""

    name: str
    url: str

    @property
    def term(self) -> Term | None:
        """The leadership that can be asked now; None while standing by or taking over."""
        ...

    async def leader_url(self) -> str | None: ...


class _NotLeader(Exception):
    pass


class Api:
    """Builds the aiohttp application. One per process."""

    def __init__(
        self,
        seat: Seat,
        *,
        nodes: Tokens,
        operators: Tokens,
        desk: CommandDesk,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._seat, self._nodes, self._operators = seat, nodes, operators
        self._desk, self._metrics, self._clock = desk, metrics, clock
        self._result = msgspec.json.Decoder(CommandResult)
        self._ask = msgspec.json.Decoder(Ask)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._errors], client_max_size=BODY_MAX)
        app.add_routes(
            [
                web.post("/v1/report", self.report),
                web.get("/v1/commands", self.commands),
                web.post("/v1/results", self.results),
                web.get("/v1/status", self.status),
                web.get("/v1/incidents", self.incidents),
                web.get("/v1/explain/{target:.+}", self.explain),
                web.post("/v1/ask", self.ask),
                web.get("/v1/drains/{id}", self.drain),
                web.get("/v1/routes", self.routes),
                web.get("/runbooks/{name}", self.runbook),
                web.get("/healthz", self.healthz),
                web.get("/metrics", self.metrics),
            ]
        )
        app.on_shutdown.append(self._let_go)
        return app

    # -- agents -------------------------------------------------------------------------------------------------------

    async def report(self, request: web.Request) -> web.Response:
        outcomes = self._metrics.reports
        try:
            node = self._nodes.name(request.headers.get("Authorization"))
            term = self._term()
            if term.core.full:
                raise Busy  # before it is read: what is turned away must cost nothing
            report = await self._body(request, lambda body: term.ingest.admitted(node, body), "a report")
            if len(report.session) > bounds.SESSION_MAX:
                raise http_error(web.HTTPBadRequest, f"session: it is longer than {bounds.SESSION_MAX} characters")
            if report.node != node:
                raise Refused(403, f"this token is {node!r}'s; a report for {report.node!r} needs that node's own token")
            return answer(await term.ingest.take(report))
        except Refused as error:
            outcomes.labels("no_token" if error.status == 401 else "wrong_node").inc()
            raise
        except web.HTTPRequestEntityTooLarge:
            outcomes.labels("too_large").inc()
            raise
        except web.HTTPBadRequest:
            outcomes.labels("malformed").inc()
            raise
        except Busy:
            outcomes.labels("busy").inc()
            raise
        except (_NotLeader, SteppedDown):
            outcomes.labels("not_leader").inc()
            raise
        except DeciderFailed:
            outcomes.labels("failed").inc()
            raise

    async def commands(self, request: web.Request) -> web.Response:
        node = self._own_node(request, request.query.get("node", ""))
        self._term()
        wait = seconds(request.query.get("wait", "20"))
        found = await self._desk.poll(node, min(wait, WAIT_MAX))
        if not found:
            self._term()  # it may have ended while this poll was held
        return answer(found)

    async def results(self, request: web.Request) -> web.Response:
        node = self._nodes.name(request.headers.get("Authorization"))
        self._term()
        result = await self._body(request, self._result.decode, "a command's result")
        if result.node != node:
            raise Refused(403, f"this token is {node!r}'s; a result for {result.node!r} needs that node's own token")
        if len(result.id) > bounds.SESSION_MAX:
            raise http_error(web.HTTPBadRequest, f"id: it has {len(result.id)} characters; no command is called that")
        self._desk.settle(msgspec.structs.replace(result, detail=bounds.cut(result.detail, bounds.LINE_MAX)))
        return web.Response(status=204)

    # -- operators ----------------------------------------------------------------------------------------------------

    async def status(self, request: web.Request) -> web.Response:
        self._operator(request)
        return answer(status_of(self._term(), name=self._seat.name, url=self._seat.url, now=self._clock()))

    async def incidents(self, request: web.Request) -> web.Response:
        self._operator(request)
        found = self._term().ledger.incidents.values()
        return answer(sorted(found, key=lambda i: (i.opened_at, i.id), reverse=True))

    async def explain(self, request: web.Request) -> web.Response:
        self._operator(request)
        term, target = self._term(), written(request.match_info["target"])
        if len(target) > TARGET_MAX:
            raise http_error(web.HTTPBadRequest, f"target: it has {len(target)} characters; wanted {TARGET_MAX} at most")
        if sentence := term.ledger.unknown(target, term.ingest.components, incidents=True):
            raise http_error(web.HTTPNotFound, sentence)
        return answer(term.core.decider.explain(target))

    async def ask(self, request: web.Request) -> web.Response:
        by = self._operator(request)
        term = self._term()
        ask = await self._body(request, self._ask.decode, "a request of an operator")
        ask = msgspec.structs.replace(ask, target=written(ask.target.strip()))
        if sentence := refusal(ask, self._clock()):
            raise http_error(web.HTTPBadRequest, sentence)
        if sentence := unknown(ask, term.ledger, term.ingest.components, term.core.decider.nodes_of):
            raise http_error(web.HTTPNotFound, sentence)
        now = self._clock()
        event = asked(ask, event=term.new_id(), by=by, now=now)
        log.info("an operator asked", by=by, verb=ask.verb, target=ask.target, reason=ask.reason, event_id=event.id)
        decided = await term.feed(event)
        # A standby that is started because of it moves through the same states, but is nothing that was asked for.
        drains = [n.value for n in decided if isinstance(n, Record) and isinstance(n.value, Drain) and n.value.kind == "drain"]
        return answer({"event": event.id, "drains": drains})

    async def drain(self, request: web.Request) -> web.Response:
        self._operator(request)
        found = self._term().ledger.drains.get(request.match_info["id"])
        if found is None:
            raise http_error(web.HTTPNotFound, f"no drain has the id {request.match_info['id']!r}; it may be over and forgotten")
        return answer(found)

    # -- anyone -------------------------------------------------------------------------------------------------------

    async def routes(self, request: web.Request) -> web.Response:
        routes = self._term().ledger.routes
        if routes is None:
            raise http_error(web.HTTPNotFound, "no route table has been published yet")
        return answer(routes)

    async def runbook(self, request: web.Request) -> web.Response:
        name = request.match_info["name"].removesuffix(".md")
        try:
            text = await asyncio.to_thread(lambda: runbook(name).read_text("utf-8"))
        except FileNotFoundError as error:
            raise http_error(web.HTTPNotFound, str(error)) from None
        return web.Response(text=text, content_type="text/markdown", charset="utf-8")

    async def healthz(self, request: web.Request) -> web.Response:
        return answer({"status": "ok", "role": "leader" if self._seat.term else "standby", "name": self._seat.name})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    # -- shared -------------------------------------------------------------------------------------------------------

    def _term(self) -> Term:
        term = self._seat.term
        if term is None:
            raise _NotLeader
        return term

    def _operator(self, request: web.Request) -> str:
        return self._operators.name(request.headers.get("Authorization"))

    def _own_node(self, request: web.Request, node: str) -> str:
        name = self._nodes.name(request.headers.get("Authorization"))
        if node != name:
            raise Refused(403, f"this token is {name!r}'s; what is for {node!r} needs that node's own token")
        return name

    async def _body(self, request: web.Request, decode: Callable[[bytes], T], what: str) -> T:
        if request.headers.get("Content-Encoding", "identity") != "identity":  # a few bytes that unfold into gigabytes
            raise http_error(web.HTTPUnsupportedMediaType, "the body is compressed; wanted plain JSON")
        try:
            return decode(await read_body(request))
        except (msgspec.DecodeError, UnicodeDecodeError, bounds.NotAReport) as error:
            raise http_error(web.HTTPBadRequest, f"the body is not {what}: {error}") from None
        except RecursionError:
            raise http_error(web.HTTPBadRequest, f"the body is not {what}: it is nested without end") from None

    async def _let_go(self, _: web.Application) -> None:
        self._desk.let_go()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            return answer({"error": str(error)}, error.status, headers)
        except (_NotLeader, SteppedDown):
            return await self._elsewhere()
        except Busy as busy:
            full = f"more reports come than can be taken in; this one was not taken: send it again in {busy.after_s:g} s"
            return answer({"error": full, "busy": True}, 503, {"Retry-After": f"{busy.after_s:.0f}"})
        except DeciderFailed as error:
            # 422 blames the content: an agent then halves the report until it knows the finding, and goes on without it.
            return answer({"error": f"the decider failed on this ({error}): a bug in sentinel; its journal has the event"}, 422)
        except web.HTTPRequestEntityTooLarge:
            return answer({"error": f"the body is larger than {BODY_MAX} bytes"}, 413)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            theirs = not error.text or error.text == f"{error.status}: {error.reason}"
            sentence = f"{request.method} {request.path}: {error.reason}" if theirs else error.text
            return answer({"error": sentence}, error.status, headers)
        except Exception:
            log.exception("a request failed in a way that nobody foresaw", method=request.method, path=request.path)
            return answer({"error": "the controller failed on this request: a bug in sentinel; its log has the details"}, 500)

    async def _elsewhere(self) -> web.Response:
        leader = await self._seat.leader_url()
        if leader == self._seat.url:
            return answer({"error": "this controller is just taking over; ask again in a moment"}, 503, {"Retry-After": "1"})
        where = f"{leader} does" if leader else "nobody is known to"
        return answer({"error": f"this controller does not lead; {where}", "leader": leader}, 421)
