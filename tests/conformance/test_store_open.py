"""Opening a store: bad settings in one sentence, and the embedded server's life and death."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.config import ConfigError, Duration, StoreSettings
from sentinel.store import Store, StoreError, open_store

HOLD_OPEN = """
import asyncio, sys
from sentinel.config import StoreSettings
from sentinel.store import open_store
async def main():
    store = await open_store(StoreSettings(url="embedded:" + sys.argv[1]))
    await store.kept.put("from", b"the first process")
    print(store.server.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def answers(store: Store) -> None:
    while True:
        try:
            return await store.ping()
        except StoreError:
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"url": "http://x"}, "store.url: expected"),
        ({"url": "redis"}, "store.url: expected"),
        ({"url": "redis://:secret@x:1"}, "store.url: holds a password"),
        ({"url": "redis://x/?password=secret"}, "store.url: holds a password"),
        ({"url": "redis://x/?nonsense=1"}, "store.url: "),
        ({"prefix": "a{b}"}, "store.prefix: "),
        ({"prefix": ""}, "store.prefix: "),
    ],
)
async def test_settings_that_cannot_be_used(settings: dict[str, str], sentence: str) -> None:
    """Each is one ConfigError sentence that begins with the key and does not repeat a secret."""
    with pytest.raises(ConfigError) as told:
        await open_store(StoreSettings(**settings))
    assert str(told.value).startswith(sentence)
    assert "secret" not in str(told.value)
    assert "\n" not in str(told.value)


async def test_a_server_that_is_away_does_not_stop_a_start(tmp_path: Path) -> None:
    """A store elsewhere opens without asking; asking says where it was looked for."""
    store = await open_store(StoreSettings(url=f"unix://{tmp_path}/nobody.sock"))
    with pytest.raises(StoreError, match=r"nobody\.sock"):
        await store.ping()
    await store.close()


@pytest.mark.needs("redis-server")
async def test_the_password_comes_from_a_file(tmp_path: Path, program: object) -> None:
    """A server that wants a password gets the file's; a wrong one is StoreError, a readable file ConfigError."""
    config = tmp_path / "redis.conf"
    config.write_text(f"port 0\nunixsocket {tmp_path}/s\nrequirepass right\nsave ''\n")
    server = subprocess.Popen(["redis-server", config], stdout=subprocess.DEVNULL)
    secret = tmp_path / "secret"
    secret.write_text("right\n")
    settings = StoreSettings(url=f"unix://{tmp_path}/s", password_file=secret)
    try:
        secret.chmod(0o644)
        with pytest.raises(ConfigError, match=r"store\.password_file: .*everyone"):
            await open_store(settings)
        secret.chmod(0o600)
        store = await open_store(settings)
        await answers(store)
        await store.close()
        secret.write_text("wrong")
        store = await open_store(settings)
        with pytest.raises(StoreError, match=r"(?i)password"):
            await store.ping()
        await store.close()
    finally:
        server.kill()
        server.wait()


async def test_embedded_is_private_and_durable(tmp_path: Path) -> None:
    """Its files and socket are its user's only, it listens on no port, and closing and opening it loses nothing."""
    directory = tmp_path / ("deep/" * 25)
    settings = StoreSettings(url=f"embedded:{directory}")
    store = await open_store(settings)
    assert len(str(directory)) > 108, "deeper than a unix socket's path may be"
    await store.kept.put("k", b"v")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in directory.rglob("*"):
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    pid = store.server.pid if store.server else None
    assert pid
    sockets = {str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()}
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert not {f"socket:[{line[9]}]" for line in listening if line[3] == "0A"} & sockets
    await store.close()
    assert gone(pid)
    store = await open_store(settings)
    assert await store.kept.get("k") == b"v"
    await store.close()


async def test_embedded_lives_in_the_state_directory(tmp_path: Path) -> None:
    """``embedded:`` alone keeps its data in the state directory that it is given."""
    store = await open_store(StoreSettings(), tmp_path)
    await store.ping()
    assert (tmp_path / "store/appendonlydir").is_dir()
    await store.close()


async def test_embedded_is_shared_and_taken_over(tmp_path: Path) -> None:
    """A second process uses the first one's server; when the first is killed its server dies and the second starts anew."""
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLD_OPEN, str(tmp_path), stdout=subprocess.PIPE)
    assert first.stdout
    pid = int(await first.stdout.readline())
    store = await open_store(StoreSettings(url=f"embedded:{tmp_path}", timeout=Duration(0.5)))
    try:
        assert store.server
        assert store.server.pid is None
        assert await store.kept.get("from") == b"the first process"
        first.kill()
        await first.wait()
        while not gone(pid):
            await asyncio.sleep(0.01)
        while store.server.pid is None:
            await asyncio.sleep(0.01)
        await answers(store)
        assert await store.kept.get("from") == b"the first process"
    finally:
        await store.close()


async def test_embedded_comes_back_when_it_dies_alone(tmp_path: Path) -> None:
    """A server that dies is started again by the process that uses it."""
    store = await open_store(StoreSettings(url=f"embedded:{tmp_path}", timeout=Duration(0.5)))
    assert store.server
    await store.kept.put("k", b"v")
    for _ in range(2):
        pid = store.server.pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        while store.server.pid in (None, pid):
            await asyncio.sleep(0.01)
        await answers(store)
        assert await store.kept.get("k") == b"v"
    await store.close()


async def test_embedded_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A directory that cannot be used, and a file that cannot be read, are one StoreError sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        await open_store(StoreSettings(url=f"embedded:{tmp_path}/file"))
    store = await open_store(StoreSettings(url=f"embedded:{tmp_path}/store"))
    await store.kept.put("k", b"v")
    await store.close()
    for manifest in (tmp_path / "store/appendonlydir").glob("*.manifest"):
        manifest.write_text("garbage\n")
    with pytest.raises(StoreError, match=r"does not come up: .*(?i:manifest)"):
        await open_store(StoreSettings(url=f"embedded:{tmp_path}/store"))
