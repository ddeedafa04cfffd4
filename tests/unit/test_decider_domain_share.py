"""How much of one NVLink domain doubt may have out at once."""

from __future__ import annotations

from sentinel.model import Action, Component, Finding, Fleet, Pool, Role, Severity, Suspect, Worker, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World


def domain_of_three() -> Fleet:
    """One prefill group that is two thirds of what its domain is worth, and two decoders."""
    prefill = Worker(
        name="prefill", pool="main", url="http://prefill", role=Role.PREFILL, domain="r1", nodes=("t01", "t02"),
        gpus=tuple(gpu_component(t, p) for t in ("t01", "t02") for p in PCIS),
    )  # fmt: skip
    decoders = tuple(
        Worker(
            name=f"decode-{n}", pool="main", url=f"http://decode-{n}", role=Role.DECODE, domain="r1", nodes=(f"t0{n + 2}",),
            gpus=tuple(gpu_component(f"t0{n + 2}", p) for p in PCIS),
        )
        for n in (1, 2)
    )  # fmt: skip
    pools = (Pool(name="main", floor=0.0, max_doubtful_drains=10, overflow=("spare",)), Pool(name="spare", primary=False))
    spare = Worker(name="spare-1", pool="spare", url="http://spare-1", nodes=("t09",))
    return Fleet(pools=pools, workers=(prefill, *decoders, spare), nodes=("t01", "t02", "t03", "t04", "t09"))


def frozen(w: World, worker: str, node: str) -> Finding:
    doubt = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 0.95}
    return w.state("worker.frozen", Component(node=node, device=f"worker@{worker}"), **doubt)


def test_the_first_one_out_may_be_larger_than_the_share() -> None:
    """A prefill group that alone is more than the share is not kept in for ever: what protects the pool then is its floor."""
    w = World(domain_of_three())
    w.pass_time(5)
    w.held = w.busy
    w.report(frozen(w, "prefill", "t01"))
    assert w.state_of("prefill") is WorkerState.OUT


def test_a_second_one_past_the_share_is_kept_in_and_says_why() -> None:
    """With one worker of the domain out on doubt, the next waits, and its page names the domain and what would unblock it."""
    w = World(domain_of_three())
    w.pass_time(5)
    w.outcomes = lambda effect: None if type(effect).__name__ in ("StartWorker", "Verify") else True
    w.report(frozen(w, "prefill", "t01"))
    w.report(frozen(w, "decode-1", "t03"))
    assert w.state_of("decode-1") is WorkerState.ACTIVE
    assert any("NVLink domain r1" in p.summary and "return prefill first" in p.summary for p in w.pages)
