"""Where the store is: the forms of ``store.url``, for the configuration's checks and for whoever opens it.

This module exists apart from the store because ``sentinel config check`` judges a file without opening anything, and must not
differ from what opens. What always holds: nothing is asked or looked up; a password in a URL is a mistake and never repeated.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

SENTINEL_PORT = 26379  # Redis' own default for Sentinels
FORMS = '"embedded:", redis://, rediss://, redis+sentinel://, rediss+sentinel:// or unix://'
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


class Sentinels(NamedTuple):
    """``redis+sentinel://[user@]host:port,host:port/service[?options]``; ``query`` holds redis-py's TLS options."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    user: str
    tls: bool
    query: str


def problem(url: str) -> str:
    """One sentence on what is wrong with the URL, beginning with the key; empty when nothing is."""
    shown = unsecret(url)
    if shown != url or "password=" in url:
        return "store.url: holds a password; wanted store.password_file, a file that only sentinel can read"
    if url.startswith("embedded:"):
        return ""
    scheme = url.partition("://")[0] if "://" in url else ""
    if "cluster" in scheme:
        return (
            f"store.url: sentinel uses no Redis Cluster, got {shown!r}: all of its keys are one slot, so of a cluster it would "
            "use one primary and nothing more; wanted one server, or Redis Sentinel (redis+sentinel://…)"
        )
    if scheme not in _SCHEMES:
        return f"store.url: expected {FORMS}, got {shown!r}"
    try:
        if "sentinel" in scheme:
            sentinels(url)
        else:
            _ = urlsplit(url).port
    except ValueError as error:
        return f"store.url: {error}, got {shown!r}"
    return ""


def sentinels(url: str) -> Sentinels | None:
    """The parts of a URL that names Sentinels; None for one that names a server. Raises ValueError with what is wrong."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("redis+sentinel", "rediss+sentinel"):
        return None
    rest, _, query = rest.partition("?")
    authority, _, service = rest.partition("/")
    user, _, named = authority.rpartition("@")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", service):
        raise ValueError("expected the service that the Sentinels watch after the hosts, as in redis+sentinel://a:26379,b:26379/mymaster")
    hosts = tuple(dict.fromkeys(_host(name) for name in named.split(",")))
    return Sentinels(hosts, service, user, scheme.startswith("rediss"), query)


def _host(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+)(?::(\d{1,5}))?", text)
    port = int(found[2] or SENTINEL_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise ValueError(f"expected host:port of each Sentinel, with commas between, but found {text!r}")
    return found[1].strip("[]"), port


def unsecret(url: str) -> str:
    """The URL with a password in it hidden."""
    return re.sub(r"//([^@/:]*):[^@/]*@", r"//\1:***@", url)
