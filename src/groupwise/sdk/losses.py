"""Losses of the SDK: built-in ones by name, and functions over log-probabilities for `forward_backward_custom`.

Built in, for `forward_backward(data, name, config)`: sums over trained tokens; p = log pi, q = `logprobs`, r = e^(p-q)

    cross_entropy        -sum w p                                                             weights
    importance_sampling  -sum r A                                                             logprobs, advantages
    ppo                  -sum min(r A, clip(r, low, high) A)                                  clip_*_threshold .8, 1.2
    cispo                -sum sg(clip(r, low, high)) p A                                      clip_*_threshold 0, 4
    dro                  -sum (p A - beta / 2 (p - q)^2)                                      beta .05
    gspo                 ppo with the ratio exp(mean (p - q)) of the sequence's trained tokens

Recipes, for `forward_backward(build_grpo_datums(...), grpo_loss(...))`, or `make_grpo_loss_fn(...)` as the function of
`forward_backward_custom`, which is the same and costs a forward more: o = trainer's snapshot, c = min(e^(o-q), cap)

    grpo                 sum c max(-e^(p-o) A, -clip(e^(p-o), 1 - eps, 1 + eps) A) + kl_beta k3(p, reference)
    importance_sampling, dapo, dro, gspo, cispo      as above, of e^(p-o) and times c
    reinforce            -sum e^(p-q) A, uncorrected;  with a KL as grpo

All are points of `algo.loss`, whose every other point, `resolve_loss("sapo")`, can be given as well. A sum is divided
in `optim_step`; the reduction of a `LossSpec` of your own is taken over the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.algo.loss import policy_loss, resolve_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.config.loss import LossSpec
from groupwise.errors import ConfigError, DataError, TrainingError
from groupwise.sdk.datums import Datum, build_grpo_datums

CROSS_ENTROPY = "cross_entropy"
BUILT_IN: Mapping[str, Mapping[str, float]] = {  # name -> its knobs and their defaults
    CROSS_ENTROPY: {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
_BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "clip_low_threshold": (lambda value: 0 <= value <= 1, "in [0, 1]: the smallest ratio"),
    "clip_high_threshold": (lambda value: 1 <= value < math.inf, "1 or more: the largest ratio"),
    "beta": (lambda value: 0 < value < math.inf, "positive"),
}
_PRESET = {CROSS_ENTROPY: "reinforce", "ppo": "grpo"}  # where it has another name

Logprobs = Sequence[Sequence[float | None]]
LossFn = Callable[[Sequence[Datum], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]


def built_in(name: str, config: Mapping[str, float] | None = None) -> LossSpec:
    """Return a built-in loss. Thresholds are ratios, .8 and 1.2, not distances from 1.

    Raises:
        ConfigError: an unknown name or knob, or a value that the knob cannot have.
    """
    if name not in BUILT_IN:
        raise ConfigError(f"there is no loss {name!r}; built in: {', '.join(BUILT_IN)}", hint="or give a LossSpec")
    unknown = sorted(set(config or ()) - set(BUILT_IN[name]))
    if unknown:
        valid = ", ".join(BUILT_IN[name]) or "none"
        raise ConfigError(f"{unknown[0]!r} is no knob of {name}; valid: {valid}")
    knobs = {**BUILT_IN[name], **(config or {})}
    for knob, value in knobs.items():
        valid, wanted = _BOUNDS[knob]
        if isinstance(value, bool) or not isinstance(value, int | float) or not valid(value):
            raise ConfigError(f"{knob} is {value!r}; it must be {wanted}")
    overrides: dict[str, Any] = {"reduction": "sum"}
    if name == "gspo":
        overrides["anchor"] = "behaviour"
    if "clip_low_threshold" in knobs:
        overrides["clip_low"] = 1 - knobs["clip_low_threshold"]
        overrides["clip_high"] = knobs["clip_high_threshold"] - 1
    if "beta" in knobs:
        overrides["dro_beta"] = knobs["beta"]
    return resolve_loss(_PRESET.get(name, name), **overrides)


def weights_of(loss: str | LossSpec) -> str:
    """Return the values that weigh the tokens of this loss."""
    return "weights" if loss == CROSS_ENTROPY else "advantages"


def check_inputs(data: Sequence[Datum], spec: LossSpec, *, weights: str) -> None:
    """Raise DataError unless every datum has what the loss reads, and nothing that it would pass over in silence;
    ConfigError for a mean over prompts."""
    if spec.by_prompt:
        raise ConfigError(
            f"reduction {spec.reduction!r} averages over prompts, and datums do not say which prompt they are of",
            hint="use sequence_mean or token_mean",
        )
    if not data:
        raise DataError("there are no datums", hint="skip the step, or sample more prompts")
    needed = {weights} | ({"logprobs"} if spec.reads_behaviour else set())
    unread = {"weights", "advantages"} - {weights}
    unread |= set() if spec.reads_old else {"old_logprobs"}
    unread |= set() if spec.reads_reference else {"reference_logprobs"}
    every = [name for name in ("old_logprobs", "reference_logprobs") if any(name in d.loss_fn_inputs for d in data)]
    for i, datum in enumerate(data):
        has = set(datum.loss_fn_inputs)
        if missing := sorted((needed | set(every)) - has):
            raise DataError(
                f"data[{i}] has no {missing[0]}, which this loss reads", hint="build_grpo_datums makes them"
            )
        if ignored := sorted(unread & has):
            raise DataError(f"data[{i}] has {ignored[0]}, which this loss does not read", hint="leave it out")


def rows_of(data: Sequence[Datum], name: str) -> list[tuple[float, ...]] | None:
    """Return one row a datum of what its sample calls its completion [T]; None without these values."""
    if name not in data[0].loss_fn_inputs:
        return None
    return [tuple(datum.loss_fn_inputs[name][datum.skipped :]) for datum in data]


# ---- client-side: any function of the log-probabilities ----


def datum_loss(
    data: Sequence[Datum],
    logprobs: Sequence[Tensor],
    loss: str | LossSpec,
    config: Mapping[str, float] | None = None,
    *,
    counted: Sequence[Sequence[bool]] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return a loss over given log-probabilities, [N - 1] for each datum -> (scalar with its graph, metrics).

    `counted`: the targets that are read, in place of the datums' masks.

    Raises:
        DataError: the datums lack what it reads, or a row has another length than its datum.
    """
    spec = built_in(loss, config) if isinstance(loss, str) else loss
    check_inputs(data, spec, weights=weights_of(loss))
    for i, (datum, row) in enumerate(zip(data, logprobs, strict=True)):
        if len(row) != len(datum.model_input):
            raise DataError(f"logprobs[{i}] has {len(row)} entries; the datum has {len(datum.model_input)} targets")
    masks = [torch.tensor(marks, dtype=torch.bool) for marks in counted or [datum.mask for datum in data]]
    sizes = [int(mask.sum()) for mask in masks]

    def flat(name: str) -> Tensor | None:
        if name not in data[0].loss_fn_inputs:
            return None
        return torch.cat([torch.tensor(d.loss_fn_inputs[name])[m] for d, m in zip(data, masks, strict=True)])

    advantages_N = flat(weights_of(loss))
    assert advantages_N is not None
    inputs = LossInputs(
        row_N=torch.arange(len(data)).repeat_interleave(torch.tensor(sizes)),
        num_rows=len(data),
        advantages_N=advantages_N,
        behaviour_N=flat("logprobs"),
        old_N=flat("old_logprobs"),
        reference_N=flat("reference_logprobs") if spec.reads_reference else None,
        total_tokens=float(sum(sizes)),
        total_rows=float(sum(size > 0 for size in sizes)),
    )
    logprobs_N = torch.cat([row[mask] for row, mask in zip(logprobs, masks, strict=True)])
    value, metrics = policy_loss(logprobs_N, inputs, spec)
    return value, {name: float(metric) for name, metric in metrics.items()}


def checked_custom(returned: Any) -> tuple[Tensor, dict[str, float]]:
    """Return the result of a user's loss function as its loss and its metrics.

    Raises:
        ConfigError: the result is not a scalar tensor with a gradient and a mapping of numbers.
        TrainingError: the loss is not finite.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        kind = type(returned).__name__
        hint = "return loss, {} where there are no metrics"
        raise ConfigError(f"the custom loss returned a {kind}; it must return (loss, metrics)", hint=hint)
    loss, metrics = returned
    if not isinstance(loss, Tensor):
        hint = "compute it with torch from the log-probabilities: another number has no gradient"
        raise ConfigError(f"the loss is a {type(loss).__name__}; it must be a tensor", hint=hint)
    if loss.numel() != 1:
        raise ConfigError(f"the loss has shape {list(loss.shape)}; it must be one number", hint="sum it, or average it")
    if not loss.requires_grad:
        hint = "use the log-probabilities that the function was given, without detach(), item() or tolist()"
        raise ConfigError("the loss has no gradient", hint=hint)
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise ConfigError(f"the metrics are a {kind}; they must be a mapping from names to numbers", hint="return {}")
    numbers = {str(name): _number(name, value) for name, value in metrics.items()}
    if not math.isfinite(value := float(loss.detach())):
        raise TrainingError(f"the custom loss is {value}; nothing was accumulated")
    return loss.reshape(()), numbers


def _number(name: object, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if not isinstance(value, Real):
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise ConfigError(f"metric {name!r} is {shown}; it must be a number")
    return float(value)


def make_loss_fn(
    loss: LossSpec,
    advantages: Sequence[float],
    ref_logprobs: Logprobs | None,
    prompt_len: int | Sequence[int],
    inf_logprobs: Logprobs,
    prox_logprobs: Logprobs | None = None,
) -> LossFn:
    """Return `loss` as a function for `forward_backward_custom`; its arguments are those of `build_grpo_datums`.

    `prox_logprobs` is the trainer's snapshot; without one the policy as it is stands in, which is exact for the first
    optimizer step on a batch.
    """

    def loss_fn(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        built = build_grpo_datums(
            data,
            advantages,
            inf_logprobs,
            prompt_len,
            old_policy_logprobs=prox_logprobs if loss.reads_old else None,
            ref_logprobs=ref_logprobs if loss.reads_reference else None,
        )
        return datum_loss(built, logprobs, loss)

    return loss_fn


# ---- the recipe's losses ----


def grpo_loss(
    *, kl_beta: float = 0.001, eps_clip: float = 0.2, eps_clip_high: float | None = None, tis_cap: float = 5.0
) -> LossSpec:
    """Return GRPO's loss: a clipped ratio, truncated importance sampling, and a KL (k3), summed over trained tokens.

    Args:
        kl_beta: weight of the KL to the reference; 0 leaves it out.
        eps_clip: how far the ratio may go from 1, downwards; and upwards, unless `eps_clip_high` says otherwise.
        tis_cap: the largest weight for the gap between sampler and trainer.

    Raises:
        FieldError: a number out of range.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    return _recipe("grpo", tis_cap, clip_low=eps_clip, clip_high=high, **_kl(kl_beta))


def importance_sampling_loss(*, tis_cap: float = 5.0) -> LossSpec:
    """Return the ratio, unclipped."""
    return _recipe("importance_sampling", tis_cap)


def reinforce_loss(*, kl_beta: float = 0.0) -> LossSpec:
    """Return REINFORCE weighted by the ratio to the policy that sampled."""
    return resolve_loss("importance_sampling", reduction="sum", **_kl(kl_beta))


def dapo_loss(
    *, eps_clip: float = 0.2, eps_clip_high: float = 0.28, eps_clip_c: float | None = None, tis_cap: float = 5.0
) -> LossSpec:
    """Return DAPO's loss with decoupled clipping; `eps_clip_c` is the dual clip."""
    return _recipe("dapo", tis_cap, clip_low=eps_clip, clip_high=eps_clip_high, dual_clip=eps_clip_c)


def dro_loss(*, beta: float = 0.05, tis_cap: float = 5.0) -> LossSpec:
    """Log-probability times advantage, and a quadratic penalty on leaving the snapshot."""
    return _recipe("dro", tis_cap, dro_beta=beta, anchor="old")


def gspo_loss(*, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, tis_cap: float = 5.0) -> LossSpec:
    """Return the sequence's ratio, clipped; the mean of its logarithm is over trained tokens only."""
    return _recipe("gspo", tis_cap, clip_low=clip_ratio_low, clip_high=clip_ratio_high)


def cispo_loss(*, eps_low: float = 0.2, eps_high: float = 0.28, tis_cap: float = 5.0) -> LossSpec:
    """Return the loss with the clipped ratio as a constant weight of the log-probability."""
    return _recipe("cispo", tis_cap, clip_low=eps_low, clip_high=eps_high)


def _recipe(preset: str, tis_cap: float, **knobs: Any) -> LossSpec:
    fixed = {"reduction": "sum", "anchor": "old", "correction": "tis_token", "correction_cap": tis_cap}
    return resolve_loss(preset, **{**fixed, **knobs})


def _kl(beta: float) -> dict[str, Any]:
    return {"kl": "k3", "kl_coeff": beta} if beta else {}


class MakeLossFn(Protocol):
    """Makes a recipe's loss a function for `forward_backward_custom`.

    Args:
        advantages: one a sequence.
        ref_logprobs: the reference's, [sequences][tokens], or None without a KL.
        prompt_len: tokens of each prompt, or of all.
        inf_logprobs: the sampler's, in any order of `sdk.alignment`.
        prox_logprobs: the trainer's before the batch's first step; None: those of the call.
        knobs: the loss's options, such as `kl_beta` of `grpo_loss`.

    Raises:
        DataError: lengths that disagree.
        FieldError: a knob that the loss has not, or a value that it cannot have.
    """

    def __call__(
        self,
        advantages: Sequence[float],
        ref_logprobs: Logprobs | None,
        prompt_len: int | Sequence[int],
        inf_logprobs: Logprobs,
        prox_logprobs: Logprobs | None = None,
        **knobs: Any,
    ) -> LossFn: ...


def _maker(loss: Callable[..., LossSpec]) -> MakeLossFn:
    def make(
        advantages: Sequence[float],
        ref_logprobs: Logprobs | None,
        prompt_len: int | Sequence[int],
        inf_logprobs: Logprobs,
        prox_logprobs: Logprobs | None = None,
        **knobs: Any,
    ) -> LossFn:
        return make_loss_fn(loss(**knobs), advantages, ref_logprobs, prompt_len, inf_logprobs, prox_logprobs)

    make.__doc__ = MakeLossFn.__doc__
    return make


make_grpo_loss_fn = _maker(grpo_loss)
make_importance_sampling_loss_fn = _maker(importance_sampling_loss)
make_reinforce_loss_fn = _maker(reinforce_loss)
make_dapo_loss_fn = _maker(dapo_loss)
make_dro_loss_fn = _maker(dro_loss)
make_gspo_loss_fn = _maker(gspo_loss)
make_cispo_loss_fn = _maker(cispo_loss)
