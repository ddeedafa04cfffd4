"""Every number by which a measurement becomes a finding: read from one file, checked, and the same for all probes of a process.

This module exists so that a site can read, dispute and change a threshold without reading code, and so that a wrong one costs
a sentence before anything is judged. What always holds:

* ``thresholds.toml`` beside this file has every key, its unit and its source; code has no default, so the two cannot drift.
* A site's file gives only what it changes; an unknown key, a wrong type, a value out of range or one that contradicts another
  is one sentence that names file, key, what was wanted and what was found.
* They are put in force (``use``) before the probes look and stay as they are between two of a reading's judgements, so that
  ``assess`` remains a function of its arguments and of one file.

Judgement stays in the probes' policy modules; there ``limits().gpu.hung_sure_s`` is all that is seen of this.
"""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from probes.threshold_tables import Thresholds, contradictions

_WORDS = (("Expected", "wanted"), ("`float`", "a number"), ("`int`", "a whole number"), ("`array`", "a list"))


class ThresholdsError(ValueError):
    """The thresholds cannot be used; the sentence says which file and key, what was wanted and what was found."""


def shipped_text() -> str:
    """The file as it is shipped (package data), for reading and copying."""
    data = pkgutil.get_data("probes", "thresholds.toml")
    if data is None:
        raise ThresholdsError("the shipped thresholds.toml is missing from the installation")
    return data.decode("utf-8")


@lru_cache(maxsize=1)
def shipped() -> Thresholds:
    """What holds where a site says nothing."""
    return _checked(tomllib.loads(shipped_text()), "the shipped thresholds.toml")


def load(path: Path) -> Thresholds:
    """A site's file over the shipped values, key by key. Raises ThresholdsError with one sentence."""
    try:
        own = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ThresholdsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ThresholdsError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # tomllib's own error, a number of 5,000 digits, brackets without end
        raise ThresholdsError(f"{path}: is not valid TOML: {error}") from None
    known: dict[str, dict[str, Any]] = msgspec.to_builtins(shipped())
    for name, table in own.items():
        if name not in known:
            raise ThresholdsError(f"{path}: {name}: no such table; wanted one of {', '.join(known)}")
        if not isinstance(table, dict):
            raise ThresholdsError(f"{path}: {name}: wanted a table of thresholds, found {_shown(table)}")
        for key in table:
            if key not in known[name]:
                raise ThresholdsError(f"{path}: {name}.{key}: no such threshold; wanted one of {', '.join(known[name])}")
    return _checked({name: {**table, **own.get(name, {})} for name, table in known.items()}, str(path))


def _checked(values: dict[str, Any], file: str) -> Thresholds:
    try:
        read = msgspec.convert(values, Thresholds)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        name, _, key = place.rstrip("`").partition(".")
        found = values.get(name, {}).get(key.partition("[")[0])
        wanted = message.partition(", got")[0]
        for theirs, ours in _WORDS:
            wanted = wanted.replace(theirs, ours)
        raise ThresholdsError(f"{file}: {name}{'.' if key else ''}{key}: {wanted}, found {_shown(found)}") from None
    for problem in contradictions(read):
        raise ThresholdsError(f"{file}: {problem}")
    return read


def _shown(value: Any) -> str:
    return repr(value)[:100]


# -- what is in force ---------------------------------------------------------------------------------------------------------

_in_force: Thresholds | None = None


def limits() -> Thresholds:
    """The thresholds that are in force in this process."""
    return shipped() if _in_force is None else _in_force


def use(thresholds: Thresholds | None) -> None:
    """Put thresholds in force for every judgement from now on; None: the shipped ones."""
    global _in_force  # noqa: PLW0603  (one set for a process: a node has one file, and assess keeps its three arguments)
    _in_force = thresholds


@contextmanager
def using(thresholds: Thresholds | None) -> Iterator[None]:
    """``use`` for a while, and then what was in force before."""
    before = _in_force
    use(thresholds)
    try:
        yield
    finally:
        use(before)
