"""Hands over the long poll: a command is offered until it is answered, and an answer is never lost."""

from __future__ import annotations

import asyncio

import pytest

from sentinel.controller import commands
from sentinel.controller.commands import CommandDesk
from sentinel.model import CommandResult
from sentinel.serving import AdapterError


def wanted(desk: CommandDesk, key: str = "d1/stop/0", node: str = "t01", deadline_s: float = 30.0) -> asyncio.Task[CommandResult]:
    run = desk.run(node, "stop_worker", {"worker": "w"}, key=key, why="test", deadline_s=deadline_s)
    return asyncio.create_task(run)


def result(key: str = "d1/stop/0", node: str = "t01") -> CommandResult:
    return CommandResult(id=key, node=node, ok=True, detail="exit status 0")


class TestCommandDesk:
    async def test_a_waiting_poll_gets_a_new_command_at_once(self) -> None:
        """The long poll is answered by the command itself, not by the end of its wait; the result ends the run."""
        desk = CommandDesk()
        poll = asyncio.create_task(desk.poll("t01", 60.0))
        await asyncio.sleep(0)
        run = wanted(desk)
        async with asyncio.timeout(5):
            (command,) = await poll
        assert (command.id, command.node, command.action, command.args) == ("d1/stop/0", "t01", "stop_worker", {"worker": "w"})
        assert desk.settle(result())
        assert (await run).ok

    async def test_a_poll_without_commands_ends_empty(self) -> None:
        """Nothing to do is an empty list after the wait."""
        assert await CommandDesk().poll("t01", 0.01) == []

    async def test_a_command_is_for_its_node_only(self) -> None:
        """Another node's poll does not see it, and another node's result does not end it."""
        desk = CommandDesk()
        run = wanted(desk)
        await asyncio.sleep(0)
        assert await desk.poll("t02", 0.01) == []
        assert not desk.settle(result(node="t02"))
        assert not run.done()
        assert desk.settle(result())
        await run

    async def test_it_is_offered_again_until_answered_and_not_in_a_spin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An agent that polls on while it works waits out the pause; then it is offered again, as its answer may be lost."""
        monkeypatch.setattr(commands, "OFFER_AGAIN", 0.05)
        desk = CommandDesk()
        run = wanted(desk)
        await asyncio.sleep(0)
        assert len(await desk.poll("t01", 0.0)) == 1
        assert await desk.poll("t01", 0.0) == []
        assert len(await desk.poll("t01", 5.0)) == 1
        desk.settle(result())
        await run
        assert await desk.poll("t01", 0.0) == []

    async def test_silence_is_could_not_tell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An agent that never fetches a command, or never answers, is an AdapterError that says which of the two."""
        monkeypatch.setattr(commands, "GRACE", 0.0)
        desk = CommandDesk()
        with pytest.raises(AdapterError, match="never fetched"):
            await wanted(desk, deadline_s=0.01)
        run = wanted(desk, deadline_s=0.05)
        await desk.poll("t01", 1.0)
        with pytest.raises(AdapterError, match="sent no result"):
            await run
        assert await desk.poll("t01", 0.0) == []

    async def test_an_answer_that_comes_first_is_kept(self) -> None:
        """A result that was meant for an earlier leader is there for the effect that asks under the same key."""
        desk = CommandDesk()
        assert not desk.settle(result())
        assert (await wanted(desk)).detail == "exit status 0"

    async def test_the_same_key_twice_is_one_command(self) -> None:
        """Two who want the same thing share one command and one answer."""
        desk = CommandDesk()
        first, second = wanted(desk), wanted(desk)
        await asyncio.sleep(0)
        assert len(await desk.poll("t01", 0.0)) == 1
        desk.settle(result())
        assert await first == await second

    async def test_a_cancelled_effect_withdraws_its_command(self) -> None:
        """A leader that steps down offers nothing any more."""
        desk = CommandDesk()
        run = wanted(desk)
        await asyncio.sleep(0)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert await desk.poll("t01", 0.0) == []

    async def test_let_go_answers_every_poll(self) -> None:
        """Polls held open do not keep a controller from stopping."""
        desk = CommandDesk()
        polls = [asyncio.create_task(desk.poll(n, 60.0)) for n in ("t01", "t02")]
        await asyncio.sleep(0)
        desk.let_go()
        async with asyncio.timeout(5):
            assert await asyncio.gather(*polls) == [[], []]
