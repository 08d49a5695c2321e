"""Adapters on the Hugging Face hub, by name: `hf://OWNER/NAME`, or `hf://OWNER/NAME@REVISION`.

The configuration, the weights, and how the adapter was trained to be asked, where `groupwise push` said so, are
downloaded once into the hub's own cache, by its client, and copied as plain files to where it lets libraries keep
theirs. A branch is looked up each time; where the hub is away, what is cached counts.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from groupwise.errors import AdapterError, ConfigError
from groupwise.store import files
from groupwise.store.hub_errors import explained

SCHEME = "hf://"
MANNER = (
    "groupwise_chat.json"  # beside an adapter that `groupwise push` uploaded: what `locate.manner_of` says of its run
)
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
REPOSITORY = re.compile(rf"{_PART}/{_PART}")  # OWNER/NAME
_NAMED = re.compile(rf"(?P<repo>{REPOSITORY.pattern})(?:@(?P<revision>[^@\s]+))?")
_VALID = "write hf://OWNER/NAME, or hf://OWNER/NAME@REVISION for a branch, a tag or a commit"


def is_on_hub(text: str) -> bool:
    """Return whether `text` names an adapter on the hub."""
    return text.startswith(SCHEME)


def download_adapter(text: str) -> Path:
    """Return a directory in PEFT's layout with what `text` names, which is called as the repository is.

    Raises ConfigError if it is not such a name, AdapterError if the repository holds no LoRA adapter, HubError if
    it cannot be had.
    """
    found = _NAMED.fullmatch(text.removeprefix(SCHEME))
    if found is None:
        raise ConfigError(f"{text!r} names no adapter on the hub", hint=_VALID)
    from huggingface_hub import cached_assets_path, constants, snapshot_download

    repo = found["repo"]
    with explained("downloading", repo=repo):
        wanted = [files.CONFIG, files.WEIGHTS]
        snapshot = Path(snapshot_download(repo, revision=found["revision"], allow_patterns=[*wanted, MANNER]))
    if missing := [name for name in wanted if not (snapshot / name).is_file()]:
        raise AdapterError(
            f"{repo} on the hub holds no LoRA adapter that can be loaded: it has no {' and no '.join(missing)}",
            hint=f"a whole model is named without {SCHEME}: {repo}; weights as a pickle (.bin) are not read",
        )
    owner, name = repo.split("/")
    called = name if files.is_name(name) else f"{owner}-{name}"[:64]
    of_commit = f"{owner}--{name}--{snapshot.name}"
    place = cached_assets_path("groupwise", "adapters", of_commit, assets_dir=constants.HF_ASSETS_CACHE) / called
    if not place.is_dir():
        _copy(snapshot, place)
    return place


def base_of(directory: Path) -> str | None:
    """Return the model that a PEFT directory says it was trained on."""
    named = json.loads((directory / files.CONFIG).read_bytes()).get("base_model_name_or_path")
    return str(named) if named else None


def pushed_manner(directory: Path) -> dict[str, Any]:
    """Return the settings of prompts that were pushed with an adapter (`system`, `chat`, `structured_outputs`); empty
    if there are none."""
    try:
        said = json.loads((directory / MANNER).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return {key: said[key] for key in ("system", "chat", "structured_outputs") if key in said}


def _copy(snapshot: Path, place: Path) -> None:
    """Copy what the cache links to, whole or not at all."""
    with files.writing(f"copying an adapter to {place}"):
        staged = files.staging_path(place.parent)
        try:
            staged.mkdir()
            files.copy_file(snapshot / files.CONFIG, staged / files.CONFIG, limit=files.MAX_CONFIG_BYTES)
            files.copy_file(snapshot / files.WEIGHTS, staged / files.WEIGHTS, limit=files.MAX_WEIGHTS_BYTES)
            if (snapshot / MANNER).is_file():
                files.copy_file(snapshot / MANNER, staged / MANNER, limit=files.MAX_CONFIG_BYTES)
            try:
                staged.rename(place)
            except OSError:
                if not place.is_dir():  # else another process of the same run was quicker
                    raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
