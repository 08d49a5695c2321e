"""Reading from Hugging Face's hub without long waits: if it cannot be reached, that is found out once, at the start.

Its libraries ask for every file several times, with longer and longer pauses, before they look into their cache or give
up. Within `reading(name)` the hub is asked once; if nobody answers, they are in their offline mode meanwhile.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER_S = 10.0  # as huggingface_hub waits for one
_lock = threading.Lock()
_within = 0


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Context manager around reading a model or a dataset, by path or name; offline mode inside it if the hub is
    away."""
    from huggingface_hub import constants

    if Path(name).exists() or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        yield
        return
    _enter(+1)
    try:
        yield
    finally:
        _enter(-1)


@functools.lru_cache(maxsize=4)
def _answers(endpoint: str) -> bool:
    """Whether the hub answers, whatever it says; asked once in a process."""
    from huggingface_hub.utils import get_session

    try:
        session: Any = get_session()  # with the proxies and certificates of the libraries themselves
        session.head(f"{endpoint}/robots.txt", timeout=ANSWER_S)
    except Exception:
        return False
    return True


def _enter(step: int) -> None:
    """Into the offline mode of the libraries with the first reader, out of it with the last."""
    global _within
    from huggingface_hub import constants

    with _lock:
        _within += step
        constants.HF_HUB_OFFLINE = bool(_within)
        if (datasets := sys.modules.get("datasets")) is not None:
            datasets.config.HF_HUB_OFFLINE = bool(_within)
