"""Where episodes with tools end, with the real engine: budgets that run out inside a call, by a result, over turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from episodes import config, play
from groupwise.algo.samples import segments_of
from groupwise.model.chat import encode_prompt
from groupwise.tasks.tool_env import ToolEnv
from groupwise.types import FinishReason, Prompt, Rollout, SamplingParams

CALL = 25  # tokens of the call that the starter makes, greedily, and 12 are in the midst of it
GREEDY = {"temperature": 0.0}


class Asks(ToolEnv):
    """One question, a calculator. The score is 1 for the right answer, and with `gives` each call is worth 0.25."""

    def __init__(self, shown: int = 0, again: bool = False):
        self.shown, self.again, self.ran = shown, again, 0

    def first_message(self, case, seed):
        return "What is 47 + 138? Use the calculator."

    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic."""
        assert expression == "47+138"
        self.ran += 1
        return "185" + " 0" * self.shown

    tools = (calculator,)

    async def step(self, message):
        if self.again and not message.get("tool_calls") and not message.get("malformed_calls"):
            return [{"role": "user", "content": "What is 47 + 138? Use the calculator."}]
        return await super().step(message)

    def score(self, episode):
        return float(episode.answer == "185") + 0.25 * self.ran


@pytest.fixture
def episode(starter_engine, starter) -> Callable[..., Rollout]:
    def played(*, max_tokens: int = 64, env: dict[str, Any] | None = None, **args: Any) -> Rollout:
        params = SamplingParams(max_tokens=max_tokens, **GREEDY)
        [group] = play(starter_engine, starter.tokenizer, Asks, n=1, params=params, env=config(**(env or {})), **args)
        [rollout] = group.rollouts
        assert rollout.error is None and rollout.info["forks"] == 0.0
        [segment] = segments_of(rollout.turns)
        assert sum(segment.mask) == sum(lengths(rollout))
        return rollout

    return played


def lengths(rollout: Rollout) -> list[int]:
    return [len(turn.completion.token_ids) for turn in rollout.turns]


def test_an_episode_with_a_call(episode):
    rollout = episode()
    assert (rollout.stop, rollout.reward) == ("done", 1.25) and lengths(rollout)[0] == CALL
    assert [message["role"] for message in rollout.messages] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("limits", [{"max_tokens": 12}, {"env": {"max_tokens": 12}}])
def test_a_budget_that_ends_inside_a_call(episode, limits):
    """The turn's own and the episode's: the call is not run, and what was said of it is trained."""
    rollout = episode(**limits)
    assert (rollout.stop, rollout.reward, lengths(rollout)) == ("max_tokens", 0.0, [12])
    [message] = rollout.messages
    assert "tool_calls" not in message and "<tool_call>" in str(message["content"])
    assert rollout.completion.finish_reason is FinishReason.LENGTH


def test_a_call_that_was_cut_may_be_told_so(episode, starter):
    """With `stop_at_cut: false` the environment answers it, and the policy goes on from the ids that it had said."""
    rollout = episode(max_tokens=12, env={"stop_at_cut": False})
    assert rollout.stop == "done" and rollout.info["tool_malformed"] == 1.0
    first, second = rollout.turns[:2]
    seen = first.prompt_ids + first.completion.token_ids
    assert second.prompt_ids[: len(seen)] == seen and second.prompt_ids[len(seen)] == starter.tokenizer.eos_token_id
    assert "is not closed" in starter.tokenizer.decode(second.prompt_ids[len(seen) :])


def test_a_budget_over_several_turns(episode):
    """The last turn has what the others left; where they left nothing there is no other turn."""
    left = 2
    rollout = episode(env={"max_tokens": CALL + left})
    assert (rollout.stop, rollout.reward, lengths(rollout)) == ("max_tokens", 0.25, [CALL, left])
    rollout = episode(env={"max_tokens": CALL})
    assert (rollout.stop, rollout.reward, lengths(rollout)) == ("max_tokens", 0.25, [CALL])
    assert rollout.messages[-1]["role"] == "tool"  # it was run: the policy ended the call itself
    answered = episode(again=True, env={"max_tokens": 3 * CALL, "max_turns": 100})
    assert answered.stop == "max_tokens" and sum(lengths(answered)) == 3 * CALL and len(answered.turns) > 3


def test_a_result_that_fills_the_context(episode, starter):
    rollout = episode(shown=starter.context_length)
    assert (rollout.stop, rollout.reward, lengths(rollout)) == ("context", 0.25, [CALL])
    [_, result] = rollout.messages
    assert len(str(result["content"])) > starter.context_length


def test_a_result_that_leaves_a_little_of_the_context(episode, starter):
    """The next turn is cut where the context ends."""
    asked = episode().turns[1].prompt_ids
    per_zero = len(episode(shown=1).turns[1].prompt_ids) - len(asked)
    shown = (starter.context_length - len(asked) - 1) // per_zero
    room = starter.context_length - len(asked) - shown * per_zero
    rollout = episode(shown=shown)
    assert len(rollout.turns[1].prompt_ids) == starter.context_length - room
    if rollout.completion.finish_reason is FinishReason.LENGTH:
        assert rollout.stop == "context" and lengths(rollout) == [CALL, room]
    assert len(rollout.turns[1].prompt_ids) + lengths(rollout)[1] <= starter.context_length


def test_a_first_message_that_fills_the_context(starter_engine, starter):
    """Nobody speaks, and nobody is to blame but the environment: the episode is excluded."""

    class Long(Asks):
        def first_message(self, case, seed):
            return "0 " * starter.context_length

    [group] = play(starter_engine, starter.tokenizer, Long, n=2, params=SamplingParams(max_tokens=4, **GREEDY))
    for rollout in group.rollouts:
        assert (rollout.stop, rollout.turns, rollout.reward) == ("error", (), None)
        assert f"the model's context is {starter.context_length}" in str(rollout.error)
        assert segments_of(rollout.turns) == []


def test_calls_beyond_the_limit_are_not_run(episode):
    """Each question leads to a call, of which the third is one too many."""
    rollout = episode(again=True, env={"max_tool_calls": 2, "max_turns": 20})
    assert rollout.stop == "max_tool_calls" and rollout.info["tool_calls"] == 3.0
    assert rollout.messages[-1].get("tool_calls")  # what it said is there, and is trained
    assert [message["role"] for message in rollout.messages].count("tool") == 2
    assert rollout.reward == 0.5  # what was run before counts


def test_the_last_turn_is_answered(episode):
    """`max_turns` ends an episode after the environment has seen its last turn: that may have earned something."""
    rollout = episode(env={"max_turns": 1})
    assert (rollout.stop, rollout.reward, len(rollout.turns)) == ("max_turns", 0.25, 1)
    assert rollout.messages[-1]["role"] == "tool"
    assert episode(env={"max_turns": 2}).stop == "done"


def test_what_is_seen_is_what_the_template_writes(episode, starter):
    """The starter's template only appends, so each turn sees the conversation as it would be encoded anew."""
    rollout = episode(again=True, env={"max_turns": 5})
    question = {"role": "user", "content": "What is 47 + 138? Use the calculator."}
    roles = [message["role"] for message in rollout.messages]
    spoken = [i for i, role in enumerate(roles) if role == "assistant"]
    tools = Asks().reset({}, 0).tools
    assert len(spoken) == len(rollout.turns) == 5
    for turn, i in zip(rollout.turns, spoken, strict=True):
        anew = encode_prompt(
            Prompt(id="x", messages=(question, *rollout.messages[:i]), tools=tuple(tools)), starter.tokenizer
        )
        assert starter.tokenizer.decode(turn.prompt_ids) == starter.tokenizer.decode(anew.token_ids)
