"""The dataset's own answers: what of a row is the answer, and which tokens are learned."""

import copy
import dataclasses
from itertools import pairwise

import pytest

from groupwise.config.data import DatasetConfig
from groupwise.errors import ChatError, DataError
from groupwise.model.chat import decode, encode_prompt
from groupwise.model.load import load_tokenizer
from groupwise.tasks.answers import answer_turns
from groupwise.tasks.prompts import to_example
from groupwise.types import Prompt
from template_families import OTHERS
from wording import raises

ASKED = {"role": "user", "content": "What is 4+5?"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "4+5"}}}],
}
RESULT = {"role": "tool", "content": "9"}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


def nine(content: str = "9") -> dict[str, str]:
    return {"role": "assistant", "content": content}


def example(row, **options) -> Prompt:
    return to_example(row, id="rows.jsonl:1", config=DatasetConfig(source="rows.jsonl", **options))


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": "What is 4+5?", "completion": "9"}, {}),  # TRL's prompt-completion
        ({"prompt": [ASKED], "completion": [nine()]}, {}),
        ({"prompt": "What is 4+5?", "answer": 9}, {}),
        ({"question": "What is 4+5?", "response": "9"}, {"prompt_key": "question"}),
        ({"prompt": "What is 4+5?", "gold": nine(), "answer": "no"}, {"answer_key": "gold"}),
        ({"messages": [ASKED, nine()]}, {}),  # TRL's and OpenAI's conversations
        ({"messages": [ASKED, nine()], "answer": "the number"}, {}),
        ({"messages": [ASKED, nine(), {"role": "user", "content": "Thanks"}]}, {}),
    ],
)
def test_the_answer_of_a_row(row, options):
    prompt = example(row, **options)
    assert [dict(message) for message in prompt.messages or ()] == [ASKED]
    assert [dict(message) for message in prompt.answer] == [nine()]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": "2+2"}, {}),
        ({"prompt": "2+2", "answer": "4"}, {"answer_key": "gold"}),
        ({"prompt": "2+2", "answer": " "}, {}),
        ({"prompt": "2+2", "answer": [ASKED]}, {}),
        ({"prompt": "2+2", "answer": []}, {}),
        ({"messages": [ASKED]}, {}),
        ([1], {}),
    ],
)
def test_a_row_without_one_is_named(row, options):
    with raises(DataError):
        example(row, **options)


def learned(row, **options) -> tuple[str, list[str]]:
    """What the first learned token is conditioned on, and the learned texts."""
    tokenizer = load_tokenizer("starter")
    prompt = encode_prompt(example(row, **options), tokenizer)
    turns = answer_turns(prompt, tokenizer)
    texts = [decode(turn.completion.token_ids, tokenizer, ends=()) for turn in turns]
    for before, after in pairwise(turns):  # one goes on from the other
        whole = (*before.prompt_ids, *before.completion.token_ids)
        assert after.prompt_ids[: len(whole)] == whole
    return decode(turns[0].prompt_ids, tokenizer, ends=()), texts


def test_a_text_follows_the_prompt_as_a_completion_would():
    before, texts = learned({"prompt": "What is 4+5?", "answer": "9"})
    assert before.endswith("<|im_start|>assistant\n") and texts == ["9<|im_end|>"]


def test_calls_and_later_turns_are_learned_and_what_others_say_is_not():
    row = {"messages": [ASKED, CALL, RESULT, nine(), ASKED, nine("Still 9.")], "tools": [TOOL]}
    before, texts = learned(row)
    assert before.endswith("<|im_start|>assistant\n") and "calculator" in before
    assert len(texts) == 3 and texts[0].startswith("<tool_call>") and texts[1:] == ["9<|im_end|>", "Still 9.<|im_end|>"]


def test_what_the_assistant_said_in_the_prompt_is_not_learned():
    row = {"prompt": [ASKED, nine("5"), {"role": "user", "content": "Sure?"}], "completion": [CALL, RESULT, nine()]}
    before, texts = learned(row)
    assert "5<|im_end|>" in before and len(texts) == 2 and texts[1] == "9<|im_end|>"


def test_a_thought_that_the_prompt_has_opened_is_not_opened_again():
    row = {"prompt": [ASKED, nine("<think>\n")], "answer": "<think>\n4+5=9\n</think>\n\n9"}
    before, texts = learned(row)
    assert before.endswith("<think>\n") and texts == ["4+5=9\n</think>\n\n9<|im_end|>"]


def test_a_thought_between_marks_of_the_models_own_is_not_opened_again_either():
    tokenizer = copy.deepcopy(load_tokenizer("starter"))
    tokenizer.chat_template = OTHERS["gemma 4"].source
    opened = tuple(tokenizer.encode("<|channel>thought\n", add_special_tokens=False))
    prompt = dataclasses.replace(
        example({"prompt": "4+5=", "answer": "<|channel>thought\nHm.<channel|>9"}), token_ids=opened
    )
    (turn,) = answer_turns(prompt, tokenizer)
    assert decode(turn.completion.token_ids, tokenizer, ends=()).startswith("Hm.<channel|>9")


def test_plain_text_is_continued_and_ended():
    before, texts = learned({"prompt": "4+5=", "answer": "9"}, raw=True)
    assert before.endswith("4+5=") and texts == ["9<|im_end|>"]


def test_a_call_with_an_empty_text_is_learned_as_one_without():
    """Many servers and datasets write "" there."""
    rows = [{"prompt": [ASKED], "completion": [call], "tools": [TOOL]} for call in (CALL, {**CALL, "content": ""})]
    assert learned(rows[0]) == learned(rows[1])


@pytest.mark.parametrize("row", [{"prompt": "4+5="}, {"prompt_token_ids": [1, 2, 3]}])
def test_an_answer_of_several_messages_is_not_learned_without_its_prompt(row):
    """A text and token ids are no messages that a template could render in front of it."""
    tokenizer = load_tokenizer("starter")
    prompt = encode_prompt(example(row | {"completion": [CALL, RESULT, nine()]}, raw="prompt" in row), tokenizer)
    with raises(ChatError):
        answer_turns(prompt, tokenizer)
