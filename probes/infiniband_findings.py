"""What the values of InfiniBand and RoCE ports mean: pure functions from a reading to findings, for live ports and pasted text.

This module exists so that a verdict about a rail can be tested without one. What always holds:

* Whom to judge stands in ``infiniband_policy``, every number in ``thresholds.toml``; nothing here is a number of its own.
* A reading that stands ``alone`` (pasted text) has no past: what is down there is said at once, as a warning, never as fatal.
* Memory is plain JSON values: one table per port, with when it was first seen active and what rose when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from probes import infiniband_policy as policy
from probes.counters import note, rise, saturated
from probes.infiniband_policy import Device, Rail, Wanted, rails
from probes.judging import Judge, span
from probes.thresholds import limits
from sentinel.model import Action, Component, Finding, Reading, Severity, Suspect


def judge(reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
    """Judge one reading. Raises ProbeError for an expectation of the wrong kind."""
    wanted = Wanted.of(expected)
    if memory.get("boot") not in (None, reading.boot_id):
        memory.clear()  # every counter and link began anew
    memory["boot"] = reading.boot_id
    j, data = Judge(reading.node, reading.at, memory), reading.data
    alone = bool(data.get("alone"))
    devices: list[Device] = [d for d in data.get("devices", ()) if isinstance(d, dict) and d.get("name")]
    found = list(rails(j.node, devices, set(data.get("default_route", ())), wanted))
    all_meant = wanted.ports is not None and sum(r.layer == "InfiniBand" for r in found) == wanted.ports
    alike = _common_rates(found)
    for device in devices:
        _hung(j, device)
        _temperature(j, device, alone=alone)
        _restricted(j, device)
        _cage(j, device)
    for rail in found:
        own = memory.setdefault("ports", {}).setdefault(rail.name, {})
        own["active"] = own.get("active", False) or rail.up
        meant = wanted.names(rail.device) or (all_meant and rail.layer == "InfiniBand")
        in_use = meant or (own["active"] and rail.layer == "InfiniBand")  # an Ethernet port may be anybody's
        if alone:
            _interface_only(j, rail)
        if alone or meant or own["active"]:
            _state(j, rail, in_use, own["active"], alone=alone)
        due = wanted.rate_gbps if meant or rail.layer == "InfiniBand" else None
        _rate(j, rail, own, due or alike.get(_kind(rail)), alone=alone)
        _flaps(j, rail, own, in_use)
        _errors(j, rail, own, in_use)
        _saturation(j, rail)
        _bit_errors(j, rail)
        own["at"] = reading.at
    if not alone:
        _lost(j, devices, found, memory)
        _count(j, found, wanted.ports)
    return j.findings()


# -- up or not ----------------------------------------------------------------------------------------------------------------


def _state(j: Judge, rail: Rail, in_use: bool, was_active: bool, *, alone: bool) -> None:
    """``state``, ``phys_state`` and the subnet manager's LID, judged together."""
    state, phys, c, t = rail.port.get("state"), rail.port.get("phys"), rail.where, limits().infiniband
    if state is None and phys is None:
        return
    wish = not rail.up and _unwanted(rail)
    fabric = state in (policy.INIT, policy.ARMED) and phys in (policy.LINK_UP, None)
    down = not (rail.up or wish or fabric or state == policy.DEFER)
    severity = Severity.WARNING if in_use and not alone else Severity.INFO
    j.state("ib.port_disabled", c, wish, severity=severity, action=Action.NONE if severity is Severity.INFO else Action.INSPECT,
            evidence=rail.evidence(), summary=f"{rail.name} is switched off: by a person, or nobody wants it.")

    patience = 0.0 if alone else t.outage_s if was_active else t.training_s
    waited = j.lasts_s("ib.not_set_up", c, fabric)
    if not fabric or waited >= patience:
        no_manager = rail.port.get("sm_lid") in (0, 0xFFFF)
        j.state("ib.port_not_set_up", c, fabric, severity=Severity.WARNING, action=Action.INSPECT, suspect=Suspect.SWITCH,
                evidence=rail.evidence(), facts={"drain": "none"},
                summary=f"{rail.name} has a physical link and {'no subnet manager answers' if no_manager else 'is not activated'}: "
                        "the fabric's subnet manager, not this node.")

    seconds = j.lasts_s("ib.down", c, down)
    there = down if alone else j.steady("ib.port_down", c, down, t.down_run)
    if there is None:
        return
    fatal = in_use and not alone and seconds >= patience
    why = rail.port.get("reason") or policy.PHYS_SAYS.get(phys or 0, "its link does not come up")
    j.state("ib.port_down", c, there, severity=Severity.FATAL if fatal else Severity.WARNING, action=Action.INSPECT, certainty=0.9,
            evidence=rail.evidence(), facts={"drain": "node" if fatal else "none", "phys": phys, "was_active": was_active},
            summary=f"{rail.name} is down: {why}.")


def _unwanted(rail: Rail) -> bool:
    """Whether it is off because somebody wants it so. RoCE says Disabled for a lost carrier too: then its interface decides."""
    phys = rail.port.get("phys")
    if phys not in (policy.DISABLED, policy.SLEEP, policy.TEST):
        return False
    nets = [n for n in (rail.device.get("netdevs") or {}).values() if n.get("up") is not None]
    return rail.layer != "Ethernet" or not any(n["up"] and n.get("carrier") is False for n in nets)


def _kind(rail: Rail) -> tuple[Any, ...]:
    return rail.device.get("hca"), rail.device.get("board"), rail.layer


def _common_rates(found: Iterable[Rail]) -> dict[tuple[Any, ...], float]:
    """The rate that most active ports of one kind of adapter have, where enough of them agree."""
    seen: dict[tuple[Any, ...], Counter[float]] = {}
    for rail in found:
        if rail.up and rail.layer == "InfiniBand" and rail.port.get("rate_gbps"):
            seen.setdefault(_kind(rail), Counter())[rail.port["rate_gbps"]] += 1
    common = {kind: rates.most_common(1)[0] for kind, rates in seen.items()}
    enough = limits().infiniband.rate_siblings
    return {kind: rate for kind, (rate, times) in common.items() if times >= enough and 2 * times > seen[kind].total()}


def _rate(j: Judge, rail: Rail, own: dict[str, Any], wanted: float | None, *, alone: bool) -> None:
    """An active port's rate against what is expected, what its like have, and what it had before. Down ports show a default."""
    rate = rail.port.get("rate_gbps")
    if not rail.up or not rate:
        return
    best = own["best"] = max(own.get("best", 0.0), rate)
    wanted = max(best, wanted or 0.0)
    there = rate < wanted if alone else j.steady("ib.rate_low", rail.where, rate < wanted, limits().infiniband.rate_run)
    if there is not None:
        j.state("ib.rate_low", rail.where, there, severity=Severity.WARNING, action=Action.INSPECT, evidence=rail.evidence(),
                facts={"rate_gbps": rate, "wanted_gbps": wanted},
                summary=f"{rail.name} runs at {rate:g} Gb/s where {wanted:g} are due: cable, module or a setting of its switch.")


def _hung(j: Judge, device: Device) -> None:
    seconds = device.get("hung_s")
    if seconds is None or seconds >= limits().infiniband.hung_s:
        j.state("ib.hung", Component(node=j.node, device=f"ib@{device['name']}"), seconds is not None, severity=Severity.WARNING,
                action=Action.INSPECT, certainty=0.8, evidence=() if seconds is None else (f"hung_s={seconds:.0f}",),
                summary=f"Reading {device['name']} from sysfs does not come back: its firmware or driver hangs.")


def _lost(j: Judge, devices: list[Device], found: list[Rail], memory: dict[str, Any]) -> None:
    """Adapters that had an active rail in this boot and are not there any more."""
    here = {d["name"] for d in devices}
    known = set(memory.get("active_devices", ())) | {r.device["name"] for r in found if r.up and r.layer == "InfiniBand"}
    memory["active_devices"] = sorted(known)
    all_gone = bool(known) and not here & known and len(known) > 1
    if known:
        gone_s = j.lasts_s("ib.all_gone", Component(node=j.node), all_gone)
        if not all_gone or gone_s >= limits().infiniband.lost_s:
            j.state("ib.driver_gone", Component(node=j.node, device="ib"), all_gone, severity=Severity.WARNING,
                    action=Action.INSPECT, summary="All InfiniBand adapters have vanished at once: their driver is not loaded.")
    for name in sorted(known):
        c = Component(node=j.node, device=f"ib@{name}")
        missing = name not in here and not all_gone
        gone_s = j.lasts_s("ib.missing", c, missing)
        if name in here or (missing and gone_s >= limits().infiniband.lost_s):
            j.state("ib.device_lost", c, missing, severity=Severity.FATAL, action=Action.REBOOT_NODE, certainty=0.8,
                    facts={"drain": "node"}, evidence=(f"absent from class/infiniband: {name}",),
                    summary=f"Adapter {name} had an active rail and is gone.")


def _count(j: Judge, found: list[Rail], wanted: int | None) -> None:
    if wanted is None:
        return
    counted = [r for r in found if r.layer == "InfiniBand"] or found
    here = sum(r.up or r.port.get("state") is None for r in counted)
    few_s = j.lasts_s("ib.few", Component(node=j.node), here < wanted)
    if here >= wanted or few_s >= limits().infiniband.outage_s:
        j.state("ib.ports", Component(node=j.node), here < wanted, severity=Severity.WARNING, action=Action.INSPECT,
                facts={"here": here, "expected": wanted}, evidence=(f"active={here}",),
                summary=f"{here} rails are active; {wanted} are expected.")


# -- what counters say --------------------------------------------------------------------------------------------------------


def _flaps(j: Judge, rail: Rail, own: dict[str, Any], in_use: bool) -> None:
    """A link that went down and came back between two looks shows only here."""
    counter = (rail.port.get("counters") or {}).get("link_downed")
    downs = [n["downs"] for n in (rail.device.get("netdevs") or {}).values() if n.get("downs") is not None]
    carrier = sum(downs) if downs and rail.layer == "Ethernet" else None
    rises = [r for r in (rise(own, "link_downed", counter), rise(own, "carrier", carrier)) if r is not None]
    if not rises:
        return
    t = limits().infiniband
    times, _ = note(own, "flaps", j.at, max(rises), t.flaps_window_s)
    fatal = in_use and times > t.flaps_most
    j.state("ib.link_flapping", rail.where, times > 0, severity=Severity.FATAL if fatal else Severity.WARNING,
            action=Action.INSPECT if times > 1 else Action.NONE, certainty=0.8, count=max(1, times),
            facts={"drain": "node" if fatal else "none", "times": times}, evidence=rail.evidence(f"link_downed={counter}"),
            summary=f"{rail.name} lost its link {times} time{'s' if times > 1 else ''} in the last {span(t.flaps_window_s)}.")


def _errors(j: Judge, rail: Rail, own: dict[str, Any], in_use: bool) -> None:
    values: dict[str, Any] = {**(rail.port.get("hw") or {}), **(rail.port.get("counters") or {})}
    seconds, t = j.at - own.get("at", j.at), limits().infiniband
    for limit in policy.LIMITS:
        value = values.get(limit.counter)
        rose = rise(own, limit.counter, value)
        if rose is None:
            continue
        c, many, when = rail.where, 0.0, "a second"
        if limit.window_s:
            window_s = limit.window_s(t)
            many, _ = note(own, f"{limit.counter}.at", j.at, rose, window_s)
            there: bool | None = many > limit.most(t)
            when = f"in the last {span(window_s)}"
        elif seconds > 0:
            many = rose / seconds
            there = _steady_rate(j, limit.check, limit.counter, c, many > limit.most(t))
        else:
            continue
        if there is not None:
            info = limit.severity is Severity.INFO
            j.state(limit.check, c, there, severity=limit.severity, action=Action.NONE if info else Action.INSPECT,
                    evidence=rail.evidence(f"{limit.counter}={value}"),
                    summary=f"{rail.name}: {many:.0f} {limit.says.format(when=when)} ({limit.counter}).")
    _integrity(j, rail, own, values, in_use)


def _steady_rate(j: Judge, check: str, counter: str, c: Component, holds: bool) -> bool | None:
    """As Judge.steady, counted for each counter, since two of them may share a check."""
    seen = j.run(f"{check}.{counter}", c, holds)
    return holds if not holds or seen >= limits().infiniband.error_run else True if j.was(check, c) else None


def _integrity(j: Judge, rail: Rail, own: dict[str, Any], values: Mapping[str, Any], in_use: bool) -> None:
    rises = [rise(own, name, values.get(name)) for name in policy.INTEGRITY]
    measured = [r for r in rises if r is not None]
    if not measured:
        return
    t = limits().infiniband
    many, times = note(own, "integrity", j.at, sum(measured), t.integrity_window_s)
    fatal = in_use and times >= t.integrity_repeats
    j.state("ib.link_integrity", rail.where, many > 0, severity=Severity.FATAL if fatal else Severity.WARNING,
            action=Action.INSPECT, certainty=0.8, count=max(1, many), facts={"drain": "node" if fatal else "none"},
            evidence=rail.evidence(*(f"{n}={values[n]}" for n in policy.INTEGRITY if values.get(n) is not None)),
            summary=f"{rail.name}: local link errors passed the port's own threshold {many} times "
                    f"in the last {span(t.integrity_window_s)}.")


def _saturation(j: Judge, rail: Rail) -> None:
    values = rail.port.get("counters") or {}
    ends = {n: saturated(values.get(n), bits) for n, bits in policy.WATCHED.items() if n not in policy.CONGESTION}
    if all(end is None for end in ends.values()):
        return
    full = sorted(n for n, end in ends.items() if end)
    j.state("ib.counter_saturated", rail.where, bool(full), severity=Severity.WARNING, action=Action.INSPECT,
            evidence=rail.evidence(*(f"{n}={values[n]}" for n in full)), facts={"counters": full, "drain": "none"},
            summary=f"{rail.name}: {', '.join(full)} at the largest value: that many errors came, and new ones cannot be seen "
                    "until somebody clears it (perfquery -R).")


def _bit_errors(j: Judge, rail: Rail) -> None:
    """Errors after correction, where a tool measured them. Raw ones are normal."""
    rates = {k: v for k, v in (rail.port.get("ber") or {}).items() if v is not None}
    if rates:
        j.state("ib.bit_errors", rail.where, max(rates.values()) > limits().infiniband.effective_ber, severity=Severity.WARNING,
                action=Action.INSPECT, evidence=rail.evidence(*(f"{k}_ber={v:g}" for k, v in rates.items())),
                summary=f"{rail.name}: {max(rates.values()):g} of its bits stay wrong after correction.")


def _temperature(j: Judge, device: Device, *, alone: bool) -> None:
    """Sensors against the firmware's own limit; without a limit nothing is said."""
    read = (device.get("temperatures") or {}).items()
    sensors = {k: (t["c"], t["most_c"]) for k, t in read if t.get("c") is not None and t.get("most_c")}
    if not sensors:
        return
    c = Component(node=j.node, device=f"ib@{device['name']}")
    slack = limits().infiniband.cool_c if j.was("ib.hot", c) else 0.0
    hot = {k: v for k, v in sensors.items() if v[0] >= v[1] - slack}
    there = bool(hot) if alone else j.steady("ib.hot", c, bool(hot), limits().infiniband.hot_run)
    if there is not None:
        j.state("ib.hot", c, there, severity=Severity.WARNING, action=Action.INSPECT,
                evidence=tuple(f"{k}={now:g}°C, at most {most:g}" for k, (now, most) in hot.items())[:8],
                summary=f"Adapter {device['name']} or its module is at its limit; the firmware switches hot modules off.")


def _restricted(j: Judge, device: Device) -> None:
    """Firmware keeps this function's registers from us; asked for them again and again, the kernel logs it each time."""
    if device.get("restricted") is not None:
        j.state("ib.restricted", Component(node=j.node, device=f"ib@{device['name']}"), bool(device["restricted"]),
                evidence=(f"pci={device.get('pci')}",),
                summary=f"{device['name']} may not read its counters: not measured, no fault; leave it out of other monitors too.")


def _cage(j: Judge, device: Device) -> None:
    if device.get("cage_empty"):
        j.state("ib.cage_empty", Component(node=j.node, device=f"ib@{device['name']}"), True,
                summary=f"A cage of {device['name']} has no cable: normal for an unused port; a used one is told by its own state.")


def _interface_only(j: Judge, rail: Rail) -> None:
    nets = {n: v for n, v in (rail.device.get("netdevs") or {}).items() if v.get("carrier") is False}
    if nets and rail.port.get("state") is None:
        j.state("ib.interface_down", rail.where, True, evidence=tuple(nets)[:8],
                summary=f"The IP interface of {rail.name} is down, which says nothing about the port: ibstat does.")
