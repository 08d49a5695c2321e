"""Answers a rollout function's calls of the policy: vLLM's sampling options, one engine batch a call, all recorded.

    max_tokens, stop, stop_token_ids, n       as asked; max_tokens no more than the context has room for
    temperature                               as the run samples; asked otherwise it is done and not trained, since
                                              the loss compares probabilities at the run's temperature
    top_p, top_k, min_p                       as asked, and trained under what they left, which the local engine
                                              records; where that is not recorded they are done and not trained
    penalties, guided decoding, ...           refused, unless they have the value at which they do nothing

The calling thread waits; the engine decodes what all threads ask in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from groupwise.errors import ContextLengthError, EnvError
from groupwise.sampler import Sampler
from groupwise.seeds import seed_of
from groupwise.tasks.blocking_policy import BlockingPolicy
from groupwise.types import NARROWING, Completion, FinishReason, PolicyVersion, SamplingParams, SamplingRequest

SAMPLING = ("temperature", *NARROWING)

CALL_OPTIONS = (*SAMPLING, "max_tokens", "stop", "stop_token_ids", "n")

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logprobs": (0, 1),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True, False),  # of texts, which are decoded without in any case
    "generation_kwargs": ({},),
    "use_tqdm": (True, False),
}


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Options of one call of the policy. `otherwise` names those that differ from how the run samples; "" if none does.
    `restricted` says that these only leave tokens out."""

    params: SamplingParams
    n: int = 1
    otherwise: str = ""
    restricted: bool = False

    def trains(self, completion: Completion) -> bool:
        """Return whether what was sampled so can be trained."""
        return not self.otherwise or (self.restricted and not self.params.unrecorded(completion.kept))


@dataclass(frozen=True, kw_only=True)
class RecordedCompletion:
    """A completion, and whether it was sampled as the run samples."""

    completion: Completion
    as_run: bool


class PolicyCalls:
    """The policy during one call of a rollout function, at one version. For any thread.

    Args:
        given: how the mode samples (greedy in a greedy evaluation); `run` is how training does, and an option that
            says the same as `run` is not heard.
        note: is told of what is not trained.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        given: SamplingParams,
        run: SamplingParams,
        version: PolicyVersion,
        seed: int,
        note: Callable[[str], None],
    ):
        self._asking, self._given, self._run = BlockingPolicy(sampler), given, run
        self._context = sampler.context_length
        self._version, self._seed, self._note = version, seed, note
        self._lock = self._asking.lock
        self._said: dict[tuple[int, ...], list[RecordedCompletion]] = {}  # by the ids of the prompt
        self._asked = 0
        self.failure: Exception | None = None  # of the engine: the function is not to blame

    @property
    def context_length(self) -> int:
        return self._context

    @property
    def idle_s(self) -> float:
        """Return the seconds since the function's last answer; 0 while it waits for one."""
        return self._asking.idle_s

    def sample(self, prompts: Sequence[tuple[int, ...]], options: Mapping[str, Any]) -> list[Completion]:
        """Sample `n` completions of each prompt, in order; adjacent equal prompts share the prompt's forward.

        Raises EnvError for options and ids that the engine cannot do, ContextLengthError, and what the engine raises.
        """
        asked = call_options_of(options, given=self._given, run=self._run)
        runs = [(ids, len(list(equal)) * asked.n) for ids, equal in groupby(prompts)]
        with self._lock:
            first, self._asked = self._asked, self._asked + len(runs)
        requests = [
            self._request(ids, asked.params, n=n, seed=seed_of(self._seed, first + number))
            for number, (ids, n) in enumerate(runs)
        ]
        answers = self._answers(requests) if requests else []
        if not all(asked.trains(each) for answer in answers for each in answer):
            self._note(f"what is generated with {asked.otherwise} is not trained: the run samples otherwise")
        with self._lock:
            for (ids, _), answer in zip(runs, answers, strict=True):
                self._said.setdefault(ids, []).extend(
                    RecordedCompletion(completion=each, as_run=asked.trains(each)) for each in answer
                )
        return [completion for answer in answers for completion in answer]

    def said(self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> RecordedCompletion | None:
        """Return the completion of this prompt that begins with these ids, if one was sampled."""
        with self._lock:
            said = self._said.get(prompt_ids, ())
            return next((each for each in said if each.completion.token_ids[: len(token_ids)] == token_ids), None)

    def close(self) -> None:
        """Stop answering, and give up requests under way."""
        self._asking.close()

    def _request(self, prompt_ids: tuple[int, ...], params: SamplingParams, *, n: int, seed: int) -> SamplingRequest:
        room = self.context_length - len(prompt_ids)
        if not prompt_ids:
            raise EnvError("the policy was asked with no token ids", hint="give a prompt of at least one token")
        if room <= 0:
            raise ContextLengthError(
                f"a prompt has {len(prompt_ids)} tokens; the model's context is {self.context_length}",
                hint="end the episode before, and return what there is",
            )
        params = replace(params, max_tokens=min(params.max_tokens, room), seed=seed)
        return SamplingRequest(prompt_ids=prompt_ids, params=params, n=n, version=self._version, cache=True)

    def _answers(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        try:
            answers = self._asking.wait(self._asking.submit(requests))
        except CancelledError:
            raise EnvError("the rollout is over; the policy answers no more") from None
        except Exception as error:
            self.failure = error
            raise
        if any(each.finish_reason is FinishReason.ABORT for answer in answers for each in answer):
            raise EnvError("a completion was aborted")
        return answers


def call_options_of(options: Mapping[str, Any], *, given: SamplingParams, run: SamplingParams) -> CallOptions:
    """vLLM's options as sampling parameters; None is not said. Raises EnvError for what the engine cannot do."""
    said = {name: value for name, value in options.items() if value is not None}
    for name, value in said.items():
        if name not in CALL_OPTIONS and not any(value == each for each in NEUTRAL.get(name, ())):
            raise EnvError(
                f"generate({name}={value!r}) is not here: the engine samples from the policy itself",
                hint=f"it knows {', '.join(CALL_OPTIONS)}",
            )
    if "top_k" in said:
        said["top_k"] = max(0, said["top_k"])  # -1 is off too
    changed = {name: said[name] for name in SAMPLING if name in said and said[name] != getattr(run, name)}
    changed = {name: value for name, value in changed.items() if value != getattr(given, name)}
    stop = said.get("stop", ())
    try:
        params = replace(
            given,
            **changed,
            max_tokens=said.get("max_tokens", given.max_tokens),
            stop=(*given.stop, *((stop,) if isinstance(stop, str) else stop)),
            stop_ids=(*given.stop_ids, *said.get("stop_token_ids", ())),
        )
    except (TypeError, ValueError) as error:
        raise EnvError(f"generate was given options that are none: {error}") from error
    otherwise = ", ".join(f"{name}={value}" for name, value in changed.items())
    restricted = all(name in NARROWING for name in changed)
    return CallOptions(params=params, n=int(said.get("n", 1)), otherwise=otherwise, restricted=restricted)
