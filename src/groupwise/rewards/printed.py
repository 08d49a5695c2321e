"""Shows what user code prints in worker processes: rewards, environments and tools, on stderr, with who said it.

    reward exact: the answer was '42'
    environment Shop: 3 items left

In the worker `Prints` hears what goes through `sys.stdout` and `sys.stderr`, and sends it before the next answer. Here
`show` writes it: of each name 20 lines at once and one more for each second that passed, so that a function that prints
in every call of a long run is still heard, and drowns nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

AT_ONCE = 20  # lines of one name
PER_SECOND = 1.0  # lines that it may print again
LONGEST = 300  # characters of a line that are shown
HEARD = 8_000  # characters between two answers that a worker sends
_MARK = b'{"printed": '


class Prints:
    """The standard streams of this worker, heard from now on."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._room = HEARD
        self._lock = threading.Lock()
        sys.stdout, sys.stderr = _Heard(sys.stdout, self._hear), _Heard(sys.stderr, self._hear)

    def message(self, by: str, *, whole: str) -> bytes | None:
        """Return what was printed since the last time, to be sent: `by` is who said it, `whole` the override with which
        all of it is shown. None for nothing."""
        with self._lock:
            text = "".join(self._parts)
            self._parts.clear()
            self._room = HEARD
        return json.dumps({"printed": text, "by": by, "whole": whole}).encode() if text.strip() else None

    def _hear(self, text: str) -> None:
        with self._lock:
            if heard := text[: self._room]:
                self._parts.append(heard)
                self._room -= len(heard)


class _Heard:
    """Writes to a text stream, and passes each text to `hear`. Everything else is the stream's."""

    def __init__(self, stream: TextIO, hear: Callable[[str], None]):
        self._stream, self._hear = stream, hear

    def write(self, text: str) -> int:
        self._hear(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Share:
    """Limits how many lines of one name are shown."""

    def __init__(self) -> None:
        self.lines, self.since, self.told = float(AT_ONCE), time.monotonic(), False

    def take(self) -> bool:
        now = time.monotonic()
        self.lines = min(float(AT_ONCE), self.lines + PER_SECOND * (now - self.since))
        self.since = now
        if self.lines < 1:
            return False
        self.lines -= 1
        return True


_shares: dict[str, _Share] = {}
_lock = threading.Lock()


def show(message: bytes) -> bool:
    """Write the lines of a message of `Prints`; False if it is something else."""
    if not message.startswith(_MARK):
        return False
    said = json.loads(message)
    with _lock:
        share = _shares.setdefault(said["by"], _Share())
        for line in said["printed"].splitlines():
            if line.strip() and share.take():
                _write(f"{said['by']}: {line.expandtabs()[:LONGEST]}{' ...' if len(line) > LONGEST else ''}")
            elif line.strip() and not share.told:
                share.told = True
                _write(f"{said['by']}: it prints more than is shown; {said['whole']} shows all")
    return True


def _write(line: str) -> None:
    with suppress(OSError, ValueError):  # a terminal or a pipe that is gone: no reason to lose the answer behind it
        print("".join(each if each.isprintable() else repr(each)[1:-1] for each in line), file=sys.stderr, flush=True)
