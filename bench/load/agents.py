"""Ten thousand agents in one cheap process: their HTTP and their messages, not their work.

Each node keeps one connection for its reports and, as an agent does, one for the long poll that asks for commands. Bodies are
made ahead from the model's own encoder and filled in by number; answers are read as far as they decide what comes next (taken,
busy, a snapshot wanted). What always holds: a node has one report under way, numbered in order, sent again until it is taken.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from sentinel.model import Component, Finding, GpuPlace, Kind, Place, Report, WorkerSeen, gpu_component
from sentinel.testing.decisions import PCIS

SNAPSHOT_EVERY = 60  # heartbeats: five minutes


def states(node: str, at: float) -> tuple[Finding, ...]:
    """A healthy GB200 tray: 4 GPUs with 30 checks and 18 links with 2 checks each, 4 rails and the host: 300 fine states."""
    fine = [(gpu_component(node, p), f"gpu.check_{n}") for p in PCIS for n in range(30)]
    fine += [
        (Component(node=node, device=f"gpu@{p}", part=f"nvlink{link}"), f"nvlink.check_{n}")
        for p in PCIS for link in range(18) for n in range(2)
    ]  # fmt: skip
    fine += [(Component(node=node, device=f"ib@mlx5_{n}"), f"ib.check_{c}") for n in range(4) for c in range(6)]
    fine += [(Component(node=node, device="driver"), f"host.check_{n}") for n in range(12)]
    return tuple(Finding(id=f"{c}:{check}", check=check, component=c, at=at, present=False) for c, check in fine)


def snapshot(node: str, seq: int, at: float) -> Report:
    """All of a snapshot but its states."""
    number = int(node[1:])
    place = Place(
        chassis=f"chassis-{number // 18}", tray=number % 18, domain=f"{number // 18:032x}", clique=0,
        gpus=tuple(GpuPlace(pci=p, uuid=f"GPU-{node}-{i}-0000-0000-000000000000", module=i) for i, p in enumerate(PCIS)),
        ports=tuple(f"mlx5_{i}" for i in range(4)), addresses=(node, f"10.{number >> 8}.{number & 255}.1"),
    )  # fmt: skip
    seen = WorkerSeen(
        worker=f"decode-{node}", engine="vllm", pid=4711, gpus=PCIS, healthy=True, running=12, waiting=0, progress=1e6,
    )  # fmt: skip
    names = ("gpu", "nvlink", "host", "imex", "infiniband", "pcie", "kernel_log", "worker")
    probes: dict[str, bool | None] = dict.fromkeys(names, True)
    return Report(
        node=node, session=f"{number:016x}", seq=seq, at=at, snapshot=True, boot_id="0" * 36, version="1.0",
        workers=(seen,), probes=probes, place=place,
    )  # fmt: skip


def heartbeat(node: str, seq: int, at: float, same: int, findings: Sequence[Finding] = ()) -> Report:
    return Report(node=node, session=f"{int(node[1:]):016x}", seq=seq, at=at, same=same, findings=tuple(findings))


class Agent(asyncio.Protocol):
    """One node's connection for reports."""

    def __init__(self, node: str, fleet: Fleet) -> None:
        self.node, self.fleet = node, fleet
        self.seq, self.same, self.beats = 0, 0, int(node[1:]) % SNAPSHOT_EVERY
        self.news: deque[tuple[Finding, ...]] = deque()
        self.kept: Callable[[], Finding] | None = None  # a state that is bad, told with every heartbeat
        self.wants = True  # a snapshot
        self.busy_until = 0.0
        self.transport: asyncio.Transport | None = None
        self._under_way: tuple[str, bytes] | None = None
        self._sent_at = 0.0
        self._answer = b""
        self._head = (
            f"POST /v1/report HTTP/1.1\r\nHost: c\r\nAuthorization: Bearer token-of-{node}\r\nUser-Agent: sentinel-agent/1.0\r\n"
            "Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nContent-Type: application/json\r\nContent-Length: "
        ).encode()
        number = int(node[1:])
        self._beat = f'{{"node":"{node}","session":"{number:016x}","seq":'

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def due(self) -> None:
        """The time for a heartbeat has come; while something is under way it is left out."""
        if self.transport is not None and self._under_way is None and not self.news and time.monotonic() >= self.busy_until:
            self.beats += 1
            self._send("beat")

    def tell(self, findings: tuple[Finding, ...]) -> None:
        self.news.append(findings)
        if self._under_way is None:
            self._send("news")

    def _send(self, kind: str) -> None:
        self.seq += 1
        now = time.time()
        if kind == "news":
            body = msgspec.json.encode(Report(node=self.node, session=f"{int(self.node[1:]):016x}", seq=self.seq, at=now,
                                              findings=self.news[0]))  # fmt: skip
        elif self.wants or not self.same or self.beats % SNAPSHOT_EVERY == 0:
            kind = "snapshot"
            body = self.fleet.snapshot_body(self.node, self.seq, now)
        elif self.kept is not None:
            body = msgspec.json.encode(heartbeat(self.node, self.seq, now, self.same, (self.kept(),)))
        else:
            body = f'{self._beat}{self.seq},"at":{now!r},"same":{self.same}}}'.encode()
        self._under_way = kind, body
        self.fleet.bytes[kind] = self.fleet.bytes.get(kind, 0) + len(body)
        self.fleet.count[kind] = self.fleet.count.get(kind, 0) + 1
        self._write()

    def _write(self) -> None:
        assert self._under_way is not None
        assert self.transport is not None
        body = self._under_way[1]
        self._sent_at = time.perf_counter()
        self.transport.write(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self._answer = b""
        self._answered(int(head[9:12]), head, body)

    def _answered(self, status: int, head: bytes, body: bytes) -> None:
        assert self._under_way is not None
        kind, _ = self._under_way
        if status == 200:
            ack = json.loads(body)
            self.same, self.wants = ack.get("same", 0), ack.get("want_snapshot", False)
            self.fleet.took.setdefault(kind, []).append(time.perf_counter() - self._sent_at)
            self.fleet.last_ack = time.time()
            self._under_way = None
            if kind == "news":
                self.news.popleft()
                self.fleet.untold -= 1
            if self.news:
                self._send("news")
        elif status in (421, 503):  # 421: the lease was lost, or is just being taken
            self.fleet.turned_away[kind] = self.fleet.turned_away.get(kind, 0) + 1
            asked = head.lower().partition(b"retry-after:")[2].split(b"\r\n", 1)[0]
            wait = float(asked or 1.0) * random.uniform(1.0, 2.0)
            if kind == "news":
                asyncio.get_running_loop().call_later(wait, self._write)
            else:
                self.seq -= 1
                self._under_way, self.busy_until = None, time.monotonic() + wait
                if self.news:
                    self._send("news")
        else:
            raise SystemExit(f"{self.node}: the controller answered {status}: {body[:300]!r}")


class Poll(asyncio.Protocol):
    """One node's connection for commands: asks, is held for ``wait`` seconds, asks again."""

    def __init__(self, node: str, wait: float, fleet: Fleet) -> None:
        self.fleet = fleet
        self.node, self._wait = node, wait

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._again(random.uniform(0.1, 1.0) * self._wait)  # so that they do not all end together

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"]"):  # the answer may come in two pieces
            self.fleet.count["poll"] = self.fleet.count.get("poll", 0) + 1
            self._again(self._wait)

    def _again(self, wait: float) -> None:
        if not self.transport.is_closing():
            head = f"GET /v1/commands?node={self.node}&wait={wait:.1f} HTTP/1.1\r\nHost: c\r\n"
            self.transport.write(f"{head}Authorization: Bearer token-of-{self.node}\r\n\r\n".encode())


class Fleet:
    """All agents, and what they have measured of the controller."""

    def __init__(self, nodes: Sequence[str], every: float) -> None:
        self.agents = {n: Agent(n, self) for n in nodes}
        self.every = every
        self.count: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.took: dict[str, list[float]] = {}  # kind → seconds from sending to the answer
        self.turned_away: dict[str, int] = {}
        self.untold = 0
        self.last_ack = 0.0
        self._findings = msgspec.json.encode(states("n00000", 0.0)).decode()

    def snapshot_body(self, node: str, seq: int, now: float) -> bytes:
        """As ``snapshot`` says, for any node, without making three hundred findings in the process that makes the load."""
        head = msgspec.json.encode(snapshot(node, seq, now))
        findings = self._findings.replace("n00000", node).replace('"at":0.0', f'"at":{now!r}')
        return head[:-1] + b',"findings":' + findings.encode() + b"}"

    async def connect(self, host: str, port: int, *, polls: int, wait: float) -> None:
        """Reports begin as soon as there is a connection: ten thousand of them take a while, and silence is noticed."""
        loop = asyncio.get_running_loop()
        for agent in self.agents.values():
            await loop.create_connection(lambda a=agent: a, host, port)  # type: ignore[misc]
        for agent in list(self.agents.values())[:polls]:
            await loop.create_connection(lambda a=agent: Poll(a.node, wait, self), host, port)  # type: ignore[misc]

    async def beat(self) -> None:
        """Heartbeats of all nodes, evenly over each period, until cancelled."""
        agents, began, sent = list(self.agents.values()), time.monotonic(), 0
        while True:
            until = int((time.monotonic() - began) / self.every * len(agents))
            for n in range(sent, until):
                agents[n % len(agents)].due()
            sent = until
            await asyncio.sleep(0.01)

    async def all_taken(self) -> None:
        while self.untold:
            await asyncio.sleep(0.005)

    def tell(self, node: str, *findings: Finding) -> None:
        self.untold += 1
        self.agents[node].tell(findings)


def event(node: str, check: str, number: int, gpu: int = 0, **more: object) -> Finding:
    where = gpu_component(node, PCIS[gpu])
    return Finding(id=f"{node}:{check}:{number}", check=check, component=where, at=time.time(), kind=Kind.EVENT, **more)  # type: ignore[arg-type]
