"""Decides which groups a step trains on, and how far sampling may run ahead of training.

A step takes P groups. `done` steps have been given theirs, and the sampler has the policy of step `synced`. A group
that is begun now may be trained in the steps done + 1 to synced + staleness + 1; later it would be more than
`staleness` steps older than the policy that it trains. As many are begun as can be trained in time: while there is

    room = (synced + staleness - done) P + (what this step can still take) - (under way)  > 0

and this one rule is every way to run:

    weight_sync_interval 1    staleness 0: P groups and then none before the next sync: on-policy
    weight_sync_interval N    staleness N - 1: the N P groups of a window are sampled by one version, train as they
                              arrive, and are used up when the next version comes
    max_staleness S           staleness S: sampling continues while training does
    weight_sync_interval 0    no sync ever; sampling is kept a few steps ahead

A group's age counts from the version that it was begun with, which drew its oldest tokens, also where newer versions
take over completions under way (`in_flight_updates`).

A group is scored as soon as its completions are there. One that teaches nothing (rewards all equal, or too few that
could be scored, and no teacher) is replaced by another prompt, within a budget of `refill` x P a step (dynamic
sampling, DAPO, arXiv 2503.14476), and what is missing then by groups of the replay buffer.

On-policy, what a step lacks is sampled in rounds and used in the order of the prompts, so that a seeded run is
reproducible bit for bit. Otherwise a step uses the oldest of the groups that are there, and waits for those that would
be too old for the next step. So every group that is begun is used. If late ones were dropped instead, the policy would
be trained on what ends early: short completions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.algo.credit import has_signal
from groupwise.config.algo import AdvantageConfig
from groupwise.config.run import RolloutConfig
from groupwise.errors import ContextLengthError, DataError, EngineError, RewardError
from groupwise.run.collect import Collected, Score
from groupwise.run.replay import ReplayBuffer, RerollQueue
from groupwise.seeds import seed_of
from groupwise.tasks.prompt_stream import Issued, PromptStream
from groupwise.tasks.rollout_sources import RolloutSource
from groupwise.types import PolicyVersion, Prompt, Rollout, RolloutGroup, SamplingParams

AHEAD = 3  # steps that sampling runs ahead where the policy is never synced

IN_VAIN_GROUPS, IN_VAIN_S = 4, 30.0  # after which a run whose every completion fails to be scored is stopped


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The number of groups to sample, and when. The rule is at the head of this file."""

    prompts_per_step: int
    steps: int
    staleness: int = 0
    in_rounds: bool = True
    never_synced: bool = False
    refill: float = 1.0
    concurrency: int | None = None

    @classmethod
    def of(cls, rollout: RolloutConfig, *, steps: int) -> Pace:
        window = rollout.weight_sync_interval - 1 if rollout.weight_sync_interval else AHEAD
        return cls(
            prompts_per_step=rollout.prompts_per_step,
            steps=steps,
            staleness=rollout.max_staleness or window,
            in_rounds=rollout.on_policy,
            never_synced=rollout.weight_sync_interval == 0,
            refill=rollout.refill,
            concurrency=rollout.concurrency,
        )

    @property
    def budget(self) -> int:
        """Groups that a step may use up."""
        return int(self.prompts_per_step * self.refill)


@dataclass(frozen=True, kw_only=True)
class _DrawnPrompt:
    """A prompt to be sampled: encoded, with the drawing of it that is resolved by this, and what seeds it."""

    prompt: Prompt
    issued: Issued | None
    seed: int


@dataclass(kw_only=True, eq=False)
class _InFlight:
    """A group under way. `synced` is the step whose policy samples it, as `version`; `group` is there once it is
    scored. The step after `due` steps is the last that may train it."""

    drawn: _DrawnPrompt
    version: PolicyVersion
    synced: int
    due: int
    group: RolloutGroup | None = None
    played: asyncio.Future[RolloutGroup] | None = None
    task: asyncio.Task[None] | None = None


class Batches:
    """Draws prompts, has them sampled and scored, and hands out the groups of one step after another.

    Args:
        source: the prompts; each is resolved once it was trained on or given up.
        play: makes a group of each.
        score: a group with its rewards; failures are in it, not raised.
        weights: the weights of the reward functions, by name; None: 1 each.
        keep_flat: groups of equal rewards have a gradient too, through another term of the loss.
    """

    def __init__(
        self,
        *,
        source: PromptStream,
        play: RolloutSource,
        score: Score,
        context_length: int,
        params: SamplingParams,
        group_size: int,
        pace: Pace,
        seed: int = 0,
        advantage: AdvantageConfig | None = None,
        weights: Mapping[str, float] | None = None,
        keep_flat: bool = False,
        max_prompt_tokens: int | None = None,
        replay: ReplayBuffer | None = None,
        reroll: RerollQueue | None = None,
    ):
        self._source, self._play, self._score = source, play, score
        self.params, self._group_size, self._pace, self._seed = params, group_size, pace, seed
        self._advantage, self._weights, self.keep_flat = advantage or AdvantageConfig(), weights, keep_flat
        self._longest = min(context_length - 1, max_prompt_tokens or context_length)
        self._replay = ReplayBuffer(0) if replay is None else replay
        self._reroll = RerollQueue(0) if reroll is None else reroll
        self._version, self.synced, self.done = PolicyVersion.base(), 0, 0
        self._synced_at: dict[PolicyVersion, int] = {}
        self._in_flight: list[_InFlight] = []
        self._kept = self._used = self._too_long = self._rerolled = 0  # in the present step
        self._news, self._guard = asyncio.Event(), _FailureGuard(pace.prompts_per_step)
        self.collected = Collected(groups=(), sampled=())

    def sync(self, version: PolicyVersion, *, step: int) -> None:
        """Take note that the sampler has the policy as it was after `step`: what is sampled from now on is sampled by
        it."""
        self._version, self.synced = version, step
        self._synced_at[version] = step
        if not self._pace.in_rounds:
            self._admit()

    async def sample_and_score(self, *, chunk: int = 0) -> AsyncIterator[list[RolloutGroup]]:
        """Yield the groups of the next step, sampled and scored; all at once, or `chunk` at a time as they come. Then
        `collected` is about them.

        Raises:
            DataError: no prompt of the dataset fits.
            RewardError: nothing can be scored.
        """
        taken, given = _Taken(), 0
        while self._capacity > 0:
            self._guard.check()
            self._admit()
            if (flight := self._next_done()) is not None:
                self._use(flight, taken)
            elif self._in_flight:
                self._news.clear()
                await self._news.wait()
            else:
                break
            if chunk and self._kept - given >= chunk:
                yield taken.kept[given:]
                given = self._kept
        missing = min(self._pace.prompts_per_step - self._kept, self._replay.quota(self._kept))
        for replayed in self._replay.draw(missing, self.done):
            taken.keep(replayed)
        self.collected = taken.collected(too_long=self._too_long, rerolled=self._rerolled)
        self.done += 1
        self._kept = self._used = self._too_long = self._rerolled = 0
        if taken.kept[given:]:
            yield taken.kept[given:]

    def trained(self, groups: Sequence[RolloutGroup]) -> None:
        """Groups, with their advantages, that the last step trained on."""
        self._replay.add(groups, self.done - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the groups under way, whose prompts come first after `load_state_dict`; fit for
        JSON."""
        return {
            "done": self.done,
            "source": self._source.cursor,
            "replay": self._replay.state_dict(),
            "reroll": self._reroll.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; `sync` is the sampler's policy. Raises DataError if the state does not fit."""
        self._source.restore(state["source"])
        self._replay.load_state_dict(state["replay"])
        self._reroll.load_state_dict(state["reroll"])
        self.done = state["done"]

    def versions_in_use(self) -> set[PolicyVersion]:
        """Return the versions that groups are being sampled by, or were and are being scored."""
        return {flight.version for flight in self._in_flight if flight.group is None}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the replay buffer, of the prompts to try again, and of the prompts' source."""
        replay = self._replay.metrics(self.done) if self._replay.size else {}
        return replay | (self._reroll.metrics() if self._reroll.max_groups else {}) | self._source.metrics()

    async def close(self) -> None:
        """Give up what is under way."""
        tasks: list[asyncio.Future[Any]] = []
        for flight in self._in_flight:
            tasks += [task for task in (flight.played, flight.task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what is under way ---------------------------------------------------------------------------------------------

    @property
    def _capacity(self) -> int:
        """Return how many groups the present step can still take: those that it lacks, within its budget."""
        return min(self._pace.prompts_per_step - self._kept, self._pace.budget - self._used)

    @property
    def _due(self) -> int:
        """Return the last number of finished steps at which a group that begins now may still be given to a step."""
        newest = self.done if self._pace.never_synced else self.synced
        return min(newest + self._pace.staleness, self._pace.steps - 1)

    def _capacity_until(self, due: int) -> int:
        """Return how many groups this step and those after it, up to the one after `due` steps, can still take."""
        return self._capacity + (due - self.done) * self._pace.prompts_per_step

    def _capacity_now(self) -> int:
        """Return how many prompts may be begun now."""
        room, concurrency = self._capacity_until(self._due) - len(self._in_flight), self._pace.concurrency
        if self._pace.in_rounds and self._in_flight:
            return 0
        flying = sum(flight.group is None for flight in self._in_flight)
        return room if concurrency is None else min(room, concurrency - flying)

    def _admit(self) -> None:
        """Begin as many prompts as there is room for, together."""
        if (room := self._capacity_now()) <= 0:
            return
        flights = [
            _InFlight(drawn=drawn, version=self._version, synced=self.synced, due=self._due)
            for drawn in self._draw(room)
        ]
        self._in_flight += flights
        begun = self._play.begin(
            [flight.drawn.prompt for flight in flights],
            seeds=[flight.drawn.seed for flight in flights],
            n=self._group_size,
            params=self.params,
            version=self._version,
        )
        for flight, group in zip(flights, begun, strict=True):
            flight.played = asyncio.ensure_future(group)
            flight.task = asyncio.create_task(self._fly(flight, flight.played))

    async def _fly(self, flight: _InFlight, played: Awaitable[RolloutGroup]) -> None:
        """Wait for the group and score it; then begin those that there is room for now."""
        try:
            group = await played
            started = time.monotonic()
            flight.group = await self._score(group)
            self._guard.scored(flight.group, started=started)
            if not self._pace.in_rounds:
                self._admit()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # by the run
                raise
            self._guard.lost = EngineError("a group was given up by what samples it")
            self._guard.lost.__cause__ = error
        except Exception as error:
            self._guard.lost = error
        finally:
            self._news.set()

    def _next_done(self) -> _InFlight | None:
        """Return the next group to use, if it is there: the oldest that is, whose use makes no older one too late."""
        flights = self._in_flight[:1] if self._pace.in_rounds else self._in_flight
        for older, flight in enumerate(flights):
            if older and flight.due > (due := flights[older - 1].due) and older >= self._capacity_until(due):
                return None  # each place up to `due` is for one of those
            if flight.group is not None:
                return self._in_flight.pop(older)
        return None

    def _use(self, flight: _InFlight, taken: _Taken) -> None:
        """Keep the group for this step, or replace it."""
        group, age = flight.group, self.done - flight.synced
        assert group is not None
        self._used += 1
        taken.sampled.append(group)
        if flight.drawn.issued is not None:
            self._source.resolve(flight.drawn.issued.ticket)
        self._source.observe([group])
        self._reroll.push([group])
        taught = bool(group.demonstrations) or any(rollout.teacher for rollout in group.rollouts)
        if self.keep_flat or taught or has_signal(group, self._advantage, weights=self._weights):
            taken.keep(group, age=age)
            taken.token_ages += self._token_ages(flight, group)
        self._kept = len(taken.kept)

    def _token_ages(self, flight: _InFlight, group: RolloutGroup) -> list[tuple[int, int]]:
        """Return for each stretch of tokens that one version drew: its age in steps, and how many they are."""
        drew = [
            span
            for rollout in group.rollouts
            for turn in rollout.turns
            if turn.trained
            for span in turn.completion.spans
        ]
        since = self._synced_at | {flight.version: flight.synced}
        return [(self.done - since.get(version, flight.synced), tokens) for version, tokens in drew]

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _draw(self, count: int) -> list[_DrawnPrompt]:
        """Return the next `count` prompts: those to be tried again, new ones."""
        drawn: list[_DrawnPrompt] = []
        most = min(count, self._reroll.max_groups - self._rerolled)
        for id in self._reroll.pop(self.done / self._pace.steps, most=most):
            prompt = self._play.prepare(self._source.prompt(id))
            seed = seed_of(self._seed, id, self._reroll.tries(id))  # the same again where a run continues
            drawn.append(_DrawnPrompt(prompt=prompt, issued=None, seed=seed))
            self._rerolled += 1
        passed_over = 0
        while len(drawn) < count:
            for issued in self._source.issue(count - len(drawn)):
                prompt = self._fitting(issued.prompt)
                if prompt is not None:
                    drawn.append(_DrawnPrompt(prompt=prompt, issued=issued, seed=seed_of(self._seed, *issued.ticket)))
                else:
                    passed_over += 1
                    self._source.resolve(issued.ticket)
            if passed_over >= 2 * len(self._source.known) and not drawn:  # a whole epoch, wherever this one began
                raise DataError(
                    f"each of the last {passed_over} prompts has more than {self._longest} tokens, or with its answer "
                    "more than the context",
                    hint="shorten the prompts, raise rollout.max_prompt_tokens, or use a model with a longer context",
                )
        self._too_long += passed_over
        return drawn

    def _fitting(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt prepared; None for one that is too long."""
        try:
            prepared = self._play.prepare(prompt)
        except ContextLengthError:
            return None
        return prepared if len(prepared.token_ids) <= self._longest else None


@dataclass(kw_only=True)
class _Taken:
    """The groups that a step has taken so far, with their ages."""

    kept: list[RolloutGroup] = field(default_factory=list)
    sampled: list[RolloutGroup] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    token_ages: list[tuple[int, int]] = field(default_factory=list)
    replayed: int = 0

    def keep(self, group: RolloutGroup, *, age: int | None = None) -> None:
        """Keep a fresh group of this age in steps, or a replayed one."""
        self.kept.append(group)
        if age is None:
            self.replayed += 1
        else:
            self.ages.append(age)

    def collected(self, *, too_long: int, rerolled: int) -> Collected:
        return Collected(
            groups=tuple(self.kept),
            sampled=tuple(self.sampled),
            too_long=too_long,
            ages=tuple(self.ages),
            token_ages=tuple(self.token_ages),
            replayed=self.replayed,
            rerolled=rerolled,
        )


class _FailureGuard:
    """Ends a run in which nothing can be scored. `lost` is an error that ends the run at once: no other group can make
    up for it."""

    def __init__(self, prompts_per_step: int):
        self._most = max(IN_VAIN_GROUPS, prompts_per_step)
        self._in_vain: list[tuple[RolloutGroup, float]] = []
        self.lost: Exception | None = None

    def scored(self, group: RolloutGroup, *, started: float) -> None:
        """Count a group without any reward, since the last that had one, or of which nothing was asked; `started` is
        when its scoring began."""
        if not group.rollouts or any(rollout.error is None and _is_answered(rollout) for rollout in group.rollouts):
            self._in_vain.clear()
        elif len(self._in_vain) < self._most:  # enough to stop the run, however many end before anyone looks
            self._in_vain.append((group, started))

    def check(self) -> None:
        """Raise what was lost, and RewardError when group after group failed, or a few and for long."""
        if self.lost is not None:
            raise self.lost
        count = len(self._in_vain)
        long = count > 1 and time.monotonic() - self._in_vain[0][1] > IN_VAIN_S
        if count >= self._most or long:
            completions = sum(len(group.rollouts) for group, _ in self._in_vain)
            first = self._in_vain[0][0].rollouts[0]
            asked = ", ".join(first.rewards)
            raise RewardError(
                f"no reward for any of {completions} completions in a row; the first cause: "
                f"{first.error or f'{asked} gave None, which says that it does not apply'}",
                hint="correct what it names; nothing was trained on them",
            )


def _is_answered(rollout: Rollout) -> bool:
    """Return whether a reward that was asked gave a number, or none was asked."""
    return not rollout.rewards or any(reward is not None for reward in rollout.rewards.values())
