"""The route table as Envoy's endpoint files (filesystem xDS), for sites that have a proxy already.

This module exists so that such a site follows drains and overflow with its own Envoy: one file per pool, a
``ClusterLoadAssignment`` of the v3 API in JSON, which Envoy watches (``eds_cluster_config`` with ``path_config_source``). What
always holds:

* A file is replaced as a whole, by a rename in the same folder: Envoy only takes notice of a move, and never sees half a file.
* An active worker is HEALTHY and weighs its capacity; a cordoned one is DEGRADED (Envoy prefers healthy ones); one that is out is
  DRAINING, so that connections end and nothing new comes. Standbys are not named.
* A pool's overflow is not Envoy's own priority: weights between pools are written to ``weights.json`` for the site's routes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import structlog

from sentinel.model import RouteEntry, WorkerState

if TYPE_CHECKING:
    from sentinel.gateway.models import Plan

log = structlog.get_logger(__name__)

TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
HEALTH = {WorkerState.ACTIVE: "HEALTHY", WorkerState.CORDONED: "DEGRADED", WorkerState.OUT: "DRAINING"}
WEIGHT_MAX = 4294967295  # of a uint32; all of one file together may not be more


def cluster_name(pool: str) -> str:
    """What a pool is called in Envoy, and its file's stem."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", pool)


def assignment(pool: str, version: int, workers: tuple[RouteEntry, ...]) -> dict[str, Any]:
    """One pool as a discovery response."""
    shown = [entry for entry in workers if entry.state in HEALTH]
    unit = min((e.capacity for e in shown if e.capacity > 0), default=1.0)
    return {
        "version_info": str(version),
        "resources": [
            {
                "@type": TYPE,
                "cluster_name": cluster_name(pool),
                "endpoints": [{"lb_endpoints": [_endpoint(entry, unit) for entry in shown]}],
            }
        ],
    }


def _endpoint(entry: RouteEntry, unit: float) -> dict[str, Any]:
    parts = urlsplit(entry.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {
        "endpoint": {
            "address": {"socket_address": {"address": parts.hostname or "", "port_value": port}},
            "hostname": parts.hostname or "",
        },
        "health_status": HEALTH[entry.state],
        "load_balancing_weight": max(1, min(1_000_000, round(entry.capacity / unit * 100))),
    }


class Endpoints:
    """Keeps one folder like the table. A folder that cannot be written is said once, and tried again with the next table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said = False

    def write(self, plan: Plan) -> None:
        try:
            for pool in plan.tables():
                self._replace(f"{cluster_name(pool.pool)}.json", assignment(pool.pool, plan.version, pool.workers))
            self._replace("weights.json", {"version": plan.version, "pools": {p.pool: p.weight for p in plan.tables()}})
            self._said = False
        except OSError as error:
            if not self._said:
                log.error("Envoy's endpoint files could not be written", folder=str(self._folder), error=str(error))
            self._said = True

    def _replace(self, name: str, body: dict[str, Any]) -> None:
        target, fresh = self._folder / name, self._folder / f".{name}.{os.getpid()}"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
        fresh.replace(target)
