"""This process's place among those of a run, as torchrun says it in the environment (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from groupwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class World:
    """torchrun's world: `size` processes, of which this one is `rank`, and `local_rank` on its machine, which has
    `local_size` of them; 0: all."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0

    @property
    def leads(self) -> bool:
        """Return whether this is the process that samples, writes and speaks: rank 0."""
        return self.rank == 0


def world() -> World:
    """Return the world that torchrun's environment variables describe, or one process. Raises ConfigError if they make
    no sense."""
    names = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
    given = {field: os.environ[name] for field, name in names.items() if name in os.environ}
    if "size" not in given:
        return World()
    try:
        found = World(**{field: int(value) for field, value in given.items()})
    except ValueError:
        found = World(size=0)
    if not (0 <= found.rank < found.size and found.local_rank >= 0 <= found.local_size):
        raise ConfigError(
            f"the environment says {', '.join(f'{names[field]}={value}' for field, value in given.items())}",
            hint="start several processes with torchrun or groupwise launch, or unset WORLD_SIZE for one",
        )
    return found
