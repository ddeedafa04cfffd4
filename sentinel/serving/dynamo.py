"""Workers under NVIDIA Dynamo 1.6: out of rotation and back by their discovery entries, without their help.

This module exists because Dynamo has no call to drain one worker (ai-dynamo/dynamo#11173 is open). What always holds:

* An entry's body is durable in Keep before the entry is removed, so that a crash in between loses nothing.
* An entry is written back only after the worker itself has said, just now, that it is the same process: Dynamo would route to
  a dead one until its lease ends (10 s with files, 30 s with etcd).
* Only entries of the endpoint that takes requests are touched; the router's index of KV blocks stays as it is.
* The worker's instance id is learned (from its own metrics, from look, from agents), since it changes at every start. What
  was learned last is used at once, and the worker is asked after: a hung worker leaves rotation as fast as a healthy one.
* A worker that was taken out or stopped stays out under whatever id it comes back (a person or systemd restarts it, and Dynamo
  routes to it at once): ``look`` removes that registration too. Only ``reroute`` brings a worker back.

``verify``: Dynamo 1.6.1 sends a request to a chosen worker only while that worker is registered (measured: 400 otherwise). So
a worker that is out is registered, asked for one token, pinned, through the frontend, and taken out again, whatever it answered.
While it is asked it may get other requests too, which then finish; nothing in 1.6.1 prevents that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import aiohttp
import msgspec
import structlog

from probes import engine
from probes.engine import Answer, Metrics, Token
from sentinel.config import DynamoSettings
from sentinel.model import Role, Worker, WorkerSeen
from sentinel.serving import AdapterError, Hands, Keep
from sentinel.serving.discovery import REQUESTS, Discovery, Entry
from sentinel.serving.hands import start, stop

log = structlog.get_logger(__name__)

LOOK_S = 1.0  # one look at a system server; it answers in 2 ms on a healthy node
ONE_TOKEN_S = 5.0  # one try within a verification; a frontend that has not seen the entry yet answers 400 at once
RETRY_S = 0.1


class Removed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What Keep holds per worker: the last instance id that was known, and the entries that were taken out of discovery.

    ``stopped``: its process was ended through us, so no process of it is wanted in rotation.
    """

    instance: str = ""
    entries: tuple[Entry, ...] = ()
    stopped: bool = False

    @property
    def out(self) -> bool:
        return self.stopped or bool(self.entries)


class DynamoAdapter:
    """All verbs of sentinel.serving.Adapter. The session, the discovery and the rest are whoever's handed them in."""

    def __init__(
        self, settings: DynamoSettings, discovery: Discovery, hands: Hands, keep: Keep, session: aiohttp.ClientSession
    ) -> None:
        self._settings, self._discovery, self._hands, self._keep, self._session = settings, discovery, hands, keep, session
        self._known: dict[str, str] = {}  # worker → instance id, as last seen
        self._looked: dict[str, str] = {}  # worker → instance id that look has nothing more to do about
        self._stops: Counter[str] = Counter()  # worker → times it was stopped, so that a verification does not outlive it
        self._locks: dict[str, asyncio.Lock] = {}  # one verb at a time per worker: a removal must not cross a return

    def learn(self, worker: str, instance: str) -> None:
        """Take in an instance id that somebody else saw (an agent on the worker's node)."""
        if instance:
            self._known[worker] = instance

    async def list_workers(self) -> list[WorkerSeen]:
        names = {instance: name for name, instance in self._known.items()}
        there = await self._registered()
        return [
            WorkerSeen(worker=names.get(e.instance, ""), url=f"tcp://{e.address}", engine="dynamo", instance=e.instance)
            for e in there
        ]

    async def deroute(self, worker: Worker) -> bool:
        async with self._lock(worker):
            guess = self._known.get(worker.name) or worker.instance
            if not guess and (kept := await self._kept(worker)):
                guess = kept.instance
            if guess:
                await self._remove(worker, guess)
            metrics, answer = await self._metrics(worker)
            if metrics.instance and metrics.instance != guess:
                await self._remove(worker, metrics.instance)
            elif not guess and answer.how != "refused":  # refused: no process, so nothing that could take a request
                raise AdapterError(
                    f"{worker.name} cannot be told from the other Dynamo workers: its instance id was never seen and "
                    f"{_system(worker)} does not say it ({answer.why or f'HTTP {answer.status}, no worker_id'})"
                )
            return True

    async def reroute(self, worker: Worker) -> bool:
        async with self._lock(worker):
            metrics, answer = await self._metrics(worker)
            if not metrics.instance:
                log.warning("a worker is not put back: it does not answer", worker=worker.name, why=answer.why or answer.status)
                return False
            return await self._restore(worker, metrics.instance, stays=True)

    async def look(self, worker: Worker) -> WorkerSeen | None:
        health, (metrics, answer) = await asyncio.gather(
            engine.ask(self._session, "GET", f"{_system(worker)}/health", deadline_s=LOOK_S, limit=65536), self._metrics(worker)
        )
        if "answered" not in (health.how, answer.how):
            if "refused" in (health.how, answer.how):
                return None
            raise AdapterError(f"{worker.name} at {_system(worker)}: {health.why}")
        if metrics.instance and metrics.instance != self._looked.get(worker.name):
            await self._keep_out(worker, metrics.instance)
        return WorkerSeen(
            worker=worker.name,
            url=worker.url,
            engine="dynamo",
            healthy=engine.healthy("dynamo", health),
            running=metrics.running,
            waiting=metrics.waiting,
            progress=metrics.progress,
            instance=metrics.instance,
        )

    async def in_flight(self, worker: Worker) -> int | None:
        """Dynamo's own gauge on the worker. None also when its system server is gone: after a SIGTERM that ends first."""
        metrics, _ = await self._metrics(worker)
        return metrics.in_flight

    async def verify(self, worker: Worker, deadline_s: float) -> tuple[bool, str]:
        if not self._settings.frontend:
            return False, "no [dynamo] frontend is configured, so no token can be asked of one worker"
        async with self._lock(worker):
            ok, sentence, instance = await self._ask_pinned(worker, asyncio.get_running_loop().time() + deadline_s)
            kept = await self._kept(worker)
            if instance and (not ok or (kept and kept.out)):
                await self._remove(worker, instance)
            return ok, f"{worker.name}: {sentence}"

    async def stop(self, worker: Worker, *, hard: bool, key: str) -> bool:
        if not await stop(self._hands, worker, hard=hard, key=key):
            return False
        self._stops[worker.name] += 1
        async with self._lock(worker):
            kept = await self._kept(worker)
            for instance in {self._known.pop(worker.name, ""), kept.instance if kept else "", worker.instance} - {""}:
                for entry in [e for e in await self._registered() if e.instance == instance]:
                    await self._discovery.remove(entry)  # a killed worker's entry would draw requests until its lease ends
            await self._put(worker, Removed(stopped=True))  # and must never come back
        return True

    async def start(self, worker: Worker, *, key: str) -> bool:
        """Ask its node to start it. A started worker registers by itself once it has loaded; see ``verify``."""
        return await start(self._hands, worker, key=key)

    async def scale_to(self, pool: str, role: Role, count: int) -> bool:
        """Dynamo scales through its planner or Kubernetes, which choose the victims themselves; not used: False."""
        return False

    # -----------------------------------------------------------------------------------------------------------------

    async def _ask_pinned(self, worker: Worker, until: float) -> tuple[bool, str, str]:
        """(right, sentence, instance that is registered now); ``until`` on the loop's clock."""
        loop, stops = asyncio.get_running_loop(), self._stops[worker.name]
        while True:
            metrics, answer = await self._metrics(worker)
            instance = metrics.instance
            health = await engine.ask(self._session, "GET", f"{_system(worker)}/health", deadline_s=LOOK_S, limit=65536)
            if instance and engine.healthy("dynamo", health) is not False and await self._restore(worker, instance, stays=False):
                break
            if self._stops[worker.name] != stops:
                return False, "it was stopped meanwhile", ""
            if loop.time() + RETRY_S >= until:
                why = f"nothing listens at {_system(worker)}" if answer.how == "refused" else answer.why
                return False, why or f"it answers, but is not ready or not registered ({health.status or health.why})", ""
            await asyncio.sleep(RETRY_S)  # it still loads; asked often, since it takes requests from the moment it registers
        while True:
            token = await engine.one_token(
                self._session,
                self._settings.frontend,
                deadline_s=max(0.001, min(ONE_TOKEN_S, until - loop.time())),
                model=metrics.model,
                instance=instance,
                role=worker.role.value,
            )
            if token.ok:
                return True, f"{token.why} in {token.seconds * 1000:.0f} ms", instance
            if _settled(token):
                return False, token.why, instance
            if self._stops[worker.name] != stops:
                return False, "it was stopped meanwhile", instance
            if loop.time() + RETRY_S >= until:
                return False, f"no right answer in time ({token.why})", instance
            await asyncio.sleep(RETRY_S)

    async def _restore(self, worker: Worker, instance: str, *, stays: bool) -> bool:
        """Have the entries of this very process in discovery. False: they are not, and there is nothing to write back.

        Unless it ``stays``, the worker counts as out all the while, so that a crash in between forgets nothing.
        """
        there = {e.key: e for e in await self._registered() if e.instance == instance}
        kept = await self._kept(worker)
        mine = kept.entries if kept and kept.instance == instance else ()  # another process registers by itself once it is ready
        for entry in mine:
            if entry.key not in there and not await self._discovery.restore(entry):
                log.warning("a worker is not put back: its lease has ended", worker=worker.name, instance=instance)
                return False
        entries = {e.key: e for e in mine} | there
        if kept and kept.out and entries:
            # Once it stays its own registration counts: were it to leave by itself, nobody may put it back.
            await self._put(worker, Removed(instance=instance, entries=() if stays else tuple(entries.values())))
        return bool(entries)

    async def _remove(self, worker: Worker, instance: str) -> None:
        entries = [e for e in await self._registered() if e.instance == instance]
        if not entries:
            return
        kept = await self._kept(worker)
        before = kept.entries if kept and kept.instance == instance else ()
        merged = {e.key: e for e in (*before, *entries)}
        await self._put(worker, Removed(instance=instance, entries=tuple(merged.values())))
        for entry in entries:
            await self._discovery.remove(entry)

    async def _keep_out(self, worker: Worker, instance: str) -> None:
        """Remove what a process registered that came by itself, where its worker is out; once per process, when it has."""
        if self._lock(worker).locked():
            return  # a verb is under way that settles it
        async with self._lock(worker):
            kept = await self._kept(worker)
            if kept and kept.out and kept.instance != instance:
                if not [e for e in await self._registered() if e.instance == instance]:
                    return  # it still loads: the next look asks again
                log.warning("a worker that is out came back by itself and stays out", worker=worker.name, instance=instance)
                await self._remove(worker, instance)
            self._looked[worker.name] = instance

    async def _put(self, worker: Worker, removed: Removed) -> None:
        await self._keep.put(_record(worker), msgspec.json.encode(removed))

    async def _registered(self) -> list[Entry]:
        return [e for e in await self._discovery.instances(self._settings.namespace) if e.endpoint == REQUESTS]

    async def _kept(self, worker: Worker) -> Removed | None:
        raw = await self._keep.get(_record(worker))
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Removed)
        except msgspec.DecodeError as error:
            raise AdapterError(f"what was kept of {worker.name}'s discovery entry cannot be read: {error}") from None

    async def _metrics(self, worker: Worker) -> tuple[Metrics, Answer]:
        answer = await engine.ask(self._session, "GET", f"{_system(worker)}/metrics", deadline_s=LOOK_S)
        metrics = engine.parse(answer.body) if answer.how == "answered" and answer.status == 200 else Metrics()
        self.learn(worker.name, metrics.instance)
        return metrics, answer

    def _lock(self, worker: Worker) -> asyncio.Lock:
        return self._locks.setdefault(worker.name, asyncio.Lock())


def _settled(token: Token) -> bool:
    """Whether not to ask again now. 400: the frontend has not seen the entry yet; 429 and 503: busy; 500: it was another's fault.

    A worker that let the token's time pass gets other requests while it is asked, and they would hang too.
    """
    return token.ok is False and (token.how == "timeout" or (token.how == "answered" and (token.status or 0) < 500))


def _system(worker: Worker) -> str:
    return (worker.system_url or worker.url).rstrip("/")


def _record(worker: Worker) -> str:
    return f"dynamo/{worker.name}"


def instances(seen: Iterable[WorkerSeen]) -> dict[str, str]:
    """Worker → instance id, for ``learn``, out of what agents report."""
    return {w.worker: w.instance for w in seen if w.worker and w.instance}
