"""The third answer of every store primitive: it could not be told."""

from __future__ import annotations


class StoreError(Exception):
    """Could not tell whether it was done; the sentence names the key or script, the server, and what came back."""
