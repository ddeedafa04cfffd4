"""The numbers by which a measurement becomes a finding: one file, with units and sources, that really decides."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import probes
from probes import Context, kernel_episodes, thresholds
from probes.decode import decode_text
from probes.gpu import GpuProbe
from probes.host import HostProbe
from probes.imex import ImexProbe
from probes.infiniband import InfinibandProbe
from probes.pcie import PcieProbe
from probes.threshold_tables import Thresholds, Windows
from probes.thresholds import ThresholdsError, limits, load, shipped, shipped_text, using
from probes.worker import WorkerProbe
from sentinel.cli import recording
from sentinel.cli.main import main
from sentinel.model import Reading

HERE = Path(probes.__file__).parent
MODULES = {p.stem: ast.parse(p.read_text("utf-8")) for p in sorted(HERE.glob("*.py")) if not p.stem.startswith("threshold")}
KEYS = [(table, key) for table, keys in tomllib.loads(shipped_text()).items() for key in keys]

# Numbers that stand in code, by why they are no thresholds. Whoever adds a constant puts it into the file or argues here.
NO_THRESHOLD = {
    "how much is kept, read or shown (beside what ends in _CHARS or _BYTES)": {
        "counters.GRAINS", "crosscheck.APART_S", "crosscheck.KINDS", "crosscheck.PENDING", "engine.BODY_MAX", "engine.COUNT_MAX",
        "engine.RANKS_MAX", "fabric_log.LINES_MAX", "host.STUCK_MOST", "imex.OUTPUT_MAX", "imex_policy.ACCUSED_MAX",
        "imex_text.NODES_MAX", "imex_text.OUTPUTS_MAX", "infiniband.MOST_DEVICES", "infiniband.MOST_PORTS",
        "kernel_episodes.EPISODES", "kernel_episodes.REMEMBER_GPUS", "kernel_log.BATCH_RECORDS", "monitors.LINES_MAX",
        "nic_blocks.MOST_PORTS", "nic_text.MOST_EVENTS", "nvml_counters.C2C_MOST", "pasted.BATCH", "pasted.HOSTS_MAX",
        "pasted_carried.CARRIERS_MAX", "pasted_carried.ROUNDS", "pasted_json.RECORDS_MAX",
        "pcie.MOST_DEVICES", "processes._LINE_MAX", "serving_lines.EVENTS", "serving_lines.FOLLOWING", "serving_lines.SAMPLES",
        "serving_log._SHOWN", "serving_prefix.PREFIXES", "smi_query.CHARS_MAX", "smi_query.DEPTH_MAX", "smi_query.ELEMENTS_MAX",
        "smi_values.GPUS_MAX", "smi_values.LINKS_MAX", "windows.FINE_TOLD",
    },
    "by what a carrier's prefix on a tool's lines is told from the tool's own words": {
        "pasted_carried.SAMPLE_LINES", "pasted_carried.SHARE", "pasted_carried.PER_HOST",
    },
    "how often is looked, and how long a look is waited for": {
        "infiniband.DEADLINE_S", "infiniband.RESTRICTED_AGAIN_S", "nvml.SLOW_S", "nvml.LINKS_S", "nvml_counters.SELDOM_S",
        "worker.DRIVER_PATIENCE_S",
    },
    "what somebody else's value means, or how it is written": {
        "engine._BUSY", "gpu.NO_LIBRARY", "gpu.NOT_LOADED", "gpu.MISMATCH", "gpu_clocks.SLOWDOWN_MASK", "gpu_policy.NVL72_LINKS",
        "gpu_policy.LINK_INACTIVE", "gpu_policy.LINK_DISABLED", "gpu_policy.RESET_REQUIRED", "host._MIB", "host_policy.STA_UNSYNC",
        "infiniband_policy.DOWN", "infiniband_policy.INIT", "infiniband_policy.ARMED", "infiniband_policy.ACTIVE",
        "infiniband_policy.DEFER", "infiniband_policy.SLEEP", "infiniband_policy.POLLING", "infiniband_policy.DISABLED",
        "infiniband_policy.TRAINING", "infiniband_policy.LINK_UP", "infiniband_policy.RECOVERY", "infiniband_policy.TEST",
        "kmsg.DEVICE", "nic_blocks._OPCODES_FINE", "nvlink_counters.BER_ZERO", "nvlink_counters.BER_FLOOR",
        "nvml.INVALID_ARGUMENT", "nvml.NOT_SUPPORTED", "nvml.FUNCTION_NOT_FOUND", "nvml.VERSION_MISMATCH", "nvml.DEPRECATED",
        "nvml.UNINITIALIZED", "nvml.GPU_IS_LOST", "nvml.LINK_COUNT", "nvml.LINK_SPEED", "nvml.LINK_STATE",
        "nvml_counters.ALL_LINKS", "nvml_counters.C2C_COUNT", "pcie.NVIDIA", "pcie.MELLANOX",
        "processes._ENUMERATED", "profile.HOPPER", "profile.BLACKWELL", "profile.NVLINK4", "profile.NVLINK5",
        "smi_lines.BLANK", "worker.FORMAT",
    },
}  # fmt: skip


# -- the file -----------------------------------------------------------------------------------------------------------------


def _lines() -> Iterator[tuple[str, str, str]]:
    """(table, key, what its comment says)."""
    table = ""
    for line in shipped_text().splitlines():
        if head := re.match(r"\[(\w+)\]", line):
            table = head[1]
        elif entry := re.match(r"(\w+) = [^#]*(?:# (.*))?$", line):
            yield table, entry[1], entry[2] or ""


def test_every_number_says_where_it_comes_from() -> None:
    """Each line of the file has a comment with its source: a vendor's, an operator's, a fact of a product, or "judgement"."""
    source = re.compile(
        r"judgement|\bas above|\b(?:HV|NVS|DCGM|IBTA|Azure|ibdiagnet|gpud|nvml\.h|torch)\b"  # who says it
        r"|\b\w+(?:-\w+)*#\d+|\b[A-Z0-9]+(?:_[A-Z0-9]+)+\b"  # repo#issue, or the name of somebody's constant or setting
    )
    said = list(_lines())
    assert [(table, key) for table, key, _ in said] == KEYS, "one key a line, each behind its table's head"
    silent = [f"{table}.{key}" for table, key, comment in said if not source.search(comment)]
    assert not silent, "no source"


def test_a_key_ends_in_its_unit() -> None:
    """What is a time, a temperature, a power, a share or a rate is named so; counts name what they count."""
    for table, key in KEYS:
        value = getattr(getattr(shipped(), table), key)
        if isinstance(value, float):
            unit = re.search(r"_(s|c|mw|per_s|per_minute|share|percent|ber(_\w+)?)$", key)
            assert unit, f"{table}.{key} is a number without a unit"
        assert (key.endswith("_windows")) == isinstance(value, Windows), f"{table}.{key}"


# -- the file decides, and nothing beside it ----------------------------------------------------------------------------------


def _reads(tree: ast.Module) -> set[str]:
    """Tables that a module asks for, as ``limits().TABLE`` or by the struct's name."""
    structs = {type(getattr(shipped(), table)).__name__: table for table in Thresholds.__struct_fields__}
    found = {structs[n.id] for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in structs}
    return found | {
        n.attr for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Call) and isinstance(n.value.func, ast.Name)
        and n.value.func.id in ("limits", "thresholds")
    }  # fmt: skip


def test_every_key_is_read_by_the_probes_that_it_is_for() -> None:
    """No number stands in the file for show: a module that reads the table names the key."""
    names: dict[str, set[str]] = {}
    for tree in MODULES.values():
        for table in _reads(tree):
            names.setdefault(table, set()).update(
                n.attr if isinstance(n, ast.Attribute) else str(n.value)
                for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Constant)
            )  # fmt: skip
    assert [f"{table}.{key}" for table, key in KEYS if key not in names.get(table, ())] == []


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return bool(elements) and all(map(_is_number, elements))
    return False


def _numeric_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=targets, value=value) if _is_number(value):
                yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _is_number(value):
                yield name


def test_no_probe_keeps_a_number_of_its_own() -> None:
    """A numeric constant of a probe's module is in the list of those that are no thresholds, each for a reason."""
    names = {f"{module}.{name}" for module, tree in MODULES.items() for name in _numeric_names(tree)}
    there = {name for name in names if not name.endswith(("_CHARS", "_BYTES"))}
    argued = set().union(*NO_THRESHOLD.values())
    assert there - argued == set(), "a threshold outside probes/thresholds.toml?"
    assert argued - there == set(), "argued for and not there any more"


def test_no_judgement_compares_with_a_number_written_into_it() -> None:
    """``x > 0.02`` in a probe is a threshold that nobody finds; what is left are lengths, HTTP and PCI, and how sure one is."""
    fine = {
        "answer.status >= 500", "(answer.status or 0) < 500", "sure >= 0.8", "0 < deadline <= 300", "0 < value < 1000000.0",
        "32 < b < 127", "hosts < 2", "1.0 < speed < 1000.0", "-1e+300 < value < 1e+300",
    }  # fmt: skip
    odd = []
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare) or not any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops):
                continue
            sides = [node.left, *node.comparators]
            calls = [s.func for s in sides if isinstance(s, ast.Call)]
            about_text = any(isinstance(f, ast.Name) and f.id in ("len", "int") for f in calls)
            written = [ast.literal_eval(s) for s in sides if isinstance(s, ast.Constant | ast.UnaryOp) and _is_number(s)]
            if not about_text and any(value not in (0, 1) for value in written) and ast.unparse(node) not in fine:
                odd.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert odd == []


Case = tuple[str, Callable[[], set[str]], str, bool]


def _judged(probe: Any, *data: dict[str, Any], step_s: float = 10.0) -> set[str]:
    memory: dict[str, Any] = {}
    said: set[str] = set()
    for n, each in enumerate(data):
        reading = Reading(probe=probe.name, node="t01", at=1_800_000_000.0 + n * step_s, boot_id="b", data=each)
        said = {f.check for f in probe.assess(reading, memory, {}) if f.present}
    return said


def _host() -> set[str]:
    return _judged(HostProbe(Context(node="t01")), {"spool": {"free_mib": 200, "free_files": 9, "read_only": False}})


def _gpu(*looks: dict[str, Any], step_s: float = 10.0) -> set[str]:
    """One GPU that answers so, look by look."""
    gpus = [{"pci": "0009:01:00.0", "unread": {}, **each} for each in looks]
    data = [{"error": None, "driver": "580.95.05", "gpus": [gpu], "bound": []} for gpu in gpus]
    return _judged(GpuProbe(Context(node="t01")), *data, step_s=step_s)


def _hot() -> set[str]:
    return _gpu({"margin_c": 3})


def _fabric() -> set[str]:
    return _gpu(*[{"links": [1, 1], "fabric_state": 2}] * 2, step_s=100.0)


def _nvlink() -> set[str]:
    return _gpu({"link_totals": {"effective_ber": 1e-13}})


def _c2c() -> set[str]:
    return _gpu({"c2c": {"count": 2, "status": [0, 1]}, "seldom_at": 1.0})


def _pcie() -> set[str]:
    return _judged(PcieProbe(Context(node="t01")), {"devices": [{"pci": "0009:03:00.0", "kind": "nic", "off_bus": True}]})


def _infiniband() -> set[str]:
    def look(errors: int) -> dict[str, Any]:
        port = {"port": 1, "state": 4, "phys": 5, "layer": "InfiniBand", "counters": {"symbol_error": errors}}
        return {"devices": [{"name": "mlx5_0", "ports": [port]}]}

    return _judged(InfinibandProbe(Context(node="t01")), look(0), look(50))


def _imex() -> set[str]:
    return _judged(ImexProbe(Context(node="t01")), {"tool": "/usr/bin/nvidia-imex-ctl", "answered": False, "hung_s": 10.0})


def _worker() -> set[str]:
    def look(mono: float) -> dict[str, Any]:
        seen = {"label": "w", "worker": "w", "engine": "vllm", "url": "http://w", "mono": mono, "healthy": True, "progress": 1,
                "health": {"how": "answered", "status": 200}, "ranks": {"0": {"running": 3, "moving": [7]}}}  # fmt: skip
        return {"workers": [seen], "limits": {}}

    probe = WorkerProbe(Context(node="t01"))
    memory: dict[str, Any] = {}
    found = [probe.assess(Reading(probe="worker", node="t01", at=1.0 + m, data=look(m)), memory, {}) for m in (0.0, 12.0)]
    return {f.check for f in found[-1] if f.present}


def _kernel_log() -> set[str]:
    xids = [[4, n, usec, f"NVRM: Xid (PCI:0009:01:00): {n}, pid=7"] for n, usec in ((31, 100_000_000), (45, 130_000_000))]
    reading = Reading(probe="kernel_log", node="t01", at=1.8e9, boot_id="b", data={"records": xids, "booted_at": 1.8e9 - 140})
    return {f"{f.check} echo" for f in kernel_episodes.assess(reading, {}) if f.facts.get("caused_by")}


REPORTS = "".join(
    f"INFO 11-29 21:00:{s:02d} [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 "
    "tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%, Prefix cache hit rate: 0.0%\n" for s in (0, 10, 20)
)  # fmt: skip


def _serving_log() -> set[str]:
    return {f.check for f in decode_text(REPORTS).findings}


# (the site's file, who judges, what it then says, whether the shipped numbers say it)
CHANGES: list[Case] = [
    ("[gpu]\nmargin_hot_c = 4", _hot, "gpu.thermal", False),
    ("[fabric]\njoining_s = 60", _fabric, "gpu.fabric_state", False),
    ("[nvlink]\neffective_ber = 1e-14", _nvlink, "gpu.nvlink_ber", False),
    ("[pcie]\ngone_run = 1", _pcie, "pcie.gone", False),
    ("[c2c]\ndown_run = 1", _c2c, "gpu.c2c_down", False),
    ("[host]\nspool_free_mib = 256", _host, "host.spool_space", False),
    ("[infiniband]\nsymbol_errors_most = 40", _infiniband, "ib.symbol_errors", False),
    ("[imex]\nrun = 1", _imex, "imex.tool", False),
    ("[worker]\nstall_s = 15", _worker, "worker.stalled", True),
    ("[kernel_log]\necho_s = 20", _kernel_log, "xid.45 echo", True),
    ("[serving_log]\nstall_s = 25", _serving_log, "serving.stalled", False),
]


@pytest.mark.parametrize(("text", "judge", "says", "by_default"), CHANGES, ids=[c[0].split("\n")[0] for c in CHANGES])
def test_a_site_changes_a_verdict(text: str, judge: Callable[[], set[str]], says: str, by_default: bool, tmp_path: Path) -> None:
    """One number in a site's file changes what is said about one and the same reading, and only while it is in force."""
    (tmp_path / "site.toml").write_text(text)
    assert (says in judge()) is by_default
    with using(load(tmp_path / "site.toml")):
        assert (says in judge()) is not by_default
    assert (says in judge()) is by_default


def test_every_table_has_such_a_case() -> None:
    """Each table of the file is shown to decide something."""
    assert {tomllib.loads(text).popitem()[0] for text, *_ in CHANGES} == set(Thresholds.__struct_fields__)


# -- a site's file ------------------------------------------------------------------------------------------------------------


def test_a_site_gives_only_what_it_changes(tmp_path: Path) -> None:
    """The rest stays as shipped; a whole number will do for any number."""
    (tmp_path / "site.toml").write_text("[host]\nstuck_sure_s = 240\n")
    own = load(tmp_path / "site.toml")
    assert own.host == msgspec.structs.replace(shipped().host, stuck_sure_s=240.0)
    assert msgspec.structs.replace(own, host=shipped().host) == shipped()
    (tmp_path / "site.toml").write_text("")
    assert load(tmp_path / "site.toml") == shipped()
    (tmp_path / "site.toml").write_text(shipped_text())
    assert load(tmp_path / "site.toml") == shipped()


WRONG = {
    "[hosts]\nx = 1": r"hosts: no such table; wanted one of .*host",
    "host = 3": r"host: wanted a table of thresholds, found 3",
    "[host]\nstuck_sure = 9": r"host\.stuck_sure: no such threshold; wanted one of .*stuck_sure_s",
    '[host]\nstuck_sure_s = "9s"': r"host\.stuck_sure_s: wanted a number, found '9s'",
    "[host]\nmemory_run = 2.5": r"host\.memory_run: wanted a whole number, found 2\.5",
    "[host]\nmemory_run = true": r"host\.memory_run: wanted a whole number, found True",
    "[host]\nmemory_run = 0": r"host\.memory_run: wanted a whole number >= 1, found 0",
    "[host]\nmemory_free_share = 2": r"host\.memory_free_share: wanted a number <= 1\.0, found 2",
    "[host]\nclock_step_s = 0": r"host\.clock_step_s: wanted a number > 0\.0, found 0",
    "[host]\nclock_step_s = nan": r"host\.clock_step_s: wanted a number > 0\.0, found nan",
    "[host]\nclock_step_s = inf": r"host\.clock_step_s: wanted a number <= .*, found inf",
    "[host]\nstuck_noted_s = 200": r"host\.stuck_noted_s: wanted at most host\.stuck_sure_s \(180\), found 200",
    "[gpu]\nmargin_cool_c = -1": r"gpu\.margin_hot_c: wanted at most gpu\.margin_cool_c \(-1\), found 0",
    "[nvlink]\ncrc_windows = [4, 3]": r"nvlink\.crc_windows: wanted at most as many bad windows as are looked at, found \[4, 3\]",
    "[nvlink]\ncrc_windows = [4]": r"nvlink\.crc_windows: wanted a list of length 2, found \[4\]",
    "[nvlink]\ncrc_windows = [0, 3]": r"nvlink\.crc_windows\[0\]: wanted a whole number >= 1, found \[0, 3\]",
    "[host": "is not valid TOML",
    "[host]\nmemory_run = " + "9" * 5000: "is not valid TOML",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:40])
def test_a_wrong_file_costs_one_sentence(text: str, tmp_path: Path) -> None:
    """It names the file, the key, what was wanted and what was found, and no threshold is put in force."""
    file = tmp_path / "site.toml"
    file.write_text(text)
    with pytest.raises(ThresholdsError, match=f"^{re.escape(str(file))}: {WRONG[text]}") as told:
        load(file)
    assert len(str(told.value)) < 800 and "\n" not in str(told.value)
    assert limits() is shipped()


def test_a_file_that_cannot_be_read_costs_one_sentence(tmp_path: Path) -> None:
    """A missing file, a folder, and bytes that are no text."""
    (tmp_path / "latin").write_bytes(b"[host]\n# \xe9")
    for name, why in (("none", "cannot be read: No such file"), (".", "cannot be read: Is a"), ("latin", "is not UTF-8")):
        with pytest.raises(ThresholdsError, match=why):
            load(tmp_path / name)


scalars = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=9), st.lists(st.integers(-9, 99), max_size=3))


@given(where=st.sampled_from(KEYS), value=scalars)
def test_any_value_is_taken_or_refused_by_name(where: tuple[str, str], value: Any) -> None:
    """Whatever stands behind a key, it becomes a threshold of that key's type or a sentence that names the key."""
    table, key = where
    known = msgspec.to_builtins(shipped())
    try:
        read = thresholds._checked({**known, table: {**known[table], key: value}}, "site.toml")
    except ThresholdsError as error:
        assert str(error).startswith("site.toml: ") and f"{table}.{key}" in str(error)
    else:
        assert getattr(getattr(read, table), key) in (value, tuple(value) if isinstance(value, list) else value)


# -- who uses it --------------------------------------------------------------------------------------------------------------


def test_the_shipped_file_is_printed_for_copying() -> None:
    """``sentinel config thresholds`` prints it byte for byte, so that the output is a file that can be used."""
    assert CliRunner().invoke(main, ["config", "thresholds"]).output == (HERE / "thresholds.toml").read_text("utf-8")


def test_config_check_names_what_is_wrong_in_it(tmp_path: Path) -> None:
    """The check of a host's file reads the thresholds that it names."""
    site, host = tmp_path / "site.toml", tmp_path / "agent.toml"
    host.write_text(f'[agent]\nnode = "t01"\nthresholds = "{site}"\n')
    ran = CliRunner().invoke(main, ["config", "check", str(host)])
    assert ran.exit_code == 1 and f"agent.thresholds: no such file: {site}" in ran.output
    site.write_text("[imex]\nrun = 0\n")
    ran = CliRunner().invoke(main, ["config", "check", str(host)])
    assert ran.exit_code == 1 and f"{site}: imex.run: wanted a whole number >= 1, found 0" in ran.output
    site.write_text("[imex]\nrun = 5\n")
    assert CliRunner().invoke(main, ["config", "check", str(host)]).exit_code == 0


def test_decode_and_assess_judge_by_it(tmp_path: Path) -> None:
    """``--thresholds`` changes what pasted text and a recording mean, for that command alone; a wrong file is a sentence."""
    site, kept = tmp_path / "site.toml", tmp_path / "kept"
    site.write_text("[host]\nspool_free_mib = 256\n[serving_log]\nstall_s = 25\n")
    for more, found in ((), False), (("--thresholds", str(site)), True), ((), False):
        ran = CliRunner().invoke(main, ["decode", "--json", *more, "-"], input=REPORTS)
        assert ran.exit_code == 0 and ("serving.stalled" in ran.output) is found

    data = {"spool": {"free_mib": 200, "free_files": 9, "read_only": False}}
    reading = Reading(probe="host", node="t01", at=1.8e9, boot_id="b", data=data)
    kept.write_bytes(recording.header("t01", 1.8e9) + recording.line(reading))
    host = tmp_path / "agent.toml"
    host.write_text(f'[agent]\nnode = "t01"\nthresholds = "{site}"\n')
    for more, found in ((), False), (("--thresholds", str(site)), True), (("--config", str(host)), True), ((), False):
        ran = CliRunner().invoke(main, ["assess", "--json", *more, str(kept)])
        assert ran.exit_code == 0 and ("host.spool_space" in ran.output) is found, ran.output

    site.write_text("[host]\nspool = 1\n")
    for command in (["decode", "-"], ["assess", str(kept)], ["probe", "--once"]):
        ran = CliRunner().invoke(main, [*command, "--thresholds", str(site)], input="")
        assert ran.exit_code == 1 and "host.spool: no such threshold" in ran.output
    assert limits() is shipped()
