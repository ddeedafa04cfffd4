"""Pasted logs of the serving stack: the cause is named, its echoes ask for nothing, and what only looks bad stays info."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from probes import serving_lines, serving_log
from probes.catalog import table
from probes.decode import Decoded, decode_text
from sentinel.cli.decode import decode
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Action, Component, Finding, Response, Severity, Suspect

REPORT = (
    "(APIServer pid=2201) INFO 08-03 09:{at} [loggers.py:271] Engine 003: Avg prompt throughput: {p} tokens/s, Avg generation "
    "throughput: {g} tokens/s, Running: {r} reqs, Waiting: {w} reqs, GPU KV cache usage: 31.4%, Prefix cache hit rate: 8.0%"
)
DISCONNECT = "(Worker_TP3 pid=612) ERROR 06-12 04:00:01 [worker.py:1501] nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT"
CALLBACK = "E0612 04:00:01.250000 612 ucx_utils.cpp:48] Error handling callback was invoked with status -80 (Endpoint timeout)"
TERM = "(APIServer pid=88) INFO 06-12 03:59:58 [launcher.py:120] Received signal 15, shutting the engine down"
DEAD = "(EngineCore_DP2 pid=901) ERROR 06-12 04:00:02 [core.py:1138] EngineCore encountered a fatal error."


def reports(*rows: tuple[str, float, float, int, int]) -> str:
    return "\n".join(REPORT.format(at=at, p=p, g=g, r=r, w=w) for at, p, g, r, w in rows)


def checks(decoded: Decoded) -> dict[str, Finding]:
    return {f.check.removeprefix("serving."): f for f in decoded.findings}


def said(text: str) -> tuple[str, str, str]:
    v = decode_text(text).verdict
    return v.severity.value, v.action.value, v.drain


FAULTS = {
    # the engine
    "dead": (DEAD, "engine_dead", "fatal", "restart_worker"),
    "watcher": ("ERROR 02-01 10:00:00 [core_client.py:590] Engine core proc EngineCore_DP1 died unexpectedly, shutting "
                "down client.",
                "engine_dead", "fatal", "restart_worker"),
    "old loop": ("ERROR 11-05 12:03:00 client.py:250] RuntimeError('Engine loop has died')", "engine_dead", "fatal",
                 "restart_worker"),
    "rpc": ("(EngineCore pid=5) ERROR 07-16 08:23:49 [core.py:1242] TimeoutError: RPC call to execute_model timed out.",
            "rpc_timeout", "fatal", "restart_worker"),
    "rank": ("(EngineCore_DP0 pid=70) ERROR 01-02 03:04:05 [multiproc_executor.py:231] Worker proc VllmWorker-3 died unexpectedly, "
             "shutting down executor.", "worker_died", "fatal", "restart_worker"),
    "segfault": ("!!!!!!! Segfault encountered !!!!!!!", "segfault", "fatal", "restart_worker"),
    "oom": ("[Mon Mar  2 10:00:00 2026] Out of memory: Killed process 7712 (VLLM::EngineCor) total-vm:98304000kB",
            "oom_killed", "fatal", "restart_worker"),
    "oom pod": ("    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137", "oom_killed", "fatal",
                "restart_worker"),
    "kv too small": ("ERROR 03-03 03:03:03 [core.py:700] ValueError: The model's max seq len (262144) is larger than "
                     "the maximum number "
                     "of tokens that can be stored in KV cache (180224).", "kv_too_small", "warning", "inspect"),
    "memory held": ("ValueError: Free memory on device cuda:2 (11.3/184.3 GiB) on startup is less than desired GPU "
                    "memory utilization "
                    "(0.9, 165.9 GiB).", "gpu_memory_held", "warning", "inspect"),
    # CUDA
    "illegal": ("(Worker_TP1 pid=44) ERROR 04-04 04:04:04 [multiproc_executor.py:700] torch.AcceleratorError: CUDA "
                "error: an illegal "
                "memory access was encountered", "cuda_app", "fatal", "restart_worker"),
    "ecc": ("(Worker_TP1 pid=44) RuntimeError: CUDA error: uncorrectable ECC error encountered", "cuda_hardware", "fatal",
            "inspect"),
    "launch": ("(VllmWorker rank=6 pid=310) ERROR 05-05 05:05:05 [m.py:470] RuntimeError: CUDA error: unspecified launch failure",
               "cuda_hardware", "fatal", "inspect"),
    "memory": ("(Worker pid=8) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda_oom", "warning",
               "restart_worker"),
    "fabric": ("RuntimeError: Error 802: system not yet initialized", "fabric_not_ready", "warning", "inspect"),
    # collectives
    "nccl net": ("tray-07:4411:4530 [2] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer "
                 "198.51.100.8<41220> with status=12 "
                 "opcode=0 len=0 vendor err 129 (Send) localGid fd00::1 remoteGidsfd00::2 hca mlx5_4", "nccl_net", "warning",
                 "restart_worker"),
    "nccl system": ("(Worker_PP1_TP0 pid=9) RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO "
                    "for details)",
                    "nccl_error", "fatal", "restart_worker"),
    "nccl port": ("decode-2:311:405 [0] transport/net_ib.cc:199 NCCL WARN NET/IB : mlx5_3:1 Got async error event: port error",
                  "nccl_port", "warning", "inspect"),
    "nccl peer": ("torch.distributed.DistBackendError: ncclRemoteError: A call failed possibly due to a network error or a remote "
                  "process exiting prematurely.", "nccl_peer_gone", "warning", "restart_worker"),
    "deepep": ("[pod/ep-decode-1/vllm] (Worker_DP9_EP9 pid=77) RuntimeError: DeepEP error: timeout (combine CPU)",
               "all2all_timeout",
               "fatal", "restart_worker"),
    # KV transfer
    "handshake": ("(Worker_DP1_EP1 pid=21) ERROR 10-16 17:22:56 [nixl_connector.py:815] RuntimeError: Remote NIXL agent engine ID "
                  "mismatch. Expected 9a_dp1,received 7b_dp1.", "nixl_handshake", "warning", "restart_worker"),
    "transfer": ("(Worker_TP0 pid=4) ERROR 01-09 15:09:32 [worker.py:900] NIXL transfer failure: transfer_setup_failed. "
                 "Marking blocks "
                 "as invalid | Context: {'failure_type': 'transfer_setup_failed', 'remote_engine_id': 'aa-3', 'remote_host': "
                 "'198.51.100.4', 'remote_port': 5601}", "nixl_transfer", "warning", "restart_worker"),
    "invalid": ("ERROR 08-16 08:09:28 [worker.py:3004] Potentially invalid KV blocks for unrecognized request r-1 were "
                "retrieved by a "
                "decode worker. They may have expired.", "kv_invalid", "warning", "inspect"),
    "expired": ("WARNING 08-16 08:09:07 [worker.py:2967] Releasing expired KV blocks for request r-1 which were "
                "retrieved by 0 remote "
                "worker(s) before lease expired.", "kv_expired", "warning", "inspect"),
    "retry": ("[1745700389.902821] [tray-11:6274 :0]     ib_mlx5_log.c:179  UCX  ERROR Transport retry count exceeded "
              "on mlx5_0:1/IB "
              "(synd 0x15 vend 0x81 hw_synd 0/0)", "ucx_retry", "warning", "restart_worker"),
    "mooncake": ("E1210 03:24:54.778062 2548 worker_pool.cpp:236] Worker: Cannot make connection for endpoint: "
                 "198.51.100.9:8144@mlx5_0",
                 "mooncake_peer", "warning", "restart_worker"),
    # routing
    "quarantine": ("2026-05-01T10:00:00.000001Z  WARN dynamo_runtime::component::client: quarantining worker instance_id=77aa",
                   "worker_quarantined", "warning", "restart_worker"),
    "lease": ("2026-05-01T10:00:00.1Z ERROR dynamo_runtime::transports::etcd::lease: keep alive task failed: lease 694d81 expired",
              "lease_lost", "warning", "restart_worker"),
    "lost": ("2026-05-01T10:00:00.1Z ERROR dynamo_llm::migration: Migration limit exhausted: Stream ended before "
             "generation completed",
             "migration_lost", "warning", "restart_worker"),
    "nan": ("vllm:corrupted_requests_total{engine=\"0\",model_name=\"m\"} 3.0", "nan_logits", "warning", "inspect"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "severity", "action"), FAULTS.values(), ids=FAULTS)
def test_faults(text: str, kind: str, severity: str, action: str) -> None:
    """A line that is a fault is recognised, says how bad it is, what to do first, and carries its own words as evidence."""
    decoded = decode_text(text)
    assert (decoded.verdict.severity, decoded.verdict.action) == (severity, action)
    found = checks(decoded)[kind]
    assert found.evidence
    assert found.facts["first"]


NOISE = {
    "router book-keeping": "2026-05-01T10:00:00.065823Z  WARN dynamo_llm::kv_router: Failed to free request 0a1b: "
                           "Request ID not found "
                           "in request_to_worker mapping",
    "publish": "2026-03-18T06:21:30.8Z  WARN handle_payload: dynamo_runtime::push_handler: Failed to publish response "
               "for stream 3b",
    "grammar": "(EngineCore_0 pid=3) ERROR 08-08 02:53:13 [backend_xgrammar.py:160] Failed to advance FSM for request "
               "resp_2 for tokens "
               "410. Please file an issue.",
    "tool call": "ERROR 08-08 02:53:13 [hermes_tool_parser.py:140] Error in extracting tool call from response.",
    "leaked": "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear "
              "to be 1 leaked "
              "shared_memory objects to clean up at shutdown",
    "process group": "[rank0]:[W603 12:00:00.1 ProcessGroupNCCL.cpp:1476] Warning: WARNING: destroy_process_group() was not called",
    "busy": '{"error":{"message":"x"}}\nINFO: The engine is currently busy and cannot accept new requests. Please try again later',
    "callback": CALLBACK,
    "jit": "(Worker_TP0 pid=13) WARNING 07-15 15:32:43 [jit_monitor.py:135] Triton kernel JIT compilation during inference: _k.",
    "ucx choice": "[1589704958.024609] [tray-1:6319 :0]    ucp_context.c:727  UCX  WARN  transport 'abcd' is not "
                  "available, please use one or "
                  "more of: cma, ib",
    "one migration": "2026-05-01T10:00:00Z  WARN dynamo_llm::migration: migration retry scheduled migration.from_worker_id=77 "
                     "migration.reason=connection_timeout",
    "plain stop": TERM + "\nINFO:     Application shutdown complete.\nINFO:     Finished server process [88]",
    "idle": reports(("10:00", 0, 0, 0, 0), ("11:30", 0, 0, 0, 0), ("13:30", 0, 0, 0, 0)),
    "one empty report": reports(("10:00", 90, 410, 3, 0), ("10:10", 0, 0, 3, 0)),
    "long prefill": reports(("10:00", 0, 0, 1, 0), ("11:20", 0, 0, 1, 0), ("11:30", 9000, 12, 1, 0)),
    "compiling": "(EngineCore pid=2) INFO 01-01 01:00:00 [backends.py:1] Dynamo bytecode transform time: 10 "
                 "s\n(EngineCore pid=2) INFO "
                 "01-01 01:01:30 [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds.",
    "no sickness in a scrape": 'vllm:corrupted_requests_total{engine="0"} 0.0\nvllm:num_requests_running{engine="0"} 4.0',
}  # fmt: skip


@pytest.mark.parametrize("text", NOISE.values(), ids=NOISE)
def test_noise(text: str) -> None:
    """A line that looks bad and means nothing is info and asks for nothing."""
    assert said(text) == ("info", "none", "none")


QUOTED = {
    "prompt": "(APIServer pid=1) INFO 01-01 00:00:00 [logger.py:39] Received request c-1: prompt: 'why EngineDeadError "
              "and NIXL_ERR_BACKEND?'",
    "alert": "[FIRING:1] worker down: EngineCore encountered a fatal error on decode-3",
    "monitor": "Sep 19 10:30:06 mon-1 alertmanager[77]: notify: EngineDeadError on decode-3",
    "nested": json.dumps({"level": "INFO", "msg": "Handling event", "event": {"message": "EngineDeadError"}}),
    "labels": json.dumps({"message": "EngineDeadError", "labels": {"job": "blackbox"}}),
    "command": "root@tray-1:~# grep -c 'EngineDeadError' /var/log/vllm.log",
}


@pytest.mark.parametrize("text", QUOTED.values(), ids=QUOTED)
def test_quoted(text: str) -> None:
    """A user's prompt, an alert, another program and a command that quote a fault are not the fault."""
    decoded = decode_text(text)
    assert decoded.findings == ()
    assert decoded.skipped["quoted"] >= 1


PREFIXES = [
    "", "\x1b[0;36m(EngineCore_DP2 pid=9)\x1b[0;0m ", "[pod/decode-3/vllm] ", "vllm-2  | ", "2026-05-01T10:00:00.1Z stdout F ",
    "Sep 19 10:30:06 tray-07 vllm[4411]: (EngineCore pid=9) ERROR 09-19 10:30:06 [core.py:900] ", "[rank3]: ",
    "2026-05-01T10:00:00+0000 tray-07 python3[4411]: ", "(RayWorkerWrapper pid=31, ip=198.51.100.4) ", "[2026-05-01 10:00:00] ",
    "2026-05-01 10:00:00,553 - vllm.v1 - ERROR - ",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("end", ["", "\r\n"])
def test_prefixes(prefix: str, end: str) -> None:
    """However the line was copied, it means the same."""
    text = prefix + "RuntimeError: CUDA error: an illegal memory access was encountered" + end
    assert said(text) == ("fatal", "restart_worker", "none")


@pytest.mark.parametrize(
    "record",
    [
        {"time": "2026-05-01T10:00:00Z", "level": "ERROR", "message": "no responders: no responders", "target": "dynamo_llm"},
        {"timestamp": "2026-05-01T10:00:00Z", "level": "ERROR", "fields": {"message": "no responders"}, "target": "dynamo"},
        {"log": "2026-05-01T10:00:00Z ERROR dynamo_llm: no responders\n", "stream": "stderr"},
        {"MESSAGE": "no responders", "_TRANSPORT": "stdout", "SYSLOG_IDENTIFIER": "dynamo"},
    ],
)
def test_json_lines(record: dict[str, object]) -> None:
    """The stack's own JSON log, the container runtime's and the journal's speak by their message."""
    assert said(json.dumps(record)) == ("warning", "restart_worker", "none")


# -- what several lines say together --------------------------------------------------------------------------------------------


def test_a_traceback_is_one_incident() -> None:
    """Ranks, engine and server each print the same death; the first fatal cause is one incident, the rest are its echoes."""
    text = "\n".join((
        "(Worker_TP2 pid=44) ERROR 04-04 04:04:04 [m.py:700] WorkerProc hit an exception.",
        "(Worker_TP2 pid=44) ERROR 04-04 04:04:04 [m.py:700] Traceback (most recent call last):",
        '(Worker_TP2 pid=44) ERROR 04-04 04:04:04 [m.py:700]   File "a.py", line 3, in execute_model',
        "(Worker_TP2 pid=44) ERROR 04-04 04:04:04 [m.py:700] torch.AcceleratorError: CUDA error: an illegal memory "
        "access was encountered",
        "(EngineCore pid=40) ERROR 04-04 04:04:05 [core.py:1] EngineCore encountered a fatal error.",
        "(APIServer pid=30) ERROR 04-04 04:04:05 [a.py:2] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        "encountered an issue.",
    ))  # fmt: skip
    decoded = decode_text(text)
    assert decoded.verdict.incidents == 1
    assert {str(f.component) for f in decoded.findings} == {"pasted/worker@30"}
    found = checks(decoded)
    assert found["worker_exception"].facts["caused_by"] == found["engine_dead"].facts["caused_by"] == "serving.cuda_app"
    assert (decoded.verdict.severity, decoded.verdict.action) == ("fatal", "restart_worker")


def test_the_watchdog_is_an_echo() -> None:
    """A collective that ran into its timeout after a rank had died is that rank's echo; alone it suspects a peer."""
    watchdog = (
        "[rank{r}]:[E612 04:10:02 ProcessGroupNCCL.cpp:629] [Rank {r}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=88, OpType=ALLGATHER, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds "
        "before timing out."
    )
    alone = checks(decode_text(watchdog.format(r=5)))["nccl_timeout"]
    assert (alone.severity, alone.action, alone.suspect) == (Severity.FATAL, Action.RESTART_WORKER, Suspect.PEER)
    died = "ERROR 06-12 04:00:01 x.py:1] Worker VllmWorkerProcess pid 7 died, exit code: -11"
    both = checks(decode_text(f"{died}\n{watchdog.format(r=5)}"))
    assert both["nccl_timeout"].facts["caused_by"] == "serving.worker_died"
    assert both["nccl_timeout"].action is Action.NONE
    assert "crashed" in both["worker_died"].summary


def test_the_rank_that_is_behind() -> None:
    """Among ranks that report a timeout, the one that has got the least far is named."""
    line = (
        "[rank{r}]:[E612 04:10:02 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 3 Rank {r}] Timeout at NCCL work: 41, "
        "last enqueued NCCL work: "
        "{n}, last completed NCCL work: 40."
    )
    text = "\n".join(line.format(r=r, n=n) for r, n in ((0, 44), (1, 44), (2, 41), (3, 44)))
    assert checks(decode_text(text))["nccl_timeout"].facts["behind"] == ["2"]


def test_the_cause_takes_over_how_bad_it_became() -> None:
    """A network error that killed the engine is as bad as the engine's death, and keeps its own first thing to do."""
    net = FAULTS["nccl net"][0]
    found = checks(decode_text(net + "\n[pod/tray-07/vllm] " + DEAD))
    assert found["nccl_net"].severity is Severity.FATAL
    assert found["engine_dead"].facts["caused_by"] == "serving.nccl_net"


def test_a_stop_makes_its_noise_meaningless() -> None:
    """The same lines are a fault without a stop, and nothing after one; a fault before the stop stays a fault."""
    lines = "\n".join((DISCONNECT, CALLBACK, DEAD))
    assert said(lines)[0] == "fatal"
    assert said(TERM + "\n" + lines) == ("info", "none", "none")
    assert said(lines + "\n" + TERM)[0] == "fatal"


def test_a_stop_long_ago_explains_nothing() -> None:
    """What comes later than a shutdown may last is not its noise."""
    assert said(TERM.replace("03:59:58", "02:10:00") + "\n" + DISCONNECT)[:2] == ("warning", "restart_worker")


def test_hardware_is_not_explained_away() -> None:
    """An ECC error that CUDA reports during a stop is still looked up in the kernel log, and outweighs the engine's death."""
    text = TERM + "\n" + FAULTS["ecc"][0]
    assert said(text) == ("fatal", "inspect", "worker")
    assert said(FAULTS["ecc"][0] + "\n" + DEAD) == ("fatal", "inspect", "worker")


def test_dead_but_answering() -> None:
    """An engine's death followed by green health answers is a zombie; followed by a clean exit it is a crash that hides."""
    health = 'INFO:     198.51.100.2:41 - "GET /health HTTP/1.1" 200 OK'
    zombie = checks(decode_text(DEAD + "\n" + health))
    assert zombie["engine_zombie"].severity is Severity.FATAL
    gone = checks(decode_text("\n".join((DEAD, health, "INFO:     Application shutdown complete.", "ExecMainStatus=0"))))
    assert "engine_zombie" not in gone
    assert gone["crash_exit_zero"].severity is Severity.FATAL
    assert "engine_zombie" not in checks(decode_text(health + "\n" + DEAD))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (reports(("10:00", 9, 400, 4, 0), ("10:10", 0, 0, 4, 0), ("10:40", 0, 0, 4, 2), ("11:10", 0, 0, 4, 5)),
         ("warning", "inspect", "worker")),
        (reports(("10:10", 0, 0, 0, 3), ("10:40", 0, 0, 0, 3), ("11:10", 0, 0, 0, 3)), ("warning", "inspect", "worker")),
        (reports(("10:10", 0, 0, 4, 0), ("10:40", 0, 0, 4, 0)), ("info", "none", "none")),
        ("\n".join(["INFO: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s",
                    "Running: 0 reqs, Waiting: 3 reqs, GPU KV cache usage: 0.0%"] * 6), ("warning", "inspect", "worker")),
    ],
    ids=["running", "waiting", "not yet", "wrapped and without stamps"],
)  # fmt: skip
def test_stalls(text: str, expected: tuple[str, str, str]) -> None:
    """No token for a minute by the log's own clock, while requests run or wait, is a stall; less is not."""
    assert said(text) == expected


def test_a_stall_that_became_fatal() -> None:
    """Once the RPC's limit has passed the hang is the engine's death: the restart is the first thing, the stall its echo."""
    stall = reports(("10:10", 0, 0, 4, 0), ("11:10", 0, 0, 4, 0))
    rpc = "(EngineCore pid=5) ERROR 08-03 09:15:10 [core.py:12] TimeoutError: RPC call to sample_tokens timed out."
    assert said(stall + "\n" + rpc) == ("fatal", "restart_worker", "none")


def test_a_stall_across_readings() -> None:
    """What one reading began, the next one ends: memory carries the time since the last token."""
    memory: dict[str, object] = {}
    found = []
    for text in (reports(("10:10", 0, 0, 4, 0), ("10:30", 0, 0, 4, 0)), reports(("10:50", 0, 0, 4, 0), ("11:10", 0, 0, 4, 0))):
        (reading,) = serving_lines.parse(text, "t07")
        json.dumps([reading.data, memory])  # plain values only
        found.append({f.check for f in serving_log.assess(reading, memory)})
    assert found == [set(), {"serving.stalled"}]


def test_two_scrapes_without_a_token() -> None:
    """Two pastes of /metrics with requests running and the same token count say that the engine stands still."""
    scrape = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:generation_tokens_total{engine="0"} 81234.0\n'
    assert said(scrape + scrape) == ("warning", "inspect", "worker")
    assert said(scrape + scrape.replace("81234", "81240")) == ("info", "none", "none")


@pytest.mark.parametrize(("seconds", "check", "severity"), [(6, "registry_stale", "warning"), (25, "registry_dead", "fatal")])
def test_a_lease(seconds: int, check: str, severity: str) -> None:
    """A dead worker may be asked for until its lease ends; beyond, the registry is wrong."""
    line = "2026-05-01T10:00:{s:02}.1Z ERROR dynamo_llm::http: Failed to generate completions: no responders: no responders"
    found = checks(decode_text("\n".join(line.format(s=s) for s in (1, 3, 1 + seconds))))
    assert found[check].severity == severity
    assert found[check].count == 3


def test_streams_that_keep_leaving_one_worker() -> None:
    """Several migrations away from one worker suspect that worker; from several workers they do not."""
    line = NOISE["one migration"]
    assert checks(decode_text("\n".join([line] * 4)))["migration_source"].severity is Severity.WARNING
    assert "migration_source" not in checks(decode_text("\n".join(line.replace("=77", f"={n}") for n in (1, 2, 3, 4))))


def test_the_peer_that_many_name() -> None:
    """Failed handshakes blame the engine that they name, not the workers that complain."""
    line = (
        "(Worker_TP{n} pid=7{n}) ERROR 05-01 15:00:23 [nixl_connector.py:1263] NIXL transfer failure: "
        "handshake_setup_failed | Context: "
        "{{'failure_type': 'handshake_setup_failed', 'request_id': None, 'engine_id': 'dd-{n}', 'remote_engine_id': 'pp-9'}}"
    )
    found = checks(decode_text("\n".join(line.format(n=n) for n in range(4))))["nixl_handshake"]
    assert (found.suspect, found.count, found.facts["peers"]) == (Suspect.PEER, 4, ["engine pp-9"])
    assert "pp-9" in found.summary


def test_many_who_name_one_peer_are_one_incident() -> None:
    """Workers that all complain about one engine are one incident, wherever they run."""
    line = "[pod/decode-{n}/vllm] NIXL transfer failure: transfer_failed | Context: {{'remote_engine_id': 'pp-9'}}"
    assert decode_text("\n".join(line.format(n=n) for n in range(3))).verdict.incidents == 1


def test_a_traceback_ends_with_its_cause() -> None:
    """What a traceback's last line says is the cause, before anything that was printed earlier."""
    text = "\n".join((DISCONNECT, DEAD, DEAD.partition("EngineCore enc")[0] + "TimeoutError: RPC call to sample_tokens timed out."))
    assert checks(decode_text(text))["engine_dead"].facts["caused_by"] == "serving.rpc_timeout"


def test_the_explanation_says_what_to_do() -> None:
    """The human answer carries the first thing to do and the runbook beside each cause, and calls an echo an echo."""
    shown = CliRunner().invoke(decode, ["-"], input="\n".join((FAULTS["nccl system"][0], DEAD)))
    assert shown.exit_code == 0
    told = " ".join(shown.output.split())
    for words in ("first: restart the worker; the WARN line above it", "runbook: collective-hung", "an echo of serving.nccl_error"):
        assert words in told


def test_nothing_leaves_service_on_a_logs_word() -> None:
    """The shipped policy has a rule for every kind, and none of them drains, evicts or repairs."""
    for kind in serving_lines.kinds().values():
        finding = Finding(
            id="x", check=f"serving.{kind.name}", component=Component(node="t07", device="worker@d"), at=1.0,
            severity=kind.severity, action=kind.action, suspect=kind.suspect,
        )
        rule = default_policy().rule_for(finding)
        assert rule is not None
        assert rule.response is Response.NONE, kind.name


def test_lost_twice_is_a_risk_of_wrong_answers() -> None:
    """A lost connection after which notifications find no peer means that answers can be wrong; alone it does not."""
    assert said(DISCONNECT)[0] == "warning"
    text = DISCONNECT + "\n(Worker_TP3 pid=612) ERROR 06-12 04:02:01 [w.py:1] nixlNotFoundError: NIXL_ERR_NOT_FOUND"
    found = checks(decode_text(text))
    assert found["kv_corruption_risk"].severity is Severity.FATAL
    assert found["nixl_disconnect"].facts["caused_by"] == "serving.kv_corruption_risk"


def test_workers_are_told_apart() -> None:
    """Pods that are named are workers of their own, each with its own incident."""
    text = f"[pod/decode-1/vllm] {DEAD}\n[pod/decode-2/vllm] {FAULTS['illegal'][0]}"
    decoded = decode_text(text)
    assert {f.component.worker for f in decoded.findings} == {"decode-1", "decode-2"}
    assert decoded.verdict.incidents == 2


# -- the tables -------------------------------------------------------------------------------------------------------------------


def test_the_tables_fit() -> None:
    """Every row has a source or a meaning, every kind is known, and only what hardware can cause takes a worker out of service."""
    assert all(r["source"] for r in table("serving_lines.tsv"))
    assert all(row.kind in serving_lines.kinds() for row in serving_lines.lines())
    for kind in serving_lines.kinds().values():
        assert kind.says and kind.first, kind.name
        assert kind.drain in ("none", "worker")
        assert kind.drain == "none" or kind.action is Action.INSPECT, kind.name
        assert kind.family not in ("noise", "context") or (kind.severity, kind.action) == (Severity.INFO, Action.NONE)


def test_a_mark_is_found_by_its_own_pattern() -> None:
    """A row's pattern may only narrow what its mark finds: it compiles and does not match the empty string."""
    for row in serving_lines.lines():
        assert row.pattern is None or row.pattern.search("") is None, row
