"""What several scripted faults expect, each said once: whom it may take out, which requests may fail, how what came is told.

What always holds: an expectation is a sentence and whether it held; what can only be told when traffic has ended is told then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sentinel.model import Drain, Response
from sentinel.sim.story import Story


@dataclass(frozen=True)
class Scenario:
    """``faster``: what else of the policy is shortened for it. ``imex``: its agents watch an IMEX domain, too. ``slots``: requests
    that one worker runs at once."""

    name: str
    title: str
    script: Callable[[Story], Awaitable[None]]
    faster: Mapping[str, str] = field(default_factory=dict)
    imex: bool = False
    slots: int = 16


def xid(pci: str, code: int, rest: str) -> str:
    """The kernel line of an Xid on this GPU (its address without the function, as the driver writes it)."""
    return f"NVRM: Xid (PCI:{pci.rsplit('.', 1)[0]}): {code}, {rest}"


def only(s: Story, victims: set[str]) -> None:
    drained = {d.worker for d in s.new_drains()}
    name = "nothing was drained" if not victims else f"only {', '.join(sorted(victims))} was taken out"
    s.expect(name, drained == victims, responses(s) or "no drain")


def fails_only_on(s: Story, victim: str) -> None:
    """Streams that had begun on the dead worker may fail: its tokens are gone to the client. Nothing else may."""

    def check() -> tuple[bool, str]:
        return all(r.failed_on == victim and r.tokens for r in s.failures()) and not s.refusals(), failures(s)

    s.expect_at_end(f"only streams in the middle of {victim} failed", check)


def none_fails(s: Story) -> None:
    s.expect_at_end("no request failed or was refused", lambda: (not s.failures() and not s.refusals(), failures(s)))


def served_on(s: Story) -> None:
    """Not one expectation is worth anything when no traffic flowed."""

    def check() -> tuple[bool, str]:
        after = sum(r.ok and r.at > (s.timeline.zero or 0.0) for r in s.stage.traffic.records)
        return after >= 10, f"{after} requests begun after the fault and answered whole"

    s.expect_at_end("traffic flowed on", check)


async def stopped(s: Story, worker: str) -> bool:
    await asyncio.sleep(0)
    return (await s.stage.worker_host("list"))["workers"][worker]["pid"] is None and not s.active(worker)


def left_by(s: Story, worker: str, response: Response) -> bool:
    return any(d.worker == worker and d.response is response for d in s.new_drains())


def told(drain: Drain | None, *steps: str) -> bool:
    return drain is not None and set(steps) <= {step.what for step in drain.history}


def reporters(s: Story) -> set[str]:
    return {f.component.node for i in s.new_incidents() for f in i.findings} | {
        f.component.node for i in s.incidents.values() for f in i.findings if f.check.startswith("driver.")
    }


def ms(s: Story, what: str) -> str:
    mark = s.timeline.first(what)
    return f"{what} after {s.timeline.ms(mark.at):.0f} ms" if mark else f"{what}: never seen"


def responses(s: Story) -> str:
    return ", ".join(f"{d.worker}: {d.response} ({d.state})" for d in s.new_drains())


def pages(s: Story) -> str:
    return "; ".join(f"{p['event']} {p['urgency']}".strip() for p in s.stage.pages) or "no page"


def faults(s: Story) -> str:
    return ", ".join(f"{i.fault} at {i.culprit}" for i in s.new_incidents()) or "no incident"


def failures(s: Story) -> str:
    return some([r.failed or r.refused for r in s.failures() + s.refusals()]) or "no failure"


def some(told: Sequence[str], most: int = 5) -> str:
    return "; ".join(told[:most]) + (f" and {len(told) - most} more" if len(told) > most else "")
