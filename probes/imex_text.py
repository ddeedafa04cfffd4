"""What ``nvidia-imex-ctl -N`` prints, as table or as JSON, into one shape.

This module exists so that a live look and a pasted one, in either form, are judged by the same code. What always holds:

* Only the list of nodes, the connection table and the domain's state count; the legend above the table is not read.
* Any text gives an answer: what is not there is None or absent; nodes and cells are bounded.
* The states of a connection carry one set of names, whichever form said them; a state that is not known is ``UNKNOWN``.

``parse`` gives for each output ``{"domain": "UP" | "DOWN" | "DEGRADED" | None, "nodes": {index: {"host", "name", "status",
"version"}}, "links": {from: {to: state}}}`` with indices as text. Sources: the tool's own legend and outputs of driver R570
and R580 (NVIDIA IMEX service guide; AWS ParallelCluster's page on IMEX; kubernetes-sigs/dra-driver-nvidia-gpu).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

NODES_MAX = 1024  # an NVL72 domain has 18; the bound only keeps hostile text small
LINE_CHARS = 16384
OUTPUTS_MAX = 64

CONNECTED, INVALID, NEVER, RECOVERING = "CONNECTED", "INVALID", "NEVER_CONNECTED", "RECOVERING"
DISCONNECTED, AUTHENTICATING, VERSION, NODE_MAP = "DISCONNECTED", "AUTHENTICATING", "VERSION_MISMATCH", "NODE_MAP_MISMATCH"
UNKNOWN = "UNKNOWN"
_LETTERS = {
    "C": CONNECTED, "I": INVALID, "N": NEVER, "R": RECOVERING, "D": DISCONNECTED, "A": AUTHENTICATING,
    "!V!": VERSION, "!M!": NODE_MAP,
}  # fmt: skip
_WORDS = (("VERSION", VERSION), ("MAP", NODE_MAP), ("CONFIG", NODE_MAP), ("NEVER", NEVER), ("DISCONNECTED", DISCONNECTED),
          ("CONNECTED", CONNECTED), ("INVALID", INVALID), ("RECOVER", RECOVERING), ("AUTHENT", AUTHENTICATING))  # fmt: skip

_NODE = re.compile(r"\s*Node #(\d{1,5})\s*-\s+(\S{1,255})\s+-\s+([A-Z_]{2,32})\b(.*)")
_VERSION = re.compile(r"Version:\s*(\S{1,64})")
_HEAD = re.compile(r"\s*Nodes From\\To\s+(\S.*)")
_ROW = re.compile(r"\s*(\d{1,5})\s+(\S.*)")
_DOMAIN = re.compile(r"\s*Domain State:\s*(\w{1,32})")
_PREFIX = re.compile(r"^[\w.-]{1,63}: (?=\s*(?:Nodes? |Domain State|\d|\{))")  # "t07: …", as pdsh and clush put it


def state(word: str) -> str:
    """One name for a connection's state, from the table's letter or JSON's word."""
    word = word.strip().upper()
    return _LETTERS.get(word) or next((name for part, name in _WORDS if part in word), UNKNOWN)


def looks_like(text: str) -> bool:
    """Whether it is worth parsing at all; cheap on long text."""
    return "Node #" in text or "Domain State:" in text or '"connections"' in text or "Nodes From\\To" in text


def parse(text: str) -> list[dict[str, Any]]:
    """Every output in the text, in order; at most ``OUTPUTS_MAX``."""
    if not looks_like(text):
        return []
    found = list(_from_json(text))
    return (found or list(_from_table(text)))[:OUTPUTS_MAX]


def _from_json(text: str) -> Iterator[dict[str, Any]]:
    decoder, at, tries = json.JSONDecoder(), 0, 0
    while '"nodes"' in text and tries < OUTPUTS_MAX and (at := text.find("{", at)) >= 0:
        tries += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        at = end
        if isinstance(value, dict) and isinstance(value.get("nodes"), dict):
            yield _of_json(value)


def _of_json(value: dict[str, Any]) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    links: dict[str, dict[str, str]] = {}
    for index, node in list(value["nodes"].items())[:NODES_MAX]:
        if not isinstance(node, dict):
            continue
        name = _word(node.get("hostName"))
        nodes[index] = {"host": _word(node.get("host")), "name": None if name == "N/A" else name,
                        "status": _upper(node.get("status")), "version": _word(node.get("version"))}  # fmt: skip
        seen = node.get("connections")
        if isinstance(seen, dict):
            links[index] = {
                to: state(str(cell.get("status"))) for to, cell in list(seen.items())[:NODES_MAX] if isinstance(cell, dict)
            }
    return {"domain": _upper(value.get("status")), "nodes": nodes, "links": links}


def _from_table(text: str) -> Iterator[dict[str, Any]]:
    out: dict[str, Any] = _empty()
    columns: list[str] = []
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw[:LINE_CHARS], count=1)
        if (match := _NODE.match(line)) is not None:
            if match[1] in out["nodes"] or out["links"]:  # the next output begins
                yield out
                out, columns = _empty(), []
            if len(out["nodes"]) < NODES_MAX:
                version = _VERSION.search(match[4])
                host, status = match[2], match[3]
                out["nodes"][match[1]] = {"host": host, "name": None, "status": status, "version": version[1] if version else None}
        elif (match := _HEAD.match(line)) is not None:
            columns = match[1].split()[:NODES_MAX]
        elif (match := _DOMAIN.match(line)) is not None:
            out["domain"] = match[1].upper()
            yield out
            out, columns = _empty(), []
        elif columns and (match := _ROW.match(line)) is not None:
            cells = match[2].split()
            if len(cells) == len(columns) and len(out["links"]) < NODES_MAX:  # a row that was cut says nothing
                out["links"][match[1]] = {to: state(c) for to, c in zip(columns, cells, strict=True) if to.isdigit()}
    if out["nodes"] or out["links"]:
        yield out


def _empty() -> dict[str, Any]:
    return {"domain": None, "nodes": {}, "links": {}}


def _word(value: Any) -> str | None:
    return value[:255] if isinstance(value, str) and value else None


def _upper(value: Any) -> str | None:
    return value[:64].upper() if isinstance(value, str) and value else None
