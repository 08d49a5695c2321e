"""The answers of the routes that show completions, of a server and of a run on disk alike, so that one page reads both.

RolloutPage     rows, and the cursor of the next page
RolloutGroupDetail    the completions of one prompt, token by token, each with its reward and the parts of it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

from groupwise.errors import GroupwiseError
from groupwise.sdk.types import Answer, absent

# ---- answers ----
MOST_ROWS = 2000

PREVIEW = 400  # characters of a prompt or a completion in a row


class RolloutNotFoundError(GroupwiseError, LookupError):
    """No rollout of this id is kept."""

    code, status, exit_code = "rollout_not_found", 404, 2


class RolloutRow(Answer):
    """Describes a completion in a list; long texts are cut."""

    id: str
    group: str
    """The same for the completions of one prompt that were sampled, or posted, together."""
    prompt: str
    text: str
    reward: float | None
    """null: no job was posted the completion under this id; or the completion could not be scored."""
    job: str | None
    """The newest job that was posted the completion under this id, or the requested job; null in a run, and before the
    first job."""
    advantage: float | None
    version: str | None
    """The version that sampled the completion; null if the job's request did not say."""
    finish_reason: Literal["stop", "length"] | None
    temperature: float
    reshaped: list[str]
    """The sampling parameters by which it was drawn from another distribution than the policy's at this temperature,
    of which the log-probabilities are. None for an on-policy sample of all of it; a job is not told."""
    prompt_tokens: int
    completion_tokens: int
    created_at: str


class RolloutPage(Answer):
    """A page of completions. `next` is the cursor of the next page, null at the end; a page may have few rows, or none,
    and a next one all the same."""

    rows: list[RolloutRow]
    next: int | None
    newest: int | None = absent()
    """A cursor to the newest completion that was sampled here (not of a job): send it as `since` to get only later
    ones."""


class FacetCount(Answer):
    """The number of completions that have a value."""

    value: str
    count: int


class RolloutFacets(Answer):
    """Values that completions can be filtered by, with the number of completions of each; the most frequent come
    first."""

    counted: int
    """Completions that were looked at: the newest ones, as far as one request reads."""
    versions: list[FacetCount]
    finish_reasons: list[FacetCount]
    steps: list[int]
    """For a run, every step that has completions, newest first."""
    tags: dict[str, list[FacetCount]]
    """For a run, the prompts' other columns with few values, by name."""


Sort = Literal["newest", "oldest", "best", "worst", "longest", "shortest"]


class RolloutDetail(RolloutRow):
    """Describes a completion with its tokens; `logprobs` are the sampler's, null if they were not recorded."""

    rewards: dict[str, float | None]
    """The parts of a run's reward by name; null: this function failed. Empty in a job, which is posted one reward."""
    error: str | None
    """Why a run could not score the completion."""
    token_ids: list[int]
    tokens: list[str]
    """The tokens as text. A run's episode includes the messages between the policy's turns. If the run's tokenizer is
    not on this machine, each entry is a whole turn."""
    logprobs: list[float | None] | None
    """One for each of `tokens`; null for tokens that the policy did not sample."""


class RolloutGroupDetail(Answer):
    """The completions of one prompt, highest reward first."""

    group: str
    prompt: str
    prompt_token_ids: list[int]
    images: list[str | None] | None = absent()
    """For a prompt with images, in order, the address of each on this server; null if the image is no longer kept."""
    rollouts: list[RolloutDetail]


Rollout = TypeVar("Rollout", bound=RolloutDetail)


def best_first(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return rollouts by reward; what has none comes last."""
    return sorted(rollouts, key=lambda each: float("inf") if each.reward is None else -each.reward)


def most_first(counts: Iterable[tuple[str, int]]) -> list[FacetCount]:
    """Return the sums of the counts by value, the largest first, equal ones by value; those of "" are left out."""
    total: dict[str, int] = {}
    for value, count in counts:
        if value:
            total[value] = total.get(value, 0) + count
    return [
        FacetCount(value=value, count=total[value]) for value in sorted(total, key=lambda each: (-total[each], each))
    ]
