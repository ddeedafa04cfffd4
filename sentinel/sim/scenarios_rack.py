"""Scripted faults that ask for the whole rack in view: many reporters and one culprit, and more doubt than can be afforded.

What always holds: as in ``scenarios``; what is injected is hardware, kernel lines and what tools print, never a finding.
"""

from __future__ import annotations

import asyncio

from sentinel.model import WorkerState
from sentinel.sim.expect import Scenario, faults, none_fails, only, pages, served_on, xid
from sentinel.sim.rack import GPUS, MAIN, NODES, PLACES
from sentinel.sim.story import Story

LINKS = 18
LINK_DOWN = "NETIR_LINK_EVT Fatal XC0 i0 Link {:02} (0x004001c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"


async def switch_asic(s: Story) -> None:
    link = 7
    nodes = sorted({n for p in PLACES.values() if p.pool == MAIN for n in p.nodes})
    s.timeline.inject(f"a switch ASIC dies: NVLink {link} goes down on all {4 * len(nodes)} GPUs of {nodes[0]}…{nodes[-1]}")
    down = [0 if n == link else 1 for n in range(LINKS)]
    gpus = [(node, pci) for node in nodes for pci in GPUS]
    await asyncio.gather(*(s.stage.set_gpu(node, pci, links=down) for node, pci in gpus))
    await asyncio.gather(*(s.stage.inject_kernel_line(node, xid(pci, 149, LINK_DOWN.format(link))) for node, pci in gpus))

    def seen() -> int:
        return max((len(i.scope) for i in s.new_incidents("nvlink-switch")), default=0)

    found = await s.until(lambda: seen() == len(gpus), 15)
    paged = await s.until(lambda: bool(s.pages()), 10)
    back = await s.until(lambda: _all_serve(s), 15)
    await s.flow(2)
    hosts = (await s.stage.worker_host("list"))["workers"]
    s.expect("one incident, and its culprit is the ASIC", found and _named(s) == [f"nvlink-switch rack-1/asic{link:02}"], faults(s))
    s.expect(f"all {len(gpus)} GPUs are in its scope", seen() == len(gpus), f"{seen()} of {len(gpus)}")
    s.expect("one page", paged and [p["urgency"] for p in s.pages()] == ["error"], pages(s))
    called_back = ", ".join(d.worker for d in s.new_drains())
    s.expect("every worker serves", back and _all_serve(s), f"called back: {called_back or 'none'}")
    s.expect("no process was stopped", all(h["starts"] <= 1 for h in hosts.values()))
    none_fails(s)
    served_on(s)


async def imex_peer(s: Story) -> None:
    lost = "t07"
    await s.flow(2.5)  # the domain is seen whole before it is not
    s.timeline.inject(f"the IMEX daemon on {lost} dies: its seventeen peers have lost it and say DEGRADED")
    await s.stage.rack("imex", lost)
    found = await s.until(lambda: any(len(i.scope) == len(NODES) - 1 for i in s.new_incidents("imex-peer")), 25)
    paged = await s.until(lambda: bool(s.pages()), 15)
    await s.flow(1)
    s.expect("one incident, and its culprit is the one that is gone", _named(s) == [f"imex-peer {lost}"], faults(s))
    s.expect("the seventeen that report it are in its scope", found)
    s.expect("one page of low urgency", paged and [p["urgency"] for p in s.pages()] == ["warning"], pages(s))
    only(s, set())
    s.expect("every worker serves", _all_serve(s))
    none_fails(s)
    served_on(s)


async def budget_exhausted(s: Story) -> None:
    victims = ["decode-01", "decode-03", "decode-05", "decode-07"]
    await s.until(lambda: all(s.stage.traffic.flowing(v) > 0 for v in victims), 10)
    s.timeline.inject(f"{', '.join(victims)}: a row remap is pending on a GPU of each; doubt may take two of a role in ten minutes")
    for victim in victims:
        await s.stage.set_gpu(PLACES[victim].nodes[0], GPUS[0], rows_pending=True, rows_uncorrected=1)
    paged = await s.until(lambda: len(s.pages()) == 2, 20)

    def gone() -> set[str]:
        return {d.worker for d in s.new_drains()}

    back = await s.until(lambda: len(gone()) == 2 and all(s.active(v) for v in victims), 30)
    await s.flow(1)
    held = [i.culprit for i in s.new_incidents() if any(step.what == "held back" for step in i.history)]
    s.expect("two were drained, reset and are back", back and len(gone()) == 2, ", ".join(sorted(gone())))
    s.expect("the other two were held in and keep serving", len(held) == 2 and _all_serve(s), ", ".join(held))
    s.expect("a person was asked about each of those two", paged and [p["urgency"] for p in s.pages()] == ["error"] * 2, pages(s))
    said = [p["summary"] for p in s.pages()]
    s.expect("and told when the next is possible", all("possible in" in text for text in said), "; ".join(said))
    none_fails(s)
    served_on(s)


RACK = (
    Scenario("switch-asic", "one NVLink index down on 48 GPUs is one switch ASIC: one incident, one page, nobody out", switch_asic),
    Scenario(
        "imex-peer", "one IMEX daemon dies and seventeen say DEGRADED: the one is blamed, nobody is drained", imex_peer,
        faster={"rule.imex-peer.page_after": "2s"}, imex=True,
    ),
    Scenario("budget-exhausted", "four decoders want a reset at once: two go, two are held in and paged", budget_exhausted),
)  # fmt: skip


def _named(s: Story) -> list[str]:
    return [f"{i.fault} {i.culprit}" for i in s.new_incidents()]


def _all_serve(s: Story) -> bool:
    return all(s.state(p.name) is WorkerState.ACTIVE for p in PLACES.values() if not p.standby)
