"""The file of API keys while it changes under a gateway: a mistake in it locks nobody out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.config import ConfigError
from sentinel.gateway.errors import ApiError
from sentinel.gateway.keys import Keys
from sentinel.tokens import digest

GOOD = f"alice {digest('key-a')}\n"


def looked(keys: Keys, key: str) -> str:
    """Whose key this is, by the file of now."""
    keys._look_at = 0.0
    return keys.tenant(f"Bearer {key}")


@pytest.mark.parametrize("wrong", ["", "\n\n", "# made by a command that failed\n", "alice\n", None])
def test_a_file_gone_wrong_keeps_the_keys_of_before(
    tmp_path: Path, wrong: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate > keys` that fails leaves nothing behind, a slip half a line: who was let in still is, and it is said why."""
    file = tmp_path / "keys"
    file.write_text(GOOD, "utf-8")
    keys = Keys(file)
    file.unlink() if wrong is None else file.write_text(wrong, "utf-8")
    assert looked(keys, "key-a") == "alice"
    said = capsys.readouterr()
    assert str(file) in said.out + said.err
    file.write_text(f"alice {digest('key-b')}\n", "utf-8")
    assert looked(keys, "key-b") == "alice"
    with pytest.raises(ApiError):
        looked(keys, "key-a")


def test_a_gateway_does_not_start_with_a_file_that_would_let_nobody_in(tmp_path: Path) -> None:
    """The error names the setting, the file and what was wanted."""
    file = tmp_path / "keys"
    file.touch()
    with pytest.raises(ConfigError, match=r"gateway\.keys: .*keys names nobody; wanted at least one line"):
        Keys(file)
