"""One TOML file per host, checked into typed settings before anything starts.

This module exists so that a wrong configuration costs one clear sentence instead of a wrong drain. What always holds:

* Every error is a ConfigError naming the file, the key, what was wanted and what was found; no traceback reaches a user.
* Unknown keys are errors: a misspelt threshold must not silently keep its default.
* Durations are written ``"250ms"``, ``"5s"``, ``"10m"``, ``"2h"``; inside sentinel they are seconds.
* Secrets are never in this file: it names files that hold them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from sentinel.checks import problems
from sentinel.durations import Duration, parse_duration
from sentinel.settings import (
    AgentSettings,
    ControllerSettings,
    DynamoSettings,
    GatewaySettings,
    NodeSettings,
    PagingSettings,
    PoolSettings,
    Section,
    Settings,
    StoreSettings,
    TopologySettings,
    WorkerSettings,
)

__all__ = [
    "AgentSettings",
    "ConfigError",
    "ControllerSettings",
    "DynamoSettings",
    "GatewaySettings",
    "NodeSettings",
    "PagingSettings",
    "PoolSettings",
    "Section",
    "Settings",
    "StoreSettings",
    "TopologySettings",
    "WorkerSettings",
    "load",
    "read_secret",
]


class ConfigError(Exception):
    """The configuration cannot be used; the text says where, what was found, and what was wanted."""


def load(path: Path) -> Settings:
    """Read and check one file. Raises ConfigError with one sentence when it cannot be used."""
    try:
        raw = tomllib.loads(path.read_text("utf-8-sig"))  # editors of other systems put a mark before the first letter
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # tomllib's own error, a number of 5,000 digits, brackets without end
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    try:
        settings = msgspec.convert(raw, Settings, dec_hook=_hook)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_where(str(error))}") from None
    for problem in problems(settings):
        raise ConfigError(f"{path}: {problem}")
    return settings


def _hook(kind: type, value: Any) -> Any:
    if kind is Duration:
        return parse_duration(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


def _where(text: str) -> str:
    """Turn msgspec's ``… - at `$.pools[0].floor``` into ``pools[0].floor: …``."""
    message, _, place = text.partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    return f"{place}: {message[0].lower()}{message[1:]}" if place else message


def read_secret(path: Path, key: str) -> str:
    """The first line of a secret's file. Raises ConfigError when it is missing, empty, or readable by everyone."""
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    if mode & 0o007:
        raise ConfigError(f"{key}: {path} can be read by everyone (mode {mode & 0o777:o}); wanted 0640 or stricter")
    if not text:
        raise ConfigError(f"{key}: {path} is empty")
    return text.splitlines()[0]
