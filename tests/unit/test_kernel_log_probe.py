"""The kernel log as a stream: gap-free, bounded, kern facility only, and every skip counted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from probes import Context, Probe, ProbeError, Woken
from probes.kernel_log import BATCH_RECORDS, KernelLogProbe, assess
from sentinel.model import Finding, Reading, Severity, Suspect
from sentinel.testing.kmsg import USER, KernelLog, record

OFF_BUS = "NVRM: Xid (PCI:0009:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
UNCONTAINED = "NVRM: Xid (PCI:0018:01:00): 95, pid=1397, Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No"
NOISE = "docker0: port 3(veth3) entered forwarding state"
BOOT = "11111111-2222-4333-8444-555555555555"


class Node:
    """A node's /proc, state folder and kernel log as a plain file with one record per line."""

    def __init__(self, folder: Path) -> None:
        self.kmsg, self.state, self.proc = folder / "kmsg", folder / "state", folder / "proc"
        (self.proc / "sys/kernel/random").mkdir(parents=True)
        self.kmsg.touch()
        self.boot(BOOT)
        self.seq = 0

    def boot(self, boot_id: str) -> None:
        (self.proc / "sys/kernel/random/boot_id").write_text(boot_id + "\n")
        (self.proc / "uptime").write_text("1000.00 8000.00\n")

    def write(self, text: str, usec: int = 900_000_000, **kind: int) -> None:
        self.seq += 1
        with self.kmsg.open("ab") as log:
            log.write(record(text, self.seq, usec=usec, **kind))

    def probe(self, **more: Any) -> KernelLogProbe:
        return KernelLogProbe(Context(node="t07", kmsg=self.kmsg, state=self.state, proc=self.proc), clock=lambda: 5000.0, **more)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def found(probe: KernelLogProbe, memory: dict[str, Any] | None = None) -> list[Finding]:
    return probe.assess(await probe.read(), {} if memory is None else memory, {})


class TestStream:
    def test_it_is_a_probe(self, node: Node) -> None:
        """It has a probe's shape and can wake the agent."""
        assert isinstance(node.probe(), Probe)
        assert isinstance(node.probe(), Woken)

    async def test_wall_time(self, node: Node) -> None:
        """A record's time is boot time, from /proc/uptime, plus its microseconds; its id names node, boot and number."""
        node.write(OFF_BUS, usec=990_500_000)
        (finding,) = await found(node.probe())
        assert finding.at == pytest.approx(4990.5)
        assert finding.id == f"t07:{BOOT}:1"

    async def test_an_old_fault_says_so(self, node: Node) -> None:
        """What a first start finds in the log of hours ago carries its age, so that it can be told from news."""
        node.write(OFF_BUS, usec=100_000_000)
        node.write(OFF_BUS.replace("0009", "0018"), usec=999_000_000)
        assert [f.facts.get("late_s") for f in await found(node.probe())] == [900, None]

    async def test_boot_time_from_stat(self, node: Node) -> None:
        """Without /proc/uptime the whole seconds of btime serve; without both, the time of reading."""
        node.write(OFF_BUS, usec=1_000_000)
        (node.proc / "uptime").unlink()
        (node.proc / "stat").write_text("cpu 1 2 3\nbtime 4100\nprocesses 9\n")
        assert (await found(node.probe()))[0].at == 4101.0
        (node.proc / "stat").unlink()
        assert (await found(node.probe()))[0].at == 5000.0

    async def test_only_the_kernel_counts(self, node: Node) -> None:
        """What user space writes raises nothing and is counted."""
        node.write(OFF_BUS, facility=USER)
        node.write(OFF_BUS, facility=3)
        reading = await node.probe().read()
        assert assess(reading, {}) == []
        assert reading.data["skipped"]["user_space"] == 2

    async def test_restart_without_a_gap(self, node: Node) -> None:
        """After a commit a new run goes on behind it; without one it finds the same occurrence under the same id again."""
        first = node.probe()
        node.write(OFF_BUS)
        reading = await first.read()
        ids = [f.id for f in assess(reading, {})]
        assert [f.id for f in await found(node.probe())] == ids
        first.commit(reading)
        node.write(UNCONTAINED)
        assert [f.check for f in await found(node.probe())] == ["xid.95"]

    async def test_commit_alone_moves_the_cursor(self, node: Node) -> None:
        """Reading writes nothing to disk; a commit writes boot id and number."""
        probe = node.probe()
        node.write(OFF_BUS)
        reading = await probe.read()
        assert not node.state.exists()
        probe.commit(reading)
        assert (node.state / "kernel_log.json").read_text() == f'{{"boot_id":"{BOOT}","seq":1}}'

    async def test_another_boot_starts_over(self, node: Node) -> None:
        """On another boot the cursor does not count, and the ids differ."""
        probe = node.probe()
        node.write(OFF_BUS)
        probe.commit(await probe.read())
        node.boot("99999999-2222-4333-8444-555555555555")
        (finding,) = await found(node.probe())
        assert finding.id == "t07:99999999-2222-4333-8444-555555555555:1"

    @pytest.mark.parametrize(
        "damage", [b"", b"{", b"[]", b'{"boot_id": 3}', b"\xff\x00", b'{"boot_id":"%s","seq":"x"}' % BOOT.encode()]
    )
    async def test_damaged_cursor(self, node: Node, damage: bytes) -> None:
        """A damaged cursor means reading this boot again, never an error."""
        node.write(OFF_BUS)
        node.state.mkdir()
        (node.state / "kernel_log.json").write_bytes(damage)
        assert len(await found(node.probe())) == 1

    async def test_lost_records_blame_the_monitor(self, node: Node) -> None:
        """A gap in the numbers is a finding about the monitor with the count of what was lost."""
        node.write(NOISE)
        node.seq += 41
        node.write(NOISE)
        (finding,) = await found(node.probe())
        assert (finding.check, finding.suspect, finding.facts["lost"]) == ("kernel_log.lost", Suspect.MONITOR, 41)
        assert str(finding.component) == "t07/kernel_log"

    async def test_overrun_goes_on(self, node: Node) -> None:
        """EPIPE is counted and reported, and the record behind it is judged in the same reading; EINVAL is a skip."""
        answers: list[bytes | int] = [
            record(NOISE, 1, usec=1), errno.EPIPE, errno.EINVAL, record(OFF_BUS, 900, usec=2), errno.EAGAIN,
        ]

        def read(fd: int, size: int) -> bytes:
            answer = answers.pop(0)
            if isinstance(answer, int):
                raise OSError(answer, os.strerror(answer))
            return answer

        log = KernelLog()
        probe = KernelLogProbe(Context(node="t07", state=node.state, proc=node.proc, options={"fd": log.fd}), read=read)
        reading = await probe.read()
        assert (reading.data["overruns"], reading.data["lost"], reading.data["skipped"]["oversized"]) == (1, 898, 1)
        assert sorted(f.check for f in assess(reading, {})) == ["kernel_log.lost", "xid.79"]
        log.close()

    async def test_missing_log_is_a_sentence(self, node: Node) -> None:
        """A log that cannot be opened is one sentence about the monitor, and its descriptor never wakes anybody."""
        node.kmsg.unlink()
        probe = node.probe()
        with pytest.raises(ProbeError, match="kmsg: the kernel log cannot be read: No such file"):
            await probe.read()
        assert probe.fileno() >= 0
        await probe.close()

    def test_wrong_descriptor(self, node: Node) -> None:
        """A descriptor that is no number is refused by name."""
        with pytest.raises(ProbeError, match=r"kernel_log\.fd"):
            KernelLogProbe(Context(node="t07", options={"fd": "3"}))

    def test_unknown_format(self) -> None:
        """A reading of another version is refused in one sentence."""
        with pytest.raises(ProbeError, match="format 9"):
            assess(Reading(probe="kernel_log", node="t07", at=0.0, format=9), {})


class TestGarbage:
    async def test_every_skip_is_counted(self, node: Node) -> None:
        """Binary, half records, and a line of a megabyte are counted by reason; the fault between them is found."""
        with node.kmsg.open("ab") as log:
            log.write(b"\x00\xff\xfe binary;\n4,77\n,,,;\n4,x,1,-;text\n" + b"4,1,1,-;" + b"A" * 1_000_000 + b"\n")
            log.write(record(OFF_BUS, 2, usec=3).replace(b"\n", b"\r\n") + b" SUBSYSTEM=pci\n DEVICE=+pci:0009:01:00.0\n")
        reading = await node.probe().read()
        assert reading.data["skipped"] == {"user_space": 0, "malformed": 4, "oversized": 1}
        assert [f.check for f in assess(reading, {})] == ["xid.79"]

    async def test_half_a_line_waits_for_its_end(self, node: Node) -> None:
        """A record that is still being written is neither judged nor lost."""
        whole = record(OFF_BUS, 1, usec=3)
        probe = node.probe()
        with node.kmsg.open("ab", buffering=0) as log:
            log.write(whole[:60])
            assert await found(probe) == []
            log.write(whole[60:])
        assert [f.check for f in await found(probe)] == ["xid.79"]

    async def test_escaped_newlines(self, node: Node) -> None:
        """The kernel's escapes are undone: a message of three lines is one record."""
        node.write("NVRM: The NVIDIA GPU 0009:01:00.0\nNVRM: (PCI ID: 10de:2941) installed in this system has\n"
                   "NVRM: fallen off the bus and is not responding to commands.")
        assert [str(f.component) for f in await found(node.probe())] == ["t07/gpu@0009:01:00.0"]

    async def test_a_batch_is_bounded(self, node: Node) -> None:
        """One reading takes a bounded number of records and says that there are more."""
        node.kmsg.write_bytes(b"".join(record(NOISE, i, usec=i) for i in range(1, BATCH_RECORDS + 11)))
        probe = node.probe()
        first, second = await probe.read(), await probe.read()
        assert (first.data["lines"], first.data["more"]) == (BATCH_RECORDS, True)
        assert (second.data["lines"], second.data["more"]) == (10, False)


class TestFolding:
    async def test_first_at_once_then_the_count(self, node: Node) -> None:
        """Repeats within five seconds are one occurrence: told at once, counted under the same id when it is over."""
        now = 5000.0
        probe = KernelLogProbe(Context(node="t07", kmsg=node.kmsg, state=node.state, proc=node.proc), clock=lambda: now)
        memory: dict[str, Any] = {}
        node.write(UNCONTAINED, usec=999_000_000)
        (first,) = await found(probe, memory)
        for i in range(40):
            node.write(UNCONTAINED.replace("0x2,0x1", f"0x2,{i:#x}"), usec=999_100_000 + i)
        assert await found(probe, memory) == []
        now += 10.0
        (node.proc / "uptime").write_text("1010.00 1\n")
        (later,) = await found(probe, memory)
        assert (first.count, later.count, later.id) == (1, 41, first.id)
        assert memory["episodes"] == {}

    async def test_another_episode_is_another_occurrence(self, node: Node) -> None:
        """The same line after more than five seconds is a new finding, in one batch too."""
        for seconds in (100, 102, 109):
            node.write(OFF_BUS, usec=seconds * 1_000_000)
        assert [(f.id.rpartition(":")[2], f.count) for f in await found(node.probe())] == [("1", 2), ("3", 1)]

    async def test_another_gpu_is_not_folded(self, node: Node) -> None:
        """The same code on two GPUs is two findings."""
        node.write(OFF_BUS)
        node.write(OFF_BUS.replace("0009", "0018"))
        assert len(await found(node.probe())) == 2

    async def test_worse_goes_out_at_once(self, node: Node) -> None:
        """A repeat that is worse than what was told is a finding of its own, at once and under its own id."""
        memory: dict[str, Any] = {}
        probe = node.probe()
        node.write("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Data {0x10000000, 0x00000000}", usec=998_000_000)
        (mild,) = await found(probe, memory)
        node.write("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up", usec=999_000_000)
        (bad,) = await found(probe, memory)
        assert (mild.severity, bad.severity, bad.count) == (Severity.WARNING, Severity.FATAL, 2)
        assert bad.id != mild.id

    async def test_who_was_running_is_gathered(self, node: Node) -> None:
        """The driver prints an exception in several lines; the process named by a later one is kept."""
        node.write("NVRM: Xid (PCI:0009:01:00): 13, Graphics SM Warp Exception on (GPC 2, TPC 3, SM 1): Misaligned Address")
        node.write("NVRM: Xid (PCI:0009:01:00): 13, Graphics Exception: ESR 0x519730=0x500000f 0x519734=0x0")
        node.write("NVRM: Xid (PCI:0009:01:00): 13, pid=4580, name=python3, Graphics Exception: channel 0x0000000a")
        (finding,) = await found(node.probe())
        assert (finding.count, finding.facts["pid"], finding.facts["gpc"], finding.facts["sm"]) == (3, 4580, 2, 1)

    async def test_echo_across_readings(self, node: Node) -> None:
        """What a GPU said in an earlier reading still explains what follows it."""
        memory: dict[str, Any] = {}
        probe = node.probe()
        node.write(OFF_BUS, usec=900_000_000)
        await found(probe, memory)
        node.write("NVRM: Xid (PCI:0009:01:00): 45, pid=7, name=python3, Ch 0000000c", usec=901_000_000)
        node.write("NVRM: Xid (PCI:0009:01:00): 119, pid=8, name=nvidia-smi, Timeout waiting for RPC from GSP!", usec=960_000_000)
        assert [(f.check, f.facts["caused_by"]) for f in await found(probe, memory)] == [("xid.45", 79), ("xid.119", 79)]

    async def test_flood_is_bounded(self, node: Node) -> None:
        """A flood of one line is one occurrence, and a flood of different ones keeps a bounded memory."""
        memory: dict[str, Any] = {}
        node.kmsg.write_bytes(b"".join(record(UNCONTAINED, i, usec=900_000_000 + i) for i in range(1, 20_001)))
        probe, told = node.probe(), []
        for _ in range(6):
            told += await found(probe, memory)
        assert {f.id for f in told} == {f"t07:{BOOT}:1"}
        lines = (f"NVRM: Xid (PCI:{i:04x}:01:00): 62, {i:08x}" for i in range(3000))
        node.kmsg.write_bytes(b"".join(record(line, i, usec=i) for i, line in enumerate(lines, 1)))
        assert len(await found(node.probe(), memory)) == 3000
        assert len(memory["episodes"]) <= 512
        assert len(memory["said"]) <= 64


class TestStandIn:
    async def test_descriptor(self, node: Node) -> None:
        """The stand-in for the device: one record per read, readable when there is news, judged like the device's."""
        log = KernelLog(first_seq=358)
        probe = KernelLogProbe(Context(node="t07", state=node.state, options={"fd": log.fd}))
        assert probe.fileno() == log.fd
        log.write(NOISE)
        log.write(OFF_BUS)
        log.write_raw(b"\xff\x00")
        reading = await probe.read()
        assert (reading.data["lines"], reading.data["last_seq"], reading.data["skipped"]["malformed"]) == (3, 359, 1)
        (finding,) = assess(reading, {})
        assert finding.at == pytest.approx(reading.at, abs=1.0)
        probe.commit(reading)
        assert not (node.state / "kernel_log.json").exists()
        await probe.close()
        assert os.fstat(log.fd)  # the descriptor stays its owner's
        log.close()

    async def test_full_buffer_loses_and_shows_it(self, node: Node) -> None:
        """A reader that is too slow loses records, as on the device, and sees how many by the gap."""
        log = KernelLog(buffer_bytes=4096)
        while not log.lost:
            log.write(NOISE)
        probe = KernelLogProbe(Context(node="t07", state=node.state, options={"fd": log.fd}))
        memory: dict[str, Any] = {}
        assert await found(probe, memory) == []
        log.write(OFF_BUS)
        told = {f.check: f for f in await found(probe, memory)}
        assert told["kernel_log.lost"].facts["lost"] == log.lost
        assert "xid.79" in told
        log.close()
