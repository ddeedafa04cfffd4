"""The third answer of every store primitive: it could not be told."""

from __future__ import annotations


class StoreError(Exception):
    """Could not tell whether it was done; the sentence names the key or script, the server, and what came back."""


class WentBack(StoreError):
    """The store holds less than it had told us was done (a failover, a crash, an older copy); nothing was written now."""
