"""Runs whose prompts are rendered as `chat` says, go on with what the assistant has begun, and bound its thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import parse_config
from groupwise.errors import ConfigError
from groupwise.model.chat import decode
from groupwise.model.load import load_tokenizer
from groupwise.run.check import check
from groupwise.run.evaluate import load_evaluations
from groupwise.run.loop import run_loop
from groupwise.run.thoughts import ThoughtCost
from groupwise.store.tracking import read_metrics
from running_jobs import groups_of, two_steps
from wording import raises

CODE = """
SEEN = []


def odd(completions, prompts, **_):
    SEEN.append((prompts[0], completions[0]))
    return [float(sum(map(ord, str(each))) % 2) for each in completions]
"""
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`settings(opening, chat={...}, ...)`: a run of two steps; prompts end with these words of the assistant's."""
    (tmp_path / "my_odd.py").write_text(CODE)

    def make(opening: str = "", **sections: Any) -> dict[str, Any]:
        said = [{"role": "assistant", "content": opening}] if opening else []
        rows = [[{"role": "user", "content": f"What is {n} + 8?"}, *said] for n in range(6)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        data = {"source": "rows.jsonl"} | sections.pop("data", {})
        return two_steps(tmp_path, data=data, rewards=["my_odd:odd"], **sections)

    return make


@pytest.mark.parametrize("thinks", [True, False])
def test_the_template_is_told_in_training_and_evaluation(settings, thinks: bool):
    chat = {"template_kwargs": {"enable_thinking": thinks}}
    evaluated = {"data": {"source": "rows.jsonl", "limit": 2}, "every": 0}
    result = run_loop(parse_config(settings(chat=chat, eval=evaluated)))
    tokenizer = load_tokenizer("starter")
    evaluated = [group for each in load_evaluations(result.run_dir, 2).values() for group in each.groups]
    groups = [*groups_of(result.run_dir), *evaluated]
    assert evaluated
    for group in groups:
        assert decode(group.prompt.token_ids, tokenizer, ends=()).endswith(EMPTY) == (not thinks)


@pytest.mark.parametrize("completion_only", [True, False])
def test_an_opened_message_is_prompt_and_rewards_see_it_as_the_key_says(settings, completion_only: bool, monkeypatch):
    result = run_loop(parse_config(settings("It is ", data={"completion_only": completion_only})))
    tokenizer, groups = load_tokenizer("starter"), groups_of(result.run_dir)
    for group in groups:
        assert group.prompt.opening == "It is " and group.prompt.shows_opening is not completion_only
        assert decode(group.prompt.token_ids, tokenizer, ends=()).endswith("<|im_start|>assistant\nIt is ")
        for rollout in group.rollouts:
            (turn,) = rollout.turns
            assert turn.prompt_ids == group.prompt.token_ids and turn.completion.text in decode(
                turn.completion.token_ids, tokenizer
            )
            said = ("" if completion_only else "It is ") + turn.completion.text
            seen = str([{"role": "assistant", "content": said}])
            assert rollout.reward == float(sum(map(ord, seen)) % 2)


def test_a_thought_is_bounded_and_trained_as_it_was_drawn(settings):
    result = run_loop(parse_config(settings("<think>\n", rollout={"thinking_budget": 3})))
    end = load_tokenizer("starter").convert_tokens_to_ids("</think>")
    said = [rollout.completion for group in groups_of(result.run_dir) for rollout in group.rollouts]
    assert all(each.token_ids.index(end) <= 3 for each in said)
    forced = [each for each in said if each.token_ids.index(end) == 3]
    assert forced and all(each.kept_logprobs[3] == 0 for each in forced)
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "mismatch/ratio_min" in row]
    assert rows and all(row["mismatch/ratio_min"] == pytest.approx(1, abs=5e-5) for row in rows)  # in float32


def test_check_says_what_thoughts_cost_and_what_to_do_when_they_are_cut(settings):
    cut = check(parse_config(settings("<think>\n", rollout={"max_tokens": 3})))
    assert cut.thoughts is not None and cut.thoughts.cut == cut.thoughts.thinking == cut.thoughts.turns > 0
    assert (cut.thoughts.tokens, cut.thoughts.share) == (3, 1.0)
    (said,) = [warning for warning in cut.warnings if "thinking_budget" in warning]
    assert "chat.template_kwargs.enable_thinking: false" in said and "rollout.max_tokens" in said
    bounded = check(parse_config(settings("<think>\n", rollout={"thinking_budget": 3})))
    assert bounded.thoughts is not None and bounded.thoughts.cut == 0 < bounded.thoughts.share < 1
    assert not any("thinking_budget" in warning for warning in bounded.warnings)
    assert check(parse_config(settings())).thoughts is None


def test_few_cut_thoughts_are_no_warning(settings):
    cost = ThoughtCost(turns=100, thinking=80, cut=10, tokens=30, share=0.5)
    assert cost.warning(parse_config(settings()).rollout, load_tokenizer("starter")) is None


def test_a_budget_that_leaves_no_answer_is_refused(settings):
    with raises(ConfigError, field="rollout.thinking_budget", kind="conflict"):
        parse_config(settings(rollout={"thinking_budget": 24}))
