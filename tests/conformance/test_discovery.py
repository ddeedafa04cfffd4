"""One suite over both of Dynamo's discovery backends: files, and a real etcd."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from sentinel.serving import AdapterError
from sentinel.serving.discovery import Discovery, Entry
from sentinel.serving.discovery_etcd import EtcdDiscovery
from sentinel.serving.discovery_file import FileDiscovery, encode
from tests.e2e.dynamo import end_process, free_port, start_etcd

A, B = "2cd8a17d4531f6d6", "00000000000000b2"
Put = Callable[[str, bytes], Awaitable[int]]
End = Callable[[int], Awaitable[None]]


class Backend:
    """A discovery under test, and the worker's side of it: ``put`` registers a key, ``end`` lets its owner die."""

    def __init__(self, discovery: Discovery, put: Put, end: End, away: Discovery) -> None:
        self.discovery, self.put, self.end, self.away = discovery, put, end, away

    async def register(self, hexid: str, endpoint: str = "generate", *, namespace: str = "dynamo") -> tuple[str, int]:
        key = f"v1/instances/{namespace}/backend/{endpoint}/{hexid}"
        return key, await self.put(key, json.dumps({"instance_id": int(hexid, 16), "é": " %2F~._-"}, ensure_ascii=False).encode())

    async def entry(self, hexid: str) -> Entry | None:
        return next((e for e in await self.discovery.instances("dynamo") if e.instance == hexid), None)


@pytest.fixture(scope="module")
def etcd(program: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, url = start_etcd(program("etcd"), tmp_path_factory.mktemp("etcd"))
    yield url
    end_process(process)


@pytest_asyncio.fixture(params=["file", "etcd"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with aiohttp.ClientSession() as http:
        if request.param == "file":
            (tmp_path / "kv").mkdir()
            yield file_backend(tmp_path / "kv")
        else:
            url = request.getfixturevalue("etcd")
            async with http.post(f"{url}/v3/kv/deleterange", json={"key": "AA==", "range_end": "AA=="}) as response:
                assert response.status == 200
            yield etcd_backend(http, url)


def file_backend(root: Path) -> Backend:
    async def put(key: str, body: bytes) -> int:
        path = root / "v1" / "instances" / encode(key.removeprefix("v1/instances/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        return 0

    async def end(lease: int) -> None:
        """Files have no lease; whether the owner lives is the adapter's question."""

    return Backend(FileDiscovery(root), put, end, FileDiscovery(root / "nowhere"))


def etcd_backend(http: aiohttp.ClientSession, url: str) -> Backend:
    async def call(path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with http.post(f"{url}/v3/{path}", json=body) as response:
            said: dict[str, Any] = await response.json()
            assert response.status == 200, said
            return said

    async def put(key: str, body: bytes) -> int:
        lease = int((await call("lease/grant", {"TTL": "60"}))["ID"])
        code = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(body).decode(), "lease": str(lease)}
        await call("kv/put", code)
        return lease

    async def end(lease: int) -> None:
        await call("kv/lease/revoke", {"ID": str(lease)})

    return Backend(EtcdDiscovery(url, http), put, end, EtcdDiscovery(f"http://127.0.0.1:{free_port()}", http, deadline_s=0.5))


async def test_an_entry_comes_back_byte_for_byte(backend: Backend) -> None:
    """Removed, it is not listed; restored, it is the same key, the same bytes, the same lease."""
    await backend.register(A)
    before = await backend.entry(A)
    assert before
    await backend.discovery.remove(before)
    assert await backend.entry(A) is None
    assert await backend.discovery.restore(before)
    assert await backend.entry(A) == before


async def test_every_verb_may_be_repeated(backend: Backend) -> None:
    """Removing what is gone and restoring what is there are fine."""
    await backend.register(A)
    entry = await backend.entry(A)
    assert entry
    for _ in range(2):
        await backend.discovery.remove(entry)
    for _ in range(2):
        assert await backend.discovery.restore(entry)
    assert await backend.entry(A) == entry


async def test_only_the_named_entry_is_touched(backend: Backend) -> None:
    """Other instances, other endpoints of the same instance, and other namespaces stay."""
    await backend.register(A)
    await backend.register(A, "worker_kv_query_source_1")
    await backend.register(B)
    await backend.register(B, namespace="dynamo2")
    everything = await backend.discovery.instances("dynamo")
    assert [(e.endpoint, e.instance) for e in sorted(everything, key=lambda e: e.key)] == [
        ("generate", B), ("generate", A), ("worker_kv_query_source_1", A)
    ]  # fmt: skip
    await backend.discovery.remove(next(e for e in everything if e.endpoint == "generate" and e.instance == A))
    assert len(await backend.discovery.instances("dynamo")) == 2
    assert len(await backend.discovery.instances("dynamo2")) == 1


async def test_what_is_no_instance_is_not_listed(backend: Backend) -> None:
    """Keys of another shape, and another kind's keys, are passed over."""
    for name in ("backend/generate", f"a/b/c/{A}", "backend/generate/zz"):
        await backend.put(f"v1/instances/dynamo/{name}", b"{}")
    assert await backend.discovery.instances("dynamo") == []


async def test_no_entries_yet_is_an_empty_list_and_away_is_an_error(backend: Backend) -> None:
    """Nobody registered and nobody reachable are two different answers."""
    assert await backend.discovery.instances("dynamo") == []
    with pytest.raises(AdapterError, match="Dynamo's discovery at"):
        await backend.away.instances("dynamo")


async def test_a_removal_that_could_not_be_made_is_an_error(backend: Backend) -> None:
    """Never a silent success."""
    await backend.register(A)
    entry = await backend.entry(A)
    assert entry
    if isinstance(backend.away, EtcdDiscovery):
        with pytest.raises(AdapterError):
            await backend.away.remove(entry)
    with pytest.raises(AdapterError):
        await backend.away.restore(entry)


async def test_an_entry_whose_lease_ended_never_comes_back(backend: Backend) -> None:
    """etcd refuses the dead owner's lease in the same step as the write; files have no lease to ask."""
    _, lease = await backend.register(A)
    entry = await backend.entry(A)
    assert entry
    assert entry.lease == lease
    if not lease:
        return
    await backend.discovery.remove(entry)
    await backend.end(lease)
    assert await backend.discovery.restore(entry) is False
    assert await backend.entry(A) is None


async def test_the_next_endpoint_of_etcd_is_tried(etcd: str) -> None:
    """One member of three may be away."""
    async with aiohttp.ClientSession() as http:
        some = EtcdDiscovery(f"http://127.0.0.1:{free_port()},{etcd}", http, deadline_s=2)
        assert isinstance(await some.instances("dynamo"), list)


async def test_files_are_named_as_dynamo_names_them_and_nothing_else_is_touched(tmp_path: Path) -> None:
    """Everything but ASCII letters and digits is percent-encoded, and a key outside the instances is refused."""
    assert encode("a_b/c-d.e~f") == "a%5Fb%2Fc%2Dd%2Ee%7Ef"
    with pytest.raises(AdapterError, match="would touch"):
        await FileDiscovery(tmp_path).remove(Entry(key="../../etc/passwd", body=b""))
    escaping = Entry(key="v1/instances/../../../escaped", body=b"x")
    (tmp_path / "v1" / "instances").mkdir(parents=True)
    await FileDiscovery(tmp_path).restore(escaping)
    assert [p.name for p in (tmp_path / "v1" / "instances").iterdir()] == ["%2E%2E%2F%2E%2E%2F%2E%2E%2Fescaped"]
