"""Pasted text as people really copy it: collectors' records, wrapped lines, and the look-alikes that stand beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from probes.decode import Decoded, decode_text
from probes.pasted_prefix import KERNEL, QUOTED, USER_SPACE, origin
from sentinel.cli.decode import _NEAREST, decode, runbook

LINE = "NVRM: Xid (PCI:0019:01:00): 119, pid=611, name=python3, Timeout after 45s of waiting for RPC response from GPU3 GSP!"
JOURNAL = {"_TRANSPORT": "kernel", "SYSLOG_IDENTIFIER": "kernel", "PRIORITY": "4"}


def said(decoded: Decoded) -> tuple[str, str, int]:
    return decoded.verdict.severity.value, decoded.verdict.action.value, decoded.verdict.incidents


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ('<3>1 2026-03-04T05:06:07Z t07 kernel - - [meta sequenceId="17"] ', KERNEL),
        ("199 <4>1 2026-03-04T05:06:07Z t07 kernel - - - ", KERNEL),
        ("2026-03-04T05:06:07.1Z stdout F [ 12.5] ", KERNEL), ("dmesg-tail-x8k2p tail [ 12.5] ", KERNEL),
        ("t07 | [ 12.5] ", KERNEL), ("[pod/dmesg-tail-x8k2p/tail] [ 12.5] ", KERNEL),
        ("t07: Mar 04 05:06:07 t07 kernel: ", KERNEL), ("12:[ 12.5] ", KERNEL),
        ("Mar  4 05:06:07 fd00::17 kernel: ", KERNEL), ("fd00::17: kern: warning: [2026-03-04T05:06:07.1Z]: ", KERNEL),
        ("Mar  4 05:06:07 t07 kern.err kernel: [ 12.5] ", KERNEL), ("03/04/2026 05:06:07 t07 kernel: ", KERNEL),
        ('2026-03-04T05:06:07Z {host="t07",transport="kernel"} ', KERNEL),
        ("<12>Mar  4 05:06:07 t07 kernel: ", USER_SPACE), ("daemon:warn  : [ 12.5] ", USER_SPACE),
        ("192.0.2.9: user: warning: [2026-03-04T05:06:07.1Z]: ", USER_SPACE), ("Mar  4 05:06:07 t07 user.err kernel: ", USER_SPACE),
        ('2026-03-04T05:06:07Z {host="t07",unit="gpud.service"} ', QUOTED), ("2026-03-04T05:06:07.1Z stderr F found ", QUOTED),
        ("  message: ", QUOTED), ('"reason": "', QUOTED), ("| 05:06 | t07 | ", QUOTED), ("<alice> ", QUOTED),
        ("Mar  4 05:06:07 t07 root: ", QUOTED),
    ],
)  # fmt: skip
def test_who_wrote_it(prefix: str, who: str) -> None:
    """What stands before a message says whether the kernel wrote it, user space did, or somebody quotes it."""
    assert origin(prefix).author == who
    decoded = decode_text(prefix + LINE)
    assert bool(decoded.findings) == (who == KERNEL)
    assert decoded.skipped == ({} if who == KERNEL else {who: 1})


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**JOURNAL, "MESSAGE": LINE}, indent=8), "data: " + json.dumps({**JOURNAL, "MESSAGE": LINE}),
        "\x1e" + json.dumps({**JOURNAL, "MESSAGE": LINE}), json.dumps({"jsonPayload": {**JOURNAL, "MESSAGE": LINE}}),
        json.dumps({**JOURNAL, "message": LINE, "host": "t07", "source_type": "journald"}),
        json.dumps({"dmesg": [{"pri": 6, "msg": "quiet"}, {"pri": 4, "time": 12.5, "msg": LINE}]}),
        json.dumps({"dmesg": [{"pri": 6, "msg": "quiet"}, {"fac": "kern", "pri": "warn", "msg": LINE}]}, indent=3),
        json.dumps({"log": f"[ 12.5] {LINE}\n", "stream": "stdout", "time": "2026-03-04T05:06:07Z"}),
        json.dumps({"labels": {"host": "t07", "transport": "kernel"}, "line": LINE, "timestamp": "2026-03-04T05:06:07Z"}),
        json.dumps([{"line": f"Mar 04 05:06:07 t07 kernel: {LINE}", "timestamp": "1"}]),
        json.dumps({"priority": 4, "sequence": 17, "sec": 12, "usec": 5, "msg": LINE}),
        json.dumps({"host": "t07", "ident": "kernel", "message": LINE}),
        json.dumps({"body": LINE, "severityText": "WARN", "attributes": {"syslog.identifier": "kernel"}}),
        json.dumps({"message": LINE, "host": {"name": "t07"}, "process": {"name": "kernel"}, "event": {"kind": "event"}}),
        f"__CURSOR=s=1\n_TRANSPORT=kernel\nSYSLOG_IDENTIFIER=kernel\nMESSAGE={LINE}\n\n__CURSOR=2\n_TRANSPORT=syslog\nMESSAGE=x\n",
        f"Wed 2026-03-04 05:06:07 UTC [i=2]\n    MESSAGE={LINE}\n    _TRANSPORT=kernel\nWed 2026-03-04 05:06:08 UTC [i=3]\n",
    ],
)  # fmt: skip
def test_records_of_collectors(text: str) -> None:
    """A record counts when it says that the kernel wrote it, or is nothing but an envelope around a kernel line."""
    decoded = decode_text(text)
    assert [(f.facts["xid"], f.component.gpu) for f in decoded.findings] == [(119, "0019:01:00.0")]
    assert said(decoded) == ("fatal", "reset_gpu", 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({**JOURNAL, "_TRANSPORT": "syslog", "MESSAGE": LINE}, indent=8), "user_space"),
        (f"_TRANSPORT=stdout\nSYSLOG_IDENTIFIER=kernel\nMESSAGE={LINE}\n\n_TRANSPORT=kernel\nMESSAGE=x\n", "user_space"),
        (f"Wed 2026-03-04 05:06:07 UTC\n    MESSAGE={LINE}\n    SYSLOG_IDENTIFIER=gpud\nWed 2026-03-04 05:06:07 UTC\n", "quoted"),
        (json.dumps({"kind": "Event", "reason": "XidError", "message": LINE, "involvedObject": {}}, indent=2), "quoted"),
        (json.dumps({"level": "WARN", "message": LINE, "node": "t07"}), "quoted"),
        (json.dumps({"msg": "saw a line", "message": LINE}), "quoted"),
        (json.dumps({"ident": "gpud", "message": LINE}), "quoted"),
        (json.dumps({"log": f'level=error msg="{LINE}"\n', "stream": "stderr"}), "quoted"),
        (json.dumps({"facility": "daemon", "message": LINE}), "user_space"),
        (json.dumps({"alerts": [{"annotations": {"summary": LINE}}]}), "quoted"),
        ('{"log": "' + LINE, "quoted"),
    ],
)  # fmt: skip
def test_records_that_quote(text: str, why: str) -> None:
    """A record by another author is not the kernel's, whatever its text looks like."""
    decoded = decode_text(text)
    assert decoded.findings == ()
    assert decoded.skipped == {why: 1}


@pytest.mark.parametrize(
    "text",
    [
        "[ 12.5] " + LINE.replace(" ", "\u00a0"),  # from a web page
        "[ 12.5] " + LINE.replace("Xid", "\x1b[01;31m\x1b[KXid\x1b[m\x1b[K"),  # grep --color
        "[ 12.5] " + LINE.replace(": 119", ":\n119"), "[ 12.5] " + LINE.replace("0019:", "0019:\r\n"),  # a narrow terminal
    ],
    ids=["hard spaces", "colour inside", "wrapped", "wrapped in the address"],
)
def test_what_copying_does_to_a_line(text: str) -> None:
    """Hard spaces, colours within a word and a line break before the number change nothing."""
    assert said(decode_text(text)) == ("fatal", "reset_gpu", 1)


def test_words_that_others_use_too() -> None:
    """A line that only shares a word with a driver's line quotes nobody: nothing is said to have been left out."""
    decoded = decode_text("[17.5] [p:1 :0] ib_mlx5_log.c:171  UCX  ERROR Local length error on mlx5_0:1/IB (synd 0x1 vend 0x81)\n")
    assert ([f.check for f in decoded.findings], decoded.skipped) == (["serving.ucx_local"], {})


class TestTogether:
    def test_an_engine_dies_with_its_gpu(self) -> None:
        """An engine's death in the same text as its GPU's is no incident of its own."""
        engine = "(EngineCore pid=77) ERROR 03-04 05:06:09 [core.py:1101] EngineCore encountered a fatal error.\n"
        assert said(decode_text(f"{LINE}\n{engine}")) == ("fatal", "reset_gpu", 1)
        assert said(decode_text(engine)) == ("fatal", "restart_worker", 1)

    def test_the_xid_decides_over_cudas_word(self) -> None:
        """CUDA's word that hardware may be at fault sends one to the kernel log; where that is at hand, it decides."""
        cuda = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
        xid = "NVRM: Xid (PCI:0019:01:00): 94, pid=611, Contained: SM (0x1). RST: No, D-RST: No\n"
        assert decode_text(cuda).verdict.action == "inspect"
        assert decode_text(cuda + xid).verdict.action == "restart_worker"

    def test_one_link_of_many_gpus_in_a_tools_output(self) -> None:
        """``nvidia-smi nvlink -s`` with the same link down on several GPUs is one switch."""
        links = "".join(f"\t Link {n}: {'<inactive>' if n == 4 else '53.125 GB/s'}\n" for n in range(18))
        gpus = "".join(f"GPU {i}: NVIDIA GB200 (UUID: GPU-{i})\n{links}" for i in range(4))
        assert said(decode_text(gpus)) == ("fatal", "reset_gpu", 1)

    def test_no_subnet_manager_is_one(self) -> None:
        """All rails linked and none set up: one incident, not one for each rail."""
        port = "\tPort 1:\n\t\tState: Initializing\n\t\tPhysical state: LinkUp\n\t\tSM lid: 0\n\t\tLink layer: InfiniBand\n"
        assert said(decode_text("".join(f"CA 'mlx5_{i}'\n{port}" for i in range(4)))) == ("warning", "inspect", 1)


@pytest.mark.parametrize(
    ("text", "check", "wanted"),
    [
        ("NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.",
         "driver.uvm_fatal", ("fatal", "reboot_node")),
        ("NVRM: GPU 0019:01:00.0: rm_init_adapter failed, device minor number 3", "gpu.init_failed", ("fatal", "reboot_node")),
        ("NVRM: rm_init_adapter failed for device bearing minor number 3", "gpu.init_failed", ("fatal", "reboot_node")),
        ("NVRM: The NVIDIA probe routine failed for 1 device(s).", "gpu.probe_failed", ("warning", "inspect")),
        ("NVRM: API mismatch: the client has the version 580.65.06, but", "driver.client_mismatch", ("warning", "inspect")),
        ("Mar 04 05:06:07 t07 systemd[1]: nvidia-fabricmanager.service: Failed with result 'exit-code'.",
         "fabric_manager.failed", ("warning", "restart_fabric_manager")),
        ("Mar 04 05:06:07 t07 systemd[1]: nvidia-imex.service: Failed with result 'exit-code'.",
         "imex.failed", ("warning", "restart_imex")),
    ],
)  # fmt: skip
def test_lines_without_a_number(text: str, check: str, wanted: tuple[str, str]) -> None:
    """What the driver and its daemons say without a number is judged by its row."""
    decoded = decode_text(text)
    assert [f.check for f in decoded.findings] == [check]
    assert said(decoded) == (*wanted, 1)


class TestTools:
    QUERY = "GPU 00000019:01:00.0\n    Product Name                          : NVIDIA H100 80GB HBM3\n"

    @pytest.mark.parametrize(
        ("rows", "wanted"),
        [
            ("    GPU Reset Status\n        Reset Required                    : Yes\n", ("fatal", "reset_gpu")),
            ("    GPU Reset Status\n        Drain and Reset Recommended       : Yes\n", ("fatal", "reset_gpu")),
            ("    GPU Reset Status\n        Reset Required                    : No\n", ("info", "none")),
            ("    Temperature\n        GPU Current Temp                  : [GPU is lost]\n", ("fatal", "reboot_node")),
            ("    Temperature\n        GPU Current Temp                  : [GPU requires reset]\n", ("fatal", "reset_gpu")),
            ("    Temperature\n        GPU Current Temp                  : [Unknown Error]\n", ("info", "none")),
        ],
    )
    def test_rows_of_other_drivers(self, rows: str, wanted: tuple[str, str]) -> None:
        """What older drivers call a wanted reset, and what stands in place of a value when the GPU is the reason."""
        assert said(decode_text(self.QUERY + rows))[:2] == wanted

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("index, pci.bus_id, temperature.gpu\n0, 00000019:01:00.0, [GPU is lost]\n", ("fatal", "reboot_node")),
            ("index, pci.bus_id, temperature.gpu\n0, 00000019:01:00.0, [GPU requires reset]\n", ("fatal", "reset_gpu")),
            ("Unable to determine the device handle for gpu 0019:01:00.0: Not Found\n", ("warning", "inspect")),
            ("Error: Unable to determine the device handle for GPU0019:01:00.0: Unknown Error\n", ("fatal", "reboot_node")),
            ("Unable to determine the device handle for GPU 0019:01:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
             ("fatal", "reboot_node")),
            ("No devices found.\n", ("warning", "inspect")),
            ("        Aggregate\n            SRAM Threshold Exceeded       : Yes\n", ("fatal", "contact_support")),
        ],
    )
    def test_sentences(self, text: str, wanted: tuple[str, str]) -> None:
        """The other sentences and cells with which the tool says that a GPU does not answer."""
        assert said(decode_text(text)) == (*wanted, 1)

    def test_slow_links_are_compared_with_the_model(self) -> None:
        """A GB200's link at a Hopper's speed is slow; an H100's is not."""
        for name, wanted in (("NVIDIA GB200", ("warning", "inspect")), ("NVIDIA H100 80GB HBM3", ("info", "none"))):
            links = "".join(f"\t Link {n}: {'26.562' if n == 4 or 'H100' in name else '53.125'} GB/s\n" for n in range(18))
            assert said(decode_text(f"GPU 0: {name} (UUID: GPU-1)\n{links}"))[:2] == wanted

    def test_counts_since_the_driver_was_loaded(self) -> None:
        """Error counters of links that are not zero are told, and ask for a second look, not for a repair."""
        text = "GPU 0: NVIDIA GB200 (UUID: GPU-1)\n\t Link 3: Rx Errors: {}\n\t Link 3: Tx packets: 91\n"
        assert said(decode_text(text.format(0)))[:2] == ("info", "none")
        decoded = decode_text(text.format(7))
        assert [(f.check, f.facts["receive_errors"]) for f in decoded.findings] == [("gpu.nvlink_counts", 7)]
        assert said(decoded)[:2] == ("warning", "none")


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "empty"), (b" \n\n", "empty"), (bytes(range(256)) * 40, "not text"), (b"\0" * 5000, "not text")],
)
def test_no_log_at_all(data: bytes, words: str) -> None:
    """Input that is no text at all gets one sentence that says what was wanted."""
    result = CliRunner().invoke(decode, ["-"], input=data)
    assert result.exit_code == 0
    assert f"-: {words}; wanted a log's lines or a tool's output" in result.output


def test_utf16() -> None:
    """What a PowerShell redirect wrote is read."""
    result = CliRunner().invoke(decode, ["--json", "-"], input=(LINE + "\r\n").encode("utf-16"))
    assert json.loads(result.output)["verdict"]["action"] == "reset_gpu"


class TestManyHosts:
    """One address is another GPU on every host."""

    UP = "NVRM: Xid (PCI:0019:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"

    @pytest.mark.parametrize("way", ["Mar  4 05:06:07 {} kernel: {}", "{}: [ 12.5] {}", "{}.log:[ 12.5] {}"])
    def test_a_recovery_is_its_own_hosts(self, way: str) -> None:
        """A recovery on one host does not take back the fault of a GPU at the same address on another."""
        text = f"{way.format('t07', LINE)}\n{way.format('t08', self.UP)}\n"
        assert said(decode_text(text)) == ("fatal", "reset_gpu", 1)
        assert said(decode_text(text.replace("t08", "t07"))) == ("info", "undrain", 0)
        both = decode_text(text.replace(self.UP, LINE))
        assert said(both) == ("fatal", "reset_gpu", 2)
        assert len({f.component.node for f in both.findings}) == 2

    def test_records(self) -> None:
        """A journal record's host counts."""
        records = [json.dumps({**JOURNAL, "_HOSTNAME": h, "MESSAGE": m}) for h, m in (("t07", LINE), ("t08", self.UP))]
        assert said(decode_text("\n".join(records))) == ("fatal", "reset_gpu", 1)

    def test_a_tool_on_a_rack(self) -> None:
        """``pdsh nvidia-smi -q``: a healthy tray does not hide a sick one, in either order, even line by line in turns."""
        row = "    GPU Recovery Action                   : {}"
        head = ["GPU 00000019:01:00.0", "    Product Name      : NVIDIA GB200"]
        outputs = {"t07": [*head, row.format("Reset")], "t08": [*head, row.format("None")]}
        for order in (("t07", "t08"), ("t08", "t07")):
            one_by_one = "\n".join(f"{h}: {line}" for h in order for line in outputs[h])
            in_turns = "\n".join(f"{h}: {outputs[h][i]}" for i in range(3) for h in order)
            for text in (one_by_one, in_turns):
                assert [(f.check, f.component.node) for f in decode_text(text).findings] == [("gpu.recovery_action", "t07")]

    @pytest.mark.parametrize(
        "carrier",
        ["[pod/probe-x2f4k/main] {}", "2026-03-04T05:06:07.123456789Z {}", "2026-03-04T05:06:07.1Z stdout F {}", "probe-1  | {}",
         "Mar 04 05:06:07 {}", "[pod/probe-x2f4k/main] 2026-03-04T05:06:07.1Z {}"],
    )  # fmt: skip
    def test_whatever_carried_a_tools_output(self, carrier: str) -> None:
        """A tool's output is read through what kubectl, containerd, compose or ts put before each line, and as Docker's JSON."""
        lines = ["GPU 00000019:01:00.0", "    Fabric", "        State       : Completed", "        Status      : Timeout", ""]
        wanted = said(decode_text("\n".join(lines)))
        assert wanted[0] == "fatal"
        assert said(decode_text("\n".join(carrier.format(line) for line in lines))) == wanted
        docker = "\n".join(json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026"}) for line in lines)
        assert said(decode_text(docker)) == wanted

    def test_pairs_are_no_hosts(self) -> None:
        """``key: value`` lines have no host before them."""
        assert said(decode_text("errorCode: DCGM_FR_NVLINK_DOWN\nisFatal: true\n")) == ("info", "none", 0)


def test_a_page_for_every_warning() -> None:
    """A warning that the policy only notes names the nearest runbook, one that exists; what asks for nothing names none."""
    pages = {p.stem for p in (Path(__file__).parents[2] / "runbooks").glob("*.md")}
    assert {page for _, page in _NEAREST} <= pages
    for text, page in (
        ("NVRM: Xid (PCI:0019:01:00): 94, pid=611, Contained: SM (0x1). RST: No, D-RST: No", "gpu-degraded"),
        ("mlx5_core 0000:03:00.0: Port module event[error]: module 0, Cable error, Bus stuck (I2C or data shorted)", "nic-fatal"),
        ("NVRM: API mismatch: the client has the version 580.65.06, but", "driver-upgrade"),
        ("Failed to initialize NVML: GPU access blocked by the operating system", "monitor"),
        ("NVRM: Xid (PCI:0019:01:00): 43, pid=611, Ch 00000001", "app-fault"),
        ("NVRM: Xid (PCI:0019:01:00): 63, Row Remapper: New row marked for remapping", ""),
    ):
        assert [runbook(f) for f in decode_text(text).findings] == [page], text


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("RuntimeError: No CUDA GPUs are available", "gpu_missing", ("fatal", "inspect")),
        ("Error 803: system has unsupported display driver / cuda driver combination", "cuda_driver", ("warning", "inspect")),
        ("RuntimeError: CUDA error: the launch timed out and was terminated", "cuda_hardware", ("fatal", "inspect")),
        ("(Worker_TP1 pid=7) RuntimeError: NVML: GPU is lost", "cuda_hardware", ("fatal", "inspect")),
        ("t07:9:12 [3] NCCL WARN NET/IB : Got completion from peer 198.51.100.4<44> with error 12, opcode 0, len 0, vendor err 129",
         "nccl_net", ("warning", "restart_worker")),
        ("t07:9:12 [3] NCCL WARN NET/IB: Got completion from peer 198.51.100.4<44> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=0",
         "ucx_flushed", ("warning", "restart_worker")),
        ("[rank3]:[F304 05:06:07.1 ProcessGroupNCCL.cpp:9] [PG ID 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds",
         "nccl_timeout", ("fatal", "restart_worker")),
        ("t07:9:12 [3] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 198.51.100.4<44> failed : Connection refused",
         "nccl_peer_gone", ("warning", "restart_worker")),
        ("[1745700389.902821] [t07:6274 :0] ib_device.c:468 UCX  ERROR IB Async event on mlx5_0: device fatal error",
         "nccl_device", ("fatal", "inspect")),
        ("[1745700389.902821] [t07:6274 :0] ucp_worker.c:9 UCX  ERROR Connection reset by remote peer on mlx5_2:1",
         "ucx_retry", ("warning", "restart_worker")),
        ("2026-03-04T05:06:07.1Z ERROR dynamo_runtime: CannotConnect: tcp connect to 198.51.100.4:4000 refused",
         "registry_stale", ("warning", "restart_worker")),
        ("(raylet) A worker died or was killed while executing a task by an unexpected system error.",
         "worker_died", ("fatal", "restart_worker")),
        ("run.sh: line 4:  4411 Killed                  vllm serve /models/m", "proc_killed", ("fatal", "restart_worker")),
        ("Mar 04 05:06:07 t07 systemd[1]: vllm.service: Main process exited, code=dumped, status=11/SEGV",
         "segfault", ("fatal", "restart_worker")),
        (json.dumps({"labels": {"pod": "decode-0"}, "line": "EngineCore encountered a fatal error.", "timestamp": "2026"}),
         "engine_dead", ("fatal", "restart_worker")),
    ],
)  # fmt: skip
def test_serving_lines_of_other_versions(text: str, kind: str, wanted: tuple[str, str]) -> None:
    """What other versions of the serving stack, and what carries their logs, print for the same faults."""
    decoded = decode_text(text)
    assert [f.check for f in decoded.findings] == [f"serving.{kind}"]
    assert said(decoded)[:2] == wanted


def test_sysfs_as_grep_prints_it() -> None:
    """``grep . /sys/class/infiniband/*/ports/*/*`` is read as the probe reads those files."""
    def port(device: str, state: str, phys: str, errors: int = 0) -> str:
        at = f"/sys/class/infiniband/{device}/ports/1"
        return (f"{at}/link_layer:InfiniBand\n{at}/state:{state}\n{at}/phys_state:{phys}\n{at}/rate:400 Gb/sec (4X NDR)\n"
                f"{at}/sm_lid:0x1\n{at}/counters/symbol_error:{errors}\n")  # fmt: skip

    up = port("mlx5_0", "4: ACTIVE", "5: LinkUp") + port("mlx5_1", "4: ACTIVE", "5: LinkUp")
    assert decode_text(up).findings == ()
    for line, check in (
        (port("mlx5_2", "1: DOWN", "2: Polling"), "ib.port_down"), (port("mlx5_2", "2: INIT", "5: LinkUp"), "ib.port_not_set_up"),
        (port("mlx5_2", "4: ACTIVE", "5: LinkUp", 65535), "ib.counter_saturated"),
    ):
        assert [(f.check, f.component.device) for f in decode_text(up + line).findings] == [(check, "ib@mlx5_2")]
