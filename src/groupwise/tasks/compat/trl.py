"""Environments written for TRL's `environment_factory` (TRL 1.16), unchanged.

    env:
      environment: groupwise.tasks.compat.trl:TrlEnvironment
      args: {factory: my_module:MyEnv}                  or {chess: my_chess:Env, maze: my_maze:Env}
    data: {source: prompts.jsonl}

`reset(**row)` gets the row's columns and may return a text, which is appended to the last message; the public methods
are the tools, with type hints and docstrings; `get_reward()`, if there is one, is the reward, added to what reward
functions give; with several factories the row's column `environment` names one, whose tools alone are offered. A row
without a prompt begins with an empty user message. Methods may be async.

What differs: each episode has an instance of its own, which TRL uses again and again; a tool has a time limit.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from groupwise.config.load import load_object
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, DataError, EnvError, GroupwiseError
from groupwise.model.chat import encode_prompt, stop_ids
from groupwise.tasks.compat.policy import PolicyCalls
from groupwise.tasks.compat.three_method import warn
from groupwise.tasks.env import Episode, Observation, OwnThread, ToolEnv, load_once, priced, reward_of
from groupwise.tasks.episode import Slots
from groupwise.tasks.tools import TIME_LIMIT_S, CallableTool
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampler,
    SamplingParams,
    Turn,
    seed_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.load import LoadedModel

NOT_TOOLS = ("reset", "get_reward")
SELECTS = "environment"  # the column that names one of several factories


class TrlEnvironment(ToolEnv):
    """An episode in an environment of TRL's kind.

    Args:
        factory: `module:callable` without arguments that makes an environment, or several of them by name.
        tools: further tools, as `module:function`.
        time_limit_s: seconds that a tool may take.
        folder: where the modules may stand; the configuration's.
    """

    def __init__(
        self,
        factory: str | Mapping[str, str],
        tools: Sequence[str] = (),
        time_limit_s: float = TIME_LIMIT_S,
        folder: str | None = None,
    ):
        self._several = isinstance(factory, Mapping)
        named: Mapping[Any, str] = factory if isinstance(factory, Mapping) else {None: factory}
        self._factories = {name: load_once(each, folder=folder) for name, each in named.items()}
        self._more = [load_once(each, folder=folder) for each in tools]
        self._time_limit_s = time_limit_s
        self._played: Any = None

    async def reset(self, case: Mapping[str, Any], seed: int) -> Observation:
        """The row's prompt, and what the environment adds to it. TRL's environments get no seed."""
        self._played = await self._in_own_thread(self._factory(case))
        if not callable(getattr(type(self._played), "reset", None)):
            raise ConfigError(f"{type(self._played).__name__} has no method reset, which TRL's environments have")
        columns = {name: value for name, value in case.items() if not (self._several and name == SELECTS)}
        seen = await self._called(self._played.reset, **columns)
        self.tools = [*self._more, *map(self._tool, _public(self._played))]
        return self.offer(_with(_messages(case.get("prompt")), seen))

    async def score(self, episode: Episode) -> float:
        """What `get_reward` says; 0 without it, where reward functions score."""
        if not callable(getattr(type(self._played), "get_reward", None)):
            return 0.0
        return reward_of(await self._called(self._played.get_reward), f"{type(self._played).__name__}.get_reward")

    def _factory(self, case: Mapping[str, Any]) -> Callable[[], Any]:
        name = case.get(SELECTS) if self._several else None
        if name not in self._factories:
            raise EnvError(
                f"the row's column {SELECTS!r} is {name!r}; env.args.factory has {', '.join(map(str, self._factories))}"
            )
        return self._factories[name]

    def _tool(self, method: Callable[..., Any]) -> CallableTool:
        return CallableTool.from_function(method, time_limit_s=self._time_limit_s, thread=self._in_own_thread)

    async def _called(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """A method's result, in the episode's thread if it is not async."""
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        return await self._in_own_thread(lambda: method(**arguments))


def _public(environment: Any) -> list[Callable[..., Any]]:
    """The methods that are tools: those of its class that are not private, without reset and get_reward."""
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return [getattr(environment, name) for name in names if not name.startswith("_") and name not in NOT_TOOLS]


def _messages(prompt: Any) -> list[Message]:
    if prompt is None:
        return [Message(role="user", content="")]
    return [Message(role="user", content=prompt)] if isinstance(prompt, str) else [*prompt]


def _with(messages: list[Message], seen: Any) -> list[Message]:
    """The messages with what `reset` returned at the end of the last one."""
    if seen is None:
        return messages
    if isinstance(seen, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in seen):
            raise EnvError("reset returned content that is not text; this model reads text only")
        seen = "".join(part["text"] for part in seen)
    if not isinstance(seen, str):
        raise EnvError(f"reset returned a {type(seen).__name__}; environments of TRL's kind return None or a text")
    last = messages[-1]
    content = last.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return [*messages[:-1], {**last, "content": content + seen}]


# ----------------------------------------------------------------------------------------------------------------------
# Rollout functions of TRL (`GRPOTrainer(rollout_func=...)`, TRL 0.29 to 1.16), unchanged.
#
#     env:
#       agent: groupwise.tasks.compat.trl:RolloutFunc
#       args: {function: my_rollouts:rollout_func}
#     data: {source: prompts.jsonl}
#     rewards: [my_rollouts:reward]
#
#     def rollout_func(prompts, trainer):
#         said = trainer.generate(prompts)
#         return {key: [each[key] for each in said] for key in ("prompt_ids", "completion_ids", "logprobs")}
#
# It gets all prompts that are begun together, each as many times as it has generations, as the dataset has them: a
# text, or a list of messages. It returns one entry for each (`rollout_rows`), and asks the policy through `trainer`
# (`rollout_trainer`). It is called in a thread, one call at a time, as TRL does.
# ----------------------------------------------------------------------------------------------------------------------

NOT_HERE = ("max_turns", "max_tokens", "max_tool_calls", "max_characters", "concurrency")  # the function decides


class RolloutFunc:
    """A rollout function. Raises LoadError, and ConfigError for what cannot be called with (prompts, trainer).

    Args:
        function: `module:function`.
        folder: where the module may stand; the configuration's.
    """

    def __init__(self, function: str, folder: str | None = None):
        self.name = function.replace(":", ".").rpartition(".")[2]
        self._function = load_object(function, folder=folder)
        if inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"{function!r} is async; a rollout function is called in a thread, as TRL does")
        try:
            inspect.signature(self._function).bind([], None)
        except TypeError:
            takes = ", ".join(inspect.signature(self._function).parameters) or "nothing"
            raise ConfigError(
                f"{function!r} takes {takes}; a rollout function takes (prompts, trainer)",
                hint="args and processing_class, which TRL once gave, are trainer.args and trainer.processing_class",
            ) from None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Any:
        """What the function returns."""
        return self._function(prompts, trainer)


def check_keys(config: EnvConfig) -> None:
    """Raise ConfigError for keys that would do nothing."""
    for key in config.differing(NOT_HERE):
        raise ConfigError(f"env.{key} does nothing for a rollout function, which decides that itself; leave it out")


# ----------------------------------------------------------------------------------------------------------------------
# What a rollout function returned, checked -> rollouts.
#
#     {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "env_mask": [...], <name>: ...}
#
# has an entry for each prompt that it was given. Where `env_mask` is 0 the environment spoke; what stands between two
# such stretches is a turn,
#
#     prompt 1 2    completion 3 4 9 9 5    env_mask 1 1 0 0 1    ->    saw 1 2, said 3 4; saw 1 2 3 4 9 9, said 5
#
# which `segments` joins again. Other names reach reward functions: a list by its entries, anything else as it is. A
# turn that the engine sampled in just that context has its version and its reason to end. One that it did not (text
# that was encoded again, ids put behind each other that the policy saw apart) is trained as it was returned, with the
# log-probabilities that came with it, and counted: `foreign_tokens`.
#
# What is wrong with the whole raises; what is wrong with one entry is that rollout's error.
# ----------------------------------------------------------------------------------------------------------------------

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"
FOREIGN = "foreign_tokens"
ABOVE_ZERO = 1e-3  # what a log-probability may be above 0 by rounding


@dataclass(frozen=True, kw_only=True)
class OutputRow:
    """One entry. `mask` and `logprobs` have one entry per completion token."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class OutputReader:
    """Reads what the function `name` returns in one call."""

    name: str
    calls: PolicyCalls
    version: PolicyVersion
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    only_first: bool  # turns after the first are not trained

    def rollouts(self, output: Any, size: int) -> list[Rollout]:
        """`size` rollouts, in order. Raises EnvError where the whole is not as it must be."""
        entries = self._entries(output, size)
        names = (*REQUIRED, MASK)
        rollouts = [self._rollout(i, *(entries[name][i] for name in names)) for i in range(size)]
        own = {name: entry for name, entry in entries.items() if name not in names}
        return [
            replace(rollout, columns={name: entry[i] for name, entry in own.items()})
            for i, rollout in enumerate(rollouts)
        ]

    def _entries(self, output: Any, size: int) -> dict[str, Sequence[Any]]:
        if not isinstance(output, Mapping):
            raise EnvError(f"{self.name} returned {_short(output)}; it must return a dict with {', '.join(REQUIRED)}")
        if missing := [name for name in REQUIRED if output.get(name) is None]:
            held = ", ".join(map(repr, output)) or "nothing"
            raise EnvError(f"{self.name} returned no {' and no '.join(missing)}; it returned {held}")
        entries = {name: _listed(output[name]) for name in REQUIRED}
        entries[MASK] = [None] * size if output.get(MASK) is None else _listed(output[MASK])
        for name, value in output.items():
            if name not in entries:
                listed = _listed(value)
                entries[str(name)] = listed if isinstance(listed, list) else [value] * size
        for name, entry in entries.items():
            if not isinstance(entry, Sequence) or len(entry) != size:
                got = len(entry) if isinstance(entry, Sequence) else _short(entry)
                raise EnvError(
                    f"{self.name} returned {name} of {got} for {size} prompts",
                    hint="return one entry for each prompt, in order; a prompt comes once for each of its generations",
                )
        return entries

    def _rollout(self, number: int, *entries: Any) -> Rollout:
        try:
            row = self._row(*entries)
        except EnvError as error:
            return Rollout(turns=(), error=f"{self.name} returned, for prompt {number}, {error.message}", stop="error")
        turns, foreign = self._turns(row)
        text = self.tokenizer.decode(list(row.completion_ids), skip_special_tokens=True)
        return Rollout(
            turns=turns,
            messages=({"role": "assistant", "content": str(text)},),  # as TRL's reward functions see it
            stop="done",
            info={FOREIGN: float(foreign)},
        )

    def _row(self, prompt_ids: Any, completion_ids: Any, logprobs: Any, mask: Any) -> OutputRow:
        prompt, said = self._ids(prompt_ids, "prompt_ids"), self._ids(completion_ids, "completion_ids")
        mask = [True] * len(said) if mask is None else _listed(mask)
        logprobs = _listed(logprobs)
        for name, entry in ((MASK, mask), ("logprobs", logprobs)):
            if not isinstance(entry, Sequence) or len(entry) != len(said):
                got = len(entry) if isinstance(entry, Sequence) else _short(entry)
                raise EnvError(f"{name} of {got} for {len(said)} completion_ids")
        if unclear := [each for each in mask if each not in (0, 1)]:
            raise EnvError(f"env_mask with {_short(unclear[0])}; it is 1 where the policy spoke and 0 elsewhere")
        if not any(mask):
            raise EnvError("an env_mask of zeros: there is nothing to train")
        if len(prompt) + len(said) > self.calls.context_length:
            held, context = len(prompt) + len(said), self.calls.context_length
            raise EnvError(f"{held} tokens; the model's context is {context}")
        return OutputRow(
            prompt_ids=prompt,
            completion_ids=said,
            mask=tuple(bool(each) for each in mask),
            logprobs=tuple(_logprob(each) if spoke else 0.0 for each, spoke in zip(logprobs, mask, strict=True)),
        )

    def _ids(self, value: Any, name: str) -> tuple[int, ...]:
        ids = _listed(value)
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise EnvError(f"{name} {_short(value)}; they are a list of token ids")
        ids = [_listed(each) for each in ids]
        if not ids:
            raise EnvError(f"no {name}; there must be at least one")
        wrong = [each for each in ids if not isinstance(each, int) or isinstance(each, bool)]
        wrong += [each for each in ids if each not in wrong and not 0 <= each < self.vocabulary]
        if wrong:
            raise EnvError(f"{name} with {_short(wrong[0])}; token ids are integers from 0 to {self.vocabulary - 1}")
        return tuple(ids)

    def _turns(self, row: OutputRow) -> tuple[tuple[Turn, ...], int]:
        """The turns, and how many trained tokens the engine did not sample where they stand."""
        turns: list[Turn] = []
        at = foreign = 0
        ends = stop_ids(self.tokenizer)
        for spoke, run in groupby(row.mask):
            start, at = at, at + len(list(run))
            if not spoke:
                continue
            seen, ids = row.prompt_ids + row.completion_ids[:start], row.completion_ids[start:at]
            said = self.calls.said(seen, ids)
            foreign += len(ids) if said is None else 0
            ended = at < len(row.completion_ids) or ids[-1] in ends
            completion = Completion(
                token_ids=ids,
                logprobs=row.logprobs[start:at],
                text=str(self.tokenizer.decode(list(ids), skip_special_tokens=True)),
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                version=self.version,
            )
            if said is not None and said.completion.token_ids == ids:
                completion = replace(completion, finish_reason=said.completion.finish_reason)
            if said is not None and (kept := said.completion.kept) is not None:
                restricted = said.completion.kept_logprobs[: len(ids)]
                completion = replace(completion, kept=kept.cut(0, len(ids)), kept_logprobs=restricted)
            trained = (said is None or said.as_run) and not (self.only_first and turns)
            turns.append(Turn(seen, completion, trained=trained))
        return tuple(turns), foreign


def _logprob(value: Any) -> float:
    """A log-probability; TRL's client of a server gives each in a list of one."""
    value = _listed(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise EnvError(f"logprobs with {_short(value)}; each is a number")
    if not math.isfinite(value) or value > ABOVE_ZERO:
        raise EnvError(f"logprobs with {value}; each is finite, and no more than 0")
    return min(float(value), 0.0)


def _listed(value: Any) -> Any:
    """Tensors and arrays as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ----------------------------------------------------------------------------------------------------------------------
# The `trainer` that a rollout function gets: what such functions read of TRL's GRPOTrainer, and the policy.
#
#     trainer.generate(prompts, max_tokens=32)            ours: a dict a prompt, as `generate_rollout_completions`
#     returns
#     generate_rollout_completions(trainer, prompts)      of trl.experimental.openenv (TRL 0.29 to 1.8), unchanged
#     trainer.vllm_generation.generate(...)               as TRL 1.16
#     trainer.vllm_generation.vllm_client.generate, .chat, trainer.vllm_client
#
# All of them go to the engine. There is no `model`: the weights are the learner's, and may be another version's. A name
# that is not there raises an AttributeError that lists those that are.
# ----------------------------------------------------------------------------------------------------------------------


class Logprob(float):
    """A log-probability that is also its own first entry: vLLM's client gave one number a token first, lists later."""

    def __getitem__(self, index: int) -> float:
        return (float(self),)[index]

    def __len__(self) -> int:
        return 1


class Offered(SimpleNamespace):
    """Names and values; a name that is not there says which are."""

    def __getattr__(self, name: str) -> Any:
        listed = ", ".join(each for each in dir(self) if not each.startswith("_"))
        raise AttributeError(f"the {type(self).__name__} of a rollout function has no {name!r}; it has {listed}")


class Args(Offered):
    """`trainer.args`: fields of a GRPOConfig, with the run's values."""


class Accelerator(Offered):
    """`trainer.accelerator`: one process."""


class State(Offered):
    """`trainer.state`."""


class Trainer(Offered):
    """See the head of this file."""

    def __init__(
        self,
        calls: PolicyCalls,
        *,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        num_generations: int,
        step: int,
        device: Any,
        seed: int,
    ):
        self._calls, self._tokenizer = calls, tokenizer
        self.processing_class = tokenizer
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "max_completion_length": params.max_tokens,
            "num_generations": num_generations,
            "num_generations_eval": num_generations,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_tensor_parallel_size": 1,
            "chat_template_kwargs": {},
        }
        super().__init__(**sampling)
        self.args = Args(
            **sampling,
            generation_kwargs=None,
            vllm_enable_sleep_mode=False,
            report_to=[],
            seed=seed,
            max_prompt_length=None,
        )
        self.accelerator = Accelerator(
            device=device, is_main_process=True, is_local_main_process=True, process_index=0, num_processes=1
        )
        self.state = State(global_step=step)
        self.tools, self.chat_template = None, None
        self.vllm_client = TrlClient(self)
        self.vllm_generation = TrlGeneration(self)

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        generation_overrides: Mapping[str, Any] | None = None,
        as_chat: bool | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """One completion of each prompt: a text, a list of messages, or token ids, which are taken as they are.

        Each is {"prompt_ids", "completion_ids", "logprobs", "text"}; the ids end with the end-of-turn token, where it
        was sampled, and the text is without special tokens. Options are `max_tokens`, `stop`, ... (`rollout_calls`).

        Raises EnvError, ChatError and ContextLengthError for what cannot be done.
        """
        asked = {**(generation_overrides or {}), **options}
        if asked.get("n", 1) != 1:
            raise EnvError(
                f"generate was asked for {asked['n']} completions of a prompt; it gives one", hint="repeat it"
            )
        encoded = [self.encode(prompt) for prompt in prompts]
        said = self._calls.sample(encoded, asked)
        return [
            {
                "prompt_ids": list(ids),
                "completion_ids": list(each.token_ids),
                "logprobs": list(each.logprobs),
                "text": self._tokenizer.decode(list(each.token_ids), skip_special_tokens=True),
            }
            for ids, each in zip(encoded, said, strict=True)
        ]

    def encode(
        self, prompt: Any, *, tools: Sequence[dict[str, Any]] | None = None, template_kwargs: Any = None
    ) -> tuple[int, ...]:
        """The token ids of a prompt. Raises EnvError for what is none, ChatError where the template refuses it."""
        if isinstance(prompt, str):
            return encode_prompt(Prompt(id="generate", text=prompt), self._tokenizer).token_ids
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(prompt, Sequence) and prompt and all(isinstance(each, int) for each in prompt):
            return tuple(prompt)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
            messages: Any = tuple(dict(message) for message in prompt)
            asked = Prompt(id="generate", messages=messages, tools=tuple(tools or ()))
            return encode_prompt(asked, self._tokenizer, template_kwargs=template_kwargs).token_ids
        raise EnvError(f"{str(prompt)[:80]!r} is no prompt; it is a text, a list of messages or a list of token ids")

    def answers(self, encoded: Sequence[tuple[int, ...]], options: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Completions in the form of TRL's client of a vLLM server."""
        said: list[Completion] = self._calls.sample(encoded, options)
        return {
            "prompt_ids": [list(ids) for ids in encoded],
            "completion_ids": [list(each.token_ids) for each in said],
            "logprobs": [[Logprob(logprob) for logprob in each.logprobs] for each in said],
            "logprob_token_ids": [[[token] for token in each.token_ids] for each in said],
        }


class TrlClient:
    """`trainer.vllm_client`: TRL's client of a vLLM server. What is not said is as the run samples."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def generate(self, prompts: Sequence[Any], **options: Any) -> dict[str, list[Any]]:
        """`n` completions of each prompt, a text or token ids."""
        return self._trainer.answers([self._trainer.encode(prompt) for prompt in prompts], options)

    def chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, list[Any]]:
        """`n` completions of each list of messages."""
        if chat_template is not None:
            raise EnvError("chat was given a chat_template; the tokenizer's is used", hint="generate takes a text")
        encode = self._trainer.encode
        encoded = [encode(each, tools=tools, template_kwargs=chat_template_kwargs) for each in messages]
        return self._trainer.answers(encoded, options)


class TrlGeneration:
    """`trainer.vllm_generation`."""

    structured_outputs_regex = None

    def __init__(self, trainer: Trainer):
        self._trainer, self.vllm_client = trainer, trainer.vllm_client

    def generate(
        self, prompts: Sequence[Any], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """A completion of each prompt (they repeat `num_generations` times): prompt ids, ids, logprobs and their ids,
        these two [.., token, 1]."""
        if images is not None and any(images):
            raise EnvError("generate was given images; this model reads text only")
        said = self._trainer.answers([self._trainer.encode(prompt) for prompt in prompts], {})
        return said["prompt_ids"], said["completion_ids"], said["logprobs"], said["logprob_token_ids"]

    def sync_weights(self) -> None:
        """Nothing: the engine has the version that the call is for."""


# ----------------------------------------------------------------------------------------------------------------------
# Groups that a rollout function plays, all that are begun together in one call of it: a `RolloutSource`.
#
# What it raises, and what it returns that is not as it must be, is the error of all of the call's rollouts, or of the
# one that it is about; `env.on_error` says what that is worth. A call is given up when `env.timeout_s` have passed in
# which it neither ended nor waited for the policy. What the engine raises ends the run.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What one call is about."""

    prompts: tuple[Prompt, ...]
    n: int
    params: SamplingParams
    version: PolicyVersion
    seed: int


class RolloutFuncRollouts:
    """Plays prompts with a `RolloutFunc`.

    Args:
        run: how training samples; what is generated otherwise is not trained.
        scored: there are reward functions; without, ConfigError is raised.
        note: is told once of each thing that is odd.
    """

    def __init__(
        self,
        sampler: Sampler,
        base: LoadedModel,
        function: RolloutFunc,
        config: EnvConfig,
        *,
        run: SamplingParams,
        scored: bool,
        note: Callable[[str], None] = warn,
    ):
        if not scored:
            raise ConfigError(
                f"there are no rewards for the rollouts of {function.name}",
                hint="list a reward function; fields that the rollout function returns reach it by name",
            )
        self._sampler, self._base, self._function = sampler, base, function
        self._config, self._run, self._tell = config, run, note
        self._slot = Slots(1)
        self._noted: set[str] = set()

    def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt itself: what the policy is asked, the function says. Raises DataError if there is none."""
        if prompt.messages is None and prompt.text is None:
            raise DataError(f"{prompt.id} has no prompt, which rollout functions get", hint="give each row a `prompt`")
        return prompt

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """As `RolloutSource.begin`. Giving up one group gives up all of the call's."""
        batch = _Batch(
            prompts=tuple(prompts), n=n, params=params, version=version, seed=seed_of("rollout_func", *seeds)
        )
        played = asyncio.ensure_future(self._play(batch))

        async def group(at: int) -> RolloutGroup:
            return (await played)[at]

        return [group(at) for at in range(len(prompts))]

    def close(self) -> None:
        """Nothing is held."""

    async def _play(self, batch: _Batch) -> list[RolloutGroup]:
        async with self._slot.take(1):
            rollouts = [priced(rollout, self._config) for rollout in await self._rollouts(batch)]
        groups = [
            RolloutGroup(prompt=prompt, rollouts=tuple(rollouts[i * batch.n : (i + 1) * batch.n]))
            for i, prompt in enumerate(batch.prompts)
        ]
        return [replace(group, prompt=_as_seen(group)) for group in groups]

    async def _rollouts(self, batch: _Batch) -> list[Rollout]:
        """The call's rollouts, in order. Raises what the engine raised."""
        calls = PolicyCalls(
            self._sampler,
            given=batch.params,
            run=self._run,
            version=batch.version,
            seed=batch.seed,
            note=self._note,
        )
        size = len(batch.prompts) * batch.n
        reader = OutputReader(
            name=self._function.name,
            calls=calls,
            version=batch.version,
            tokenizer=self._base.tokenizer,
            vocabulary=self._base.vocabulary,
            only_first=self._config.train_turns == "first",
        )
        try:
            rollouts = reader.rollouts(await self._output(batch, calls), size)
        except EnvError as error:
            rollouts = [Rollout(turns=(), error=error.message, error_kind=error.kind, stop="error")] * size
        finally:
            calls.close()
        if calls.failure is not None:
            raise calls.failure
        if any(rollout.info.get(FOREIGN) for rollout in rollouts):
            self._note("returned tokens that this run's policy did not sample where they stand (env/foreign_tokens)")
        return rollouts

    async def _output(self, batch: _Batch, calls: PolicyCalls) -> Any:
        """What the function returns. Raises EnvError, whatever it raises."""
        name, thread, limit_s = self._function.name, OwnThread("rollout_func"), self._config.timeout_s
        asked = [copy.deepcopy(_asked(prompt)) for prompt in batch.prompts for _ in range(batch.n)]
        trainer = Trainer(
            calls,
            tokenizer=self._base.tokenizer,
            params=batch.params,
            num_generations=batch.n,
            step=batch.version.number,
            device=self._base.device,
            seed=batch.seed % 2**32,
        )
        call = asyncio.ensure_future(thread.call(self._function, asked, trainer, timeout_s=None, what=name))
        try:
            while not call.done():
                left_s = limit_s - calls.idle_s
                if left_s <= 0:
                    message = f"{name} took longer than env.timeout_s = {limit_s:g} s without asking the policy"
                    raise EnvError(message, field=name, kind="timeout")
                await asyncio.wait({call}, timeout=left_s)
            if (raised := call.exception()) is not None:
                raise EnvError.raised(name, raised, _told(raised)) from raised
            return call.result()
        finally:
            call.cancel()
            thread.close()

    def _note(self, message: str) -> None:
        if message not in self._noted:
            self._noted.add(message)
            self._tell(f"{self._function.name}: {message}")


def _told(error: BaseException) -> str:
    told = error.message if isinstance(error, GroupwiseError) else str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("trl"):
        told += "; trainer.generate(prompts) takes and returns what generate_rollout_completions(trainer, prompts) does"
    return told


def _asked(prompt: Prompt) -> Any:
    return prompt.text if prompt.messages is None else list(prompt.messages)


def _as_seen(group: RolloutGroup) -> Prompt:
    """The prompt with the ids that its first rollout began with."""
    ids = next((rollout.turns[0].prompt_ids for rollout in group.rollouts if rollout.turns), ())
    return replace(group.prompt, token_ids=ids)
