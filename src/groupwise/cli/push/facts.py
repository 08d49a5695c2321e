"""Reads from a run's directory its configuration and the measurements of the version that is pushed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.run import PACKAGED, STARTER, RunConfig, load_config
from groupwise.config.yaml import Document
from groupwise.errors import ConfigError, ModelError
from groupwise.run.evaluate import Evaluation, PairedTest, evaluation_files, load_evaluations, paired_tests
from groupwise.store import files
from groupwise.store.hub_adapters import REPOSITORY
from groupwise.store.locate import TrainedPolicy
from groupwise.store.rundir import CONFIG, METRICS
from groupwise.store.tracking import read_metrics

_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Base:
    """Describes the base model of the training. `hub` is the public repository of the model, None if there is none, and
    `license` the model's licence by the hub's names, None if unknown."""

    name: str
    hub: str | None
    license: str | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Holds what a model card says of a run's version.

    before, after   the evaluations on the held-out prompts by mode; `tests`: their differences prompt by
                    prompt; `again`: `after` was sampled with other seeds than those by which the version was chosen
    losses          the losses of held-out rows; `suites`: the results of public benchmarks; `rewards`: the mean rewards
                    of the first and of the last step in training
    lora            the adapter's configuration by PEFT's names, None where all parameters were trained
    loaded_by       the class of transformers that loads the model
    config          None where this version of the package cannot read it; `values`: its values as the file has them
    """

    name: str
    version: str
    policy: TrainedPolicy
    run_dir: Path
    base: Base
    values: Mapping[str, Any]
    config: RunConfig | None
    lora: Mapping[str, Any] | None
    loaded_by: str
    steps: int
    tokens: float
    seconds: float
    before: Mapping[str, Evaluation]
    after: Mapping[str, Evaluation]
    again: bool
    tests: Mapping[str, PairedTest]
    losses: Mapping[str, tuple[float, float]]
    suites: Sequence[Mapping[str, Any]]
    rewards: tuple[float, float] | None

    @property
    def kind(self) -> str:
        """Return the run's `kind`: grpo, sft or dpo."""
        return str(self.values.get("kind", "grpo"))

    @property
    def dataset(self) -> str | None:
        """Return the hub repository of the prompts; None for a file or an environment."""
        return self.on_hub(self.values.get("data"))

    def on_hub(self, data: Any) -> str | None:
        """Return the repository that a section with a `source` is read from; None for what is not on the hub."""
        source = str((data or {}).get("source") or "")
        here = Path(self.values.get("folder") or ".", source).exists() or source.endswith(_FILES)
        return source if REPOSITORY.fullmatch(source) and not here else None


def read_facts(policy: TrainedPolicy, *, base_model: str | None = None) -> Facts:
    """Return the facts about a run's policy. `base_model` is the base's repository on the hub, where the run has it
    from a directory. Raises ConfigError if the version is not a run's, or `base_model` is not such a name."""
    run_dir = policy.run_dir
    if run_dir is None:
        where = "it" if policy.adapter is None else policy.adapter.directory
        raise ConfigError(
            f"{where} is a version of no run, so that nothing is known to write into its card",
            hint=f"name a run; `hf upload OWNER/NAME {where}` sends a directory as it is",
            field="RUN",
        )
    values = Document.read(run_dir / CONFIG).data
    lines = read_metrics(run_dir / METRICS)
    name, version, steps = str(values.get("name", run_dir.name)), "", max((line["step"] for line in lines), default=0)
    if policy.adapter is not None:
        version = str(policy.adapter.version)
    at = _evaluated_step(run_dir, version)
    before, after, again = {}, {}, {}
    if at is not None:
        before, after = load_evaluations(run_dir, 0), load_evaluations(run_dir, at)
        again = load_evaluations(run_dir, at, again=True)
        after = again or after
    store = None if policy.adapter is None else policy.adapter.store
    info = None if store is None or policy.adapter is None else store.info(policy.adapter.version)
    means = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]
    return Facts(
        name=name,
        version=version or f"{name}, step {steps}",
        policy=policy,
        run_dir=run_dir,
        base=_base(str(values.get("model", STARTER)), base_model),
        values=values,
        loaded_by=_loaded_by(policy.model),
        config=_config(run_dir),
        lora=None if policy.adapter is None else json.loads((policy.adapter.directory / files.CONFIG).read_bytes()),
        steps=steps if info is None else info.step,
        tokens=sum(line.get("rollout/total_tokens") or 0.0 for line in lines),
        seconds=sum(line.get("time/step_s") or 0.0 for line in lines),
        before=before,
        after=after,
        again=bool(again),
        tests=paired_tests(after, before) if before and after else {},
        losses=_losses(lines, steps if at is None else at),
        suites=() if store is None or policy.adapter is None else store.evaluations(policy.adapter.version),
        rewards=(means[0], means[-1]) if means and values.get("kind", "grpo") == "grpo" else None,
    )


def _loaded_by(model: str) -> str:
    """Return the class of transformers that loads a model, by its configuration as it is on this machine; where that is
    not here, the class of causal language models."""
    from transformers import AutoConfig

    from groupwise.model.load import auto_class, model_path

    try:
        config = AutoConfig.from_pretrained(model_path(model), local_files_only=True)
    except (OSError, ValueError, ModelError):
        return "AutoModelForCausalLM"
    return auto_class(config).__name__


def _config(run_dir: Path) -> RunConfig | None:
    try:
        return load_config(run_dir / CONFIG)
    except ConfigError:
        return None


def _base(model: str, base_model: str | None) -> Base:
    if base_model is not None and not REPOSITORY.fullmatch(base_model):
        raise ConfigError(
            f"--base-model {base_model!r} is no repository on the hub",
            hint="write OWNER/NAME, such as Qwen/Qwen3-0.6B",
            field="--base-model",
        )
    if base_model is None and model in PACKAGED:
        return Base(name=model, hub=None, license="apache-2.0")
    directory = Path(model).expanduser()
    if directory.is_dir():
        return Base(name=base_model or directory.name, hub=base_model, license=_license(directory / "README.md"))
    named = base_model or model
    if REPOSITORY.fullmatch(named):
        return Base(name=named, hub=named, license=None)
    return Base(name=Path(named).name, hub=None, license=None)


def _license(card: Path) -> str | None:
    """Return the licence that a model card names."""
    from huggingface_hub import metadata_load

    found = (metadata_load(card) or {}).get("license") if card.is_file() else None
    return str(found) if found else None


def _evaluated_step(run_dir: Path, version: str) -> int | None:
    """Return the last step after which this version ("": whichever it was) was evaluated on the held-out prompts."""
    steps = dict[int, str]()
    for step, path in (item for each in evaluation_files(run_dir).values() for item in each.items()):
        with path.open(encoding="utf-8") as file:
            steps[step] = json.loads(file.readline())["version"]
    return max((step for step, measured in steps.items() if step and version in ("", measured)), default=None)


def _losses(lines: Sequence[Mapping[str, Any]], step: int) -> dict[str, tuple[float, float]]:
    """Return the losses of held-out rows before the first step and after this one, by their names."""
    of_step = {line["step"]: line for line in lines}
    first, last = of_step.get(0, {}), of_step.get(step, {})
    names = [key for key in first if re.fullmatch(r"eval/[^/]+", key) and key in last]
    return {name: (first[name], last[name]) for name in names if None not in (first[name], last[name])}
