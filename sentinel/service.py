"""What systemd is told: ready, alive, reloading, stopping.

Written here instead of taken from a library because the protocol is one datagram (sd_notify(3)) and the watchdog's meaning
is ours: a keep-alive is sent only while ``alive()`` says that the work itself makes progress, never merely because a timer
fired. Outside systemd (no ``NOTIFY_SOCKET``) every call is a no-op. All daemons use this module.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping


class Service:
    """The service manager's side of this process, from its environment; nothing here ever raises."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        self._address = env.get("NOTIFY_SOCKET", "")
        mine = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = env.get("WATCHDOG_USEC", "")
        # Seconds within which systemd wants to hear from us; None: no watchdog asked for.
        self.watchdog_s: float | None = int(usec) / 1e6 if mine and usec.isdigit() and int(usec) else None

    def send(self, *lines: str) -> bool:
        """Send one message; False when there is nobody to tell or it could not be told."""
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), address)
        except OSError:
            return False
        return True

    def ready(self, status: str) -> None:
        self.send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Type=notify-reload wants the monotonic time with it; ``ready()`` must follow, whatever the reload brought."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self.send("STOPPING=1")

    async def watchdog(self, alive: Callable[[], bool]) -> None:
        """Keep the watchdog quiet while ``alive()``; runs until cancelled. Being on the loop, it stops when the loop does."""
        if self.watchdog_s is None:
            return
        while True:
            if alive():
                self.send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)
