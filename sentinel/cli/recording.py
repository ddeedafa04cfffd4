"""Recordings: what the probes of one node read, as lines of JSON that can be judged anywhere and at any time later.

What always holds: the first line is a header with format and version; every other line is one Reading, or says why a probe
could not look. A line that cannot be used is skipped, counted and named; a file that is no recording, or one of another
format, is refused in one sentence. A recording that was cut off (a full disk, a crash) loses its last line and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from sentinel import __version__
from sentinel.model import Reading

FORMAT = 1
TOLD = 1000  # lines that could not be used, and looks that were not taken, are told one by one up to so many
LINE_BYTES = 16 << 20  # a reading is some kilobytes; a flooded kernel log some hundreds of them


_NO_VALUE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # RecursionError: nested without end


class RecordingError(Exception):
    """The file cannot be judged at all; the sentence says why and what was wanted."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    sentinel_recording: int  # the format
    version: str = ""
    node: str = ""
    at: float = 0.0


class Missed(msgspec.Struct, frozen=True, kw_only=True):
    """A look that did not happen."""

    could_not_look: str
    probe: str
    at: float


@dataclass
class Tally:
    """What became of the lines."""

    header: Header
    readings: int = 0
    misses: int = 0
    missed: list[Missed] = field(default_factory=list)  # the latest TOLD of them
    skips: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list)  # line number, why; the first TOLD of them

    def skip(self, number: int, why: str) -> None:
        self.skips += 1
        if len(self.skipped) < TOLD:
            self.skipped.append((number, why))

    def miss(self, missed: Missed) -> None:
        self.misses += 1
        self.missed.append(missed)
        del self.missed[: -TOLD]


def header(node: str, at: float) -> bytes:
    return line(Header(sentinel_recording=FORMAT, version=__version__, node=node, at=at))


def line(value: Header | Missed | Reading) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def open_recording(stream: BinaryIO, name: str) -> Tally:
    """Read the header. Raises RecordingError when this is no recording, or one that this version cannot read."""
    wanted = f'wanted a first line like {{"sentinel_recording":{FORMAT}, …}}, as sentinel record writes it'
    try:
        found = msgspec.json.decode(stream.readline(LINE_BYTES), type=Header)
    except _NO_VALUE:  # a wrong type in the header is one too
        raise RecordingError(f"{name}: not a recording: {wanted}") from None
    if found.sentinel_recording != FORMAT:
        by = f" (written by sentinel {found.version})" if found.version else ""
        raise RecordingError(f"{name}: a recording of format {found.sentinel_recording}{by}; this sentinel reads format {FORMAT}")
    return Tally(found)


def readings(stream: BinaryIO, tally: Tally) -> Iterator[tuple[int, Reading]]:
    """Every reading with its line number; what could not be used goes into ``tally``."""
    number = 1
    while raw := stream.readline(LINE_BYTES):
        number += 1
        ended = raw.endswith(b"\n")
        if not ended and len(raw) == LINE_BYTES:
            while (rest := stream.readline(LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            tally.skip(number, f"longer than {LINE_BYTES >> 20} MiB")
            continue
        if not raw.strip():
            continue
        try:
            reading = _one(raw, tally)
        except _NO_VALUE as error:
            tally.skip(number, "cut off" if not ended else f"not a reading: {error}")
            continue
        if reading is not None:
            tally.readings += 1
            yield number, reading


def _one(raw: bytes, tally: Tally) -> Reading | None:
    try:
        return msgspec.json.decode(raw, type=Reading)
    except msgspec.ValidationError as no_reading:
        try:
            tally.miss(msgspec.json.decode(raw, type=Missed))
        except msgspec.ValidationError:
            raise no_reading from None
        return None
