"""The kernel log as a stream: gap-free, bounded, kern facility only, and every skip counted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from probes import Context, Probe, ProbeError, Woken
from probes.kernel_log import BATCH_RECORDS, KernelLogProbe, assess
from sentinel.model import Finding, Kind, Reading, Severity, Suspect
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
        self.wall, self.up = 5000.0, 1000.0

    def boot(self, boot_id: str) -> None:
        (self.proc / "sys/kernel/random/boot_id").write_text(boot_id + "\n")

    def write(self, text: str, usec: int = 900_000_000, **kind: int) -> None:
        self.seq += 1
        with self.kmsg.open("ab") as log:
            log.write(record(text, self.seq, usec=usec, **kind))

    def probe(self, **more: Any) -> KernelLogProbe:
        context = Context(node="t07", kmsg=self.kmsg, state=self.state, proc=self.proc)
        return KernelLogProbe(context, clock=lambda: self.wall, uptime=lambda: self.up, **more)


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
        """A record's time is boot time plus its microseconds; its id names node, boot and number."""
        node.write(OFF_BUS, usec=990_500_000)
        (finding,) = await found(node.probe())
        assert finding.at == pytest.approx(4990.5)
        assert finding.id == f"t07:{BOOT}:1"

    async def test_an_old_fault_says_so(self, node: Node) -> None:
        """What a first start finds in the log of hours ago carries its age, so that it can be told from news."""
        node.write(OFF_BUS, usec=100_000_000)
        node.write(OFF_BUS.replace("0009", "0018"), usec=999_000_000)
        assert [f.facts.get("late_s") for f in await found(node.probe())] == [900, None]

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
        "damage",
        [
            b"", b"{", b"[]", b'{"boot_id": 3}', b"\xff\x00", b"[" * 100_000, b'{"boot_id":"\xff","seq":3}',
            *(b'{"boot_id":"%s","seq":%s}' % (BOOT.encode(), seq) for seq in (b'"x"', b"true", b"-5", b"1e30", b"null")),
        ],
    )  # fmt: skip
    async def test_damaged_cursor(self, node: Node, damage: bytes) -> None:
        """A damaged cursor means reading this boot again, never an error, and never that records were lost."""
        node.seq = 4
        node.write(OFF_BUS)
        node.state.mkdir()
        (node.state / "kernel_log.json").write_bytes(damage)
        assert [f.check for f in await found(node.probe())] == ["xid.79"]

    async def test_a_cursor_that_this_log_never_reached(self, node: Node) -> None:
        """A number beyond the end of the log is of another log: the log is read from its beginning instead of being waited out."""
        node.write(OFF_BUS)
        node.state.mkdir()
        (node.state / "kernel_log.json").write_text(f'{{"boot_id":"{BOOT}","seq":99999999}}')
        probe = node.probe()
        assert [f.check for f in await found(probe)] == ["xid.79"]
        node.write(UNCONTAINED)
        assert [f.check for f in await found(probe)] == ["xid.95"]

    async def test_a_host_that_does_not_say_its_boot(self, node: Node) -> None:
        """Without a boot id no cursor is trusted, and occurrences of two boots with the same number are told apart."""
        node.boot("")
        node.write(OFF_BUS)
        probe = node.probe()
        reading = await probe.read()
        probe.commit(reading)
        assert not node.state.exists()
        before = assess(reading, {})[0].id
        node.kmsg.write_bytes(b"")
        node.seq, node.up = 0, 30.0
        node.write(OFF_BUS, usec=29_000_000)
        assert [f.id != before for f in await found(node.probe())] == [True]

    async def test_numbers_that_go_back(self, node: Node) -> None:
        """A huge number, and then ordinary ones again, silences nothing that follows."""
        with node.kmsg.open("ab") as log:
            log.write(record(NOISE, 1, usec=1) + record(NOISE, 9_999_999_999_999_999_999, usec=2) + record(OFF_BUS, 2, usec=3))
        told = {f.check: f for f in await found(node.probe())}
        assert set(told) == {"xid.79", "kernel_log.lost"}

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

    @pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
    async def test_a_device_that_is_no_kernel_log(self, node: Node, device: str) -> None:
        """A container's stand-in for the log is a failed look, never a log without faults."""
        node.kmsg.unlink()
        node.kmsg.symlink_to(device)
        probe = node.probe()
        with pytest.raises(ProbeError, match="not the kernel log; wanted character device 1:11"):
            await probe.read()
        assert probe.fileno() >= 0
        await probe.close()

    async def test_a_log_that_fails_for_a_while(self, node: Node) -> None:
        """While every read fails that is one sentence each time; when reads work again nothing was missed."""
        trouble = [errno.ENODEV, errno.EIO, errno.ENODEV]

        def read(fd: int, size: int) -> bytes:
            if trouble:
                raise OSError(trouble[0], os.strerror(trouble.pop(0)))
            return os.read(fd, size)

        probe = node.probe(read=read)
        node.write(OFF_BUS)
        for _ in range(3):
            with pytest.raises(ProbeError, match=r"cannot be read: (No such device|Input/output error)"):
                await probe.read()
        assert [f.check for f in await found(probe)] == ["xid.79"]

    async def test_a_storm_of_overruns_ends(self, node: Node) -> None:
        """A log that is overrun at every read gives the reader back, and is one occurrence however often it happens."""

        def read(fd: int, size: int) -> bytes:
            raise OSError(errno.EPIPE, "overrun")

        log = KernelLog()
        probe = KernelLogProbe(Context(node="t07", proc=node.proc, state=node.state, options={"fd": log.fd}), read=read)
        told = [f for _ in range(3) for f in await found(probe)]
        assert {f.check for f in told} == {"kernel_log.lost"}
        assert len({f.id for f in told}) == 1
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

    def test_misspelt_option(self, node: Node) -> None:
        """An option that the probe does not know is refused by name."""
        with pytest.raises(ProbeError, match=r"unknown option 'intervall'; the kernel_log probe knows enabled, fd, interval"):
            KernelLogProbe(Context(node="t07", options={"intervall": "5s"}))

    def test_it_is_looked_at_seldom_where_it_wakes_its_reader(self, node: Node) -> None:
        """A descriptor that turns readable is the way to be in time; a file that never does is read every second."""
        log = KernelLog()
        assert KernelLogProbe(Context(node="t07", options={"fd": log.fd})).interval_s > node.probe().interval_s == 1.0
        log.close()

    def test_unknown_format(self) -> None:
        """A reading of another version is refused in one sentence."""
        with pytest.raises(ProbeError, match="format 9"):
            assess(Reading(probe="kernel_log", node="t07", at=0.0, format=9), {})


class TestHistory:
    """What a first start finds in a log that nobody has read yet. The node is up for 1,000 s; ten minutes back is 400 s."""

    async def test_old_faults_are_recorded_only(self, node: Node) -> None:
        """A fault of more than ten minutes before the first look says that it is history; a younger one is news."""
        node.write(OFF_BUS, usec=399_000_000)
        node.write(OFF_BUS.replace("0009", "0018"), usec=401_000_000)
        told = {f.component.gpu: f for f in await found(node.probe())}
        assert told["0009:01:00.0"].facts["history"] is True
        assert "history" not in told["0018:01:00.0"].facts
        assert {f.severity for f in told.values()} == {Severity.FATAL}

    async def test_a_restart_acts_on_everything_unseen(self, node: Node) -> None:
        """With a cursor of this boot nothing is history, however long the agent was away."""
        node.write(NOISE, usec=1_000_000)
        probe = node.probe()
        probe.commit(await probe.read())
        node.write(OFF_BUS, usec=2_000_000)
        node.up = 300_000.0
        (finding,) = await found(node.probe())
        assert "history" not in finding.facts

    async def test_the_line_is_drawn_at_the_first_look(self, node: Node) -> None:
        """Later batches of the backlog are judged by the same line, and news never ages into history."""
        noise = b"".join(record(NOISE, i, usec=i) for i in range(1, BATCH_RECORDS + 1))
        node.kmsg.write_bytes(noise + record(OFF_BUS, BATCH_RECORDS + 1, usec=399_000_000))
        node.seq = BATCH_RECORDS + 1
        probe, memory = node.probe(), {}
        assert await found(probe, memory) == []
        node.wall, node.up = 5700.0, 1700.0
        assert [f.facts.get("history") for f in await found(probe, memory)] == [True]
        node.write(UNCONTAINED, usec=1_050_000_000)  # read 650 s after it was written, by an agent that was there all along
        assert [f.facts.get("history") for f in await found(probe, memory)] == [None]

    async def test_old_advice_does_not_stand(self, node: Node) -> None:
        """The driver's advice of days ago is an event that is over; the same advice today is a state, and news."""
        advice = "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
        probe, memory = node.probe(), {}
        node.write(advice, usec=100_000_000)
        (old,) = await found(probe, memory)
        node.write(advice, usec=999_000_000)
        (new,) = await found(probe, memory)
        assert (old.kind, old.facts["history"]) == (Kind.EVENT, True)
        assert (new.kind, new.facts.get("history")) == (Kind.STATE, None)

    async def test_an_episode_that_goes_on_is_not_history(self, node: Node) -> None:
        """Repeats on both sides of the line are one occurrence, and it is acted on."""
        node.write(OFF_BUS, usec=399_000_000)
        node.write(OFF_BUS, usec=401_000_000)
        (finding,) = await found(node.probe())
        assert (finding.count, finding.facts.get("history")) == (2, None)

    async def test_a_stream_has_no_past(self, node: Node) -> None:
        """A descriptor that keeps nothing has no backlog: all that comes out of it is news."""
        log = KernelLog()
        log.write(OFF_BUS, usec=1_000_000)
        probe = KernelLogProbe(Context(node="t07", proc=node.proc, state=node.state, options={"fd": log.fd}), uptime=lambda: 1e6)
        assert [f.facts.get("history") for f in await found(probe)] == [None]
        log.close()


class TestClocks:
    @pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
    async def test_a_clock_that_is_set(self, node: Node, step_s: float) -> None:
        """The wall clock set by an hour: the same fault a minute later is another occurrence, and is told at once."""
        probe, memory = node.probe(), {}
        node.write(UNCONTAINED, usec=999_000_000)
        (first,) = await found(probe, memory)
        node.wall, node.up = 5060.0 + step_s, 1060.0
        node.write(UNCONTAINED, usec=1_059_000_000)
        (second,) = await found(probe, memory)
        assert second.id != first.id
        assert "late_s" not in second.facts

    async def test_a_log_whose_clock_runs_behind(self, node: Node) -> None:
        """After weeks printk's clock is off: repeats that are read as they come are still folded into one occurrence."""
        probe, memory, told = node.probe(), {}, []
        for second in range(4):
            node.wall, node.up = 5000.0 + second, 1000.0 + second
            node.write(UNCONTAINED, usec=int((node.up - 50.0) * 1e6))  # 50 s behind
            told += await found(probe, memory)
        assert len({f.id for f in told}) == 1

    async def test_readings_of_two_boots(self, node: Node) -> None:
        """In one recording of two boots the same second since boot is not the same occurrence."""
        memory: dict[str, Any] = {}
        node.write(OFF_BUS)
        (first,) = await found(node.probe(), memory)
        node.boot("99999999-2222-4333-8444-555555555555")
        (second,) = await found(node.probe(), memory)
        assert (first.count, second.count) == (1, 1)


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
        probe = node.probe()
        memory: dict[str, Any] = {}
        node.write(UNCONTAINED, usec=999_000_000)
        (first,) = await found(probe, memory)
        for i in range(40):
            node.write(UNCONTAINED.replace("0x2,0x1", f"0x2,{i:#x}"), usec=999_100_000 + i)
        assert await found(probe, memory) == []
        node.wall, node.up = 5010.0, 1010.0
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
