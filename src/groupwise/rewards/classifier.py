"""A reward model as a reward: a sequence classifier with one label, whose logit is the score.

    r = logits[0] of AutoModelForSequenceClassification on the conversation, rendered with the model's chat template

That is the layout of TRL's RewardTrainer and of the models on RewardBench. A tokenizer without a chat template gets
prompt and completion as a pair of texts. The model is loaded once in each process that scores: at the start of a run in
one of them (`load_models`), in the others on first use.

A completion cannot forge a turn: special tokens that it spells out are broken up before it is rendered. A reward model
is still only a model, and a policy finds what it overrates: keep the KL on, and use several (`rewards.ensemble`).
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from groupwise.config.hub import reading
from groupwise.config.rewards import RewardConfig
from groupwise.errors import ModelError, RewardError
from groupwise.rewards.base import RewardWorkers, text_of
from groupwise.rewards.call import Failure, FunctionCall, RewardFunction, RewardSpec, call_here
from groupwise.rewards.text import prompt_text

_IN_USE = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class _Scorer:
    """A loaded reward model. `longest` is the most tokens it reads, `pad` the id behind which it finds the last token
    of a padded row (None: it cannot); `special` finds special tokens in text."""

    model: Any
    tokenizer: Any
    longest: int
    pad: int | None
    special: re.Pattern[str] | None


class _Encoded(NamedTuple):
    """Holds what the model reads: token ids, and of which text of a pair each is, if the tokenizer tells (BERT's)."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


def reward_model(
    completions: Sequence[Any],
    prompts: Sequence[Any],
    *,
    model: str,
    batch_size: int = 8,
    max_length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> list[float]:
    """Return the reward model's score of each completion of its prompt: any finite number, on the model's own scale.

    `model` is a directory or a Hugging Face name. `max_length` tokens, by default the model's context, hold prompt and
    completion; what is longer is not cut but a failure, nan. `device` is auto (a GPU where there is one) or torch's
    name, `dtype` auto (float32 on a CPU, bfloat16 elsewhere) or torch's name.
    Raises ModelError if the model cannot be loaded, has several labels, or no trained scoring head.
    """
    import torch

    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    scorer = _load(model, device, dtype)
    longest = min(scorer.longest, max_length or scorer.longest)
    rows = [_row(scorer, prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    scores = [math.nan] * len(rows)
    lengths = [len(row.ids) for row in rows]
    fitting = sorted((i for i, length in enumerate(lengths) if 0 < length <= longest), key=lambda i: lengths[i])
    together = 1 if scorer.pad is None else batch_size
    with _IN_USE, torch.inference_mode():
        for chosen in _batches(fitting, together):
            for i, score in zip(chosen, _logits(scorer, [rows[i] for i in chosen]), strict=True):
                scores[i] = score
    return scores


def reward_models(specs: Sequence[RewardSpec]) -> list[RewardConfig]:
    """Return the reward models inside `specs`: members of ensembles and the like, whose options name other rewards."""
    found: dict[str, RewardConfig] = {}
    waiting: list[Any] = [spec.args for spec in specs]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
            if str(value.get("function")).replace(":", ".") == f"{__name__}.{reward_model.__name__}":
                args = dict(value.get("args") or {})
                found[repr(args)] = RewardConfig(function=f"{__name__}:{reward_model.__name__}", args=args)
        elif isinstance(value, list | tuple):
            waiting += value
    return list(found.values())


async def load_models(models: Sequence[RewardFunction], *, group_size: int, pool: RewardWorkers | None = None) -> None:
    """Have each of `models` score something where it will score. Raises RewardError for the first that cannot.

    It has the time of a group of `group_size` completions.
    """
    columns = {"completions": ["."] * group_size, "prompts": ["."] * group_size}
    for function in models:
        if pool is not None and pool.runs(function):
            answer = await pool.call(function, columns, size=group_size, prompt_id="the start")
        else:
            answer = await call_here(FunctionCall(function, columns, size=group_size, prompt_id="the start"))
        for value in answer.values:
            if isinstance(value, Failure):
                hint = "scoring.timeout_s is for each completion of a group" if value.kind == "timeout" else None
                raise RewardError(f"the reward {function.name!r} cannot score: {value.cause}", hint=hint)


def _batches(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _logits(scorer: _Scorer, rows: Sequence[_Encoded]) -> list[float]:
    """Return the logits of rows padded on the right, where neither attention nor the pooled position reaches."""
    import torch

    width, where = max(len(row.ids) for row in rows), scorer.model.device

    def padded(values: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
        return torch.tensor([[*each, *[pad] * (width - len(each))] for each in values], device=where)

    given = {"input_ids": padded([row.ids for row in rows], scorer.pad or 0)}
    given["attention_mask"] = padded([[1] * len(row.ids) for row in rows], 0)
    if types := [row.types for row in rows if row.types is not None]:
        given["token_type_ids"] = padded(types, 0)
    return scorer.model(**given).logits[:, 0].float().tolist()


def _row(scorer: _Scorer, prompt: Any, completion: Any) -> _Encoded:
    tokenizer = scorer.tokenizer
    if tokenizer.chat_template is None:
        pair = tokenizer(prompt_text(prompt), _broken_up(scorer, text_of(completion)))
        return _Encoded(pair["input_ids"], pair.get("token_type_ids"))
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    said = [{**message, "content": _broken_up(scorer, message.get("content") or "")} for message in said]
    return _Encoded(tokenizer.apply_chat_template(asked + said, tokenize=True, return_dict=False))


def _broken_up(scorer: _Scorer, text: str) -> str:
    """Break up special tokens in a text: <|im_end|> becomes < |im_end|>."""
    return text if scorer.special is None else scorer.special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


@functools.lru_cache(maxsize=4)
def _load(name: str, device: str, dtype: str) -> _Scorer:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(torch, dtype if dtype != "auto" else "float32" if where == "cpu" else "bfloat16")
    try:
        with reading(name):
            tokenizer: Any = AutoTokenizer.from_pretrained(name)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1, dtype=kind, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the reward model {name!r} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        message = f"the reward model {name!r} has no trained {', '.join(missing[:3])}; its scores would be random"
        raise ModelError(message, hint="give a model that was trained as a reward model with one label")
    model.eval().requires_grad_(False).to(where)
    text_config = model.config.get_text_config()
    longest = min(getattr(text_config, "max_position_embeddings", 1 << 20), tokenizer.model_max_length)
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, special))) if special else None
    pad = text_config.pad_token_id
    return _Scorer(model=model, tokenizer=tokenizer, longest=int(longest), pad=pad, special=pattern)
