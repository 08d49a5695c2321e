"""Groups that a rollout function plays, all that are begun together in one call of it: a `RolloutSource`.

What it raises, and what it returns that is not as it must be, is the error of all of the call's rollouts, or of the
one that it is about; `env.on_error` says what that is worth. A call is given up when `env.timeout_s` have passed in
which it neither ended nor waited for the policy. What the engine raises ends the run.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from groupwise.bridges.trl.rollout_func import RolloutFunc
from groupwise.bridges.trl.rollout_output import FOREIGN, OutputReader
from groupwise.bridges.trl.rollout_trainer import Trainer
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, DataError, EnvError, GroupwiseError
from groupwise.sampler import Sampler
from groupwise.seeds import seed_of
from groupwise.tasks.env import priced
from groupwise.tasks.env_kind import warn
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.policy_calls import PolicyCalls
from groupwise.tasks.rollout_sources import Slots
from groupwise.types import PolicyVersion, Prompt, Rollout, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from groupwise.model.load import LoadedModel


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The prompts, sampling parameters, version and seed of one call of a rollout function."""

    prompts: tuple[Prompt, ...]
    n: int
    params: SamplingParams
    version: PolicyVersion
    seed: int


class RolloutFuncRollouts:
    """Plays prompts with a `RolloutFunc`.

    Args:
        run: training's sampling parameters; text that is generated with others is not trained.
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
        """Return the prompt itself: what the policy is asked, the function says. Raises DataError if there is none."""
        if prompt.messages is None and prompt.text is None:
            raise DataError(f"{prompt.id} has no prompt, which rollout functions get", hint="give each row a `prompt`")
        return prompt

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`. Giving up one group gives up all of the call's."""
        batch = _Batch(
            prompts=tuple(prompts), n=n, params=params, version=version, seed=seed_of("rollout_func", *seeds)
        )
        played = asyncio.ensure_future(self._play(batch))

        async def group(at: int) -> RolloutGroup:
            return (await played)[at]

        return [group(at) for at in range(len(prompts))]

    def close(self) -> None:
        """Do nothing: the source holds no resources."""

    async def _play(self, batch: _Batch) -> list[RolloutGroup]:
        async with self._slot.take(1):
            rollouts = [priced(rollout, self._config) for rollout in await self._rollouts(batch)]
        groups = [
            RolloutGroup(prompt=prompt, rollouts=tuple(rollouts[i * batch.n : (i + 1) * batch.n]))
            for i, prompt in enumerate(batch.prompts)
        ]
        return [replace(group, prompt=_as_seen(group)) for group in groups]

    async def _rollouts(self, batch: _Batch) -> list[Rollout]:
        """Return the call's rollouts, in order. Raises what the engine raised."""
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
        """Return what the function returns. Raises EnvError, whatever it raises."""
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
    """Return the prompt with the ids that its first rollout began with."""
    ids = next((rollout.turns[0].prompt_ids for rollout in group.rollouts if rollout.turns), ())
    return replace(group.prompt, token_ids=ids)
