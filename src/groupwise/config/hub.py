"""Resolves a model's name, and reads from Hugging Face's hub without long waits: if it cannot be reached, that is found
out once, at the start.

The hub's libraries ask for every file several times, with longer and longer pauses, before they look into their cache
or give up. Within `reading(name)` the hub is asked once; if it does not answer, the libraries are in their offline mode
meanwhile.
"""

from __future__ import annotations

import difflib
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.config.run import PACKAGED
from groupwise.errors import ModelError

ANSWER_S = 10.0  # as huggingface_hub waits for one
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
WEIGHTS = ("*.safetensors", "*.bin")
_lock = threading.Lock()
_within = 0
_NAMES = (
    "give 'starter', a directory with config.json, tokenizer and safetensors, or a Hugging Face name such as "
    "Qwen/Qwen3-0.6B"
)


def model_path(name: str) -> str:
    """Return the path or name that transformers loads for a model's name: the directory of one in the package, a
    directory (`~` is the home), or a name on the hub."""
    if name in PACKAGED:
        return str(PACKAGED[name])
    return str(Path(name).expanduser()) if name.startswith("~") else name


def check_model(name: str) -> None:
    """Raise ModelError for a model that cannot be loaded, as far as files and the hub's cache tell: a misspelt name, a
    directory that is not there or lacks a part, a hub that does not answer. Without torch, and without retries."""
    path = Path(model_path(name))
    if name in PACKAGED:
        return
    if path.is_dir():
        _check_directory(name, path)
    elif path.exists():
        raise ModelError(f"model {name!r} cannot be loaded: it is a file", hint=f"name its directory, {path.parent}")
    elif name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        beside = [each.name for each in path.parent.glob("*") if each.is_dir()] if path.parent.is_dir() else []
        similar = difflib.get_close_matches(path.name, beside, n=1)
        raise ModelError(
            f"model {name!r} cannot be loaded: there is no directory {path.absolute()}",
            hint=f"did you mean {path.parent / similar[0]}?" if similar else _NAMES,
        )
    else:
        _check_name(name)


def _check_directory(name: str, path: Path) -> None:
    there = {each.name for each in path.iterdir()}
    if "config.json" not in there and "adapter_config.json" in there:
        raise ModelError(
            f"model {name!r} cannot be loaded: the directory holds a LoRA adapter, not a model",
            hint="name the adapter's base in `model`, and the adapter in `adapters.start` or --adapter",
        )
    lacks = [
        what
        for what, found in (
            ("config.json", "config.json" in there),
            (f"tokenizer (none of {', '.join(TOKENIZERS)})", bool(there & {*TOKENIZERS})),
            (f"weights ({' or '.join(WEIGHTS)})", any(each for kind in WEIGHTS for each in path.glob(kind))),
        )
        if not found
    ]
    if lacks:
        raise ModelError(
            f"model {name!r} cannot be loaded: the directory {path.absolute()} has no {' and no '.join(lacks)}",
            hint="write model and tokenizer there with save_pretrained, or name another directory",
        )


def _check_name(name: str) -> None:
    """Check a name on the hub: it is spelt as one, and cached or to be had."""
    if "/" not in name and (similar := difflib.get_close_matches(name.lower(), PACKAGED, n=1, cutoff=0.8)):
        raise ModelError(f"there is no model {name!r}; did you mean {similar[0]}?", hint=_NAMES)
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ModelError(f"model {name!r} is no name of a model and no directory", hint=_NAMES) from None
    if try_to_load_from_cache(name, "config.json"):
        return
    away = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
    if constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT):
        raise ModelError(
            f"model {name!r} cannot be loaded: there is no directory {Path(name).absolute()}, it is not in the cache "
            f"{constants.HF_HUB_CACHE}, and {away}",
            hint="model=starter, and starter-vl, which sees, need no network; or let this machine reach the hub "
            "(HTTPS_PROXY, HF_ENDPOINT, HF_HUB_OFFLINE); or where there is a network "
            f"`hf download {name} --local-dir DIR`, and name DIR, brought here",
            kind="hub_away",
        )


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
    """Return whether the hub answers, whatever it says; asked once in a process."""
    from huggingface_hub.utils import get_session

    try:
        session: Any = get_session()  # with the proxies and certificates of the libraries themselves
        session.head(f"{endpoint}/robots.txt", timeout=ANSWER_S)
    except Exception:
        return False
    return True


def _enter(step: int) -> None:
    """Turn the libraries' offline mode on with the first reader, and off with the last."""
    global _within
    from huggingface_hub import constants

    with _lock:
        _within += step
        constants.HF_HUB_OFFLINE = bool(_within)
        if (datasets := sys.modules.get("datasets")) is not None:
            datasets.config.HF_HUB_OFFLINE = bool(_within)
