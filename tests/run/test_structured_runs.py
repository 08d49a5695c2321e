"""Runs whose completions are kept to a form: what is sampled, what is trained, and what is refused before it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from groupwise.cli.main import app
from groupwise.config.run import dump_resolved, parse_config
from groupwise.config.yaml import to_yaml
from groupwise.engine.grammar import GrammarCompiler
from groupwise.errors import ConfigError, GrammarError
from groupwise.model.chat import split_thinking
from groupwise.run.assemble import open_components
from groupwise.run.evaluate import load_evaluations
from groupwise.run.loop import run_loop
from groupwise.run.plan import make_plan
from groupwise.store.tracking import read_metrics
from groupwise.types import FinishReason, Rollout
from running_jobs import groups_of, two_steps
from slow_cases import long_case, slow_but
from wording import raises

CODE = '''
from groupwise.tasks.env import Observation, StepResult

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def odd(completions, **_):
    return [float(sum(map(ord, str(each))) % 2) for each in completions]


class Asks:
    """Two turns; `tools` are offered."""

    def __init__(self, tools=()):
        self.tools = tools

    def cases(self):
        return [{"number": number} for number in range(4)]

    def reset(self, case, seed):
        self.left = 2
        said = [{"role": "user", "content": f"What is {case['number']} + 2?"}]
        return Observation(messages=said, tools=[CALCULATOR] if self.tools else [])

    def step(self, message):
        self.left -= 1
        reward = float(sum(map(ord, str(message))) % 2)
        calls = [{"role": "tool", "tool_call_id": each["id"], "content": "4"} for each in message.get("tool_calls", ())]
        return StepResult(messages=calls or [{"role": "user", "content": "?"}], reward=reward, done=not self.left)


class ThreeMethods:
    def build_dataset(self, tokenizer):
        return [{"prompt": "1 + 1"}]

    def score_episode(self, model, tokenizer, completion, case_idx):
        return 0.0

    def get_tools(self):
        return []
'''


@pytest.fixture
def settings(tmp_path: Path):
    """`settings(rollout={...}, ...)`: a run of two steps with the starter."""
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"prompt": f"What is {n} + 8?"}) + "\n" for n in range(6)))
    (tmp_path / "my_code.py").write_text(CODE)

    def make(**sections: Any) -> dict[str, Any]:
        plain = {} if "env" in sections else {"data": {"source": "code.jsonl"}, "rewards": ["my_code:odd"]}
        return two_steps(tmp_path, **{**plain, **sections})

    return make


def assert_on_policy(run_dir: Path) -> None:
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "mismatch/ratio_min" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/ratio_min"] == pytest.approx(1, abs=5e-5) == row["mismatch/ratio_max"]  # in float32
        assert row["sampling/kept_mass"] < 0.999


SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 20, 300]}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMS = {
    "regex": ({"structured_outputs_regex": "[A-Z]{2,3}-[0-9]{2}"}, "[A-Z]{2,3}-[0-9]{2}"),
    "choice": ({"structured_outputs": {"choice": ["left", "right", "straight on"]}}, "left|right|straight on"),
    "json": (
        {"structured_outputs": {"json": SCHEMA}},
        r'\{\s*"n"\s*:\s*(1|20|300)\s*\}',
    ),
}


def answers(rollouts: Sequence[Rollout]) -> list[str]:
    """What was said behind a thought, of completions that were not cut."""
    whole = [each.completion for each in rollouts if each.completion.finish_reason is FinishReason.STOP]
    assert len(whole) > len(rollouts) // 2
    return [split_thinking(each.text)[1] for each in whole]


@pytest.mark.parametrize("form", slow_but({"json"}, of=FORMS, long={"regex"}))
def test_every_completion_matches_and_is_trained_as_it_was_drawn(settings, form: str):
    asked, pattern = FORMS[form]
    evaluated = {"data": {"source": "code.jsonl", "limit": 3}, "every": 0}
    result = run_loop(parse_config(settings(rollout={**asked, "max_tokens": 64}, eval=evaluated)))
    trained = groups_of(result.run_dir)
    held_out = [
        group for step in (0, 2) for each in load_evaluations(result.run_dir, step).values() for group in each.groups
    ]
    for groups, count in ((trained, 32), (held_out, 12)):
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert len(rollouts) == count
        assert [each for each in answers(rollouts) if not re.fullmatch(pattern, each)] == []
    assert_on_policy(result.run_dir)


def test_of_plain_text_all_that_is_said_matches(settings):
    asked = {"structured_outputs_regex": "[A-Z]{2,3}-[0-9]{2}"}
    result = run_loop(parse_config(settings(rollout=asked, data={"source": "code.jsonl", "raw": True})))
    said = [rollout.completion.text for group in groups_of(result.run_dir) for rollout in group.rollouts]
    assert len(said) == 32 and all(re.fullmatch("[A-Z]{2,3}-[0-9]{2}", each) for each in said)
    assert_on_policy(result.run_dir)


@pytest.mark.parametrize("tools", [(), long_case(("calculator",))])
def test_in_an_environment_every_turn_is_an_answer_or_a_call(settings, tools):
    """Calls are kept to their own form; they need not be what an answer is."""
    env = {"environment": "my_code:Asks", "args": {"tools": list(tools)}, "workers": 0}
    result = run_loop(
        parse_config(settings(env=env, rollout={"structured_outputs_regex": "[0-9]{1,3}", "max_tokens": 64}))
    )
    messages = [m for group in groups_of(result.run_dir) for r in group.rollouts for m in r.messages]
    said = [m for m in messages if m["role"] == "assistant"]
    called = [call["function"] for m in said for call in m.get("tool_calls", ())]
    plain = [m["content"] for m in said if not m.get("tool_calls")]
    assert len(said) >= 32 and plain and bool(called) == bool(tools)
    matching = [each for each in plain if re.fullmatch("[0-9]{1,3}", split_thinking(each)[1])]
    assert len(matching) >= 0.9 * len(plain)  # others were cut
    assert all(each["name"] == "calculator" and list(each["arguments"]) == ["expression"] for each in called)
    assert_on_policy(result.run_dir)


# ---- what is refused ----
WRONG = {
    "regex": ({"structured_outputs_regex": "("}, "rollout.structured_outputs_regex"),
    "look-around": ({"structured_outputs": {"regex": "(?=x)y"}}, "rollout.structured_outputs.regex"),
    "schema": (
        {"structured_outputs": {"json": {"properties": {"a": {"type": "strin"}}}}},
        "rollout.structured_outputs.json.properties.a",
    ),
    "text": ({"structured_outputs": {"json": "{"}}, "rollout.structured_outputs.json"),
    "grammar": ({"structured_outputs": {"grammar": "start: x"}}, "rollout.structured_outputs.grammar"),
    "remainders": (
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 99_999_989}}},
        "rollout.structured_outputs.json.multipleOf",
    ),
    "without end": (
        {"structured_outputs": {"grammar": 'start: %json {"type": "integer", "multipleOf": 99999989}'}},
        "rollout.structured_outputs.grammar",
    ),
}


@pytest.mark.parametrize("form", WRONG)
def test_what_cannot_be_compiled_is_told_before_a_model_is_loaded(settings, form: str):
    asked, field = WRONG[form]
    with pytest.raises(ConfigError) as refused:
        make_plan(parse_config(settings(rollout=asked)))
    assert refused.value.field == field and refused.value.message.startswith(field)


def test_check_refuses_it_too(settings, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(to_yaml(settings(rollout={"structured_outputs_regex": "("})))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "run.yaml")])
    assert result.exit_code == 2 and "rollout.structured_outputs_regex" in result.output


def test_a_model_that_cannot_be_kept_to_it_is_refused_when_it_is_loaded(settings, monkeypatch: pytest.MonkeyPatch):
    def no_tokenizer(self: GrammarCompiler) -> None:
        raise GrammarError("this model has no fast tokenizer")

    monkeypatch.setattr(GrammarCompiler, "tokenizer", property(no_tokenizer))
    plan = make_plan(parse_config(settings(rollout={"structured_outputs_regex": "a"})))
    with raises(ConfigError) as refused:
        open_components(plan)
    assert refused.value.field == "rollout.structured_outputs_regex"


def test_an_environment_that_generates_as_it_likes_is_refused(settings):
    env = {"environment": "my_code:ThreeMethods"}
    with raises(ConfigError, field="rollout.structured_outputs_regex"):
        make_plan(parse_config(settings(env=env, rollout={"structured_outputs_regex": "a"})))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"structured_outputs": {}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"schema": {}}}, "structured_outputs.schema"),
        ({"structured_outputs": {"regex": "a"}, "structured_outputs_regex": "a"}, "structured_outputs_regex"),
    ],
)
def test_one_form_is_given(settings, asked, field):
    with raises(ConfigError, field=f"rollout.{field}"):
        parse_config(settings(rollout=asked))


@pytest.mark.parametrize("form", FORMS)
def test_the_resolved_configuration_is_the_same_run(settings, form: str):
    config = parse_config(settings(rollout=FORMS[form][0]))
    assert parse_config(YAML(typ="safe").load(dump_resolved(config))).rollout == config.rollout
    assert config.rollout.sampling().reshaped == ("grammar",)
