"""Pasted text: every way a kernel line is copied, and none of the ways it is only quoted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from probes.decode import Decoded, decode_text
from sentinel.cli.decode import decode
from sentinel.model import Action, Severity

COMMAND = "from sentinel.cli.main import main; main()"
LINE = "NVRM: Xid (PCI:0018:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def said(decoded: Decoded) -> tuple[str, str, int]:
    return decoded.verdict.severity.value, decoded.verdict.action.value, decoded.verdict.incidents


@pytest.mark.parametrize(
    "prefix",
    [
        "", "    ", "kernel: ", "[   12.345678] ", "[12345.678901][ T1234] ", "<4>[ 12.3] ", "[Fri Aug 30 11:43:09 2024] ",
        "kern  :warn  : 2025-01-21T04:41:44,283302+00:00 ", "kern  :err   : [Fri Aug 30 11:43:09 2024] ", "4,1201,178065274761,-;",
        "4,1201,178065274761,-,caller=T1234;", "Sep 19 10:30:06 gpu-node-01 kernel: ", "Feb  1 14:25:31 t07 kernel: [180.274761] ",
        "2025-01-21T04:41:44.283302+0000 t07 kernel: ", "2025-01-21 04:41:44 t07 kernel: ", "[178065.274761] t07 kernel: ",
        "10.0.0.1: kern: warning: [2026-04-22T21:25:20.466440686Z]: ", "t07: [ 12.345] ", "t07: ", "t07 kernel: ",
        "<4>1 2025-01-21T04:41:44.28Z t07 kernel - - - [12.5] ", "/var/log/kern.log:May 10 22:25:01 t07 kernel: ",
        "Fri 2025-01-24 04:41:44 UTC t07 kernel: ", "2025-01-24 04:41:44.283 +0000 t07 kernel: ", "1745356325.466440 t07 kernel: ",
        "[    1.234 <    0.001 >] t07 kernel: ", "kern.log:18:May 10 22:25:01 t07 kernel: ", "May 10 2025 22:25:01 t07 kernel: ",
    ],
)  # fmt: skip
def test_every_prefix(prefix: str) -> None:
    """A kernel line is found behind whatever a log puts before it, with any line ending."""
    for text in (prefix + LINE, prefix + LINE + "\r\n", f"some text\r\n{prefix}{LINE}\r\nmore\r\n"):
        decoded = decode_text(text)
        assert [(f.facts["xid"], f.component.gpu) for f in decoded.findings] == [(79, "0018:01:00.0")]
        assert said(decoded) == ("fatal", "reboot_node", 1)
        assert decoded.skipped == {}


@pytest.mark.parametrize(
    "copied",
    [
        "\x1b[32m[12345.678901] \x1b[0m\x1b[33mNVRM: \x1b[0m" + LINE.removeprefix("NVRM: ") + "\x1b[0m",  # dmesg --color=always
        f"\ufeff[12345.678901] {LINE}",
        f"\0\0[12345.678901] {LINE}\0",  # a serial console's capture
        f"\u200b{LINE}",
        f"[1.0] x\r[12345.678901] {LINE}\r",
        '{"_TRANSPORT":"kernel","MESSAGE":[' + ",".join(str(b) for b in LINE.replace("<", "\xff").encode("latin-1")) + "]}",
    ],
    ids=["colours", "byte order mark", "NULs", "zero width", "carriage returns", "journal bytes"],
)  # fmt: skip
def test_however_it_was_copied(copied: str) -> None:
    """What a terminal, an editor or the journal adds to the line changes nothing."""
    assert said(decode_text(copied)) == ("fatal", "reboot_node", 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({"level": "INFO", "msg": LINE}), "quoted"),
        (f'time="2025-05-12T17:31:12Z" level=error msg="{LINE}"', "quoted"),
        (f"May 10 22:25:01 t07 gpu-monitor[812]: {LINE}", "quoted"),
        (f"May 10 22:25:01 t07 gpu-monitor: {LINE}", "quoted"),
        (f"2025-01-21T04:41:44Z stderr F found {LINE}", "quoted"),
        (f"we saw {LINE}", "quoted"),
        (f"saw {LINE}", "quoted"),
        (f'echo "{LINE}" > /dev/kmsg', "quoted"),
        (f"logger -p kern.err {LINE}", "quoted"),
        (f"> {LINE}", "quoted"),
        (f"12,358,25209228,-;{LINE}", "user_space"),
        (json.dumps({"_TRANSPORT": "kernel", "MESSAGE": [LINE, LINE]}), "malformed"),
        (json.dumps({"_TRANSPORT": "syslog", "SYSLOG_IDENTIFIER": "kernel", "MESSAGE": LINE}), "user_space"),
        ('{"_TRANSPORT": "kernel", "MESSAGE": "' + LINE, "quoted"),
    ],
)
def test_quoted_is_not_the_fault(text: str, why: str) -> None:
    """A fault inside another program's words, or written by user space, is counted and not judged."""
    decoded = decode_text(text)
    assert decoded.findings == ()
    assert said(decoded) == ("info", "none", 0)
    assert decoded.skipped == {why: 1}


@pytest.mark.parametrize(
    "text",
    [
        "dhclient[757]: DHCPACK of 192.0.2.103 from 192.0.2.1 (xid=0xedf75f3a)",
        "nfs: server t07 not responding, still trying (xid 79)",
        "GPU has fallen off the bus (XID 79). Node requires reboot.",
        "", "\n\n\r\n", "\x00\xff\ufffd" * 50,
    ],
)
def test_lookalikes(text: str) -> None:
    """Other numbers that are called xid, and no text at all, are nothing of note."""
    assert said(decode_text(text)) == ("info", "none", 0)


class TestJournal:
    def test_json(self) -> None:
        """A journal entry as JSON counts when the journal says that the kernel wrote it; so does dmesg's JSON."""
        assert said(decode_text(json.dumps({"_TRANSPORT": "kernel", "MESSAGE": LINE})))[1] == "reboot_node"
        assert said(decode_text(json.dumps({"pri": 4, "time": 12.5, "msg": LINE}) + ","))[1] == "reboot_node"

    def test_three_lines_of_one_record(self) -> None:
        """The driver's three-line message is one fault, printed as three lines or with escaped newlines."""
        lines = ["NVRM: The NVIDIA GPU 0009:01:00.0", "NVRM: (PCI ID: 10de:2941) installed in this system has",
                 "NVRM: fallen off the bus and is not responding to commands."]
        aligned, escaped = "[ 5.1] " + "\n         ".join(lines), "t07 kernel: " + "\\n".join(lines)
        for text in (aligned, escaped, "\n".join(f"[ 5.1] {x}" for x in lines)):
            decoded = decode_text(text)
            assert [(f.check, f.component.gpu) for f in decoded.findings] == [("xid.79", "0009:01:00.0")]
            assert said(decoded) == ("fatal", "reboot_node", 1)


class TestVerdict:
    def test_application_pair_is_one(self) -> None:
        """13 and the 43 that follows it are one incident of the application."""
        text = ("NVRM: Xid (PCI:0009:01:00): 13, Graphics SM Warp Exception on (GPC 1, TPC 0): Out Of Range Address\n"
                "NVRM: Xid (PCI:0009:01:00): 43, pid=12, name=python3, Ch 00000020")
        assert said(decode_text(text)) == ("info", "restart_worker", 1)

    def test_fatal_decides(self) -> None:
        """The fatal finding's action is the verdict, even where a milder finding asks for what ranks higher."""
        text = "NVRM: Xid (PCI:0009:01:00): 61, text\nNVRM: Xid (PCI:0018:01:00): 109, pid=4, name=x, Ch 8, CTX SWITCH TIMEOUT"
        assert said(decode_text(text)) == ("fatal", "reset_gpu", 2)

    def test_switches_cry_for_a_dead_gpu(self) -> None:
        """Fatal SXids beside a dead GPU are its far ends: one incident, the GPU's action, in either order."""
        switch = "nvidia-nvswitch{0}: SXid (PCI:0000:0{0}:00.0): 20034, Fatal, Link 4{0} LTSSM Fault Up"
        lines = [LINE, *(switch.format(i) for i in range(5, 8))]
        for order in (lines, lines[::-1]):
            assert said(decode_text("\n".join(order))) == ("fatal", "reboot_node", 1)
        assert said(decode_text("\n".join(lines[1:]))) == ("fatal", "reset_gpu", 1)

    def test_one_link_of_many_gpus(self) -> None:
        """The same link down on three GPUs is one incident: each link index ends at one switch."""
        line = "NVRM: Xid (PCI:{}:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 07 (0x004505c6 0x0)"
        assert said(decode_text("\n".join(line.format(d) for d in ("0008", "0009", "0018")))) == ("fatal", "reset_gpu", 1)

    def test_taken_back(self) -> None:
        """A recovery action that goes back to None takes back what its GPU said before, and nothing that comes after."""
        change = "NVRM: Xid (PCI:0018:01:00): 154, GPU recovery action changed from {} to {}"
        asked = change.format("0x0 (None)", "0x1 (GPU Reset Required)")
        back = change.format("0x1 (GPU Reset Required)", "0x0 (None)")
        assert said(decode_text(f"{asked}\n{back}")) == ("info", "undrain", 0)
        assert said(decode_text(f"{asked}\n{back}\n{LINE}"))[:2] == ("fatal", "reboot_node")
        other = LINE.replace("0018", "0009")
        assert said(decode_text(f"{other}\n{back}"))[:2] == ("fatal", "reboot_node")

    def test_repeats_are_counted(self) -> None:
        """Repeats are one finding with their count, over any number of lines."""
        decoded = decode_text("\n".join(f"[{i}.5] {LINE.replace('79', '95')}" for i in range(10_000)))
        assert [(f.check, f.count) for f in decoded.findings] == [("xid.95", 10_000)]
        lines = (f"NVRM: Xid (PCI:0018:01:00): 119, pid={i}, name=x, Timeout after {i}s" for i in range(1, 9001))
        distinct = decode_text("\n".join(lines))
        assert [(f.check, f.count) for f in distinct.findings] == [("xid.119", 9000)]

    def test_fabric_manager(self) -> None:
        """Fabric Manager's own log tells of the same SXid; its word for the severity counts, not its log level."""
        text = ("[Feb 27 2025 15:10:02] [ERROR] [tid 99] detected NVSwitch {} error 20034 on fid 0 on NVSwitch pci bus id "
                "00000000:86:00.0 physical id 3 port 61")
        mild, bad = decode_text(text.format("non-fatal")), decode_text(text.format("fatal"))
        assert (mild.verdict.severity, mild.verdict.action) == (Severity.WARNING, Action.NONE)
        assert (bad.verdict.severity, str(bad.findings[0].component)) == (Severity.FATAL, "pasted/nvswitch@0000:86:00.0/link61")


class TestCommand:
    def test_json(self) -> None:
        """--json prints one object of the documented shape, from standard input."""
        result = CliRunner().invoke(decode, ["--json", "-"], input=LINE + "\n")
        printed = json.loads(result.output)
        assert result.exit_code == 0
        assert printed["verdict"]["action"] == "reboot_node"
        assert {k: printed["findings"][0][k] for k in ("check", "component", "severity", "action", "xid", "pci")} == {
            "check": "xid.79", "component": "pasted/gpu@0018:01:00.0", "severity": "fatal", "action": "reboot_node", "xid": 79,
            "pci": "0018:01:00.0",
        }

    def test_sentences(self) -> None:
        """Without --json a person reads what it is, what to do first, and which runbook to open."""
        result = CliRunner().invoke(decode, ["--node", "t07"], input=f"{LINE}\nx[1]: {LINE}\n", env={"COLUMNS": "200"})
        for words in ("fallen off the bus", "t07/gpu@0018:01:00.0", "first: reboot node", "Runbook: gpu-off-bus", "1 lines quote"):
            assert words in result.output
        assert "Nothing of note" in CliRunner().invoke(decode, [], input="all is well").output

    def test_other_digits_are_no_number(self) -> None:
        """Digits of another script, which no driver prints, make no Xid."""
        decoded = decode_text("NVRM: Xid (PCI:0009:01:00): \u0667\u0669, GPU has fallen off the bus.")
        assert [f.check for f in decoded.findings] == ["kernel_log.unreadable"]

    def test_endless_input(self) -> None:
        """Only so much is read; that it was not all is said."""
        done = subprocess.run([sys.executable, "-c", COMMAND, "decode", "/dev/zero"], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "Nothing of note" in done.stdout
        assert "/dev/zero: longer than 128 MiB" in done.stderr

    @pytest.mark.parametrize(
        ("shell", "words"),
        [
            ("<&-", "standard input is closed"), (">/dev/full", "standard output cannot be written: No space left"),
            ("--json >/dev/full", "standard output cannot be written: No space left"), ("/tmp", "directory"),
        ],
    )  # fmt: skip
    def test_streams_that_cannot_be_used(self, shell: str, words: str) -> None:
        """Each is one sentence, and no traceback."""
        script = f"exec {sys.executable} -c '{COMMAND}' decode {shell}"
        done = subprocess.run(["/bin/sh", "-c", script], input=LINE, capture_output=True, text=True, check=False)
        assert done.returncode in (1, 2)
        assert words in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
    def test_a_terminal_of_another_encoding(self, encoding: str) -> None:
        """What it cannot show is shown as something else."""
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-c", COMMAND, "decode"]
        done = subprocess.run(command, input=LINE.encode(), capture_output=True, env=env, check=False)
        assert done.returncode == 0
        assert b"first: reboot node" in done.stdout
        assert b"Traceback" not in done.stderr

    def test_missing_file(self) -> None:
        """A file that is not there is one sentence, without a traceback."""
        result = CliRunner().invoke(decode, ["/nowhere/kern.log"])
        assert result.exit_code == 2
        assert "No such file" in result.output
        assert "Traceback" not in result.output
