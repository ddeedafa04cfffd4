"""The gateway as a daemon: built from its file, announced to systemd, stopped and reloaded by signals.

This module exists so that everything else in this package gets its parts handed in. What always holds:

* SIGTERM drains and exits 0; a part that ends by itself is a bug, is said, and exits 1 for systemd to restart.
* SIGHUP takes over other pools, workers and limits, or keeps the old ones and says so; keys are read again without it.
* It serves before any table was published, or while the store is away, by its own configuration: every worker that is not a
  standby, primary pools only. The first published table replaces that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog
from msgspec import structs
from prometheus_client import disable_created_metrics

from sentinel.config import ConfigError, GatewaySettings, Settings, load, read_secret
from sentinel.gateway import guards
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.desk import Desk
from sentinel.gateway.guard_meters import GuardMeters
from sentinel.gateway.models import configured
from sentinel.gateway.processes import PROCESS, Child, Processes
from sentinel.gateway.server import Gateway
from sentinel.gateway.sessions import Holders
from sentinel.gateway.xds import Endpoints
from sentinel.heap import settle
from sentinel.model import Fleet, Routes
from sentinel.service import Service
from sentinel.store import Store, StoreError, open_store
from sentinel.store.admission import AdmissionRecords
from sentinel.store.breakers import BreakerRecords
from sentinel.store.gateways import Gateways
from sentinel.store.rates import RateRecords
from sentinel.store.responses import ResponseRecords

log = structlog.get_logger(__name__)

STORE_S = 2.0  # how long the start waits for the published table


async def run(settings: Settings, config_path: Path) -> int:
    """Run until SIGTERM or SIGINT. Raises ConfigError when the settings cannot be used; returns an exit status."""
    own = _table(settings, config_path)
    process = os.environ.get(PROCESS)
    if own.processes > 1 and process is None:
        return await Processes(own.processes).run()
    return await _serve(settings, own, config_path, int(process or 0), Child() if process is not None else None)


async def _serve(settings: Settings, own: GatewaySettings, path: Path, process: int, child: Child | None) -> int:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    service, stopping, reloading = Service({} if child else None), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, reloading.set)
    beats = child.beat() if child else service.watchdog(lambda: True)
    beating = asyncio.create_task(beats, name="beat")  # from the loop that serves, to the very end
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(beating.cancel)
        try:
            store = await open_store(settings.store)
        except StoreError as error:
            raise ConfigError(f"store.url: {error}") from None
        stack.push_async_callback(store.close)
        gateway, admission, breakers = build(settings, own, store, process=process)
        broken = asyncio.Event()
        guards.broken.set(broken)
        await breakers.start()
        stack.push_async_callback(breakers.stop)
        await admission.start()
        stack.push_async_callback(admission.stop)
        gateway.obey(await first_routes(store, settings.fleet()))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        settle()
        service.ready(f"listens on port {gateway.port}")
        work: dict[str, Coroutine[Any, Any, Any]] = {
            "signal": stopping.wait(), "gateway": gateway.wait(), "guards": broken.wait(),
            "reload": _reload(reloading, gateway, admission, service, path),
        }  # fmt: skip
        if child:
            child.up.set()
            work["child"] = child.alone()
        parts = {asyncio.create_task(part, name=name) for name, part in work.items()}
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        service.stopping()
        log.info("gateway stops", answering=gateway.active)
        for task in parts:
            task.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        for task in done:
            if task.get_name() not in ("signal", "child"):
                log.error("a part of the gateway ended by itself", part=task.get_name(), exc_info=task.exception())
                return 1
    return 0


def build(
    settings: Settings, own: GatewaySettings, store: Store, *, process: int = 0
) -> tuple[Gateway, LeaseAdmission, SharedBreakers]:
    """A gateway of this store, not started. Raises ConfigError."""
    boot = secrets.token_hex(8)
    breakers = SharedBreakers(BreakerRecords(store, own.breakers), host=own.name, process=boot)
    limits = structs.replace(own.admission, replicas=max(own.admission.replicas, own.processes))
    admission = LeaseAdmission(
        AdmissionRecords(store, float(limits.lease)), limits, own.tenants, owner=boot, rates=RateRecords(store)
    )
    key = read_secret(own.worker_key_file, "gateway.worker_key_file") if own.worker_key_file else ""
    desk = Desk(
        own, settings.fleet(), breakers=breakers, admission=admission, frontends=settings.dynamo.every_frontend, worker_key=key,
        limits=admission.picture, holders=Holders(ResponseRecords(store)),
    )  # fmt: skip
    desk.meters.registry.register(GuardMeters(admission, breakers))
    xds = Endpoints(own.xds_dir) if own.xds_dir and process == 0 else None
    gateway = Gateway(
        desk,
        boot=boot,
        process=process,
        watch=lambda: store.watch_routes(float(own.poll)),
        gateways=Gateways(store),
        on_routes=(lambda _: xds.write(desk.plan)) if xds else lambda _: None,
    )
    return gateway, admission, breakers


async def first_routes(store: Store, fleet: Fleet) -> Routes:
    """The published table, or the configuration's own when there is none or the store does not answer."""
    until = asyncio.get_running_loop().time() + STORE_S
    while True:
        try:
            found = await store.routes()
            if found is None:
                log.info("no route table has been published; serving by the configuration")
            return found or configured(fleet)
        except StoreError as error:
            if asyncio.get_running_loop().time() > until:
                log.warning("the store does not answer; serving by the configuration until it does", error=str(error))
                return configured(fleet)
            await asyncio.sleep(0.1)


def _table(settings: Settings, path: Path) -> GatewaySettings:
    if settings.gateway is None:
        raise ConfigError(f"{path}: has no [gateway] table; wanted one on a host that runs 'sentinel gateway'")
    return settings.gateway


async def _reload(
    asked: asyncio.Event, gateway: Gateway, admission: LeaseAdmission, service: Service, path: Path
) -> None:
    """Re-read the file whenever ``asked`` is set; a bad one keeps everything as it is."""
    while True:
        await asked.wait()
        asked.clear()
        service.reloading()
        told = f"listens on port {gateway.port}"
        try:
            new = load(path)
            own = _table(new, path)
        except ConfigError as error:
            log.warning("the changed configuration is not used; the one of before stays in force", error=str(error))
            service.ready(f"{told}; the changed configuration is not used: {error}")
            continue
        admission.configure(own.admission, own.tenants)
        gateway.reconfigure(new.fleet(), new.dynamo.every_frontend)
        log.info("configuration read again; of [gateway], only admission and tenants change without a restart")
        service.ready(told)
