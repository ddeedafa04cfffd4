"""What the error counters of NVLinks mean: which rises matter, how often they must repeat, and whom they accuse.

This module exists so that a link that gets worse is told from one that has failed and from one that only had a bad moment.
What always holds:

* Counters are judged once for each time that they were read. Looks that only carry them along repeat what is wrong, and no more.
* Only a rise between two readings counts; the first look, and one in which a counter became smaller (a reset), count nothing.
* What was read per link is judged per link and said about the GPU, naming the links; else the GPU's sum is judged.
* Nothing here is fatal but a link recovery that failed: errors that were corrected or sent again are for a person to read.

Sources: NVIDIA DCGM 4.6 (DcgmHealthWatch: one error a minute fails, CRC errors matter from 100 a second on, a successful
recovery warns, a failed one fails, bit error rates of 1e-12), Azure healthagent (warns at 1e-6), NVIDIA Health Validation
(link speed); where a number is our own judgement the comment says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from probes.judging import Judge
from probes.threshold_tables import Nvlink
from probes.thresholds import limits
from probes.windows import Windows, listed, moment, number, say, table
from sentinel.model import Action, Component, Severity, Suspect

BER_ZERO, BER_FLOOR = (15, 255), (15, 238)  # packed (mantissa, exponent): no error on a link, no error over a GPU's links (DCGM)


@dataclass(frozen=True)
class Rule:
    """A rise of any of ``counters`` (by at least ``per_s``) makes a window bad; bad ones among the last ``windows`` make a state.

    One bad window is said with certainty ``lone`` (0: it is not said at all), as many as are wanted with ``sure``.
    """

    check: str
    counters: tuple[str, ...]
    says: str
    windows: Callable[[Nvlink], tuple[int, int]]  # how many bad, among the last so many
    lone: float
    sure: float
    action: Action = Action.INSPECT
    suspect: Suspect = Suspect.SELF
    per_s: Callable[[Nvlink], float] = lambda _: 0.0


# Windows are 30 s where the GPU keeps sums and 120 s where it does not. DCGM fails every one of these at one error a minute;
# that one alone is no reason to wake anybody, and that two or three in five minutes are, is our judgement.
RULES = (
    Rule("gpu.nvlink_symbol_errors", ("symbol_errors",), "symbol errors that error correction could not mend",
         windows=lambda t: t.symbol_errors_windows, lone=0.5, sure=0.9),
    Rule("gpu.nvlink_packet_errors", ("malformed_packets", "buffer_overruns", "receive_errors", "receive_general_errors"),
         "packets that were broken or found no room", windows=lambda t: t.packet_errors_windows, lone=0.5, sure=0.9),
    Rule("gpu.nvlink_integrity", ("local_integrity_errors",), "times past the link's own error threshold",
         windows=lambda t: t.integrity_windows, lone=0.5, sure=0.9),
    Rule("gpu.nvlink_remote_errors", ("receive_remote_errors",), "packets that the other end had marked as broken",
         windows=lambda t: t.remote_errors_windows, lone=0.6, sure=0.8, action=Action.NONE, suspect=Suspect.PEER),
    Rule("gpu.nvlink_discards", ("transmit_discards",), "packets that could not be sent",
         windows=lambda t: t.discards_windows, lone=0.4, sure=0.5, action=Action.NONE),
    Rule("gpu.nvlink_replays", ("dl_replay",), "replays", windows=lambda t: t.replays_windows, lone=0.5, sure=0.8),
    Rule("gpu.nvlink_crc", ("dl_crc",), "CRC errors",
         windows=lambda t: t.crc_windows, lone=0.5, sure=0.9, per_s=lambda t: t.crc_per_s),
    # Random errors at a healthy rate (below 1e-6 before correction) make no codeword with eight bad symbols in a lifetime;
    # at 1e-4 there are some every second. So a tail that goes on growing is a link on its way down (judgement, from arithmetic).
    Rule("gpu.nvlink_fec_tail", tuple(f"fec_{k}" for k in range(8, 16)), "codewords that took eight or more corrections",
         windows=lambda t: t.fec_tail_windows, lone=0.0, sure=0.5, action=Action.NONE),
)  # fmt: skip
STATES = (*(rule.check for rule in RULES), "gpu.nvlink_recovery_history", "gpu.nvlink_ber", "gpu.nvlink_speed")
RECOVERED, FAILED = ("recovery_successful", "dl_recovery"), ("recovery_failed",)

Gpu = Mapping[str, Any]


def judge_links(j: Judge, c: Component, gpu: Gpu, memory: dict[str, Any], expected: Mapping[str, Any]) -> None:
    """Judge the NVLink counters of one answered GPU. ``memory``: this GPU's own; ``expected``: ``nvlink_mbps``, where known."""
    own = memory.setdefault("nvlink", {})
    read_at = [moment(gpu.get("slow_at")), moment(gpu.get("seldom_at"))]
    if any(read_at) and read_at == own.get("read_at") and not own.get("wrong"):
        return  # carried along since the last look, when all of it was fine
    own["read_at"] = read_at
    rises = _rises(gpu, own.setdefault("counters", {}))
    for rule in RULES:
        _rule(j, c, rule, rises, own)
    for check, counters in (("gpu.nvlink_recovered", RECOVERED), ("gpu.nvlink_recovery_failed", FAILED)):
        _recoveries(j, c, check, counters, rises)
    _history(j, c, gpu, own)
    _bit_errors(j, c, gpu, own)
    _speed(j, c, gpu, own, expected.get("nvlink_mbps"))
    own["wrong"] = any(j.was(check, c) for check in STATES)


# -- rises --------------------------------------------------------------------------------------------------------------------

Rises = dict[str, tuple[float, dict[int, int]]]  # counter → (seconds of the window, link → rise); link -1: all links together


def _rises(gpu: Gpu, before: dict[str, Any]) -> Rises:
    """What rose since the last reading of each counter; a counter whose reading is the same one as before is left out."""
    found: Rises = {}
    for source in (_by_link(gpu), _sums(gpu)):
        for name, at, values in source:
            key = f"{name}/{len(values)}"
            last = before.get(key)
            if last is not None and at == last["at"]:
                continue
            before[key] = {"at": at, "values": values}
            if last is None or at < last["at"]:
                continue  # the first look, or a clock that was set back: how long it took is not known
            pairs = [(n, a, b) for n, (a, b) in enumerate(zip(last["values"], values, strict=True)) if None not in (a, b)]
            if any(b < a for _, a, b in pairs):
                return _none_of(gpu, before)
            rose = {n: b - a for n, a, b in pairs}
            if len(values) > 1:
                found[name] = (at - last["at"], rose)
            elif rose:  # the sum counts for what no single link accounts for
                links = found.get(name, (0.0, {}))[1]
                found[name] = (at - last["at"], {**links, -1: 0 if any(links.values()) else rose[0]})
    return found


def _none_of(gpu: Gpu, before: dict[str, Any]) -> Rises:
    """A counter became smaller: a GPU that was reset trained its links anew, and counted meanwhile. All begin again from here."""
    before.clear()
    _rises(gpu, before)
    return {}


def _by_link(gpu: Gpu) -> list[tuple[str, float, list[Any]]]:
    """(counter, time of its values, value per link), None for a link that did not answer."""
    found = []
    for name, counter in table(gpu.get("link_counters")).items():
        at, values = moment(table(counter).get("at")), listed(table(counter).get("links"))
        if at is not None and len(values) > 1:
            found.append((str(name), at, [number(v) for v in values]))
    return found


def _sums(gpu: Gpu) -> list[tuple[str, float, list[Any]]]:
    """(counter, time, the sum over all links as the only value)."""
    found = []
    for group, stamp in (("link_totals", "slow_at"), ("fec_tail", "seldom_at")):
        at = moment(gpu.get(stamp))
        for name, value in table(gpu.get(group)).items():
            if number(value) is not None and at is not None:
                found.append((str(name), at, [number(value)]))
    return found


def _rule(j: Judge, c: Component, rule: Rule, rises: Rises, own: dict[str, Any]) -> None:
    windows, t = Windows(own), limits().nvlink
    (needs, of), per_s = rule.windows(t), rule.per_s(t)
    links: dict[int, int] = {}
    seconds = 0.0
    for name in rule.counters:
        if name in rises:
            seconds, rose = rises[name]
            for link, rise in rose.items():
                links[link] = links.get(link, 0) + rise
    seen: dict[str, Any] = own.setdefault("seen", {})
    for link, rise in links.items():
        windows.push(f"{rule.check}/{link}", rise > 0 and rise >= per_s * seconds, of)
    if links:
        worst = {str(n): r for n, r in sorted(links.items()) if r > 0 and r >= per_s * seconds}
        seen[rule.check] = {"known": sorted({*seen.get(rule.check, {}).get("known", ()), *links}),
                            "last": worst or seen.get(rule.check, {}).get("last", {}), "s": seconds}  # fmt: skip
    elif rule.check not in seen:
        return  # not measured, or measured once
    counts = {n: windows.count(f"{rule.check}/{n}") for n in seen[rule.check]["known"]}
    bad = [n for n, count in counts.items() if count]
    sure = max(counts.values(), default=0) >= needs
    if bad and not sure and not rule.lone and not j.was(rule.check, c):
        return  # not decided yet
    where = [n for n in bad if n >= 0]
    named = f" on link{'s' if len(where) > 1 else ''} {', '.join(map(str, where))}" if where else ""
    last = seen[rule.check]["last"]
    say(j, own, rule.check, c, bool(bad), severity=Severity.WARNING, action=rule.action, suspect=rule.suspect,
        certainty=rule.sure if sure else rule.lone or rule.sure, facts={"links": where, "rise": last},
        evidence=tuple(f"{'all links' if n == '-1' else f'link {n}'}: +{r} in {seen[rule.check]['s']:.0f} s"
                       for n, r in list(last.items())[:18]),
        summary=f"NVLink{named}: {rule.says}, in {max(counts.values(), default=0)} of the last {of} windows.")


def _recoveries(j: Judge, c: Component, check: str, counters: tuple[str, ...], rises: Rises) -> None:
    for name in counters:
        seconds, rose = rises.get(name, (0.0, {}))
        for link, rise in rose.items():
            if rise <= 0:
                continue
            where = c if link < 0 else Component(node=c.node, device=c.device, part=f"nvlink{link}")
            which = "An NVLink" if link < 0 else f"NVLink {link}"
            said: dict[str, Any] = {"count": rise, "facts": {"links": [link] if link >= 0 else []},
                                    "evidence": (f"{name}: +{rise} in {seconds:.0f} s",)}  # fmt: skip
            if counters is FAILED:
                j.event(check, where, severity=Severity.FATAL, action=Action.RESET_GPU, certainty=0.8, **said,
                        summary=f"{which} lost its connection and could not restore it.")
            else:
                j.event(check, where, severity=Severity.WARNING, certainty=0.6, **said,
                        summary=f"{which} lost its connection and restored it, {rise} times in {seconds:.0f} s.")


# -- states -------------------------------------------------------------------------------------------------------------------


def _history(j: Judge, c: Component, gpu: Gpu, own: dict[str, Any]) -> None:
    """Failures of before the first look: DCGM fails on the number itself, which stands until the driver is loaded again."""
    failed = number(table(gpu.get("link_totals")).get("recovery_failed"))
    if failed is not None:
        say(j, own, "gpu.nvlink_recovery_history", c, failed > 0, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.7,
            evidence=(f"recovery_failed={failed}",),
            summary=f"{failed} NVLink recoveries have failed since the driver was loaded.")


def rate_of(packed: Any, *, floor: tuple[int, int] = BER_FLOOR) -> float | None:
    """A packed bit error rate (mantissa in bits 11:8, exponent in 7:0) as a number; 0.0 at and below ``floor``; None: none."""
    if isinstance(packed, float):
        return packed if 0.0 < packed < 1.0 else 0.0 if packed == 0.0 else None  # a driver that answers with the rate itself
    value = number(packed)
    if value is None:
        return None
    mantissa, exponent = value >> 8 & 0xF, value & 0xFF
    below = exponent > floor[1] or (exponent == floor[1] and mantissa <= floor[0])
    clean = mantissa == 0 or (mantissa, exponent) == BER_ZERO or below
    return 0.0 if clean else float(mantissa) * 10.0**-exponent


def _bit_errors(j: Judge, c: Component, gpu: Gpu, own: dict[str, Any]) -> None:
    """Rates over all the time since somebody cleared them: worth knowing, and no news by themselves."""
    totals = table(gpu.get("link_totals"))
    symbol, effective = rate_of(totals.get("symbol_ber")), rate_of(totals.get("effective_ber"))
    if symbol is None and effective is None:
        return
    much = (effective or 0.0) > limits().nvlink.effective_ber_bad
    wrong = bool(symbol) or (effective or 0.0) > limits().nvlink.effective_ber
    say(j, own, "gpu.nvlink_ber", c, wrong, severity=Severity.WARNING, action=Action.INSPECT if much else Action.NONE,
        certainty=0.8 if much else 0.5, facts={"symbol_ber": symbol, "effective_ber": effective},
        evidence=tuple(f"{n}={totals[n]}" for n in ("symbol_ber", "effective_ber") if n in totals),
        summary=f"Bit errors got past error correction: symbol rate {symbol or 0:.0e}, effective rate {effective or 0:.0e}.")


def _speed(j: Judge, c: Component, gpu: Gpu, own: dict[str, Any], nominal: Any) -> None:
    """Links that are up and slower than their kind's; one that sleeps or is down has no speed to judge."""
    speeds, states, at = listed(gpu.get("link_speed_mbps")), listed(gpu.get("links")), moment(gpu.get("slow_at"))
    if not number(nominal) or at is None:
        return
    up = {n: s for n, (s, state) in enumerate(zip(speeds, states, strict=False)) if state == 1 and number(s)}
    if not up:
        return
    slow = {n: s for n, s in up.items() if s < nominal * (1 - limits().nvlink.speed_slack_share)}
    if at != own.get("speed_at"):
        own["speed_at"] = at
        own["slow"] = own.get("slow", 0) + 1 if slow else 0
    if slow and own.get("slow", 0) < limits().nvlink.speed_run and not j.was("gpu.nvlink_speed", c):
        return
    say(j, own, "gpu.nvlink_speed", c, bool(slow), severity=Severity.WARNING, action=Action.INSPECT, certainty=0.9,
        facts={"links": sorted(slow), "nominal_mbps": nominal}, evidence=tuple(f"link {n}: {s} MB/s" for n, s in slow.items()),
        summary=f"{len(slow)} of {len(up)} NVLinks run below {nominal} MB/s, the speed of this kind.")
