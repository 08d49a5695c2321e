"""docs/rewards.md: every example runs, every row of the table is a reward with these options."""

from __future__ import annotations

import asyncio
import doctest
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from groupwise.config.load import load_object
from groupwise.config.run import parse_config
from groupwise.rewards.base import load_rewards, score, summarize
from groupwise.rewards.catalogue import functions_in
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from judge_peer import Said, judges

PAGE = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TABLE = re.findall(r"^\| `(\w+:\w+)` \| (.*?) \| (.*?) \| (.*?)\|$", PAGE, re.MULTILINE)
GIVEN = {"completions", "answer", "prompts", "completion_ids", "columns"}  # by the loop, not by the user
WIRING = {"folder", "log_metric", "trainer_state"}


def blocks(language: str) -> list[str]:
    return [block for kind, block in BLOCKS if kind == language]


def reference(row: str) -> str:
    return f"groupwise.rewards.{row}"


# ---- the table ----


def test_the_table_has_every_reward():
    modules = ("text", "math", "format", "length", "ensemble", "classifier", "judge", "group_judge")
    there = {each for module in modules for each in functions_in(reference(module))}
    assert {reference(row) for row, *_ in TABLE} == there


@pytest.mark.parametrize(("row", "options"), [(row, options) for row, _, options, _ in TABLE])
def test_its_options_are_those_of_the_function(row, options):
    parameters = set(inspect.signature(load_object(reference(row))).parameters)
    assert set(re.findall(r"`(\w+)`", options)) == parameters - GIVEN - WIRING


# ---- the examples ----


def test_there_are_examples():
    assert {kind for kind, _ in BLOCKS} == {"python", "yaml", "pycon"}
    assert len(blocks("yaml")) >= 6 and len(blocks("pycon")) >= 5


@pytest.mark.parametrize("block", blocks("pycon"))
def test_sessions(block):
    test = doctest.DocTestParser().get_doctest(block, {}, "rewards.md", None, None)
    assert test.examples
    shown: list[str] = []
    assert doctest.DocTestRunner().run(test, out=shown.append).failed == 0, "".join(shown)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration's folder, with the module of the first example."""
    (module,) = blocks("python")
    assert module.startswith("# my_rewards.py")
    (tmp_path / "my_rewards.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judge() -> Iterator[str]:
    """The URL of a judge that gives everything a 5."""

    def fives(body: dict[str, Any], before: int) -> Said:
        count = len(re.findall(r"^--- reply \d+ ", body["messages"][1]["content"], re.MULTILINE))
        return Said(json.dumps({"reason": "so so", "score": 5, "scores": [5] * count}))

    with judges() as start:
        yield start(fives).url


@pytest.fixture
def reward_model(tokenizer, tmp_path: Path) -> str:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(Qwen3Config(**sizes, **heads, **ids))
    model.save_pretrained(tmp_path / "reward-model")
    tokenizer.save_pretrained(tmp_path / "reward-model")
    return str(tmp_path / "reward-model")


def rollout(text: str) -> Rollout:
    ids = tuple(range(len(text.split())))
    completion = Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), text=text, finish_reason=FinishReason.STOP)
    return Rollout(turns=(Turn((1,), completion),))


RIGHT, WRONG = "<think>\n6 * 7\n</think>\n\\boxed{42}", "<think>\n6 * 7\n</think>\n\\boxed{41}"


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: re.findall(r":(\w+)", block)[0])
def test_configurations(block, folder, judge, reward_model):
    config = parse_config({"data": {"source": "prompts.jsonl"}, **YAML(typ="safe").load(block)})
    specs = []
    for spec in config.rewards:  # the servers and models that this machine has
        here = {"base_url": judge} if "judge" in spec.function else {"model": reward_model, "device": "cpu"}
        needs_it = spec.function.endswith(("judge", ":reward_model"))
        specs.append(spec.model_copy(update={"args": {**spec.args, **here}}) if needs_it else spec)
    functions = load_rewards(specs, folder=folder)
    prompt = Prompt(id="p/1", messages=({"role": "user", "content": "What is 6 * 7?"},), columns={"answer": "42"})
    texts = ("42", "41") if "my_rewards" in block else (RIGHT, WRONG)
    (group,) = asyncio.run(score([RolloutGroup(prompt=prompt, rollouts=tuple(map(rollout, texts)))], functions))
    assert summarize([group]).failed == 0, summarize([group]).first_cause
    right, wrong = (each.reward for each in group.rollouts)
    assert right is not None and wrong is not None
    if any(each.function.endswith("judge") for each in specs):
        assert (right, wrong) == (0.5, 0.5)
    elif any(each.function.endswith(":reward_model") for each in specs):
        assert right != wrong
    else:
        assert right > wrong


def test_the_runs_that_game_a_reward_are_those_that_were_recorded():
    """The table of docs/rewards.md, from what benchmarks/hacking.py wrote; and what the text says of all of them."""
    recorded = json.loads((Path(__file__).parent.parent / "docs" / "hacking.json").read_text(encoding="utf-8"))
    for name, run in recorded["runs"].items():
        way, seed = name.replace("gameable", "`mentions`").replace("mended", "`right`").split(", ")
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {way}, {seed} |"))
        for values, digits in ((run["trained_by"], 2), (run["right"], 2), (run["length"], 1)):
            first, *_, last = values.values()
            assert f"| {first:.{digits}f} → {last:.{digits}f} |" in row
        first = next(iter(run["found"]))
        gamed = name.startswith("gameable")
        assert first.startswith("reward.gamed") == gamed and ("| 15 | 10 (" in row) == gamed
    assert any("'prompt copied'" in each for each in recorded["before"]["check"])
    assert sum("'every candidate'" in each or "'prompt copied'" in each for each in recorded["before"]["lint"]) == 2
