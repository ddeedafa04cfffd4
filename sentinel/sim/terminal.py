"""The live view: the timeline as it happens, the rack's workers, the traffic, and at the end what held.

This module exists so that a person watches the same marks that the JSON document holds. What always holds: it only reads;
nothing in it waits for the terminal; what is simulated is said on the first line and in the summary.
"""

from __future__ import annotations

import asyncio
import contextlib

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sentinel.model import WorkerState
from sentinel.sim.rack import PLACES
from sentinel.sim.story import SIMULATED, Story

REFRESH_S = 0.125
COLOURS = {
    "injected": "bold red", "found": "yellow", "decided": "bold yellow", "out of rotation": "magenta", "paged": "bold red",
    "traffic shifted": "cyan", "overflow serves": "cyan", "repaired": "green", "restarted": "green", "verified": "green",
    "breaker opened": "yellow", "breaker closed": "green", "back": "bold green", "closed": "green", "page resolved": "green",
}  # fmt: skip
MARKS = {WorkerState.ACTIVE: ("●", "green"), WorkerState.CORDONED: ("◐", "yellow"), WorkerState.OUT: ("○", "red"),
         WorkerState.STANDBY: ("·", "dim")}  # fmt: skip


class Screen:
    """``async with Screen(console, title) as screen``: draws until it ends; ``story`` is shown from when it is set."""

    def __init__(self, console: Console, title: str) -> None:
        self.story: Story | None = None
        self.note = "starting the controller, three gateways, eighteen agents, the store and the workers …"
        self._console = console
        self._title = title
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._drawing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Screen:
        self._live.start()
        self._drawing = asyncio.create_task(self._draw(), name="screen")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._drawing:
            self._drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._drawing
        self._live.update(self._render(), refresh=True)
        self._live.stop()

    async def _draw(self) -> None:
        while True:
            self._live.update(self._render(), refresh=True)
            await asyncio.sleep(REFRESH_S)

    def _render(self) -> RenderableType:
        head = Text.assemble((self._title, "bold"), "\n", ("Simulated: ", "bold"), (", ".join(SIMULATED), "dim"))
        if self.story is None:
            return Panel(Group(head, Text(self.note)), title="sentinel demo")
        story = self.story
        return Panel(Group(head, self._workers(story), self._traffic(story), self._timeline(story)), title="sentinel demo")

    def _workers(self, story: Story) -> Text:
        text = Text()
        for place in PLACES.values():
            state = story.state(place.name)
            mark, style = MARKS[state] if state else ("?", "dim")
            text.append(f"{mark}\u00a0{place.name}  ", style)  # a mark never ends a line without its name
        return text

    def _traffic(self, story: Story) -> Text:
        counts = story.stage.traffic.counts()
        text = Text("requests at the clients: ")
        text.append(f"{counts['sent']} sent, {counts['flowing']} flowing, {counts['ok']} ok, ")
        text.append(f"{counts['retried']} sent to a second gateway, ", "yellow" if counts["retried"] else "")
        text.append(f"{counts['refused']} refused, ", "yellow" if counts["refused"] else "")
        text.append(f"{counts['failed']} failed", "bold red" if counts["failed"] else "")
        text.append(_first_token(story))
        return text

    def _timeline(self, story: Story) -> Table:
        table = Table(box=None, padding=(0, 1), expand=True)
        table.add_column("ms", justify="right", style="dim", no_wrap=True)
        table.add_column("what", no_wrap=True)
        table.add_column("", ratio=1)
        room = max(6, self._console.height - 12)
        for mark in story.timeline.marks[-room:]:
            table.add_row(f"{story.timeline.ms(mark.at):.0f}", Text(mark.what, COLOURS.get(mark.what, "")), mark.detail)
        return table


def summary(story: Story) -> RenderableType:
    """The table at the end: requests, pages, and each expectation with the detail that shows it."""
    counts = story.stage.traffic.counts()
    table = Table(title=f"{story.scenario}: {'every expectation held' if story.ok else 'NOT as expected'}", expand=False)
    table.add_column("expectation")
    table.add_column("held")
    table.add_column("shown by", overflow="fold")
    for e in story.expectations:
        table.add_row(e.name, Text("yes", "green") if e.held else Text("NO", "bold red"), e.detail)
    told = (
        f"requests at the clients, through three gateways: {counts['sent']} sent, {counts['ok']} ok, {counts['refused']} refused, "
        f"{counts['failed']} failed, {counts['retried']} sent to a second gateway{_first_token(story)}"
    )
    if story.gateways:
        told += "\nat the gateways: " + ", ".join(f"{n} {what}" for what, n in story.gateways.items())
    faster = "Faster than shipped: " + ", ".join(f"{k} {v}" for k, v in story.stage.faster.items())
    parts: list[RenderableType] = [table, Text(told), Text(f"Simulated: {', '.join(SIMULATED)}", "dim"), Text(faster, "dim")]
    if story.failed:
        parts.append(Text(story.failed, "bold red"))
    return Group(*parts)


def _first_token(story: Story) -> str:
    took = story.first_token_ms()
    return f"; first token after {took['p50']:.0f} ms (p50), {took['p99']:.0f} ms (p99)" if took else ""
