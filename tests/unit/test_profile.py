"""Which kind of node this is, and what is therefore expected of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from probes.profile import PROFILES, expected_for, with_hints
from sentinel.model import Reading
from sentinel.testing.nvml import FakeDriver
from sentinel.testing.nvml_kinds import gb200, gb200_tray, h200
from sentinel.testing.nvml_state import FakeGpu, FakeState


def reading(*gpus: FakeGpu, **facts: Any) -> Reading:
    data = asyncio.run(FakeDriver(FakeState(gpus=list(gpus))).read())
    for gpu in data["gpus"]:
        gpu.update(facts)
    return Reading(probe="gpu", node="t01", at=1.0, data=data)


def test_a_gb200_tray_is_recognised() -> None:
    """Its GPUs' facts and name agree: eighteen links at its speed, a domain that spans nodes, links to the CPU."""
    found = expected_for(reading(*gb200_tray().gpus), {})
    assert found == {"profile": "GB200", "gpus_usual": 4, "nvlinks": 18, "nvlink_mbps": 53125, "nvlink_version": 7, "mnnvl": True,
                     "c2c": True, "pcie_width": 16, "ib_gbps": 400}  # fmt: skip


@pytest.mark.parametrize("kind", [p.name for p in PROFILES])
def test_every_kind_is_found_by_its_own_facts(kind: str) -> None:
    """Each kind's healthy GPU is recognised as that kind, and nothing else."""
    p = next(p for p in PROFILES if p.name == kind)
    facts: dict[str, Any] = {"name": f"NVIDIA {kind}", "architecture": p.architecture, "link_version": p.nvlink_version,
                             "link_speed_mbps": [p.nvlink_mbps] * 18, "c2c": {"count": 10} if p.c2c else None}  # fmt: skip
    if not p.mnnvl:
        facts["fabric_cluster"] = "00" * 16
    assert expected_for(reading(gb200(), **facts), {})["profile"] == kind


@pytest.mark.parametrize(("facts", "profile"), [
    ({"name": "NVIDIA GB200", "architecture": 9, "link_version": 6, "link_speed_mbps": [26562] * 18, "c2c": None,
      "fabric_cluster": "00" * 16}, None),  # the name says one thing, the chip another
    ({"name": "", "fabric_cluster": "00" * 16, "c2c": None}, "GB200/GB300/B200"),
    ({"name": ""}, "GB200/GB300"),
    ({"name": "NVIDIA GH200 480GB", "architecture": 9}, None),
    ({"name": "NVIDIA H100 PCIe", "architecture": 9}, None),
    ({"name": "NVIDIA H200 NVL", "architecture": 9}, None),
    ({"name": "NVIDIA RTX PRO 6000", "architecture": 10, "link_count": 0}, None),
    ({"name": "NVIDIA GB200", "architecture": None, "fabric_cluster": None, "link_speed_mbps": None}, None),  # a name alone
    ({"name": "NVIDIA GB200", "c2c": {"count": 0}}, "GB200"),  # sick, not of another kind
])  # fmt: skip
def test_facts_come_before_names(facts: dict[str, Any], profile: str | None) -> None:
    """A fact that contradicts rules a kind out, a name alone says nothing, and what several kinds share is all that is expected."""
    assert expected_for(reading(gb200(), **facts), {}).get("profile") == profile


def test_only_what_all_agree_on_is_expected() -> None:
    """Where the kind is not certain, a value on which the kinds differ is left open."""
    found = expected_for(reading(gb200(), name="", fabric_cluster="00" * 16, c2c=None), {})
    assert found["nvlink_mbps"] == 53125
    assert not found.keys() & {"mnnvl", "c2c", "gpus_usual", "ib_gbps"}


def test_the_site_wins_and_a_count_is_never_made_up() -> None:
    """What the site says stands; the number of GPUs is only ever the site's."""
    found = expected_for(reading(h200(), h200()), {"nvlinks": 12})
    assert found["nvlinks"] == 12 and "gpus" not in found and found["gpus_usual"] == 8
    assert expected_for(reading(gb200()), {"gpus": 2})["gpus"] == 2


def test_links_are_expected_where_one_was_ever_up() -> None:
    """A board whose links were never up may have none; one that had them is missed when all are gone."""
    memory: dict[str, Any] = {}
    down = h200()
    down.set(links=[0] * 18)
    assert "nvlinks" not in expected_for(reading(down), {}, {})
    assert expected_for(reading(h200()), {}, memory)["nvlinks"] == 18
    assert expected_for(reading(down), {}, memory)["nvlinks"] == 18


def test_a_kind_once_known_outlives_a_dead_driver() -> None:
    """A node whose GPUs say nothing more is still of its kind; a node of two kinds is of none."""
    memory: dict[str, Any] = {}
    expected_for(reading(gb200()), {}, memory)
    silent = Reading(probe="gpu", node="t01", at=2.0, data={"error": {"code": 18, "text": "no"}, "gpus": []})
    assert expected_for(silent, {}, memory)["profile"] == "GB200"
    mixed = reading(gb200("0008:01:00.0", 1), h200("0009:01:00.0", 2))
    assert expected_for(mixed, {"gpus": 2}) == {"gpus": 2}


def test_hints_stand_below_what_the_site_says() -> None:
    """What is usual for the kind that the gpu probe knows is handed on apart from the site's word and without its keys."""
    memories: dict[str, dict[str, Any]] = {"gpu": {"kind": {}}, "pcie": {}}
    site = {"gpus": 4, "ib_gbps": 200}
    assert with_hints(site, {}) == with_hints(site, memories) == {**site, "hints": {}}
    expected_for(reading(*gb200_tray().gpus), site, memories["gpu"]["kind"])
    found = with_hints(site, memories)
    assert {k: v for k, v in found.items() if k != "hints"} == site
    assert (found["hints"]["profile"], found["hints"]["pcie_width"]) == ("GB200", 16)
    assert "ib_gbps" not in found["hints"] and "gpus" not in found["hints"]
