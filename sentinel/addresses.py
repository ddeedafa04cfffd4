"""How a host is named everywhere here: one spelling for each host name and IP address, whatever a program or a person wrote.

This module exists apart from the nouns because the configuration's checks and the decider compare addresses, and must not differ
in it. What always holds: nothing is looked up; what is no IP address is a host name.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=65_536)  # a fleet of 10,000 nodes names each of its addresses again and again
def canonical(address: str) -> str:
    """``FD00::01`` → ``fd00::1``, ``Tray-03.Example.Net.`` → ``tray-03.example.net``."""
    try:
        return str(ipaddress.ip_address(address.strip()))
    except ValueError:
        return address.strip().lower().rstrip(".")
