"""The agent on a real GPU: three application faults found, judged and left alone; a forged line ignored; its cost measured.

And NVML's own Xid events beside the kernel's lines: whether each fault was told of, how long after its line, that the agent
misses nothing of either (with ``match_s`` at ten seconds, so that it is decided within this run), and that with a deaf log it
would.

Needs root, an NVIDIA driver with NVML, nvcc, a Python with sentinel in it, and the command ``sentinel`` on the PATH. Runs the
real agent (real NVML, real /dev/kmsg) and the real controller with an embedded store; the one worker it guards is a stand-in
HTTP server that holds the real GPU. Prints what it sees to standard error and one JSON object as its last line; exits 0 only
when everything held.

usage: check.py [--seconds 120]
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import os
import pathlib
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from hashlib import sha256

HERE = pathlib.Path(__file__).parent
FAULTS = {"unmapped": 31, "misaligned": 13, "trap": 43}
MATCH_S = 10.0  # what [kernel_log] match_s is for this run: shipped is a minute


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class StandIn(http.server.BaseHTTPRequestHandler):
    """A worker that is always well: /health says so and /metrics shows nothing running."""

    def do_GET(self) -> None:
        body = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total 1\n"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def cost_of(pids: list[int]) -> tuple[float, float, float]:
    """CPU seconds so far, resident MiB and proportional MiB of these processes together."""
    cpu = rss = pss = 0.0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                rss += int(line.split()[1]) / 1024
        try:
            for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    pss += int(line.split()[1]) / 1024
        except OSError:
            pss = float("nan")
    return cpu, rss, pss


def children(pid: int) -> list[int]:
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    return found


class Ear(threading.Thread):
    """A driver child of our own beside the agent's: what NVML tells of, once a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.readings: list[dict] = []
        self.ending = threading.Event()

    def run(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        from sentinel.agent.driver import ChildDriver  # noqa: PLC0415

        driver = ChildDriver()
        while not self.ending.is_set():
            self.readings.append((await driver.read())["xid_events"])
            await asyncio.sleep(1.0)
        await driver.close()

    @property
    def latest(self) -> dict:
        return self.readings[-1] if self.readings else {"listening": {}, "heard": []}


def xid_lines() -> list[tuple[float, int]]:
    """(seconds since boot, code) of every Xid line of the kernel in its log, read from the beginning."""
    found = []
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                head, _, text = os.read(fd, 16384).decode(errors="replace").partition(";")
            except BrokenPipeError:
                continue
            except BlockingIOError:
                return found
            prio, _, usec, *_ = head.split(",")
            if int(prio) >> 3 == 0 and (match := re.match(r"NVRM: Xid \([^)]*\): (\d+)", text)):
                found.append((int(usec) / 1e6, int(match[1])))
    finally:
        os.close(fd)


def told_of(ear: Ear, began: float) -> dict[str, dict[str, object]]:
    """By provoked code: lines and events since ``began`` (seconds since boot), and from the nearest line to hearing, seconds."""
    lines = [(at, code) for at, code in xid_lines() if at >= began]
    heard = {h["xid"]: h for h in ear.latest["heard"]}
    out: dict[str, dict[str, object]] = {}
    for code in sorted({*FAULTS.values(), *heard, *(c for _, c in lines)}):
        at = [t for t, c in lines if c == code]
        event = heard.get(code)
        late = min((event["at"] - t for t in at), key=abs, default=None) if event else None
        out[str(code)] = {
            "lines": len(at),
            "events": event["count"] if event else 0,
            "delivered": event is not None,
            "event_after_line_s": None if late is None else round(late, 4),
        }
    return out


def with_a_deaf_log(ear: Ear, file: pathlib.Path) -> list[int]:
    """Codes that the comparison misses when the same events meet a log that says nothing: the proof that it can fail."""
    from probes.crosscheck import compare  # noqa: PLC0415
    from probes.thresholds import load, using  # noqa: PLC0415
    from sentinel.model import Reading  # noqa: PLC0415

    memory: dict = {}
    missed = []
    with using(load(file)):
        for events in ear.readings:
            silent = {"records": [], "booted_at": 0.0}
            for probe, data in (("kernel_log", silent), ("gpu", {"xid_events": events})):
                found = compare(Reading(probe=probe, node="n", at=events["now"], data=data), memory)
                missed += [f.facts["xid"] for f in found if f.check == "kernel_log.missed_xid"]
    return sorted(missed)


def main() -> int:  # noqa: PLR0915  (one story, told in order)
    ap = argparse.ArgumentParser()
    ap.add_argument("--seconds", type=float, default=120.0)
    a = ap.parse_args()
    dir_ = pathlib.Path(tempfile.mkdtemp(prefix="sentinel-hw-"))
    subprocess.run(["nvcc", "-o", dir_ / "faults", HERE / "faults.cu"], check=True)
    smi = ["nvidia-smi", "--query-gpu=pci.bus_id,name,driver_version", "--format=csv,noheader"]
    gpus = [line.split(", ") for line in subprocess.run(smi, check=True, capture_output=True, text=True).stdout.splitlines()]
    print(subprocess.run(["sentinel", "probe", "--once"], check=False, capture_output=True, text=True).stdout, file=sys.stderr)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    node_token, ann_token = secrets.token_urlsafe(), secrets.token_urlsafe()
    for name, text in {
        "node.token": node_token,
        "nodes": f"gpu-node {sha256(node_token.encode()).hexdigest()}",
        "operators": f"ann {sha256(ann_token.encode()).hexdigest()}",
    }.items():
        (dir_ / name).write_text(text + "\n")
        (dir_ / name).chmod(0o600)
    control, listen = free_port(), free_port()
    held = ", ".join(f'"gpu-node/gpu@{bdf}"' for bdf, *_ in gpus)
    (dir_ / "controller.toml").write_text(
        f"""
[store]
url = "embedded:{dir_}/store"
[controller]
listen = "127.0.0.1:{control}"
node_tokens = "{dir_}/nodes"
operator_tokens = "{dir_}/operators"
journal_dir = "{dir_}/journal"
[[pools]]
name = "main"
[[workers]]
name = "stand-in"
pool = "main"
url = "http://127.0.0.1:{server.server_address[1]}"
gpus = [{held}]
[[nodes]]
name = "gpu-node"
"""
    )
    (dir_ / "agent.toml").write_text(
        f"""
[agent]
node = "gpu-node"
controllers = ["http://127.0.0.1:{control}"]
token_file = "{dir_}/node.token"
state_dir = "{dir_}/agent"
listen = "127.0.0.1:{listen}"
thresholds = "{dir_}/thresholds.toml"
"""
    )
    (dir_ / "thresholds.toml").write_text(f"[kernel_log]\nmatch_s = {MATCH_S}\n")

    def agent_metrics() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{listen}/metrics", timeout=5) as answer:
            return answer.read().decode().splitlines()

    def ask(path: str) -> dict:
        request = urllib.request.Request(f"http://127.0.0.1:{control}{path}", headers={"authorization": f"Bearer {ann_token}"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def incidents() -> list[dict]:
        told = ask("/v1/incidents")
        return told["incidents"] if isinstance(told, dict) else told

    def wait(what: str, check, limit: float = 30.0) -> float:
        began = time.monotonic()
        while time.monotonic() - began < limit:
            try:
                if check():
                    return time.monotonic() - began
            except OSError:
                pass
            time.sleep(0.005)
        raise SystemExit(f"not within {limit:g} s: {what}")

    logs = {n: (dir_ / f"{n}.log").open("wb") for n in ("agent", "controller")}
    procs = {n: subprocess.Popen(["sentinel", n, "--config", dir_ / f"{n}.toml"], stdout=f, stderr=f) for n, f in logs.items()}
    result: dict[str, object] = {"gpus": gpus, "simulated": ["worker (stand-in HTTP server)"], "found_s": {}}
    held_all = True
    ear = Ear()
    ear.start()
    try:
        wait("the node's first report", lambda: any(n["reported"] for n in ask("/v1/status")["nodes"]))
        for _ in range(20):  # where a GPU knows no such events, the result says so
            time.sleep(0 if len(ear.latest["listening"]) == len(gpus) else 1)
        time.sleep(MATCH_S + 6)  # nothing is compared in the first match_s
        listened = [float(line.rpartition(" ")[2]) for line in agent_metrics() if line.startswith("sentinel_xid_listening{")]
        began_raw = time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
        for name, xid in FAULTS.items():
            subprocess.run([dir_ / "faults", name], check=True)
            seconds = wait(
                f"Xid {xid} on record",
                lambda xid=xid: any(f["check"] == f"xid.{xid}" for i in incidents() for f in i.get("findings", [])),
                10.0,
            )
            result["found_s"][name] = round(seconds, 3)  # type: ignore[index]
        before = {i["id"] for i in incidents()}
        with open("/dev/kmsg", "w") as kmsg:
            kmsg.write(f"<0>NVRM: Xid (PCI:{gpus[0][0]}): 79, pid=1, name=forged, GPU has fallen off the bus.\n")
        time.sleep(3)
        status = ask("/v1/status")
        after = incidents()
        result["faults"] = sorted({i["fault"] for i in after})
        result["forged_line_changed_something"] = bool({i["id"] for i in after} - before)
        result["drains"] = len(status["drains"])
        result["worker"] = next(w["state"] for w in status["workers"] if w["worker"] == "stand-in")
        result["paged"] = [i["fault"] for i in after if i.get("paged")]
        pids = [procs["agent"].pid, *children(procs["agent"].pid)]
        cpu, _, _ = cost_of(pids)
        began = time.monotonic()
        time.sleep(max(a.seconds, 2 * MATCH_S + 10))  # by then everything is compared
        cpu_after, rss, pss = cost_of(pids)
        took = time.monotonic() - began
        result["agent"] = {
            "processes": len(pids),
            "seconds": round(took, 1),
            "cpu_percent_of_one_core": round(100 * (cpu_after - cpu) / took, 3),
            "rss_mib": round(rss, 1),
            "pss_mib": round(pss, 1),
        }
        result["one_look"] = ask("/v1/status")["nodes"]
        ear.ending.set()
        ear.join(20)
        agent_log = (dir_ / "agent.log").read_text(errors="replace")
        told = told_of(ear, began_raw)
        delivered = sorted(int(code) for code, x in told.items() if x["delivered"])
        events = {
            "match_s": MATCH_S,
            "agent_listens_to": sum(v == 1 for v in listened),
            "by_code": told,
            "missed_lines_found_by_agent": agent_log.count("kernel_log.missed_xid"),
            "untold_numbers_found_by_agent": agent_log.count("nvml.untold_xid"),
            "missed_if_the_log_were_deaf": with_a_deaf_log(ear, dir_ / "thresholds.toml"),
        }
        result["xid_events"] = events
        result["faults_at_the_end"] = sorted({i["fault"] for i in incidents()})
        held_all = (
            result["faults"] == result["faults_at_the_end"] == ["app-fault"]
            and events["agent_listens_to"] == len(gpus)
            and events["missed_lines_found_by_agent"] == 0
            and [code for code in events["missed_if_the_log_were_deaf"] if code in FAULTS.values()]
            == [code for code in delivered if code in FAULTS.values()]
            and not result["forged_line_changed_something"]
            and result["drains"] == 0
            and result["worker"] == "active"
            and result["paged"] == []
            and all(s < 1.0 for s in result["found_s"].values())  # type: ignore[attr-defined]
        )
        began = time.monotonic()
        procs["agent"].terminate()
        procs["agent"].wait(10)
        result["sigterm_s"] = round(time.monotonic() - began, 3)
    finally:
        for name, proc in procs.items():
            proc.kill()
            proc.wait()
            tail = (dir_ / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
            print(f"-- {name}", *tail, sep="\n", file=sys.stderr)
    result["held"] = held_all
    print(json.dumps(result))
    return 0 if held_all else 1


if __name__ == "__main__":
    sys.exit(main())
