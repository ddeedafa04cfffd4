"""Every drain ends, is rolled back, or is somebody's who was told; whatever the policy says about pages."""

from __future__ import annotations

import re

import pytest

from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.model import Action, DrainState, gpu_component
from sentinel.testing.decisions import PCIS, World


def quiet_policy(*, auto: bool) -> str:
    """The shipped one, without a page for pending row remaps, and with or without a reset by itself."""
    text = re.sub(r'(repair = "reset_gpu"\n)page = "warning"\npage_after = "30m"', r'\1page = ""', default_policy_text(), count=1)
    return text if auto else text.replace("[repair.reset_gpu]\nauto = true", "[repair.reset_gpu]\nauto = false", 1)


@pytest.mark.parametrize("auto", [True, False])
def test_what_is_left_to_a_person_is_told_to_one(auto: bool) -> None:
    """A rule that pages nobody and a repair that is not sentinel's: the worker that stays out for it is called for all the same."""
    w = World()
    w.use_policy(quiet_policy(auto=auto))
    sick = w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), action=Action.RESET_GPU)
    w.report(sick)
    w.pass_time(30)
    if auto:
        w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), False, action=Action.RESET_GPU))
        w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), False, action=Action.RESET_GPU))
        w.pass_time(60)
        assert w.pages == []
        assert w.drain_of("decode-1").state is DrainState.DONE  # type: ignore[union-attr]
        return
    assert w.drain_of("decode-1").state is DrainState.OUT  # type: ignore[union-attr]
    assert [(p.event, p.urgency) for p in w.pages] == [("trigger", "warning")]
    assert "decode-1" in w.pages[0].summary
    w.pass_time(3600, step=60)
    assert len(w.pages) == 1
