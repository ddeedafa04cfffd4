"""The clock by which leases count: seconds that passed for this machine, sleep included (Linux' CLOCK_BOOTTIME).

This module exists because a lease in the store goes on while its holder does not run. By CLOCK_MONOTONIC, which stands still while
the machine is suspended (clock_gettime(2)), a gateway or a leader would wake up and believe in a lease that was over long ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

boottime: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # a partial: asked twice for each admission
