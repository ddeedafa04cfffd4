"""A simulated node reboots as a real one does: the agent goes with it, and comes back with another boot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sentinel.model import Ack, Report
from sentinel.sim import nodes
from sentinel.sim.files import write_tokens
from sentinel.sim.nodes import Refused, Trays
from sentinel.sim.rack import GPUS, PLACES, workers_on
from sentinel.testing.control import until

NODE = "t03"


class Ears:
    """Where a controller would listen: keeps every report."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    async def report(self, request: web.Request) -> web.Response:
        report = msgspec.json.decode(await request.read(), type=Report)
        self.reports.append(report)
        return web.Response(body=msgspec.json.encode(Ack(session=report.session, seq=report.seq)), content_type="application/json")

    async def commands(self, request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.json_response([])

    def boots(self) -> list[str]:
        return list(dict.fromkeys(r.boot_id for r in self.reports if r.boot_id))


@contextlib.asynccontextmanager
async def hosted(folder: Path, pids: dict[str, int | None]) -> AsyncIterator[tuple[Ears, Trays]]:
    """One tray's agent, whoever hears it, and a door like the worker host's behind which ``pids`` run."""

    async def door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        listed = {w: {"pid": pids.get(w)} for w in workers_on(NODE)}
        writer.write(json.dumps({"ok": True, "detail": "", "workers": listed}).encode() + b"\n")
        await writer.drain()
        writer.close()

    ears, app = Ears(), web.Application()
    app.router.add_post("/v1/report", ears.report)
    app.router.add_get("/v1/commands", ears.commands)
    write_tokens(folder)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        workers = await asyncio.start_unix_server(door, path=str(folder / "workers.sock"))
        urls = {w: str(server.make_url("/")) for w in PLACES}
        trays = Trays(folder, str(server.make_url("")).rstrip("/"), urls, http, imex=False)
        try:
            await trays.nodes[NODE].start()
            yield ears, trays
        finally:
            await trays.stop()
            workers.close()


async def test_a_reboot_is_another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command answers before the node is down; then the agent says another boot id, the hardware is well, and the kernel's old
    lines are not found again."""
    monkeypatch.setattr(nodes, "REBOOT_S", 0.05)
    with tempfile.TemporaryDirectory(prefix="sn") as folder:
        async with hosted(Path(folder), {}) as (ears, trays):
            await until(lambda: len(ears.boots()) == 1, "the first boot")
            trays.rack.set_gpu(NODE, GPUS[0], {"lost": True})
            trays.nodes[NODE].kernel.write(f"NVRM: Xid (PCI:{GPUS[0]}): 79, pid=1, name=x, GPU has fallen off the bus.")
            await until(lambda: any(f.check == "xid.79" for r in ears.reports for f in r.findings), "the line")
            assert "reboots" in await trays._reboot_node(NODE)
            with pytest.raises(Refused, match="reboots already"):
                await trays._reboot_node(NODE)
            await until(lambda: len(ears.boots()) == 2, "another boot")
            assert not trays.rack.lost(NODE, GPUS[0])
            later = [f for r in ears.reports if r.boot_id == ears.boots()[1] for f in r.findings]
            assert not [f for f in later if f.present and f.check.startswith(("xid.", "gpu.lost"))]


async def test_a_node_that_serves_is_not_rebooted() -> None:
    """While a worker's process runs there, the command is refused and the boot stays."""
    with tempfile.TemporaryDirectory(prefix="sn") as folder:
        async with hosted(Path(folder), dict.fromkeys(workers_on(NODE), 4711)) as (ears, trays):
            with pytest.raises(Refused, match="still serves"):
                await trays._reboot_node(NODE)
            await until(lambda: bool(ears.boots()), "a report")
            assert trays.nodes[NODE].boots == 1
