"""What no single key can show: names that clash, references that lead nowhere, addresses, times and files that cannot be used.

This module exists so that a wrong configuration is refused before anything starts, by ``sentinel config check`` and by the
daemons alike. What always holds: a problem is one sentence that begins with the key, and says what was found and what was
wanted; a secret is never repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from sentinel.checks_topology import topology_problems
from sentinel.durations import Duration
from sentinel.model import Component, gpu_component
from sentinel.settings import ControllerSettings, GatewaySettings, PoolSettings, Section, Settings, WorkerSettings
from sentinel.settings_gateway import guard_problems
from sentinel.store_url import problem

CAPACITY_MAX = 1e6  # sessions; a share of a pool is reckoned from sums of these
LEASE_MIN = 0.1  # seconds; below, a store that answers in its usual time already loses the lease
DRIVER_MIN = 1.0  # seconds; a look at a healthy GPU takes milliseconds, but below this a busy node would be called hung
ZERO_MEANS_AT_ONCE = ("queue", "unready", "drain")
EVERY_MIN = 0.01  # seconds between two looks or ticks; below, they are all that a core does

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]+")


def problems(s: Settings) -> Iterator[str]:
    """Everything that is wrong with these settings, the first thing first."""
    yield from _names(s)
    yield from _pools(s)
    yield from _workers(s)
    yield from topology_problems(s)
    yield from _times(s)
    yield from _addresses(s)
    for key, file in _files(s):
        if file is not None and not file.is_file():
            yield f"{key}: no such file: {file}"


def _names(s: Settings) -> Iterator[str]:
    for kind, names in (
        ("pools", [p.name for p in s.pools]),
        ("workers", [w.name for w in s.workers]),
        ("nodes", [n.name for n in s.nodes]),
    ):
        twice = {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else set()
        for name in sorted(twice):
            yield f"{kind}: the name {name!r} is used {names.count(name)} times; wanted: each name once"
        yield from (f"{kind}: {n!r} is no name; wanted letters, digits, '-', '_' or '.'" for n in names if not _NAME.fullmatch(n))
    yield from _ambiguous(s)
    if s.agent and not _NAME.fullmatch(s.agent.node):
        yield f"agent.node: {s.agent.node!r} is no name; wanted letters, digits, '-', '_' or '.'"
    if s.controller and not s.controller.name.strip():
        yield "controller.name: it is empty; wanted a name that tells this controller from the others"


def _ambiguous(s: Settings) -> Iterator[str]:
    """A worker called like a node that others share: ``sentinel drain NAME`` would not say which of the two is meant."""
    nodes = {n.name for n in s.nodes} & {w.name for w in s.workers}
    for w in s.workers if nodes else ():
        for node in {*w.nodes, *(g.partition("/")[0] for g in w.gpus)} & nodes - {w.name}:
            yield f"workers: {node!r} names a worker and also the node that {w.name!r} runs on; wanted two names"


def _pools(s: Settings) -> Iterator[str]:
    pools = {p.name: p for p in s.pools}
    peopled = {w.pool for w in s.workers}
    for p in s.pools:
        if p.name not in peopled:
            yield f"pools: {p.name!r} has no workers; wanted at least one [[workers]] with pool = {p.name!r}"
        yield from (f"pools.{p.name}.overflow: no pool is called {o!r}" for o in p.overflow if o not in pools)
        if p.name in p.overflow:
            yield f"pools.{p.name}.overflow: a pool cannot overflow into itself"
        elif circle := _circle(p.name, pools):
            yield f"pools.{p.name}.overflow: goes in a circle ({' → '.join(circle)}); wanted an end to it"
        for o in {name: pools[name] for name in p.overflow if name in pools}.values():  # gateways send nothing across
            if o.model != p.model:
                yield f"pools.{p.name}.overflow: {o.name!r} serves the model {o.model!r}; wanted {p.model!r}, as {p.name!r} does"
        if len(set(p.overflow)) < len(p.overflow):
            yield f"pools.{p.name}.overflow: names a pool twice; wanted each pool once, in the order in which they take over"


def _circle(start: str, pools: dict[str, PoolSettings]) -> list[str]:
    """A way from a pool along ``overflow`` back to itself; empty when there is none."""
    ways, seen = [[start]], {start}
    while ways:
        way = ways.pop()
        for name in pools[way[-1]].overflow:
            if name == start:
                return [*way, name]
            if name in pools and name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return []


def _workers(s: Settings) -> Iterator[str]:
    pools, nodes = {p.name for p in s.pools}, {n.name for n in s.nodes}
    gpus: dict[str, str] = {}
    urls: dict[str, str] = {}
    for w in s.workers:
        where = f"workers.{w.name}"
        if w.pool not in pools:
            yield f"{where}.pool: no pool is called {w.pool!r}"
        if w.adapter not in ("vllm", "dynamo"):
            yield f'{where}.adapter: expected "vllm" or "dynamo", got {w.adapter!r}'
        elif w.adapter == "dynamo" and s.controller and not s.dynamo.discovery:
            yield f'{where}.adapter: it is "dynamo", but dynamo.discovery is not set, so it could never be taken out of rotation'
        if w.adapter == "vllm":
            if _url(w.url) is None:
                yield f"{where}.url: expected http://… or https://…, got {w.url!r}"
            elif urls.setdefault(w.url.rstrip("/"), w.name) != w.name:
                yield f"{where}.url: {w.url} is worker {urls[w.url.rstrip('/')]!r} already; wanted one address each"
        if w.system_url and _url(w.system_url) is None:
            yield f"{where}.system_url: expected http://… or https://…, got {w.system_url!r}"
        if not math.isfinite(w.capacity) or w.capacity > CAPACITY_MAX:
            yield f"{where}.capacity: expected sessions, at most {CAPACITY_MAX:g}, got {w.capacity:g}"
        for node in w.nodes:
            if nodes and node not in nodes:
                yield f"{where}.nodes: no node is called {node!r}"
            elif not _NAME.fullmatch(node):
                yield f"{where}.nodes: {node!r} is no name; wanted letters, digits, '-', '_' or '.'"
        yield from _gpus(w, nodes, gpus)


def _gpus(w: WorkerSettings, nodes: set[str], holder: dict[str, str]) -> Iterator[str]:
    mine = set()
    for text in w.gpus:
        try:
            named = Component.parse(text)
            gpu = gpu_component(named.node, named.gpu or "")
        except ValueError:
            yield f"workers.{w.name}.gpus: {text!r} is not a GPU; wanted node/gpu@dddd:bb:dd.f"
            continue
        if nodes and gpu.node not in nodes:
            yield f"workers.{w.name}.gpus: no node is called {gpu.node!r}"
        if gpu in mine:
            yield f"workers.{w.name}.gpus: {gpu} is listed twice; wanted each rank once"
        mine.add(gpu)
        if not w.standby and holder.setdefault(str(gpu), w.name) != w.name:
            yield f"workers.{w.name}.gpus: {gpu} already belongs to worker {holder[str(gpu)]!r}"


def _times(s: Settings) -> Iterator[str]:
    """Durations are never negative (see ``sentinel.durations``); these must also be more than nothing."""
    least = {"lease": LEASE_MIN, "presence": LEASE_MIN, "driver_deadline": DRIVER_MIN}
    least |= dict.fromkeys(("tick", "watch", "snapshot", "poll"), EVERY_MIN)
    tables: dict[str, Section | None] = {"controller": s.controller, "agent": s.agent, "gateway": s.gateway, "store": s.store}
    for table, section in tables.items():
        for field in section.__struct_fields__ if section else ():
            value, wanted = getattr(section, field), least.get(field, 0.001)
            if isinstance(value, Duration) and value < wanted and field not in ZERO_MEANS_AT_ONCE:
                yield f"{table}.{field}: expected at least {wanted * 1000:g}ms, got {value * 1000:g}ms"


def _addresses(s: Settings) -> Iterator[str]:
    if s.controller:
        yield from _controller(s.controller)
    if s.gateway:
        yield from _gateway(s.gateway)
        g = s.gateway
        yield from guard_problems(g.breakers, g.admission, g.tenants, frozenset(p.name for p in s.pools))
    if s.agent:
        yield from (f"agent.actions.{a}: it is empty; wanted an argument vector" for a, argv in s.agent.actions.items() if not argv)
        if s.agent.listen and not _listens(s.agent.listen):
            yield f'agent.listen: expected "host:port", or "" to serve nothing, got {s.agent.listen!r}'
        yield from (
            f"agent.controllers: expected http://host:port or https://host:port, got {url!r}"
            for url in s.agent.controllers
            if _url(url) is None
        )
    if sentence := problem(s.store.url):
        yield sentence
    if not _PREFIX.fullmatch(s.store.prefix):
        yield f"store.prefix: {s.store.prefix!r} cannot name keys; wanted letters, digits, '_', '.', ':' or '-'"
    for key, url in (("pagerduty_url", s.paging.pagerduty_url), ("webhook_url", s.paging.webhook_url)):
        if url and _url(url) is None:
            yield f"paging.{key}: expected https://… or http://…, got {url!r}"
    if s.dynamo.discovery and not s.dynamo.discovery.startswith(("file:", "etcd:")):
        yield f'dynamo.discovery: expected "file:/path" or "etcd:http://host:port", got {s.dynamo.discovery!r}'
    if s.dynamo.frontend and _url(s.dynamo.frontend) is None:
        yield f"dynamo.frontend: expected http://… or https://…, got {s.dynamo.frontend!r}"
    for url in s.dynamo.frontends:
        if _url(url) is None:
            yield f"dynamo.frontends: expected http://… or https://…, got {url!r}"
    if s.dynamo.frontends and not s.dynamo.frontend:
        yield "dynamo.frontends: these are further ones; wanted the first as dynamo.frontend"
    if len(set(s.dynamo.every_frontend)) < len(s.dynamo.every_frontend):
        yield "dynamo.frontends: one is named twice; wanted each once, dynamo.frontend included"


def _controller(c: ControllerSettings) -> Iterator[str]:
    if not _listens(c.listen):
        yield f'controller.listen: expected "host:port", got {c.listen!r}'
    if c.advertise and _url(c.advertise) is None:
        yield f"controller.advertise: expected http://host:port or https://host:port, got {c.advertise!r}"
    if c.scale_out and (not c.scale_out[0] or "{" in c.scale_out[0]):
        yield f"controller.scale_out: expected a program and its arguments, got {list(c.scale_out)}"
    for name in re.findall(r"\{(\w+)\}", " ".join(c.scale_out)):
        if name not in ("pool", "role", "count"):
            yield f"controller.scale_out: there is no {{{name}}}; wanted {{pool}}, {{role}} or {{count}}"
    if (c.tls_cert is None) != (c.tls_key is None):
        yield "controller: tls_cert and tls_key go together; only one of them is set"


def _gateway(g: GatewaySettings) -> Iterator[str]:
    if not _NAME.fullmatch(g.name):
        yield f"gateway.name: {g.name!r} is no name; wanted letters, digits, '-', '_' or '.'"
    for key, text in (("listen", g.listen), ("admin", g.admin)):
        if not _listens(text):
            yield f'gateway.{key}: expected "host:port", got {text!r}'
    if g.listen == g.admin and not g.listen.endswith(":0"):
        yield f"gateway.admin: {g.admin} is gateway.listen too; wanted a port of its own, which clients need not reach"
    if g.admin.rpartition(":")[2].isdigit() and int(g.admin.rpartition(":")[2]) + g.processes > 65536:
        yield f"gateway.admin: {g.admin} leaves no room for {g.processes} processes, each on the port after the last"
    if g.keys is None and not g.anonymous and not g.listen.startswith(("127.", "localhost:", "[::1]:")):
        yield "gateway.keys: missing, so anybody who reaches gateway.listen would be let in; name a file, or say anonymous = true"
    if (g.tls_cert is None) != (g.tls_key is None):
        yield "gateway: tls_cert and tls_key go together; only one of them is set"
    if g.xds_dir is not None and not g.xds_dir.is_dir():
        yield f"gateway.xds_dir: no such folder: {g.xds_dir}"


def _listens(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon) and port.isascii() and port.isdigit() and int(port) <= 65535 and " " not in host


def _url(text: str) -> SplitResult | None:
    """The parts of an http or https URL that names a host; None for anything else."""
    try:
        parts = urlsplit(text)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that does not close
        return None
    return parts if named and not any(c.isspace() for c in text) else None


def _files(s: Settings) -> list[tuple[str, Path | None]]:
    files: list[tuple[str, Path | None]] = [
        ("store.password_file", s.store.password_file),
        ("store.sentinels_password_file", s.store.sentinels_password_file),
        ("paging.pagerduty_key_file", s.paging.pagerduty_key_file),
        ("paging.webhook_token_file", s.paging.webhook_token_file),
    ]
    if s.agent:
        files += [(f"agent.{k}", getattr(s.agent, k)) for k in ("token_file", "ca_file", "thresholds")]
    if s.gateway:
        files += [(f"gateway.{k}", getattr(s.gateway, k)) for k in ("tls_cert", "tls_key", "keys", "worker_key_file")]
    if s.controller:
        c = s.controller
        files += [(f"controller.{k}", getattr(c, k)) for k in ("tls_cert", "tls_key", "node_tokens", "operator_tokens", "policy")]
    return files
