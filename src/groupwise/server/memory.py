"""Whether the kernel has ended a process for want of memory, as far as it tells.

Linux counts its OOM kills (`oom_kill` in /proc/vmstat), those of a container's memory limit too. A worker that ended by
SIGKILL while the count rose is taken for one of them; the count is the machine's, so that now and then it was another.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

COUNTS = Path("/proc/vmstat")  # a line each: name, number


def oom_kills() -> int:
    """How often it has since it was booted; 0 where it does not say."""
    with suppress(OSError, ValueError):
        for line in COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
