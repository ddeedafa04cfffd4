"""The journal: every event the decider was given and every instruction it gave back, one JSON line each.

This module exists so that a decision can be replayed, explained and backtested later. What always holds:

* A line is written after what it decided became durable and before any of it is carried out.
* The journal is bounded: the oldest files go first. It is never appended to by a second run, so that a line cut short by a
  crash stays the last of its file, where reading tolerates it.
* Of a route table it keeps the rows that changed (``decide/state/brief``).
* A journal that cannot be written (a full disk) never stops decisions; it is said once, counted, and tried again.
* Each leadership begins with PolicyLoaded, FleetLoaded and Restored, so that every stretch between two of them replays by itself;
  each later file of it begins with the same three as a checkpoint, for the day when the first one has been given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog

from sentinel.decide.state.brief import Brief
from sentinel.decide.state.events import AnyEvent, AnyInstruction

log = structlog.get_logger(__name__)

FILES = 8  # the bound is kept in whole files, so one of eight is given up at a time
SUFFIX = ".jsonl"


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. ``error`` is set when the decider failed on the event: then it has no instructions.

    ``checkpoint``: what was durable when this file began; the decider was not given it.
    """

    event: AnyEvent
    instructions: tuple[AnyInstruction, ...] = ()
    error: str = ""
    checkpoint: bool = False


_decoder = msgspec.json.Decoder(Entry)


class Journal:
    """Appends entries below ``directory``; all files together stay within ``max_bytes`` (plus one batch)."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.errors = 0
        self.checkpoint: Callable[[], Sequence[AnyEvent]] | None = None  # of the leadership that writes, once it has taken over
        self._share = max(max_bytes // FILES, 1)
        self._file: BinaryIO | None = None
        self._size = 0
        self._encoder = msgspec.json.Encoder()
        self._brief = Brief()
        self._failing = False

    def write(self, entries: Sequence[Entry]) -> None:
        """Append a batch. Never raises for the disk's sake: see ``errors``."""
        if not entries:
            return
        buffer = b"".join(self._encoder.encode(self._short(e)) + b"\n" for e in entries)
        try:
            if self._file is None or self._size >= self._share:
                self._rotate()
            assert self._file is not None  # noqa: S101  (_rotate opens one or raises)
            self._file.write(buffer)
            self._size += len(buffer)
            self._failing = False
        except OSError as error:
            self.errors += len(entries)
            self.close()  # a line may be half written: the next one starts a new file
            if not self._failing:
                log.warning("the journal cannot be written; decisions go on without it", error=str(error))
            self._failing = True

    def _short(self, entry: Entry) -> Entry:
        instructions = self._brief.of(entry.event, entry.instructions)
        return msgspec.structs.replace(entry, instructions=instructions) if instructions else entry

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.warning("the journal's file did not close cleanly", error=str(error))

    def _rotate(self) -> None:
        self.close()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        held = _files(self.directory)
        for old in held[: max(len(held) - (FILES - 1), 0)]:
            old.unlink(missing_ok=True)
        number = int(held[-1].stem) + 1 if held else 1
        for n in itertools.count(number):
            try:
                # "x": a file is never shared with another controller that was given the same directory.
                file = self._file = (self.directory / f"{n:012d}{SUFFIX}").open("xb", buffering=0)
                break
            except FileExistsError:
                continue
        known = self.checkpoint() if self.checkpoint else ()
        self._size = file.write(b"".join(self._encoder.encode(Entry(event=e, checkpoint=True)) + b"\n" for e in known))


def _files(directory: Path) -> list[Path]:
    return sorted((p for p in directory.glob(f"*{SUFFIX}") if p.stem.isdigit()), key=lambda p: int(p.stem))


def read_journal(place: Path) -> Iterator[Entry]:
    """Every entry of a journal's directory, or of one of its files, oldest first.

    The last line of a file may be cut short (a crash) and is then left out.

    Raises ValueError, naming file and line, when any other line is not an entry: a journal with a hole replays to
    something else, and that must not pass unseen.
    """
    for path in _files(place) if place.is_dir() else [place]:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue  # rotated away while we were reading
        with file:
            broken: ValueError | None = None
            for number, line in enumerate(file, 1):
                if broken:
                    raise broken
                try:
                    yield _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    broken = ValueError(f"{path}, line {number}: not a journal entry: {error}")
            if broken:
                log.warning("the last line of a journal file is cut short and was left out", file=str(path))
