"""Lines of the GPU driver, old and new, whole and cut: what is read from them and how they are judged."""

from __future__ import annotations

import pytest

from probes.catalog import link_rules
from probes.kernel_findings import Place, finding
from probes.nvlink5 import decode
from probes.xid import FallenLine, SxidLine, Unreadable, XidLine, read_line
from sentinel.model import Action, Finding, Kind, Severity, Suspect


def judge(text: str, before: dict[int, float] | None = None, came_with: frozenset[int] = frozenset()) -> Finding:
    line = read_line(text)
    assert line is not None, text
    return finding(line, text, Place("t07", "id", 100.0, before or {}, came_with))


class TestReading:
    @pytest.mark.parametrize(
        ("where", "pci"),
        [
            ("PCI:0009:01:00", "0009:01:00.0"), ("0009:01:00", "0009:01:00.0"), ("PCI:00000018:01:00.0", "0018:01:00.0"),
            ("PCI:0000:D8:00", "0000:d8:00.0"), ("PCI:10018:01:00", "10018:01:00.0"), ("PCI:...", None), ("", None),
        ],
    )
    def test_address(self, where: str, pci: str | None) -> None:
        """Every spelling of an address is one address, and one that was blanked out is none."""
        line = read_line(f"NVRM: Xid ({where}): 62, 00002740 00002b08")
        assert isinstance(line, XidLine)
        assert (line.code, line.pci) == (62, pci)

    @pytest.mark.parametrize(
        ("rest", "pid", "process", "body"),
        [
            (", pid=4711, name=VLLM::Worker, Ch 0000000c", 4711, "VLLM::Worker", "Ch 0000000c"),
            (", pid='<unknown>', name=<unknown>, Ch 1", None, "", "Ch 1"),
            (", pid=<unknown>, Ch 1", None, "", "Ch 1"),
            (", pid=0, GPU has fallen off the bus.", None, "", "GPU has fallen off the bus."),
            (", pid=912,", 912, "", ""),
            (", pid=912, name=a process, ...", 912, "a process", "..."),
            (", 0003 00000000 00008297 00001098", None, "", "0003 00000000 00008297 00001098"),
            ("", None, "", ""),
            (", ", None, "", ""),
        ],
    )
    def test_process_forms(self, rest: str, pid: int | None, process: str, body: str) -> None:
        """The process is read in every form the driver has used, cut lines among them, and pid 0 is nobody."""
        line = read_line(f"NVRM: Xid (PCI:0009:01:00): 38{rest}")
        assert isinstance(line, XidLine)
        assert (line.code, line.pid, line.process, line.body) == (38, pid, process, body)

    def test_mig(self) -> None:
        """MIG instances inside the parentheses do not spoil the address."""
        line = read_line("NVRM: Xid (PCI:0009:01:00 GPU-I:07 GPU-CI:01): 31, pid=5, name=x, MMU Fault")
        assert isinstance(line, XidLine)
        assert (line.pci, line.gpu_instance, line.compute_instance) == ("0009:01:00.0", 7, 1)

    @pytest.mark.parametrize(
        "text",
        [
            "NVRM: GPU 0009:01:00.0: GPU has fallen off the bus.",
            "NVRM: GPU at PCI:0009:01:00: GPU has fallen off the bus.",
            "NVRM: The NVIDIA GPU 0009:01:00.0\nNVRM: (PCI ID: 10de:2941) installed in this system has\n"
            "NVRM: fallen off the bus and is not responding to commands.",
        ],
    )
    def test_fallen_without_a_number(self, text: str) -> None:
        """A GPU that fell off the bus is found without an Xid beside it, and judged as Xid 79, whose number it does not state."""
        assert read_line(text) == FallenLine("0009:01:00.0")
        found = judge(text)
        assert (found.check, found.severity, found.action) == ("xid.79", Severity.FATAL, Action.REBOOT_NODE)
        assert "xid" not in found.facts

    @pytest.mark.parametrize(
        "text",
        [
            "dhclient[757]: DHCPREQUEST for 192.0.2.103 on ens3 (xid=0x3a5ff7ed)",
            "Message says: NVRM: Xid (PCI:0009:01:00): 79, GPU has fallen off the bus.",
            "RPC: server not responding, xid (0x79) fallen off the bus",
            "NVRM: GPU0 nvCheckOkFailedNoLog: Check failed: State in use (0x00000063)",
            "can0: Xid (1): 79, frame dropped",
        ],
    )
    def test_lookalikes(self, text: str) -> None:
        """A line that merely contains the words is nothing."""
        assert read_line(text) is None

    @pytest.mark.parametrize("text", ["NVRM: Xid (PCI:0009:01", "NVRM: Xid (PCI:0009:01:00): ", "NVRM: Xid (PCI:0009:01:00): 7x"])
    def test_half_lines_are_seen(self, text: str) -> None:
        """An Xid line that breaks off before its number is on record as unreadable, and blames the monitor."""
        assert isinstance(read_line(text), Unreadable)
        found = judge(text)
        assert (found.check, found.suspect, found.severity) == ("kernel_log.unreadable", Suspect.MONITOR, Severity.INFO)


class TestJudgement:
    @pytest.mark.parametrize(
        ("code", "severity", "action", "suspect"),
        [
            (13, "info", "restart_worker", "app"), (31, "info", "restart_worker", "app"), (32, "info", "restart_worker", "app"),
            (43, "info", "none", "app"), (45, "info", "none", "app"), (69, "info", "restart_worker", "app"),
            (137, "info", "none", "app"), (63, "info", "none", "self"), (94, "warning", "restart_worker", "self"),
            (48, "fatal", "reset_gpu", "self"), (64, "fatal", "reset_gpu", "self"), (95, "fatal", "reset_gpu", "self"),
            (62, "fatal", "reset_gpu", "self"), (109, "fatal", "reset_gpu", "self"), (119, "fatal", "reset_gpu", "self"),
            (140, "fatal", "reset_gpu", "self"), (79, "fatal", "reboot_node", "self"), (151, "fatal", "reboot_node", "self"),
            (74, "fatal", "reset_gpu", "self"), (121, "warning", "none", "self"), (16, "info", "none", "self"),
            (142, "warning", "contact_support", "self"), (162, "info", "none", "self"), (777, "warning", "inspect", "self"),
        ],
    )
    def test_catalogue(self, code: int, severity: str, action: str, suspect: str) -> None:
        """Each bucket of the vendor's catalogue comes out as one severity, action and suspect; an unknown code is inspected."""
        found = judge(f"NVRM: Xid (PCI:0009:01:00): {code}, pid=1, name=a, text")
        assert (found.check, found.severity, found.action, found.suspect) == (f"xid.{code}", severity, action, suspect)
        assert (found.kind, found.facts["xid"], str(found.component)) == (Kind.EVENT, code, "t07/gpu@0009:01:00.0")
        assert found.summary.endswith(".")

    def test_application_faults_never_touch_hardware(self) -> None:
        """Whatever blames the application asks for no more than a new worker."""
        for code in range(1, 400):
            found = judge(f"NVRM: Xid (PCI:0009:01:00): {code}, text")
            if found.suspect is Suspect.APP:
                assert found.action in (Action.NONE, Action.RESTART_WORKER)
                assert found.severity is Severity.INFO

    def test_no_address_no_gpu(self) -> None:
        """A line without a usable address is about the driver; no GPU is guessed."""
        found = judge("NVRM: Xid (PCI:...): 79, GPU has fallen off the bus.")
        assert (str(found.component), found.component.gpu) == ("t07/driver", None)

    @pytest.mark.parametrize(
        ("to", "severity", "action", "present"),
        [
            ("0x0 (None)", "info", "undrain", False), ("0x1 (GPU Reset Required)", "fatal", "reset_gpu", True),
            ("0x2 (OS Reboot)", "fatal", "reboot_node", True), ("0x3 (Drain P2P)", "warning", "restart_worker", True),
            ("0x4 (Drain and Reset)", "fatal", "reset_gpu", True), ("0x5 (anything)", "warning", "restart_imex", True),
            ("0x2 (renamed once more)", "fatal", "reboot_node", True), ("0x2f (new)", "fatal", "inspect", True),
        ],
    )
    def test_recovery_action_by_number(self, to: str, severity: str, action: str, present: bool) -> None:
        """Xid 154 is decided by its number, whatever the words; 0x0 takes back, and an unknown number goes to a person."""
        found = judge(f"NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to {to}")
        assert (found.severity, found.action, found.present, found.kind) == (severity, action, present, Kind.STATE)

    def test_recovery_action_cut(self) -> None:
        """A 154 that breaks off before its number is a person's matter, never a recovery."""
        found = judge("NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to")
        assert (found.present, found.severity, found.action) == (True, Severity.FATAL, Action.INSPECT)

    def test_teardown_is_an_echo(self) -> None:
        """Xid 45 after another Xid of its GPU names it; alone it is an ended process; by a peer's fault it blames the peer."""
        line = "NVRM: Xid (PCI:0009:01:00): 45, pid=7, name=python3, Ch 0000000c"
        assert judge(line, before={62: 1.0}).facts["caused_by"] == 62
        assert "caused_by" not in judge(line, before={62: 99.0}).facts
        peer = judge(line + " caused by previous Xid 145")
        assert (peer.severity, peer.action, peer.suspect) == (Severity.WARNING, Action.RESTART_WORKER, Suspect.PEER)
        own = judge(line + " caused by previous Xid 145", before={145: 1.0})
        assert (own.severity, own.action) == (Severity.INFO, Action.NONE)

    def test_contained_memory_error(self) -> None:
        """An uncorrectable error that 94 contained costs one worker; with 95 beside it, or alone, the GPU must be reset."""
        line = "NVRM: Xid (PCI:0009:01:00): 48, An uncorrectable double bit error (DBE) has been detected"
        assert judge(line).action is Action.RESET_GPU
        assert judge(line, came_with=frozenset({48, 94})).action is Action.RESTART_WORKER
        assert judge(line, came_with=frozenset({48, 94, 95})).severity is Severity.FATAL
        remapped = judge(line, came_with=frozenset({48, 63, 94}))
        assert (remapped.severity, remapped.action, remapped.facts["drain"]) == (Severity.WARNING, Action.RESET_GPU, "later")

    def test_driver_asks_for_the_reset(self) -> None:
        """``RST: Yes`` is the driver's own verdict and outranks the mild reading of a contained error."""
        mild = judge("NVRM: Xid (PCI:0009:01:00): 94, pid=3, Contained: SM (0x1). RST: No, D-RST: No")
        hard = judge("NVRM: Xid (PCI:0009:01:00): 94, pid=3, Contained: SM (0x1). RST: Yes, D-RST: No")
        assert (mild.action, hard.action) == (Action.RESTART_WORKER, Action.RESET_GPU)


class TestNvlink5:
    def line(self, code: int, body: str) -> Finding:
        return judge(f"NVRM: Xid (PCI:0018:01:00): {code}, pid=31, name=nv-hostengine, {body}")

    def test_both_layouts(self) -> None:
        """The same event is recognised by the layout before R575 and by the one since."""
        old = self.line(145, "RLW_SRC_TRACK Nonfatal XC1 i0 Link 05 (0x000000e2 0x00000004 0x00000000)")
        new = self.line(145, "RLW_SRC_TRACK Nonfatal XC1 i0 Link 05 (0x00000007 0x00000004 0x00000000)")
        assert (old.facts["layout"], new.facts["layout"]) == ("v1", "v2")
        for found in (old, new):
            assert (found.severity, found.action, found.suspect) == (Severity.WARNING, Action.WAIT, Suspect.PEER)
            assert str(found.component) == "t07/gpu@0018:01:00.0/nvlink5"

    def test_layouts_never_conflict(self) -> None:
        """No word with one status is judged one way by one layout and another way by the other: trying both is safe."""
        rules = link_rules()
        for a in rules:
            for b in rules:
                status = a.status is None or b.status is None or a.status & b.status
                both = a.v1[0] & b.v2[0]
                if a.xid == b.xid and a.units != b.units and a.bucket != b.bucket and status and a.v1[1] & both == b.v2[1] & both:
                    pytest.fail(f"{a} and {b}")

    def test_peer_went_down(self) -> None:
        """Where the far end went down first, the reporter is a victim: a reset, and no blame."""
        found = self.line(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x021005c6 0x00000000 0x00000000)")
        assert (found.severity, found.action, found.suspect) == (Severity.FATAL, Action.RESET_GPU, Suspect.PEER)
        assert found.facts["reason"] == 0x21

    def test_signal_integrity(self) -> None:
        """A link that went down for its signal is this link's own fault, on this link's component."""
        found = self.line(149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 11 (0x00a5c5c6 0x00000000 0x00000000")
        assert (found.severity, found.suspect, found.facts["links"]) == (Severity.FATAL, Suspect.SELF, [11])
        assert found.component.part == "nvlink11"
        assert found.facts["follow_up"] == "investigate_link_si"

    def test_promoted(self) -> None:
        """The sheet's second action: the same event promoted by its leading bit asks for a reset."""
        assert self.line(145, "RLW_RXPIPE Nonfatal XC0 i0 Link 02 (0x000000c2 0x00000001)").action is Action.NONE
        assert self.line(145, "RLW_RXPIPE Nonfatal XC0 i0 Link 02 (0x000004c2 0x00000001)").action is Action.RESET_GPU

    def test_injected(self) -> None:
        """An injected event is on record, as such, and asks for nothing."""
        found = self.line(149, "NETIR_LINK_EVT Fatal XC0 i1 Link 08 (0x004505c6 0x00000000 0x00000000)")
        assert (found.severity, found.action, found.facts["injected"]) == (Severity.INFO, Action.NONE, True)

    @pytest.mark.parametrize("words", ["", " (...)", " (0x3fffffff 0x12345678 0x0)", " (garbage"])
    def test_the_lines_own_word(self, words: str) -> None:
        """Without words that a row fits, Fatal is a reset and Nonfatal is not."""
        assert self.line(146, f"TLW_RX_PIPE1 Fatal XC0 i0 Link 04{words}").action is Action.RESET_GPU
        found = self.line(146, f"TLW_RX_PIPE1 Nonfatal XC0 i0 Link 04{words}")
        assert (found.severity, found.action) == (Severity.WARNING, Action.NONE)
        assert found.certainty < 1

    def test_gpu_fatal_is_the_gpus(self) -> None:
        """A GPU-fatal event drops every link, so it is about the GPU and only mentions the link."""
        found = self.line(144, "SAW_MVB Fatal XC0 i0 Link 03 (0x00000001 0x00000002 0x0)")
        assert (str(found.component), found.facts["links"]) == ("t07/gpu@0018:01:00.0", [3])
        assert decode(150, "MSE_WATCHDOG Fatal XC0 i0 Link -1").whole_gpu

    def test_no_word_at_all(self) -> None:
        """A line that says neither Fatal nor Nonfatal is for a person, never silent."""
        found = self.line(149, "something new on Link 07")
        assert (found.severity, found.action, found.component.part) == (Severity.WARNING, Action.INSPECT, "nvlink7")


class TestSwitch:
    def test_the_lines_own_word_wins(self) -> None:
        """Non-fatal in the line outranks a table that calls the code fatal; raw words alone say nothing."""
        at = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028"
        assert judge(f"{at}, Non-fatal, Link 32 egress non-posted PRIV error (First)").action is Action.NONE
        assert judge(f"{at}, Data {{0x000001c0, 0x00bd5c8a}}").severity is Severity.WARNING
        fatal = judge(f"{at}, Fatal, Link 32 egress non-posted PRIV error (First)")
        assert (fatal.severity, fatal.suspect) == (Severity.FATAL, Suspect.SWITCH)
        assert str(fatal.component) == "t07/nvswitch@0000:05:00.0/link32"

    def test_severity_by_number(self) -> None:
        """``Severity 1`` is fatal and ``Severity 0`` is not (nvswitch's own enumeration)."""
        at = "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 24007"
        for number, fatal in (("0", False), ("1", True)):
            line = read_line(f"{at}, Severity {number} Engine instance 12 Sub-engine instance 00")
            assert isinstance(line, SxidLine)
            assert line.fatal is fatal

    def test_without_a_link(self) -> None:
        """A switch's firmware that halts is found although its line names no link and no severity."""
        assert judge("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 26006, SOE HALTED").severity is Severity.FATAL


class TestLinesWithoutANumber:
    @pytest.mark.parametrize(
        ("text", "check", "component", "severity", "action"),
        [
            ("NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!",
             "nvlink.rx_detect_failed", "t07/driver", "fatal", "reboot_node"),
            ("NVRM: GPU 0009:01:00.0: RmInitAdapter failed! (0x62:0x55:2477)",
             "gpu.init_failed", "t07/gpu@0009:01:00.0", "fatal", "reboot_node"),
            ("mlx5_core 0000:c1:00.0: poll_health:852:(pid 0): device's health compromised - reached miss count",
             "nic.health_lost", "t07/nic@0000:c1:00.0", "fatal", "reboot_node"),
            ("mlx5_core 0000:c1:00.0: print_health_info:458:(pid 0): synd 0x8: unrecoverable hardware error",
             "nic.unrecoverable", "t07/nic@0000:c1:00.0", "fatal", "contact_support"),
            ("mlx5_core 0000:c1:00.0: wait_func:1146:(pid 9): CREATE_EQ(0x301) timeout. Will cause a leak of a command resource",
             "nic.command_stuck", "t07/nic@0000:c1:00.0", "fatal", "reboot_node"),
            ("NETDEV WATCHDOG: enp3s0 (mlx5_core): transmit queue 4 timed out",
             "nic.tx_timeout", "t07/nic@enp3s0", "warning", "none"),
            ("INFO: task nvidia-smi:4055 blocked for more than 120 seconds.",
             "driver.task_blocked", "t07/driver", "warning", "inspect"),
        ],
    )  # fmt: skip
    def test_known(self, text: str, check: str, component: str, severity: str, action: str) -> None:
        """A line that has no number is judged by its row in the catalogue."""
        found = judge(text)
        assert (found.check, str(found.component), found.severity, found.action) == (check, component, severity, action)

    @pytest.mark.parametrize(
        "text",
        [
            "mlx5_core 0000:41:00.1: Port module event: module 1, Cable unplugged",
            "mlx5_core 0000:41:00.0: mlx5_cmd_out_err:816:(pid 7): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3)",
            "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link INIT",
            "INFO: task kworker/13:2:4055883 blocked for more than 120 seconds.",
            "NVRM: GPU1 kbifCacheVFInfo_GB100: Unable to read NV_PF0_INITIAL_AND_TOTAL_VFS",
        ],
    )
    def test_harmless(self, text: str) -> None:
        """What is normal on a healthy node is nothing."""
        assert read_line(text) is None
