"""Log lines of NVIDIA's fabric daemons: Fabric Manager (HGX) and IMEX, pasted.

This module exists so that a daemon's own log is explained like the kernel's. What always holds:

* A line counts when one of these daemons wrote it: by the shape of its own log file, or under its name in the journal.
* NVSwitch errors that Fabric Manager repeats are SXids and judged with them (``probes.pasted``), not here.
* A daemon's trouble is software until the kernel log or NVML say otherwise: nothing here is fatal except a switch that is missing.

Sources: NVIDIA Fabric Manager user guide; gpud's collection of lines; NVIDIA IMEX logs as reported in the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from probes.judging import Judge
from sentinel.model import Action, Component, Finding, Reading, Severity, Suspect

LINES_MAX, LINE_CHARS = 4096, 1000

_OWN = re.compile(r"\s*(?:[\w.-]{1,63}: )?\[[A-Z][a-z]{2} \d{1,2} \d{4} \d\d:\d\d:\d\d\] \[(\w{4,8})\](?: \[tid \d{1,10}\])? (.*)")
_JOURNAL = re.compile(
    r".{0,80}?\b(?:systemd\[1\]: (?=\S+\.service: ))?(nv-fabricmanager|nvidia-fabricmanager(?:-start\.sh)?"
    r"|nvidia-imex(?:-start\.sh)?)(?:\[\d{1,10}\]|\.service)?: (.*)"
)


class _Known(NamedTuple):
    check: str
    daemon: str
    pattern: re.Pattern[str]
    severity: Severity
    action: Action
    suspect: Suspect
    says: str


def _known(check: str, pattern: str, *judged: Any) -> _Known:
    return _Known(check, check.partition(".")[0], re.compile(pattern), *judged)


KNOWN = (
    _known("fabric_manager.version", r"interface version .{0,80}don't match with driver version", Severity.WARNING,
           Action.RESTART_FABRIC_MANAGER, Suspect.SELF,
           "Fabric Manager and driver differ in version and do not start together: install the driver's own one, restart it"),
    _known("fabric_manager.switches", r"number of NVSwitch(?:es|s)? don't match with any supported system topology", Severity.FATAL,
           Action.INSPECT, Suspect.SELF,
           "fewer NVSwitches answer than any board has: Fabric Manager gave up, and a switch is off its bus"),
    _known("fabric_manager.no_switch", r"NV_WARN_NOTHING_TO_DO", Severity.WARNING, Action.INSPECT, Suspect.SELF,
           "Fabric Manager found no NVSwitch: this board has none, or the driver or NVLSM that shows them is missing"),
    _known("fabric_manager.multicast", r"failed to find the GPU handle \d+ in the multicast team", Severity.WARNING,
           Action.RESTART_FABRIC_MANAGER, Suspect.SELF,
           "Fabric Manager does not know a GPU that a job asks multicast for: its GPU was reset or has not joined the fabric"),
    _known("fabric_manager.failed", r"[Ff]ailed to (?:initialize|configure|train) (?:all )?(?:the )?(?:available )?"
           r"(?:NVSwitch|GPU|NVLink)|aborting fabric manager|Failed with result|Main process exited|failed! Exit code",
           Severity.WARNING, Action.RESTART_FABRIC_MANAGER, Suspect.SELF, "Fabric Manager could not bring the fabric up"),
    _known("imex.peer_left", r"Node disconnect event detected for node (?P<peer>\d{1,5})", Severity.WARNING, Action.RESTART_WORKER,
           Suspect.PEER, "an IMEX peer is gone and shared memory with it: workers that used it need a restart; no GPU is named"),
    _known("imex.peer_shutdown", r"Received notification of shutdown from node (?P<peer>\d{1,5})", Severity.INFO, Action.NONE,
           Suspect.PEER, "an IMEX peer says that it shuts down, which is how a job ends"),
    _known("imex.version", r"[Vv]ersion mismatch", Severity.WARNING, Action.RESTART_IMEX, Suspect.SELF,
           "IMEX daemons of different versions do not talk: install one, restart IMEX; no hardware is at fault"),
    _known("imex.failed", r"Failed with result", Severity.WARNING, Action.RESTART_IMEX, Suspect.SELF,
           "the IMEX daemon ended with an error: its own log says why; restart it where a job needs it"),
    _known("imex.node_map", r"[Nn]ode (?:map|config\w*) mismatch", Severity.WARNING, Action.RESTART_IMEX, Suspect.SELF,
           "IMEX daemons have different lists of nodes: give all the same, restart IMEX"),
)  # fmt: skip
_TALKS = ("fabricmanager", "[tid ", "] [ERROR] ", "nvidia-imex")


def read(text: str, node: str) -> Iterator[Reading]:
    """One reading of probe ``fabric_log``: its lines of interest, in order, at most ``LINES_MAX``."""
    if not any(mark in text for mark in _TALKS):
        return
    lines = []
    for raw in text.splitlines():
        line = raw[:LINE_CHARS]
        journal = None
        if (own := _OWN.match(line)) is None and (journal := _JOURNAL.match(line)) is None:
            continue
        daemon, said = ("", own[2]) if own else (journal[1], journal[2]) if journal else ("", "")
        if any(k.pattern.search(said) for k in KNOWN if _of(daemon, k)):
            lines.append([daemon, said])
        if len(lines) >= LINES_MAX:
            break
    if lines:
        yield Reading(probe="fabric_log", node=node, at=0.0, boot_id="pasted", data={"said": lines})


def judge(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """One finding for each kind of line and the peer it names; repeats are counted."""
    seen: dict[tuple[str, str], list[Any]] = {}
    for daemon, said in reading.data["said"]:
        known, match = next(((k, m) for k in KNOWN if _of(daemon, k) and (m := k.pattern.search(said))), (None, None))
        if known is not None and match is not None:
            peer = match.groupdict().get("peer") or ""
            entry = seen.setdefault((known.check, peer), [known, said, 0])
            entry[2] += 1
    j = Judge(reading.node, reading.at, {})
    for (check, peer), (known, said, count) in list(seen.items())[:256]:
        where = Component(node=reading.node, device=f"{known.daemon}@{peer}" if peer else known.daemon)
        facts = {"drain": "node" if known.severity is Severity.FATAL else "none", **({"peer": int(peer)} if peer else {})}
        j.event(check, where, severity=known.severity, action=known.action, suspect=known.suspect, certainty=0.8, count=count,
                evidence=(said[:200],), facts=facts, summary=known.says[0].upper() + known.says[1:] + ".")
    return j.findings()


def _of(daemon: str, known: _Known) -> bool:
    return not daemon or ("imex" in daemon) == (known.daemon == "imex")
