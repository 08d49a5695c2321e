"""`from_trl`: the arguments of TRL's GRPOTrainer, as Python objects, as a run of ours.

A configuration file of TRL's is read by `bridges.trl.importer`; datasets, functions and a LoraConfig are taken here.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.bridges.trl.importer import KEYS
from groupwise.config.formats.tables import keys_of
from groupwise.config.held_objects import held, named_or_held
from groupwise.config.run import RunConfig
from groupwise.config.yaml import Document, inline
from groupwise.errors import ConfigError

OF_NO_EFFECT = ("task_type", "inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping")


def from_trl(
    args: Any,
    *,
    model: str,
    rewards: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
    data: Any,
    peft: Any = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Return the run that `GRPOTrainer(model, rewards, args, train_dataset=data, peft_config=peft)` would be.

    Args:
        args: a GRPOConfig, or a mapping of its names; what a mapping leaves out has TRL 1.16.0's default.
        rewards: functions, dotted paths to them, or names of reward models. A function that no name finds (a lambda,
            one made in another, an instance) runs in this process, without a deadline (`scoring.workers` 0).
        data: a Dataset or other rows, what `data.source` takes (a file, a Hugging Face name, module:function), or a
            mapping for all of `data`. Rows are read again by running the script again, not from the command line.
        peft: a LoraConfig, or a mapping of its names; None trains all parameters.
        overrides: overrides in TRL's names or in ours, as on the command line.

    Raises ConfigError for what is not here, and warns of what comes out otherwise.
    """
    from groupwise.run.config_file import understand

    source = _source(data)
    listed = [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)
    found = {id(each): named_or_held(each, what="the reward") for each in listed if not isinstance(each, str)}
    names = [each if isinstance(each, str) else found[id(each)].name.replace(":", ".") for each in listed]
    folders = [each.folder for each in found.values() if not each.only_here]
    folder = folders[0] if folders else next((each.folder for each in found.values()), Path.cwd())
    said = _arguments(args) | {"model_name_or_path": model, "reward_funcs": names} | _lora(peft)
    document = Document(said, "GRPOConfig")
    natives = [f"data.{key}={inline(value)}" for key, value in {"raw": True, **source}.items()]
    if any(each.only_here for each in found.values()):
        natives.append("scoring.workers=0")
    loaded = understand(document, [*natives, *overrides], folder=folder, system="TRL")
    for note in loaded.differs:
        warnings.warn(f"not as in TRL: {note}", stacklevel=2)
    return loaded.runnable()


def _arguments(args: Any) -> dict[str, Any]:
    """Return what a mapping says; of a GRPOConfig what differs from its class's default, or from the table's."""
    if isinstance(args, Mapping):
        return dict(args)
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise ConfigError(f"args is a {type(args).__name__}; give a GRPOConfig or a mapping of its names")
    machine = {name: getattr(args, name) for name in ("output_dir", "bf16", "fp16", "use_cpu") if hasattr(args, name)}
    plain = type(args)(**machine)  # __post_init__ looks at the machine
    said = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    defaults = {key.name: key.default for key in keys_of(KEYS) if key.default is not None}
    kept = {
        name: value
        for name, value in said.items()
        if name == "output_dir" or value != getattr(plain, name) or value != defaults.get(name, value)
    }
    if kept.get("steps_per_generation") is not None:
        kept.pop("generation_batch_size", None)  # GRPOConfig fills in the one from the other
    return {name: getattr(value, "value", value) for name, value in kept.items()}  # enumerations as words


def _source(data: Any) -> dict[str, Any]:
    """Return the keys of `data`: of rows a function that returns them, named after what they are."""
    if isinstance(data, str | Path):
        return {"source": str(data)}
    if isinstance(data, Mapping) and "source" in data:
        return dict(data)
    if isinstance(data, Mapping):  # a DatasetDict among others
        raise ConfigError(
            f"data is a mapping with {', '.join(map(str, data))}, and no source",
            hint="give one split, as in data['train'], or a mapping for the section data",
        )
    if not isinstance(data, Iterable):
        raise ConfigError(f"data is a {type(data).__name__}; give a Dataset, rows, or what data.source takes")
    name = getattr(data, "_fingerprint", None)  # of a datasets.Dataset: the same for the same rows
    if name is None:
        listed = _listed(list(data))
        source = held(lambda: map(dict, listed), name=f"rows_{len(listed)}", of=data)
    else:
        source = held(lambda: map(dict, data), name=f"rows_{name}", of=data)
    return {"source": source, "prompt_key": "prompt"}


def _listed(rows: list[Any]) -> list[Any]:
    """Return the rows, checked: each is a mapping."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {index} of data is a {type(row).__name__}; a row is a mapping with a prompt")
    return rows


def _lora(peft: Any) -> dict[str, Any]:
    """Return a LoraConfig in the script's names; what a mapping leaves out has LoraConfig's defaults. What a LoraConfig
    has besides, and changes what is trained, is refused."""
    if peft is None:
        return {"use_peft": False}
    names = {"r": "lora_r"} | {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
    names |= {"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
    said = dict(peft) if isinstance(peft, Mapping) else _of_lora_config(peft, names)
    if unknown := said.keys() - names.keys():
        raise ConfigError(f"peft has {', '.join(sorted(unknown))}; here there are {', '.join(names)}")
    values = {names[name]: sorted(each) if isinstance(each, set) else each for name, each in said.items()}
    return {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0} | values


def _of_lora_config(peft: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return a LoraConfig's fields `names`, and its other fields that are not the default."""
    if not dataclasses.is_dataclass(peft) or isinstance(peft, type) or not hasattr(peft, "lora_alpha"):
        raise ConfigError(f"peft is a {type(peft).__name__}; give a LoraConfig, or a mapping of its names")
    plain = type(peft)()
    fields = [field.name for field in dataclasses.fields(peft)]
    others = [name for name in fields if name not in OF_NO_EFFECT and getattr(peft, name) != getattr(plain, name)]
    return {name: getattr(peft, name) for name in dict.fromkeys((*names, *others))}
