"""Months of random weather over simulated racks: what is caught and after how long, what is drained or paged in error, how fast.

Faults come at the rates of hardware.md §6 (``sentinel.sim.weather``), times ``--scale``. Everything but the decider, the policy,
the probes' judgement and the agents' memory is simulated. Prints one JSON object as its last line.

usage: fleet.py [--racks 4] [--days 30] [--scale 1.7] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter

from sentinel.sim.fleet import SimFleet
from sentinel.sim.weather import NOT_HERE, Season, Weather


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--racks", type=int, default=4)
    ap.add_argument("--days", type=float, default=30.0)
    ap.add_argument("--scale", type=float, default=1.7)
    ap.add_argument("--seeds", type=int, default=3)
    a = ap.parse_args()
    began, seasons = time.process_time(), []
    for seed in range(1, a.seeds + 1):
        fleet = SimFleet(racks=a.racks, seed=seed, idle_step=110.0, calm_step=3600.0, settles=(10.0, 60.0), replays=False)
        seasons.append(Weather(fleet, scale=a.scale).run(a.days))
    spent = time.process_time() - began
    print(json.dumps(told(seasons, a, spent)))


def told(seasons: list[Season], a: argparse.Namespace, spent: float) -> dict[str, object]:
    struck = [s for season in seasons for s in season.struck]
    after = sorted(s.caught_s for s in struck if s.caught_s is not None)
    wrong = [d for season in seasons for d in season.fleet.wrong_drains()]
    stopped = [d for season in seasons for d in season.fleet.wrong_drains() if not season.fleet.called_off(d)]
    rack_days = a.racks * a.days * a.seeds
    return {
        "rack_days": rack_days,
        "rack_days_per_s": round(rack_days / spent, 1),
        "faults": len(struck),
        "faults_by_sort": dict(sorted(Counter(s.sort for s in struck).items())),
        "no_faults": dict(sorted(sum((Counter(s.weather) for s in seasons), Counter()).items())),
        "caught": len(after),
        "caught_after_s": {"p50": statistics.median(after), "max": after[-1]} if after else {},
        "missed": sorted(s.sort for season in seasons for s in season.missed),
        "healthy_workers_stopped": [f"{d.worker}: {d.reason}" for d in stopped],
        "healthy_workers_called_off": len(wrong) - len(stopped),
        "pages": sum(len(s.fleet.pages()) for s in seasons),
        "false_pages": [p for s in seasons for p in s.false_pages()],
        "resolved_by_hand": sum(s.by_hand for s in seasons),
        "capacity_lost_share": round(sum(s.fleet.lost_s for s in seasons) / (a.days * 86_400 * a.seeds), 6),
        "not_simulated": NOT_HERE,
    }


if __name__ == "__main__":
    main()
