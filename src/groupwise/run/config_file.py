"""In which system's words is a configuration written? Read it in any of them as one run of ours.

    data:, rewards:                                Groupwise
    rl:, base_model:, trl:                         Axolotl
    model_name_or_path, num_generations, ...       TRL: the arguments of `trl grpo --config`, at the top level
    rl_env_module, project_name, task and params   aitraining
    trainer:, orchestrator:                        prime-rl, in TOML
    from_pretrained:, get_peft_model:              Unsloth, and TRL's words: what a script (.py, .ipynb) says of them

Overrides are in the words of the file and are applied before it is read. What begins with one of our own sections, such
as rollout.batch_rows=64, is applied to what came of it.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from groupwise.config.importers import aitraining, axolotl, prime_rl, trl, unsloth
from groupwise.config.importers.base import Note, Translation
from groupwise.config.importers.tables import keys_of
from groupwise.config.run import OTHER_NAMES, DataConfig, EnvConfig, RunConfig
from groupwise.config.yaml import Document, Keys, dotted, inline, parse_keys, validate
from groupwise.errors import ConfigError, GroupwiseError, StorageError
from groupwise.tasks.env import load_env
from groupwise.tasks.prompts import open_prompts

System = Literal["Groupwise", "Axolotl", "TRL", "aitraining", "prime-rl", "Unsloth"]
SHORTHAND = {"rewards": "function"}
DEFAULT, MISSING = "default", "missing"


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A configuration as it was understood.

    `idle` has no effect here, `differs` comes out otherwise than in the other system, `refused` is not here. `document`
    holds what was said of the run in our words, and where.
    """

    config: RunConfig
    system: System
    document: Document
    idle: tuple[Note, ...] = ()
    differs: tuple[Note, ...] = ()
    refused: tuple[Note, ...] = ()

    def runnable(self) -> RunConfig:
        """The configuration. Raises ConfigError if it asks for what is not here, with the overrides that run it."""
        if not self.refused:
            return self.config
        listed = "".join(f"\n  - {note}" for note in self.refused)
        instead = [note.instead for note in self.refused]
        words = dict.fromkeys(word for each in instead for word in each.split())  # each once, in order
        hint = f"it runs with: {' '.join(words)}" if all(instead) else None
        raise ConfigError(f"{self.document.name} asks for what is not in this version:{listed}", hint=hint)

    def origins(self) -> Iterator[tuple[str, Any, str]]:
        """(key, effective value, where it comes from) of every key; "default" where nothing was said."""
        for keys, value in _leaves(self.config.model_dump(mode="json"), ()):
            said = _is_said(self.document.data, keys)
            yield dotted(keys), value, self.document.origin(keys) or "given" if said else DEFAULT


def read_run(path: str | Path, overrides: Sequence[str] = (), *, system: System | None = None) -> LoadedRun:
    """Read a file in any of the spellings. Raises ConfigError with every problem."""
    document = Document.read(path)
    return understand(document, overrides, folder=Path(path).parent, system=system)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a file in any of the spellings describes; warns of what comes out otherwise than in its system.

    Raises ConfigError as `read_run` and `runnable` do.
    """
    loaded = read_run(path, overrides)
    config = loaded.runnable()
    for note in loaded.differs:
        warnings.warn(f"not as in {loaded.system}: {note}", stacklevel=2)
    return config


def understand(
    document: Document, overrides: Sequence[str], *, folder: Path, system: System | None = None
) -> LoadedRun:
    """A document as a run; relative paths begin in `folder`."""
    system = system or system_of(document.data)
    if system == "Groupwise":
        return _native(document, overrides, folder)
    modules = {"Axolotl": axolotl, "TRL": trl, "aitraining": aitraining, "prime-rl": prime_rl, "Unsloth": unsloth}
    module = modules[system]
    own = {key.name.partition(".")[0].partition("[")[0] for key in keys_of(system.lower())}
    natives = []
    for text in overrides:
        first = parse_keys(text.partition("=")[0])[:1]
        if first and first[0] in RunConfig.model_fields and first[0] not in own:
            natives.append(text)
        else:
            document.override(text, shorthand={})
    t = module.translate(document, folder=folder, count=lambda t: _count(t, natives, folder))
    t.put("folder", str(folder.resolve()), origin="where the file is")
    for text in natives:
        t.draft.override(text, shorthand=SHORTHAND)
    _complete(t)
    return LoadedRun(
        config=t.finish(),
        system=system,
        document=t.draft,
        idle=tuple(t.idle),
        differs=tuple(t.differs),
        refused=tuple(t.refused),
    )


def system_of(data: Mapping[str, Any]) -> System:
    """The system whose words these are."""
    if not data.keys().isdisjoint({"data", "rewards"}):
        return "Groupwise"
    if prime_rl.is_whole(data) or prime_rl.part_of(data):
        return "prime-rl"
    if not data.keys().isdisjoint({"rl", "trl", "base_model"}):
        return "Axolotl"
    if not data.keys().isdisjoint(aitraining.MARKS) or {"task", "params"} <= data.keys():
        return "aitraining"
    if not data.keys().isdisjoint(unsloth.SECTIONS):
        return "Unsloth"
    return "TRL" if not data.keys().isdisjoint(trl.MARKS) else "Groupwise"


def _native(document: Document, overrides: Sequence[str], folder: Path) -> LoadedRun:
    for text in overrides:
        document.override(text, shorthand=SHORTHAND)
    said = document.data.get("folder", ".")
    if isinstance(said, str):
        document.data["folder"] = str((folder / said).resolve())
    config = validate(document, RunConfig, other_names=OTHER_NAMES)
    return LoadedRun(config=config, system="Groupwise", document=document)


def _complete(t: Translation) -> None:
    """A run needs an environment, or prompts and rewards; without them it can be looked at, but not run."""
    t.refuse_unread()
    if "env" in t.draft.data:
        return
    if t.system == "aitraining" and not {"data", "rewards"} & t.draft.data.keys():
        what = "no environment is said, which makes the prompts and scores; data and rewards of ours do in its place"
        t.refuse("rl_env_module", what, instead="rl_env_module=MODULE rl_env_class=CLASS")
        t.put("data.source", "FILE.jsonl", origin=MISSING)
        t.put("rewards", ["MODULE:FUNCTION"], origin=MISSING)
        return
    if "source" not in t.draft.data.get("data", {}):
        if "dataset_name" not in t.unread:
            t.refuse("data", f"no data of {t.system}'s are said", instead="data.source=FILE.jsonl")
        t.put("data.source", "FILE.jsonl", origin=MISSING)
    if "rewards" not in t.draft.data:
        if "reward_funcs" not in t.unread:
            t.refuse("rewards", f"no rewards of {t.system}'s are said", instead="rewards=[MODULE:FUNCTION]")
        t.put("rewards", ["MODULE:FUNCTION"], origin=MISSING)


def _count(t: Translation, natives: Sequence[str], folder: Path) -> int | None:
    """The number of prompts; None while the data is not known, or not valid, which is then found out otherwise."""
    draft = Document(copy.deepcopy(t.draft.data))
    for text in natives:
        draft.override(text, shorthand=SHORTHAND)
    try:
        if "env" in draft.data and "data" not in draft.data:
            return _count_cases(EnvConfig.model_validate(draft.data["env"]), draft.data.get("model", "starter"), folder)
        data = DataConfig.model_validate(draft.data.get("data"))
    except ValidationError:
        return None
    return len(open_prompts(data, folder=folder))


def _count_cases(config: EnvConfig, model: str, folder: Path) -> int | None:
    """The prompts that an environment makes; None where it cannot, which the run itself will explain."""
    if config.environment is None:
        return None
    try:
        env = load_env(config, folder=folder)
        if env.legacy:
            from groupwise.model.load import load_tokenizer  # torch comes with both
            from groupwise.tasks.compat.three_method import LegacyEnv

            env = LegacyEnv(env, config, load_tokenizer(model), note=lambda message: None)
        cases = env.cases()
        return None if cases is None else len(cases)
    except GroupwiseError:
        return None


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """The values that are no sections, with their keys; arguments of functions are one value."""
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
    """Whether there is a value at `keys`; a string in place of a reward is its function."""
    for key in keys:
        if isinstance(data, str):
            return key == "function"
        held: dict[Any, Any] = dict(data if isinstance(data, Mapping) else enumerate(data or ()))
        if key not in held:
            return False
        data = held[key]
    return True


# ----------------------------------------------------------------------------------------------------------------------
# A run that was read in another system's words, as a file of ours, with a remark on where each value came from.
# ----------------------------------------------------------------------------------------------------------------------


def native_yaml(loaded: LoadedRun, *, folder: Path) -> str:
    """The file, for a directory `folder`. It loads as the same run; what is not here is said at its head."""
    values = _ordered(loaded.document.data, loaded.config.model_dump())
    source = Path(values.pop("folder", "."))
    lines = [f"# From {loaded.document.name or 'flags'}, which is in {loaded.system}'s words.", *_notes(loaded)]
    if source.resolve() != folder.resolve():
        values = {"folder": os.path.relpath(source, folder)} | values
    for keys in (("data", "source"), ("rewards",)):
        if loaded.document.origin(keys) == MISSING:
            lines.append(f"# {keys[0]}: to be said before this can run")
            del values[keys[0]]
    lines += _section(loaded, values, ())
    return "\n".join(lines) + "\n"


def _ordered(values: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """The values with the keys of each section in the order of the configuration's fields."""
    keys = [key for key in like or values if key in values]
    sections = {key for key in keys if isinstance(values[key], Mapping) and key != "args"}
    return {key: _ordered(values[key], (like or {}).get(key)) if key in sections else values[key] for key in keys}


def _notes(loaded: LoadedRun) -> Iterator[str]:
    for title, notes in (
        ("Not here, so this run is without", loaded.refused),
        ("Otherwise than there", loaded.differs),
        ("Without effect here", loaded.idle),
    ):
        if notes:
            yield "#"
            yield f"# {title}:"
            yield from (f"#   {note}" for note in notes)


def _section(loaded: LoadedRun, section: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[str]:
    """The lines of a section, each value with its origin."""
    indent = "  " * len(path)
    if not path:
        yield ""
    for key, value in section.items():
        keys = (*path, key)
        origin = loaded.document.origin(keys)
        remark = f"  # {origin}" if origin else ""
        if isinstance(value, Mapping) and value and key != "args":
            yield f"{indent}{key}:"
            yield from _section(loaded, value, keys)
        elif isinstance(value, list) and value and any(isinstance(each, Mapping) for each in value):
            yield f"{indent}{key}:{remark}"
            yield from (f"{indent}  - {inline(each)}" for each in value)
        else:
            yield f"{indent}{key}: {inline(value)}{remark}"


# ----------------------------------------------------------------------------------------------------------------------
# What a command is given to read, a file or flags, and where what `groupwise import` makes of it goes.
# ----------------------------------------------------------------------------------------------------------------------

SYSTEMS: dict[str, System] = {
    "axolotl": "Axolotl",
    "trl": "TRL",
    "aitraining": "aitraining",
    "prime-rl": "prime-rl",
    "unsloth": "Unsloth",
}


def import_run(arguments: Sequence[str], *, system: str | None = None) -> LoadedRun:
    """Read `FILE [KEY=VALUE]...`, or aitraining's flags. Raises ConfigError."""
    if system is not None and system.lower() not in SYSTEMS:
        raise ConfigError(f"--from {system} is not known; write {', '.join(SYSTEMS)}")
    chosen = SYSTEMS[system.lower()] if system else None
    if chosen == "aitraining" and (not arguments or arguments[0].startswith("-") or "llm" in arguments[:2]):
        return _flags(arguments)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("name the file to import", hint="groupwise import axolotl.yaml -o native.yaml")
    loaded = read_run(arguments[0], arguments[1:], system=chosen)
    if loaded.system == "Groupwise":
        raise ConfigError(f"{arguments[0]} is in Groupwise's own words already", hint="groupwise run it as it is")
    return loaded


def read_words(words: Sequence[str]) -> LoadedRun:
    """Read what `run`, `check`, `eval` are given: `FILE [KEY=VALUE]...` or aitraining's flags. Raises ConfigError."""
    if aitraining.is_flags(words):
        return _flags(words)
    if options := [word for word in words if word.startswith("-")]:
        name, _, value = options[0].lstrip("-").partition("=")
        key = name.replace("-", "_")
        hint = f"an override of a file is written {key}={value or 'VALUE'}; aitraining's flags stand without a file"
        raise ConfigError(f"there is no option {options[0]}", hint=hint)
    return read_run(words[0], words[1:])


def _flags(words: Sequence[str]) -> LoadedRun:
    document, overrides = aitraining.flags(words)
    return understand(document, overrides, folder=Path.cwd(), system="aitraining")


def written(loaded: LoadedRun, out: Path | None) -> str:
    """The file's text, which is also written to `out`. Raises ConfigError if that exists, StorageError if it fails."""
    text = native_yaml(loaded, folder=Path.cwd() if out is None else out.parent)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{out} exists already", hint="name another file, or remove it first") from None
        except OSError as error:
            raise StorageError.of(error, f"cannot write {out}: {error.strerror or error}") from error
    return text
