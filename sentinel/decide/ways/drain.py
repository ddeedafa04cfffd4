"""One worker's way out of rotation and back: what entering each state asks for, and where each answer leads.

This module exists so that taking out and bringing back is one thing with one memory. What always holds:

* A drain moves only along ``MOVES`` (moves.py); an outcome that the table does not know for its state is ignored (a late answer).
* Traffic leaves before anything is stopped, and returns only after a start, an active test and clean counters.
* A drain in a working state always has an effect outstanding, or gets it again on a tick: none is ever stuck in silence.
* A worker does not return while anything that would take it out again still stands, unless a person holds it in.
* A drain of a worker that the configuration does not name now stands still; it goes on when the worker is there again.
* After ``unknown_tries`` tries without an answer a person is asked. A repair or start then stays out, as one that fails does.
* Who is well and tested stays on the way back and is tried on: a serving layer without an answer costs no capacity.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.events import AnyEffect, AwaitIdle, Deroute, Done, Repair, Reroute, StartWorker, StopWorker, Verify
from sentinel.decide.state.moves import MOVES, TOLD, VERBS, WORKING
from sentinel.decide.state.picture import ENDED, Picture, with_step
from sentinel.decide.supply.pace import Pace
from sentinel.decide.ways.repair import Repairs, node_of
from sentinel.decide.ways.way_back import WayBack
from sentinel.model import Action, Component, Drain, DrainState, Response, Step

S = DrainState


class Drains:
    """Moves drains along the table and emits what each state asks for."""

    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p = picture
        self.incidents = incidents
        self.repairs = Repairs(picture, incidents)
        self.back = WayBack(picture, incidents, self, self.repairs)
        self.pace = Pace(picture)
        self._tries: dict[tuple[str, str], int] = {}  # (drain, verb) → tries without an answer
        self._retry_at: dict[str, float] = {}  # drain → not before

    # -- moving -----------------------------------------------------------------------------------------------------

    def request(self, drain: Drain) -> Drain:
        """Begin: durable first, its first effects in the same batch."""
        first = TOLD.get(drain.state, "decided")
        drain = with_step(drain, Step(at=self.p.now, what=first, why=drain.reason, cause=self.p.cause))
        drain = self.p.put_drain(msgspec.structs.replace(drain, since=self.p.now))
        self.pace.moved(drain)
        self._enter(drain)
        return drain

    def move(self, drain: Drain, outcome: str, why: str, **changes: object) -> Drain:
        """Take one step of the table, write it down, and ask for what the new state needs."""
        state = MOVES.get((drain.state, outcome))
        if state is None:
            return drain
        for verb in ("deroute", "idle", "stop", "repair", "start", "verify", "reroute"):
            self._tries.pop((drain.id, verb), None)
        self._retry_at.pop(drain.id, None)
        drain = msgspec.structs.replace(drain, state=state, since=self.p.now, **changes)
        drain = with_step(drain, Step(at=self.p.now, what=TOLD.get(state, state.value), why=why, cause=self.p.cause))
        drain = self.p.put_drain(drain)
        if state is S.REQUESTED:  # it had traffic again, or still
            self.pace.moved(drain)
        self._enter(drain)
        return drain

    def note(self, drain: Drain, what: str, why: str) -> Drain:
        return self.p.put_drain(with_step(drain, Step(at=self.p.now, what=what, why=why, cause=self.p.cause)))

    # -- what each state asks for -----------------------------------------------------------------------------------

    def _enter(self, drain: Drain) -> None:
        for effect in self._effects_of(drain):
            self.p.effect(effect)

    def _effects_of(self, d: Drain) -> list[AnyEffect]:
        lane, why, cause, w = f"worker:{d.worker}", d.reason, self.p.cause, d.worker

        def name(verb: str) -> str:
            tries = self._tries.get((d.id, verb), 0)
            return f"{d.id}/{verb}/{d.attempt}" + (f"#{tries}" if tries else "")

        match d.state:
            case S.REQUESTED:
                out: list[AnyEffect] = [Deroute(id=name("deroute"), cause=cause, lane=lane, why=why, worker=w)]
                if d.response is Response.EVICT:
                    out.append(StopWorker(id=name("stop"), cause=cause, lane=lane, why=why, worker=w, hard=True))
                return out
            case S.DEROUTED:
                lane = f"idle:{d.id}"  # a lane of its own: worse news must not queue behind a wait
                return [AwaitIdle(id=name("idle"), cause=cause, lane=lane, why=why, worker=w, until=d.since + d.deadline_s)]
            case S.STOPPING:
                hard = d.response is Response.EVICT
                return [StopWorker(id=name("stop"), cause=cause, lane=lane, why=why, worker=w, hard=hard)]
            case S.REPAIRING:
                node = node_of(d)
                lane = f"node:{node}"
                return [Repair(id=name("repair"), cause=cause, lane=lane, why=why, node=node, action=d.repair, target=d.target)]
            case S.STARTING:
                return [StartWorker(id=name("start"), cause=cause, lane=lane, why=why, worker=w)]
            case S.VERIFYING if not d.verified:
                deadline = min(30.0, float(self.p.policy.timing.verify_deadline))
                lane = f"verify:{d.id}"  # a lane of its own, as for the wait
                return [Verify(id=name("verify"), cause=cause, lane=lane, why=why, worker=w, deadline_s=deadline)]
            case S.RETURNING if d.response is not Response.STEER:  # that never left
                return [Reroute(id=name("reroute"), cause=cause, lane=lane, why=why, worker=w)]
            case _:
                return []

    # -- what came back ---------------------------------------------------------------------------------------------

    def done(self, event: Done) -> tuple[Drain, str] | None:
        """Fold the end of an effect. Returns (drain, sentence) when a person must now decide, else None."""
        drain_id, _, rest = event.instruction.partition("/")
        verb = rest.partition("/")[0]
        drain = self.p.drains.get(drain_id)
        if drain is None or drain.state in ENDED:
            return None
        if drain.worker not in self.p.workers and event.ok is not True:
            return None  # nothing can be done about a worker that is not configured: asked again when it is
        if event.ok is None or (event.ok is False and verb in ("deroute", "stop", "reroute", "verify")):
            return self._try_again(drain, verb, event)
        return self._settled(drain, verb, event)

    def _settled(self, drain: Drain, verb: str, event: Done) -> tuple[Drain, str] | None:
        match verb, drain.state:
            case "deroute", S.REQUESTED:
                outcome = {Response.EVICT: "evicted", Response.CORDON: "eased"}.get(drain.response, "derouted")
                self.move(drain, outcome, drain.reason)
            case "idle", S.DEROUTED:
                self._left(drain, idle=bool(event.ok), detail=event.detail)
            case "stop", S.STOPPING if drain.kind == "retire" and self._stands_by(drain):
                self.move(drain, "retired", "stopped; stands by again", stopped=True)
                self.p.standby_up.discard(drain.worker)
            case "stop", S.STOPPING | S.REQUESTED:
                self.move(drain, "stopped", event.detail or "its process has ended", stopped=True)
            case "repair", S.REPAIRING:
                return self.back.repair_ended(drain, event)
            case "start", S.STARTING:
                if event.ok:
                    self.move(drain, "started", event.detail or "started; waiting for its first right answer", stopped=False)
                else:
                    return self.back.not_started(drain, event.detail)
            case "verify", S.VERIFYING:
                drain = self.note(msgspec.structs.replace(drain, verified=True), "active test passed", event.detail)
                return self.back.when_clean(drain)
            case "reroute", S.RETURNING:
                self._back(drain)
            case _:
                pass
        return None

    def _stands_by(self, drain: Drain) -> bool:
        """Whether it is still configured as a standby: one that is not is wanted, and comes back from where it is."""
        worker = self.p.workers.get(drain.worker)
        return worker is None or worker.standby

    def _left(self, drain: Drain, *, idle: bool, detail: str) -> None:
        why = "nothing in flight" if idle else f"deadline passed: {detail or 'requests still in flight'}"
        if not idle:
            drain = msgspec.structs.replace(drain, response=Response.EVICT)  # past its deadline it is stopped hard
        if drain.repair is not Action.NONE or drain.kind == "retire":
            self.move(drain, "stop", why)
        else:
            self.move(drain, "park", why)

    def _back(self, drain: Drain) -> None:
        worker = self.p.workers.get(drain.worker)
        if worker is not None and worker.standby:  # one that fell ill on its way up is up now all the same
            self.p.standby_up.add(drain.worker)
        self.move(drain, "rerouted", "takes traffic again" if drain.kind == "drain" else "takes traffic")

    def _try_again(self, drain: Drain, verb: str, event: Done) -> tuple[Drain, str] | None:
        if event.ok is False and verb == "stop":  # the agent's answer to this key is final; ask anew
            drain = self.p.put_drain(msgspec.structs.replace(drain, attempt=drain.attempt + 1))
        tries = self._tries[(drain.id, verb)] = self._tries.get((drain.id, verb), 0) + 1
        timing = self.p.policy.timing
        self._retry_at[drain.id] = self.p.now + timing.retry
        if verb == "idle":  # not measured is not idle: the deadline alone ends the wait
            if self.p.now >= drain.since + drain.deadline_s:
                self._left(drain, idle=False, detail=event.detail or "what is in flight could not be measured")
            return None
        if verb == "verify":
            if self.p.now - drain.since < timing.verify_deadline:
                return None
            return self.back.untested(drain, event.detail)
        if verb == "deroute" and drain.response is Response.EVICT:
            return None  # the stop behind it in the same lane is what counts
        if tries < timing.unknown_tries:
            return None
        if verb in ("repair", "start"):  # of who is well and tested nothing is taken back because whatever routes to it is mute
            drain = self.move(drain, "failed", f"{verb} gave no answer {tries} times: {event.detail}", returns=False)
        elif tries > timing.unknown_tries:
            return None  # a person has been asked already; go on trying
        return drain, f"{drain.worker}: {verb} gave no answer {tries} times: {event.detail}"

    # -- what time brings -------------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[Drain, str]]:
        """Ask again for what has no answer, begin repairs, let verified workers return. Returns what a person must decide."""
        asks: list[tuple[Drain, str]] = []
        for drain in self.p.open_drains():
            if self._waiting(drain) or self.p.now < self._retry_at.get(drain.id, 0.0) or drain.worker not in self.p.workers:
                continue
            ask = None
            if self.back.waits_for_boot(drain):
                ask = self.back.rebooting(drain)
            elif drain.state in WORKING or (drain.state is S.VERIFYING and not drain.verified):
                self._enter(drain)
            elif drain.state is S.VERIFYING:
                ask = self.back.when_clean(drain)
            elif drain.state is S.OUT and drain.returns:
                ask = self.back.begin(drain)
            if ask:
                asks.append(ask)
        return asks

    def _waiting(self, drain: Drain) -> bool:
        """Whether an effect that its state asked for has not ended yet."""
        return any(f"{drain.id}/{verb}/{drain.attempt}" in self.p.outstanding for verb in VERBS.get(drain.state, ()))

    def retries(self, drain_id: str) -> bool:
        """Whether a step of it has had no answer and waits to be tried again."""
        return drain_id in self._retry_at

    def come_back(self, drain: Drain, why: str) -> Drain:
        """From OUT towards rotation, by start and test. A hold keeps it out."""
        return self.back.towards(drain, why)

    # -- what people and worse news bring ---------------------------------------------------------------------------

    def escalate(self, drain: Drain, response: Response, repair: Action, target: str, why: str, *, returns: bool) -> Drain:
        """Worse news about a worker that is already on its way out: the stronger response and repair win."""
        stronger = repair.rank > drain.repair.rank
        coming_back = drain.state in (S.STARTING, S.VERIFYING, S.RETURNING)
        anew = coming_back and repair is not Action.NONE
        gone = anew or (response is Response.EVICT and (coming_back or drain.response is not Response.EVICT))
        if not gone and not stronger and (returns or not drain.returns):
            return drain
        drain = msgspec.structs.replace(drain, returns=drain.returns and returns)
        if stronger or anew:
            done = tuple(r for r in drain.repaired if r not in (target, Component.parse(target).node))
            drain = msgspec.structs.replace(drain, repair=repair, target=target, repaired=done)
        running = not drain.stopped or drain.state is S.STARTING
        if gone and running and (drain.state, "evicted") in MOVES:
            drain = msgspec.structs.replace(drain, response=Response.EVICT, verified=False)
            return self.move(drain, "evicted", why, attempt=drain.attempt + 1)
        if drain.state is S.RETURNING:
            return self.out_again(drain, why)
        return self.note(drain, "escalated", why)

    def out_again(self, drain: Drain, why: str) -> Drain:
        """From where it has traffic (RETURNING, EASED), gently out of rotation once more."""
        return self.move(drain, "again", why, response=Response.DRAIN, verified=False, attempt=drain.attempt + 1)

    def drop(self, drain: Drain, why: str) -> Drain:
        """End it where it stands; what it still has on its way is not waited for."""
        drain = msgspec.structs.replace(drain, state=S.CANCELLED, since=self.p.now)
        return self.note(drain, "cancelled", why)

    def give_up(self, drain: Drain, why: str) -> Drain:
        """A person wants it back: at once while nothing is stopped, else by the way that leads back from where it is."""
        worker = self.p.workers.get(drain.worker)
        if worker is None:  # stands still: it comes back from where it is when it is configured again
            return self.note(msgspec.structs.replace(drain, returns=True), "undrain", why)
        held = self.p.held(worker, "out") is not None  # then it goes the long way, and waits there
        if (drain.state, "cancel") in MOVES and drain.response is not Response.EVICT and not held:
            return self.move(drain, "cancel", why)
        if drain.state is S.OUT:  # whoever says so has mended it, or does not want it mended
            return self.come_back(msgspec.structs.replace(drain, repair=Action.NONE), why)
        return self.note(msgspec.structs.replace(drain, returns=True), "undrain", why)
