"""The tables of ``thresholds.toml`` as types: which keys there are, and between what each may lie.

This module exists so that a threshold that cannot be meant is refused before anything is judged. What always holds: every key is
required and none is known twice (units and sources stand in the file alone); a length of time is never 0 or endless, a share
lies in 0..1, what must happen together happens at least once; ``contradictions`` says what no single key can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0.0, le=31 * 86400.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Percent = Annotated[float, Meta(ge=0.0, le=100.0)]
Rate = Annotated[float, Meta(gt=0.0, le=1e12)]
Degrees = Annotated[float, Meta(ge=-50.0, le=150.0)]
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Some = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Run = Annotated[int, Meta(ge=1, le=100)]  # how often in a row, or together: at least once


class Windows(NamedTuple):
    """So many bad windows among the last so many."""

    bad: Annotated[int, Meta(ge=1, le=64)]
    of: Annotated[int, Meta(ge=1, le=64)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Gpu(Table, frozen=True, kw_only=True):
    hung_likely_s: Seconds
    hung_sure_s: Seconds
    lost_run: Run
    margin_hot_c: Degrees
    margin_cool_c: Degrees
    slowdown_share: Share
    slowdown_run: Run
    violation_share: Share
    violation_windows: Windows
    power_least_mw: Rate
    power_most_mw: Rate
    power_run: Run
    rows_most: Count
    pcie_run: Run
    pcie_load_percent: Percent
    ecc_window_s: Seconds
    ecc_storm_per_s: Rate
    ecc_flood_per_s: Rate
    ecc_storm_windows: Windows
    ecc_load_percent: Percent


class Fabric(Table, frozen=True, kw_only=True):
    joining_s: Seconds
    recovering_s: Seconds


class Nvlink(Table, frozen=True, kw_only=True):
    symbol_errors_windows: Windows
    packet_errors_windows: Windows
    integrity_windows: Windows
    remote_errors_windows: Windows
    replays_windows: Windows
    discards_windows: Windows
    crc_per_s: Rate
    crc_windows: Windows
    fec_tail_windows: Windows
    effective_ber: Share
    effective_ber_bad: Share
    speed_slack_share: Share
    speed_run: Run
    one_switch_gpus: Annotated[int, Meta(ge=2, le=100)]


class Infiniband(Table, frozen=True, kw_only=True):
    down_run: Run
    outage_s: Seconds
    training_s: Seconds
    lost_s: Seconds
    hung_s: Seconds
    flaps_most: Count
    flaps_window_s: Seconds
    integrity_repeats: Run
    integrity_window_s: Seconds
    rate_run: Run
    rate_siblings: Run
    error_run: Run
    symbol_errors_most: Count
    symbol_errors_window_s: Seconds
    link_recoveries_most: Count
    link_recoveries_window_s: Seconds
    receive_errors_per_s: Rate
    discards_per_s: Rate
    slow_restarts_per_s: Rate
    missing_acks_per_s: Rate
    effective_ber: Share
    hot_run: Run
    cool_c: Annotated[float, Meta(ge=0.0, le=50.0)]  # a distance


class Pcie(Table, frozen=True, kw_only=True):
    link_run: Run
    gone_run: Run
    vanished_s: Seconds
    corrected_per_minute: Rate
    corrected_window_s: Seconds
    corrected_run: Run
    replay_window_s: Seconds
    replay_windows: Windows


class C2c(Table, frozen=True, kw_only=True):
    down_run: Run
    crc_per_s: Rate
    replays_per_s: Rate
    error_windows: Windows


class Imex(Table, frozen=True, kw_only=True):
    run: Run
    starting_s: Seconds
    deadline_s: Annotated[float, Meta(gt=0.0, le=300.0)]


class Host(Table, frozen=True, kw_only=True):
    stuck_noted_s: Seconds
    stuck_sure_s: Seconds
    clock_step_s: Seconds
    memory_wait_percent: Percent
    memory_free_share: Share
    memory_run: Run
    spool_free_mib: Count


class Worker(Table, frozen=True, kw_only=True):
    deadline_s: Seconds
    stall_s: Seconds
    warmup_s: Seconds
    idle_s: Annotated[float, Meta(ge=0.0, le=31 * 86400.0)]
    canary_s: Seconds
    canary_again_s: Seconds
    idle_unanswered: Run
    forget_s: Seconds


class KernelLog(Table, frozen=True, kw_only=True):
    episode_s: Seconds
    late_s: Seconds
    look_back_s: Seconds
    remember_s: Seconds
    echo_s: Seconds
    match_s: Seconds
    match_again_s: Seconds


class ServingLog(Table, frozen=True, kw_only=True):
    lease_s: Seconds
    echo_s: Seconds
    stop_s: Seconds
    traceback_lines: Some
    moved_streams: Some
    preemptions: Some
    preemptions_window_s: Seconds
    report_s: Seconds
    stall_s: Seconds
    growing_reports: Run
    growing_requests: Some


class Thresholds(Table, frozen=True, kw_only=True):
    gpu: Gpu
    fabric: Fabric
    nvlink: Nvlink
    infiniband: Infiniband
    pcie: Pcie
    c2c: C2c
    imex: Imex
    host: Host
    worker: Worker
    kernel_log: KernelLog
    serving_log: ServingLog


# The first is never above the second: what is noted comes before what is sure, and what is hot before what is cool again.
ORDER = (
    ("gpu.hung_likely_s", "gpu.hung_sure_s"),
    ("gpu.margin_hot_c", "gpu.margin_cool_c"),
    ("gpu.power_least_mw", "gpu.power_most_mw"),
    ("gpu.ecc_storm_per_s", "gpu.ecc_flood_per_s"),
    ("nvlink.effective_ber", "nvlink.effective_ber_bad"),
    ("host.stuck_noted_s", "host.stuck_sure_s"),
    ("kernel_log.echo_s", "kernel_log.remember_s"),
)


def contradictions(read: Thresholds) -> Iterator[str]:
    """What of it cannot hold together, each as a sentence that begins with the key."""
    for low, high in ORDER:
        less, more = (getattr(getattr(read, table), key) for table, key in (low.split("."), high.split(".")))
        if less > more:
            yield f"{low}: wanted at most {high} ({more:g}), found {less:g}"
    for name in read.__struct_fields__:
        table = getattr(read, name)
        for key in table.__struct_fields__:
            value = getattr(table, key)
            if isinstance(value, Windows) and value.bad > value.of:
                yield f"{name}.{key}: wanted at most as many bad windows as are looked at, found {list(value)}"
