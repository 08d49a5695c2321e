"""TRL's GRPO arguments as ours; TRL's files, Axolotl's `trl:` section and aitraining's flags all reduce to them.

`grpo_args.yaml` is their table. What the arguments mean there:

    loss_type            how token losses are averaged, and for cispo, sapo, vespo, luspo the loss itself
    epsilon[_high]       bounds of the ratio, 0.2 for every loss; with cispo `epsilon_high` is the largest ratio itself
    the correction       exp(trainer - sampler), bounded or masked; there only with vLLM, whose log-probabilities differ
                         from the trainer's; here also where samples are older than the policy that is trained
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.config.formats.translation import Translation

CORRECTIONS = {
    "token_truncate": "tis_token",
    "token_mask": "mask_token",
    "sequence_truncate": "tis_sequence",
    "sequence_mask": "mask_sequence",
}

REWARD_MODEL = "groupwise.rewards.classifier:reward_model"

DEFAULTS_1_8 = {"max_completion_length": 256, "use_bias_correction_kl": False}

"""Where TRL 1.8.0's defaults are not 1.16.0's."""

NARROWED = (
    "vLLM does not report which tokens it left; trained as drawn from everything, what is learned would be biased"
)

"""Why `top_p`, `top_k` and `min_p` are not here with vLLM."""

NARROWING_OFF: Mapping[str, tuple[float, ...]] = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}

GENERATION_KWARGS = {
    "temperature": "rollout.temperature",
    "max_tokens": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "stop": "rollout.stop",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
}


def put_sampling(t: Translation, p: str) -> None:
    """Translate `generation_kwargs`; `p` is the prefix of the keys' names."""
    if t[f"{p}max_completion_length"] is None:
        what = "not set: completions have at most 256 tokens; there they go on to the engine's limit"
        t.note_difference(f"{p}max_completion_length", what)
    name, vllm = f"{p}generation_kwargs", bool(t[f"{p}use_vllm"])
    given = t[name] or {}
    put_regex(t, p, vllm=vllm)
    for key in NARROWING_OFF:
        if key not in given:
            put_narrowing(t, f"{p}{key}", GENERATION_KWARGS[key], t[f"{p}{key}"], vllm=vllm)
    for key, value in given.items():
        if key not in GENERATION_KWARGS:
            t.refuse(name, f"{key!r} is not here; it knows {', '.join(GENERATION_KWARGS)}")
        elif key in NARROWING_OFF:
            put_narrowing(t, name, GENERATION_KWARGS[key], value, vllm=vllm)
        else:
            t.put(GENERATION_KWARGS[key], [value] if key == "stop" and isinstance(value, str) else value, name)
            if key == "stop" and value:  # there rewards read all that was sampled
                t.put("rollout.include_stop", True, name)


def put_shown(t: Translation, p: str) -> None:
    """Put that the trackers get no completions, unless `log_completions` asks for them; behind where they are put."""
    if "tracking" in t.draft.data and not t[f"{p}log_completions"]:
        t.put("tracking.completions", 0, f"{p}log_completions")


def put_regex(t: Translation, p: str, *, vllm: bool) -> None:
    """Put what completions must match."""
    name = f"{p}vllm_structured_outputs_regex"
    if not t[name]:
        return
    if vllm:
        t.refuse(name, NARROWED)
    else:
        t.put("rollout.structured_outputs_regex", t[name], name)
        t.note_difference(name, "acts with the engine that there is; there with use_vllm only, and biases the loss")


def put_narrowing(t: Translation, name: str, to: str, value: Any, *, vllm: bool) -> None:
    """Translate `top_p`, `top_k` or `min_p`, given as `name`, unless it is off."""
    key = to.rpartition(".")[2]
    if value is None or value in NARROWING_OFF[key]:
        return
    if vllm:
        t.refuse(name, f"{key} {value:g}: {NARROWED}")
    else:
        t.put(to, value, name)
        t.note_difference(
            name, f"log-probabilities are of what {key} leaves; there of all tokens, which biases the loss"
        )


def put_algorithm(t: Translation, p: str, *, off_policy: bool) -> None:
    """Translate advantages and the loss. `off_policy`: samples may be older than the trained policy."""
    _put_advantage(t, p)
    _put_loss(t, p)
    _put_kl(t, p)
    _put_correction(t, p, off_policy=off_policy)


def _put_advantage(t: Translation, p: str) -> None:
    kinds = {True: "group_std", "group": "group_std", "batch": "batch_std", False: "mean", "none": "mean"}
    name, scale = f"{p}scale_rewards", t[f"{p}scale_rewards"]
    if scale not in kinds:
        t.problem(name, f"{scale!r} is not valid; it must be true, false, group, batch or none")
    elif t[f"{p}multi_objective_aggregation"] == "sum_then_normalize":
        t.put("algo.advantage", kinds[scale], name)
    elif t.given(name):
        t.note_idle(name, "normalize_then_sum has its own scales")


def _put_loss(t: Translation, p: str) -> None:
    loss, level = t[f"{p}loss_type"], t[f"{p}importance_sampling_level"]
    t.put("algo.policy_loss", loss, f"{p}loss_type")
    if loss == "bnpo":
        t.note_difference(f"{p}loss_type", "the mean is over the tokens of an optimizer step; there of a micro-batch")
    if loss == "luspo" and level != "sequence":
        t.problem(f"{p}importance_sampling_level", "luspo is a loss of sequences; write sequence")
    elif loss == "vespo" and t.given(f"{p}importance_sampling_level"):
        t.note_idle(f"{p}importance_sampling_level", "VESPO weighs whole sequences in any case")
    elif loss not in ("luspo", "vespo") and level == "sequence":
        t.put("algo.ratio", level, f"{p}importance_sampling_level")
    _put_bounds(t, p, loss)
    if t[f"{p}entropy_coef"]:
        t.put("algo.entropy_coeff", t[f"{p}entropy_coef"], f"{p}entropy_coef")


def _put_bounds(t: Translation, p: str, loss: str) -> None:
    low, high, delta = f"{p}epsilon", f"{p}epsilon_high", f"{p}delta"
    upper = high if t.given(high) else low
    if loss == "cispo":
        if t[upper] < 1:
            what = f"{t[upper]:g} would be the largest ratio with cispo, and scale every token down; ScaleRL has 5.0"
            t.problem(upper, f"{what}: write {high}=5.0")
        t.put("algo.clip_high", t[upper] - 1, upper)
    elif loss in ("sapo", "vespo"):
        for name in (low, high):
            if t.given(name):
                t.note_idle(name, f"{loss} does not clip")
    else:
        t.put("algo.clip_low", t[low], low)
        _put_upper_bound(t, upper, delta)
    if loss in ("cispo", "sapo", "vespo") and t.given(delta):
        t.note_idle(delta, f"{loss} has no clipped objective that it could bound")
    for ours, name in (("positive", f"{p}sapo_temperature_pos"), ("negative", f"{p}sapo_temperature_neg")):
        if loss == "sapo":
            t.put(f"algo.sapo_tau_{ours}", t[name], name)
        elif t.given(name):
            t.note_idle(name, f"{loss} does not read it")


def _put_upper_bound(t: Translation, upper: str, delta: str) -> None:
    """TRL has -min(min(w, delta) A, clip(w, 1 - low, 1 + high) A): where A > 0 the smaller of the two bounds cuts the
    gradient, where A < 0 the larger."""
    high, bound = t[upper], t[delta]
    if bound is None or bound >= 1 + high:
        t.put("algo.clip_high", high, upper)
        t.put("algo.dual_clip", bound, delta)
    elif bound < 1:
        t.problem(
            delta, f"{bound:g} is not valid: below 1 nothing with a positive advantage is learned; write 1 or more"
        )
    else:
        t.put("algo.clip_high", bound - 1, delta)
        t.put("algo.dual_clip", 1 + high, delta, upper)


def _put_kl(t: Translation, p: str) -> None:
    beta, unbiased, sync = f"{p}beta", f"{p}use_bias_correction_kl", f"{p}sync_ref_model"
    alpha, every = f"{p}ref_model_mixup_alpha", f"{p}ref_model_sync_steps"
    if not t[beta]:
        for name in (unbiased, sync):
            if t.given(name) and t[name]:
                t.note_idle(name, f"{beta} is 0, so no reference is read")
        return
    t.put("algo.kl", "k3_unbiased" if t[unbiased] else "k3", beta, unbiased)
    t.put("algo.kl_coeff", t[beta], beta)
    if not t[sync]:
        return
    if t[alpha] == 1:
        t.put("algo.reference", "refresh", sync, alpha)
        t.put("algo.reference_every", t[every], every)
    elif t[every] == 1:
        t.put("algo.reference", "ema", sync, every)
        t.put("algo.reference_decay", 1 - t[alpha], alpha)
    else:
        what = f"a mixture ({t[alpha]:g}) every {t[every]} steps is not here: {alpha}=1 takes the policy over every"
        t.refuse(sync, f"{what} {t[every]} steps, {every}=1 averages each step", instead=f"{alpha}=1")


def _put_correction(t: Translation, p: str, *, off_policy: bool) -> None:
    on, mode, old_cap = (f"{p}vllm_importance_sampling_{name}" for name in ("correction", "mode", "cap"))
    cap, floor = f"{p}vllm_importance_sampling_clip_max", f"{p}vllm_importance_sampling_clip_min"
    if t[on] and (off_policy or t[f"{p}use_vllm"]):
        if t.given(cap, floor) and t.given(old_cap):
            t.problem(old_cap, f"the old name of {cap}; write one of them")
        t.put("algo.correction", CORRECTIONS[t[mode]], mode, on)
        t.put("algo.correction_cap", t[old_cap if t.given(old_cap) else cap], old_cap, cap)
        t.put("algo.correction_floor", t[floor], floor)
        if t[mode].startswith("token") and t[f"{p}importance_sampling_level"] == "sequence":
            what = "in the gradient each token has its own correction; there a row's are spread over its tokens"
            t.note_difference(mode, what)
        return
    if off_policy and t[f"{p}loss_type"] != "vespo":
        t.put("algo.anchor", "old", on, origin="the ratio starts at 1, as there")
    why = "it is off" if not t[on] else "the engine's log-probabilities are the trainer's, and samples are never old"
    for name in (on, mode, old_cap, cap, floor):
        if t.given(name) and (name != on or t[on]):
            t.note_idle(name, why)


# ---- rewards ----
def put_rewards(
    t: Translation, functions: str, weights: str, *, known: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Translate `reward_funcs` and `reward_weights`; `known` are rewards with short names."""
    known = known or {}
    entries = t[functions] or []
    factors = t[weights] or [1.0] * len(entries)
    for entry in entries:
        if "/" not in entry and "." not in entry and entry not in known:
            short = f", nor one of {', '.join(known)}" if known else ""
            what = "is neither a dotted path (module.function) nor a reward model (owner/name, ./folder)"
            t.problem(functions, f"{entry!r} {what}{short}")
    if not entries:
        t.problem(functions, "required and missing; name at least one function, as in my_rewards.accuracy")
    elif len(factors) != len(entries):
        t.problem(weights, f"{len(factors)} weights for {len(entries)} functions; give one for each")
    else:
        rewards = [
            dict(known.get(entry) or _reward(entry)) | ({"weight": weight} if t.given(weights) else {})
            for entry, weight in zip(entries, factors, strict=True)
        ]
        t.put("rewards", rewards, functions, weights)


def _reward(entry: str) -> dict[str, Any]:
    if "/" in entry:
        return {"function": REWARD_MODEL, "args": {"model": entry}}
    module, _, name = entry.rpartition(".")
    return {"function": f"{module}:{name}"}
