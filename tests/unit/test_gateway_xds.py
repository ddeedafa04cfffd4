"""Envoy's endpoint files: the same workers, healths and weights as the table, and never half a file."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from sentinel.gateway.models import Plan
from sentinel.gateway.xds import Endpoints, assignment, cluster_name
from sentinel.model import Fleet, Role, RouteEntry, RoutePool, Routes, WorkerState

STATES = (WorkerState.ACTIVE, WorkerState.CORDONED, WorkerState.OUT, WorkerState.STANDBY)


def pool(version: int = 1, count: int = 4) -> Routes:
    entries = tuple(
        RouteEntry(
            worker=f"w{n}", url=f"http://10.0.0.{n + 1}:80{n:02}", role=Role.BOTH, state=STATES[n % 4], capacity=16 * (1 + n % 2)
        )
        for n in range(count)
    )
    return Routes(version=version, pools=(RoutePool(pool="a/b", weight=0.7, workers=entries),))


def test_states_become_healths_and_capacities_weights() -> None:
    """Active is healthy, cordoned degraded, out draining, standbys are not there; weights are in the capacities' proportion."""
    told = assignment("a/b", 7, pool().pools[0].workers)
    (resource,) = told["resources"]
    assert (told["version_info"], resource["cluster_name"]) == ("7", "a_b")
    assert resource["@type"].endswith("v3.ClusterLoadAssignment")
    shown = resource["endpoints"][0]["lb_endpoints"]
    weighed = [(e["health_status"], e["load_balancing_weight"]) for e in shown]
    assert weighed == [("HEALTHY", 100), ("DEGRADED", 200), ("DRAINING", 100)]
    assert shown[0]["endpoint"]["address"]["socket_address"] == {"address": "10.0.0.1", "port_value": 8000}


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    """A reader that looks all the time never sees a file that is missing or half written; nothing else is left in the folder."""
    endpoints, file = Endpoints(tmp_path), tmp_path / f"{cluster_name('a/b')}.json"
    endpoints.write(Plan(pool(0), Fleet()))
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(int(json.loads(file.read_bytes())["version_info"]))

    reader = threading.Thread(target=look)
    reader.start()
    for version in range(1, 60):
        endpoints.write(Plan(pool(version, 40), Fleet()))
    done.set()
    reader.join()
    assert seen and seen == sorted(seen)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a_b.json", "weights.json"]
    assert json.loads((tmp_path / "weights.json").read_bytes()) == {"version": 59, "pools": {"a/b": 0.7}}


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """It is said, and tried again with the next table."""
    folder = tmp_path / "gone"
    endpoints = Endpoints(folder)
    endpoints.write(Plan(pool(1), Fleet()))
    folder.mkdir()
    endpoints.write(Plan(pool(2), Fleet()))
    assert (folder / "weights.json").exists()
