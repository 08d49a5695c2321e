"""Rows as ShareGPT, Alpaca and others write them, and columns under other names."""

import json
import re
from pathlib import Path

import pytest

from groupwise.config.data import DataConfig
from groupwise.errors import DataError
from groupwise.tasks.prompts import open_prompts
from wording import raises

PAGE = (Path(__file__).parent.parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
HUMAN = {"from": "human", "value": "What is 4+5?"}
GPT = {"from": "gpt", "value": "9"}
USER = {"role": "user", "content": "What is 4+5?"}
NINE = {"role": "assistant", "content": "9"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture
def read(tmp_path):
    """`read(row, kind=..., **data)`: the prompt that comes of one row in a file."""

    def opened(row, *, kind="grpo", name="rows.jsonl", text=None, **data):
        (tmp_path / name).write_text(json.dumps(row) if text is None else text)
        config = DataConfig(source=name, **data)
        (prompt,) = open_prompts(config, folder=tmp_path, kind=kind).known
        return prompt

    return opened


def plain(messages):
    return [dict(message) for message in messages or ()]


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"question": "What is 4+5?", "label": "9"}, {"columns": {"prompt": "question", "answer": "label"}}),
        ({"q": [USER], "answer": "9"}, {"columns": {"prompt": "q"}}),
        ({"conversations": [HUMAN, GPT]}, {}),
        ({"conversations": [HUMAN, GPT]}, {"prompt_key": "conversations"}),
        ({"chat": [HUMAN, GPT]}, {"columns": {"conversations": "chat"}}),
        ({"conversations": [USER, NINE]}, {}),
        ({"instruction": "What is 4+5?", "input": "", "output": "9"}, {}),
        ({"instruction": "What is 4+5?", "input": None, "output": "9"}, {}),
        ({"conversations": [HUMAN], "completion": [GPT]}, {}),
        ({"prompt": "What is 4+5?", "completion": GPT}, {}),
        ({"prompt": "What is 4+5?", "said": [GPT]}, {"answer_key": "said"}),
    ],
)
def test_examples_of_every_form_come_to_the_same(read, row, data):
    prompt = read(row, kind="sft", **data)
    assert plain(prompt.messages) == [USER] and plain(prompt.answer) == [NINE]


def test_names_are_those_that_rewards_get(read):
    prompt = read({"q": "What is 4+5?", "label": "9", "kept": 1}, columns={"prompt": "q", "answer": "label"})
    assert plain(prompt.messages) == [USER] and prompt.columns == {"answer": "9", "kept": 1}


def test_a_csv_has_columns_too(read):
    prompt = read(None, name="rows.csv", text="question,label\nWhat is 4+5?,009\n", columns={"prompt": "question"})
    assert plain(prompt.messages) == [USER] and prompt.columns == {"label": "009"}


def test_an_instruction_with_an_input_is_one_prompt(read):
    prompt = read({"instruction": "Add.", "input": "4, 5", "output": "9"})
    assert plain(prompt.messages) == [{"role": "user", "content": "Add.\n\n4, 5"}] and prompt.columns == {"output": "9"}


def test_sharegpt_has_a_system_message_tools_and_other_speakers(read):
    row = {
        "system": "Be brief.",
        "tools": json.dumps(TOOLS),
        "conversations": [
            HUMAN,
            {"from": "function_call", "value": '{"name": "add"}'},
            {"from": "observation", "value": "9"},
            {"from": "gpt", "value": "9"},
        ],
    }
    prompt = read(row, kind="sft")
    assert plain(prompt.messages) == [{"role": "system", "content": "Be brief."}, USER] and list(prompt.tools) == TOOLS
    assert [message["role"] for message in prompt.answer] == ["assistant", "tool", "assistant"]


def test_a_prompt_of_its_own_is_kept(read):
    row = {"prompt": "What is 4+5?", "instruction": "no", "output": "no", "conversations": [HUMAN], "answer": "9"}
    prompt = read(row)
    assert plain(prompt.messages) == [USER] and prompt.columns["instruction"] == "no"


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"question": "a"}, {"columns": {"prompt": "qestion"}}),
        ({"prompt": "a", "tools": "[{"}, {}),
        ({"conversations": [{"from": "alien", "value": "a"}]}, {}),
        ({"conversations": [HUMAN, GPT]}, {}),
        ({"conversations": [{"from": "human"}]}, {}),
    ],
)
def test_what_cannot_be_read_names_the_row(read, row, data):
    with raises(DataError):
        read(row, **data)


@pytest.mark.parametrize(("number", "kind"), enumerate(("grpo", "sft", "dpo")))
def test_the_rows_of_the_page_are_read(read, number, kind):
    """The first block is of rows to learn from by rewards, the second of rows to imitate, the third of pairs."""
    block = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[number]
    for line in block.splitlines():
        prompt = read(None, text=line, kind=kind)
        said = plain(prompt.answer)[-1]["content"] if number else prompt.columns["answer"]
        assert said == "85"
