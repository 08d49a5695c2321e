"""What the tests, and docs/models.md, say of a model family: how it is sampled and trained here, that both agree, that
PEFT loads what comes out, and that the gradient is that of transformers and PEFT."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from groupwise.config.run import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel
from groupwise.model.reply_formats.known import format_of, shown_format
from groupwise.train.learner import Learner
from groupwise.train.lora import lora_tensors
from groupwise.types import Completion, PolicyVersion, Sample, SamplingParams, SamplingRequest
from template_families import template_of

ADAPTED = PolicyVersion("adapted", 1)
LORA = LoraSpec(rank=2, alpha=4.0)
GROUPS = ((5, (4, 1, 6)), (9, (2, 7)))  # tokens of prompts, and of their completions


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Of a model with a random adapter. `sampled` and `trained` are packed, or how else, and `why`. `gap` is the
    largest difference in nats between a token's log-probability when it was sampled, or scored by the engine
    afterwards, and the trainer's; `peft_gap` that between the trainer's and PEFT's on the adapter's files."""

    sampled: str
    trained: str
    why: str
    targets: tuple[str, ...]
    gap: float
    peft_gap: float


def agreement(base: LoadedModel, again: LoadedModel, folder: Path) -> Agreement:
    """Sample from a model with an adapter, and give each token to the trainer and to PEFT, which adapts `again`, a copy
    of the model."""
    learner = adapted_learner(base)
    learner.save_adapter(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = LocalEngine(base, max_rows=16, lanes=1)
    said = " ".join(str(warning.message) for warning in caught if "in packed rows" in str(warning.message))
    with closing(engine):
        engine.load(ADAPTED, folder)
        asked = [_request(length) for length in (3, 5, 9)]
        groups = engine.generate(asked)
        samples = [_sample(each, c) for each, group in zip(asked, groups, strict=True) for c in group]
        scored = [engine.score(each.prompt_ids, each.completion_ids, ADAPTED) for each in samples]
    sampled = [c.logprobs for group in groups for c in group]
    trained = learner.forward(samples)
    theirs = peft_logprobs(again, folder, samples)
    return Agreement(
        sampled=_way(engine.packed, said),
        trained="packed" if learner.packed else "padded rows",
        why=re.sub(
            r" by \S+ nats \(tolerance \S+\)", "", said.partition("in packed rows: ")[2].partition("; it is ")[0]
        ),
        targets=tuple(sorted({name.rpartition(".")[2] for name in base.adaptable.all_linear})),
        gap=max(_largest(sampled, trained), _largest(scored, trained)),
        peft_gap=_largest(trained, theirs),
    )


def adapted_learner(base: LoadedModel, **options: Any) -> Learner:
    """A learner whose adapter changes every logit. What it warns of is what the engine warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in packed rows.*", UserWarning)
        learner = Learner(base, lora=LORA, **options)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.parameters:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return learner


def peft_logprobs(base: LoadedModel, adapter: Path, samples: Sequence[Sample]) -> list[list[float]]:
    """By transformers and PEFT, each sample alone in a row."""
    model = peft.PeftModel.from_pretrained(base.model, str(adapter)).eval()
    with torch.no_grad():
        return [_row_logprobs(model, sample).tolist() for sample in samples]


def gradient_gap(base: LoadedModel, again: LoadedModel, samples: Sequence[Sample], folder: Path) -> float:
    """The largest difference between a LoRA gradient of the learner, on all samples at once, and that of transformers
    and PEFT on one row after another; relative to the largest of that matrix where it is above 1. The loss is the mean
    of -log p over the loss tokens. The models are float64, and are computed in it (`DoubleThroughout`)."""
    with DoubleThroughout():
        learner = adapted_learner(base, threads=1)
        learner.save_adapter(folder)
        learner.forward_backward_supervised(samples)
        model = peft.PeftModel.from_pretrained(again.model, str(folder), is_trainable=True).eval()
        for parameter in lora_tensors(model).values():
            parameter.data = parameter.data.to(base.model.dtype)  # as the learner's are
        tokens = sum(sum(sample.mask) for sample in samples)
        for sample in samples:
            chosen = torch.tensor(sample.mask, dtype=torch.bool)
            (-_row_logprobs(model, sample)[chosen].sum() / tokens).backward()
    mine = {name: parameter.grad for name, parameter in lora_tensors(learner.model).items()}
    theirs = {_plain(name): parameter.grad for name, parameter in model.named_parameters() if "lora_" in name}
    assert {_plain(name) for name in mine} == theirs.keys()
    return max(_difference(grad, theirs[_plain(name)]) for name, grad in mine.items())


def template_facts(name: str | None) -> dict[str, str]:
    """How the models of a family write tool calls and thoughts, as far as it is read here, from their chat template
    (`template_families.template_of`)."""
    if name is None:
        return {"tool_calls": "not tried", "thinking": "not tried"}
    template = template_of(name)
    shown = shown_format(template)
    own = "its own, not read" if re.search(r"\btool(s|_calls)\b", template) else "none"
    mark = format_of(template).thought.start
    other = "<|START_THINKING|>, not read" if "<|START_THINKING|>" in template else "none"
    return {
        "tool_calls": own if shown is None else shown.name,
        "thinking": mark if mark in template else other,
    }


class DoubleThroughout(TorchFunctionMode):
    """In float64 models nothing is rounded to float32 on the way, as transformers' norms, softmaxes and recurrences do
    it in any type."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            if function is Tensor.to:
                args = (args[0], *(torch.float64 if x is torch.float32 else x for x in args[1:]))
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if function is Tensor.matmul:  # angles of positions, which some versions of transformers cast to float32
                args = tuple(x.to(torch.float64) for x in args)
        return function(*args, **kwargs)


def _plain(name: str) -> str:
    return name.replace(".default.", ".").removeprefix("base_model.model.")


def _difference(mine: Tensor | None, theirs: Tensor | None) -> float:
    if mine is None or theirs is None:  # a module that nothing called
        return 0.0 if mine is theirs is None or not bool((mine if theirs is None else theirs).any()) else float("inf")
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


def _way(packed: bool, said: str) -> str:
    if packed:
        return "packed"
    return "own forward and cache" if "by its own forward and cache" in said else "own forward, no cache"


def _row_logprobs(model: Any, sample: Sample) -> Tensor:
    start = len(sample.prompt_ids)
    ids_1T = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits = model(input_ids=ids_1T, use_cache=False).logits[0, start - 1 : -1]
    targets = torch.tensor(sample.completion_ids)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _request(length: int) -> SamplingRequest:
    return SamplingRequest(
        prompt_ids=tuple((7 * i + length) % 250 for i in range(length)),
        n=3,
        version=ADAPTED,
        params=SamplingParams(max_tokens=6 + length, seed=5, ignore_eos=True),
    )


def _sample(request: SamplingRequest, completion: Completion) -> Sample:
    ids = completion.token_ids
    return Sample(prompt_ids=request.prompt_ids, completion_ids=ids, mask=(1,) * len(ids), advantage=0.0)


def _largest(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    return max(abs(a - b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
