"""The admin port: what operators, load balancers and Prometheus ask, apart from what clients reach.

What always holds: it is read-only, and it answers while the public port is busy, draining or refused.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import generate_latest

from sentinel.gateway.desk import Desk


def admin_application(desk: Desk, own: str) -> web.Application:
    """``own``: the id of this gateway process."""

    async def healthz(_: web.Request) -> web.Response:
        stopping = desk.stopping
        return web.json_response({"status": "stopping" if stopping else "ok"}, status=503 if stopping else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(desk.meters.registry), content_type="text/plain", charset="utf-8")

    async def routes(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(shown(desk, own)), content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics), web.get("/routes", routes)])
    return app


def shown(desk: Desk, own: str) -> dict[str, Any]:
    """The table as this gateway goes by it, with what only it knows: breakers, what is in flight, and what is served."""
    states = desk.breakers.states()
    return {
        "id": own,
        "name": desk.settings.name,
        "version": desk.routes.version,
        "models": desk.plan.models(desk.breakers.closed),
        "workers": [
            {
                "worker": worker, "pool": pool, "url": desk.plan.url_of[worker], "state": desk.plan.state_of[worker].value,
                "breaker": states.get(worker, "closed"), "in_flight": desk.guards.load.get(worker, 0),
            }
            for worker, pool in sorted(desk.plan.pool_of.items())
        ],
    }  # fmt: skip
