"""TLS with an authority of one's own: agents and operators to the controller's port, clients to a gateway's, and the controller to
Redis.

The certificates are made by openssl for this test; controller, its agents' link, gateway, the command line and Redis are real.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from sentinel.agent.link import Link
from sentinel.cli.main import main
from sentinel.config import AgentSettings, ConfigError, StoreSettings
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Report
from sentinel.store import Store, StoreError, open_store
from sentinel.testing.control import RedisServer, running_controller, until
from sentinel.testing.decisions import rack
from sentinel.testing.failover import HOST, free_ports
from tests.gateway_site import Site


class Authority:
    """Signs one certificate for 127.0.0.1."""

    def __init__(self, openssl: Path, directory: Path) -> None:
        directory.mkdir()
        self.ca, self.cert, self.key = directory / "ca.pem", directory / "cert.pem", directory / "key.pem"
        make = [str(openssl), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        ca_key = str(directory / "ca.key")
        self._run([*make, "-keyout", ca_key, "-out", str(self.ca), "-subj", "/CN=authority of a test"])
        signed = ["-CA", str(self.ca), "-CAkey", ca_key, "-addext", f"subjectAltName=IP:{HOST}"]
        signed += ["-addext", "basicConstraints=critical,CA:FALSE"]
        self._run([*make, "-keyout", str(self.key), "-out", str(self.cert), "-subj", "/CN=a server", *signed])

    @staticmethod
    def _run(argv: list[str]) -> None:
        subprocess.run(argv, check=True, capture_output=True)


Sign = Callable[[str], Authority]
Program = Callable[[str], Path]


@pytest.fixture
def authority(program: Program, tmp_path: Path) -> Sign:
    return lambda name: Authority(program("openssl"), tmp_path / name)


async def test_the_controllers_port(program: Program, authority: Sign, tmp_path: Path) -> None:
    """With the right authority an agent reports and an operator reads the status; without it, with another one or without TLS
    neither gets anywhere, and both say why."""
    ours, other = authority("ours"), authority("other")
    token = tmp_path / "token"
    token.write_text("token-of-t03\n")
    token.chmod(0o600)
    operator = tmp_path / "operator"
    operator.write_text("token-of-ada\n")
    operator.chmod(0o600)
    redis = RedisServer(program("redis-server"))
    try:
        await redis.start()
        store = await redis.open()
        settings = {"tls_cert": ours.cert, "tls_key": ours.key}
        async with running_controller(
            store, tmp_path, fleet=rack(), decider=partial(Decider, default_policy()), nodes=("t03",), settings=settings
        ) as (controller, _):
            await until(lambda: controller.term, "the controller leads")
            assert controller.url.startswith("https://")

            async def report(url: str, ca: Path | None) -> Any:
                async with aiohttp.ClientSession() as session:
                    link = Link(AgentSettings(node="t03", controllers=(url,), token_file=token, ca_file=ca), session)
                    return await link.report(Report(node="t03", session="s", seq=1, at=time.time(), snapshot=True))

            assert (await report(controller.url, ours.ca)).seq == 1
            for url, ca in ((controller.url, None), (controller.url, other.ca), (controller.url.replace("https", "http"), ours.ca)):
                with pytest.raises(Exception, match=r"(?i)certificate|cannot be reached|unreachable|disconnected"):
                    await report(url, ca)

            async def status(*more: str) -> Any:
                argv = ["status", "--controller", controller.url, "--token-file", str(operator), *more]
                return await asyncio.to_thread(CliRunner().invoke, main, argv)

            told = await status("--ca-file", str(ours.ca))
            assert told.exit_code == 0, told.output
            assert "leader c1" in told.output
            refused = await status("--ca-file", str(other.ca))
            assert refused.exit_code != 0
            assert "certificate" in refused.output
            assert "Traceback" not in refused.output
        await store.close()
    finally:
        redis.close()


async def test_the_gateways_port(authority: Sign, tmp_path: Path) -> None:
    """Clients that trust the authority are served, streamed or not; others and plain HTTP are not; the admin port stays apart."""
    ours, theirs = authority("ours"), authority("theirs")
    async with Site("a", tls_cert=ours.cert, tls_key=ours.key) as site:
        url = f"https://{HOST}:{site.gateway.port}/v1/chat/completions"
        for stream in (False, True):
            async with site.http.post(url, json={"model": "m", "stream": stream}, ssl=_trusting(ours)) as answer:
                assert answer.status == 200 and (b"word0" if stream else b"hello") in await answer.read()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await site.http.post(url, json={"model": "m"}, ssl=_trusting(theirs))
        with pytest.raises(aiohttp.ClientError):
            await site.http.post(url.replace("https", "http"), json={"model": "m"})
        assert len(site.stands["a"].requests) == 2
        assert (await site.metrics())['sentinel_gateway_requests_total{outcome="ok",pool="p",tenant="anonymous",worker="a"}'] == 2
        await site.free()
    with pytest.raises(ConfigError, match=r"gateway.tls_cert: .*cannot be used") as caught:
        await Site(tls_cert=ours.cert, tls_key=theirs.key).__aenter__()
    assert "\n" not in str(caught.value)


def _trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca))


async def test_redis_and_its_sentinels(program: Program, authority: Sign, tmp_path: Path) -> None:
    """Over TLS, with a password of the server and another of its Sentinel, a lease is taken; with a wrong one of either, or with
    another authority, it is "could not tell", in a sentence without the secret."""
    ours, other = authority("ours"), authority("other")
    port, watcher = free_ports(2)
    tls = f"tls-cert-file {ours.cert}\ntls-key-file {ours.key}\ntls-ca-cert-file {ours.ca}\n"
    tls += "tls-auth-clients no\ntls-replication yes\n"
    server, sentinel = tmp_path / "redis.conf", tmp_path / "sentinel.conf"
    server.write_text(f"port 0\ntls-port {port}\nbind {HOST}\n{tls}requirepass of-the-server\nsave ''\ndir {tmp_path}\n")
    sentinel.write_text(
        f"port 0\ntls-port {watcher}\nbind {HOST}\n{tls}requirepass of-the-watcher\n"
        f"sentinel monitor fleet {HOST} {port} 1\nsentinel auth-pass fleet of-the-server\n"
    )
    passwords = {name: tmp_path / name for name in ("of-the-server", "of-the-watcher", "wrong")}
    for name, file in passwords.items():
        file.write_text(name)
        file.chmod(0o600)
    redis = str(program("redis-server"))
    running = [
        subprocess.Popen([redis, str(server)], stdout=subprocess.DEVNULL),
        subprocess.Popen([redis, str(sentinel), "--sentinel"], stdout=subprocess.DEVNULL),
    ]

    async def opened(ca: Path, password: str, watchers: str) -> Store:
        url = f"rediss+sentinel://{HOST}:{watcher}/fleet?ssl_ca_certs={ca}"
        return await open_store(
            StoreSettings(url=url, password_file=passwords[password], sentinels_password_file=passwords[watchers])
        )

    try:
        store = await opened(ours.ca, "of-the-server", "of-the-watcher")
        epoch = None
        async with asyncio.timeout(20):
            while epoch is None:
                try:
                    epoch = await store.lease.acquire("a", "http://a", 30)
                except StoreError:
                    await asyncio.sleep(0.05)
        assert await store.decisions.commit(epoch, []) is True
        await store.close()
        for ca, password, watchers, says in (
            (ours.ca, "wrong", "of-the-watcher", "(?i)password|wrongpass"),
            (ours.ca, "of-the-server", "wrong", "(?i)password|wrongpass"),
            (other.ca, "of-the-server", "of-the-watcher", "(?i)certificate"),
        ):
            store = await opened(ca, password, watchers)
            with pytest.raises(StoreError, match=says) as caught:
                await store.lease.acquire("a", "http://a", 30)
            assert "of-the" not in str(caught.value)
            await store.close()
    finally:
        for process in running:
            process.kill()
            process.wait()
