"""What the GPU probe is given and cannot use is refused in one sentence that names it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from probes import Context, ProbeError
from probes.gpu import GpuProbe
from sentinel.model import Reading
from sentinel.testing.nvml_kinds import gb200_tray
from tests.unit.gpu_node import Node


def test_a_reading_of_another_format_is_refused_in_one_sentence() -> None:
    """A format that is not known is never half understood."""
    node = Node(gb200_tray())
    with pytest.raises(ProbeError, match="format 2; this sentinel knows format 1"):
        node.probe.assess(Reading(probe="gpu", node="t01", at=1.0, format=2), {}, {})


@pytest.mark.parametrize("value", ["four", -1, 2.5, True])
def test_an_expectation_of_the_wrong_kind_is_named(value: Any) -> None:
    """The key, what was wanted and what was found."""
    with pytest.raises(ProbeError, match=r"expected\.gpus: wanted a whole number, got"):
        Node(gb200_tray(), {"gpus": value}).look()


def test_an_option_that_does_not_exist_is_named() -> None:
    """A misspelt option is an error when the probe is made."""
    with pytest.raises(ProbeError, match="unknown option 'intervall'"):
        GpuProbe(Context(node="t01", options={"intervall": "5s"}))


def test_without_a_driver_nothing_is_read() -> None:
    """A probe that was given no way to the driver says so."""
    with pytest.raises(ProbeError, match="no way to the driver"):
        asyncio.run(GpuProbe(Context(node="t01")).read())
