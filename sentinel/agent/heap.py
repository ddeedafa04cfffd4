"""What a start leaves behind in memory, under the name by which the agent's parts know it; it stands in ``sentinel.heap``."""

from sentinel.heap import settle

__all__ = ["settle"]
