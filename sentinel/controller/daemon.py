"""The controller as a daemon: built from its file, announced to systemd, stopped and reloaded by signals.

This module exists so that everything else in this package gets its parts handed in. What always holds:

* SIGTERM gives the lease back and exits 0; a part that ends by itself is a bug, is said, and exits 1 for systemd to restart.
* SIGHUP takes a new fleet and policy or, when the file cannot be used, keeps the old ones and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import structlog

from sentinel.agent.service import Service
from sentinel.config import ConfigError, ControllerSettings, Settings, load
from sentinel.controller.commands import CommandDesk
from sentinel.controller.metrics import Metrics
from sentinel.controller.scaling import ScaleHook
from sentinel.controller.seat import Controller
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy import Policy
from sentinel.decide.rules.policy_file import PolicyError, default_policy_text, load_policy
from sentinel.heap import seldom
from sentinel.model import Routes
from sentinel.paging import build_pager
from sentinel.serving.adapters import Serving
from sentinel.store import StoreError, open_store

log = structlog.get_logger(__name__)


async def run(settings: Settings, config_path: Path) -> int:
    """Run until SIGTERM or SIGINT. Raises ConfigError when the settings cannot be used; returns an exit status."""
    own = settings.controller
    if own is None:
        raise ConfigError(f"{config_path}: has no [controller] table; wanted one on a host that runs 'sentinel controller'")
    policy, rules = _policy(own)
    seldom()
    service, stopping, reloading = Service(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, reloading.set)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            store = await open_store(settings.store, own.journal_dir.parent)
        except StoreError as error:
            raise ConfigError(f"store.url: {error}") from None
        stack.push_async_callback(store.close)
        metrics, desk = Metrics(), CommandDesk()

        async def published() -> Routes | None:
            """From memory: ten thousand workers are a megabyte to read, and each one's way out asks."""
            return controller.ledger.routes if controller.ledger else None

        controller = Controller(
            own, settings.fleet(), store=store, desk=desk, decider=partial(Decider, policy), policy=rules, metrics=metrics,
            serving=Serving.open(
                settings.dynamo, hands=desk, keep=store.kept, routes=published, session=session,
                scale=ScaleHook(own.scale_out) if own.scale_out else None,
            ),
            pager=build_pager(settings.paging, session, metrics.registry), runbooks=settings.paging.runbooks,
            frontends=len(settings.dynamo.every_frontend),
        )  # fmt: skip
        await controller.start()
        stack.push_async_callback(controller.stop)
        service.ready(f"listens on {controller.url}")
        parts = {
            asyncio.create_task(work, name=name)
            for name, work in (
                ("signal", stopping.wait()),
                ("leader", controller.wait()),
                ("reload", _reload(reloading, controller, service, config_path, settings=settings, policy=rules)),
            )
        }
        watchdog = asyncio.create_task(service.watchdog(controller.alive), name="watchdog")
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        service.stopping()
        log.info("controller stops")
        for task in (*parts, watchdog):
            task.cancel()
        await asyncio.gather(*parts, watchdog, return_exceptions=True)
        for task in done:
            if task.get_name() != "signal":
                log.error("a part of the controller ended by itself", part=task.get_name(), exc_info=task.exception())
                return 1
    return 0


async def _reload(
    asked: asyncio.Event, controller: Controller, service: Service, path: Path, *, settings: Settings, policy: str
) -> None:
    """Re-read the file whenever ``asked`` is set; a bad one keeps everything as it is."""
    while True:
        await asked.wait()
        asked.clear()
        service.reloading()
        try:
            new = load(path)
            if new.controller is None:
                raise ConfigError(f"{path}: has no [controller] table any more")
            rules, text = _policy(new.controller)
        except ConfigError as error:
            log.warning("the changed configuration is not used; the one of before stays in force", error=str(error))
            service.ready(f"listens on {controller.url}; the changed configuration is not used: {error}")
            continue
        for table in ("store", "paging", "dynamo"):
            if getattr(new, table) != getattr(settings, table):
                log.warning("a change of this table takes effect only with a restart", table=table)
        if settings.controller and msgspec.structs.replace(new.controller, policy=None) != msgspec.structs.replace(
            settings.controller, policy=None
        ):
            log.warning("of [controller], only a changed policy takes effect without a restart")
        await controller.reload(new.fleet(), text)
        log.info("configuration read again", workers=len(new.workers), new_policy=text != policy, mode=rules.mode.value)
        settings, policy = new, text
        service.ready(f"listens on {controller.url}")


def _policy(settings: ControllerSettings) -> tuple[Policy, str]:
    """The rules, and their text."""
    try:
        text = settings.policy.read_text("utf-8") if settings.policy else default_policy_text()
        return load_policy(text), text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"controller.policy: {settings.policy} cannot be read: {error}") from None
    except PolicyError as error:
        raise ConfigError(f"controller.policy: {settings.policy or 'the shipped policy'}: {error}") from None
