"""The choice of a policy loss: `LossSpec`, the factors that `algo/loss.py` multiplies, and the presets
with published names.

`resolve_loss("dapo")` alone is the published loss. Every knob acts or is refused: `resolve_loss("reinforce",
clip_low=0.1)` is an error, because REINFORCE has no ratio to clip. No torch here.

A sequence's ratio is bounded by a few 1e-4, less than the sampler's 16-bit log-probabilities are off by rounding. So it
is taken against the trainer's own snapshot (`anchor: old`) unless told otherwise: on-policy nothing is clipped then.

    preset               surrogate  ratio     numbers                 reduction      paper
    grpo                 clip       token     0.2 / 0.2               sequence_mean  arXiv 2402.03300
    dapo                 clip       token     0.2 / 0.28              token_mean     arXiv 2503.14476
    bnpo                 clip       token     0.2 / 0.2               token_mean     GRPO with DAPO's reduction
    dr_grpo              clip       token     0.2 / 0.2               constant       arXiv 2503.20783
    gspo                 clip       sequence  3e-4 / 4e-4             sequence_mean  arXiv 2507.18071
    luspo                clip       sequence  2e-3 / 2.5e-3           sequence_sum   arXiv 2602.05261
    cispo                cispo      token     ratio <= 5              token_mean     arXiv 2506.13585, 2510.13786
    sapo                 sapo       token     tau 1.0 / 1.05          sequence_mean  arXiv 2511.20347
    vespo                vespo      -         (k, lambda) fixed       token_mean     arXiv 2602.10693
    dppo                 dppo_tv    token     0.15 / 0.15             token_mean     arXiv 2602.04879
    dppo_kl              dppo_kl    token     0.05 / 0.05             token_mean     arXiv 2602.04879
    importance_sampling  unclipped  token     -                       token_mean     arXiv 1205.4839
    reinforce            reinforce  -         -                       token_mean     Williams 1992
    dro                  dro        -         beta 0.05               token_mean     arXiv 2405.19107
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from groupwise.config.algo import AlgoConfig
from groupwise.config.load import load_object
from groupwise.errors import FieldError

Surrogate = Literal["clip", "unclipped", "cispo", "dppo_tv", "dppo_kl", "dro", "reinforce", "sapo", "vespo", "custom"]
Ratio = Literal["token", "sequence", "none"]
Anchor = Literal["behaviour", "old"]
Correction = Literal["none", "tis_token", "tis_sequence", "mask_token", "mask_sequence", "mask_geometric"]
KL = Literal["none", "k1", "k2", "k3", "k3_unbiased"]
Reduction = Literal["token_mean", "sequence_mean", "prompt_mean", "constant", "sequence_sum", "sum"]
SoftKL = Literal["none", "reverse", "forward", "jsd"]

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "surrogate": get_args(Surrogate),
    "ratio": get_args(Ratio),
    "anchor": get_args(Anchor),
    "correction": get_args(Correction),
    "kl": get_args(KL),
    "reduction": get_args(Reduction),
    "soft_kl": get_args(SoftKL),
}
LARGEST = 3.4e38  # of any option

_DPPO = ("dppo_tv", "dppo_kl")
_RATIO_SURROGATES = ("clip", "unclipped", "cispo", *_DPPO, "sapo", "custom")
_WEIGHTS = ("tis_token", "tis_sequence", "mask_token", "mask_sequence")  # they multiply by exp(old - behaviour)

# knob -> (the factor that decides whether it is read, the values with which it is)
_READ_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ratio": ("surrogate", _RATIO_SURROGATES),
    "clip_low": ("surrogate", ("clip", "cispo", *_DPPO)),
    "clip_high": ("surrogate", ("clip", "cispo", *_DPPO)),
    "dual_clip": ("surrogate", ("clip",)),
    "dro_beta": ("surrogate", ("dro", *_DPPO)),
    "sapo_tau_positive": ("surrogate", ("sapo",)),
    "sapo_tau_negative": ("surrogate", ("sapo",)),
    "function": ("surrogate", ("custom",)),
    "correction_cap": ("correction", get_args(Correction)[1:]),
    "correction_floor": ("correction", get_args(Correction)[1:]),
    "kl_coeff": ("kl", get_args(KL)[1:]),
    "soft_kl_coeff": ("soft_kl", get_args(SoftKL)[1:]),
    "reduction_length": ("reduction", ("constant",)),
}


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The factors of one policy loss; the equations are in `algo/loss.py`. Usually made by `resolve_loss`.

    None means that a knob is not set. A knob that the chosen factors do not read must not be set.

    Raises:
        FieldError: an unknown choice, a number out of range, a missing one, or one that would have no effect.
    """

    surrogate: Surrogate
    ratio: Ratio = "none"
    anchor: Anchor = "behaviour"  # what the ratio (and DRO's square) is taken against
    clip_low: float | None = None  # ratios are clipped to [1 - clip_low, 1 + clip_high]; of DPPO the divergence
    clip_high: float | None = None
    dual_clip: float | None = None  # a bound on the ratio where the advantage is negative
    dro_beta: float | None = None
    sapo_tau_positive: float | None = None
    sapo_tau_negative: float | None = None
    function: str | None = (
        None  # the surrogate `custom`, as `algo.loss.CustomSurrogate`: module:function, file.py:function
    )
    correction: Correction = "none"
    correction_cap: float | None = None  # bounds on the ratio exp(old - behaviour), not on its logarithm
    correction_floor: float | None = None
    opsm_threshold: float | None = None  # nats per token; off-policy sequence mask
    kl: KL = "none"
    kl_coeff: float | None = None
    reduction: Reduction = "token_mean"
    reduction_length: float | None = None  # tokens; what `constant` divides by, usually the largest completion length
    entropy_coeff: float = 0.0
    soft_kl: SoftKL = "none"  # the divergence from `Sample.soft_targets` (`algo.distillation.soft_divergence`)
    soft_kl_coeff: float | None = None

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise _unknown(name, f"{{field}} {getattr(self, name)!r}", getattr(self, name), valid)
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and not self.reads(field.name):
                raise self._ineffective(field.name, value)
        self._check_combination()
        self._check_numbers()

    @property
    def reads_anchor(self) -> bool:
        """Return whether anything compares the policy with the anchor."""
        ratio = self.ratio != "none" or self.surrogate in ("dro", "vespo") or self.kl == "k3_unbiased"
        return ratio or self.correction != "none"

    @property
    def reads_old(self) -> bool:
        """Return whether the trainer's snapshot is needed once there is more than one optimizer step on a batch."""
        return self.reads_anchor and self.anchor == "old"

    @property
    def reads_behaviour(self) -> bool:
        """Return whether the sampler's log-probabilities are needed."""
        gap = self.correction != "none" or self.opsm_threshold is not None
        return gap or (self.reads_anchor and self.anchor == "behaviour")

    @property
    def reads_reference(self) -> bool:
        """Return whether the reference's log-probabilities are needed."""
        return self.kl != "none"

    @property
    def reads_soft_targets(self) -> bool:
        """Return whether the log-probabilities of soft targets are needed."""
        return self.soft_kl != "none"

    @property
    def reads_entropy(self) -> bool:
        """Return whether the entropy needs a gradient."""
        return self.entropy_coeff != 0.0

    @property
    def by_prompt(self) -> bool:
        """Return whether the reduction averages over the tokens of a prompt's completions, and counts prompts."""
        return self.reduction == "prompt_mean"

    @property
    def streams(self) -> bool:
        """Return whether gradients can be accumulated before the batch is complete: all terms must share one
        `denominator`.

        The entropy bonus is always a mean over tokens, so it goes with `token_mean` only.
        """
        return not self.reads_entropy or self.reduction == "token_mean"

    def denominator(self, *, tokens: float, rows: float) -> float:
        """Return the part of the reduction's divisor that only the whole batch knows: its loss tokens, its rows, or
        (with `by_prompt`) its prompts, given as `rows`."""
        return {"token_mean": max(tokens, 1.0), "sum": 1.0}.get(self.reduction, max(rows, 1.0))

    def needs_flat(self, steps_per_batch: int, *, stale: bool = False) -> bool:
        """Return whether samples with advantage 0 have a gradient, so that groups of equal rewards must be trained on.

        Every surrogate is a multiple of the advantage. The other terms are not: a KL, an entropy bonus, soft targets,
        and DRO's square, which is flat only where the policy is its anchor: on the first of a batch's optimizer steps,
        and, if the anchor is the behaviour policy, on data that is not `stale`. The square that DPPO may have is of the
        groups that are trained on.
        """
        moved = steps_per_batch > 1 or (stale and self.anchor == "behaviour")
        other = self.reads_reference or self.reads_entropy or self.reads_soft_targets
        return other or (self.surrogate == "dro" and moved)

    def off_policy_warnings(self, steps_per_batch: int, *, stale: bool, section: str = "algo.") -> list[str]:
        """Return what this loss does not account for where samples are not of the policy that is trained: in the
        optimizer steps on a batch after the first, and in all of them where samples may be `stale`, of an older policy
        or one of rounded weights. `section` stands before the names of options."""
        warnings: list[str] = []
        weigh = f"set {section}correction (tis_token, say), or take a loss with a bounded ratio (grpo, dapo, cispo)"
        if self.surrogate == "reinforce" and self.correction == "none":
            where = [f"all but the first of {steps_per_batch} optimizer steps on a batch"] * (steps_per_batch > 1)
            where += ["samples that may be of another policy"] * stale
            if where:
                warnings.append(
                    "the surrogate reinforce has no ratio: what another policy sampled is trained as if the present "
                    f"one had, in {' and '.join(where)}; {weigh}"
                )
        if self.surrogate == "unclipped" and steps_per_batch > 1:
            warnings.append(
                f"the surrogate unclipped bounds nothing: in {steps_per_batch} optimizer steps on a batch the policy "
                "may move as far as it likes; take a loss with a bounded ratio (grpo, dapo, cispo), or one step"
            )
        if stale and self.anchor == "old" and self.reads_anchor and self.correction == "none":
            warnings.append(
                "anchor old compares with the trainer's snapshot, and samples may be of another policy: that gap is "
                f"not corrected; set {section}correction (tis_token, or tis_sequence with a sequence's ratio), or "
                f"{section}anchor: behaviour"
            )
        return warnings

    def reads(self, knob: str) -> bool:
        """Return whether the loss depends on this field, given the others."""
        if knob == "anchor":
            return self.reads_anchor
        factor, values = _READ_WITH.get(knob, ("surrogate", get_args(Surrogate)))
        return getattr(self, factor) in values

    def _ineffective(self, knob: str, value: object) -> FieldError:
        if knob == "anchor":
            return FieldError(
                f"{{field}}={value!r} has no effect with surrogate {self.surrogate!r}, which has no ratio",
                hint=f"remove {{field}}, or use a surrogate with a ratio: {', '.join(_RATIO_SURROGATES)}",
                field=knob,
                kind="ineffective",
            )
        factor, values = _READ_WITH[knob]
        names = [name for name, preset in PRESETS.items() if factor == "surrogate" and preset[factor] in values]
        presets = f" (policy_loss {', '.join(names)})" if names else ""
        return FieldError(
            f"{{field}}={value!r} has no effect with {factor} {getattr(self, factor)!r}",
            hint=f"remove {{field}}; it acts with {factor} {', '.join(values)}{presets}",
            field=knob,
            kind="ineffective",
        )

    def _check_combination(self) -> None:
        if self.surrogate in _RATIO_SURROGATES and self.ratio == "none":
            raise FieldError(f"{{field}} {self.surrogate!r} needs a ratio: token or sequence", field="surrogate")
        if self.surrogate == "custom" and self.function is None:
            hint = "set policy_loss to it, as module:function"
            raise FieldError("{field} 'custom' is a function of yours", hint=hint, field="surrogate", kind="missing")
        if self.surrogate in _DPPO and self.ratio != "token":
            message = f"{{field}} {self.ratio!r} with surrogate {self.surrogate!r}, whose trust region is of tokens"
            raise FieldError(message, hint="take ratio token", field="ratio", kind="conflict")
        needed = {
            **dict.fromkeys(("clip", "cispo", *_DPPO), ("clip_high",)),
            "dro": ("dro_beta",),
            "sapo": ("sapo_tau_positive", "sapo_tau_negative"),
        }.get(self.surrogate, ())
        coefficients = [name for name in ("kl_coeff", "soft_kl_coeff") if self.reads(name)]
        for name in (*needed, *coefficients):
            if getattr(self, name) is None:
                message = "{field} is not set, and this loss needs it; `resolve_loss` fills in the usual value"
                raise FieldError(message, field=name, kind="missing")
        contained = self.ratio != "none" or self.surrogate == "vespo"
        if self.correction in _WEIGHTS and self.anchor == "behaviour" and contained:
            raise FieldError(
                f"{{field}} {self.correction!r} with anchor 'behaviour' would count the sampler's gap twice: "
                "a ratio against the behaviour policy already contains it",
                hint="use anchor old with it, or correction mask_geometric, or none",
                field="correction",
                kind="conflict",
            )
        if self.correction.startswith("mask") and self.correction_cap is None and self.correction_floor is None:
            message = f"{{field}} {self.correction!r} masks nothing without correction_cap or _floor; set one"
            raise FieldError(message, field="correction")

    def _check_numbers(self) -> None:
        positive = (
            "dro_beta",
            "sapo_tau_positive",
            "sapo_tau_negative",
            "kl_coeff",
            "soft_kl_coeff",
            "correction_cap",
            "reduction_length",
        )
        limits = {"clip_low": 0.0, "clip_high": 0.0, "correction_floor": 0.0, "entropy_coeff": 0.0}
        for name in (*positive, *limits, "dual_clip", "opsm_threshold"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise _not_valid(name, value, "it must be a finite number")
            if abs(value) > LARGEST:
                raise _not_valid(name, value, f"float32, in which losses are computed, ends at {LARGEST:g}")
            if name in positive and value <= 0:
                raise _not_valid(name, value, "it must be positive")
            if name in limits and value < limits[name]:
                raise _not_valid(name, value, f"it must be {limits[name]:g} or more")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise _not_valid("dual_clip", self.dual_clip, "it bounds a ratio and must be above 1, usually 3")
        floor, cap = self.correction_floor or 0.0, self.correction_cap
        if cap is not None and floor >= cap:
            message = f"{{field}} is {floor} and correction_cap is {cap}; the floor must be below the cap"
            raise FieldError(message, field="correction_floor", kind="conflict")


CUSTOM: Mapping[str, Any] = MappingProxyType({"surrogate": "custom", "reduction": "token_mean"})
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "grpo": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "reduction": "sequence_mean"},
        "dapo": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.28, "reduction": "token_mean"},
        "bnpo": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "reduction": "token_mean"},
        "dr_grpo": {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "reduction": "constant"},
        "gspo": {
            "surrogate": "clip",
            "ratio": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "reduction": "sequence_mean",
        },
        "luspo": {
            "surrogate": "clip",
            "ratio": "sequence",
            "clip_low": 2e-3,
            "clip_high": 2.5e-3,
            "reduction": "sequence_sum",
        },
        "cispo": {"surrogate": "cispo", "clip_high": 4.0, "reduction": "token_mean"},
        "sapo": {"surrogate": "sapo", "reduction": "sequence_mean"},
        "vespo": {"surrogate": "vespo", "reduction": "token_mean"},
        "dppo": {"surrogate": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15, "reduction": "token_mean"},
        "dppo_kl": {"surrogate": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05, "reduction": "token_mean"},
        "importance_sampling": {"surrogate": "unclipped", "reduction": "token_mean"},
        "reinforce": {"surrogate": "reinforce", "reduction": "token_mean"},
        "dro": {"surrogate": "dro", "reduction": "token_mean"},
    }
)

# The usual value of a knob that is read and given neither by the preset nor by the caller.
_USUAL: Mapping[str, float | str] = {
    "ratio": "token",
    "clip_high": 0.2,
    "dro_beta": 0.05,
    "sapo_tau_positive": 1.0,
    "sapo_tau_negative": 1.05,
    "kl_coeff": 0.04,  # GRPO's
    "soft_kl_coeff": 1.0,
}
_USUAL_BOUNDS: Mapping[str, tuple[float | None, float | None]] = {  # correction -> (floor, cap)
    "tis_token": (None, 2.0),
    "tis_sequence": (None, 2.0),
    "mask_token": (0.5, 5.0),  # IcePop's
    "mask_sequence": (None, 3.0),
    "mask_geometric": (0.99, 1.01),
}
_OTHER_NAMES = {
    "beta": "kl_coeff (or dro_beta)",
    "epsilon": "clip_low and clip_high",
    "epsilon_high": "clip_high (for cispo: the largest ratio minus 1)",
    "delta": "dual_clip",
    "max_tokens": "reduction_length",
}


def resolve_loss(policy_loss: str, **overrides: Any) -> LossSpec:
    """Return a preset by name, or a function of your own (`module:function`, `path/to/file.py:function`; see
    `algo.loss.CustomSurrogate`), with some of its fields overridden.

    A field that the preset sets and that the overridden factors no longer read falls away; one they newly read gets its
    usual value. An override of None unsets a field. `reduction_length` of `dr_grpo` has no usual value: give the
    largest completion length.

    >>> resolve_loss("dapo").clip_high
    0.28
    >>> resolve_loss("grpo", kl="k3").kl_coeff
    0.04

    Raises:
        FieldError: an unknown preset, field or choice (the nearest is named), or an override without effect.
    """
    if ":" not in policy_loss and policy_loss not in PRESETS:
        hint = "or write a function of yours as module:function" if "." in policy_loss else None
        raise _unknown("policy_loss", f"{{field}} {policy_loss!r}", policy_loss, tuple(PRESETS), hint=hint)
    names = tuple(field.name for field in fields(LossSpec))
    for name in overrides:
        if name not in names:
            hint = f"here it is {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else None
            raise _unknown(name, f"loss option {name!r}", name, names, hint=hint)
        if name in _CHOICES and overrides[name] not in _CHOICES[name]:
            raise _unknown(name, f"{{field}} {overrides[name]!r}", overrides[name], _CHOICES[name])
    preset = PRESETS.get(policy_loss) or {**CUSTOM, "function": policy_loss}
    values = {**preset, **overrides}
    correction = values.get("correction", "none")
    floor, cap = _USUAL_BOUNDS.get(correction, (None, None))
    given_bounds = "correction_floor" in overrides or "correction_cap" in overrides
    usual = _USUAL if given_bounds else {**_USUAL, "correction_floor": floor, "correction_cap": cap}
    if values["surrogate"] != "dro":  # with DPPO there is no square unless it is asked for
        usual = {name: value for name, value in usual.items() if name != "dro_beta"}
    for name, (factor, valid) in _READ_WITH.items():
        read = values.get(factor, "none") in valid
        if read and name in usual:
            values.setdefault(name, usual[name])
        elif not read and name not in overrides:
            values.pop(name, None)
    contained = values["surrogate"] in (*_RATIO_SURROGATES, "vespo")  # in the ratio, once it is against the sampler
    own = values.get("ratio") == "sequence" or (correction in _WEIGHTS and contained)
    values.setdefault("anchor", "old" if own else "behaviour")
    spec = LossSpec(**values)
    for name, value in overrides.items():  # also those that equal the field's default
        if value not in (None, "none") and not spec.reads(name):
            raise spec._ineffective(name, value)
    return spec


def loss_of(
    algo: AlgoConfig,
    *,
    max_tokens: int,
    stale: bool = False,
    dropout: bool = False,
    section: str = "algo.",
    folder: Path | None = None,
) -> LossSpec:
    """Return the loss that the configuration names.

    Args:
        folder: the folder in which modules and files with loss functions are looked up first. None takes only presets.
        max_tokens: the default divisor of a constant reduction.
        stale: samples may be of an older policy than the one that is trained. Then a sequence's ratio, whose anchor is
            the trainer's snapshot, comes with the correction tis_sequence unless told otherwise.
        dropout: the adapter is trained with dropout. Then the anchor is the trainer's own snapshot unless told
            otherwise, on the first step of a batch its own forward with the same masks: the ratio to what was sampled
            without dropout would be noise, and clipped as such.
        section: the part of an option's key before its name, for errors.

    Raises FieldError as `resolve_loss` does.
    """
    try:
        if ":" in algo.policy_loss:
            if folder is None:
                raise _unknown("policy_loss", f"{{field}} {algo.policy_loss!r}", algo.policy_loss, tuple(PRESETS))
            algo = algo.model_copy(update={"policy_loss": _located(algo.policy_loss, folder)})
        return _loss_of(algo, max_tokens=max_tokens, stale=stale, dropout=dropout)
    except FieldError as error:
        error.field = f"{section}{error.field}"
        raise


def _loss_of(algo: AlgoConfig, *, max_tokens: int, stale: bool, dropout: bool) -> LossSpec:
    overrides = algo.loss_overrides()
    preset = PRESETS.get(algo.policy_loss, CUSTOM)
    if overrides.get("reduction", preset.get("reduction")) == "constant":
        overrides.setdefault("reduction_length", float(max_tokens))
    spec = resolve_loss(algo.policy_loss, **overrides)
    if dropout and spec.reads_anchor and "anchor" not in overrides:
        overrides["anchor"] = "old"
        spec = resolve_loss(algo.policy_loss, **overrides)
    if stale and spec.ratio == "sequence" and not overrides.keys() & {"anchor", "correction"}:
        return resolve_loss(algo.policy_loss, **overrides, correction="tis_sequence")
    return spec


def _located(reference: str, folder: Path) -> str:
    """Return a loss function's reference that holds in any process: by its file, if that is in the folder."""
    load_object(reference, folder=folder)  # its errors now, and not in the first step
    module, _, name = reference.rpartition(":")
    file = folder / (module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    return f"{file.resolve()}:{name}" if file.is_file() else reference


def _unknown(field: str, what: str, given: object, valid: tuple[str, ...], *, hint: str | None = None) -> FieldError:
    """Return the error of a value that does not exist. `what` names the value, with `{field}` for the field's name;
    `valid` are the existing values."""
    near = difflib.get_close_matches(str(given), valid, n=1)
    meant = f"did you mean {near[0]!r}? " if near and hint is None else ""
    message = f"{what} does not exist; {meant}valid: {', '.join(valid)}"
    return FieldError(message, hint=hint, field=field, kind="unknown")


def _not_valid(name: str, value: object, wanted: str) -> FieldError:
    return FieldError(f"{{field}} is {value!r}; {wanted}", field=name)
