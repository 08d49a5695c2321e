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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from groupwise.config.importers import aitraining, axolotl, prime_rl, trl, unsloth
from groupwise.config.importers.tables import keys_of
from groupwise.config.importers.translation import Note, Translation
from groupwise.config.run import OTHER_NAMES, DataConfig, EnvConfig, RunConfig
from groupwise.config.yaml import Document, Keys, dotted, parse_keys, validate
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.tasks.env_loading import load_env
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

    @property
    def incomplete(self) -> bool:
        """Whether the file does not say what the prompts or rewards are, so that nothing can be tried."""
        return any(origin == MISSING for _, _, origin in self.origins())

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
