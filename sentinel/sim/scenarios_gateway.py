"""Scripted faults that ask for the gateways: one of them dies, more comes than there is room for, a whole pool is gone.

What always holds: as in ``scenarios``; what is expected is what the clients saw, and what the gateways and the store say.
"""

from __future__ import annotations

import asyncio
import time

from sentinel.model import Role
from sentinel.sim.expect import Scenario, failures, ms, only, pages, served_on, some
from sentinel.sim.rack import MAIN, OVERFLOW, PLACES
from sentinel.sim.replicas import LEASE_S, LOOK_S, NAMES
from sentinel.sim.story import Story

DECODERS = [p.name for p in PLACES.values() if p.pool == MAIN and p.role is Role.DECODE]
SEATS = 3  # requests that one worker of ``overload`` runs at once: few, so that two cores can carry three times as many clients
STEP_S, TOKENS = 0.02, 80  # of the simulated engines and their clients: what one seat does in a second follows from them
ROUNDS, GOODPUT_S = 2, 3.0  # how often and how long goodput is measured
AT_ONCE_S = 0.25  # half of the refusals, as clients see them that share the cores with all of the rack
PUSH_S = 0.5  # a table reaches the gateways within 50 ms where the machine has time for it


async def gateway_killed(s: Story) -> None:
    traffic, gateways, victim = s.stage.traffic, s.stage.gateways, NAMES[1]
    await s.until(lambda: traffic.flowing(victim) >= 3, 10)
    owner = gateways.lives[victim][-1]
    held = await gateways.held(s.stage.store, owner)
    s.timeline.inject(f"{victim} gets SIGKILL with {traffic.flowing(victim)} streams running through it and {held} slots leased")
    await gateways.kill(victim)
    killed = time.monotonic()
    left = held
    while left and time.monotonic() < killed + 2 * LEASE_S:
        await s.flow(0.1)
        left = await gateways.held(s.stage.store, owner)
    took = time.monotonic() - killed
    s.timeline.mark("slots are back", f"{held} slots of {victim}")
    died = s.timeline.zero or 0.0
    await s.flow(1)
    s.timeline.mark("gateway returns", f"{victim}: started again on the same address, as systemd would")
    await gateways.revive(victim)
    await gateways.up(s.stage.routes.version if s.stage.routes else 0, 15, (victim,))
    back = time.time()
    served = await s.until(lambda: any(r.ok and r.at > back and r.gateways[-1] == victim for r in traffic.records), 15)
    # The last look but one may have come a moment before the lease's end, and a busy machine takes its time for the next.
    in_time = held > 0 and not left and took < LEASE_S + LOOK_S
    s.expect("its slots were back within one lease", in_time, f"{held} slots after {took:.1f} s of {LEASE_S:g} s")
    s.expect(f"{victim} is back and serves on its address", served)
    only(s, set())
    s.expect("nobody was paged", not s.pages(), pages(s))

    def cut() -> tuple[bool, str]:
        failed = s.failures()
        held = all(r.failed_on == victim and r.tokens and r.at <= died for r in failed) and not s.refusals()
        return held, f"{len(failed)} streams were cut: {failures(s)}"

    def carried() -> tuple[bool, str]:
        new = [r for r in traffic.settled if r.at > died]
        told = f"{len(new)} requests begun after it, {sum(r.retried for r in new)} of them sent to a second gateway"
        return all(r.ok for r in new), told

    s.expect_at_end(f"only streams in the middle of {victim} were cut", cut)
    s.expect_at_end("no request begun after it failed", carried)
    served_on(s)


async def overload(s: Story) -> None:
    traffic = s.stage.traffic
    can_do = len(DECODERS) * SEATS / (TOKENS * STEP_S)
    s.timeline.inject(f"besides the sessions that there are, requests come as fast as {MAIN} can answer them, {can_do:.0f}/s")
    traffic.surge(can_do)
    await s.flow(LEASE_S)  # until the store knows what every gateway holds
    peak, over, began = 0.0, 0.0, 0.0
    for _ in range(ROUNDS):  # by turns, so that a machine that has other things to do does not decide
        traffic.surge(can_do)
        await s.flow(1)
        peak += await _goodput(s, GOODPUT_S) / ROUNDS
        s.timeline.mark("peak", "goodput measured", key="peak")
        s.timeline.mark("overload", f"three times as many come, {3 * can_do:.0f}/s", key="overload")
        began = began or time.time()
        traffic.surge(3 * can_do)
        await s.flow(1)
        over += await _goodput(s, GOODPUT_S) / ROUNDS
    s.timeline.mark("plateau", f"{over:.0f} tokens/s reach the clients, {peak:.0f} without the overload")
    traffic.surge(0)
    await s.flow(1)
    s.expect("goodput stays at 95 % of its peak", over >= 0.95 * peak, f"{over:.0f} of {peak:.0f} tokens/s, {over / peak:.0%}")
    s.expect("no breaker opened", not s.opened, ", ".join(sorted(s.opened)))
    only(s, set())
    s.expect("nobody was paged", not s.pages(), pages(s))

    def refused() -> tuple[bool, str]:
        took = sorted(r.took_s for r in s.refusals() if r.at > began)
        if not took:
            return False, "nothing was refused"
        half, most = took[len(took) // 2], took[len(took) * 9 // 10]
        told = f"{len(took)} refused, half of them within {half * 1000:.0f} ms, nine of ten within {most * 1000:.0f} ms"
        return half < AT_ONCE_S, told

    s.expect_at_end("who is refused is told so at once", refused)

    def later() -> tuple[bool, str]:
        return all(r.retry_after_s > 0 for r in s.refusals()), some([r.refused for r in s.refusals()], 1)

    s.expect_at_end("and when to come back", later)
    s.expect_at_end("nothing that was let in failed", lambda: (not s.failures(), some([r.failed for r in s.failures()])))
    served_on(s)


async def pool_lost(s: Story) -> None:
    victims = {p.name for p in PLACES.values() if p.pool == MAIN}
    await s.stage.agents_look()
    await s.until(lambda: sum(s.stage.traffic.flowing(v) > 0 for v in victims) >= 6, 10)
    s.timeline.inject(f"all {len(victims)} engines of {MAIN} end at once, as in a rollout gone wrong")
    await asyncio.gather(*(s.stage.worker_host("kill", v) for v in victims))
    left = await s.until(lambda: not any(s.active(v) for v in victims), 20)
    moved = await s.until(lambda: _weight(s, MAIN) == 0 and _weight(s, OVERFLOW) > 0, 20)
    since = time.time()
    overflow = await s.until(lambda: s.timeline.first("overflow serves") is not None, 20)
    back = await s.until(lambda: all(s.active(v) for v in victims), 30)
    shifted = await s.until(lambda: _weight(s, MAIN) > 0 and _weight(s, OVERFLOW) == 0, 20)
    resolved = await s.until(lambda: _calls(s, "resolve") == _calls(s) != set(), 20)  # a panic lasts for one window, 10 s
    closed = time.monotonic() + 20
    while (left_open := await s.stage.gateways.breakers(s.stage.store)) and time.monotonic() < closed:
        await s.flow(0.3)
    s.expect("every worker of it left the rotation", left, ms(s, "out of rotation"))
    s.expect("all new sessions went to the overflow pool", moved and overflow, ms(s, "overflow serves"))
    s.expect("one page for all of it, resolved when it was over", resolved and len(_calls(s)) == 1, pages(s))
    only(s, victims)
    s.expect("all of them were restarted and serve again", back, ms(s, "back"))
    s.expect("new sessions are all back", shifted, f"{MAIN} {_weight(s, MAIN):.0%}, {OVERFLOW} {_weight(s, OVERFLOW):.0%}")
    told = f"opened: {', '.join(sorted(s.opened)) or 'none'}; not closed again: {', '.join(left_open) or 'none'}"
    s.expect("breakers opened only on dead workers and closed again", s.opened <= victims and not left_open, told)

    def before() -> tuple[bool, str]:
        lost = [r for r in s.failures() if r.tokens]
        turned = [r for r in s.failures() + s.refusals() if not r.tokens]
        told = f"{len(lost)} streams were cut, {len(turned)} requests turned away, {len(s.refusals())} of them with a Retry-After"
        return all(r.failed_on in victims for r in lost) and all(r.at < since + PUSH_S for r in turned), told

    s.expect_at_end("nothing begun once it had moved failed", before)
    served_on(s)


def _calls(s: Story, event: str = "trigger") -> set[str]:
    """Dedup keys: a further trigger under the same key is news about a call, not another one."""
    return {p["dedup_key"] for p in s.pages(event)}


def _weight(s: Story, pool: str) -> float:
    return next((p.weight for p in s.stage.routes.pools if p.pool == pool), 0.0) if s.stage.routes else 0.0


async def _goodput(s: Story, seconds: float) -> float:
    """Tokens that reach the clients in a second, over so many."""
    before, began = s.stage.traffic.tokens, time.monotonic()
    await s.flow(seconds)
    return (s.stage.traffic.tokens - before) / (time.monotonic() - began)


GATEWAYS = (
    Scenario("gateway-killed", "one of three gateways is killed: its slots come back, the others carry on", gateway_killed),
    Scenario("overload", "three times what the workers can do: goodput stays, the rest is refused at once", overload, slots=SEATS),
    Scenario("pool-lost", "every engine of the primary pool dies: overflow serves, one page, back again", pool_lost),
)
