"""The data types that all rooms share: prompt, completion, rollout, group, sample, policy version.

Frozen dataclasses without torch; everything else imports this file.

    prompt      what the policy is asked
    completion  what one sampling call answered: token ids, behaviour logprobs, why it stopped, which policy it was
    rollout     one episode on a prompt: one or more completions ("turns"), its rewards and advantage
    group       the rollouts of one prompt; advantages are relative to it
    sample      what the learner trains on: token ids, a mask of what the policy chose, an advantage

A worked example. The prompt "2+2=" is 4 tokens and was sampled twice (G = 2):

    Prompt(id="sums:1", text="2+2=", token_ids=(5, 10, 5, 11))
    RolloutGroup(prompt, rollouts=(
        Rollout(turns=(Turn((5, 10, 5, 11), Completion(token_ids=(7, 2), logprobs=(-0.1, -0.0), ...)),), reward=1.0),
        Rollout(turns=(Turn((5, 10, 5, 11), Completion(token_ids=(8, 2), logprobs=(-2.5, -0.1), ...)),), reward=0.0),
    ))
    Sample(prompt_ids=(5, 10, 5, 11), completion_ids=(7, 2), mask=(1, 1), behaviour_logprobs=(-0.1, -0.0),
           advantage=1.0)
    Sample(prompt_ids=(5, 10, 5, 11), completion_ids=(8, 2), mask=(1, 1), behaviour_logprobs=(-2.5, -0.1),
           advantage=-1.0)

Ids and behaviour logprobs come from the engine and are never decoded and encoded again ("token in, token out").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

from groupwise.recorded import RoutedExperts, SamplingMask

BASE = "base"  # the name of the policy without an adapter

NARROWING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # sampling options, and where they are off

LEAVES_OUT = (*NARROWING, "min_tokens", "grammar")  # sampling options that leave tokens out and change nothing else

MAX_REWARD = 1e100  # of either sign; the variance of much larger ones is not a float64


class Message(TypedDict):
    """A chat message in the form of OpenAI and the chat templates: a dict.

    `role` is system, user, assistant or tool; `content` is a text, or OpenAI's list of parts. A tool call is in
    `tool_calls` of the assistant's message; its result is a message of role tool with the call's `tool_call_id`.
    """

    role: str
    content: NotRequired[str | list[dict[str, Any]] | None]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the assistant's last message; "" if it has no text, or if there is no such message. A message
    without a role counts as the assistant's."""
    said = [message for message in messages if message.get("role", "assistant") == "assistant"]
    content = said[-1].get("content") if said else None
    return content if isinstance(content, str) else ""


class FinishReason(StrEnum):
    """The reason why a completion ended: `stop` at the end of a turn or a stop string, `length` at `max_tokens` or
    where the context was full, `abort` cancelled from outside. Each equals its string."""

    STOP = "stop"  # an end-of-turn token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context was full
    ABORT = "abort"  # cancelled from outside


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """The policy that sampled something: an immutable adapter version `name@number`, or the base model.

    >>> str(PolicyVersion("math", 12)), str(PolicyVersion.base()), PolicyVersion.parse("math@12").number
    ('math@12', 'base', 12)
    """

    name: str = BASE
    number: int = 0

    @classmethod
    def base(cls) -> PolicyVersion:
        return cls()

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Return the inverse of `str`. Raises ValueError unless `text` is "base" or "name@number"."""
        if text == BASE:
            return cls()
        name, at, number = text.rpartition("@")
        if not at or not name or not number.isdigit():
            raise ValueError(f"{text!r} is not a policy version; write 'base' or 'name@number', as in 'math@12'")
        return cls(name, int(number))

    @property
    def is_base(self) -> bool:
        return self.name == BASE

    def __str__(self) -> str:
        return BASE if self.is_base else f"{self.name}@{self.number}"


class GrammarKind(StrEnum):
    """The language that a `Grammar` is written in."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema
    JSON_OBJECT = "json_object"  # nothing: any JSON object
    REGEX = "regex"  # a regular expression, which the whole text matches
    CHOICE = "choice"  # a JSON list of texts, one of which it is
    FREE = "free"  # nothing: any text, of which only the thought is bounded
    LARK = "lark"  # a context-free grammar in llguidance's Lark, or in llama.cpp's GBNF


@dataclass(frozen=True)
class Grammar:
    """The form that the text of a completion must have (structured outputs); `engine.grammar` only lets tokens through
    that fit.

    `source` is written in the language of `kind`. `thoughts` says whether a thought may stand in front ("optional"), or
    the prompt has begun one already ("begun"); thoughts are free, and after `thought_tokens` tokens nothing is left to
    draw but their end. `marks` are the texts around a thought. `lenient` leaves to the model what of a JSON Schema
    cannot be guaranteed, which is an error otherwise. `parts` are grammars that a Lark source refers to, as @name.
    `field` is the name by which errors call the grammar.

    >>> Grammar.choice(["yes", "no"]).source, Grammar.of_json({"type": "integer"}).kind.value
    ('["yes", "no"]', 'json_schema')
    """

    kind: GrammarKind
    source: str = ""
    thoughts: Literal["none", "optional", "begun"] = "none"
    thought_tokens: int | None = None
    marks: tuple[str, str] = ("<think>", "</think>")
    lenient: bool = False
    parts: tuple[tuple[str, Grammar], ...] = ()
    field: str = field(default="grammar", compare=False)

    @classmethod
    def of_json(
        cls, schema: Mapping[str, Any] | None = None, *, lenient: bool = False, field: str = "grammar"
    ) -> Grammar:
        """Return the grammar of JSON that a JSON Schema allows; without one, of any JSON object."""
        if schema is None:
            return cls(GrammarKind.JSON_OBJECT, field=field)
        return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema), lenient=lenient, field=field)

    @classmethod
    def regex(cls, pattern: str, *, field: str = "grammar") -> Grammar:
        """Return text that a regular expression matches as a whole (Rust's syntax: no look-around, no
        back-references)."""
        return cls(GrammarKind.REGEX, pattern, field=field)

    @classmethod
    def choice(cls, texts: Sequence[str], *, field: str = "grammar") -> Grammar:
        """Return one of these texts. Raises ValueError for none of them, and for an empty one."""
        if not texts or not all(texts):
            raise ValueError(f"{field} is {list(texts)}; give one text or more, and none that is empty")
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False), field=field)

    @classmethod
    def lark(cls, source: str, *, field: str = "grammar") -> Grammar:
        """Return text of a context-free grammar, in Lark or GBNF."""
        return cls(GrammarKind.LARK, source, field=field)

    @classmethod
    def of_option(cls, name: str, value: Any, *, field: str = "grammar") -> Grammar:
        """Return what vLLM's `structured_outputs` asks for with one key: `json` (a schema, also as a string), `regex`,
        `choice`, `grammar` or `json_object`."""
        match name:
            case "json" if isinstance(value, str):
                return cls(GrammarKind.JSON_SCHEMA, value, field=field)
            case "json":
                return cls.of_json(value, field=field)
            case "regex":
                return cls.regex(value, field=field)
            case "choice":
                return cls.choice(value, field=field)
            case "grammar":
                return cls.lark(value, field=field)
            case "json_object":
                return cls.of_json(field=field)
        raise ValueError(f"{name!r} is no form of structured outputs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Holds the parameters with which a prompt is sampled.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` fixes the random numbers of every
    completion: completion j of a prompt uses (seed, j), independent of the rest of the batch. `stop` strings end a
    completion and are cut from its text; `stop_ids` are added to the model's own end-of-turn ids and, like them, stay
    in `token_ids`. With `include_stop` the stop string or stop id that ended the completion stays in the text.
    `top_logprobs` is the number of the likeliest tokens that are reported with each sampled one.

    With a `thinking_budget` a thought ends after that many tokens (`tasks.structured.of_reply` makes a grammar of it).
    With a `grammar` a completion is text of the grammar: at every position only allowed tokens are sampled, and the end
    of the turn only where the text is complete. So a completion ends with "stop", or is cut by `max_tokens`. The
    grammar overrides `min_tokens`.

    The last five change the logits from which tokens are sampled, as OpenAI and vLLM define them (`engine.sampling`):
    `repetition_penalty` (1 is off) counts tokens of prompt and completion, `presence_penalty` and `frequency_penalty`
    (0 is off) tokens of the completion, `logit_bias` has pairs (token id, added value), and before `min_tokens` tokens
    only `max_tokens` ends a completion.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    seed: int | None = None
    ignore_eos: bool = False
    top_logprobs: int = 0
    grammar: Grammar | None = None
    thinking_budget: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; it must be at least 1"),
            (self.temperature >= 0, f"temperature is {self.temperature}; it must be 0 (greedy) or more"),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be in (0, 1]"),
            (self.top_k >= 0, f"top_k is {self.top_k}; it must be 0 (off) or more"),
            (0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must be in [0, 1]"),
            (all(self.stop), "an empty stop string would stop at once; remove it"),
            (self.top_logprobs >= 0, f"top_logprobs is {self.top_logprobs}; it must be 0 (none) or more"),
            (
                0 < self.repetition_penalty < math.inf,
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0, and 1 is off",
            ),
            (
                0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens is {self.min_tokens}; it must be 0 to max_tokens, {self.max_tokens}",
            ),
            (
                self.grammar is None or not self.ignore_eos,
                "ignore_eos is true and there is a grammar, behind which nothing but the end of the turn can follow",
            ),
        )
        for valid, message in checks:
            if not valid:
                raise ValueError(message)

    @property
    def reshaped(self) -> tuple[str, ...]:
        """Return the parameters with which tokens are sampled from another distribution than the policy's at this
        temperature.

        What was sampled with any of these was not sampled with the probabilities `Completion.logprobs`, which are of
        the policy's. It is an on-policy sample of the policy restricted to what it could draw, where that is all that
        they change and it is recorded (`unrecorded`).

        >>> SamplingParams(top_p=0.9, min_tokens=3).reshaped, SamplingParams(temperature=0.7).reshaped
        (('top_p', 'min_tokens'), ())
        """
        narrowing = tuple(NARROWING) if self.temperature > 0 else ()  # greedy draws the likeliest anyway
        return tuple(
            name for name in (*narrowing, "grammar", *_CHANGE_LOGITS) if getattr(self, name) != _DEFAULTS[name]
        )

    def unrecorded(self, kept: SamplingMask | None) -> tuple[str, ...]:
        """Return those of `reshaped` that keep a completion from being trained: all of them if it has no record of what
        each token was drawn from, else those that change logits and do not only leave tokens out.

        >>> SamplingParams(top_p=0.9).unrecorded(None), SamplingParams(top_p=0.9).unrecorded(SamplingMask.whole(8, 3))
        (('top_p',), ())
        """
        return unrecorded(self.reshaped, kept)

    @property
    def changes_logits(self) -> bool:
        """Return whether any of the parameters that change logits, and do not only leave tokens out, does."""
        return any(getattr(self, name) != _DEFAULTS[name] for name in _CHANGE_LOGITS)


def unrecorded(reshaped: Sequence[str], kept: SamplingMask | None) -> tuple[str, ...]:
    """Return `SamplingParams.unrecorded` for the names in `reshaped`."""
    return tuple(name for name in reshaped if kept is None or name not in LEAVES_OUT)


_CHANGE_LOGITS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")

_DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(SamplingParams)}


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """`n` completions of one prompt from one policy. `prompt_ids` must not be empty.

    An `interactive` request has a person waiting for it: it is admitted before the others. `cache` marks the turn of a
    conversation: an engine may continue from what it kept of the turns before, and keep what it computes for the next.
    What is computed for a request is reused for others that begin alike, if they have the same `apart`: so the speed of
    an answer tells nothing about requests with another `apart`. `conversation` names the conversation of which it is a
    turn, so that of several servers the one is asked that has the turns before (`conversation_of`).
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    n: int = 1
    version: PolicyVersion = PolicyVersion()
    interactive: bool = False
    cache: bool = False
    apart: str = ""
    conversation: str = ""


def conversation_of(group: int, number: int | None = None) -> str:
    """Return the name by which an engine knows a conversation (`SamplingRequest.conversation`): that of episode
    `number` in the group with this seed, or, without a number, that of the beginning which all of the group share."""
    return str(group) if number is None else f"{group}/{number}"


def group_of_conversation(conversation: str) -> str:
    """Return the name of the beginning that this conversation shares with its group."""
    return conversation.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row of the dataset: chat `messages` or plain `text`, and the other columns, which rewards receive by name.

    With both, `text` is what the messages come to for a model that has no chat template. Where the assistant spoke
    last, the policy continues its message, the `opening`; `shows_opening` says whether rewards see it in front of what
    was sampled.
    """

    id: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()  # filled once by chat.encode_prompt
    shows_opening: bool = False
    answer: tuple[Message, ...] = ()  # what supervised training learns: the dataset's own; of a pair, the chosen one
    rejected: tuple[Message, ...] = ()  # of a preference pair

    @property
    def opening(self) -> str:
        """Return the assistant's text that the policy continues; empty if the policy begins a new message.

        >>> Prompt(id="7", messages=({"role": "assistant", "content": "It is "},)).opening
        'It is '
        """
        last = self.messages[-1] if self.messages else {}
        content = last.get("content")
        return content if last.get("role") == "assistant" and isinstance(content, str) else ""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A completion that the engine sampled for one prompt.

    `logprobs[t]` (nats) is the log-probability of `token_ids[t]` under the whole temperature-scaled distribution, which
    is what clients are told. Where tokens were drawn from parts of the vocabulary (`SamplingParams.reshaped`, a
    grammar) and the engine records them, `kept` says which, and `kept_logprobs[t]` is the log-probability under the
    same distribution restricted to that part, which sums to 1 there:

        kept_logprobs[t] = z_a / T - log sum_{v in kept[t]} exp(z_v / T)

    What a trainer reads are `behaviour_logprobs`, the one or the other. The
    end-of-turn token, when there was one, is the last of `token_ids` and is not in `text`. `top_logprobs[t]` are the
    likeliest (id, logprob) at t, likeliest first, where the request asked for them. `cached_tokens` is how many tokens
    of the prompt were not computed for it, as they were known from other requests; None where the engine does not say.
    `routed_experts` are those of the prompt's and the completion's tokens but the last, where the engine records them.

    `version` drew the first token. Where newer ones took over while it was sampled (in-flight weight updates,
    PipelineRL, arXiv 2509.19128) `switches` has (t, version): that version drew token t and those after it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    version: PolicyVersion = PolicyVersion()
    switches: tuple[tuple[int, PolicyVersion], ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int | None = field(default=None, compare=False)
    routed_experts: RoutedExperts | None = field(default=None, compare=False)
    kept: SamplingMask | None = None
    kept_logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kept is not None and not len(self.kept) == len(self.kept_logprobs) == len(self.token_ids):
            raise ValueError(
                f"kept is of {len(self.kept)} tokens and kept_logprobs of {len(self.kept_logprobs)}, for "
                f"{len(self.token_ids)} tokens; give one per token"
            )

    @property
    def behaviour_logprobs(self) -> tuple[float, ...]:
        """Log-probability (nats) of each token under the distribution that it was drawn from, as far as that is
        recorded."""
        return self.logprobs if self.kept is None else self.kept_logprobs

    def first(self, count: int, *, text: str) -> Completion:
        """Return the completion cut after `count` tokens, one at least, whose text is given; it ends with a stop."""
        routed = self.routed_experts
        if routed is not None:
            routed = routed.first(routed.shape[0] - (len(self.token_ids) - count))
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            text=text,
            finish_reason=FinishReason.STOP,
            switches=tuple((at, version) for at, version in self.switches if at < count),
            top_logprobs=self.top_logprobs[:count],
            routed_experts=routed,
            kept=None if self.kept is None else self.kept.cut(0, count),
            kept_logprobs=self.kept_logprobs[:count],
        )

    @property
    def spans(self) -> tuple[tuple[PolicyVersion, int], ...]:
        """Return the versions that sampled its tokens, oldest first, with the number of tokens of each.

        >>> sampled = {"token_ids": (5, 6, 7), "logprobs": (-0.1, -0.2, -0.3), "text": ""}
        >>> newer = ((1, PolicyVersion("math", 2)),)
        >>> said = Completion(**sampled, finish_reason=FinishReason.STOP, switches=newer)
        >>> [(str(version), tokens) for version, tokens in said.spans]
        [('base', 1), ('math@2', 2)]
        """
        starts = ((0, self.version), *self.switches)
        ends = (*(at for at, _ in self.switches), len(self.token_ids))
        return tuple((version, end - at) for (at, version), end in zip(starts, ends, strict=True))


@dataclass(frozen=True)
class Turn:
    """Holds a call of the policy inside a rollout: the whole prompt, and the completion.

    `reward` is the environment's reward for this turn. A turn that is not `trained` is only context of later turns.
    `state` names the situation in which the policy acted, equal for equal situations (GiGPO's anchor states); None: the
    messages since the policy's last turn identify it. `role` names the player for which the policy acted, in an episode
    with several players. `advantage` is the turn's own advantage; None: the episode's. `taken` is the turn's number in
    time among the turns of the episode (or of its role); None: the turn's position in the list, which is the same
    unless an episode has several conversations.
    """

    prompt_ids: tuple[int, ...]
    completion: Completion
    reward: float | None = None
    trained: bool = True
    state: str | None = None
    role: str | None = None
    advantage: float | None = None
    taken: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Holds an episode. `rewards` has a value for each reward function, None if this function failed; `reward` is the
    weighted sum, None if the rollout cannot be scored (it is then excluded from its group, never counted as zero).
    `error` says in words why not, and `error_kind` is the kind of the `EnvError`.

    For an episode in an environment `messages` has all messages after the prompt, `stop` says why the episode ended,
    and `info` has the environment's numbers; there are no turns if the environment failed before the first. `columns`
    are columns for reward functions, like the prompt's, but of this rollout: further values that a rollout function
    returned.

    For an episode with several players `role_rewards` has each player's reward, and `reward` is their mean; the turns
    of one player are together, in the order in which they were taken. If turns have their own advantages, `advantage`
    is the mean over the trained turns.

    `teacher` has a teacher's scores of the completion tokens of each segment (`algo.samples.segments_of`); empty
    without a teacher.
    """

    turns: tuple[Turn, ...]
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    error: str | None = None
    error_kind: str | None = None
    messages: tuple[Message, ...] = ()
    stop: str | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    teacher: tuple[SequenceScores, ...] = ()

    @property
    def completion(self) -> Completion:
        """Return the last turn's completion (the only one of a single-turn rollout)."""
        return self.turns[-1].completion

    @property
    def truncated(self) -> bool:
        """Return whether it was cut at its longest: one of its turns was, or an episode had no room for another
        turn."""
        cut = any(turn.completion.finish_reason is FinishReason.LENGTH for turn in self.turns)
        return cut or self.stop in ("max_tokens", "context")


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """Holds the rollouts of one prompt. `demonstrations` are learned unchanged: a teacher's completions of the prompt,
    or a dataset's answer, or the two completions of a preference pair."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    demonstrations: tuple[Rollout, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A training example, as the learner takes it. All five completion fields have length T.

    `mask[t]` is 1 where the policy chose `completion_ids[t]` and it is to be trained; tokens with mask 0 (tool results,
    user turns) are attended to and change nothing else. `behaviour_logprobs` may be None (text-only groups, supervised
    data); `advantage` weighs the whole completion, and `weights` in addition each of its tokens. Samples that stand
    together and begin alike share that in the forward.

    `targets[t]` is the token whose log-probability is taken where `completion_ids[t]` stands; None: that token itself.
    What the model reads are `completion_ids` all the same. So

        Sample(prompt_ids=(5, 10, 5, 11), completion_ids=(7, 2), mask=(1, 1), targets=(8, 2), advantage=1.0)

    trains log p(8 | 5 10 5 11) and log p(2 | 5 10 5 11 7), as a teacher would that had said 8 instead of 7.
    `behaviour_logprobs` are of these tokens.

    `routed_experts` are those that the sampler chose for the tokens of prompt and completion; None: not recorded.

    `kept` is the part of the vocabulary from which each completion token was drawn; log-probabilities of the policy and
    of the reference are then of the distribution restricted to it. None: the whole vocabulary.

    `continues` marks a further segment of the episode that the sample before it is of: where a loss counts sequences,
    or averages over one, all segments of an episode are one sequence.

    `group` is a number that the samples of one prompt have in common, and stand together; None: not known. A loss that
    averages over prompts reads it.

    `soft_targets[t]` are (token id, log-probability) of a few tokens in the place of `completion_ids[t]`, under a
    distribution that the policy's is compared with there (`LossSpec.soft_kl`); None: there is none for this sample.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    advantage: float = 0.0
    behaviour_logprobs: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    targets: tuple[int, ...] | None = None
    continues: bool = False
    group: int | None = None
    routed_experts: RoutedExperts | None = field(default=None, compare=False)
    kept: SamplingMask | None = None
    soft_targets: tuple[tuple[tuple[int, float], ...], ...] | None = None

    def __post_init__(self) -> None:
        length = len(self.completion_ids)
        for name in ("mask", "behaviour_logprobs", "weights", "targets", "kept", "soft_targets"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"{name} has {len(value)} entries for {length} completion tokens; give one per token")
        if not self.prompt_ids and length and self.mask[0]:
            raise ValueError("mask[0] is 1 but there is no prompt: nothing predicts the first token; set mask[0] to 0")


@dataclass(frozen=True, kw_only=True)
class SequenceScores:
    """Holds log-probabilities (nats) in a sequence of tokens: `logprobs` of its own tokens, `top` of the likeliest
    tokens at each position, as (id, log-probability), and `cells` of the requested tokens."""

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    cells: tuple[float, ...] = ()
