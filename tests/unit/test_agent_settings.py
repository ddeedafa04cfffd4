"""An agent's settings: what cannot be is refused in one sentence, at the start and at a reload, and the rest is taken up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from sentinel.config import ConfigError
from tests.unit.agent_stand import Controller, Scripted, agent, event, until


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://", "ftp://c", "http://c:port", "http://c:99999", f"http://{'c' * 80}", "http://c d"]
)
async def test_a_controller_that_is_no_address_is_one_sentence(tmp_path: Path, url: str) -> None:
    """It is refused when the agent starts, by its key, and not told again and again as a controller that does not answer."""
    with pytest.raises(ConfigError, match=r"agent\.controllers: expected http"):
        async with agent(tmp_path, url):
            pass


async def test_one_state_directory_has_one_agent(tmp_path: Path) -> None:
    """A second agent on the same state directory is refused with a sentence, and the first is untouched."""
    async with agent(tmp_path) as first:
        with pytest.raises(ConfigError, match="in use by another agent"):
            async with agent(tmp_path):
                pass
        assert first.alive()


async def test_a_state_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    """A state directory below a plain file is refused naming key and path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"agent\.state_dir: .*file/state"):
        async with agent(tmp_path, state_dir=tmp_path / "file/state"):
            pass


async def test_reload_changes_what_can_change_and_nothing_on_error(tmp_path: Path) -> None:
    """A reload moves reports to the new controller and keeps session and spool; a bad one leaves everything as it was."""
    old, new = Controller(), Controller()
    probe = Scripted()
    async with old.serving(), new.serving(), agent(tmp_path, old.url, probe=probe, listen="127.0.0.1:0") as made:
        await until(lambda: old.reports)
        good = msgspec.structs.replace(made.settings, controllers=(new.url,))
        for bad, complaint in (
            (msgspec.structs.replace(good, node="other"), "agent.node"),
            (msgspec.structs.replace(good, listen="nonsense"), "agent.listen"),
            (msgspec.structs.replace(good, controllers=("ftp://x",)), "agent.controllers"),
            (msgspec.structs.replace(good, actions={"a": ("{x}",)}), "agent.actions.a"),
            (msgspec.structs.replace(good, probes={"scripted": {"interval": "often"}}), "agent.probes.scripted.interval"),
        ):
            with pytest.raises(ConfigError, match=complaint):
                await made.reconfigure(bad, [Scripted()])
        heard, port = len(old.reports), made.port
        await until(lambda: len(old.reports) > heard)
        again = Scripted()
        await made.reconfigure(good, [again])
        again.next = [event("after")]
        await until(lambda: new.findings and not again.next)
        assert made.port == port
        assert {r.session for r in new.reports} == {old.reports[-1].session}


async def test_controllers_can_come_and_go(tmp_path: Path) -> None:
    """An agent that stood alone reports once a reload names a controller, and stands alone again when it is named no more."""
    async with Controller().serving() as controller, agent(tmp_path) as made:
        alone = made.settings
        await made.reconfigure(msgspec.structs.replace(alone, controllers=(controller.url,)), [Scripted()])
        await until(lambda: controller.reports)
        await made.reconfigure(alone, [Scripted()])
        count = len(controller.reports)
        await asyncio.sleep(0.5)
        assert len(controller.reports) == count
        assert made.alive()
