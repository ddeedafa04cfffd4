"""How NVML is asked: costly values now and then, the older call where a newer is refused, None for what is not measured."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from probes.nvml import SLOW_S, GpuReader, ber, read_gpu
from sentinel.testing.nvml import FakeNvml
from sentinel.testing.nvml_kinds import gb200
from sentinel.testing.nvml_state import FakeGpu, FakeState
from tests.unit.gpu_node import PCI, one


def test_links_and_fabric_are_asked_for_at_every_second_look() -> None:
    """They cost most of a look; between two askings the last answer is carried, with what stood in its way."""
    gpu = gb200()
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reader = GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(0), 0)
    reader.read(1000.0)
    gpu.link(7, 0)
    gpu.set(fabric_state=2)
    soon, later = reader.read(1005.0), reader.read(1010.0)
    assert (soon["links"][7], soon["fabric_state"], soon["links_at"]) == (1, 3, 1000.0)
    assert (later["links"][7], later["fabric_state"], later["links_at"]) == (0, 2, 1010.0)
    gpu.fabric = {"nvml_error": 16}
    assert [reader.read(at)["unread"].get("nvmlDeviceGetGpuFabricInfoV") for at in (1020.0, 1025.0)] == [16, 16]
    assert reader.read(500.0)["links_at"] == 500.0  # the clock was set back: the old answer's age is not known


def test_slow_values_are_read_now_and_then() -> None:
    """Costly values are carried along between their turns and say when they were read."""
    gpu = gb200()
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reader = GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(0), 0)
    reader.read(1000.0)
    gpu.set(margin_c=1, rows_pending=1)
    soon, later = reader.read(1000.0 + SLOW_S / 2), reader.read(1000.0 + SLOW_S)
    assert (soon["margin_c"], soon["rows_pending"], soon["slow_at"]) == (43, True, 1000.0)
    assert later["margin_c"] == 1


def test_an_older_driver_is_asked_by_the_getter() -> None:
    """Where the link-state field is not supported, the older call answers."""
    gpu = gb200()
    reader = GpuReader(OldLinks(FakeState(gpus=[gpu])), FakeNvml(FakeState(gpus=[gpu])).nvmlDeviceGetHandleByIndex(0), 0)
    assert reader.read()["links"] == [1] * 18


class OldLinks(FakeNvml):
    @staticmethod
    def _field(gpu: FakeGpu, field: int, scope: int) -> Any:
        return {"nvml_error": 3} if field == 165 else FakeNvml._field(gpu, field, scope)


def test_the_older_fabric_struct_is_used_when_the_newer_is_refused() -> None:
    """A driver that knows version 2 only still tells state and health."""
    gpu = gb200()
    gpu.fabric_versions = (2,)
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reading = read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
    assert (reading["fabric_state"], reading["fabric_health_mask"], reading["fabric_cluster"]) == (3, 0x51AA, "5e" * 16)
    assert reading["fabric_summary"] == 0
    gpu.fabric_versions = ()
    assert read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0))["fabric_state"] is None


def test_bit_error_rates_are_unpacked() -> None:
    """Mantissa and exponent share a word; fifteen at 255 stands for zero."""
    assert ber(15 << 8 | 255) == 0.0
    assert ber(3 << 8 | 12) == pytest.approx(3e-12)


def test_a_driver_that_supports_nothing_yields_no_word_about_hardware() -> None:
    """NotSupported, everywhere: the GPU is there, and nothing more is known."""
    found = one(FakeGpu(pci=PCI)).look()
    assert not [f for f in found if f.present]
    assert {f.check for f in found if f.component.gpu} == {"driver.hung", "gpu.lost", "gpu.unreadable"}


@pytest.mark.parametrize("code", [3, 13, 25, 26])
def test_codes_that_mean_not_measured(code: int) -> None:
    """Not supported, no such function, other struct version, deprecated: None, and not even noted as unread."""
    gpu = gb200().set(rows_pending=1, margin_c=-5)
    refused = {"nvml_error": code}
    gpu.fields = dict.fromkeys(gpu.fields, refused)
    gpu.answers = dict.fromkeys(gpu.answers, refused)
    gpu.fabric = gpu.sram = refused
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reading = read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
    assert (reading["rows_pending"], reading["margin_c"], reading["fabric_state"]) == (None, None, None)
    assert reading["unread"] == {}


def test_a_call_that_fails_oddly_is_kept_by_its_code() -> None:
    """Unknown on one call is that value not measured, and on record; nothing is said about the hardware."""
    gpu = gb200()
    gpu.answers["nvmlDeviceGetMarginTemperature"] = {"nvml_error": 999}
    node = one(gpu)
    reading = asyncio.run(node.probe.read())
    assert reading.data["gpus"][0]["unread"] == {"nvmlDeviceGetMarginTemperature": 999}
    assert node.present() == {}
