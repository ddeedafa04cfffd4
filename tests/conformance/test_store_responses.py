"""The memory of who holds which response: of fixed size, one tenant's never another's, and never an answer for the wrong one."""

from __future__ import annotations

from typing import Any

from sentinel.gateway.sessions import Holders, first_id, response_id
from sentinel.store.responses import SLOTS, ResponseRecords


async def test_a_newer_response_takes_an_older_ones_place(store_server: Any) -> None:
    """Two with one slot: the later is known, the earlier is not mistaken for it, and the memory has not grown."""
    records = ResponseRecords(await store_server.open())
    early, late = (7).to_bytes(8, "big") + b"early---", (7 + SLOTS).to_bytes(8, "big") + b"late----"
    await records.put(early, "w1")
    assert (await records.of(early), await records.of(late)) == ("w1", "")
    await records.put(late, "w2")
    assert (await records.of(early), await records.of(late)) == ("", "w2")
    assert await store_server.raw.hlen("{sentinel}:responses") == 1


async def test_what_one_gateway_learns_all_know_by_tenant(store_server: Any) -> None:
    """The same id of another tenant leads nowhere; garbage in the store is nobody's response."""
    one, two = [Holders(ResponseRecords(await store_server.open()), patience_s=5.0) for _ in range(2)]
    await one.keep("alice", "resp_1", "w1")
    await one.keep("alice", "", "w1")
    assert [await two.of(t, r) for t, r in (("alice", "resp_1"), ("bob", "resp_1"), ("alice", "resp_2"))] == ["w1", "", ""]
    await store_server.raw.hset("{sentinel}:responses", await _field(store_server), b"\xff\xff garbage")
    assert await two.of("alice", "resp_1") == ""
    await store_server.raw.set("{sentinel}:responses", b"no hash")
    assert await two.of("alice", "resp_1") == "" and await one.of("alice", "resp_1") == "w1"


async def _field(server: Any) -> bytes:
    (field,) = await server.raw.hkeys("{sentinel}:responses")
    return bytes(field)


def test_the_id_of_an_answer() -> None:
    """Of a whole answer its own id, not one of its parts'; of a stream's first piece the response's; of anything else none."""
    assert response_id(b'{"output":[{"id":"msg_1"}],"id":"resp_1"}') == "resp_1"
    assert [response_id(body) for body in (b"", b"[]", b'{"id":3}', b"\xff", b'{"object":"x"}')] == [""] * 5
    piece = (
        b'6f\r\nevent: response.created\ndata: {"type":"response.created","response":{"id": "resp_2"}}\n\n\r\n'
    )
    assert (first_id(piece), first_id(b"6f\r\n"), first_id(b'"id":"' + b"x" * 1000)) == ("resp_2", "", "")
