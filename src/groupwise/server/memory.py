"""Whether the kernel has ended a process for want of memory, as far as it tells.

Linux counts its OOM kills, those of the whole machine's memory and those of a control group's limit alike: for each
control group (`oom_kill` in memory.events.local, or of cgroup version 1 in memory.oom_control), and for the machine
(/proc/vmstat). A worker is in its server's group. If it ended by SIGKILL while the group's count rose it is taken for
one of them. Where the group has no count the machine's is read, which rises for others' processes, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
COUNTS = ("memory.events.local", "memory.events", "memory.oom_control")  # a line each: name, number


def oom_kills() -> int:
    """How many there were so far; 0 where it does not say."""
    for path in (*_of_group(), PROC / "vmstat"):
        with suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _of_group() -> Iterator[Path]:
    """Where this process's group may have its count. A container may see its own group as the root of the mount."""
    with suppress(OSError, ValueError):
        for line in (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mount = GROUPS / "memory" if controllers else GROUPS
            for group in dict.fromkeys((mount / inside.strip("/"), mount)):
                yield from (group / name for name in COUNTS)
