"""What systemd is told, under the name by which the agent's parts know it; it stands in ``sentinel.service`` for all daemons."""

from sentinel.service import Service

__all__ = ["Service"]
