"""What a configuration says about where things stand: it becomes the fleet; what contradicts itself is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.config import ConfigError, load
from sentinel.model import NodePlace

ASICS = ", ".join(f'"sw{n}"' for n in range(18))
GOOD = f"""
[topology]
asics = [{ASICS}]

[[pools]]
name = "chat"
max_share = 0.5
decode_per_prefill = 3
sessions_per_prefill = 50
context_tokens = 4000

[[nodes]]
name = "t01"
site = "hall-1"
rack = "a01"
domain = "nv-1"
tray = 0
addresses = ["10.0.1.1", "tray-01.example.net"]
leaves = {{ mlx5_0 = "leaf-a1", mlx5_1 = "leaf-a2" }}

[[nodes]]
name = "t02"
site = "hall-1"
rack = "a01"
domain = "nv-1"
tray = 1

[[nodes]]
name = "t03"

[[workers]]
name = "w"
pool = "chat"
url = "http://t01:8000"
nodes = ["t01", "t02"]
domain = "nv-1"
"""


def written(directory: Path, text: str) -> Path:
    file = directory / "sentinel.toml"
    file.write_text(text, "utf-8")
    return file


def test_it_becomes_the_fleet(tmp_path: Path) -> None:
    """Places of the nodes that the file says something about, the ASICs in their order, and what a pool is worth."""
    fleet = load(written(tmp_path, GOOD)).fleet()
    assert fleet.places[0] == NodePlace(
        node="t01", site="hall-1", rack="a01", domain="nv-1", tray=0, addresses=("10.0.1.1", "tray-01.example.net"),
        leaves={"mlx5_0": "leaf-a1", "mlx5_1": "leaf-a2"},
    )  # fmt: skip
    assert [p.node for p in fleet.places] == ["t01", "t02"]
    assert fleet.asics == tuple(f"sw{n}" for n in range(18))
    pool = fleet.pools[0]
    assert (pool.max_share, pool.decode_per_prefill, pool.sessions_per_prefill, pool.context_tokens) == (0.5, 3.0, 50.0, 4000)


MORE_NODE = '[[nodes]]\nname = "t04"\n'
MORE_WORKER = '[[workers]]\nname = "w2"\npool = "chat"\nurl = "http://t03:8000"\n'
BAD = {
    "17 ASICs": (GOOD.replace('"sw17"', "").replace(', ]', "]"), "topology.asics: 17 names; wanted 18"),
    "one ASIC twice": (GOOD.replace('"sw3"', '"sw4"'), "topology.asics: 'sw4' is there 2 times"),
    "an ASIC without a name": (GOOD.replace('"sw3"', '""'), "topology.asics: '' is no name"),
    "an address at two nodes": (
        GOOD + MORE_NODE + 'addresses = ["10.0.1.1"]', "nodes.t04.addresses: 10.0.1.1 is node 't01' already"
    ),
    "the same address in another spelling": (
        GOOD + MORE_NODE + 'addresses = ["TRAY-01.example.net."]', "TRAY-01.example.net. is node 't01' already"
    ),
    "an address that is another node's name": (
        GOOD + MORE_NODE + 'addresses = ["t03"]', "nodes.t04.addresses: t03 is node 't03' already"
    ),
    "an address with a space": (GOOD + MORE_NODE + 'addresses = ["10.0.1.9 "]', "nodes.t04.addresses: '10.0.1.9 ' is no host name"),
    "two nodes on one tray": (GOOD + MORE_NODE + 'rack = "a01"\ntray = 1', "tray 1 of rack 'a01' is node 't02' already"),
    "a tray below nothing": (GOOD.replace("tray = 1", "tray = -1"), "nodes[1].tray"),
    "a rack at two sites": (
        GOOD + MORE_NODE + 'rack = "a01"\nsite = "hall-2"', "rack 'a01' is at 'hall-1' by node 't01' and at 'hall-2'"
    ),
    "a domain in two racks": (
        GOOD + MORE_NODE + 'rack = "a02"\ndomain = "nv-1"', "'nv-1' is in rack 'a01' by node 't01' and in 'a02' here"
    ),
    "a worker in two domains": (
        GOOD.replace('tray = 1', 'tray = 1\n').replace('domain = "nv-1"\ntray = 1', 'domain = "nv-2"\ntray = 1'),
        "workers.w.gpus: they span two NVLink domains (t01 in 'nv-1', t02 in 'nv-2')",
    ),
    "a worker called into another domain": (
        GOOD.replace('nodes = ["t01", "t02"]\ndomain = "nv-1"', 'nodes = ["t01", "t02"]\ndomain = "nv-7"'),
        "workers.w.domain: it is 'nv-7', but its node 't01' is in 'nv-1'",
    ),
    "two workers that disagree about their node": (
        GOOD + MORE_WORKER + 'nodes = ["t03"]\ndomain = "x"\n'
        + MORE_WORKER.replace("w2", "w3").replace("t03", "t9") + 'nodes = ["t03"]\ndomain = "y"',
        "workers.w3.domain: it is 'y', but its node 't03' is in 'x'",
    ),
    "a port for a device": (GOOD.replace("mlx5_0 =", '"mlx5_0/1" ='), "'mlx5_0/1' is no InfiniBand device; wanted its name alone"),
    "a PCI address for a device": (GOOD.replace("mlx5_0 =", '"0000:03:00.0" ='), "'0000:03:00.0' is no InfiniBand device"),
    "a leaf without a name": (GOOD.replace('"leaf-a1"', '""'), "nodes.t01.leaves.mlx5_0: '' names no leaf switch"),
    "a rack with a slash": (GOOD.replace('"a01"', '"hall/a01"'), "nodes.t01.rack: 'hall/a01' is no name"),
    "a share above one": (GOOD.replace("max_share = 0.5", "max_share = 1.5"), "pools[0].max_share"),
    "a ratio of nothing": (GOOD.replace("decode_per_prefill = 3", "decode_per_prefill = 0"), "pools[0].decode_per_prefill"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_contradicts_itself_is_refused(case: str, tmp_path: Path) -> None:
    """One sentence that begins with the key and names both sides; nothing starts."""
    text, wanted = BAD[case]
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, text))
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)


def test_partial_words_contradict_nothing(tmp_path: Path) -> None:
    """A tray without a rack, a domain without a rack, leaves alone: what is not said is learned, and refused by nobody."""
    nodes = "".join(f'[[nodes]]\nname = "x{n}"\ntray = 1\ndomain = "d"\nleaves = {{ ibp12s0 = "leaf-1" }}\n' for n in range(3))
    assert len(load(written(tmp_path, nodes)).fleet().places) == 3
