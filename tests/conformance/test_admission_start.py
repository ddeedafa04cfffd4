"""A fleet that starts while its store is away: how many processes each of them reckons with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sentinel.config import load
from sentinel.gateway.daemon import build
from sentinel.gateway.guards import Slot


@pytest.mark.parametrize(("said", "processes", "share"), [("", 1, 6), ("", 8, 3), ("replicas = 12", 8, 2), ("replicas = 3", 8, 3)])
async def test_a_start_without_the_store_reckons_with_this_hosts_processes(
    store_server: Any, tmp_path: Path, said: str, processes: int, share: int
) -> None:
    """A process that never reached the store assumes ``replicas`` of them, and never fewer than its own host runs."""
    file = tmp_path / "gateway.toml"
    file.write_text(
        f'[gateway]\nprocesses = {processes}\n[gateway.admission]\n{said}\n[gateway.admission.pools.p]\nrequests = 24\n'
        '[store]\nurl = "unix:///nowhere"\n[[pools]]\nname = "p"\nmodel = "m"\n[[workers]]\nname = "w"\npool = "p"\nurl = "http://w"\n',
        "utf-8",
    )
    settings = load(file)
    assert settings.gateway
    store = await store_server.open(timeout=0.3)
    _, admission, _ = build(settings, settings.gateway, store)
    store_server.pause()
    await admission.start()
    try:
        got = [isinstance(await admission.admit("p", "w", "t", 1, 0.0), Slot) for _ in range(24)]
        assert got.count(True) == share
    finally:
        store_server.resume()
        await admission.stop()
