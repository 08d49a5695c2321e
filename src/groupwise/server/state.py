"""The parts of a running server, as every route gets them.

server_of(request)    the `Server` behind a request
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from starlette.requests import Request

    from groupwise.config.serve import ServeConfig
    from groupwise.model.load import LoadedModel
    from groupwise.server.metrics import Recorder
    from groupwise.server.policies import Policies
    from groupwise.server.reader import Reader
    from groupwise.server.storage import StorageProbe
    from groupwise.server.supervisor import Supervisor
    from groupwise.store.adapters import AdapterStore
    from groupwise.store.ledger import Ledger
    from groupwise.types import LiveEngine


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the routes work with; `request.app.state.server`."""

    config: ServeConfig
    base: LoadedModel
    engine: LiveEngine
    store: AdapterStore
    ledger: Ledger
    policies: Policies
    reader: Reader
    recorder: Recorder
    supervisor: Supervisor

    @cached_property
    def storage(self) -> StorageProbe:
        """Whether the state directory can still be written."""
        from groupwise.server.storage import StorageProbe  # imports numpy: too slow before the port is bound

        return StorageProbe(self.config.state_dir)

    @property
    def paths(self) -> Mapping[str, str]:
        """The directories of this machine that no answer names, and what stands in their place."""
        from groupwise.server.errors import private_paths  # which needs fastapi; this module is read before a start

        return private_paths(self.config.state_dir, self.config.model)


def server_of(request: Request) -> Server:
    """The parts of the server that answers `request`."""
    return cast("Server", request.app.state.server)


# ----------------------------------------------------------------------------------------------------------------------
# Whether the kernel has ended a process for want of memory, as far as it tells.
#
# Linux counts its OOM kills, those of the whole machine's memory and those of a control group's limit alike: for each
# control group (`oom_kill` in memory.events.local, or of cgroup version 1 in memory.oom_control), and for the machine
# (/proc/vmstat). A worker is in its server's group. If it ended by SIGKILL while the group's count rose it is taken for
# one of them. Where the group has no count the machine's is read, which rises for others' processes, too.
# ----------------------------------------------------------------------------------------------------------------------

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
