"""The one door to Redis or Valkey: who leads, what was decided, the route table, and a small map of kept things.

This package exists so that nothing else in sentinel speaks to the store. What always holds:

* Every primitive answers in three ways, never conflated: ``True`` (or a value) is done, ``False`` (or None) lost the race,
  ``StoreError`` could not tell. After StoreError a write may still have happened, or happen a moment later.
* Decisions are written only under the lease's epoch, all or nothing, by one script on the server. Leases end by the
  server's clock; no clock of ours is ever compared with it.
* A late write of our own (one that timed out here and reached the server after its retry) is refused, like a stranger's.
* A store that fails over (Redis Sentinel) is believed only as ``primary`` says; one that lost what it had said was done is
  noticed by the next commit (``WentBack``), and no epoch is ever given twice.
* Every key carries one hash tag, ``{prefix}``: all of them are one slot, which is why a cluster would be of no use.

Importing this package is cheap: redis-py is imported when a store is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sentinel.store.client import Store, connect
from sentinel.store.decisions import Change, Drop, PublishRoutes, Put, Stored
from sentinel.store.errors import StoreError, WentBack
from sentinel.store.lease import Leader

if TYPE_CHECKING:
    from sentinel.config import StoreSettings

__all__ = ["Change", "Drop", "Leader", "PublishRoutes", "Put", "Store", "StoreError", "Stored", "WentBack", "open_store"]


async def open_store(settings: StoreSettings, state_dir: Path | None = None) -> Store:
    """Open the store that ``settings.url`` names; ``embedded:`` keeps its data in ``state_dir/store``.

    A server elsewhere is not asked anything yet: a daemon must be able to start while it is away (``Store.ping`` asks).
    The embedded one is started, unless another process already runs it, and answers when this returns. Raises
    ConfigError when the settings cannot be used and StoreError when the embedded server does not come up.
    """
    return await connect(settings, state_dir)
