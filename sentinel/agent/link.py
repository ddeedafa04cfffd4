"""The agent's way to the controller that leads.

This module exists so that whoever has something to say need not know which controller leads or that it changed. What always
holds:

* The node's token goes only to the configured controllers: an answer that names another leader is not followed, and neither
  is a redirect.
* One call tries each controller once; waiting between calls is the caller's.
* Every way it can end is one of four: an answer, ``Unreachable`` (try again), ``Refused`` (trying the same again is no use),
  or cancellation. An answer that is too large or not what was asked for counts as unreachable.
"""

from __future__ import annotations

import random
import re
import ssl
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from sentinel import __version__
from sentinel.config import AgentSettings, ConfigError, read_secret
from sentinel.model import Ack, Command, CommandResult, Report

log = structlog.get_logger()

_T = TypeVar("_T")
_ANSWER_MAX = 4 * 1024 * 1024
_MISDIRECTED = 421


class Unreachable(Exception):
    """No controller took it this time; the sentence says what each one did. ``after_s``: asked to wait so long. ``untaken``: the
    leader itself says that it has not taken it; otherwise that cannot be known."""

    def __init__(self, sentence: str, after_s: float | None = None, *, untaken: bool = False) -> None:
        super().__init__(sentence)
        self.after_s, self.untaken = after_s, untaken


class Refused(Exception):
    """The leader will not take this, now or later."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status

    @property
    def about_content(self) -> bool:
        """The body is to blame (400, 413, 422), not the sender."""
        return self.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)


class _Busy(Exception):
    """This controller asks to be left alone for a while."""

    def __init__(self, sentence: str, after_s: float, *, untaken: bool) -> None:
        super().__init__(sentence)
        self.after_s, self.untaken = after_s, untaken


def backoff_s(attempt: int, cap_s: float = 2.0) -> float:
    """Seconds to wait before the next attempt: doubling from 50 ms to ``cap_s``, each halved to fully at random."""
    return float(min(cap_s, 0.05 * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0))  # noqa: S311


class Link:
    """Calls to the leading controller over a shared ``session``.

    ``timeout_s`` is for one controller's answer to a report; a controller that died with its host is given up after 2 s.
    """

    def __init__(self, settings: AgentSettings, session: aiohttp.ClientSession, *, timeout_s: float = 5.0) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._at = 0
        self._mistrusted: set[str] = set()
        self.configure(settings)

    def configure(self, settings: AgentSettings) -> None:
        """Take over controllers, token and trust. Raises ConfigError, and then nothing has changed."""
        token = read_secret(settings.token_file, "agent.token_file") if settings.token_file else ""
        trust = _trust(settings.ca_file) if settings.ca_file else None
        for url in settings.controllers:
            host = _host(url)
            if token and url.startswith("http://") and host not in ("127.0.0.1", "::1", "localhost"):
                log.warning("the node's token travels unencrypted; wanted an https controller", controller=url)
        self._token, self._token_file, self._trust = token, settings.token_file, trust
        self.urls: Sequence[str] = tuple(u.rstrip("/") for u in settings.controllers)
        self._at = 0

    @property
    def url(self) -> str:
        """The controller that is asked first."""
        return self.urls[self._at] if self.urls else ""

    async def report(self, report: Report) -> Ack:
        ack = await self._call("POST", "/v1/report", Ack, body=report, timeout_s=self._timeout_s)
        if (ack.session, ack.seq) != (report.session, report.seq):
            raise Unreachable(
                f"{self.url} acknowledged report {ack.seq} of session {ack.session!r}; "
                f"wanted {report.seq} of {report.session!r}"
            )
        return ack

    async def commands(self, node: str, wait_s: float = 50.0) -> list[Command]:
        """Held open by the controller until there is a command or ``wait_s`` passed."""
        params = {"node": node, "wait": f"{wait_s:g}"}
        return await self._call("GET", "/v1/commands", list[Command], params=params, timeout_s=wait_s + self._timeout_s)

    async def result(self, result: CommandResult) -> None:
        await self._call("POST", "/v1/results", None, body=result, timeout_s=self._timeout_s)

    # -----------------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[_T] | None,
        *,
        timeout_s: float,
        body: Any = None,
        params: Mapping[str, str] | None = None,
    ) -> _T:
        data = msgspec.json.encode(body) if body is not None else None
        said: list[str] = []
        led: set[int] = set()  # followed to this leader already: two that name each other must not make us spin
        for _ in range(2 * len(self.urls)):
            at, url = self._at, self.urls[self._at]
            try:
                status, answer = await self._ask(method, url + path, data, params, timeout_s)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: no name, no header
                said.append(f"{url}: {str(error) or 'no answer in time'}")
            except _Busy as busy:
                raise Unreachable(f"{url}: {busy}", busy.after_s, untaken=busy.untaken) from None
            else:
                if status < 300:
                    try:
                        return _decoded(answer, kind) if kind is not None else None  # type: ignore[return-value]
                    except msgspec.DecodeError as error:  # a proxy's page, or half an answer
                        said.append(f"{url}: answered {status}, but not with what was asked for: {error}")
                elif status == _MISDIRECTED:
                    said.append(f"{url}: does not lead")
                    leader = self._leader(url, answer)
                    if leader is not None and leader != at and leader not in led:
                        led.add(leader)
                        self._at = leader
                        continue
                elif 400 <= status < 500:
                    if status == HTTPStatus.UNAUTHORIZED and self._new_token():
                        continue
                    raise Refused(status, f"{url}{path} answered {status}: {_sentence(answer)}")
                else:
                    said.append(f"{url}: answered {status}: {_sentence(answer)}")
            self._at = (at + 1) % len(self.urls)
            if len(said) >= len(self.urls):
                break
        raise Unreachable("; ".join(said) or "no controller is configured")

    async def _ask(
        self, method: str, url: str, data: bytes | None, params: Mapping[str, str] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        headers = {"User-Agent": f"sentinel-agent/{__version__}"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if data is not None:
            headers["Content-Type"] = "application/json"
        async with self._session.request(
            method,
            url,
            data=data,
            params=params,
            headers=headers,
            allow_redirects=False,
            ssl=self._trust if self._trust is not None else True,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=2.0),
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _ANSWER_MAX:
                    response.close()
                    raise aiohttp.ClientPayloadError(f"the answer is larger than {_ANSWER_MAX} bytes")
            busy = response.status == HTTPStatus.SERVICE_UNAVAILABLE and _says_busy(bytes(body))
            if busy or response.status == HTTPStatus.TOO_MANY_REQUESTS:
                after = response.headers.get("Retry-After", "")
                wait = min(30.0, float(after)) if after.isascii() and after.isdigit() else 1.0
                raise _Busy(_sentence(bytes(body)) if busy else "asked to wait", wait, untaken=busy)
            return response.status, bytes(body)

    def _leader(self, told_by: str, answer: bytes) -> int | None:
        """Where the leader it names stands among the configured controllers; None: nowhere, or it names none."""
        try:
            leader = _decoded(answer, dict[str, Any]).get("leader")
        except msgspec.DecodeError:
            return None
        if not isinstance(leader, str) or not leader:
            return None
        leader = leader.rstrip("/")
        if leader in self.urls:
            return self.urls.index(leader)
        if leader not in self._mistrusted and len(self._mistrusted) < 16:
            self._mistrusted.add(leader)
            log.warning(
                "a leader that is not among agent.controllers is not followed; the others are asked in turn",
                leader=leader[:200], told_by=told_by,
            )  # fmt: skip
        return None

    def _new_token(self) -> bool:
        """The token's file may have been renewed since: True when it now says something else."""
        if self._token_file is None:
            return False
        try:
            token = read_secret(self._token_file, "agent.token_file")
        except ConfigError as error:
            log.error("the node's token cannot be read again", error=str(error))
            return False
        changed, self._token = token != self._token, token
        return changed


def _host(url: str) -> str:
    """The host of a controller's base URL. Raises ConfigError when it is none."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")
        if parts.scheme in ("http", "https") and host and parts.port != 0 and not re.search(r"[\s\x00]", url):
            return host
    except ValueError:  # a bracket without its other half, a port that is no number, a name that is none
        pass
    raise ConfigError(f"agent.controllers: expected http://host:port or https://host:port, got {url!r}")


def _decoded(answer: bytes, kind: type[_T]) -> _T:
    """Raises msgspec.DecodeError whatever the answer is."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("it is nested without end") from None


def _says_busy(answer: bytes) -> bool:
    """Whether it is the leader's own word that it took nothing. A proxy's 503 is not: then the next controller is asked."""
    try:
        return _decoded(answer, dict[str, Any]).get("busy") is True
    except msgspec.DecodeError:
        return False


def _trust(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"agent.ca_file: {ca_file} holds no usable certificate: {error}") from None


def _sentence(answer: bytes) -> str:
    """The controller's own words, or the beginning of whatever came instead."""
    try:
        return str(_decoded(answer, dict[str, Any])["error"])[:500]
    except (msgspec.DecodeError, KeyError):
        return answer[:200].decode("utf-8", "replace") or "nothing more"
