"""More workers than there are: the site's own command, run on this host.

This module exists because whatever runs the workers (an operator of Kubernetes, a scheduler, a script) is the site's own. What
always holds: the command is one argument vector from the configuration, off by default, run without a shell and with nothing
of this process's environment; its placeholders take names and a number and nothing else; exit status 0 means that it was asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from sentinel.agent.actions import CarryOut, NotAllowed, Vector, fill, run_vector
from sentinel.model import Command, Role
from sentinel.serving import AdapterError

log = structlog.get_logger(__name__)

DEADLINE_S = 60.0  # for asking, not for getting: the workers come later, by themselves
_NAME = "scale_out"
_LATE = "killed at its deadline"  # how ``run_vector`` says that it cannot be told


class ScaleHook:
    """``Serving``'s way to ask for more: the ``[controller] scale_out`` vector with {pool}, {role} and {count} filled in."""

    def __init__(self, vector: Sequence[str], carry_out: CarryOut = run_vector) -> None:
        self._vector: Vector = tuple(vector)
        self._carry_out = carry_out

    async def __call__(self, pool: str, role: Role, count: int) -> bool:
        """True: asked for; False: refused, and the log has what was said. Raises AdapterError when it cannot be told."""
        args = {"pool": pool, "role": role.value, "count": str(count)}
        try:
            vector = fill({_NAME: self._vector}, Command(id=_NAME, node="", action=_NAME, args=args))
        except NotAllowed as error:
            log.error("a scale-out is refused", pool=pool, role=role.value, count=count, error=str(error))
            return False
        log.warning("asking for more workers", pool=pool, role=role.value, count=count, vector=vector)
        ok, said = await self._carry_out(vector, DEADLINE_S)
        if not ok and said.startswith(_LATE):
            raise AdapterError(f"{vector[0]}: {said}")
        if not ok:
            log.error("a scale-out was not done", pool=pool, role=role.value, count=count, said=said)
        return ok
