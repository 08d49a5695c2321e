"""The options of transformers' `generate`, as sampling parameters, and whether they are the run's own.

    given       temperature, top_p, top_k, min_p, do_sample, max_new_tokens, max_length, stop_strings, eos_token_id,
                stopping_criteria, num_return_sequences, return_dict_in_generate
    idle        how it is computed, and what the engine knows itself (use_cache, pad_token_id, synced_gpus, ...)
    otherwise   refused, unless it has the value at which it does nothing (num_beams=1, repetition_penalty=1.0)

What is not said is as the run samples, also where transformers would decode greedily: the policy that is trained is
the one that samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from groupwise.errors import EnvError
from groupwise.tasks.policy_calls import SAMPLING, CallOptions
from groupwise.types import NARROWING, SamplingParams

_GIVEN = """
temperature top_p top_k min_p do_sample max_new_tokens max_length stop_strings eos_token_id stopping_criteria
num_return_sequences return_dict_in_generate
"""

_IDLE = """
use_cache cache_implementation cache_config past_key_values pad_token_id bos_token_id decoder_start_token_id
synced_gpus token_type_ids position_ids tokenizer disable_compile compile_config use_model_defaults
transformers_version renormalize_logits remove_invalid_values
"""

GENERATE_OPTIONS, IDLE = frozenset(_GIVEN.split()), frozenset(_IDLE.split())

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_length": (0,),
    "logits_processor": ([], ()),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "is_assistant": (False,),
}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CallOptions):
    """Options of one call of a transformers model's `generate`."""

    max_length: int | None = None
    criteria: tuple[Callable[..., Any], ...] = ()
    as_output: bool = False


def generate_options_of(
    config: Any, options: Mapping[str, Any], *, given: SamplingParams, run: SamplingParams
) -> GenerateOptions:
    """Options, which win over those of a GenerationConfig; what is not said is as in `given`, or of None.

    `given` is how the mode samples, `run` how training does: an option that says the same as `run` is not heard.
    Raises EnvError for what the engine cannot do.
    """
    said = {} if config is None else config.to_diff_dict()
    said = {name: value for name, value in {**said, **options}.items() if value is not None}
    for name, value in said.items():
        if name not in GENERATE_OPTIONS and name not in IDLE and value not in NEUTRAL_VALUES.get(name, ()):
            raise EnvError(
                f"generate({name}={value!r}) is not here: the engine samples from the policy itself",
                hint=f"it knows {', '.join(sorted(GENERATE_OPTIONS))}",
            )
    stop, ids, criteria = said.get("stop_strings", ()), said.get("eos_token_id", ()), said.get("stopping_criteria", ())
    try:
        params = replace(
            given,
            max_tokens=int(said.get("max_new_tokens", run.max_tokens)),
            stop=((stop,) if isinstance(stop, str) else tuple(stop)) or given.stop,
            stop_ids=given.stop_ids + ((ids,) if isinstance(ids, int) else tuple(int(each) for each in ids)),
        )
        sampling = _sampling(said, run)
        otherwise = {name: value for name, value in sampling.items() if value != getattr(run, name)}
        if otherwise:
            params = replace(params, **{name: getattr(run, name) for name in SAMPLING} | sampling)
        n = int(said.get("num_return_sequences", 1))
    except (TypeError, ValueError) as error:
        raise EnvError(f"generate was given an option that is not valid: {error}") from None
    if n < 1:
        raise EnvError(f"num_return_sequences is {n}; it must be at least 1")
    words = ", ".join(f"{name}={value:g}" for name, value in otherwise.items())
    if otherwise and said.get("do_sample") is False:
        words = "do_sample=False"
    return GenerateOptions(
        params=params,
        n=n,
        max_length=said["max_length"] if "max_length" in said and "max_new_tokens" not in said else None,
        criteria=tuple(criteria) if hasattr(criteria, "__iter__") else (criteria,),
        as_output=bool(said.get("return_dict_in_generate", False)),
        otherwise=words,
        restricted=all(name in NARROWING for name in otherwise),
    )


def _sampling(said: Mapping[str, Any], run: SamplingParams) -> dict[str, Any]:
    """Return the distribution that was asked for, as far as it was."""
    if said.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: (int if name == "top_k" else float)(said[name]) for name in SAMPLING if name in said}
