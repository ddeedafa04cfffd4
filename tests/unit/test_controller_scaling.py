"""Asking for more workers: one allow-listed command of the site's own, run on the controller's host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sentinel.controller.scaling import ScaleHook
from sentinel.model import Role
from sentinel.serving import AdapterError
from sentinel.serving.adapters import Serving


class Hands:
    """Stands where a program would be run: remembers the vector, ends as told."""

    def __init__(self, ok: bool = True, said: str = "exit status 0") -> None:
        self.ok, self.said, self.ran = ok, said, []  # type: ignore[var-annotated]

    async def __call__(self, vector: tuple[str, ...], deadline_s: float) -> tuple[bool, str]:
        self.ran.append(vector)
        return self.ok, self.said


async def test_placeholders_are_filled_and_nothing_else() -> None:
    """The vector runs with the pool, the role and the number in their places."""
    hands = Hands()
    assert await ScaleHook(["/bin/scale", "--pool={pool}", "{role}", "{count}"], hands)("main", Role.DECODE, 6) is True
    assert hands.ran == [("/bin/scale", "--pool=main", "decode", "6")]


@pytest.mark.parametrize("pool", ["a b", "x;y", "../up", "-rf"])
async def test_a_name_that_is_none_runs_nothing(pool: str) -> None:
    """What does not fit the pattern of names, or would be read as an option, is refused."""
    hands = Hands()
    assert await ScaleHook(["/bin/scale", "{pool}"], hands)(pool, Role.DECODE, 6) is False
    assert hands.ran == []


async def test_a_real_program_is_asked_and_its_status_counts(tmp_path: Path) -> None:
    """Exit status 0 is True, anything else False, without a shell in between."""
    told = tmp_path / "told"
    program = tmp_path / "scale"
    program.write_text(f'#!/bin/sh\necho "$1 $2 $3" >> {told}\ntest "$3" -lt 9\n')
    program.chmod(0o755)
    hook = ScaleHook([str(program), "{pool}", "{role}", "{count}"])
    assert await hook("main", Role.PREFILL, 3) is True
    assert await hook("main", Role.PREFILL, 9) is False
    assert told.read_text().splitlines() == ["main prefill 3", "main prefill 9"]
    assert await ScaleHook([str(tmp_path / "no-such-program")])("main", Role.PREFILL, 3) is False


async def test_a_deadline_is_an_unknown_outcome() -> None:
    """A program that had to be killed may have asked: neither done nor refused."""
    with pytest.raises(AdapterError, match="killed at its deadline"):
        await ScaleHook(["/bin/scale"], Hands(ok=False, said="killed at its deadline of 60 s"))("main", Role.DECODE, 6)


async def test_without_a_hook_nothing_can_be_asked() -> None:
    """Off by default: the verb answers False, and with a hook what the hook says."""
    stand_in: Any = object()
    assert await Serving(stand_in).scale_to("main", Role.DECODE, 6) is False
    assert await Serving(stand_in, scale=ScaleHook(["/bin/scale"], Hands())).scale_to("main", Role.DECODE, 6) is True
