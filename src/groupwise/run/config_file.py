"""Reads a configuration in the words of any system as a run of ours, and tells by its keys whose words they are.

    data:, rewards:                                Groupwise
    rl:, base_model:, trl:                         Axolotl
    ...                                            any other format that is installed (`config.formats.format`)

Overrides are in the words of the file and are applied before it is read. What begins with one of our own sections, such
as rollout.batch_rows=64, is applied to what came of it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from groupwise.config.formats.format import config_formats, format_named
from groupwise.config.formats.translation import MISSING, Note, Translation
from groupwise.config.run import DataConfig, EnvConfig, RunConfig, validated
from groupwise.config.yaml import Document, Keys, dotted, parse_keys
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.tasks.load_env_kind import load_env_kind
from groupwise.tasks.prompts import open_prompts

GROUPWISE = "Groupwise"  # the system of our own words

SHORTHAND = {"rewards": "function"}

DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A configuration as it was understood.

    `idle` has no effect here, `differs` comes out otherwise than in the other system, `refused` is not here. `document`
    holds what was said of the run in our words, and where.
    """

    config: RunConfig
    system: str
    document: Document
    idle: tuple[Note, ...] = ()
    differs: tuple[Note, ...] = ()
    refused: tuple[Note, ...] = ()

    @property
    def incomplete(self) -> bool:
        """Return whether the file does not say what the prompts or rewards are, so that nothing can be tried."""
        return any(origin == MISSING for _, _, origin in self.origins())

    def runnable(self) -> RunConfig:
        """Return the configuration. Raises ConfigError if it asks for what is not here, with the overrides that run
        it."""
        if not self.refused:
            return self.config
        listed = "".join(f"\n  - {note}" for note in self.refused)
        instead = [note.instead for note in self.refused]
        words = dict.fromkeys(word for each in instead for word in each.split())  # each once, in order
        hint = f"it runs with: {' '.join(words)}" if all(instead) else None
        raise ConfigError(f"{self.document.name} asks for what is not in this version:{listed}", hint=hint)

    def origins(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (key, effective value, origin) of every key; the origin is "default" if the key was not set."""
        for keys, value in _leaves(self.config.model_dump(mode="json"), ()):
            said = _is_said(self.document.data, keys)
            yield dotted(keys), value, self.document.origin(keys) or "given" if said else DEFAULT


def read_run(path: str | Path, overrides: Sequence[str] = (), *, system: str | None = None) -> LoadedRun:
    """Read a file in any of the spellings. Raises ConfigError with every problem."""
    document = Document.read(path)
    return understand(document, overrides, folder=Path(path).parent, system=system)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run that a file of ours, or of another installed format, describes; warns of what comes out otherwise
    than in its system.

    Args:
        path: the file; relative paths in it begin at its folder.
        overrides: `train.steps=80` and the like, in the words of the file, applied before it is read.

    Raises:
        ConfigError: a key that is not there or has no valid value, or something that has no counterpart here.
    """
    loaded = read_run(path, overrides)
    config = loaded.runnable()
    for note in loaded.differs:
        warnings.warn(f"not as in {loaded.system}: {note}", stacklevel=2)
    return config


def understand(document: Document, overrides: Sequence[str], *, folder: Path, system: str | None = None) -> LoadedRun:
    """Return a document as a run; relative paths begin in `folder`."""
    system = system or system_of(document.data)
    if system == GROUPWISE:
        return _native(document, overrides, folder)
    written = format_named(system)
    own = {key.name.partition(".")[0].partition("[")[0] for key in written.keys}
    natives = []
    for text in overrides:
        first = parse_keys(text.partition("=")[0])[:1]
        if first and first[0] in RunConfig.model_fields and first[0] not in own:
            natives.append(text)
        else:
            document.override(text, shorthand={})
    t = written.translate(document, folder=folder, count=lambda t: _count(t, natives, folder))
    t.put("folder", str(folder.resolve()), origin="where the file is")
    for text in natives:
        t.draft.override(text, shorthand=SHORTHAND)
    t.refuse_unread()
    if not written.complete(t):
        _complete(t)
    return LoadedRun(
        config=t.finish(),
        system=written.name,
        document=t.draft,
        idle=tuple(t.idle),
        differs=tuple(t.differs),
        refused=tuple(t.refused),
    )


def system_of(data: Mapping[str, Any]) -> str:
    """Return the name of the system whose words these are."""
    ours = not data.keys().isdisjoint({"data", "rewards"})
    if ours and data.keys() <= RunConfig.model_fields.keys():
        return GROUPWISE
    asked = (each for each in config_formats() if each.shares_keys or not ours)
    return next((each.name for each in asked if each.recognises(data)), GROUPWISE)


def _native(document: Document, overrides: Sequence[str], folder: Path) -> LoadedRun:
    for text in overrides:
        document.override(text, shorthand=SHORTHAND)
    document.resolve_folder(folder)
    config = validated(document)
    return LoadedRun(config=config, system=GROUPWISE, document=document)


def _complete(t: Translation) -> None:
    """Say what is missing: a run needs an environment, or prompts and rewards, one that learns what its dataset says
    only the data; else it can be looked at but not run."""
    if "env" in t.draft.data:
        return
    if t.draft.data.get("data", {}).keys().isdisjoint({"source", "sources"}):
        if not t.leaves_open("data"):
            t.refuse("data", f"no data of {t.system}'s are said", instead="data.source=FILE.jsonl")
        t.put("data.source", "FILE.jsonl", origin=MISSING)
    if "rewards" not in t.draft.data and t.draft.data.get("kind", "grpo") == "grpo":
        if not t.leaves_open("rewards"):
            t.refuse("rewards", f"no rewards of {t.system}'s are said", instead="rewards=[MODULE:FUNCTION]")
        t.put("rewards", ["MODULE:FUNCTION"], origin=MISSING)


def _count(t: Translation, natives: Sequence[str], folder: Path) -> int | None:
    """Return the number of prompts; None while the data is not known, or not valid, which is then found out
    otherwise."""
    draft = Document(copy.deepcopy(t.draft.data))
    for text in natives:
        draft.override(text, shorthand=SHORTHAND)
    try:
        if "env" in draft.data and "data" not in draft.data:
            return _count_cases(EnvConfig.model_validate(draft.data["env"]), draft.data.get("model", "starter"), folder)
        data = DataConfig.model_validate(draft.data.get("data"))
    except ValidationError:
        return None
    kind = draft.data.get("kind", "grpo")
    return None if data.streaming else len(open_prompts(data, folder=folder, kind=kind).known)


def _count_cases(config: EnvConfig, model: str, folder: Path) -> int | None:
    """Return the prompts that an environment makes; None where it cannot, which the run itself will explain."""
    if config.environment is None:
        return None
    try:
        env = load_env_kind(config, folder=folder, model=model, scored=False)
        with warnings.catch_warnings(action="ignore"):  # the run itself will say it
            cases = env.cases()
        return None if cases is None else len(cases)
    except GroupwiseError:
        return None


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield the values that are not sections, with their keys; arguments of functions are one value."""
    inside = isinstance(value, dict) and keys[-1:] != ("args",)
    if inside:
        for key, each in value.items():
            yield from _leaves(each, (*keys, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, each in enumerate(value):
            yield from _leaves(each, (*keys, index))
    else:
        yield keys, value


def _is_said(data: Any, keys: Keys) -> bool:
    """Return whether there is a value at `keys`; a string in place of a reward is its function."""
    for key in keys:
        if isinstance(data, str):
            return key == "function"
        held: dict[Any, Any] = dict(data if isinstance(data, Mapping) else enumerate(data or ()))
        if key not in held:
            return False
        data = held[key]
    return True
