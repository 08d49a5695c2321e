"""What the slow tests ask of a real server's process: its size, its open files, and one chat after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crash.place import Place

MIB = 1 << 20
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 3 = ?"}], "max_tokens": 4, "temperature": 0}


def pid_of(place: Place) -> int:
    """The server's process, as its lock says."""
    return int((place.state / "server.lock").read_text().split()[1])


def resident(place: Place) -> int:
    """Bytes of memory that the server's process has now."""
    return _status(place, "VmRSS")


def highest_resident(place: Place) -> int:
    """The most that it has had, since it started or since `forget_highest`."""
    return _status(place, "VmHWM")


def forget_highest(place: Place) -> None:
    Path(f"/proc/{pid_of(place)}/clear_refs").write_text("5")


def open_sockets(place: Place) -> int:
    """How many sockets the server's process has open."""
    descriptors = Path(f"/proc/{pid_of(place)}/fd").iterdir()
    return sum(_target(descriptor).startswith("socket:") for descriptor in descriptors)


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # closed just now
        return ""


def _status(place: Place, key: str) -> int:
    for line in Path(f"/proc/{pid_of(place)}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc has no {key}")
