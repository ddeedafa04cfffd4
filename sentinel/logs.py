"""Log lines of the daemons: one event a line, JSON for a log collector or plain text for a person.

Set up once by a daemon's ``run``; modules only call ``structlog.get_logger()``. Lines of the libraries (aiohttp, apscheduler)
go the same way, so that one stream has one form. Nothing secret is ever a field.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import msgspec
import structlog


def _json(event: Any, **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()


def configure(style: Literal["json", "console"] | None = None, level: str = "info", stream: TextIO | None = None) -> None:
    """Send log lines to ``stream`` (stderr). Without a ``style``, a terminal gets text and everything else JSON."""
    out = stream or sys.stderr
    style = style or ("console" if out.isatty() else "json")
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
        if style == "json"
        else [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # Libraries speak of their own routine (every job added, every request served); what matters there is a warning.
    for name in ("apscheduler", "aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A probe still busy when its next turn comes is the runner's to tell (probe status), not a line every second.
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)
