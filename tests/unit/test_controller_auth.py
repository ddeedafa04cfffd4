"""Bearer tokens: who is let in, who is not, and what a changed file does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.config import ConfigError
from sentinel.controller.auth import Refused, Tokens, digest, new_token, read_tokens


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))  # a coarse clock must not hide a change
    return path


def refusal(tokens: Tokens, header: str | None) -> Refused:
    with pytest.raises(Refused) as caught:
        tokens.name(header)
    return caught.value


class TestTokens:
    def test_a_known_token_names_its_owner(self, tmp_path: Path) -> None:
        """Comments, blank lines and upper-case digests are read; the owner of the token is the answer."""
        file = write(tmp_path / "t", f"# nodes\n\nt01 {digest('a').upper()}  # tray one\nt02 {digest('b')}\n")
        tokens = Tokens(file, "controller.node_tokens", "node")
        assert tokens.name("Bearer a") == "t01"
        assert tokens.name("bearer  b ") == "t02"

    @pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer c", f"Bearer {digest('a')}"])
    def test_anything_else_is_refused_with_401(self, tmp_path: Path, header: str | None) -> None:
        """No header, another scheme, an unknown token, and even the digest itself: 401 and a sentence without the token."""
        tokens = Tokens(write(tmp_path / "t", f"t01 {digest('a')}\n"), "controller.node_tokens", "node")
        error = refusal(tokens, header)
        assert error.status == 401
        assert digest("a") not in str(error)

    def test_without_a_file_nobody_is_let_in(self) -> None:
        """Secure by default: a controller that names no token file refuses everybody and says which key is missing."""
        assert "controller.operator_tokens" in str(refusal(Tokens(None, "controller.operator_tokens", "operator"), "Bearer a"))

    def test_a_changed_file_takes_effect_at_once(self, tmp_path: Path) -> None:
        """A token that was added is let in and one that was removed is not, without a restart."""
        file = write(tmp_path / "t", f"t01 {digest('a')}\n")
        tokens = Tokens(file, "k", "node")
        write(file, f"t01 {digest('b')}\n")
        assert tokens.name("Bearer b") == "t01"
        refusal(tokens, "Bearer a")

    @pytest.mark.parametrize("broken", ["t01 nonsense\n", "", None])
    def test_a_file_gone_wrong_keeps_the_tokens_of_before(self, tmp_path: Path, broken: str | None) -> None:
        """A typing error, a file that vanished, or the empty one of a command that failed must not lock the fleet out."""
        file = write(tmp_path / "t", f"t01 {digest('a')}\n")
        tokens = Tokens(file, "k", "node")
        file.unlink() if broken is None else write(file, broken)
        assert tokens.name("Bearer a") == "t01"

    def test_two_tokens_of_one_name_are_both_good(self, tmp_path: Path) -> None:
        """A token is changed without a gap by listing the old and the new one for a while."""
        tokens = Tokens(write(tmp_path / "t", f"t01 {digest('a')}\nt01 {digest('b')}\n"), "k", "node")
        assert {tokens.name("Bearer a"), tokens.name("Bearer b")} == {"t01"}

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "names nobody"), ("t01\n", "line 1"), (f"\nt01 {digest('a')} extra\n", "line 2"),
            (f"a {digest('x')}\nb {digest('x')}\n", "line 2"),
        ],
    )  # fmt: skip
    def test_a_wrong_file_is_one_sentence_with_its_line(self, tmp_path: Path, text: str, says: str) -> None:
        """No line at all, one that is no entry, or one token for two names, is refused at start with file and line."""
        with pytest.raises(ConfigError, match=says):
            read_tokens(write(tmp_path / "t", text), "controller.node_tokens")

    def test_a_new_token_is_long_and_never_the_same(self) -> None:
        """256 random bits each time."""
        assert len({new_token() for _ in range(100)}) == 100
        assert min(len(new_token()) for _ in range(10)) >= 40
