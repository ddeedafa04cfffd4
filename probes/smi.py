"""What nvidia-smi and DCGM's metrics print, pasted, as readings of the gpu probe.

This module exists so that an operator's paste gets the judgement of the live probe. What always holds:

* One text is one look at one machine: what its outputs say about a GPU comes together in one reading.
* The gpu probe's own ``assess`` judges. A paste differs from a live look in three ways, all of them here: it is seen once, so
  what must repeat to be believed is taken at the paster's word; counters of this driver load are compared with the zero that
  they began at; a GPU may be named by its UUID or index only, or not at all.
* Only what is wrong comes out: one look cannot say that something ended. Nothing of it can drain; only live probes do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from probes import Context
from probes import smi_values as v
from probes.gpu import GpuProbe
from probes.judging import Judge
from probes.profile import expected_for
from probes.smi_lines import Lines
from probes.smi_query import Query, read_xml
from probes.smi_values import Gpus
from probes.thresholds import limits
from sentinel.model import Action, Component, Finding, Kind, Reading, Severity, Suspect

LINE_CHARS = 4096
# Counters of ``nvlink -e`` that are zero on a link that was always well; the others count traffic, or follow from these.
COUNTED = frozenset({
    "malformed_packets", "buffer_overruns", "receive_errors", "receive_remote_errors", "receive_general_errors",
    "local_integrity_errors", "recovery_successful", "dl_recovery", "symbol_errors",
})  # fmt: skip
_MARKS = (
    "NVSMI LOG", "NVIDIA-SMI", "nvidia_smi_log", "GPU Recovery Action", "gpu_recovery_action", "remapped_rows", "Remapped Rows",
    "Fabric\n", "Fabric\r", "Fabric ", "device handle for ", "initialize NVML", "No devices ", "not be reset",
    "all links are in", "(UUID: ", "Link 0: ", " GB/s", "DCGM_FI_DEV_", "fabric_states", "ecc.errors.", "ECC Errors",
    "Clocks Event Reasons", "Clocks Throttle Reasons", "GPU Reset couldn't", "Resetting GPU", "Unable to reset",
    "in use by another process", "Product Name", "fabric.state", "ERR!", "<inactive>", "SRAM Threshold", "Remapping Failure",
    "Reset Required", "Reset Recommended", "GPU is lost", "pci.bus_id", "gpu_bus_id",
)  # fmt: skip
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\ufeff")  # what a terminal and an editor add
_PROBE = GpuProbe(Context(node="pasted"))
_HOST = re.compile(  # "t07: …", as pdsh and clush put it
    r"^[A-Za-z0-9][\w.-]{0,62}: (?=\s*(?:GPU |Link \d|\||Fabric|[A-Z][\w .]+ +: |Failed to init|Unable to det|No devices))"
)


def read(text: str, node: str) -> Iterator[Reading]:
    """At most two readings: that NVML could not be asked, and what is said about GPUs. Work is linear in the text."""
    if not any(mark in text for mark in _MARKS):
        return
    if "\x1b" in text or "\ufeff" in text:
        text = _COLOURS.sub("", text)
    gpus = Gpus()
    driver = None
    if "<nvidia_smi_log" in text:
        begin = max(text.find("<?xml"), 0)
        driver = read_xml(text[begin:], gpus)
        text = text[:begin] + text[text.find("</nvidia_smi_log>"):] if "</nvidia_smi_log>" in text else text[:begin]
    query, lines = Query(gpus), Lines(gpus)
    for raw in text.splitlines():
        line = _HOST.sub("", raw[:LINE_CHARS], count=1).rstrip()
        if not line:
            query.end()
        elif line[0] == "{" and "fabric_states" in line:
            _fabric_states(line, gpus)
        elif not lines.line(line):
            query.line(line)
    query.end()
    for gpu in gpus.all:
        if v.unused_links(gpu.get("name")) and 0 in (gpu.get("links") or ()):
            gpu["links"] = [s if s != 0 else None for s in gpu["links"]]  # no bridge there: not down, unused
    driver = driver or query.driver or lines.driver
    told = [g for g in gpus.all if g.keys() - {"pci", "index", "unread", "uuid", "name"} or g["unread"]]
    if lines.error and not told:
        yield _reading(node, error=lines.error, driver=None, gpus=[])
    if told or lines.refused or lines.gauges or (lines.empty and not lines.error):
        yield _reading(node, error=None, driver=driver, gpus=told, empty=lines.empty and not told, refused=lines.refused,
                       gauges=lines.gauges)


def judge(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """Judge one pasted reading."""
    data = reading.data
    stand_ins: dict[str, Component] = {}  # the probe names GPUs by address, so that one without gets one for the judging
    gpus = []
    for count, gpu in enumerate(data["gpus"]):
        stand_in = f"ffffff{count >> 8:02x}:{count & 0xFF:02x}:00.0"
        nameless = not gpu.get("pci") and "error" not in gpu
        if nameless:
            stand_ins[stand_in] = _component(reading.node, gpu, len(stand_ins) + 1)
        gpus.append({**gpu, "pci": stand_in} if nameless else gpu)
    kind = expected_for(reading, {})
    expected = {"nvlinks": max([1, *(len(g.get("links") or ()) for g in gpus)]), "nvlink_mbps": kind.get("nvlink_mbps")}
    own = {g["pci"]: {"ecc": 0} for g in gpus if g.get("pci")}  # this driver load's counters began at zero
    memory = {"gpus": own, "boot": reading.boot_id}
    found: dict[str, Finding] = {}
    t = limits().gpu
    # As often as it wants what one sample could fake.
    for look in range(max(t.lost_run, t.slowdown_run, t.power_run, t.pcie_run, limits().nvlink.speed_run)):
        seen = [{**g, "slow_at": float(look + 1)} if "link_speed_mbps" in g else g for g in gpus]
        again = msgspec.structs.replace(reading, at=reading.at + look, data={**data, "gpus": seen})
        found = {k: f for k, f in found.items() if f.kind is Kind.EVENT}
        found.update((f.id, f) for f in _PROBE.assess(again, memory, expected))
    j = Judge(reading.node, reading.at, {})
    _beside(j, reading)
    found.update((f.id, f) for f in j.findings())
    return [_pasted(_renamed(f, stand_ins), data) for f in found.values() if f.present]


def _renamed(f: Finding, stand_ins: dict[str, Component]) -> Finding:
    true = stand_ins.get(f.component.gpu or "")
    if true is None:
        return f
    where = Component(node=true.node, device=true.device, part=f.component.part)
    return msgspec.structs.replace(f, component=where, id=f.id.replace(str(f.component), str(where)))


def _beside(j: Judge, reading: Reading) -> None:
    """What a paste can say that a reading of NVML cannot."""
    data, node = reading.data, Component(node=reading.node)
    for entry in data.get("refused", ()):
        where = Component(node=reading.node, device=f"gpu@{entry['pci']}") if entry["pci"] else node
        j.event("gpu.reset_refused", where, severity=Severity.FATAL, action=Action.REBOOT_NODE, certainty=0.8,
                evidence=(f"GPU {entry['said']}: {entry['why']}"[: v.TEXT_CHARS],),
                summary="The GPU was not reset: stop what holds it (worker, nvidia-persistenced, monitor), try again, else reboot.")
    if data.get("empty"):
        j.state("gpu.none_found", node, True, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
                evidence=("No devices were found",),
                summary="The driver lists no GPU: the kernel log says why (RmInitAdapter, Xid 79), or this container got none.")
    for gpu in data["gpus"]:
        totals = gpu.get("link_totals") or {}
        if counted := {k: n for k, n in totals.items() if k in COUNTED and n}:
            j.state("gpu.nvlink_counts", _component(reading.node, gpu, 1), True, severity=Severity.WARNING, certainty=0.5,
                    facts=counted, evidence=tuple(f"{k}={n}" for k, n in counted.items()),
                    suspect=Suspect.PEER if counted.keys() == {"receive_remote_errors"} else Suspect.SELF,
                    summary="NVLink errors were counted since the driver was loaded; when is not said. "
                    "Look again in a minute: what grows is a fault.")
        if gpu.get("fabric_state") in (1, 2):
            j.state("gpu.fabric_joining", _component(reading.node, gpu, 1), True, severity=Severity.WARNING, action=Action.WAIT,
                    certainty=0.5, evidence=(f"fabric_state={gpu['fabric_state']}",),
                    summary="The GPU has not joined its NVLink fabric: normal after a boot, a fault when it lasts longer than "
                            f"{limits().fabric.joining_s:g} s.")
    for code in dict.fromkeys(data.get("gauges", ())):
        j.state("monitor.xid_gauge", Component(node=reading.node, device=f"monitor@xid{code}"), True, severity=Severity.WARNING,
                suspect=Suspect.MONITOR, certainty=0.5, facts={"xid": code}, evidence=(f"DCGM_FI_DEV_XID_ERRORS={code}",),
                summary=f"A monitor's gauge holds Xid {code}: the last that it saw, maybe long ago, hiding every earlier one. "
                "The kernel log has the lines; nothing is done on a gauge's word.")


def _pasted(f: Finding, data: dict[str, Any]) -> Finding:
    """The probe's finding, with what differs when a person pasted it and what would leave service."""
    change: dict[str, Any] = {}
    if f.check == "driver.unusable" and (data.get("error") or {}).get("code") == 999:
        # NVIDIA Container Toolkit, troubleshooting: a container loses its GPUs when systemd reloads its cgroups.
        change = {"action": Action.RESTART_WORKER, "summary": "NVML answers Unknown Error, as in a container that lost its device "
                  "cgroup while nvidia-smi on the host is well; look there first, then restart the container."}  # fmt: skip
    elif f.check == "driver.missing":
        change = {"severity": Severity.WARNING, "action": Action.INSPECT, "suspect": Suspect.SELF}
    elif f.check == "gpu.clocks_slowdown":
        change = {"summary": "Heat or power made the GPU slow down when this was printed."}
    elif f.check == "gpu.unreadable" and "ermission" not in " ".join(f.evidence):
        change = {"action": Action.INSPECT, "suspect": Suspect.SELF,
                  "summary": "No value of this GPU can be read: the kernel log says why."}  # fmt: skip
    drain = "none"
    if f.severity is Severity.FATAL and f.kind is Kind.STATE:
        drain = "node" if f.action in (Action.REBOOT_NODE, Action.POWER_CYCLE) or not f.component.gpu else "gpu"
    elif f.check in ("gpu.row_remap_pending", "gpu.ecc_uncorrected", "driver.version_mismatch"):
        drain = "later"
    return msgspec.structs.replace(f, facts={**f.facts, "drain": drain}, **change)


def _component(node: str, gpu: dict[str, Any], count: int) -> Component:
    name = gpu.get("pci") or gpu.get("uuid") or (f"index{gpu['index']}" if gpu.get("index") is not None else f"unnamed{count}")
    return Component(node=node, device=f"gpu@{name}")


def _fabric_states(line: str, gpus: Gpus) -> None:
    """Fabric values as JSON, by GPU UUID (gpud's dump of what NVML answered)."""
    try:
        entries = json.loads(line)["fabric_states"][: v.GPUS_MAX]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    for entry in entries:
        uuid = entry.get("gpu_uuid") if isinstance(entry, dict) else None
        if not isinstance(uuid, str):
            continue
        words = {k: str(word) for k, word in entry.items() if isinstance(word, str)}
        health = entry.get("health") if isinstance(entry.get("health"), dict) else {}
        gpu = gpus.named(uuid=uuid[:64])
        gpu["fabric_state"], gpu["fabric_status"] = v.fabric_state(words.get("state")), v.code(words.get("status"))
        gpu["fabric_cluster"] = v.cluster(words.get("cluster_uuid"))
        said = {"summary": words.get("summary"), "bandwidth": str(health.get("bandwidth"))}
        said |= {"route_recovery": str(health.get("route_recovery_in_progress")),
                 "route_unhealthy": str(health.get("route_unhealthy")),
                 "access_timeout": str(health.get("access_timeout_recovery"))}  # fmt: skip
        gpu["fabric_health_mask"], gpu["fabric_summary"] = v.health(said)


def _reading(node: str, **data: Any) -> Reading:
    return Reading(probe="gpu", node=node, at=0.0, boot_id="pasted", data={"bound": None, **data})
