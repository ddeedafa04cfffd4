"""The agent's memory of commands: which it began, how they ended, and whether the controller knows.

This module exists so that a command is carried out at most once, ever. What always holds:

* ``begin`` is on the platter before the command starts, its result before anybody is told of it.
* A command that began and has no result when the agent starts was interrupted; it ends as failed and is never run again.
* The file is append-only JSON lines; a line half written by a crash is ignored: of a ``begin`` that means the command never
  started, of a result that it counts as interrupted. Bounded to the newest ``keep`` commands.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import msgspec

from sentinel.model import CommandResult


class _Line(msgspec.Struct, omit_defaults=True):
    id: str
    result: CommandResult | None = None
    told: bool = False


_decode = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode


class Ledger:
    """Raises OSError when the file cannot be read or written; then nothing may be carried out."""

    def __init__(self, path: Path, node: str, *, keep: int = 4096) -> None:
        self._path, self._node, self._keep = path, node, keep
        self._lines: dict[str, _Line] = {}
        self._size = 0
        self._lock = threading.Lock()  # it is called from threads, because fsync may take its time
        self._load()

    def begin(self, command: str) -> bool:
        """True: it is written down as begun, carry it out. False: it was begun before."""
        if command in self._lines:
            return False
        self._append(_Line(command))
        return True

    def end(self, result: CommandResult) -> None:
        self._append(_Line(result.id, result))

    def told(self, command: str) -> None:
        """The controller has the result."""
        line = self._lines.get(command)
        if line is not None and not line.told:
            self._append(_Line(command, line.result, told=True))

    def result(self, command: str) -> CommandResult | None:
        line = self._lines.get(command)
        return line.result if line else None

    def untold(self) -> list[CommandResult]:
        """Results that the controller may not have yet, oldest first."""
        return [line.result for line in tuple(self._lines.values()) if line.result and not line.told]

    # -----------------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        for text in data.split(b"\n"):
            try:
                line = _decode(text)
            except (msgspec.DecodeError, RecursionError):
                continue
            self._lines[line.id] = line
        for line in self._lines.values():
            if line.result is None:
                line.result = CommandResult(id=line.id, node=self._node, ok=False, detail="interrupted by a restart of the agent")
        if data:
            with contextlib.suppress(OSError):  # a full disk is no reason to be blind: it only stays long, and is read alike again
                self._rewrite()

    def _append(self, line: _Line) -> None:
        with self._lock:
            # A newline on both sides: what a full disk left half written must not swallow this line.
            self._write(self._path, os.O_APPEND, b"\n" + _encode(line) + b"\n")
            self._lines[line.id] = line
            self._size += 1
            if self._size > 6 * self._keep:
                self._rewrite()

    def _rewrite(self) -> None:
        while len(self._lines) > self._keep:
            del self._lines[next(iter(self._lines))]
        new = self._path.with_suffix(".new")
        self._write(new, os.O_TRUNC, b"".join(_encode(line) + b"\n" for line in self._lines.values()))
        new.replace(self._path)
        self._size = len(self._lines)

    @staticmethod
    def _write(path: Path, how: int, data: bytes) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
        finally:
            os.close(file)
