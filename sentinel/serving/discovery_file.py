"""Dynamo's file discovery (``DYN_DISCOVERY_BACKEND=file``): one file per entry under ``DYN_FILE_KV``.

This module exists to carry the seam of ``discovery.py`` onto files. What always holds:

* A key's first two parts are folders and the rest is one file name, percent-encoded except for ASCII letters and digits.
* An entry appears whole: it is written under a ``.tmp_`` name, which Dynamo ignores, flushed, and renamed.
* An entry lives while its file is young: its owner touches it every 3.3 s, and any participant deletes it once it is 10 s
  old (measured). So an entry written back is fresh; whether its owner still lives is for the adapter to find out first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from pathlib import Path
from urllib.parse import quote, unquote

from sentinel.serving.discovery import INSTANCES, Entry, is_instance, wrong

_BODY_MAX = 1 << 20


class FileDiscovery:
    """``root`` is the folder that Dynamo calls DYN_FILE_KV; it must be shared by its frontends and workers."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def instances(self, namespace: str) -> list[Entry]:
        return await asyncio.to_thread(self._instances, namespace)

    async def remove(self, entry: Entry) -> None:
        # One unlink on a local or shared file system: quicker than handing it to a thread, and latency is the point here.
        try:
            self._path(entry.key).unlink(missing_ok=True)
        except OSError as error:
            raise wrong(str(self._root), f"could not remove {entry.key}: {error.strerror or error}") from None

    async def restore(self, entry: Entry) -> bool:
        path = self._path(entry.key)
        fresh = path.with_name(f".tmp_{secrets.token_hex(8)}")
        try:
            with fresh.open("xb") as file:
                file.write(entry.body)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise wrong(str(self._root), f"could not write back {entry.key}: {error.strerror or error}") from None
        return True

    async def close(self) -> None:
        """Nothing is held open."""

    def _instances(self, namespace: str) -> list[Entry]:
        folder = self._root / INSTANCES
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208  (names are wanted, not paths: they are decoded first)
        except FileNotFoundError:
            if self._root.is_dir():
                return []  # no worker has registered yet
            raise wrong(str(self._root), "is not there: no such folder") from None
        except OSError as error:
            raise wrong(str(self._root), f"cannot be listed: {error.strerror or error}") from None
        found = []
        for name in names:
            key = INSTANCES + unquote(name)
            if name.startswith(".tmp_") or not is_instance(key, namespace):
                continue
            try:
                with (folder / name).open("rb") as file:
                    body = file.read(_BODY_MAX)
            except FileNotFoundError:
                continue  # it ended meanwhile
            except OSError as error:
                raise wrong(str(self._root), f"cannot read {key}: {error.strerror or error}") from None
            found.append(Entry(key=key, body=body))
        return found

    def _path(self, key: str) -> Path:
        if not key.startswith(INSTANCES):
            raise wrong(str(self._root), f"has no entry {key!r} that sentinel would touch; wanted {INSTANCES}…")
        return self._root / INSTANCES / encode(key.removeprefix(INSTANCES))


def encode(text: str) -> str:
    """Percent-encode everything but ASCII letters and digits, as Dynamo 1.6.1 names its files."""
    plain = quote(text, safe="")
    return "".join(f"%{ord(c):02X}" if c in "_.-~" else c for c in plain)
