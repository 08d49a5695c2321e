import dataclasses
import json
import math
from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest

from groupwise.errors import DataError
from groupwise.recorded import DROPPED, KEPT, SamplingMask
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, SequenceScores, Turn
from wording import raises

FIRST = Completion(
    token_ids=(7, 2),
    logprobs=(-0.1, -1e-17),
    text="é\n",
    finish_reason=FinishReason.STOP,
    version=PolicyVersion("math", 3),
    switches=((1, PolicyVersion("math", 4)),),
    top_logprobs=(((7, -0.1), (9, -2.5)), ()),
    kept=SamplingMask.of_entries(12, [(KEPT, np.array([7, 9])), (DROPPED, np.array([3]))]),
    kept_logprobs=(-0.05, -1e-18),
)
SECOND = Completion(token_ids=(8,), logprobs=(-math.inf,), text="", finish_reason=FinishReason.LENGTH)
GROUP = RolloutGroup(
    prompt=Prompt(
        id="rows.jsonl:3",
        messages=({"role": "user", "content": "2+2?"},),
        tools=({"type": "function", "function": {"name": "add"}},),
        columns={"answer": "4", "none": None, "nested": {"a": [1, 2.5, True]}},
        token_ids=(5, 10, 5, 11),
        shows_opening=True,
        answer=({"role": "assistant", "content": "4"},),
        rejected=({"role": "assistant", "content": "5"},),
    ),
    rollouts=(
        Rollout(
            turns=(
                Turn((5, 10, 5, 11), FIRST, 0.5, role="first", state="start", advantage=-0.7, taken=1),
                Turn((5, 10, 5, 11, 7, 2, 6), SECOND, trained=False),
            ),
            rewards={"right": 1.0, "judge": None},
            role_rewards={"first": 1.0, "second": -1 / 3},
            reward=1 / 3,
            advantage=0.1 + 0.2,
            messages=({"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}),
            stop="max_turns",
            info={"turns": 2.0},
            columns={"env_reward": 0.5, "path": ["a", None]},
            teacher=(SequenceScores(logprobs=(-0.2, -0.3, -0.4), top=(((7, -0.1),), ((2, -0.3),), ())),),
        ),
        Rollout(turns=(Turn((5, 10, 5, 11), SECOND),), error="judge: timeout", error_kind="timeout"),
    ),
)


TURNS = [turn for rollout in GROUP.rollouts for turn in rollout.turns]


def through_json(group: RolloutGroup) -> RolloutGroup:
    return group_from_json(json.loads(json.dumps(group_to_json(group), allow_nan=False)))


def test_a_group_comes_back_equal():
    assert through_json(GROUP) == GROUP
    text = replace(GROUP, prompt=Prompt(id="t", text="2+2=", token_ids=(1,)), rollouts=GROUP.rollouts[1:])
    assert through_json(text) == text


def test_the_example_has_every_field():
    """A field that is new in types.py and not written here would come back as its default, unnoticed."""
    for kind, parts in ((Prompt, [GROUP.prompt]), (Rollout, GROUP.rollouts), (Turn, TURNS), (Completion, [FIRST])):
        for field in dataclasses.fields(kind):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            shown = any(getattr(part, field.name) != default for part in parts)
            if field.compare:  # what is not compared is of the moment: how much of the prompt was known to the engine
                assert shown or (kind, field.name) == (Prompt, "text"), field.name  # a prompt has messages or text


def test_numbers_that_are_not_finite_come_back():
    odd = replace(GROUP.rollouts[0], reward=math.nan, advantage=-math.inf, rewards={"right": math.inf})
    [back] = through_json(replace(GROUP, rollouts=(odd,))).rollouts
    assert back.reward is not None and math.isnan(back.reward)
    assert (back.advantage, back.rewards) == (-math.inf, {"right": math.inf})


def test_columns_come_back_as_far_as_json_has_their_types():
    prompt = replace(GROUP.prompt, columns={"pair": (1, 2), 3: math.nan, "path": PolicyVersion("math", 3)})
    assert through_json(replace(GROUP, prompt=prompt)).prompt.columns == {"pair": [1, 2], "3": "NaN", "path": "math@3"}


@pytest.mark.parametrize(
    "raw", [None, 3, {}, {"prompt": {}}, {"prompt": group_to_json(GROUP)["prompt"], "rollouts": 1}]
)
def test_what_is_not_a_group_is_refused(raw):
    with raises(DataError):
        group_from_json(raw)


@pytest.mark.parametrize("kept", ["AAAA", "not base64", SamplingMask.whole(12, 3)])
def test_a_record_of_what_was_kept_that_is_none_is_refused(kept):
    raw = json.loads(json.dumps(group_to_json(GROUP)))
    text = kept if isinstance(kept, str) else b64encode(kept.to_bytes()).decode()
    raw["rollouts"][0]["turns"][0]["kept"] = text
    with raises(DataError):
        group_from_json(raw)
