"""reasoning-gym as a source of data: `data.source: reasoning-gym`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from groupwise.bridges.reasoning_gym.difficulty import AdaptiveDifficulty
from groupwise.bridges.reasoning_gym.problems import Problems
from groupwise.bridges.reasoning_gym.reward import score_answer
from groupwise.config.data import DataConfig, RowsConfig
from groupwise.rewards.call import RewardFunction
from groupwise.tasks.prompt_stream import PromptSource, PromptStream


class ReasoningGym:
    """A `DataSource`: the package's problems, of fixed or of adaptive difficulty."""

    def rows(self, config: RowsConfig) -> Iterator[tuple[str, Any]]:
        """See the protocol."""
        return Problems(config).rows()

    def stream(self, source: PromptSource, config: DataConfig, rewards: Sequence[RewardFunction]) -> PromptStream:
        """See the protocol; success is what `score_answer` says, or the weighted sum where a run is without it."""
        reward = next((each.name for each in rewards if each.function is score_answer), None)
        return AdaptiveDifficulty(source, config, reward=reward)


SOURCE = ReasoningGym()
