"""Trial episodes of an environment: by scripted replies, repeated with the same replies, concurrently, and by a model.

    each script on a few cases         shows the rewards that need no skill, and the failures
    the first case again               the same case, seed and replies must give the same episode
    the first case, all at once        ... also with other episodes at the same time
    the model, a case an episode       shows where training begins; its episodes are played again as well

Agents and harnesses, which play whole episodes and may take long, play each script once: they promise no determinism.

An episode that fails is a result. A method that hangs costs its time limit; after `LOST` of those no more is tried.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from groupwise.model.chat import decode
from groupwise.model.reply_formats.known import format_of
from groupwise.sampler import Sampler
from groupwise.seeds import seed_of
from groupwise.tasks.check.canned import Again, Canned
from groupwise.tasks.check.scripts import SCRIPTS, Script, ScriptInput
from groupwise.tasks.check.watch import Called
from groupwise.tasks.rollout_sources import RolloutSource, play_all
from groupwise.types import PolicyVersion, Prompt, Rollout, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """The episodes that were played to check an environment, and how repeated ones differ."""

    opened: Opened
    episodes: list[Played] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    other_seed: str | None = None  # what another seed changed
    changed_case: int | None = None  # a case that the environment changed
    stopped: bool = False  # too many methods hung

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools that were offered in any episode."""
        found = {json.dumps(tool, sort_keys=True, default=str): tool for e in self.episodes for tool in e.prompt.tools}
        return tuple(found.values())

    @property
    def lost(self) -> int:
        """Return the number of episodes that ended because a method took too long."""
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
    """Plays an environment and collects an `EnvTrial`."""

    def __init__(self, opened: Opened, seed: int):
        self.trial, self._opened, self._seed = EnvTrial(opened=opened), opened, seed
        self._cases = list(opened.prompts[: 1 if opened.plays_alone else CASES])
        self._before = [copy.deepcopy(dict(prompt.columns)) for prompt in opened.prompts]

    async def play_scripts(self) -> None:
        """Play every script on every case; those that call tools where there are any."""
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
        """Play the first case once more, one after the other and then at once; and with another seed."""
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
        """Play `episodes` episodes of the model at once, a case each; repeat some of them with the same replies."""
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
        """Find out whether the environment changed a case, which other episodes are given too."""
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
    """Return what differs first; None where nothing does."""
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
    """Return where two values part, some characters of each."""
    one, other = _text(first), _text(second)
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, at - 20)
    return " and ".join(f"{'...' if start else ''}{text[start : at + 40]}" for text in (one, other))
