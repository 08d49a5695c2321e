"""The bodies of /v1/train/*.

A completion is known by its text, by the id of its rollout, or by its token ids; with the last two exactly what was
sampled is trained, against the log-probabilities that sampled it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from groupwise.config.job import JOB_OTHER_NAMES, MODELS, NOT_OF_JOBS, GrpoJobConfig, SftJobConfig
from groupwise.config.section import NullIsAbsent
from groupwise.server.schema_messages import Conversation, Tools
from groupwise.server.schema_openai import PromptIds, TemplateOptions, TokenIds
from groupwise.server.wire import OwnPart, OwnRequest
from groupwise.tasks.dialects.form import FailFast

RolloutId = Annotated[str, Field(min_length=1, max_length=64)]


def _at_least(count: int) -> Any:
    """Return the document's `minItems`; `submit` refuses less, in better words."""
    return Field(json_schema_extra={"minItems": count})


SampledIds = Annotated[TokenIds, _at_least(1)]


def _under_config(kind: str) -> dict[str, str]:
    """Return the right paths of options that belong under `config` and are often written next to it."""
    return {name: f"config.{ours}" for name, ours in JOB_OTHER_NAMES[kind].items()} | {
        name: f"config.{name}" for name in MODELS[kind].model_fields
    }


# ---- what is asked for ----
class ScoredCompletion(OwnPart):
    """A completion and its reward. Give one of `text`, `rollout_id` and `token_ids`."""

    reward: float
    """The completion's reward; only differences within its group count."""
    text: str | None = None
    """The whole reply, as it was sampled."""
    rollout_id: RolloutId | None = None
    """The completion's id from /v1/completions/batch: the server knows its tokens and their log-probabilities."""
    token_ids: SampledIds | None = None
    """The completion's tokens, including the end of the turn."""
    logprobs: Annotated[list[float], FailFast()] | None = None
    """The log-probability with which each of `token_ids` was sampled."""
    teacher_logprobs: Annotated[list[float], FailFast()] | None = None
    """The log-probability that a teacher gives each token, of `token_ids` with their `logprobs` or of a `rollout_id`:
    what it is above the sampler's, times `config.teacher_coefficient`, is added to the token's advantage."""
    prompt_token_ids: Annotated[PromptIds, _at_least(1)] | None = None
    """Beside `token_ids`: the prompt they follow, where the group has no `messages`."""


class ScoredGroup(OwnPart):
    """The completions of one prompt. `messages` may be missing where every completion brings its prompt."""

    messages: Conversation | None = None
    """The conversation up to where the assistant speaks."""
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    completions: Annotated[list[ScoredCompletion], FailFast(), _at_least(2)]
    """The completions of the group, at least two, because one cannot be compared."""


_ONE_TURN = (
    "reward, what the one turn is worth that a completion is here; an episode's turns have credit of their own in a "
    "run (algo.credit, groupwise run)"
)

_SAMPLED = "rollout_id and reward alone: what was sampled here is known here"


class GrpoRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/train/grpo."""

    nowhere: ClassVar = NOT_OF_JOBS
    elsewhere: ClassVar = {
        **_under_config("grpo"),
        **dict.fromkeys(("prompt_index", "completion_index", "finish_reason", "usage", "reasoning_content"), _SAMPLED),
        **dict.fromkeys(("turns", "turn_rewards", "credit", "turn_discount", "turn_baseline"), _ONE_TURN),
        "step_advantage_weight": _ONE_TURN,
        "epochs": "config.iterations: GRPO does not use epochs; iterations are passes over the groups",
        "examples": "groups, or POST /v1/train/sft",
        "messages": "groups[i].messages",
        "completions": "groups[i].completions",
        "prompts": "groups[i].messages",
    }

    groups: Annotated[list[ScoredGroup], FailFast(), _at_least(1)]
    config: GrpoJobConfig = GrpoJobConfig()


class SftExample(OwnPart):
    """A conversation; what the assistant says in it is trained."""

    messages: Conversation
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None


class SftRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/train/sft."""

    nowhere: ClassVar = NOT_OF_JOBS
    elsewhere: ClassVar = {
        **_under_config("sft"),
        "groups": "examples, or POST /v1/train/grpo",
        "messages": "examples[i].messages",
    }

    examples: Annotated[list[SftExample], FailFast(), _at_least(1)]
    config: SftJobConfig = SftJobConfig()
