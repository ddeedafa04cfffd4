"""One run of the demo: stage, traffic, scenario, summary, in that order.

This module exists so that the command line only parses and prints. What always holds: a run always yields its document,
also when the stage does not come up or the script breaks off (``ok`` is then false and ``failed`` says why); a cancelled
run cleans up and yields nothing.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Console

from sentinel.sim.expect import Scenario
from sentinel.sim.files import FASTER
from sentinel.sim.replicas import told_by
from sentinel.sim.stage import Stage, StageError
from sentinel.sim.story import SIMULATED, Story
from sentinel.sim.terminal import Screen, summary
from sentinel.sim.timeline import Mark, Timeline
from sentinel.store import StoreError

WARM_UP_S = 0.7  # traffic flows this long before anything breaks
LET_END_S = 6.0  # streams may end in this time when the scenario is over


class Show:
    def __init__(self, scenario: Scenario, duration_s: float, *, headless: bool) -> None:
        self._scenario = scenario
        self._duration_s = duration_s
        self._console = Console(stderr=headless)
        self._headless = headless

    async def run(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._duration_s - LET_END_S
        screen = None if self._headless else Screen(self._console, f"{self._scenario.name}: {self._scenario.title}")
        async with screen or contextlib.nullcontext():
            if self._headless:
                self._console.print(f"{self._scenario.name}: {self._scenario.title}", highlight=False)
                self._console.print(f"Simulated: {', '.join(SIMULATED)}", style="dim", highlight=False)
            chosen = self._scenario
            stage = Stage(faster={**FASTER, **chosen.faster}, imex=chosen.imex, slots=chosen.slots)
            try:
                async with stage:
                    story = await self._play(stage, deadline, screen)
            except StageError as error:
                return _broken(self._scenario.name, str(error))
        self._console.print(summary(story))
        return story.document()

    async def _play(self, stage: Stage, deadline: float, screen: Screen | None) -> Story:
        await stage.start_traffic()
        timeline = Timeline(on_mark=lambda _: None)
        if screen is None:
            timeline.on_mark = lambda mark: self._say(timeline, mark)
        async with Story(self._scenario.name, stage, timeline, deadline) as story:
            if screen:
                screen.story = story
            await story.flow(WARM_UP_S)
            try:
                await self._scenario.script(story)
            except (StageError, StoreError) as error:
                story.failed = f"the scenario broke off: {error}"
            await stage.traffic.stop(LET_END_S)
            story.gateways = told_by(await stage.gateways.counts())
            story.settle()
        return story

    def _say(self, timeline: Timeline, mark: Mark) -> None:
        line = f"{timeline.ms(mark.at):>9.0f} ms  {mark.what:<16} {mark.detail}"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def _broken(scenario: str, why: str) -> dict[str, Any]:
    """The document of a run whose stage did not come up."""
    return {
        "scenario": scenario, "simulated": list(SIMULATED), "faster": {}, "timeline": [],
        "requests": {"sent": 0, "ok": 0, "refused": 0, "failed": 0, "retried": 0, "failures": []},
        "gateways": {}, "pages": [], "expectations": [], "failed": why, "ok": False,
    }  # fmt: skip
