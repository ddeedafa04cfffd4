"""One line asked, one line answered: the control channel of the simulated rack.

This module exists so that an agent's allow-listed action reaches the simulated workers and GPUs the way ``systemctl`` or
``nvidia-smi -r`` would reach real ones: as a program with an argument vector and an exit status. What always holds:

* Only the standard library is imported, so that the program starts in milliseconds.
* A request is one JSON line ``{"do": verb, "args": [...]}``; the answer is one JSON line with at least ``ok`` and ``detail``.
* The socket lies in the demo's private directory: whoever may open it may act, nobody else can.

Run as ``python -I -S ctl.py SOCKET VERB ARGUMENT...``: prints the detail, exits 0 when it was done and 1 when it was not.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from typing import Any

ANSWER_MAX = 1 << 20


def ask(path: str, do: str, *args: str, timeout_s: float = 30.0) -> dict[str, Any]:
    """Send one request and wait for its answer. Raises OSError when nobody answers within ``timeout_s``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout_s)
        link.connect(path)
        link.sendall(json.dumps({"do": do, "args": list(args)}).encode() + b"\n")
        got = b""
        while not got.endswith(b"\n") and len(got) < ANSWER_MAX:
            piece = link.recv(65536)
            if not piece:
                break
            got += piece
    try:
        answer = json.loads(got)
    except ValueError:
        raise OSError(f"{path}: no whole answer to {do!r}, got {got[:80]!r}") from None
    if not isinstance(answer, dict):
        raise OSError(f"{path}: the answer to {do!r} is not an object")
    return answer


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("usage: ctl.py SOCKET VERB [ARGUMENT...]", file=sys.stderr)
        return 2
    try:
        answer = ask(argv[0], argv[1], *argv[2:])
    except OSError as error:
        print(f"{argv[1]}: the simulated rack does not answer: {error}", file=sys.stderr)
        return 1
    print(answer.get("detail", ""))
    return 0 if answer.get("ok") else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
