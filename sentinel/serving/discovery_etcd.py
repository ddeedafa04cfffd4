"""Dynamo's etcd discovery (``DYN_DISCOVERY_BACKEND=etcd``), spoken to by etcd's own JSON gateway.

This module exists to carry the seam of ``discovery.py`` onto etcd with nothing but HTTP: ``/v3/kv/*`` with keys and values in
base64, 64-bit numbers as strings. What always holds:

* An entry hangs on its owner's lease, whose id is the instance id (measured on 1.6.1, granted for 30 s); it is written back
  onto the same lease. etcd refuses that in the same step once the lease has ended, so a dead worker never comes back.
* The first endpoint that answers is used; one that does not answer is passed over, and only when none does is it an error.
"""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import msgspec

from probes.engine import Answer, ask
from sentinel.serving import AdapterError
from sentinel.serving.discovery import INSTANCES, Entry, is_instance, wrong

_NOT_FOUND = 5  # gRPC code: the requested lease is not there
DEADLINE_S = 2.0  # of one call to one endpoint


class EtcdDiscovery:
    """``endpoints``: base URLs of etcd, as in ETCD_ENDPOINTS, comma separated or one by one."""

    def __init__(self, endpoints: str | list[str], session: aiohttp.ClientSession, *, deadline_s: float = DEADLINE_S) -> None:
        named = endpoints.split(",") if isinstance(endpoints, str) else endpoints
        self._endpoints = [e.strip().rstrip("/") for e in named if e.strip()]
        self._session = session
        self._deadline_s = deadline_s

    async def instances(self, namespace: str) -> list[Entry]:
        prefix = f"{INSTANCES}{namespace}/".encode()
        end = prefix[:-1] + bytes([prefix[-1] + 1])  # the first key after everything that begins with the prefix
        said = await self._call("range", {"key": _64(prefix), "range_end": _64(end)})
        found = []
        for kv in said.get("kvs") or ():
            try:
                key = base64.b64decode(kv["key"]).decode()
                entry = Entry(key=key, body=base64.b64decode(kv.get("value", "")), lease=int(kv.get("lease", 0)))
            except (ValueError, KeyError, TypeError):
                raise wrong(self._where, "answered with an entry that cannot be read") from None
            if is_instance(key, namespace):
                found.append(entry)
        return found

    async def remove(self, entry: Entry) -> None:
        await self._call("deleterange", {"key": _64(entry.key.encode())})

    async def restore(self, entry: Entry) -> bool:
        body = {"key": _64(entry.key.encode()), "value": _64(entry.body), "lease": str(entry.lease)}
        return await self._call("put", body, missing_ok=True) != {}

    async def close(self) -> None:
        """The session is whoever's handed it in."""

    @property
    def _where(self) -> str:
        return ", ".join(self._endpoints)

    async def _call(self, verb: str, body: dict[str, Any], *, missing_ok: bool = False) -> dict[str, Any]:
        """What etcd answered; {} when ``missing_ok`` and the lease is not there any more."""
        trouble = "has no endpoint configured"
        for endpoint in self._endpoints:
            answer = await ask(self._session, "POST", f"{endpoint}/v3/kv/{verb}", deadline_s=self._deadline_s, body=body)
            said = _json(answer)
            if answer.status == 200 and said is not None:
                return said
            if said is not None and missing_ok and said.get("code") == _NOT_FOUND:
                return {}
            what = answer.why or f"HTTP {answer.status} {(said or {}).get('message', '')}".rstrip()
            trouble = f"could not {verb} {endpoint}: {what}"
        raise AdapterError(f"Dynamo's discovery at {self._where}: {trouble}")


def _json(answer: Answer) -> dict[str, Any] | None:
    try:
        said = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return said if isinstance(said, dict) else None


def _64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
