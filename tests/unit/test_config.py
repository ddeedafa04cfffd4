"""The configuration file: a wrong one costs one sentence that names file, key, what was wanted and what was found."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli.main import main
from sentinel.config import ConfigError, load, read_secret
from sentinel.model import Role

GOOD = """
[controller]
listen = "127.0.0.1:0"
lease = "3s"
tick = "500ms"

[[pools]]
name = "chat"
floor = 0.5
overflow = ["spill"]

[[pools]]
name = "spill"
primary = false

[[nodes]]
name = "t01"

[[nodes]]
name = "t02"

[[workers]]
name = "prefill-1"
pool = "chat"
url = "http://t01:8000"
role = "prefill"
gpus = ["t01/gpu@0008:01:00.0", "t02/gpu@PCI:0008:01:00"]

[[workers]]
name = "spill-1"
pool = "spill"
url = "http://t02:8000"
standby = true
"""


def written(directory: Path, text: str) -> Path:
    file = directory / "sentinel.toml"
    file.write_text(text, "utf-8")
    return file


class TestGood:
    def test_it_becomes_the_fleet(self, tmp_path: Path) -> None:
        """Durations are seconds, GPU addresses one spelling, and a worker's nodes follow from its GPUs."""
        settings = load(written(tmp_path, GOOD))
        assert settings.controller is not None
        assert (settings.controller.lease, settings.controller.tick) == (3.0, 0.5)
        fleet = settings.fleet()
        worker = fleet.workers[0]
        assert (worker.role, worker.nodes) == (Role.PREFILL, ("t01", "t02"))
        assert [str(g) for g in worker.gpus] == ["t01/gpu@0008:01:00.0", "t02/gpu@0008:01:00.0"]
        assert fleet.nodes == ("t01", "t02")


BAD = {
    "unknown key": ('lease = "3s"', 'leese = "3s"', ["controller", "leese"]),
    "unknown table": ("[controller]", "[controler]", ["controler"]),
    "wrong type": ('listen = "127.0.0.1:0"', "listen = 9455", ["controller.listen", "str", "int"]),
    "duration without unit": ('lease = "3s"', 'lease = "3"', ["controller.lease", "duration", "'3'"]),
    "duration as a number": ('lease = "3s"', "lease = 3", ["controller.lease", "duration", "3"]),
    "negative duration": ('lease = "3s"', 'lease = "-3s"', ["controller.lease", "duration", "-3s"]),
    "share above one": ("floor = 0.5", "floor = 1.5", ["pools[0].floor", "1.0"]),
    "unknown role": ('role = "prefill"', 'role = "prefil"', ["workers[0].role", "prefil"]),
    "unknown adapter": ('role = "prefill"', 'adapter = "sglang"', ["workers.prefill-1.adapter", "sglang"]),
    "missing file": ('lease = "3s"', 'node_tokens = "/nowhere/tokens"', ["controller.node_tokens", "/nowhere/tokens"]),
    "pool without workers": ('pool = "spill"', 'pool = "chat"', ["pools", "'spill'", "no workers"]),
    "worker of no pool": ('pool = "spill"', 'pool = "spil"', ["spil"]),
    "overflow to nowhere": ('overflow = ["spill"]', 'overflow = ["spil"]', ["pools.chat.overflow", "'spil'"]),
    "overflow into itself": ('overflow = ["spill"]', 'overflow = ["chat"]', ["pools.chat.overflow", "itself"]),
    "two nodes with one name": ('name = "t02"', 'name = "t01"', ["nodes", "'t01'", "2 times"]),
    "two workers with one name": ('name = "spill-1"', 'name = "prefill-1"', ["workers", "'prefill-1'", "2 times"]),
    "no name": ('name = "spill-1"', 'name = "spill 1"', ["workers", "'spill 1'"]),
    "not a GPU": ("t01/gpu@0008:01:00.0", "t01/gpu7", ["workers.prefill-1.gpus", "t01/gpu7", "node/gpu@dddd:bb:dd.f"]),
    "GPU of no node": ("t01/gpu@0008:01:00.0", "t09/gpu@0008:01:00.0", ["workers.prefill-1.gpus", "'t09'"]),
    "GPU of two workers": ("standby = true", 'gpus = ["t01/gpu@0008:01:00.0"]', ["spill-1", "0008:01:00.0", "prefill-1"]),
    "url without scheme": ('url = "http://t01:8000"', 'url = "t01:8000"', ["workers.prefill-1.url", "t01:8000"]),
    "lease of nothing": ('lease = "3s"', 'lease = "0s"', ["controller.lease", "100ms", "0ms"]),
    "tick of nothing": ('tick = "500ms"', 'tick = "0ms"', ["controller.tick", "10ms"]),
    "longer than anyone lives": ('tick = "500ms"', 'tick = "99999999999999h"', ["controller.tick", "87600 hours"]),
    "longer than a number": ('tick = "500ms"', f'tick = "{"9" * 400}s"', ["controller.tick", "87600 hours", "…"]),
    "nothing to listen on": ('"127.0.0.1:0"', '"9455"', ["controller.listen", "host:port", "9455"]),
    "no such port": ('"127.0.0.1:0"', '"127.0.0.1:99999"', ["controller.listen", "99999"]),
    "advertised without scheme": ('tick = "500ms"', 'advertise = "c1:9455"', ["controller.advertise", "c1:9455"]),
    "half of TLS": ('tick = "500ms"', 'tls_cert = "/etc/hostname"', ["tls_cert", "tls_key"]),
    "no name of its own": ('tick = "500ms"', 'name = ""', ["controller.name", "empty"]),
    "overflow in a circle": ("primary = false", 'overflow = ["chat"]', ["pools.chat.overflow", "chat → spill → chat"]),
    "overflow of another model": ("floor = 0.5", 'model = "m"', ["pools.chat.overflow", "'spill'", "model ''", "wanted 'm'"]),
    "overflow twice": ('overflow = ["spill"]', 'overflow = ["spill", "spill"]', ["pools.chat.overflow", "twice"]),
    "share that is no number": ("floor = 0.5", "floor = nan", ["pools[0].floor"]),
    "capacity without end": ("standby = true", "capacity = inf", ["workers.spill-1.capacity", "inf"]),
    "capacity beyond belief": ("standby = true", "capacity = 1e308", ["workers.spill-1.capacity", "1e+308"]),
    "capacity that is no number": ("standby = true", "capacity = nan", ["workers[1].capacity"]),
    "a number of 5,000 digits": ("floor = 0.5", f"max_doubtful_drains = {'9' * 5000}", ["not valid TOML", "digits"]),
    "brackets without end": ("floor = 0.5", f"floor = {'[' * 20_000}", ["not valid TOML"]),
    "one GPU twice": ("t02/gpu@PCI:0008:01:00", "t01/gpu@PCI:0008:01:00", ["workers.prefill-1.gpus", "twice"]),
    "worker on no node": ("standby = true", 'nodes = ["t99"]', ["workers.spill-1.nodes", "'t99'"]),
    "worker called like another's node": ('name = "spill-1"', 'name = "t01"', ["'t01'", "'prefill-1'"]),
    "one address for two": ('url = "http://t02:8000"', 'url = "http://t01:8000"', ["workers.spill-1.url", "'prefill-1'"]),
    "url without host": ('url = "http://t02:8000"', 'url = "http://"', ["workers.spill-1.url", "http://"]),
    "url with a port that is none": ('url = "http://t02:8000"', 'url = "http://t02:80000"', ["workers.spill-1.url", "80000"]),
    "Dynamo without discovery": ("standby = true", 'adapter = "dynamo"', ["workers.spill-1.adapter", "dynamo.discovery"]),
    "frontend that is no URL": ("[[pools]]", '[dynamo]\nfrontend = "http://f"\nfrontends = ["g"]\n[[pools]]', ["frontends", "'g'"]),
    "further frontends of none": ("[controller]", '[dynamo]\nfrontends = ["http://g"]\n[controller]', ["wanted the first"]),
    "one frontend twice": ("[[pools]]", '[dynamo]\nfrontend = "http://f"\nfrontends = ["http://f"]\n[[pools]]', ["twice"]),
    "store of another kind": ("[controller]", '[store]\nurl = "http://h"\n[controller]', ["store.url", "http://h"]),
    "prefix that cannot name keys": ("[controller]", '[store]\nprefix = "{a}"\n[controller]', ["store.prefix", "{a}"]),
    "webhook that is no URL": ("[controller]", '[paging]\nwebhook_url = "hook"\n[controller]', ["paging.webhook_url", "'hook'"]),
    "agent with a node that is no name": ("[controller]", '[agent]\nnode = "a/b"\n[controller]', ["agent.node", "'a/b'"]),
    "agent of nobody": ("[controller]", '[agent]\ncontrollers = ["c1:9455"]\n[controller]', ["agent.controllers", "'c1:9455'"]),
    "scale-out without a program": ("[controller]", '[controller]\nscale_out = ["{pool}"]', ["controller.scale_out", "a program"]),
    "scale-out of another thing": ("[controller]", '[controller]\nscale_out = ["x", "{node}"]', ["controller.scale_out", "{node}"]),
    "action without words": ("[controller]", "[agent.actions]\nreset_gpu = []\n[controller]", ["agent.actions.reset_gpu"]),
    "not TOML": ("[controller]", "[controller", ["not valid TOML", "line"]),
    "key twice": ('lease = "3s"', 'lease = "3s"\nlease = "4s"', ["not valid TOML"]),
}


class TestBad:
    @pytest.mark.parametrize("case", BAD)
    def test_one_sentence_names_what_is_wrong(self, tmp_path: Path, case: str) -> None:
        """Each wrong file is refused in one sentence with the file, the key and what was found."""
        old, new, says = BAD[case]
        assert GOOD.count(old) >= 1, case
        file = written(tmp_path, GOOD.replace(old, new, 1))
        with pytest.raises(ConfigError) as caught:
            load(file)
        sentence = str(caught.value)
        assert sentence.startswith(f"{file}: ")
        assert "\n" not in sentence
        for part in says:
            assert part in sentence, sentence

    def test_a_password_in_the_store_url_is_refused_and_not_repeated(self, tmp_path: Path) -> None:
        """Secrets are in files of their own; the sentence about one that is not does not show it."""
        file = written(tmp_path, f'[store]\nurl = "redis://:geheim@h:6379"\n{GOOD}')
        with pytest.raises(ConfigError, match=r"store\.password_file") as caught:
            load(file)
        assert "geheim" not in str(caught.value)

    def test_a_mark_before_the_first_letter_is_no_error(self, tmp_path: Path) -> None:
        """Editors of other systems begin a UTF-8 file with U+FEFF; it is read like any other."""
        assert load(written(tmp_path, "\ufeff" + GOOD)).pools

    def test_a_file_that_is_not_there_or_not_text(self, tmp_path: Path) -> None:
        """A missing file, a directory and bytes that are no UTF-8 are sentences too."""
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path / "none.toml")
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path)
        file = tmp_path / "binary.toml"
        file.write_bytes(b"name = '\xff'")
        with pytest.raises(ConfigError, match="UTF-8"):
            load(file)


class TestSecrets:
    @pytest.mark.parametrize(
        ("mode", "text", "says"), [(0o644, "key\n", "everyone"), (0o600, "\n", "empty"), (0o600, None, "read")]
    )
    def test_a_secret_that_others_may_read_is_refused(self, tmp_path: Path, mode: int, text: str | None, says: str) -> None:
        """World-readable, empty and missing files are refused; the sentence never holds the secret."""
        file = tmp_path / "secret"
        if text is not None:
            file.write_text(text)
            file.chmod(mode)
        with pytest.raises(ConfigError, match=says) as caught:
            read_secret(file, "paging.pagerduty_key_file")
        assert "key\n" not in str(caught.value)


class TestCommands:
    def test_check_says_what_a_good_file_sets_up(self, tmp_path: Path) -> None:
        """``sentinel config check`` ends with 0 and counts pools, workers and nodes."""
        result = CliRunner().invoke(main, ["config", "check", str(written(tmp_path, GOOD))])
        assert result.exit_code == 0, result.output
        assert "controller" in result.output
        assert "2 workers" in result.output

    @pytest.mark.parametrize("case", ["unknown key", "negative duration", "two nodes with one name", "not TOML"])
    def test_check_refuses_a_bad_file_without_a_traceback(self, tmp_path: Path, case: str) -> None:
        """``sentinel config check`` ends with 1 and one line."""
        old, new, says = BAD[case]
        result = CliRunner().invoke(main, ["config", "check", str(written(tmp_path, GOOD.replace(old, new, 1)))])
        assert result.exit_code == 1
        assert len(result.output.strip().splitlines()) == 1
        assert says[-1] in result.output

    @pytest.mark.parametrize(("key", "text"), [("policy", "[timing]\nretry = 5\n"), ("node_tokens", "t01 short\n")])
    def test_check_looks_into_the_files_that_are_named(self, tmp_path: Path, key: str, text: str) -> None:
        """A policy or a token file that cannot be used is found before a daemon is started with it."""
        named = tmp_path / "named"
        named.write_text(text)
        file = written(tmp_path, GOOD.replace('lease = "3s"', f'{key} = "{named}"', 1))
        result = CliRunner().invoke(main, ["config", "check", str(file)])
        assert result.exit_code == 1, result.output
        assert str(named) in result.output

    def test_a_token_is_printed_once_with_the_line_for_the_controller(self) -> None:
        """The second line holds the digest of the first; two calls give two tokens."""
        first, second = (CliRunner().invoke(main, ["token", "t01"]).output.splitlines() for _ in range(2))
        assert first[1] == f"t01 {hashlib.sha256(first[0].encode()).hexdigest()}"
        assert first[0] != second[0]
        assert CliRunner().invoke(main, ["token", "no name"]).exit_code == 2
