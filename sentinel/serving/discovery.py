"""The seam over Dynamo's discovery: the entries that put a worker into rotation, read, removed and written back.

This module exists because in Dynamo 1.6.1 the discovery entry *is* the rotation switch: there is no drain call, and a frontend
drops a worker as soon as ``v1/instances/<namespace>/<component>/<endpoint>/<hexid>`` is deleted and takes it back when it is
written again (measured: 1 to 2 ms; streams in flight finish). What always holds, for every backend:

* ``remove`` and ``restore`` are idempotent, and touch only the entry that they are given.
* An entry is written back exactly as it was, and only while its owner can still keep it alive.
* Whatever cannot be told is an AdapterError in one sentence; nothing here is retried.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from sentinel.serving import AdapterError

INSTANCES = "v1/instances/"
REQUESTS = "generate"  # the endpoint that takes requests; others (worker_kv_query_source_…) only feed the router's index


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One discovery entry: its plain key, its body byte for byte, and the lease that keeps it alive (etcd; else 0)."""

    key: str
    body: bytes
    lease: int = 0

    @property
    def endpoint(self) -> str:
        return self.key.split("/")[-2]

    @property
    def instance(self) -> str:
        """Hex id of the process that owns it."""
        return self.key.rsplit("/", 1)[-1]

    @property
    def address(self) -> str:
        """``host:port`` of its request plane, for a person; "" when the body does not say."""
        try:
            return str(msgspec.json.decode(self.body)["transport"]["tcp"]).split("/", 1)[0]
        except (msgspec.DecodeError, KeyError, TypeError):
            return ""


class Discovery(Protocol):
    """What each backend offers. Every method raises AdapterError when it could not be told."""

    async def instances(self, namespace: str) -> list[Entry]:
        """Every instance entry of the namespace, of every component and endpoint."""
        ...

    async def remove(self, entry: Entry) -> None:
        """Returns once it is not there any more, whoever removed it."""
        ...

    async def restore(self, entry: Entry) -> bool:
        """Write it back as it was. False: its lease has ended, so its owner is dead; nothing was written."""
        ...

    async def close(self) -> None: ...


def is_instance(key: str, namespace: str) -> bool:
    """Whether a plain key is ``v1/instances/<namespace>/<component>/<endpoint>/<hexid>``."""
    parts = key.removeprefix(INSTANCES).split("/")
    return key.startswith(INSTANCES) and len(parts) == 4 and parts[0] == namespace and all(parts) and is_hex(parts[3])


def is_hex(text: str) -> bool:
    try:
        return 0 <= int(text, 16) < 1 << 64
    except ValueError:
        return False


def wrong(where: str, what: str) -> AdapterError:
    """One sentence for a discovery that did not answer as it should."""
    return AdapterError(f"Dynamo's discovery at {where} {what}")
