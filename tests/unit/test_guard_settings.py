"""The guards' settings: what is refused with a sentence, and what /metrics says of the guards."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sentinel.boottime import boottime
from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.guard_meters import GuardMeters
from sentinel.gateway.tenure import Tenure
from sentinel.settings_gateway import AdmissionSettings, BreakerSettings, PoolLimits, TenantLimits, guard_problems, parse_rate

POOLS = frozenset({"chat"})


def problems(
    breakers: BreakerSettings | None = None, admission: AdmissionSettings | None = None, **tenants: TenantLimits
) -> list[str]:
    return list(guard_problems(breakers or BreakerSettings(), admission or AdmissionSettings(), tenants, POOLS))


def test_defaults_are_sound_and_limit_nothing() -> None:
    """Without a word in the file nothing is wrong, and no request meets a limit."""
    assert problems() == []
    lanes = LeaseAdmission(None, AdmissionSettings(), {}, owner="x")._lanes  # type: ignore[arg-type]
    lane = lanes.make("chat", "w", "t")
    assert not (lane.counts or lane.sizes or lane.own)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ({"breakers": BreakerSettings(max_open=Duration(1.0))}, "gateway.breakers.max_open: 1 s is below base_open"),
        ({"breakers": BreakerSettings(window=Duration(0.5))}, "gateway.breakers.window: expected at least 1000ms"),
        ({"admission": AdmissionSettings(margin=Duration(9.0))}, "gateway.admission.margin: 9 s is most of the lease"),
        ({"admission": AdmissionSettings(pools={"chta": PoolLimits()})}, "gateway.admission.pools: no pool is called 'chta'"),
        ({"a": TenantLimits(rate="fast")}, "gateway.tenants.a.rate: expected a rate such as"),
        ({"default": TenantLimits(reserved={"chat": 1})}, "gateway.tenants.default.reserved: capacity is reserved for tenants"),
        ({"a": TenantLimits(reserved={"chat": 1})}, "gateway.tenants.a.reserved: pool 'chat' has no limit of requests"),
        (
            {"admission": AdmissionSettings(default=PoolLimits(requests=3)), "a": TenantLimits(reserved={"chat": 4})},
            "gateway.admission.pools.chat.requests: 3, but 4 are reserved",
        ),
    ],
)
def test_what_cannot_work_is_said(made: dict[str, Any], sentence: str) -> None:
    """Each contradiction is one sentence that begins with the key and says what was wanted."""
    said = problems(**made)
    assert any(s.startswith(sentence) for s in said), said


def test_a_lease_counts_while_the_machine_sleeps() -> None:
    """Unless a test hands another one in, admission goes by the clock that passes during a suspend, as the store's does."""
    assert inspect.signature(LeaseAdmission).parameters["clock"].default is boottime
    assert inspect.signature(Tenure).parameters["clock"].default is inspect.Parameter.empty, "it has that of its admission"
    assert boottime.func is time.clock_gettime and boottime.args == (time.CLOCK_BOOTTIME,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "600", "600/day", "0/minute", "-1/second", "6e2/minute", "600 / minute", "٦/minute"])
def test_rates_are_written_one_way(text: str) -> None:
    """A rate is a count and a unit; anything else is refused with an example."""
    assert parse_rate("600/minute") == (600, 60)
    with pytest.raises(ValueError, match="600/minute"):
        parse_rate(text)


def test_what_the_guards_say_on_metrics() -> None:
    """Each series is there from the first scrape, and says that nothing was leased yet."""

    class Records:
        policy = BreakerSettings()

    breakers = SharedBreakers(Records(), host="h", process="p")  # type: ignore[arg-type]
    breakers.members({"chat": ["w1", "w2"]})
    registry = CollectorRegistry()
    registry.register(GuardMeters(LeaseAdmission(None, AdmissionSettings(), {}, owner="x", clock=lambda: 5.0), breakers))  # type: ignore[arg-type]
    shown = generate_latest(registry).decode()
    for line in (
        'sentinel_gateway_panic{pool="chat"} 0.0', 'sentinel_gateway_alone{guard="breakers"} 0.0', "sentinel_gateway_waiting 0.0",
        'sentinel_gateway_breaker_trips_total{by="alone"} 0.0', "sentinel_gateway_lease_seconds -5.0",
    ):  # fmt: skip
        assert line in shown, shown
