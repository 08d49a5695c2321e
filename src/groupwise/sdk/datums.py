"""Datums, the SDK's training data: a sequence of N tokens as N - 1 inputs, N - 1 targets and N - 1 values of all else.

    tokens (5, 6, 7, 2), the first two the prompt

    model_input        5    6    7        tokens[:-1]
    target_tokens      6    7    2        tokens[1:], or others; entry j is predicted from the inputs up to j
    mask               0    1    1        1 where the target is trained; without a mask all are but padding
    weights            0    1    1        of cross_entropy: the loss is -sum weights x log p
    advantages         0   .7   .7        of policy losses
    logprobs           -  -.1   -1        log p under the policy that sampled
    old_logprobs, reference_logprobs      under the trainer's snapshot, under the reference

A target may be any token, such as what a teacher would have said there: targets (6, 9, 2) train log p(9 | 5 6) and the
model reads 5 6 7 all the same. Without a mask one that is not the next token and has weight or advantage 0 is padding,
as the zeros with which some fill the prompt's part, and is not trained. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from groupwise.algo.advantage import advantages
from groupwise.config.algo import AdvantageConfig
from groupwise.config.yaml import Document, validate
from groupwise.errors import DataError
from groupwise.model.image_tokens import is_of_image
from groupwise.recorded import RoutedExperts, SamplingMask
from groupwise.sdk.alignment import aligned, check_known
from groupwise.types import Sample

TARGETS = "target_tokens"

VALUES = ("mask", "weights", "advantages", "logprobs", "old_logprobs", "reference_logprobs")

TRAINED = 0.5  # a mask or weight above it marks a trained token


@dataclass(frozen=True, kw_only=True)
class Datum:
    """Holds a training sequence: `model_input` [N - 1], and `loss_fn_inputs`, a dict of [N - 1] entries named as above.

    Lists, tuples, tensors and arrays are taken. `kept` [N - 1] is the part of the vocabulary from which each target was
    sampled (`SampledCompletion.kept`): the sampler's and the trainer's log-probabilities are then under the policy
    restricted to this part. The loss cross_entropy always uses the whole vocabulary.

    `routed_experts` [N - 1, layers, K] are the experts that a mixture's routers chose for each input during sampling
    (`SampledCompletion.routed_experts`). The trainer computes log-probabilities and policy losses with these experts
    (routing replay), and cross_entropy with its own routers' choice. For inputs after the last entry the trainer's
    routers choose.

    Raises:
        DataError: empty, of different lengths, an unknown name, an invalid token id, a value that is not finite where a
            token is trained, a trained target that is not in its part of the vocabulary, or experts of more tokens than
            there are inputs.
    """

    model_input: Sequence[int]
    loss_fn_inputs: Mapping[str, Sequence[float]]
    kept: SamplingMask | None = None
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.loss_fn_inputs, Mapping):
            kind = type(self.loss_fn_inputs).__name__
            raise DataError(f"loss_fn_inputs is a {kind}; give a mapping from names to lists of numbers")
        inputs = {name: _plain(values, str(name)) for name, values in self.loss_fn_inputs.items()}
        object.__setattr__(self, "model_input", _plain(self.model_input, "model_input"))
        object.__setattr__(self, "loss_fn_inputs", inputs)
        if not self.model_input:
            raise DataError("a datum has no tokens", hint="model_input is tokens[:-1] of at least two tokens")
        if TARGETS not in inputs:
            raise DataError(f"loss_fn_inputs has no {TARGETS}", hint=f"{TARGETS} is tokens[1:]")
        for name, values in inputs.items():
            if name not in (TARGETS, *VALUES):
                raise DataError(f"loss_fn_inputs has {name!r}; valid: {', '.join((TARGETS, *VALUES))}")
            if len(values) != len(self.model_input):
                raise DataError(
                    f"{name} has {len(values)} entries and model_input {len(self.model_input)}",
                    hint="N tokens have N - 1 inputs, N - 1 targets and N - 1 of every value",
                )
        for token in (*self.model_input, *inputs[TARGETS]):
            if type(token) is not int or token < 0:
                raise DataError(f"{token!r} is not a token id; ids are whole numbers from 0")
        self._check_values()
        self._check_kept()
        self._check_routed()

    def _check_routed(self) -> None:
        if self.routed_experts is not None and self.routed_experts.shape[0] > len(self.model_input):
            raise DataError(
                f"routed_experts is of {self.routed_experts.shape[0]} tokens and model_input has "
                f"{len(self.model_input)}",
                hint="datum() of what was sampled has it of every input",
            )

    def _check_kept(self) -> None:
        if self.kept is None:
            return
        if len(self.kept) != len(self.model_input):
            raise DataError(
                f"kept is of {len(self.kept)} tokens and model_input has {len(self.model_input)}",
                hint="datum() of what was sampled has it of every target",
            )
        for position, (inside, trained) in enumerate(zip(self.kept.has(self.targets), self.mask, strict=True)):
            if trained and not inside:
                raise DataError(
                    f"{TARGETS}[{position}] is {self.targets[position]}, which is not in the part of the vocabulary "
                    "that kept says it was drawn from",
                    hint="change no target of a datum with kept, or leave kept out",
                )

    def _check_values(self) -> None:
        for name in VALUES:
            if name in self.loss_fn_inputs:
                always = name in ("mask", "weights", "advantages")  # these say what is trained
                every = (1,) * len(self.model_input)
                _check_numbers(self.loss_fn_inputs[name], name)
                check_known(self.loss_fn_inputs[name], every if always else self.mask, what=name)

    @property
    def targets(self) -> tuple[int, ...]:
        """Return `target_tokens` [N - 1]."""
        return tuple(int(token) for token in self.loss_fn_inputs[TARGETS])

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the sequence [N]: the model's input, and the last target."""
        return (*self.model_input, self.targets[-1])

    @cached_property
    def mask(self) -> tuple[int, ...]:
        """Return 1 for each trained target [N - 1]: the `mask`, or without one every target that is not padding."""
        inputs = self.loss_fn_inputs
        if "mask" in inputs:
            return tuple(int(mark > TRAINED) for mark in inputs["mask"])
        weighing = [inputs[name] for name in ("weights", "advantages") if name in inputs]
        is_next = (target == after for target, after in zip(self.targets, self.tokens[1:], strict=True))
        return tuple(
            int(expected or not weighing or any(values[j] for values in weighing)) for j, expected in enumerate(is_next)
        )

    @property
    def loss_tokens(self) -> int:
        """Trained targets, of those with `weights` the ones whose weight is not 0."""
        weights = self.loss_fn_inputs.get("weights", self.mask)
        return sum(bool(trained and weight) for trained, weight in zip(self.mask, weights, strict=True))

    def having(self, **values: Sequence[float] | None) -> Datum:
        """Return a copy of the datum with some of its `loss_fn_inputs` replaced; None removes one."""
        inputs = {**self.loss_fn_inputs, **values}
        present = {name: each for name, each in inputs.items() if each is not None}
        return replace(self, loss_fn_inputs=present)

    @property
    def skipped(self) -> int:
        """Return the number of targets before the first trained one, which belong to the sample's prompt."""
        return self.mask.index(1) if 1 in self.mask else 0

    def sample(self, weights: str) -> Sample:
        """Return the datum as a `types.Sample` for the learner; `weights` names the entry that weighs its tokens. With
        "weights", those of cross-entropy, `kept` and `routed_experts` are left out: what is imitated is the text,
        whatever drew it.

        All before the first trained token counts as the prompt, which adjacent datums with the same prompt share."""
        first, inputs = self.skipped, self.loss_fn_inputs
        behaviour = inputs.get("logprobs")
        return Sample(
            prompt_ids=self.tokens[: first + 1],
            completion_ids=self.tokens[first + 1 :],
            mask=self.mask[first:],
            advantage=1.0,
            weights=tuple(inputs[weights][first:]),
            behaviour_logprobs=None if behaviour is None else tuple(behaviour[first:]),
            targets=self.targets[first:],
            kept=None if self.kept is None or weights == "weights" else self.kept.cut(first),
            routed_experts=None if weights == "weights" else self.routed_experts,
        )

    def whole(self) -> Sample:
        """Return the datum as a sample whose first token is the prompt, to get log-probabilities of all N - 1 targets.
        For an image's tokens, which are never sampled, they are those of token 0."""
        ids = self.tokens
        return Sample(
            prompt_ids=ids[:1],
            completion_ids=ids[1:],
            mask=(1,) * (len(ids) - 1),
            targets=tuple(0 if is_of_image(target) else target for target in self.targets),
            kept=self.kept,
            routed_experts=self.routed_experts,
        )


def datum_of(
    tokens: Sequence[int],
    *,
    prompt_len: int,
    kept: SamplingMask | None = None,
    routed_experts: RoutedExperts | None = None,
) -> Datum:
    """Return a datum of N tokens whose `weights` are 0 on the first `prompt_len` tokens (the prompt) and 1 on the
    completion, whose tokens were drawn from what was `kept`. `routed_experts` are of the first N - 1 tokens."""
    ids = tuple(tokens)
    weights = [float(j + 1 >= prompt_len) for j in range(len(ids) - 1)]
    if kept is not None:
        kept = SamplingMask.join([SamplingMask.whole(kept.vocabulary, prompt_len - 1), kept])
    inputs = {TARGETS: ids[1:], "weights": weights}
    return Datum(model_input=ids[:-1], loss_fn_inputs=inputs, kept=kept, routed_experts=routed_experts)


def compute_advantages(rewards: Sequence[float | None], *, eps: float = 1e-8, ddof: int = 1) -> list[float | None]:
    """Return the rewards of one group -> (r - mean) / (std + eps) each; std has n - ddof in its denominator. A reward
    that is None, or beyond 1e100, counts as missing: it enters no statistic and its advantage is None.

    Raises:
        DataError: a reward is not a number.
        ConfigError: eps or ddof is not valid.
    """
    for i, reward in enumerate(rewards):
        if reward is not None and not isinstance(reward, Real):
            raise DataError(f"rewards[{i}] is {reward!r}; it must be a number or None")
    spec = validate(Document({"advantage_eps": eps, "advantage_ddof": ddof}), AdvantageConfig, other_names={})
    return advantages([list(rewards)], spec)[0]


def build_grpo_datums(
    data: Sequence[Datum],
    advantages: Sequence[float],
    inf_logprobs: Sequence[Sequence[float | None]],
    prompt_lens: int | Sequence[int],
    *,
    old_policy_logprobs: Sequence[Sequence[float | None]] | None = None,
    ref_logprobs: Sequence[Sequence[float | None]] | None = None,
) -> list[Datum]:
    """Build datums for `forward_backward` with any policy loss.

    Args:
        data: the sequences; their `mask` or `weights` mark what the policy said, all after the prompt if they have
            neither.
        advantages: one a sequence; a list, a tensor or an array.
        inf_logprobs: the sampler's, in any order of `alignment`.
        prompt_lens: tokens of each prompt, or of all.
        old_policy_logprobs: the trainer's before this batch's first step, for losses anchored to it.
        ref_logprobs: the reference's, for losses with a KL.

    Raises:
        DataError: not one entry a datum, or lengths that disagree; nothing is filled with zeros.
    """
    advantages = _plain(advantages, "advantages")
    lengths = (
        [int(prompt_lens)] * len(data) if isinstance(prompt_lens, Integral) else _plain(prompt_lens, "prompt_lens")
    )
    columns: dict[str, Sequence[Any] | None] = {
        "advantages": advantages,
        "inf_logprobs": inf_logprobs,
        "prompt_lens": lengths,
        "old_policy_logprobs": old_policy_logprobs,
        "ref_logprobs": ref_logprobs,
    }
    for name, column in columns.items():
        if column is not None and len(column) != len(data):
            raise DataError(f"{name} has {len(column)} entries for {len(data)} datums; give one for each")
    names = {"logprobs": "inf_logprobs", "old_logprobs": "old_policy_logprobs", "reference_logprobs": "ref_logprobs"}
    for i, advantage in enumerate(advantages):
        if advantage is None or not math.isfinite(advantage):
            hint = "leave completions out that could not be scored, and groups whose rewards are all equal"
            raise DataError(f"advantages[{i}] is {advantage}; it must be a finite number", hint=hint)
    built = []
    for i, (datum, advantage, length) in enumerate(zip(data, advantages, lengths, strict=True)):
        mask = _spoken(datum, length)
        values: dict[str, Sequence[float] | None] = {"weights": None, "mask": mask}
        values["advantages"] = [advantage * m for m in mask]
        for name, source in names.items():
            if (column := columns[source]) is not None:
                values[name] = aligned(column[i], tokens=len(datum.tokens), prompt_len=length, what=f"{source}[{i}]")
        built.append(datum.having(**values))
    return built


def _spoken(datum: Datum, prompt_len: int) -> list[float]:
    """Return 1 for a target that is after the prompt and marked, else 0."""
    inputs = datum.loss_fn_inputs
    marks = inputs.get("mask", inputs.get("weights", (1.0,) * len(datum.model_input)))
    return [float(j + 1 >= prompt_len and mark > TRAINED) for j, mark in enumerate(marks)]


def _plain(values: Any, name: str) -> tuple[Any, ...]:
    """Return a list, tensor or array as a tuple of Python numbers."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, str | bytes) or not isinstance(plain, Iterable):
        raise DataError(f"{name} is a {type(values).__name__}; give a list of numbers, a tensor or an array")
    return tuple(plain)


def _check_numbers(values: Sequence[Any], name: str) -> None:
    for position, value in enumerate(values):
        if not isinstance(value, int | float):
            raise DataError(f"{name}[{position}] is {value!r}; it must be a number")
