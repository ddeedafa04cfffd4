"""The ``[gateway]`` tables of the shared guards: when a breaker opens, how much is admitted at once, what each tenant may use.

This module exists apart from ``sentinel.settings`` because these numbers belong together and each must say where it comes from.
What always holds: 0 and "" mean *no such limit*; a limit is for all gateways together, never for each of them; the defaults limit
nothing that a site did not ask to have limited, and open no breaker of a pool that has one worker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from sentinel.durations import Duration

Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Least = Annotated[int, msgspec.Meta(ge=1)]
Limit = Annotated[int, msgspec.Meta(ge=0, le=10**12)]

_RATE = re.compile(r"([1-9]\d{0,9})/(second|minute|hour)", re.ASCII)
WINDOW_MAX = 300.0  # seconds
RATE_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


class BreakerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[gateway.breakers]``. Sources: Envoy's outlier detection (its reference documentation), LiteLLM's cooldowns and SMG's
    breaker (their source code), and the failures of others that a number is there to avoid."""

    window: Duration = Duration(10.0)  # what counts is younger than this (Envoy: interval 10 s)
    min_requests: Least = 5  # fine and failed ones in the window (Envoy: consecutive_5xx 5; LiteLLM: 5)
    failure_rate: Share = 0.5  # of those (LiteLLM: more than half)
    reporters: Least = 2  # hosts that saw failures; one is enough where only one sees traffic (one bad host: Polly#287)
    base_open: Duration = Duration(5.0)  # times the trips in a row (LiteLLM: cooldown 5 s; Envoy: 30 s times ejections)
    max_open: Duration = Duration(300.0)  # (Envoy: max_ejection_time 300 s); closed for longer than this, trips are forgiven
    jitter: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.2  # of the time, added (SMG's retry back-off: 0.2; Envoy: none)
    probes: Least = 3  # let through while half-open, all gateways together; as many must succeed (SMG: 3 successes close)
    probe_lease: Duration = Duration(10.0)  # a probe whose holder died is free again after this (as long as admission's lease)
    max_share: Share = 0.5  # of a pool open at once, past it: panic (Envoy: panic below 50 % healthy)
    flush: Duration = Duration(0.1)  # fine outcomes are told this often; a failure at once
    poll: Duration = Duration(1.0)  # behind the push


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[gateway.admission.pools.NAME]``: what runs at once in one pool, and on each of its workers. Tokens are estimates of prompt
    and answer together. No default is right for every worker (llm-d's detector: 100 requests or 1,000,000 tokens each; a Dynamo
    frontend is one worker and takes thousands), so there is none."""

    requests: Limit = 0
    tokens: Limit = 0
    worker_requests: Limit = 0
    worker_tokens: Limit = 0


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[gateway.admission]``. A gateway that dies gives everything back within one ``lease``."""

    lease: Duration = Duration(10.0)  # renewed three times in it (measured: slots are back when it ends, not before)
    margin: Duration = Duration(1.0)  # of the lease's end in which nothing is admitted (self-fencing: two clocks never run alike)
    tick: Duration = Duration(0.1)  # what changed is told this often, and so is what another gateway could use
    block: Limit = 64  # slots held ready per limit, at most; never more than half of what is free. 0: every admission asks
    queue: Limit = 1024  # requests that wait in one gateway (Dynamo: 16 beside each worker; SMG: 100)
    replicas: Least = 4  # processes of all hosts, to assume until the store has said how many there are; never below ``processes``
    pools: dict[str, PoolLimits] = {}
    default: PoolLimits = PoolLimits()  # for pools that are not named


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[gateway.tenants.NAME]``; the name ``default`` is for tenants that are not named, each by itself."""

    requests: Limit = 0  # at once
    tokens: Limit = 0  # at once, estimated
    rate: str = ""  # "600/minute", over a sliding window; per second, minute or hour
    reserved: dict[str, Least] = {}  # pool → requests of its limit that nobody else gets


def parse_rate(text: str) -> tuple[int, int]:
    """``"600/minute"`` → (600, 60 s). Raises ValueError saying what was wanted."""
    found = _RATE.fullmatch(text)
    if found is None:
        raise ValueError(f'expected a rate such as "600/minute" (second, minute or hour), got {text!r}')
    return int(found[1]), RATE_SECONDS[found[2]]


def guard_problems(
    breakers: BreakerSettings, admission: AdmissionSettings, tenants: Mapping[str, TenantLimits], pools: frozenset[str]
) -> Iterator[str]:
    """What no single key can show, one sentence each. ``pools``: those that the file names; empty: not known."""
    least = {"window": 1.0, "base_open": 0.1, "max_open": 0.1, "probe_lease": 1.0, "flush": 0.001, "poll": 0.05}
    for key, seconds in least.items():
        if getattr(breakers, key) < seconds:
            yield f"gateway.breakers.{key}: expected at least {seconds * 1000:g}ms, got {getattr(breakers, key) * 1000:g}ms"
    if breakers.window > WINDOW_MAX:
        yield f"gateway.breakers.window: expected at most {WINDOW_MAX:g}s, got {breakers.window:g}s: it is kept second by second"
    if breakers.max_open < breakers.base_open:
        yield f"gateway.breakers.max_open: {breakers.max_open:g} s is below base_open; wanted at least its {breakers.base_open:g} s"
    for key, seconds in {"lease": 0.5, "tick": 0.01}.items():
        if getattr(admission, key) < seconds:
            yield f"gateway.admission.{key}: expected at least {seconds * 1000:g}ms, got {getattr(admission, key) * 1000:g}ms"
    if admission.margin >= admission.lease * 2 / 3:
        yield f"gateway.admission.margin: {admission.margin:g} s is most of the lease; wanted below {admission.lease * 2 / 3:g} s"
    yield from (f"gateway.admission.pools: no pool is called {p!r}" for p in admission.pools if pools and p not in pools)
    for name, tenant in tenants.items():
        if tenant.rate:
            try:
                parse_rate(tenant.rate)
            except ValueError as error:
                yield f"gateway.tenants.{name}.rate: {error}"
        if name == "default" and tenant.reserved:
            yield "gateway.tenants.default.reserved: capacity is reserved for tenants with a name; wanted none here"
        for pool in tenant.reserved:
            if pools and pool not in pools:
                yield f"gateway.tenants.{name}.reserved: no pool is called {pool!r}"
            if not admission.pools.get(pool, admission.default).requests:
                yield f"gateway.tenants.{name}.reserved: pool {pool!r} has no limit of requests, so nothing of it can be reserved"
    for pool, limits in {**dict.fromkeys(pools, admission.default), **admission.pools}.items():
        kept = sum(t.reserved.get(pool, 0) for t in tenants.values())
        if limits.requests and kept > limits.requests:
            yield f"gateway.admission.pools.{pool}.requests: {limits.requests}, but {kept} are reserved for tenants; wanted no less"
