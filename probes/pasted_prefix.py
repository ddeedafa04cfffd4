"""What may stand before a kernel message: times, one host, levels, who carried it. Nothing else, and who wrote it.

This module exists because "is this the kernel's line, or a line that quotes one" is answered by the prefix alone. What always
holds:

* ``origin`` is pure, reads at most ``PREFIX_CHARS`` and never raises.
* Only what a log, a shell or a container runtime puts before a line is known here; any other word makes the line a quotation.
* A prefix that names a facility other than the kernel's says that user space wrote the line.

Sources: util-linux dmesg (all its time formats, --decode), systemd journalctl -o, RFC 3164 and RFC 5424, Talos, Kubernetes'
CRI log format, pdsh and clush, grep.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PREFIX_CHARS = 320
KERNEL, USER_SPACE, QUOTED = "kernel", "user_space", "quoted"
FILE = "file "  # begins the name of a host that only its file stands for, as in ``grep Xid */dmesg.txt``

STAMP = (
    r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
    r"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?(?:\d{4} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2} (?:\d{4} )?"
    r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: \d{4})?"
    r"|\d{1,2}/\d{1,2}/\d{4} \d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
    r"|\d{1,12}\.\d{1,9}"
)
_FACILITY = r"(?:user|mail|daemon|auth|syslog|lpr|news|uucp|cron|authpriv|ftp|local[0-7])"
_LEVEL = r"(?:emerg|alert|crit|err|error|warn|warning|notice|info|debug)"
_TOKEN = re.compile(
    r"(?P<stamp>(?:" + STAMP + r")(?=[\s:\]]|$):?)"
    r"|(?P<data>\[[\w.@-]{1,64}(?: [\w.@-]{1,32}=\"[^\"\]]{0,120}\")+\])"  # RFC 5424's structured data
    r"|(?P<pod>\[pod/[\w.-]{1,253}/[\w.-]{1,63}\])"
    r"|(?P<bracket>\[[^\[\]\"'{}=]{1,64}\]:?)"
    r"|(?P<syslog>(?:\d{1,6} )?<(?P<pri>\d{1,3})>\d?(?=\s|\[|[A-Z\d]|$))"
    r"|(?P<kernel>(?:kern\." + _LEVEL + r"\s+)?(?:kern(?:el)?(?:\[\d+\])?\s*:|kernel(?=\s|$)))"
    r"|(?P<level>(?i:" + _LEVEL + r")\s*:|(?i:error|warning|warn|info)(?=\s))"
    r"|(?P<labels>\{(?:\w{1,64}=\"[^\"{}]{0,120}\"(?:, ?|(?=\})))+\})"  # logcli
    r"|(?P<stream>std(?:out|err) [FP](?=\s))"
    r"|(?P<nil>-(?=\s)|:(?=\s)|[\ufeff])"
)
_USER_SPACE = re.compile(
    r"\s*(?:[\w.:-]{1,63}:\s+)?" + _FACILITY + r"\s*:\s*" + _LEVEL + r"\s*:"  # dmesg --decode, Talos
    r"|[^\"'{}=]{0,120}\s" + _FACILITY + r"\." + _LEVEL + r"\s"  # BusyBox
)
_FILE = re.compile(
    r"(?:[\w.-]*/)+[\w.-]+:(?:\d{1,9}[:-])?|[\w-]+\.(?:log|txt|out|dmesg)(?:\.\d{1,3})?(?:\.gz)?:(?:\d{1,9}[:-])?"
    r"|\d{1,9}[:-](?=\D)"
)
_CARRIED = re.compile(  # compose and Ansible: "name | "; stern: "pod-x2f4k container "
    r"[\w.-]{1,253}\s+\|(?=\s)|[a-z0-9][a-z0-9.-]{1,200}-[a-z0-9]{5} [a-z][a-z0-9-]{0,62}(?=\s+[\[<\d])"
)
_ADDRESS = r"[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}"  # IPv6
_HOST = re.compile(_ADDRESS + r"(?=:?(?:\s|$))|[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_KEYS = frozenset({"message", "msg", "log", "line", "text", "error", "output", "reason", "summary", "description", "note", "title"})
_SPACE = re.compile(r"\s*")


class Origin(NamedTuple):
    """``author``: kernel, user_space, or quoted (it is part of somebody's text). ``host``: whose log it is; "" where not said."""

    author: str
    host: str = ""


def origin(prefix: str) -> Origin:
    """Who wrote the message behind this prefix, and where."""
    if len(prefix) > PREFIX_CHARS:
        return Origin(QUOTED)
    if _USER_SPACE.match(prefix) is not None:
        return Origin(USER_SPACE)
    host = ""
    at, hosts, stamp, kernel, pending, first = 0, 0, False, False, False, True
    container = False  # what a container prints begins with its own words, not with a host's name
    for pattern in (_FILE, _CARRIED):
        if (match := pattern.match(prefix, at)) is not None:
            at, container = match.end(), pattern is _CARRIED
            name = "" if container else re.sub(r":[\d:-]*$|^\d+[:-]$", "", match[0]).replace("/", ":")
            host = FILE + name if name else host
    while True:
        at = _SPACE.match(prefix, at).end()  # type: ignore[union-attr]  # it matches everywhere
        if at == len(prefix):
            return Origin(QUOTED) if pending else Origin(KERNEL, host)
        if (match := _TOKEN.match(prefix, at)) is not None:
            stamp = stamp or match.lastgroup in ("stamp", "bracket", "data")
            kernel = kernel or match.lastgroup == "kernel"
            container = container or match.lastgroup in ("stream", "pod")
            pending = False
            if match["labels"] is not None and 'transport="kernel"' not in match["labels"]:
                return Origin(QUOTED)
            if match["pri"] is not None and int(match["pri"]) >> 3:
                return Origin(USER_SPACE)
            at = match.end()
        elif not kernel and hosts < 2 and (match := _HOST.match(prefix, at)) is not None:
            after = prefix[match.end(): match.end() + 1]
            if match[0].lower() in _KEYS:
                return Origin(QUOTED)
            host = match[0]
            if after == ":" and first:
                at = match.end() + 1  # "node01: …", as pdsh and talosctl put it; the line behind it may name its host again
            elif hosts or (after and not after.isspace()):
                return Origin(QUOTED)
            else:
                # A bare word is a host only with a time before it or kernel, a time or a level after it.
                pending = container or not stamp
                hosts, at = hosts + 1, match.end()
        else:
            return Origin(QUOTED)
        first = False
