"""Real Dynamo on loopback for the end-to-end tests: a frontend, mockers (Dynamo's own engine simulator), and traffic.

This module exists so that a drain is proved on what ships: the frontend, discovery and request plane are ai-dynamo 1.6.1 as
installed from PyPI; only the engine behind them is simulated, by Dynamo itself. What always holds:

* Everything runs without root, GPU, NATS or network, in a virtual environment of its own under ``.dynamo/``.
* HTTP, system servers and the TCP planes bind 127.0.0.1. Dynamo's ZMQ event sockets bind all interfaces on ephemeral ports
  and offer no setting for it (measured on 1.6.1): run this where that does no harm.
* Processes are ended by their own pid, and the kernel ends them when the test process dies.
* A request counts as ok only when its stream came whole: HTTP 200, every token, no error event, ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from sentinel.config import DynamoSettings
from sentinel.model import CommandResult, Role, Worker

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".dynamo"
PINS = ROOT / "requirements" / "dynamo.txt"
MODEL = "tiny"


def python() -> Path:
    """The interpreter of Dynamo's virtual environment; makes it on first use (about 10 s and 330 MB)."""
    venv = HOME / "venv"
    done = venv / ".pins"
    if not done.is_file() or done.read_bytes() != PINS.read_bytes():
        shutil.rmtree(venv, ignore_errors=True)
        HOME.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "-r", PINS]
        subprocess.run(pip, check=True)
        done.write_bytes(PINS.read_bytes())
    return venv / "bin" / "python"


def tiny_model(folder: Path) -> Path:
    """A model directory without weights that mocker and frontend accept: byte-level BPE without merges.

    The vocabulary is padded because the mocker emits token ids from a wide range, and unknown ones decode to empty text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]  # GPT-2's byte alphabet
    vocab = {token: n for n, token in enumerate([*special, *letters])}
    vocab |= {f"\u0120w{n}": n for n in range(len(vocab), 40_000)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": n, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for n, t in enumerate(special)
    ]
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
           "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}  # fmt: skip
    chat = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    files: dict[str, Any] = {
        "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                           "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": bpe},
        "config.json": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": len(vocab), "hidden_size": 64,
                        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                        "head_dim": 16, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "bos_token_id": 0,
                        "eos_token_id": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": [2], "do_sample": False},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
                                  "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 32768,
                                  "chat_template": chat},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


@dataclass
class Mocker:
    """One worker process. ``hexid`` is its instance id, learned from its own metrics; new at every start."""

    name: str
    port: int
    process: asyncio.subprocess.Process | None = None
    hexid: str = ""
    arguments: tuple[str, ...] = ()
    role: Role = Role.BOTH

    @property
    def system_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def worker(self) -> Worker:
        url = self.system_url
        return Worker(name=self.name, pool="main", url=url, system_url=url, adapter="dynamo", nodes=("host",), role=self.role)


@dataclass
class Counts:
    """What clients saw. sent = ok + failed once the load has ended."""

    sent: int = 0
    ok: int = 0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ended: bool = False  # set it to let the clients finish


class DynamoRig:
    """``start`` it, put load on it, break it, ``stop`` it."""

    def __init__(
        self, folder: Path, *, front_args: tuple[str, ...] = (), mock_args: tuple[str, ...] = (),
        front_env: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.workers: list[Mocker] = []
        self.frontend = ""
        self.discovery = ""
        self.others: dict[str, asyncio.subprocess.Process] = {}  # further frontends over the same workers, by URL
        self._front_args, self._mock_args, self._front_env = front_args, mock_args, front_env or {}
        self._environment: dict[str, str] = {}
        self._front: asyncio.subprocess.Process | None = None
        self._etcd: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._python = Path()

    @property
    def settings(self) -> DynamoSettings:
        return DynamoSettings(discovery=self.discovery, frontend=self.frontend)

    @property
    def frontend_process(self) -> tuple[int, int | None]:
        """The frontend's pid, and the status that it ended with (None: it runs)."""
        assert self._front
        return self._front.pid, self._front.returncode

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http
        return self._http

    async def start(self, n: int = 3, discovery: Literal["file", "etcd"] = "file", *, etcd: Path | None = None) -> None:
        """A frontend with migration limit 3 and ``n`` mockers, all routable when this returns. ``etcd``: the program to run."""
        self._python = await asyncio.to_thread(python)
        model = tiny_model(self.folder / "model")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        local = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "ETCD_"))}
        self._environment |= dict.fromkeys(local, "127.0.0.1")
        self._environment |= {"DYN_DISCOVERY_BACKEND": discovery, "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq",
                              "DYN_SDK_DISABLE_ANSI_LOGGING": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        if discovery == "file":
            kv = self.folder / "kv"
            kv.mkdir(parents=True)
            self._environment["DYN_FILE_KV"] = str(kv)
            self.discovery = f"file:{kv}"
        else:
            self._etcd, url = start_etcd(etcd or Path("etcd"), self.folder / "etcd")
            self._environment["ETCD_ENDPOINTS"] = url
            self.discovery = f"etcd:{url}"
        port = free_port()
        self.frontend = f"http://127.0.0.1:{port}"
        self._front = await self._frontend("frontend", port)
        self.workers = [Mocker(f"mock{i}", low_port()) for i in range(n)]
        self._mock = ["-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL,
                      "--num-gpu-blocks-override", "16384", "--block-size", "64", *self._mock_args]  # fmt: skip
        await asyncio.gather(*(self.restart(w.name) for w in self.workers))
        if n:
            await self.until(self._serves, 60)

    async def stop(self) -> None:
        everyone = [w.process for w in self.workers] + [self._front, *self.others.values()]
        for process in everyone:
            if process and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process in everyone:
            if process:
                await process.wait()
        if self._etcd:
            end_process(self._etcd)
        if self._http:
            await self._http.close()

    async def another_frontend(self, url: str = "") -> str:
        """Its URL, once it sends requests to every worker. ``url``: of one that has ended and is to be there again."""
        url = url or f"http://127.0.0.1:{free_port()}"
        self.others[url] = await self._frontend(f"frontend-{len(self.others)}", int(url.rpartition(":")[2]))

        async def serves() -> bool:
            return len(await self.routable(url)) >= len(self.workers) and not await self.request(3, url)

        await self.until(serves, 60)
        return url

    async def add(self, name: str, role: Role, *arguments: str) -> Mocker:
        """One more worker, with arguments of its own; routable when this returns."""
        self.workers.append(Mocker(name, low_port(), arguments=arguments, role=role))
        await self.restart(name)
        return self.workers[-1]

    def mocker(self, name: str) -> Mocker:
        return next(w for w in self.workers if w.name == name)

    async def kill(self, name: str, sig: int = signal.SIGKILL) -> None:
        """Send a signal to one mocker; returns when it has ended, unless the signal only stops or continues it."""
        process = self.mocker(name).process
        assert process
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(sig)
        if sig in (signal.SIGKILL, signal.SIGTERM):
            await process.wait()

    async def restart(self, name: str) -> None:
        """Start one mocker (again); returns when it is routable, under its new instance id."""
        await self.spawn(name)
        await self.settle(name)

    def signal_etcd(self, number: int) -> None:
        """Freeze etcd (SIGSTOP), or let it go on (SIGCONT)."""
        assert self._etcd
        self._etcd.send_signal(number)

    async def spawn(self, name: str) -> None:
        """Start one mocker and no more: it still has to load and to register."""
        worker = self.mocker(name)
        worker.process = await self._run(name, [*self._mock, *worker.arguments], DYN_SYSTEM_PORT=str(worker.port))

    async def settle(self, name: str) -> None:
        """Wait until a started mocker is routable under an id of its own, and remember that id."""
        worker = self.mocker(name)
        before = worker.hexid

        async def said() -> bool:
            worker.hexid = await self._hexid(worker) or before
            return worker.hexid != before and worker.hexid in await self.routable()

        await self.until(said, 60)

    async def routable(self, frontend: str = "") -> set[str]:
        """Instance ids (hex) that the frontend sends requests to, by its own /health."""
        try:
            async with self.http.get(f"{frontend or self.frontend}/health") as response:
                said = await response.json(content_type=None)
        except (aiohttp.ClientError, ValueError):
            return set()
        return {f"{i['instance_id']:x}" for i in said.get("instances", ()) if i["endpoint"] == "generate"}

    async def load(self, streams: int, tokens: int, seconds: float = math.inf, *, counts: Counts | None = None) -> Counts:
        """``streams`` clients, each sending one streaming request after another for ``seconds``; the last ones may finish.

        Given ``counts``, they count there as they go, and ``counts.ended`` ends them too.
        """
        counts = counts or Counts()
        until = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until and not counts.ended:
                counts.sent += 1
                error = await self.request(tokens)
                if error:
                    counts.failed += 1
                    counts.errors[error] += 1
                else:
                    counts.ok += 1

        await asyncio.gather(*(client() for _ in range(streams)))
        return counts

    async def request(self, tokens: int, frontend: str = "") -> str:
        """One streaming chat completion; "" when it came whole, else what was wrong."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "how fares the rack"}], "max_tokens": tokens,
                "stream": True, "ignore_eos": True}  # fmt: skip
        got, finished = 0, False
        try:
            url = f"{frontend or self.frontend}/v1/chat/completions"
            async with asyncio.timeout(60), self.http.post(url, json=body) as response:
                if response.status != 200:
                    return f"HTTP {response.status}: {(await response.text())[:120]}"
                async for raw in response.content:
                    line = raw.strip()
                    if line.startswith(b"event: error") or (line.startswith((b":", b"data:")) and b'"error"' in line):
                        return f"error in the stream after {got} tokens: {line[:120].decode(errors='replace')}"
                    if line == b"data: [DONE]":
                        finished = True
                    elif line.startswith(b"data:"):
                        got += sum(bool((c.get("delta") or {}).get("content")) for c in json.loads(line[5:]).get("choices", ()))
        except TimeoutError:
            return f"no end within 60 s, after {got} tokens"
        except (aiohttp.ClientError, ValueError) as error:
            return f"{type(error).__name__} after {got} tokens"
        return "" if finished and got >= tokens - 1 else f"cut short: {got} of {tokens} tokens, [DONE] {finished}"

    async def until(self, condition: Any, seconds: float) -> None:
        """Wait for an async condition; fails with the logs' ends when it does not come."""
        end = time.monotonic() + seconds
        while not await condition():
            if time.monotonic() > end:
                ends = {p.name: p.read_text(errors="replace")[-1500:] for p in sorted(self.folder.glob("*.log"))}
                logs = "\n".join(f"--- {name}\n{text}" for name, text in ends.items())
                raise AssertionError(f"not within {seconds:g} s: {condition.__name__}\n{logs}")
            await asyncio.sleep(0.05)

    async def _serves(self) -> bool:
        return len(await self.routable()) >= len(self.workers) and not await self.request(3)

    async def _hexid(self, worker: Mocker) -> str:
        try:
            async with self.http.get(f"{worker.system_url}/metrics") as response:
                text = await response.text()
        except aiohttp.ClientError:
            return ""
        return text.partition('worker_id="')[2].partition('"')[0]

    async def _frontend(self, name: str, port: int) -> asyncio.subprocess.Process:
        front = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--migration-limit", "3"]
        return await self._run(name, [*front, *self._front_args], **self._front_env)

    async def _run(self, name: str, arguments: list[str], **extra: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                self._python, *arguments, env=self._environment | extra, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip


class RigHands:
    """Stands in for the agents' hands: real signals to real processes, at most once per key."""

    def __init__(self, rig: DynamoRig) -> None:
        self._rig = rig
        self.done: dict[str, CommandResult] = {}

    async def run(self, node: str, action: str, args: dict[str, str], *, key: str, why: str, deadline_s: float) -> CommandResult:
        if key not in self.done:
            name = args["worker"]
            if action == "start_worker":
                await self._rig.restart(name)
            else:
                await self._rig.kill(name, {"kill_worker": signal.SIGKILL, "stop_worker": signal.SIGTERM}[action])
            self.done[key] = CommandResult(id=key, node=node, ok=True)
        return self.done[key]


class MemoryKeep:
    """Stands in for the store's kept bodies."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    async def put(self, key: str, value: bytes) -> None:
        self.held[key] = value

    async def get(self, key: str) -> bytes | None:
        return self.held.get(key)

    async def drop(self, key: str) -> None:
        self.held.pop(key, None)


@contextlib.asynccontextmanager
async def rig(folder: Path, n: int = 3, discovery: Literal["file", "etcd"] = "file", **options: Any) -> AsyncIterator[DynamoRig]:
    made = DynamoRig(folder, **{k: v for k, v in options.items() if k != "etcd"})
    try:
        await made.start(n, discovery, etcd=options.get("etcd"))
        yield made
    finally:
        await made.stop()


def start_etcd(program: Path, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A one-member etcd on loopback; its client URL once it answers."""
    client, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "etcd.log").open("ab") as log:
        process = subprocess.Popen(
            [program, "--data-dir", folder / "data", "--listen-client-urls", client, "--advertise-client-urls", client,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent,  # noqa: PLW1509  (one prctl call)
        )  # fmt: skip
    end = time.monotonic() + 20
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{client}/health", timeout=2):  # noqa: S310
            return process, client
        time.sleep(0.05)
    end_process(process)
    raise AssertionError(f"etcd does not answer at {client}:\n{(folder / 'etcd.log').read_text(errors='replace')[-1500:]}")


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def free_port() -> int:
    """A port that was free just now; Dynamo and etcd take numbers only, so another process may be quicker."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def low_port() -> int:
    """A free port below 32768: Dynamo 1.6.1 reads DYN_SYSTEM_PORT into 16 bits with a sign, and fails on a higher one."""
    while True:
        port = random.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, linux/prctl.h
