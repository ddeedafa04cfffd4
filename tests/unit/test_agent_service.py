"""What systemd is told, by a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from sentinel.agent.service import Service


def listening(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(address)
    sock.settimeout(5)
    return sock


def test_messages_reach_a_path_and_an_abstract_address(tmp_path: Path) -> None:
    """Both forms of NOTIFY_SOCKET work, and each message has the lines that systemd wants."""
    abstract = f"sentinel-test-{os.getpid()}"
    for address, bound in ((str(tmp_path / "n"), str(tmp_path / "n")), (f"@{abstract}", f"\0{abstract}")):
        with listening(bound) as sock:
            service = Service({"NOTIFY_SOCKET": address})
            service.ready("5 probes")
            assert sock.recv(1024) == b"READY=1\nSTATUS=5 probes"
            service.reloading()
            assert sock.recv(1024).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            service.stopping()
            assert sock.recv(1024) == b"STOPPING=1"


def test_without_systemd_nothing_happens(tmp_path: Path) -> None:
    """No address, or one where nobody listens, is silence and never an error."""
    assert not Service({}).send("READY=1")
    assert not Service({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).send("READY=1")


def test_the_watchdog_is_ours_only(tmp_path: Path) -> None:
    """A watchdog that was asked of another process, or in no number, is none."""
    assert Service({"WATCHDOG_USEC": "10000000"}).watchdog_s == 10
    assert Service({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 10
    assert Service({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Service({"WATCHDOG_USEC": "soon"}).watchdog_s is None
    assert Service({"WATCHDOG_USEC": "0"}).watchdog_s is None


async def test_a_keep_alive_is_sent_only_while_alive(tmp_path: Path) -> None:
    """The timer alone proves nothing: when the work does not make progress, nothing is sent."""
    with listening(str(tmp_path / "n")) as sock:
        alive = True
        service = Service({"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "60000"})
        task = asyncio.create_task(service.watchdog(lambda: alive))
        assert await asyncio.to_thread(sock.recv, 1024) == b"WATCHDOG=1"
        assert await asyncio.to_thread(sock.recv, 1024) == b"WATCHDOG=1"
        alive = False
        sock.setblocking(False)
        await asyncio.sleep(0.05)
        while True:
            try:
                sock.recv(1024)
            except BlockingIOError:
                break
        await asyncio.sleep(0.1)
        try:
            raise AssertionError(sock.recv(1024))
        except BlockingIOError:
            pass
        task.cancel()
