"""The whole scenario table, and the page that people read: ``python -m sentinel.sim.table_page > docs/scenarios.md``.

This module exists so that what the documentation says of a scenario is what the tests check. What always holds: the page is made
of the rows and of nothing else; a test compares it with the one in docs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sentinel.sim.table import Case
from sentinel.sim.table_gateways import GATEWAYS
from sentinel.sim.table_hardware import HARDWARE
from sentinel.sim.table_operations import OPERATIONS
from sentinel.sim.table_serving import SERVING

PARTS = {"Hardware": HARDWARE, "Serving": SERVING, "Gateways": GATEWAYS, "Operations": OPERATIONS}
TABLE = tuple(case for cases in PARTS.values() for case in cases)
_HEAD = """# Scenarios

What happens to a simulated fleet (racks of 18 trays: two DEP8 prefill groups and eight TP4 decoders in the main pool, and an
overflow pool) and exactly what must come of it: every incident with its culprit, every page, every worker that is taken out, with
the state it is in at the end. What is not named must not happen. The decider, the shipped policy and what the probes make of a
reading are the real ones; readings, network and effects are simulated (`sentinel/sim/fleet.py`). `tests/unit/test_scenarios.py`
checks each row and that its journal replays to the same decisions; this page is made of the same rows.
"""


def page() -> str:
    lines = [_HEAD]
    for part, cases in PARTS.items():
        lines += [f"## {part}", ""]
        lines.append("| scenario | what happens | incidents | pages | taken out, state at the end |")
        lines.append("|---|---|---|---|---|")
        lines += [_row(c) for c in cases]
        lines.append("")
    return "\n".join(lines)


def _row(c: Case) -> str:
    out = [*c.drains, *(f"{worker} started" for worker in c.starts)]
    happens = c.happens + (f" **Does not hold yet:** {c.awaits}." if c.awaits else "")
    return f"| {c.name} | {happens} | {_list(c.incidents)} | {_list(c.pages)} | {_list(out)} |"


def _list(said: Iterable[str]) -> str:
    return "<br>".join(what if times == 1 else f"{times} times {what}" for what, times in Counter(said).items()) or "none"


if __name__ == "__main__":
    print(page(), end="")
