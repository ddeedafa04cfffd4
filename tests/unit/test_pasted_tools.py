"""What NVIDIA's tools and other monitors print, pasted: the same values as a live reading, the same judgement, and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from probes import smi
from probes.decode import Decoded, decode_text
from sentinel.testing.nvml import FakeDriver
from sentinel.testing.nvml_kinds import h200
from sentinel.testing.nvml_state import FakeState

QUERY = """
==============NVSMI LOG==============

Timestamp                                              : Tue Jun  2 09:49:44 2026
Driver Version                                         : 580.95.05
CUDA Version                                           : 13.0

Attached GPUs                                          : 1
GPU 00000000:00:06.0
    Product Name                                       : NVIDIA H200
    Product Architecture                               : Hopper
    Serial Number                                      : 1650000000001
    GPU UUID                                           : GPU-00000000-0000-4000-8000-000000000001
    GPU Recovery Action                                : {recovery}
    PCI
        Bus                                            : 0x00
        GPU Link Info
            PCIe Generation
                Max                                    : 5
                Current                                : 5
            Link Width
                Max                                    : 16x
                Current                                : 16x
        Replays Since Reset                            : 0
    Clocks Event Reasons
        Idle                                           : Active
        SW Power Cap                                   : Not Active
        HW Slowdown                                    : {slow}
            HW Thermal Slowdown                        : Not Active
            HW Power Brake Slowdown                    : {slow}
        SW Thermal Slowdown                            : Not Active
    Utilization
        GPU                                            : 0 %
        Memory                                         : 0 %
    ECC Mode
        Current                                        : Enabled
    ECC Errors
        Volatile
            SRAM Correctable                           : 0
            SRAM Uncorrectable Parity                  : 0
            SRAM Uncorrectable SEC-DED                 : 0
            DRAM Correctable                           : 0
            DRAM Uncorrectable                         : {uncorrected}
        Aggregate
            DRAM Uncorrectable                         : 7
            SRAM Threshold Exceeded                    : No
        Channel Repair Pending                         : No
        TPC Repair Pending                             : No
    Remapped Rows
        Correctable Error                              : 0
        Uncorrectable Error                            : 0
        Pending                                        : {pending}
        Remapping Failure Occurred                     : {failure}
        Bank Remap Availability Histogram
            Max                                        : 3072 bank(s)
            High                                       : 0 bank(s)
            Partial                                    : 0 bank(s)
            Low                                        : 0 bank(s)
            None                                       : 0 bank(s)
    Temperature
        GPU Current Temp                               : 37 C
        GPU T.Limit Temp                               : 50 C
        Memory Current Temp                            : 40 C
    GPU Power Readings
        Average Power Draw                             : 80.33 W
        Instantaneous Power Draw                       : 80.13 W
        Current Power Limit                            : 700.00 W
    Fabric
        State                                          : {state}
        Status                                         : {status}
        CliqueId                                       : 0
        ClusterUUID                                    : 00000000-0000-0000-0000-000000000000
        Health
            Summary                                    : N/A
            Bandwidth                                  : {bandwidth}
            Route Recovery in progress                 : {recovering}
            Route Unhealthy                            : {route}
            Access Timeout Recovery                    : N/A
            Incorrect Configuration                    : {wrong}
            Partition Assigned                         : {assigned}
    Processes                                          : None

"""
HEALTHY = {"recovery": "None", "slow": "Not Active", "uncorrected": "0", "pending": "No", "failure": "No", "state": "Completed",
           "status": "Success", "bandwidth": "N/A", "recovering": "N/A", "route": "N/A", "wrong": "N/A",
           "assigned": "N/A"}  # fmt: skip


def query(**changed: str) -> str:
    return QUERY.format(**{**HEALTHY, **changed})


def xml(**changed: str) -> str:
    v = {**HEALTHY, **changed}
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
	<driver_version>580.95.05</driver_version>
	<gpu id="00000000:00:06.0">
		<product_name>NVIDIA H200</product_name>
		<product_architecture>Hopper</product_architecture>
		<serial>1650000000001</serial>
		<uuid>GPU-00000000-0000-4000-8000-000000000001</uuid>
		<gpu_recovery_action>{v["recovery"]}</gpu_recovery_action>
		<pci><pci_gpu_link_info>
			<pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
			<link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
		</pci_gpu_link_info><replay_counter>0</replay_counter></pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_hw_slowdown>{v["slow"]}</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_power_brake_slowdown>{v["slow"]}</clocks_event_reason_hw_power_brake_slowdown>
		</clocks_event_reasons>
		<utilization><gpu_util>0 %</gpu_util></utilization>
		<ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
		<ecc_errors><volatile>
			<sram_uncorrectable_parity>0</sram_uncorrectable_parity><sram_uncorrectable_secded>0</sram_uncorrectable_secded>
			<dram_uncorrectable>{v["uncorrected"]}</dram_uncorrectable>
		</volatile><aggregate><sram_threshold_exceeded>No</sram_threshold_exceeded></aggregate>
			<channel_repair_pending>No</channel_repair_pending><tpc_repair_pending>No</tpc_repair_pending></ecc_errors>
		<remapped_rows>
			<remapped_row_corr>0</remapped_row_corr><remapped_row_unc>0</remapped_row_unc>
			<remapped_row_pending>{v["pending"]}</remapped_row_pending><remapped_row_failure>{v["failure"]}</remapped_row_failure>
			<row_remapper_histogram>
				<row_remapper_histogram_max>3072 bank(s)</row_remapper_histogram_max>
				<row_remapper_histogram_high>0 bank(s)</row_remapper_histogram_high>
				<row_remapper_histogram_partial>0 bank(s)</row_remapper_histogram_partial>
				<row_remapper_histogram_low>0 bank(s)</row_remapper_histogram_low>
				<row_remapper_histogram_none>0 bank(s)</row_remapper_histogram_none>
			</row_remapper_histogram>
		</remapped_rows>
		<temperature><gpu_temp>37 C</gpu_temp><gpu_temp_tlimit>50 C</gpu_temp_tlimit><memory_temp>40 C</memory_temp></temperature>
		<gpu_power_readings><average_power_draw>80.33 W</average_power_draw><instant_power_draw>80.13 W</instant_power_draw>
			<current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
		<fabric>
			<state>{v["state"]}</state><status>{v["status"]}</status><cliqueId>0</cliqueId>
			<clusterUuid>00000000-0000-0000-0000-000000000000</clusterUuid>
			<health><summary>N/A</summary><bandwidth>{v["bandwidth"]}</bandwidth>
				<route_recovery_in_progress>{v["recovering"]}</route_recovery_in_progress>
				<route_unhealthy>{v["route"]}</route_unhealthy>
				<access_timeout_recovery>N/A</access_timeout_recovery><incorrect_configuration>{v["wrong"]}</incorrect_configuration>
				<partition_assigned>{v["assigned"]}</partition_assigned></health>
		</fabric>
	</gpu>
</nvidia_smi_log>
"""


def table(temp: str = "37C", perf: str = "P0", power: str = "81W", ecc: str = "0") -> str:
    return f"""| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
|   0  NVIDIA H200                    On  |   00000000:00:06.0 Off | {ecc:>20} |
| N/A  {temp:>5}    {perf:>4}         {power:>6} /  700W |       0MiB / 143771MiB |      0%      Default |
|                                         |                        |             Disabled |
"""


def gpus_of(text: str) -> list[dict[str, Any]]:
    return [dict(g) for r in smi.read(text, "t01") for g in r.data["gpus"]]


def said(text: str) -> dict[str, tuple[str, str]]:
    """What the readers of this module say; a sentence that an engine would print, too, is also read as one of its."""
    found = decode_text(text).findings
    return {f.check: (f.severity.value, f.action.value) for f in found if not f.check.startswith("serving.")}


def verdict(decoded: Decoded) -> tuple[str, str]:
    return decoded.verdict.severity.value, decoded.verdict.action.value


class TestSameReading:
    def test_text_and_xml_are_one_reading(self) -> None:
        """``-q`` and ``-q -x`` of the same GPU give equal values."""
        for changed in ({}, {"recovery": "Drain and Reset", "route": "True", "bandwidth": "Degraded", "pending": "Yes"},
                        {"state": "In Progress", "status": "N/A", "assigned": "False",
                         "wrong": "Insufficient NVLinks"}):  # fmt: skip
            assert gpus_of(query(**changed)) == gpus_of(xml(**changed))

    def test_pasted_values_are_the_live_ones(self) -> None:
        """Every value that a paste gives is the one that NVML gives for the same GPU."""
        live = asyncio.run(FakeDriver(FakeState(gpus=[h200()])).read())["gpus"][0]
        (pasted,) = gpus_of(query())
        known = pasted.keys() - {"index", "unread", "serial", "power_average_mw", "power_instant_mw"}
        assert len(known) > 20
        assert {k: pasted[k] for k in known} == {k: live[k] for k in known}

    def test_outputs_come_together(self) -> None:
        """Table, query, links of one text are one GPU, known by address, UUID and index."""
        links = "GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-4000-8000-000000000001)\n" + "".join(
            f"\t Link {i}: 26.562 GB/s\n" for i in range(18))
        (gpu,) = gpus_of(table() + query() + links)
        assert (gpu["pci"], gpu["index"], gpu["links"], gpu["link_speed_mbps"][3]) == ("0000:00:06.0", 0, [1] * 18, 26562)

    def test_errors_of_links(self) -> None:
        """``nvlink -e`` is summed over links as the GPU's own totals are; rates keep the worst, packed."""
        text = "GPU 0: NVIDIA B200 (UUID: GPU-7)\n" + "".join(
            f"\t Link {i}: Symbol Errors: {i}\n\t Link {i}: Link recovery failed events: 0\n"
            f"\t Link {i}: FEC Errors - 0: 36140749276\n\t Link {i}: Effective BER: 15e-{255 - i}\n" for i in range(3))
        (gpu,) = gpus_of(text)
        assert gpu["link_totals"] == {"symbol_errors": 3, "recovery_failed": 0, "effective_ber": 15 << 8 | 253}


class TestJudged:
    @pytest.mark.parametrize("text", [query(), xml(), table(), query() + table(), table(ecc="N/A"), table(power="ERR!")])
    def test_healthy_is_nothing(self, text: str) -> None:
        """A healthy GPU in any form is nothing of note; nor is one odd ERR!."""
        assert decode_text(text).findings == ()

    @pytest.mark.parametrize("form", [query, xml])
    @pytest.mark.parametrize(
        ("changed", "check", "wanted"),
        [
            ({"recovery": "Reset"}, "gpu.recovery_action", ("fatal", "reset_gpu")),
            ({"recovery": "Reboot"}, "gpu.recovery_action", ("fatal", "reboot_node")),
            ({"recovery": "Drain P2P"}, "gpu.recovery_action", ("warning", "restart_worker")),
            ({"recovery": "Drain and Reset"}, "gpu.recovery_action", ("fatal", "reset_gpu")),
            ({"recovery": "Something New"}, "gpu.recovery_action", ("warning", "inspect")),
            ({"pending": "Yes"}, "gpu.row_remap_pending", ("warning", "reset_gpu")),
            ({"failure": "Yes"}, "gpu.row_remap_failure", ("fatal", "contact_support")),
            ({"uncorrected": "2"}, "gpu.ecc_uncorrected", ("warning", "reset_gpu")),
            ({"slow": "Active"}, "gpu.clocks_slowdown", ("warning", "inspect")),
            ({"state": "In Progress", "status": "N/A"}, "gpu.fabric_joining", ("warning", "wait")),
            ({"status": "Insufficient Resources"}, "gpu.fabric_state", ("fatal", "restart_fabric_manager")),
            ({"route": "True"}, "gpu.fabric_health", ("fatal", "inspect")),
            ({"recovering": "True"}, "gpu.fabric_health", ("warning", "none")),
            ({"wrong": "No Partition"}, "gpu.fabric_health", ("fatal", "inspect")),
        ],
    )
    def test_one_fault(self, form: Any, changed: dict[str, str], check: str, wanted: tuple[str, str]) -> None:
        """One row that is wrong is one finding, with the severity and action of the live probe."""
        found = said(form(**changed))
        assert found == {check: wanted}

    def test_good_words_are_not_bad(self) -> None:
        """False, Full and None are the healthy words of the health block."""
        fine = query(bandwidth="Full", recovering="False", route="False", wrong="None", assigned="True")
        assert decode_text(fine).findings == ()
        assert gpus_of(fine)[0]["fabric_health_mask"] == 0x112A

    def test_a_part_is_enough(self) -> None:
        """Blocks and rows that somebody grepped for, of several GPUs, are so many unnamed GPUs."""
        block = "    Fabric\n        State             : {}\n        Status            : {}\n"
        blocks = block.format("Completed", "Success") * 2 + block.format("Not Started", "N/A")
        assert [g["fabric_state"] for g in gpus_of(blocks)] == [3, 3, 1]
        rows = "    GPU Recovery Action      : None\n    GPU Recovery Action      : Reset\n"
        assert [g["recovery_action"] for g in gpus_of(rows)] == [0, 1]
        assert verdict(decode_text(rows)) == ("fatal", "reset_gpu")

    def test_however_it_was_copied(self) -> None:
        """Line ends, colours, a byte order mark and a host before every line change no value."""
        coloured = "\ufeff" + query().replace("GPU 0", "\x1b[4mGPU 0")
        for text in (query().replace("\n", "\r\n"), coloured, xml().replace("\n", "\r\n")):
            assert gpus_of(text) == gpus_of(query())
        assert gpus_of("".join(f"t07: {line}\n" for line in table().splitlines())) == gpus_of(table())

    def test_query_fields(self) -> None:
        """CSV of ``--query-gpu`` names its GPUs by what its columns say."""
        text = "pci.bus_id, gpu_recovery_action, remapped_rows.pending\n00000008:01:00.0, None, No\n00000009:01:00.0, None, Yes\n"
        (finding,) = decode_text(text).findings
        assert (finding.check, finding.component.gpu) == ("gpu.row_remap_pending", "0009:01:00.0")


class TestLinks:
    HEAD = "GPU {}: NVIDIA {} (UUID: GPU-0{})\n"

    def test_inactive(self) -> None:
        """An inactive link of a board whose links all end at switches is down; of one without a bridge it is unused."""
        text = self.HEAD.format(0, "GB200", 1) + "\t Link 0: 53.125 GB/s\n\t Link 1: <inactive>\n"
        assert [str(f.component) for f in decode_text(text).findings] == ["pasted/gpu@GPU-01/nvlink1"]
        for name in ("A100 80GB PCIe", "H100 PCIe", "H100 NVL", "RTX 6000 Ada Generation"):
            assert decode_text(text.replace("GB200", name)).findings == ()

    def test_all_down(self) -> None:
        """The sentence that stands where the links should be means that all are down, unless the board may have none."""
        sentence = "NVML: Unable to retrieve NVLink information as all links are inActive\n"
        for text in (sentence, self.HEAD.format(2, "B200", 3) + sentence):
            assert decode_text(text).verdict.severity.value == "fatal"
        assert decode_text(self.HEAD.format(0, "A40", 1) + sentence).findings == ()

    def test_cut_lists(self) -> None:
        """Links that were left out of a paste are not down."""
        assert decode_text(self.HEAD.format(0, "GB200", 1) + "\t Link 0: 53.125 GB/s\n\t Link 17: 53.125 GB/s\n").findings == ()


class TestSentences:
    @pytest.mark.parametrize(
        ("text", "check", "wanted"),
        [
            ("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU",
             "gpu.lost", ("fatal", "reboot_node")),
            ("Unable to determine the device handle for GPU0: 0000:3B:00.0: Unknown Error", "gpu.lost", ("fatal", "reboot_node")),
            ("Unable to determine the device handle for GPU 0000:3B:00.0: GPU requires reset", "gpu.recovery_action",
             ("fatal", "reset_gpu")),
            ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95", "driver.version_mismatch",
             ("warning", "reboot_node")),
            ("Failed to initialize NVML: Unknown Error", "driver.unusable", ("warning", "restart_worker")),
            ("Failed to initialize NVML: Insufficient Permissions", "driver.unusable", ("warning", "fix_monitor")),
            ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure …", "driver.missing",
             ("warning", "inspect")),
            ("No devices were found", "gpu.none_found", ("warning", "inspect")),
            ("The following GPUs could not be reset:\n  GPU 00000000:3B:00.0: In use by another client\n", "gpu.reset_refused",
             ("fatal", "reboot_node")),
            (table(temp="ERR!", perf="ERR!", power="ERR!"), "gpu.unreadable", ("warning", "inspect")),
        ],
    )  # fmt: skip
    def test_what_the_tool_says(self, text: str, check: str, wanted: tuple[str, str]) -> None:
        """A tool that cannot look says why, and that is judged by the number behind its words."""
        assert said(text) == {check: wanted}
        assert verdict(decode_text(text)) == wanted

    def test_an_address_that_is_none(self) -> None:
        """An address that no device can have is kept as text and accuses no GPU."""
        (finding,) = decode_text("Unable to determine the device handle for GPU 000:C1:80.0: Unknown Error").findings
        assert (finding.check, finding.component.gpu) == ("gpu.lost_unnamed", None)
        assert "000:C1:80.0" in finding.evidence[0]

    @pytest.mark.parametrize(
        "text",
        [
            'time="2026-05-12T17:31:12Z" level=error msg="Failed to initialize NVML: Unknown Error"',
            "the runbook says: No devices were found",
            "# GPU Recovery Action is what you look at",
            "0           N/A161262243332996445",
        ],
    )
    def test_quoted_is_not_said(self, text: str) -> None:
        """The same words inside another program's line are no output of the tool."""
        assert decode_text(text).findings == ()


class TestMonitors:
    def test_mask_of_health(self) -> None:
        """A mask is read by its fields: 2 is well, 1 is not; each line is a GPU of its own unless labels name it."""
        line = 'DCGM_FI_DEV_FABRIC_HEALTH_MASK{{gpu="{0}",UUID="GPU-{0}"}} {1}\n'
        assert decode_text(line.format(0, 426) + line.format(1, 0) + line.format(2, "0x80")).findings == ()
        (finding,) = decode_text(line.format(0, 426) + line.format(1, 0x19A)).findings
        assert (finding.check, str(finding.component), finding.severity.value) == ("gpu.fabric_health", "pasted/gpu@GPU-1", "fatal")
        assert decode_text("DCGM_FI_DEV_FABRIC_HEALTH_MASK 9223372036854775794\n").findings == ()  # blank: not measured

    def test_a_gauge_is_a_hint(self) -> None:
        """The gauge of the last Xid is about the monitor; nothing is done on its word, and zero is nothing."""
        decoded = decode_text('DCGM_FI_DEV_XID_ERRORS{gpu="3",UUID="GPU-3"} 79\n')
        assert [(f.check, f.suspect.value, f.facts["xid"]) for f in decoded.findings] == [("monitor.xid_gauge", "monitor", 79)]
        assert verdict(decoded) == ("warning", "none")
        assert decode_text('DCGM_FI_DEV_XID_ERRORS{gpu="3",UUID="GPU-3"} 0\n').findings == ()

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("| Overall Health            | Failure           |\n|    -> NVLINK system       | Failure |", ("info", "none")),
            ("ErrorCode:DCGM_FR_NVLINK_DOWN GPU:3 isFatal: true Recommended Action=RESTART_VM", ("info", "none")),
            ('level=error msg="Failed to collect: Host engine connection invalid/disconnected"', ("warning", "fix_monitor")),
            ("2026/08/10 19:09:42 XidCriticalError: Xid=31 on Device=GPU-5, it goes unhealthy.", ("info", "restart_worker")),
            ("2026/08/10 19:09:42 XidCriticalError: Xid=79 on Device=GPU-5, it goes unhealthy.", ("warning", "inspect")),
        ],
    )
    def test_a_verdict_is_not_the_fault(self, text: str, wanted: tuple[str, str]) -> None:
        """Another monitor's verdict raises no fault; one that is blind is to be mended."""
        decoded = decode_text(text)
        assert verdict(decoded) == wanted
        assert {f.suspect.value for f in decoded.findings} == {"monitor"}


class TestFabricLogs:
    STAMP = "[Sep 02 2026 09:11:40] [ERROR] [tid 4711] "

    @pytest.mark.parametrize(
        ("text", "check", "wanted"),
        [
            (STAMP + "fabric manager NVIDIA GPU driver interface version 580.95.05 don't match with driver version 580.82.07.",
             "fabric_manager.version", ("warning", "restart_fabric_manager")),
            (STAMP + "detected number of NVSwitches don't match with any supported system topology, aborting fabric manager",
             "fabric_manager.switches", ("fatal", "inspect")),
            ("Nov 15 14:15:47 t07 nv-fabricmanager[4177]: request to query NVSwitch device information failed with error:"
             "WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]", "fabric_manager.no_switch", ("warning", "inspect")),
            (STAMP + "Node disconnect event detected for node 4 with address 10.3.0.5, attempting to recover", "imex.peer_left",
             ("warning", "restart_worker")),
            (STAMP.replace("ERROR", "INFO") + "Received notification of shutdown from node 4 - 10.3.0.5", "imex.peer_shutdown",
             ("info", "none")),
        ],
    )  # fmt: skip
    def test_lines(self, text: str, check: str, wanted: tuple[str, str]) -> None:
        """A daemon's own line is explained, with its repeats counted."""
        (finding,) = decode_text(f"{text}\n{text}\r\n").findings
        assert (finding.check, (finding.severity.value, finding.action.value), finding.count) == (check, wanted, 2)

    def test_healthy_and_quoted(self) -> None:
        """Lines of a daemon that starts, and a chat that quotes one, say nothing."""
        text = ("Jan 05 14:45:28 t07 nv-fabricmanager[1120]: Successfully configured all the available NVSwitches.\n"
                "[Sep 18 2026 06:40:33] [INFO] [tid 77] IMEX version 580.95.05 is running with these options:\n"
                "they said: Node disconnect event detected for node 4")  # fmt: skip
        assert decode_text(text).findings == ()

    def test_switch_errors_are_sxids(self) -> None:
        """Fabric Manager's word for an NVSwitch error is the SXid, whichever way it names the node."""
        line = self.STAMP + "detected NVSwitch fatal error 20034 on {} 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3"
        assert {f.check for where in ("fid", "NodeId") for f in decode_text(line.format(where)).findings} == {"sxid.20034"}


class TestXml:
    def test_entities_are_refused(self) -> None:
        """A document with a type of its own is not read on: no entity is ever expanded."""
        bomb = ('<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><nvidia_smi_log>'
                '<gpu id="00000000:01:00.0"><gpu_recovery_action>Reset</gpu_recovery_action><uuid>&b;</uuid></gpu>')
        assert decode_text(bomb).findings == ()

    def test_deep_and_wide(self) -> None:
        """Depth and number of elements are bounded; what came before stays."""
        fault = xml(recovery="Reset").replace("</nvidia_smi_log>", "")
        for tail in ("<a>" * 100_000, "<a></a>" * 300_000, "<gpu id='x'>" + "y" * 1_000_000):
            assert said(fault + tail) == {"gpu.recovery_action": ("fatal", "reset_gpu")}

    def test_cut_off(self) -> None:
        """A document whose end is missing gives what it holds, at any place of the cut."""
        whole = xml(recovery="Reset")
        assert said(whole[: whole.index("<fabric>")]) == {"gpu.recovery_action": ("fatal", "reset_gpu")}
        for cut in range(0, len(whole), 97):
            decode_text(whole[:cut])
