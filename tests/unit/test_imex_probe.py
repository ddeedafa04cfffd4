"""The IMEX domain: one judgement for table and JSON, the culprit by its column, and a tool that may hang."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from probes import Context, ProbeError, imex_text
from probes.decode import decode_text
from probes.imex import ImexProbe
from sentinel.model import Finding, Reading

LETTER = {"C": "CONNECTED", "I": "INVALID", "N": "NEVER_CONNECTED", "R": "RECOVERING", "D": "DISCONNECTED", "A": "AUTHENTICATING",
          "!V!": "VERSION_MISMATCH", "!M!": "NODE_MAP_MISMATCH"}  # fmt: skip
LEGEND = """Connectivity Table Legend:
I - Invalid - Node wasn't reachable, no connection status available
N - Never Connected
D - Disconnected - Connection was lost, and clean up has been triggreed.
!V! - Version mismatch, communication disabled.
!M! - Node map mismatch, communication disabled.
C - Connected - Ready for operation

"""


class Domain:
    """A domain of ``n`` nodes, all ready and connected until changed."""

    def __init__(self, n: int) -> None:
        self.n, self.state = n, "UP"
        self.status = ["READY"] * n
        self.host = [f"10.3.0.{i + 1}" for i in range(n)]
        self.cells = [["C"] * n for _ in range(n)]

    def dead(self, *nodes: int) -> Domain:
        for k in nodes:
            self.status[k] = "UNAVAILABLE"
            self.cells[k] = ["I"] * self.n
        for row in self.cells:
            for k in nodes:
                row[k] = "I" if row == ["I"] * self.n else "D"
        self.state = "DEGRADED"
        return self

    def table(self, legend: bool = True) -> str:
        said = enumerate(zip(self.host, self.status, strict=True))
        lines = [f"Node #{i:<3} - {h:<15} - {s:<20} - Version: 580.95" for i, (h, s) in said]
        head = " Nodes From\\To  " + "".join(f"{i:<4}" for i in range(self.n))
        rows = [f"       {i:<9}" + "".join(f"{c:<4}" for c in row) for i, row in enumerate(self.cells)]
        text = "\n".join(["6/1/2026 06:08:10.580", "Nodes:", *lines, "", head, *rows, f"Domain State: {self.state}", ""])
        return (LEGEND if legend else "") + text

    def json(self) -> str:
        nodes = {
            str(i): {"status": self.status[i], "host": self.host[i], "hostName": "N/A", "version": "580.95",
                     "connections": {str(k): {"host": self.host[k], "status": LETTER[c], "changed": False}
                                     for k, c in enumerate(self.cells[i])}}
            for i in range(self.n)
        }  # fmt: skip
        return json.dumps({"nodes": nodes, "timestamp": "6/1/2026 00:00:00.000", "status": self.state})


class Node:
    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.at = 1000.0
        self.probe = ImexProbe(Context(node="t01"))

    def see(self, what: Domain | None, times: int = 3, own: str | None = None, **expected: Any) -> dict[str, Finding]:
        data: dict[str, Any] = {"tool": "x", "answered": what is not None, "why": "connection refused"}
        data |= {"own": own, **imex_text.parse(what.json())[0]} if what else {}
        for _ in range(times):
            self.at += 30
            reading = Reading(probe="imex", node="t01", at=self.at, data=json.loads(json.dumps(data)))
            found = self.probe.assess(reading, self.memory, expected)
            self.memory = json.loads(json.dumps(self.memory))
        self.all = found
        return {f"{f.check}@{f.component}": f for f in found if f.present}


def test_table_and_json_are_one_reading() -> None:
    """Both forms of the same domain parse to equal values, with and without the legend, through any line ending."""
    domain = Domain(4).dead(2)
    (from_json,) = imex_text.parse(domain.json())
    for text in (domain.table(), domain.table(legend=False), domain.table().replace("\n", "\r\n"),
                 "\n".join(f"t07: {line}" for line in domain.table().splitlines())):  # fmt: skip
        assert imex_text.parse(text) == [from_json]


def test_healthy_says_nothing() -> None:
    """A whole domain gives no finding that is present."""
    assert Node().see(Domain(18)) == {}


def test_one_dead_tray_accuses_one_node() -> None:
    """Seventeen nodes that say DEGRADED accuse the eighteenth, as a peer, and neither themselves nor each other."""
    node = Node()
    assert node.see(Domain(18).dead(11), times=2) == {}  # not yet
    found = node.see(Domain(18).dead(11), times=1, own="3")
    assert list(found) == ["imex.peer@t01/imex@10.3.0.12"]
    (peer,) = found.values()
    assert (peer.suspect.value, peer.severity.value, peer.facts["reporters"]) == ("peer", "warning", 17)
    assert node.see(Domain(18), times=1) == {}
    assert any(f.check == "imex.peer" and not f.present for f in node.all)


def test_id_stays_while_it_lasts() -> None:
    """The same lost peer is one occurrence however often it is seen."""
    node = Node()
    first = node.see(Domain(4).dead(1))
    assert [f.id for f in node.see(Domain(4).dead(1)).values()] == [f.id for f in first.values()]


def test_slots_ahead_of_nodes_are_no_fault() -> None:
    """Slots that were never filled count only where the configuration says how many nodes are expected."""
    domain = Domain(6).dead(3, 4, 5)
    domain.host = [f"compute-domain-daemon-{i:04}" for i in range(6)]
    for cell in ("N", "D", "I"):
        for row in domain.cells[:3]:
            row[3:] = [cell] * 3
        assert Node().see(domain) == {}
        assert list(Node().see(domain, imex_nodes=3)) == []
        assert list(Node().see(domain, imex_nodes=6)) == ["imex.slots@t01/imex"]
    filled = Node()
    full = Domain(6)
    full.host = domain.host
    filled.see(full)
    assert len(filled.see(domain)) == 3  # they were there and are lost


@pytest.mark.parametrize(("cell", "check"), [("!V!", "imex.version"), ("!M!", "imex.node_map")])
def test_mismatch_is_software(cell: str, check: str) -> None:
    """Daemons that refuse each other by version or node list want a restart of IMEX; nobody's hardware is accused."""
    domain = Domain(3)
    domain.cells[0][2] = domain.cells[1][2] = domain.cells[2][0] = domain.cells[2][1] = cell
    domain.state = "DEGRADED"
    (found,) = Node().see(domain).values()
    said = (found.check, found.action.value, found.severity.value, found.suspect.value)
    assert said == (check, "restart_imex", "warning", "self")


def test_domain_down() -> None:
    """A domain in which no node is ready wants a restart of IMEX, and accuses no node."""
    domain = Domain(2)
    domain.status, domain.cells, domain.state = ["UNAVAILABLE"] * 2, [["I", "I"], ["I", "I"]], "DOWN"
    (found,) = Node().see(domain).values()
    assert (found.check, found.action.value) == ("imex.domain", "restart_imex")


def test_alone() -> None:
    """A ready node that has lost all others is the culprit: this node's own daemon, or that peer's."""
    domain = Domain(6)
    domain.state = "DEGRADED"
    for k in range(5):
        domain.cells[5][k] = domain.cells[k][5] = "D"
    assert list(Node().see(domain, own="5")) == ["imex.isolated@t01/imex"]
    assert list(Node().see(domain, own="1")) == ["imex.peer@t01/imex@10.3.0.6"]


def test_one_path() -> None:
    """A single pair that does not reach each other accuses the path, not a node."""
    domain = Domain(6)
    domain.cells[1][4] = "D"
    (found,) = Node().see(domain).values()
    assert (found.check, found.facts["pairs"]) == ("imex.path", [["1", "4"]])


def test_starting_has_time() -> None:
    """A daemon that is not ready yet is a finding only when it stays so."""
    domain = Domain(2)
    domain.status[0] = "WAITING_FOR_PEERS"
    node = Node()
    assert node.see(domain, times=4, own="0") == {}
    assert "imex.daemon@t01/imex" in node.see(domain, times=3, own="0")


def test_not_running_is_normal() -> None:
    """No daemon is no finding unless the configuration expects one; and it ends what was said about the domain."""
    assert Node().see(None) == {}
    assert list(Node().see(None, imex=True)) == ["imex.running@t01/imex"]
    node = Node()
    assert node.see(Domain(4).dead(1))
    assert node.see(None) == {}
    assert node.see(Domain(4).dead(1), times=2) == {}  # a new domain is looked at anew


def test_bad_expectations_are_refused() -> None:
    """An expectation of the wrong kind, or a reading of another format, is one clear sentence."""
    with pytest.raises(ProbeError, match="imex_nodes"):
        Node().see(Domain(2), imex_nodes="18")
    with pytest.raises(ProbeError, match=r"expected\.imex"):
        Node().see(Domain(2), imex="yes")
    with pytest.raises(ProbeError, match="format 9"):
        ImexProbe(Context(node="t01")).assess(Reading(probe="imex", node="t01", at=0.0, format=9), {}, {})
    for options in ({"tol": "x"}, {"deadline_s": 0}, {"deadline_s": True}, {"tool": 3}):
        with pytest.raises(ProbeError):
            ImexProbe(Context(node="t01", options=options))


class TestLive:
    """The tool as a process."""

    def probe(self, tmp_path: Path, script: str, **options: Any) -> ImexProbe:
        tool = tmp_path / "nvidia-imex-ctl"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        (tmp_path / "net").mkdir()
        (tmp_path / "net/fib_trie").write_text("  |-- 10.3.0.2\n      /32 host LOCAL\n  |-- 127.0.0.1\n      /32 host LOCAL\n")
        return ImexProbe(Context(node="t01", proc=tmp_path, options={"tool": str(tool), **options}), hostname="t01")

    async def test_no_tool(self, tmp_path: Path) -> None:
        """Without the tool nothing was measured and nothing is said."""
        probe = ImexProbe(Context(node="t01", proc=tmp_path, options={"tool": str(tmp_path / "none")}))
        reading = await probe.read()
        assert reading.data["tool"] is None
        assert probe.assess(reading, {}, {"imex": True}) == []

    async def test_reads_and_knows_itself(self, tmp_path: Path) -> None:
        """What the tool prints is read, and this node is found in it by its address."""
        (tmp_path / "out.json").write_text(Domain(3).json())
        probe = self.probe(tmp_path, f"cat {tmp_path}/out.json")
        reading = await probe.read()
        assert (reading.data["answered"], reading.data["domain"], reading.data["own"]) == (True, "UP", "1")
        assert probe.describe(reading) == ["domain UP, 3 of 3 nodes ready"]

    async def test_no_daemon(self, tmp_path: Path) -> None:
        """A tool that reaches no daemon gives its first line as the reason."""
        reading = await self.probe(tmp_path, "echo 'Failed to read node configuration file' >&2; exit 1").read()
        assert (reading.data["answered"], reading.data["why"]) == (False, "Failed to read node configuration file")

    async def test_hang_is_cut(self, tmp_path: Path) -> None:
        """A tool that does not come back is killed with its children; only when it lasts is it said, about the monitor."""
        probe = self.probe(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600 & wait", deadline_s=0.3)
        memory: dict[str, Any] = {}
        found: list[Finding] = []
        for _ in range(3):
            reading = await probe.read()
            assert reading.data["answered"] is False
            found = probe.assess(reading, memory, {})
        assert [(f.check, f.suspect.value, f.present) for f in found] == [("imex.tool", "monitor", True)]
        pid = int((tmp_path / "pid").read_text())
        for _ in range(100):
            if not alive(pid):
                break
            await asyncio.sleep(0.02)
        assert not alive(pid)
        await probe.close()

    async def test_flood_is_bounded(self, tmp_path: Path) -> None:
        """Output without end is cut by the deadline, and what is kept is bounded."""
        reading = await self.probe(tmp_path, "yes Node", deadline_s=0.5).read()
        assert reading.data["answered"] is False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_pasted() -> None:
    """A paste is judged as the probe judges what lasts; the last output of a text counts."""
    decoded = decode_text(Domain(4).dead(2).table())
    assert [(f.check, str(f.component)) for f in decoded.findings] == [("imex.peer", "pasted/imex@10.3.0.3")]
    assert (decoded.verdict.severity.value, decoded.verdict.drain) == ("warning", "none")
    assert decode_text(Domain(4).dead(2).table() + "\n" + Domain(4).table()).findings == ()
    assert decode_text(Domain(4).json()).findings == ()


def test_hostile_text_is_bounded() -> None:
    """A domain far larger than any rack is read whole; text without end that looks like one gives a bounded answer."""
    assert len(imex_text.parse(Domain(300).table())[0]["links"]) == 300
    assert imex_text.parse('{"nodes" "connections"' * 100_000) == []
    assert len(imex_text.parse("Node #1 - x - READY\n" * 100_000)) == imex_text.OUTPUTS_MAX
    many = "".join(f"Node #{i} - x - READY\n" for i in range(5000))
    assert len(imex_text.parse(many)[0]["nodes"]) == imex_text.NODES_MAX
