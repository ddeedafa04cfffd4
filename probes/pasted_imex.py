"""Pasted output of ``nvidia-imex-ctl -N`` as readings of the imex probe.

This module exists so that a paste is judged by the probe's own code. What always holds: what the probe wants to see several
times in a row is taken at the paster's word; which of the nodes printed it is not known, so nobody is excused or blamed as
"this node"; only what is wrong comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from probes import imex
from probes.imex_text import parse
from probes.thresholds import limits
from sentinel.model import Finding, Reading


def read(text: str, node: str) -> Iterator[Reading]:
    """The last output in the text: each is the whole domain, and the last is how it stands."""
    for output in parse(text)[-1:]:
        data = {"tool": "pasted", "answered": True, "own": None, **output}
        yield Reading(probe="imex", node=node, at=0.0, boot_id="pasted", data=data)


def judge(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    findings: list[Finding] = []
    for look in range(limits().imex.run):
        findings = imex.assess(msgspec.structs.replace(reading, at=reading.at + look), memory, {})
    return [msgspec.structs.replace(f, facts={**f.facts, "drain": "none"}) for f in findings if f.present]
