"""Hands over the agents' long poll: a local action is offered to its node until the node says how it ended.

This module exists so that the controller never opens a connection to a node: agents ask, over the connection they already
trust. What always holds:

* A command's id is the key of the effect that wants it, so that the next leader offers the same command again and the agent,
  which carries out an id at most once, answers with the result it already has.
* A result is only taken from the node the command was for.
* A result that comes before anybody asks for it (sent to an earlier leader's successor) is kept for a while, not lost.
* An agent that stays silent past the deadline is AdapterError: it could not be told.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

from sentinel.model import Command, CommandResult
from sentinel.serving import AdapterError

OFFER_AGAIN = 5.0  # seconds; an agent polls on while it works, and must not be answered at once each time
GRACE = 10.0  # seconds past a command's own deadline for its result to travel
EARLY_RESULTS = 1024


@dataclass
class _Open:
    command: Command
    result: asyncio.Future[CommandResult]
    offered_at: float = float("-inf")
    waiters: int = 1


class CommandDesk:
    """Implements ``sentinel.serving.Hands``. One per process: what it holds is only what somebody waits for."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, _Open]] = {}  # node → command id → command
        self._news: dict[str, asyncio.Event] = {}
        self._early: OrderedDict[str, CommandResult] = OrderedDict()
        self._round = 0

    async def run(self, node: str, action: str, args: dict[str, str], *, key: str, why: str, deadline_s: float) -> CommandResult:
        """Offer one action to a node's agent and wait for its result. Raises AdapterError when none comes in time."""
        early = self._early.pop(key, None)
        if early is not None and early.node == node:
            return early
        mine = self._open.setdefault(node, {})
        entry = mine.get(key)
        if entry is None:
            command = Command(id=key, node=node, action=action, args=args, deadline_s=deadline_s, why=why)
            entry = mine[key] = _Open(command, asyncio.get_running_loop().create_future())
            self._wake(node)
        else:
            entry.waiters += 1
        try:
            async with asyncio.timeout(deadline_s + GRACE):
                return await asyncio.shield(entry.result)
        except TimeoutError:
            taken = "never fetched it" if entry.offered_at == float("-inf") else "fetched it and sent no result"
            raise AdapterError(f"{action} on {node}: its agent {taken} within {deadline_s:g} s") from None
        finally:
            entry.waiters -= 1
            if entry.waiters == 0 and mine.get(key) is entry:
                del mine[key]

    async def poll(self, node: str, wait: float) -> list[Command]:
        """The node's commands that are due to be offered; waits up to ``wait`` seconds for one."""
        until, mine = time.monotonic() + wait, self._round
        while True:
            now = time.monotonic()
            entries = [e for e in self._open.get(node, {}).values() if not e.result.done()]
            due = [e for e in entries if now - e.offered_at >= OFFER_AGAIN]
            if due or now >= until or mine != self._round:
                for e in due:
                    e.offered_at = now
                return [e.command for e in due]
            pause = min([until - now, *(e.offered_at + OFFER_AGAIN - now for e in entries)])
            news = self._news.setdefault(node, asyncio.Event())
            news.clear()
            try:
                async with asyncio.timeout(pause):
                    await news.wait()
            except TimeoutError:
                continue

    def settle(self, result: CommandResult) -> bool:
        """Take one result. False when nobody waits for it now; it is then kept for whoever asks next."""
        entry = self._open.get(result.node, {}).get(result.id)
        if entry is not None and not entry.result.done():
            entry.result.set_result(result)
            return True
        self._early[result.id] = result
        while len(self._early) > EARLY_RESULTS:
            self._early.popitem(last=False)
        return False

    def let_go(self) -> None:
        """Answer every waiting poll with nothing, so that the agents can find the next leader and the server can stop."""
        self._round += 1
        for news in self._news.values():
            news.set()

    def _wake(self, node: str) -> None:
        if node in self._news:
            self._news[node].set()
