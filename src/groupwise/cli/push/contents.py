"""Collects what is pushed: repositories of the hub, and their files as they lie on this machine or in memory.

A LoRA adapter is its configuration, with the base's name on the hub, and its weights; a merged model or a GGUF file is
made in a folder that is removed afterwards (TMPDIR says where). With each goes the card, and the template and settings
by which the run asked its policy, where these are not the model's own, for `groupwise chat hf://...`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.cli.adapters import check_dtype
from groupwise.cli.push.card import GGUF, MERGED, PEFT, model_card
from groupwise.cli.push.facts import Facts
from groupwise.cli.push.rows import FILE, dataset_card, write_rows
from groupwise.cli.push.space import check_space, space_files
from groupwise.errors import ConfigError
from groupwise.store import files
from groupwise.store.hub_adapters import MANNER
from groupwise.store.masking import Masking

CARD = "README.md"
TEMPLATE = "chat_template.jinja"  # as transformers finds it beside a model
Content = Path | bytes


@dataclass(frozen=True, kw_only=True)
class Repository:
    """Holds a repository that is to be pushed: its `kind` (model, dataset, space), its files by their paths in the
    repository, and the commit message."""

    name: str
    kind: str
    files: Mapping[str, Content]
    message: str

    @property
    def card(self) -> str:
        """Return the text of the repository's README.md."""
        content = self.files[CARD]
        return content.decode() if isinstance(content, bytes) else content.read_text(encoding="utf-8")

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in sorted(self.files.items())
        }


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Holds the options of a push: the repository's name on the hub, the format of the version (None: an adapter, or
    else the whole model), its number type, and whether the run's rollouts and a Space are uploaded, too."""

    repo: str
    format: str | None = None
    dtype: str | None = None
    dataset: bool = False
    space: bool = False


def checked_format(facts: Facts, wanted: Wanted) -> str:
    """Return as what the version goes up. Raises ConfigError for what it cannot be, or what does not go together."""
    trained_all = facts.policy.adapter is None
    format = wanted.format or (MERGED if trained_all else PEFT)
    if trained_all and format == PEFT:
        raise ConfigError(
            f"{facts.run_dir} trained all parameters, so that there is no adapter for --format peft",
            hint="leave --format out, or write merged or gguf: the whole model",
            field="--format",
        )
    if format == PEFT and wanted.dtype is not None:
        raise ConfigError(
            f"--dtype {wanted.dtype} acts with --format merged and gguf only", hint="leave it out", field="--dtype"
        )
    if format != PEFT:
        check_dtype(format, wanted.dtype or "auto")
    if wanted.space:
        check_space(facts, format=format)
    return format


def contents(
    facts: Facts, wanted: Wanted, *, scratch: Path, masking: Masking, note: Callable[[str], None]
) -> Sequence[Repository]:
    """Return the repositories with their files, of which those that are made are in `scratch`; `note` is told what is
    to be known of them. Raises as `checked_format`, and where a model cannot be written or the rollouts not be read."""
    format = checked_format(facts, wanted)
    message = f"{facts.version}, by groupwise push"
    model = dict(_adapter(facts) if format == PEFT else _whole(facts, wanted, format, scratch, note))
    manner = _manner(facts, masking)
    if format == PEFT and manner:
        model[MANNER] = (json.dumps(manner, indent=2, ensure_ascii=False) + "\n").encode()
    template = str(manner.get("chat", {}).get("template") or "")
    if format == MERGED and "{" in template:  # else it is the name of one that the tokenizer has
        model[TEMPLATE] = template.encode()
    file = next((name for name in model if name.endswith(".gguf")), "")
    card = model_card(facts, repo=wanted.repo, format=format, masking=masking, file=file)
    model[CARD] = card.encode()
    found = [Repository(name=wanted.repo, kind="model", files=model, message=message)]
    if wanted.dataset:
        path = scratch / "rollouts.parquet"
        written = write_rows(facts, path, masking=masking)
        rows: dict[str, Content] = {FILE: path}
        rows[CARD] = masking.text(dataset_card(facts, written, repo=wanted.repo)).encode()
        found.append(Repository(name=wanted.repo, kind="dataset", files=rows, message=message))
    if wanted.space:
        of_space = space_files(facts, repo=wanted.repo, format=format)
        masked = {name: masking.text(content.decode()).encode() for name, content in of_space.items()}
        found.append(Repository(name=wanted.repo, kind="space", files=masked, message=message))
    return found


def _adapter(facts: Facts) -> dict[str, Content]:
    """Return the two files of PEFT's layout, the base by its name on the hub or without the folders it is in."""
    assert facts.policy.adapter is not None
    directory = facts.policy.adapter.directory
    files.check_adapter(directory)
    config = json.loads((directory / files.CONFIG).read_bytes())
    config["base_model_name_or_path"] = facts.base.name
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return {files.CONFIG: text.encode(), files.WEIGHTS: directory / files.WEIGHTS}


def _whole(facts: Facts, wanted: Wanted, format: str, scratch: Path, note: Callable[[str], None]) -> dict[str, Content]:
    """Return the files of the whole model."""
    from groupwise.store.export import export_model

    name = wanted.repo.rpartition("/")[2]
    dest = scratch / (f"{name}.gguf" if format == GGUF else "model")
    exported = export_model(facts.policy, dest, format=format, dtype=wanted.dtype or "auto")
    if exported.note:
        note(exported.note)
    if format == GGUF:
        return {f"{name}-{exported.dtype}.gguf": dest}
    config = json.loads((dest / "config.json").read_bytes())
    if "_name_or_path" in config:  # a place on this machine
        config.pop("_name_or_path")
        (dest / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return {str(path.relative_to(dest)): path for path in sorted(dest.rglob("*")) if path.is_file()}


def _manner(facts: Facts, masking: Masking) -> dict[str, Any]:
    """Return how the run asked its policy, the chat template as its text."""
    manner = dict(facts.policy.manner)
    chat = dict(manner.get("chat") or {})
    template = Path(str(chat.get("template") or ""))
    if template.is_file():
        chat["template"] = template.read_text(encoding="utf-8")
    return masking.value(manner | ({"chat": chat} if chat else {}))
