"""The catalogue's tables: their shape, and that the judgement taken from them keeps its promises."""

from __future__ import annotations

import re

import pytest

from probes.catalog import DRAINS, CatalogError, _judgement, buckets, kernel_lines, link_rules, recoveries, sxids, table, xids
from probes.xid import of_interest
from sentinel.model import Action, Severity, Suspect

TABLES = ("buckets.tsv", "xid.tsv", "nvlink5.tsv", "recovery.tsv", "sxid.tsv", "sxid_actions.tsv", "kernel_lines.tsv")


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_clean(name: str) -> None:
    """Every table is rectangular, free of stray spaces, and its first columns name each row once."""
    rows = table(name)
    assert rows
    for row in rows:
        assert all(cell == cell.strip() for cell in row.values()), row
    if name not in ("nvlink5.tsv", "kernel_lines.tsv"):
        keys = [next(iter(row.values())) for row in rows]
        assert len(keys) == len(set(keys))


def test_every_code_is_there() -> None:
    """The catalogue's 172 codes, the header's newer ones, and the whole NVLink5 and SXid sheets are carried."""
    assert set(range(1, 177)) <= set(xids())
    assert len(table("nvlink5.tsv")) == 95
    assert len(sxids()) == 420
    assert set(recoveries()) == set(range(8))


def test_judgements_are_coherent() -> None:
    """What is fatal has an action and takes something out of service; what is info asks for no more than a new worker."""
    for where, judged in [*((x.code, x.judged) for x in xids().values()), *buckets().items()]:
        assert judged.drain in DRAINS, where
        if judged.severity is Severity.FATAL:
            assert judged.action.rank >= Action.INSPECT.rank, where
            assert judged.drain not in ("none", "later"), where
        if judged.severity is Severity.INFO:
            assert judged.action in (Action.NONE, Action.RESTART_WORKER), where
        if judged.suspect is Suspect.APP:
            assert judged.drain == "none", where


def test_masks_are_whole_words() -> None:
    """Masks are 32 characters of 0, 1 and -, status words are hexadecimal, and every unit name is one word."""
    for row in table("nvlink5.tsv"):
        for column in ("intrinfo_v1", "intrinfo_v2", "promoted_v1", "promoted_v2"):
            if row[column]:
                assert re.fullmatch(r"[01-]{32}", row[column]), row
        assert re.fullmatch(r"(?:0x[0-9a-fA-F]{8}(?:/0x[0-9a-fA-F]{8})?)?", row["error_status"]), row
        assert re.fullmatch(r"[A-Z0-9_]+(?:/[A-Z0-9_]+)*", row["unit"]), row
        assert row["severity"] in ("nonfatal", "link_fatal", "fatal")
    assert all(rule.bucket in buckets() for rule in link_rules())


def test_kernel_lines_name_their_source() -> None:
    """Every line without a number says where its meaning was learned, and its mark stands in its pattern."""
    for row, known in zip(table("kernel_lines.tsv"), kernel_lines(), strict=True):
        assert row["source"]
        assert known.about in ("gpu", "nic", "driver")
        assert known.mark in row["pattern"].replace("\\.", "."), row
        family = next((f for f in ("NVRM: ", "mlx5_core", "INFO: task") if f in row["pattern"]), None)
        assert family, row
        assert of_interest(f"{family} {known.mark}".encode())


def test_damage_is_named() -> None:
    """A damaged cell is refused in a sentence that says where."""
    row = {"severity": "deadly", "action": "none", "suspect": "self", "drain": "none", "says": ""}
    with pytest.raises(CatalogError, match=r"xid\.tsv: 79: 'deadly'"):
        _judgement(row, "xid.tsv: 79")
