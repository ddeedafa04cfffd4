"""From judged values to findings: ids that stay the same for as long as a state lasts, and samples counted in a row.

This module exists so that every judgement of hardware states speaks the same way. What always holds: the id of a state names
its check, its component and when it began; a value seen again and again is one occurrence; all memory is plain JSON values.
"""

from __future__ import annotations

from typing import Any

from sentinel.model import Component, Finding, Kind


class Judge:
    """Turns values into findings: gives a state its id from the time it began, and counts samples in a row."""

    def __init__(self, node: str, at: float, memory: dict[str, Any], mono: float | None = None) -> None:
        """``mono``: seconds of a clock that nobody sets, by which lasting is measured; None: the reading did not carry one."""
        self.node, self.at = node, at
        self._mono = at if mono is None else mono
        self._said: dict[str, Finding] = {}
        self._since: dict[str, float] = memory.setdefault("since", {})
        self._lasting: dict[str, float] = memory.setdefault("lasting", {})
        self._runs: dict[str, int] = memory.setdefault("runs", {})

    def findings(self) -> list[Finding]:
        """What was said. A state that has ended forgets when it began."""
        for key, finding in self._said.items():
            if not finding.present:
                self._since.pop(key, None)
        return list(self._said.values())

    def state(self, check: str, component: Component, present: bool, **words: Any) -> None:
        """Say whether a measured state is there; ``words`` (severity, action, summary, …) only matter when it is.

        Said twice about one component (two GPUs that cannot be named apart), the first that is present stands.
        """
        key = f"{check}@{component}"
        if key in self._said and (self._said[key].present or not present):
            return
        since = f"@{self._since.setdefault(key, self.at):.3f}" if present else ""
        words = words if present else {"present": False}
        self._said[key] = Finding(id=key + since, check=check, component=component, at=self.at, **words)

    def event(self, check: str, component: Component, **words: Any) -> None:
        key = f"{check}@{component}@{self.at:.3f}"
        self._said[key] = Finding(id=key, check=check, component=component, at=self.at, kind=Kind.EVENT, **words)

    def said(self, check: str, component: Component) -> bool:
        return f"{check}@{component}" in self._said

    def was(self, check: str, component: Component) -> bool:
        return f"{check}@{component}" in self._since

    def lasts_s(self, name: str, component: Component, holds: bool) -> float:
        """Seconds for which something has held at every reading; 0 the first time and when it does not."""
        key = f"{name}@{component}"
        if not holds:
            self._lasting.pop(key, None)
            return 0.0
        return max(0.0, self._mono - self._lasting.setdefault(key, self._mono))

    def run(self, name: str, component: Component, holds: bool) -> int:
        """How many readings in a row something has held."""
        key = f"{name}@{component}"
        self._runs[key] = self._runs.get(key, 0) + 1 if holds else 0
        return self._runs[key]

    def steady(self, check: str, component: Component, holds: bool, needed: int) -> bool | None:
        """Whether a state that must repeat is there; None while that is not decided."""
        seen = self.run(check, component, holds)
        if not holds or seen >= needed:
            return holds
        return True if self.was(check, component) else None


def span(seconds: float) -> str:
    """A length of time for "in the last …": ``minute``, ``3 hours``, ``45 seconds``."""
    for unit, name in ((3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= unit and not seconds % unit:
            return name if seconds == unit else f"{seconds / unit:g} {name}s"
    return f"{seconds:g} seconds"
