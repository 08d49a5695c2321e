"""Preference pairs: the forms in which they are written, and what of a row is the prompt."""

from __future__ import annotations

import json

import pytest

from groupwise.config.data import DataConfig
from groupwise.errors import DataError
from groupwise.model.chat import encode_prompt
from groupwise.model.load import load_tokenizer
from groupwise.tasks.answers import answer_turns
from groupwise.tasks.prompts import open_prompts
from groupwise.types import Prompt

ASKED = {"role": "user", "content": "What is 4+5?"}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN = {"from": "human", "value": "What is 4+5?"}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def gpt(content: str) -> dict[str, str]:
    return {"from": "gpt", "value": content}


def opened(row, tmp_path, **data) -> Prompt:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    (prompt,) = open_prompts(DataConfig(source="pairs.jsonl", **data), folder=tmp_path, kind="dpo").known
    return prompt


def plain(messages):
    return [dict(each) for each in messages or ()]


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"prompt": "What is 4+5?", "chosen": "9", "rejected": "8"}, {}),
        ({"prompt": [ASKED], "chosen": [said("9")], "rejected": [said("8")]}, {}),
        ({"prompt": [ASKED], "chosen": said("9"), "rejected": said("8")}, {}),
        ({"messages": [ASKED], "chosen": said("9"), "rejected": said("8")}, {}),
        ({"chosen": [ASKED, said("9")], "rejected": [ASKED, said("8")]}, {}),
        ({"prompt": "What is 4+5?", "chosen": [ASKED, said("9")], "rejected": [ASKED, said("8")]}, {}),
        (
            {
                "prompt": "?",
                "messages": [ASKED, said("9")],
                "chosen": [ASKED, said("9")],
                "rejected": [ASKED, said("8")],
            },
            {},
        ),
        ({"conversations": [HUMAN], "chosen": gpt("9"), "rejected": gpt("8")}, {}),
        ({"instruction": "What is 4+5?", "input": "", "chosen": "9", "rejected": "8"}, {}),
        ({"prompt": "What is 4+5?", "chosen": 9, "rejected": 8}, {}),  # as a CSV has them
        ({"question": "?", "chosen": [ASKED, said("9")], "rejected": [ASKED, said("8")]}, {"prompt_key": "question"}),
        ({"question": "What is 4+5?", "chosen": "9", "rejected": "8"}, {"prompt_key": "question"}),
        (
            {"q": "What is 4+5?", "good": "9", "bad": "8"},
            {"columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
        ),
    ],
)
def test_pairs_of_every_form_come_to_the_same(row, data, tmp_path):
    prompt = opened(row, tmp_path, **data)
    assert plain(prompt.messages) == [ASKED]
    assert plain(prompt.answer) == [said("9")] and plain(prompt.rejected) == [said("8")]
    assert not {"chosen", "rejected"} & prompt.columns.keys()


def test_texts_without_a_prompt_begin_with_it(tmp_path):
    """As TRL has it: the space before the first word that differs is the word's."""
    prompt = opened({"chosen": "The sky is blue.", "rejected": "The sky is green."}, tmp_path)
    assert (prompt.text, prompt.messages) == ("The sky is", None)
    assert plain(prompt.answer) == [said(" blue.")] and plain(prompt.rejected) == [said(" green.")]


def test_what_both_conversations_have_in_common_is_the_prompt(tmp_path):
    whole = [SYSTEM, ASKED, said("9"), {"role": "user", "content": "Sure?"}]
    row = {"chosen": [*whole, said("Yes")], "rejected": [*whole, said("No")]}
    prompt = opened(row, tmp_path)
    assert plain(prompt.messages) == whole and plain(prompt.answer) == [said("Yes")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4"},
        {"prompt": "2+2", "rejected": "5"},
        {"prompt": "2+2", "chosen": "4", "rejected": [said("5")]},
        {"prompt": "2+2", "chosen": "4", "rejected": " "},
        {"chosen": "4", "rejected": "5"},
        {"chosen": [said("4")], "rejected": [said("5")]},
        {"chosen": [ASKED, said("9")], "rejected": [SYSTEM, said("8")]},
        {"chosen": [ASKED, said("9")], "rejected": [ASKED]},
        {"chosen": [ASKED, said("9")], "rejected": [ASKED, said("9")]},
        {"chosen": "The sky", "rejected": "The sky is green."},
        {"prompt": [ASKED], "chosen": [], "rejected": [said("8")]},
        {"prompt": [ASKED], "chosen": [{"role": "judge", "content": "9"}], "rejected": [said("8")]},
    ],
)
def test_what_is_no_pair_is_refused_by_its_row(row, tmp_path):
    with pytest.raises(DataError, match=r"^pairs\.jsonl:1: "):
        opened(row, tmp_path)


def test_both_completions_follow_the_prompt_as_what_is_sampled_does(tmp_path):
    tokenizer = load_tokenizer("starter")
    prompt = encode_prompt(opened({"prompt": "What is 4+5?", "chosen": "9", "rejected": "81"}, tmp_path), tokenizer)
    for answer in (prompt.answer, prompt.rejected):
        (turn,) = answer_turns(Prompt(**{**vars(prompt), "answer": answer}), tokenizer)
        assert turn.prompt_ids == prompt.token_ids and turn.completion.text == answer[0].get("content")
        assert turn.completion.token_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
