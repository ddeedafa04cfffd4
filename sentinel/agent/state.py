"""The agent's own folder: taken by one agent at a time, and opened with one sentence where it cannot be.

What always holds: every way in which the folder is not usable at the start is a ConfigError that names ``agent.state_dir``.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import structlog

from sentinel.agent.spool import Spool
from sentinel.config import AgentSettings, ConfigError

log = structlog.get_logger()


def locked(folder: Path) -> int:
    """Make the state directory and take it for this agent alone; the lock ends with the descriptor, however we end."""
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"agent.state_dir: {folder} cannot be written by this user: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"agent.state_dir: {folder} is in use by another agent") from None
    return lock


def open_spool(settings: AgentSettings) -> Spool:
    """What an earlier run has not delivered yet. Damaged records are skipped, and told."""
    path = settings.state_dir / "findings.spool"
    try:
        spool = Spool(path, settings.spool_max_bytes)
    except OSError as error:
        raise ConfigError(f"agent.state_dir: {error.filename or path} cannot be read: {error.strerror or error}") from None
    if spool.damaged:
        log.warning("the spool held damaged records; they are skipped", records=spool.damaged)
    return spool
