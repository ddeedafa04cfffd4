"""How much doubt the fleet can afford: what holds an automatic drain back.

What always holds: a drain that is budgeted never takes a role of a pool below its floor, never more than the configured
number per window, never more than a share of one NVLink domain; a drain of what is already dead is never held back; and
what is held back is said in one sentence with what would unblock it.
"""

from __future__ import annotations

from sentinel.decide.picture import Picture
from sentinel.model import Drain, Role, Worker, WorkerState

IN_SERVICE = (WorkerState.ACTIVE, WorkerState.CORDONED)
_ALL = (*IN_SERVICE, WorkerState.OUT)


def roles_of(worker: Worker) -> tuple[Role, ...]:
    return (Role.PREFILL, Role.DECODE) if worker.role is Role.BOTH else (worker.role,)


def blocks(p: Picture, worker: Worker) -> str:
    """Why this worker may not be drained on doubt now; "" when it may."""
    pool = p.pools[worker.pool]
    for role in roles_of(worker):
        total = p.capacity(pool.name, role, _ALL)
        left = p.capacity(pool.name, role, IN_SERVICE, without=worker.name)
        if total > 0 and left < pool.floor * total:
            return (
                f"pool {pool.name} would keep {left:g} of {total:g} {role.value} capacity, below its floor of {pool.floor:.0%}; "
                f"return or add {role.value} workers, or drain {worker.name} by hand"
            )
    recent = [d for d in p.drains.values() if _doubtful_lately(p, d) and _same_role(p, d, worker)]
    if len(recent) >= pool.max_doubtful_drains:
        oldest = min(d.requested_at for d in recent)
        wait = oldest + p.policy.budget.window - p.now
        minutes = p.policy.budget.window / 60
        return (
            f"{len(recent)} doubtful drains of pool {pool.name} in {minutes:g} min (limit {pool.max_doubtful_drains}); "
            f"the next is possible in {max(0.0, wait):.0f} s, or drain {worker.name} by hand"
        )
    if worker.domain:
        peers = [w for w in p.workers.values() if w.domain == worker.domain and w.pool == worker.pool and not w.standby]
        total = sum(w.capacity for w in peers)
        out = sum(w.capacity for w in peers if w.name == worker.name or _doubtfully_out(p, w))
        if len(peers) > 1 and total > 0 and out > pool.max_domain_share * total:
            return (
                f"NVLink domain {worker.domain} would have {out:g} of {total:g} capacity out on doubt "
                f"(limit {pool.max_domain_share:.0%}); return a worker of it first, or drain {worker.name} by hand"
            )
    return ""


def _doubtful_lately(p: Picture, drain: Drain) -> bool:
    return drain.doubtful and p.now - drain.requested_at < p.policy.budget.window


def _doubtfully_out(p: Picture, worker: Worker) -> bool:
    drain = p.open_drain(worker.name)
    return drain is not None and drain.doubtful


def _same_role(p: Picture, drain: Drain, worker: Worker) -> bool:
    other = p.workers.get(drain.worker)
    return other is not None and other.pool == worker.pool and bool(set(roles_of(other)) & set(roles_of(worker)))
