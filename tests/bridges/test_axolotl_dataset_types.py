"""Rows of Axolotl's dataset types, as strangers have them, in our words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.bridges.axolotl.dataset_types import (
    NAMED_TEMPLATES,
    TypeNotHere,
    example_reader,
    pair_reader,
    rows,
)
from groupwise.config.run import parse_config
from groupwise.errors import DataError
from groupwise.tasks.prompts import open_prompts
from wording import raises

ALPACA = {"instruction": "Add them.", "input": "1, 2", "output": "3"}
USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
WRONG = {"role": "assistant", "content": "3"}
SHARED = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]


def example(row: dict[str, Any], **entry: Any) -> Any:
    return example_reader({"path": "rows.jsonl", **entry})(row)


def pair(row: dict[str, Any], **entry: Any) -> Any:
    return pair_reader({"path": "rows.jsonl", **entry})(row)


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        ({"messages": [USER, ANSWER]}, {"type": "chat_template"}),
        ({"messages": json.dumps([USER, ANSWER])}, {"type": "chat_template"}),
        ({"conversations": SHARED}, {"type": "sharegpt"}),
        (
            {"conversations": SHARED, "answer": "another column"},
            {
                "type": "chat_template",
                "field_messages": "conversations",
                "message_field_role": "from",
                "message_field_content": "value",
            },
        ),
        (
            {"talk": [{"who": "asker", "what": "1 + 1?"}, {"who": "helper", "what": "2"}]},
            {
                "type": "chat_template",
                "field_messages": "talk",
                "message_property_mappings": {"role": "who", "content": "what"},
                "roles": {"user": ["asker"], "assistant": ["helper"]},
            },
        ),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]},
            {"type": "chat_template", "drop_system_message": True},
        ),
    ],
)
def test_conversations(row, entry):
    assert example(row, **entry) == {"messages": [USER, ANSWER]}


def test_what_stands_beside_a_conversation():
    system = {"role": "system", "content": "Be brief."}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"messages": [USER, ANSWER], "system": "Be brief.", "tools": tools}
    assert example(row, type="chat_template") == {"messages": [system, USER, ANSWER], "tools": tools}
    assert example({"messages": [USER]}, type="chat_template") is None  # nothing would be learned
    with pytest.raises(ValueError, match="images"):
        example({"messages": [USER, ANSWER], "images": ["a.png"]}, type="chat_template")


def test_thoughts_and_calls_stay_with_their_message():
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    turn = {"role": "assistant", "content": "2", "thinking": "1 and 1", "tool_calls": [call], "weight": 1}
    row = {"messages": [USER, turn]}
    kept = {"role": "assistant", "content": "2", "tool_calls": [call]}
    assert example(row, type="chat_template")["messages"][1] == kept
    thought = example(row, type="chat_template", field_thinking="thinking")["messages"][1]
    assert thought == kept | {"reasoning_content": "1 and 1"}


@pytest.mark.parametrize(
    ("type", "prompt"),
    [
        (
            "alpaca",
            "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
            " response that appropriately completes the request.\n\n### Instruction:\nAdd them.\n\n### Input:\n1, 2\n\n"
            "### Response:\n",
        ),
        (
            "alpaca:chat",
            "SYSTEM: Below is an instruction that describes a task, paired with an input that provides further context."
            " Write a response that appropriately completes the request.\nUSER: Add them.\n1, 2\nASSISTANT:",
        ),
        ({"format": "Q: {instruction} ({input})\nA:"}, "Q: Add them. (1, 2)\nA:"),
        ({"system_prompt": "Sums.", "system_format": "{system}\n", "field_input": "none"}, "Sums.\nAdd them. "),
    ],
)
def test_instructions_are_plain_text(type, prompt):
    assert example(ALPACA, type=type) == {"prompt": prompt, "completion": "3"}


def test_an_instruction_without_input_or_output():
    text = example(ALPACA | {"input": ""}, type="alpaca")["prompt"]
    assert text.endswith("### Instruction:\nAdd them.\n\n### Response:\n") and "paired with an input" not in text
    assert example(ALPACA | {"output": ""}, type="alpaca") is None


ASKED = {"prompt": [USER], "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("type", "row"),
    [
        ("chatml.intel", {"question": "1 + 1?", "chosen": "2", "rejected": "3", "system": ""}),
        ("llama3.icr", {"input": "1 + 1?", "chosen": "2", "rejected": "3"}),
        ("chatml.prompt_pairs", {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}),
        ("chatml", {"instruction": "1 + 1?", "chosen_response": "2", "rejected_response": "3"}),
        ("llama3.ultra", {"prompt": "1 + 1?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}),
        ("chatml.argilla_chat", {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}),
    ],
)
def test_questions_and_pairs(type, row):
    assert pair(row, type=type) == ASKED


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        ({"messages": [USER], "chosen": ANSWER, "rejected": WRONG}, {"type": "chat_template.default"}),
        ({"messages": "1 + 1?", "chosen": "2", "rejected": [WRONG]}, {"type": "chat_template.default"}),
        ({"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, {"type": "chat_template.argilla_chat"}),
        (
            {"conversation": SHARED[:1], "good": SHARED[1], "bad": {"from": "gpt", "value": "3"}},
            {
                "type": "chat_template",
                "field_messages": "conversation",
                "field_chosen": "good",
                "field_rejected": "bad",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
        ),
    ],
)
def test_conversations_and_pairs(row, entry):
    assert pair(row, **entry) == {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]}


def test_pairs_as_they_are_and_in_a_format():
    row = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3", "score": 1}
    assert pair(row) == {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    own = {"field_prompt": "q", "field_chosen": "a", "field_rejected": "b", "prompt_format": "Q: {prompt}\nA:"}
    assert pair({"q": "1?", "a": "2", "b": "3"}, type=own) == {"prompt": "Q: 1?\nA:", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("reader", "type"),
    [
        (example_reader, None),
        (example_reader, "completion"),
        (example_reader, "alpaca:other"),
        (example_reader, {"format": "{question}"}),
        (example_reader, {"fromat": "{instruction}"}),
        (pair_reader, "zephyr.nectar"),
        (pair_reader, "chatml.other"),
        (pair_reader, "my_module.transform"),
        (pair_reader, {"chosen_format": "{chosen}<|im_end|>"}),
    ],
)
def test_other_types_are_said_to_be_none(reader, type):
    with raises(TypeNotHere):
        reader({"path": "rows.jsonl", "type": type})


def test_rows_of_a_file_are_a_source_and_a_bad_one_is_named(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [ALPACA, ALPACA | {"output": ""}, ALPACA])))
    assert len(list(rows(kind="sft", dataset={"path": "rows.jsonl", "type": "alpaca"}, folder=str(tmp_path)))) == 2
    source = "groupwise.bridges.axolotl.dataset_types:rows"
    data = {"source": source, "args": {"kind": "sft", "dataset": {"path": "rows.jsonl", "type": "alpaca"}}, "raw": True}
    config = parse_config({"kind": "sft", "data": data})
    assert config.data is not None
    first = open_prompts(config.data, folder=tmp_path, kind="sft").known[0]
    assert first.text is not None and first.text.endswith("### Response:\n") and first.answer[0].get("content") == "3"
    with raises(DataError):
        list(rows(kind="dpo", dataset={"path": "rows.jsonl", "type": "chatml.intel"}, folder=str(tmp_path)))


def test_the_templates_render_what_the_types_write():
    import jinja2

    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + 1? "}]
    chatml, llama3 = (
        jinja2.Template(NAMED_TEMPLATES[name]).render(messages=turns, add_generation_prompt=True, bos_token="<s>")
        for name in ("chatml", "llama3")
    )
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n 1 + 1? <|im_end|>\n<|im_start|>assistant\n"
    assert chatml == head
    said = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
    ends = [said.format(role, f"{text}<|eot_id|>") for role, text in (("system", "Be brief."), ("user", "1 + 1?"))]
    assert llama3 == "<s>" + "".join(ends) + said.format("assistant", "")
