"""The model card: what a run measured and how it was trained, for people and, in its head, for the hub.

Numbers are the run's own: held-out means before training and of this version, each with the standard error over the
prompts, and the difference of the two on the same prompts with its own error. What was not measured is said to be so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from groupwise.cli.push.facts import Facts
from groupwise.config.run import PACKAGED
from groupwise.config.yaml import to_yaml
from groupwise.run.evaluate import Evaluation
from groupwise.store.masking import Masking

PEFT, MERGED, GGUF = "peft", "merged", "gguf"  # what a version is uploaded as
_LIBRARY = {PEFT: "peft", MERGED: "transformers", GGUF: "gguf"}
_WHERE = {"folder", "output_dir", "run_dir", "resume", "tracking", "name", "model", "seed"}  # told above, or private
_PACKAGES = ("groupwise", "torch", "transformers", "peft")
_LEARNS = {
    "grpo": "GRPO (group-relative policy optimization, [arXiv 2402.03300](https://arxiv.org/abs/2402.03300))",
    "sft": "supervised fine-tuning",
    "dpo": "DPO ([arXiv 2305.18290](https://arxiv.org/abs/2305.18290))",
}


def model_card(facts: Facts, *, repo: str, format: str, masking: Masking, file: str = "") -> str:
    """Return the README.md of the repository `repo`, into which the version goes as `format` (peft, merged, gguf; the
    GGUF's name is `file`)."""
    parts = [
        _head(facts, format=format),
        f"# {repo.rpartition('/')[2]}",
        _what(facts, format=format),
        _measured(facts),
        _training(facts, masking),
        _use(facts, repo=repo, format=format, file=file),
        _terms(facts.base.license),
    ]
    return masking.text("\n\n".join(parts) + "\n")


def _head(facts: Facts, *, format: str) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=facts.base.hub,
        license=facts.base.license,
        library_name=_LIBRARY[format],
        pipeline_tag="text-generation",
        tags=["groupwise", facts.kind, *(["lora"] if format == PEFT else []), "reinforcement-learning"],
        datasets=facts.dataset,
        base_model_relation="adapter" if format == PEFT and facts.base.hub else None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _what(facts: Facts, *, format: str) -> str:
    lora = facts.lora or {}
    what = {
        PEFT: f"A LoRA adapter (rank {lora.get('r')}, alpha {lora.get('lora_alpha', 0):g}) for",
        MERGED: "A LoRA adapter merged into" if lora else "All weights, trained from",
        GGUF: "The GGUF file (llama.cpp, Ollama, LM Studio) of what was trained from",
    }[format]
    base = f"[`{facts.base.name}`](https://huggingface.co/{facts.base.hub})" if facts.base.hub else _unlisted(facts)
    learns = _LEARNS.get(facts.kind, facts.kind)
    quantised = (
        f" The base was in {facts.policy.quantization} while it was trained." if facts.policy.quantization else ""
    )
    return f"{what} {base}, by {learns} with Groupwise: version `{facts.version}`, {facts.steps} steps.{quantised}"


def _unlisted(facts: Facts) -> str:
    if facts.base.name in PACKAGED:
        return f"`{facts.base.name}`, a small model that is in the package `groupwise` and not on the hub"
    return f"`{facts.base.name}`, a model from a directory, which this card cannot link to"


# ---- what was measured ----


def _measured(facts: Facts) -> str:
    lines = ["## What was measured", ""]
    if facts.after:
        lines += _evaluated(facts)
    if facts.losses:
        lines += ["| held-out rows | before | after |", "|---|---|---|"]
        lines += [f"| {name} | {first:.4g} | {last:.4g} |" for name, (first, last) in facts.losses.items()] + [""]
    if not (facts.after or facts.losses):
        lines += ["Nothing was measured of this version on held-out prompts.", ""]
    if facts.suites:
        lines += [*_suites(facts.suites), ""]
    if facts.rewards is not None:
        first, last = facts.rewards
        lines += [f"In training the mean reward was {first:.3f} in the first step and {last:.3f} in the run's last."]
    return "\n".join(lines).rstrip()


def _evaluated(facts: Facts) -> Iterator[str]:
    prompts = max(len(each.groups) for each in facts.after.values())
    yield f"On {prompts} held-out prompts ({_source(facts, 'eval.data')}), before training and after:"
    yield ""
    yield "| mode | measure | before | after | difference | p |"
    yield "|---|---|---|---|---|---|"
    for mode, after in facts.after.items():
        for measure in after.measures:
            before = facts.before.get(mode)
            values = [_value(each, measure) if each is not None else "" for each in (before, after)]
            test = facts.tests.get(f"{mode}/{measure}")
            difference = (
                ("", "") if test is None else (_pm(test.difference, test.standard_error), f"{test.p_value:.2g}")
            )
            yield f"| {' | '.join((mode, measure, *values, *difference))} |"
    yield ""
    sampled = _at(facts.values, "eval.k") or 1
    many = f" `sampled` is {sampled} completions of each prompt." if sampled > 1 else ""
    yield (
        "A measure is a mean over the prompts, ± its standard error; the difference is of the same prompts, and p is "
        f"that of a sign-flip test of no difference. `greedy` is at temperature 0, `sampled` as in training.{many}"
    )
    yield ""
    if best := _at(facts.values, "eval.best"):
        chosen = f"The version was chosen for its `{best}` result on these prompts"
        yield f"{chosen}; the numbers are of other seeds." if facts.again else f"{chosen}, which flatters that number."
        yield ""


def _value(evaluation: Evaluation, measure: str) -> str:
    return _pm(evaluation.measured(measure), evaluation.standard_error(measure))


def _pm(value: float, error: float) -> str:
    return f"{value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def _suites(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what benchmarks of others said of this version."""
    yield "| by | metric | value | samples |"
    yield "|---|---|---|---|"
    for result in results:
        for name, metric in result["metrics"].items():
            value = _pm(metric["value"], metric.get("stderr", math.nan))
            yield f"| {result['suite']} {result['release']} | {name} | {value} | {metric.get('samples', '')} |"


# ---- how it was trained ----


def _training(facts: Facts, masking: Masking) -> str:
    """Return data, rewards, sizes, the keys that differ from the defaults, and versions."""
    values = facts.values
    lines = ["## How it was trained", "", f"- Data: {_source(facts, 'data')}"]
    if environment := _at(values, "env"):
        named = environment.get("environment") or environment.get("agent") or "a program (`env.harness`)"
        lines.append(f"- Episodes in: {_short(named)}")
    for reward in values.get("rewards") or ():
        lines.append(f"- Reward: `{_short(reward['function'])}`, weight {reward.get('weight', 1.0):g}")
    rollout = values.get("rollout") or {}
    size = f"{rollout.get('prompts_per_step')} prompts a step"
    size += f", {rollout.get('group_size')} completions of each" if facts.kind == "grpo" else ""
    lines.append(f"- {size}, at most {rollout.get('max_tokens')} tokens; {facts.tokens:,.0f} tokens in all")
    lines.append(f"- Learning rate {_at(values, 'train.learning_rate'):g}; seed {values.get('seed')}")
    lasted = f"{facts.seconds / 60:.1f} minutes" if facts.seconds >= 60 else f"{facts.seconds:.0f} seconds"
    lines.append(f"- {lasted} of steps, without loading and evaluation")
    lines.append(f"- Uploaded with {', '.join(_versions())}")
    if changed := _changed(facts, masking):
        lines += ["", "<details><summary>Every key that differs from its default</summary>", "", "```yaml"]
        lines += [changed.rstrip(), "```", "", "</details>"]
    return "\n".join(lines)


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _source(facts: Facts, key: str) -> str:
    """Return where a section's prompts are from: a link, or the name of a file without its folders."""
    data = _at(facts.values, key) or {}
    if found := facts.on_hub(data):
        return f"[`{found}`](https://huggingface.co/datasets/{found})"
    named = [str(each.get("source")) for each in (data, *(data.get("sources") or ())) if each.get("source")]
    return ", ".join(f"`{_short(each)}`" for each in named) or "the environment's own"


def _changed(facts: Facts, masking: Masking) -> str:
    """Return the configuration without defaults, places on this machine and secrets, as YAML."""
    if facts.config is None:
        return ""
    changed = facts.config.model_dump(mode="json", exclude_defaults=True)
    kept = {key: value for key, value in changed.items() if key not in _WHERE}
    return to_yaml(masking.config(_without_places(kept)))


def _without_places(value: Any) -> Any:
    """Return a value in which a path of this machine is its last part."""
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, Mapping):
        return {key: _without_places(each) for key, each in value.items()}
    return [_without_places(each) for each in value] if isinstance(value, list | tuple) else value


def _short(text: str) -> str:
    return Path(text).name if text.startswith(("/", "~")) and "\n" not in text else text


# ---- how it is used ----


def _use(facts: Facts, *, repo: str, format: str, file: str) -> str:
    manner = facts.policy.manner
    system = [{"role": "system", "content": manner["system"]}] if manner.get("system") else []
    messages = [*system, {"role": "user", "content": "..."}]
    options = "".join(
        f", {key}={value!r}" for key, value in (manner.get("chat", {}).get("template_kwargs") or {}).items()
    )
    lines = ["## How to use it", ""]
    if format == GGUF:
        return "\n".join([*lines, "```", f"llama-cli --hf-repo {repo} --hf-file {file}", "```"])
    if format == PEFT and facts.base.name in PACKAGED:
        loaded = [
            "from groupwise.config.run import PACKAGED  # the base is in the package",
            f'base = {facts.loaded_by}.from_pretrained(PACKAGED["{facts.base.name}"])',
            f'tokenizer = AutoTokenizer.from_pretrained(PACKAGED["{facts.base.name}"])',
            f'model = PeftModel.from_pretrained(base, "{repo}")',
        ]
    elif format == PEFT:
        loaded = [
            f'base = {facts.loaded_by}.from_pretrained("{facts.base.name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{facts.base.name}")',
            f'model = PeftModel.from_pretrained(base, "{repo}")',
        ]
    else:
        loaded = [
            f'model = {facts.loaded_by}.from_pretrained("{repo}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        ]
    lines += ["```python", *(["from peft import PeftModel"] if format == PEFT else [])]
    lines += [f"from transformers import {facts.loaded_by}, AutoTokenizer", "", *loaded]
    lines += [
        f"messages = {json.dumps(messages, ensure_ascii=False)}",
        f'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", '
        f"return_dict=True{options})",
        "output = model.generate(**inputs, max_new_tokens=512)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
        "```",
        "",
    ]
    name = f"hf://{repo}" if format == PEFT else repo
    more = [f"groupwise serve {name}"] + ([f"groupwise chat {name}"] if format == PEFT else [])
    lines += ["With Groupwise, which asks it as it was trained to be asked:", "", "```", *more, "```"]
    if manner.get("structured_outputs"):
        lines += ["", "Its completions were held to a form in training (`rollout.structured_outputs`)."]
    return "\n".join(lines)


def _terms(license: str | None) -> str:
    if license is None:
        return "## Licence\n\nThat of the base model, which is not known here."
    return f"## Licence\n\n`{license}`, that of the base model."


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    """Return a value by its dotted name; None where there is none."""
    found: Any = values
    for key in dotted.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
