"""Trial episodes of an environment: by scripted replies, repeated with the same replies, concurrently, and by a model.

    each script on a few cases         what can be had without doing the task, and what fails
    the first case again               the same case, seed and replies must give the same episode
    the first case, all at once        ... whoever else is playing
    the model, a case an episode       what training will begin with; its episodes are played again as well

Agents and harnesses, which play whole episodes and may take long, play each script once: they promise no determinism.

An episode that fails is a result. A method that hangs costs its time limit; after `LOST` of those no more is tried.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from groupwise.config.data import DatasetConfig
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, EnvError
from groupwise.model.chat import decode, stop_ids
from groupwise.model.load import LoadedModel, load_model, load_tokenizer
from groupwise.tasks.agents import Agent, AgentRollouts, load_agent
from groupwise.tasks.compat.three_method import LegacyEnv, ThreeMethodRollouts
from groupwise.tasks.compat.trl import RolloutFunc
from groupwise.tasks.env import EnvFactory, OwnThread, load_env
from groupwise.tasks.episode import EpisodeRollouts, RolloutSource, play_all
from groupwise.tasks.harness import load_harness
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.tool_calls import ToolCallFormat, format_of
from groupwise.types import (
    Completion,
    FinishReason,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampler,
    SamplingParams,
    SamplingRequest,
    seed_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ----------------------------------------------------------------------------------------------------------------------
# Policies that are no model, where the loop has an engine: they answer each request for a turn with a given reply.
# ----------------------------------------------------------------------------------------------------------------------

# (number of the turn, what the policy was told as token ids) -> what it says
Reply = Callable[[int, Sequence[int]], str]


class Canned:
    """Says what `reply` gives, as tokens that end with the template's end of turn, cut where the request says."""

    def __init__(self, reply: Reply, tokenizer: PreTrainedTokenizerBase, *, context: int):
        self._reply, self._tokenizer, self.context_length = reply, tokenizer, context
        self._turn = 0

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """As `types.Sampler.sample`."""
        return [self._answers(request) for request in requests]

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        """As `types.Submits.submit`; the futures are done."""
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        for future, request in zip(futures, requests, strict=True):
            future.set_result(self._answers(request))
        return futures

    def _answers(self, request: SamplingRequest) -> list[Completion]:
        return [self._answer(request) for _ in range(request.n)]

    def _answer(self, request: SamplingRequest) -> Completion:
        text = self._reply(self._turn, request.prompt_ids)
        self._turn += 1
        most = min(request.params.max_tokens, self.context_length - len(request.prompt_ids))
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), stop_ids(self._tokenizer)[-1]]
        said = tuple(ids[:most])
        return Completion(
            token_ids=said,
            logprobs=(0.0,) * len(said),
            text=decode(said, self._tokenizer),
            finish_reason=FinishReason.STOP if len(said) == len(ids) else FinishReason.LENGTH,
        )


class Again:
    """Says once more what was said: the completions of an episode's turns."""

    def __init__(self, completions: Sequence[Completion], *, context: int):
        self._left, self.context_length = list(completions), context

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """As `types.Sampler.sample`. What is asked beyond the episode is answered with nothing."""
        nothing = Completion(token_ids=(), logprobs=(), text="", finish_reason=FinishReason.ABORT)
        return [[self._left.pop(0) if self._left else nothing for _ in range(each.n)] for each in requests]


# ----------------------------------------------------------------------------------------------------------------------
# What `groupwise env check` says to an environment without a model: replies that policies come up with early on.
#
# Each script is a policy: it answers whatever it hears in its own way, turn after turn. Nobody would pay for any of
# them, so that what an environment gives them is what a policy can have without doing its task. They write tool calls
# in the format of the model's chat template, with arguments made up from the tool's schema.
# ----------------------------------------------------------------------------------------------------------------------

Tools = Sequence[Mapping[str, Any]]
_WORDS = "some water runs under a small bridge while birds sleep in tall trees and a cold wind moves every leaf"


@dataclass(frozen=True, kw_only=True)
class ScriptInput:
    """What a script goes by: the number of the turn (from 0), the tools on offer and how a call is written, and what
    the policy was told as text."""

    turn: int
    tools: Tools
    form: ToolCallFormat
    heard: str
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Script:
    """A policy of canned replies; `calls`: it makes sense only where tools are offered."""

    name: str
    reply: Callable[[ScriptInput], str]
    calls: bool = False


def call_text(name: str, arguments: Mapping[str, Any], form: ToolCallFormat) -> str:
    """A tool call as a model writes it.

    >>> call_text("add", {"a": 1}, ToolCallFormat.LLAMA)
    '{"name": "add", "parameters": {"a": 1}}'
    """
    begun, inside = form.opening(name), json.dumps(arguments)
    match form:
        case ToolCallFormat.HERMES:
            return f"{begun} {inside}}}\n{form.end}"
        case ToolCallFormat.QWEN_XML:
            values = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
            given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
            return f"{begun}{given}</function>\n{form.end}"
        case ToolCallFormat.LLAMA:
            return f"{begun} {inside}}}"
        case ToolCallFormat.MISTRAL:
            return f"{begun} {inside}}}]"
        case ToolCallFormat.MISTRAL_ARGS:
            return f"{begun}{inside}"


def example_of(schema: Any, *, whole: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """A small value of a JSON schema, whatever the schema; `whole` is the one that its references are looked up in.

    >>> example_of({"type": "object", "properties": {"n": {"minimum": 3, "type": "integer"}}, "required": ["n"]})
    {'n': 3}
    """
    if not isinstance(schema, Mapping) or depth > 8:
        return "x"
    whole = schema if whole is None else whole
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    if isinstance(reference := schema.get("$ref"), str):
        return example_of(_definition(reference, whole), whole=whole, depth=depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return example_of(schema[key][0], whole=whole, depth=depth + 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            properties = schema.get("properties") or {}
            names = [name for name in schema.get("required") or () if name in properties]
            return {name: example_of(properties[name], whole=whole, depth=depth + 1) for name in names}
        case "array":
            return [example_of(schema.get("items"), whole=whole, depth=depth + 1)] * (schema.get("minItems") or 0)
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "x" * max(1, schema.get("minLength") or 1)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a tool's definition that has its name and parameters."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _definition(reference: str, whole: Mapping[str, Any]) -> Any:
    value: Any = whole
    for part in reference.removeprefix("#").strip("/").split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _call(asked: ScriptInput, number: int) -> str:
    function = function_of(asked.tools[number % len(asked.tools)])
    arguments = example_of(function.get("parameters") or {"type": "object"})
    given = arguments if isinstance(arguments, Mapping) else {}
    return call_text(str(function.get("name", "")), given, asked.form)


def _same_call(asked: ScriptInput) -> str:
    return _call(asked, 0)


def _each_tool(asked: ScriptInput) -> str:
    """Each tool once, and then words."""
    return _call(asked, asked.turn) if asked.turn < len(asked.tools) else "I have called every tool."


def _gibberish(asked: ScriptInput) -> str:
    draw = random.Random(f"{asked.seed} {asked.turn}")
    return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=5)) for _ in range(8))


def _unreadable(asked: ScriptInput) -> str:
    name = str(function_of(asked.tools[0]).get("name", "")) if asked.tools else "tool"
    return asked.form.opening(name) + " {{not JSON"


SCRIPTS = (
    Script(name="nothing", reply=lambda asked: ""),
    Script(name="the same words", reply=lambda asked: "Yes."),
    Script(name="what it heard", reply=lambda asked: asked.heard[-400:]),
    Script(name="gibberish", reply=_gibberish),
    Script(name="a long text", reply=lambda asked: " ".join([_WORDS] * 100)),
    Script(name="an unreadable call", reply=_unreadable),
    Script(name="the same call", reply=_same_call, calls=True),
    Script(name="each tool once", reply=_each_tool, calls=True),
    Script(name="an unknown tool", reply=lambda asked: call_text("no_such_tool", {}, asked.form), calls=True),
)


# ----------------------------------------------------------------------------------------------------------------------
# Which methods of an environment were called, how long each took, and what came of it.
# ----------------------------------------------------------------------------------------------------------------------

METHODS = ("cases", "eval_cases", "reset", "step", "score", "close")


@dataclass(kw_only=True)
class Called:
    """A call of one method: `seconds` is None until it returns, for ever if it hangs; `error` is what it raised."""

    method: str
    seconds: float | None = None
    error: str | None = None


@dataclass
class Watch:
    """The calls so far, in the order in which they began."""

    calls: list[Called] = field(default_factory=list)

    def of(self, factory: EnvFactory) -> EnvFactory:
        """The same environment, watched. What refuses new attributes (slots) is watched while it is made only."""
        make = self._timed("__init__", factory.make_one)

        def watched(**args: Any) -> Any:
            instance = make(**args)
            for name in METHODS:
                if callable(method := getattr(instance, name, None)):
                    with suppress(AttributeError, TypeError):
                        object.__setattr__(instance, name, self._timed(name, method))
            return instance

        return replace(factory, make_one=watched)

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function`'s result; its time is that of method `name`."""
        return self._timed(name, function)(*args, **kwargs)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def begin() -> tuple[Called, float]:
            self.calls.append(called := Called(method=name))
            return called, time.monotonic()

        def end(called: Called, started: float, error: BaseException | None = None) -> None:
            called.seconds = time.monotonic() - started
            called.error = None if error is None else f"{type(error).__name__}: {error}"

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waited(*args: Any, **kwargs: Any) -> Any:
                called, started = begin()
                try:
                    result = await function(*args, **kwargs)
                except Exception as error:
                    end(called, started, error)
                    raise
                end(called, started)
                return result

            return waited

        @functools.wraps(function, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            called, started = begin()
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                end(called, started, error)
                raise
            end(called, started)
            return result

        return timed


class WatchedLegacyEnv(LegacyEnv):
    """An environment of three methods, watched."""

    def __init__(self, watch: Watch, *args: Any, **kwargs: Any):
        self._watch = watch
        super().__init__(*args, **kwargs)

    def score(self, instance: Any, *, model: Any, completion: Any, case: Any) -> float | None:
        """As in the base class."""
        score = super().score
        return self._watch.call("score_episode", score, instance, model=model, completion=completion, case=case)

    def _call(self, method: str, *args: Any) -> Any:
        return self._watch.call(method, super()._call, method, *args)


CASES = 3  # that every script plays
LOST = 3  # methods that took too long, after which no more is tried
AGAIN = 4  # of the model's episodes that are played again
MODEL = "the model"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An environment that can be played: its `RolloutSource`, its cases, and what was called of it so far."""

    name: str
    make_play: Callable[[Sampler], RolloutSource]
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    context: int
    params: SamplingParams
    calls: Sequence[Called]
    steps: bool = True  # the environment is asked after each turn; else one method plays the whole episode
    plays_alone: bool = False  # it is an agent or a harness
    held_out: Sequence[Prompt] | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Played:
    """An episode, whose policy it was, and what the environment began with."""

    policy: str
    case: int
    prompt: Prompt
    rollout: Rollout


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two episodes that should have been the same, and what was not: "again" or "at once"."""

    when: str
    policy: str
    case: int
    what: str


@dataclass(kw_only=True)
class EnvTrial:
    """What came of it."""

    opened: Opened
    episodes: list[Played] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    other_seed: str | None = None  # what another seed changed
    changed_case: int | None = None  # a case that the environment changed
    stopped: bool = False  # too many methods hung

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that were offered, of all episodes."""
        found = {json.dumps(tool, sort_keys=True, default=str): tool for e in self.episodes for tool in e.prompt.tools}
        return tuple(found.values())

    @property
    def lost(self) -> int:
        """Episodes that ended because something took too long."""
        return sum(each.rollout.error_kind == "timeout" for each in self.episodes)


async def try_out(opened: Opened, *, engine: Sampler | None, episodes: int, seed: int = 0) -> EnvTrial:
    """Play it. What the environment does wrong is in the result; nothing is raised for it."""
    player = _Player(opened, seed)
    await player.play_scripts()
    if not player.trial.stopped and not opened.plays_alone:
        await player.play_again()
    if not player.trial.stopped and engine is not None:
        await player.play_model(engine, episodes)
    player.compare_cases()
    return player.trial


class _Player:
    """Fills a Trial."""

    def __init__(self, opened: Opened, seed: int):
        self.trial, self._opened, self._seed = EnvTrial(opened=opened), opened, seed
        self._cases = list(opened.prompts[: 1 if opened.plays_alone else CASES])
        self._before = [copy.deepcopy(dict(prompt.columns)) for prompt in opened.prompts]

    async def play_scripts(self) -> None:
        """Every script on every case; those that call tools where there are any."""
        for case in range(len(self._cases)):
            tools: tuple[dict[str, Any], ...] = ()
            for script in SCRIPTS:
                if script.calls and not tools:
                    continue
                if self.trial.lost >= LOST:
                    self.trial.stopped = True
                    return
                played = await self._script(script, case, tools)
                tools = tools or played.prompt.tools
                self.trial.episodes.append(played)

    async def play_again(self) -> None:
        """The first case once more, one after the other and then at once; and with another seed."""
        first = [each for each in self.trial.episodes if each.case == 0]
        scripts = {script.name: script for script in SCRIPTS}
        for each in first:
            self._compare("again", each, await self._script(scripts[each.policy], 0, each.prompt.tools))
        others = await asyncio.gather(*(self._script(scripts[e.policy], 0, e.prompt.tools) for e in first))
        repeated = {difference.policy for difference in self.trial.differences}
        for each, other in zip(first, others, strict=True):
            if each.policy not in repeated:
                self._compare("at once", each, other)
        if first:
            other = await self._script(scripts[first[0].policy], 0, first[0].prompt.tools, seed=self._seed + 1)
            self.trial.other_seed = _difference(first[0], other)

    async def play_model(self, engine: Sampler, episodes: int) -> None:
        """`episodes` episodes of the model at once, a case each; some of them again with the same replies."""
        prompts, opened = self._opened.prompts, self._opened
        chosen = [number % len(prompts) for number in range(episodes)]
        with closing(opened.make_play(engine)) as play:
            groups = await play_all(
                play,
                [play.prepare(prompts[case]) for case in chosen],
                seeds=[seed_of(self._seed, number) for number in range(episodes)],
                n=1,
                params=opened.params,
                version=PolicyVersion.base(),
            )
        played = [_played(MODEL, case, group) for case, group in zip(chosen, groups, strict=True)]
        self.trial.episodes += played
        for number, each in enumerate(played[: AGAIN if opened.steps else 0]):
            if each.rollout.turns and each.rollout.stop != "timeout":
                again = Again([turn.completion for turn in each.rollout.turns], context=opened.context)
                self._compare(
                    "again", each, await self._play(MODEL, again, each.case, seed=seed_of(self._seed, number))
                )

    def compare_cases(self) -> None:
        """Whether the environment changed a case, which other episodes are given too."""
        for case, (before, prompt) in enumerate(zip(self._before, self._opened.prompts, strict=True)):
            if _text(before) != _text(dict(prompt.columns)):
                self.trial.changed_case = case
                return

    async def _script(self, script: Script, case: int, tools: Sequence[Any], *, seed: int | None = None) -> Played:
        form, tokenizer = format_of(self._opened.tokenizer), self._opened.tokenizer

        def reply(turn: int, prompt_ids: Sequence[int]) -> str:
            heard = decode(prompt_ids, tokenizer)
            return script.reply(ScriptInput(turn=turn, tools=tools, form=form, heard=heard, seed=self._seed))

        canned = Canned(reply, tokenizer, context=self._opened.context)
        return await self._play(script.name, canned, case, seed=self._seed if seed is None else seed)

    async def _play(self, policy: str, sampler: Canned | Again, case: int, *, seed: int) -> Played:
        params, version = self._opened.params, PolicyVersion.base()
        with closing(self._opened.make_play(cast(Sampler, sampler))) as play:
            prompts = [play.prepare(self._opened.prompts[case])]
            [group] = await play_all(play, prompts, seeds=[seed], n=1, params=params, version=version)
        return _played(policy, case, group)

    def _compare(self, when: str, one: Played, other: Played) -> None:
        if (what := _difference(one, other)) is not None:
            self.trial.differences.append(Difference(when=when, policy=one.policy, case=one.case, what=what))


def _played(policy: str, case: int, group: RolloutGroup) -> Played:
    return Played(policy=policy, case=case, prompt=group.prompt, rollout=group.rollouts[0])


def _difference(one: Played, other: Played) -> str | None:
    """What differs first; None where nothing does."""
    a, b = one.rollout, other.rollout
    pairs = (
        ("the first messages", one.prompt.messages, other.prompt.messages),
        ("the tools", one.prompt.tools, other.prompt.tools),
        ("what was said", a.messages, b.messages),
        ("the rewards of the turns", [turn.reward for turn in a.turns], [turn.reward for turn in b.turns]),
        ("how it ended", a.stop, b.stop),
        ("the error", a.error, b.error),
        ("the reward", a.reward, b.reward),
    )
    for what, first, second in pairs:
        if _text(first) != _text(second):
            return f"{what}: {_short(first, second)}"
    return None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(first: Any, second: Any) -> str:
    """Where two values part, some characters of each."""
    one, other = _text(first), _text(second)
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, at - 20)
    return " and ".join(f"{'...' if start else ''}{text[start : at + 40]}" for text in (one, other))


# ----------------------------------------------------------------------------------------------------------------------
# An environment by its name, ready to be played: its cases, a tokenizer, and a model where one is wanted.
# ----------------------------------------------------------------------------------------------------------------------

METHODS_AN_EPISODE = 6  # so many times a method's time for a whole episode that is one method
CONTEXT = 8192  # tokens, of a model that is not loaded and whose tokenizer does not say
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What is to be checked: `env` as in a run, and what it is played with. `model` plays unless `scripts_only`; its
    tokenizer and template are used in any case. `scored`: the run has reward functions, which are not called here."""

    env: EnvConfig
    params: SamplingParams
    folder: Path = Path()
    data: DatasetConfig | None = None
    model: str = "starter"
    scripts_only: bool = False
    scored: bool = False

    @property
    def name(self) -> str:
        """What is checked, for people."""
        return (self.env.environment or self.env.agent or "the harness").rpartition(":")[2]


@contextmanager
def opened(
    wanted: CheckRequest, *, say: Callable[[str], None], engine_of: Callable[[LoadedModel], Sampler]
) -> Iterator[tuple[Opened, Sampler | None]]:
    """The environment, and the engine of the model that plays it, which `engine_of` makes of the loaded model.

    Raises LoadError and ConfigError for what is no environment, DataError and EnvError for cases that cannot be had,
    ModelError.
    """
    made = _agent(wanted) if wanted.env.environment is None else load_env(wanted.env, folder=wanted.folder)
    legacy = isinstance(made, EnvFactory) and made.legacy  # its code may ask the model for its configuration
    base = None
    if legacy or not wanted.scripts_only:
        say(f"loading {wanted.model} ...")
        base = load_model(wanted.model, device="cpu" if wanted.scripts_only else "auto", dtype="auto")
    engine = None if base is None or wanted.scripts_only else engine_of(base)
    try:
        if isinstance(made, Agent):
            yield _alone(wanted, made, base), engine
        elif base is not None and legacy:
            yield _legacy(wanted, made, base, say), engine
        else:
            yield _modern(wanted, made, base, say), engine
    finally:
        if engine is not None:
            engine.close()


def _agent(wanted: CheckRequest) -> Agent:
    """The agent or harness. Raises ConfigError for one that plays whole batches."""
    if wanted.env.harness is not None:
        return load_harness(wanted.env, folder=wanted.folder, scored=wanted.scored)
    agent = load_agent(wanted.env, folder=wanted.folder)
    if isinstance(agent.function, RolloutFunc):
        hint = "try it in a short run: groupwise run CONFIG train.steps=2"
        raise ConfigError(f"env check plays episodes, and {agent.name} plays whole batches", hint=hint)
    return agent


def _alone(wanted: CheckRequest, agent: Agent, base: LoadedModel | None) -> Opened:
    tokenizer = load_tokenizer(wanted.model) if base is None else base.tokenizer
    prompts = _rows(wanted) or agent.cases()
    if prompts is None:
        raise EnvError(f"there are no cases: {agent.name} has no method cases", hint="give --data")
    agent.check(prompts)
    notes = list[str]()
    if wanted.scored:
        notes.append("the run's reward functions are not called here: groupwise rewards lint")
    return Opened(
        name=agent.name,
        make_play=lambda sampler: AgentRollouts(
            sampler, tokenizer, agent, wanted.env, scored=wanted.scored, note=notes.append
        ),
        prompts=prompts,
        tokenizer=tokenizer,
        context=base.context_length if base is not None else min(tokenizer.model_max_length, CONTEXT),
        params=wanted.params,
        calls=(),
        steps=False,
        plays_alone=True,
        notes=notes,
    )


def _modern(wanted: CheckRequest, factory: EnvFactory, base: LoadedModel | None, say: Callable[[str], None]) -> Opened:
    if factory.players:
        hint = "try it in a short run: groupwise run CONFIG train.steps=2"
        raise ConfigError(f"env check plays one player, and {factory.name} has {len(factory.players)}", hint=hint)
    watch = Watch()
    factory = watch.of(factory)
    tokenizer = load_tokenizer(wanted.model) if base is None else base.tokenizer
    say("reading its cases ...")
    prompts = _rows(wanted) or _in_time(factory.cases, f"{factory.name}.cases", wanted)
    if prompts is None:
        raise EnvError(f"there are no cases: {factory.name} has no method cases", hint="write it, or give --data")
    notes, held_out = list[str](), None
    try:
        held_out = _in_time(lambda: factory.cases(held_out=True), f"{factory.name}.eval_cases", wanted)
    except EnvError as error:
        notes.append(error.message)
    longest = tokenizer.model_max_length
    return Opened(
        name=factory.name,
        make_play=lambda sampler: EpisodeRollouts(sampler, tokenizer, factory, wanted.env),
        prompts=prompts,
        held_out=held_out,
        tokenizer=tokenizer,
        context=base.context_length if base is not None else min(longest, CONTEXT),
        params=wanted.params,
        calls=watch.calls,
        notes=notes,
    )


def _legacy(wanted: CheckRequest, factory: EnvFactory, base: LoadedModel, say: Callable[[str], None]) -> Opened:
    watch, notes = Watch(), list[str]()
    config = wanted.env.model_copy(
        update={
            "step_timeout_s": EnvConfig.model_fields["step_timeout_s"].default,  # its one method has the episode's
            "timeout_s": min(wanted.env.timeout_s, METHODS_AN_EPISODE * wanted.env.step_timeout_s),
        }
    )
    say("making its dataset ...")
    env: WatchedLegacyEnv = _in_time(
        lambda: WatchedLegacyEnv(watch, factory, config, base.tokenizer, note=notes.append), factory.name, wanted
    )
    rows = _rows(wanted)
    if rows is None:
        prompts = _in_time(env.cases, f"{factory.name}.build_dataset", wanted)
    else:
        prompts = env.check(rows, str(wanted.data))
    assert prompts is not None
    return Opened(
        name=factory.name,
        make_play=lambda sampler: ThreeMethodRollouts(sampler, base, env, run=wanted.params, note=notes.append),
        prompts=prompts,
        tokenizer=base.tokenizer,
        context=base.context_length,
        params=wanted.params,
        calls=watch.calls,
        steps=False,
        notes=notes,
    )


def _rows(wanted: CheckRequest) -> Sequence[Prompt] | None:
    if wanted.data is None:
        return None
    return open_prompts(wanted.data, folder=wanted.folder, cases=True).all()


def _in_time(function: Callable[[], T], what: str, wanted: CheckRequest) -> T:
    """Its result. Raises EnvError where it takes longer than a method may, and what it raises."""

    async def called() -> Any:
        thread = OwnThread("cases")
        try:
            return await thread.call(function, timeout_s=wanted.env.step_timeout_s, what=what)
        finally:
            thread.close()

    return asyncio.run(called())
