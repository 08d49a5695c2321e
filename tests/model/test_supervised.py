"""What of a conversation is trained where the chat template begins the reply itself, as models that think have it."""

from __future__ import annotations

from itertools import groupby

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from groupwise.errors import ChatError
from groupwise.model.chat import decode, encode_completion, encode_prompt, opens_thought, stop_ids
from groupwise.model.reply_formats.known import format_of
from groupwise.model.supervised import encode_supervised
from groupwise.types import Message, Prompt
from serving import starter
from template_families import FAMILIES, tokenizer_of
from template_families import OTHERS as OTHER_FAMILIES
from wording import raises

ASK = Message(role="user", content="2+2=")
TURN = "<|im_start|>{{ m.role }}\n"
WITH_THOUGHT = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}<|im_end|>"
OTHERS = "{{ m.content }}<|im_end|>"
PLAIN = "<|im_start|>assistant\n"


def template(*, own: str, opening: str, marked: bool = True) -> str:
    said = f"{{% generation %}}{own}{{% endgeneration %}}" if marked else own
    turn = f"{TURN}{{% if m.role == 'assistant' %}}{said}{{% else %}}{OTHERS}{{% endif %}}\n"
    ask = f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{ask}"


def tokenizer(text: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(starter().tokenizer.backend_tokenizer.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = text
    return made


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("own", "opening", "trained"),
    [
        (WITH_THOUGHT, f"{PLAIN}<think>\n", "easy\n</think>\n\n4<|im_end|>"),
        (WITH_THOUGHT, f"{PLAIN}<think>", "\neasy\n</think>\n\n4<|im_end|>"),
        (WITH_THOUGHT, PLAIN, "<think>\neasy\n</think>\n\n4<|im_end|>"),
        (OTHERS, PLAIN, "4<|im_end|>"),
    ],
)
def test_what_the_prompt_begins_is_not_trained(own: str, opening: str, trained: str, marked: bool) -> None:
    of = tokenizer(template(own=own, opening=opening, marked=marked))
    reply = Message(role="assistant", content="4", reasoning_content="easy")  # type: ignore[typeddict-unknown-key]
    sample = encode_supervised([ASK, reply], of)
    assert sample.prompt_ids == encode_prompt(Prompt(id="p", messages=(ASK,)), of).token_ids
    said = [token for token, mine in zip(sample.completion_ids, sample.mask, strict=True) if mine]
    assert of.decode(said) == trained and said[0] == sample.completion_ids[0]


def test_every_turn_is_trained_behind_what_the_prompt_begins() -> None:
    of = tokenizer(template(own=WITH_THOUGHT, opening=f"{PLAIN}<think>\n"))
    replies = [Message(role="assistant", content=text) for text in ("4", "5")]
    sample = encode_supervised([ASK, replies[0], ASK, replies[1]], of)
    said = [token for token, mine in zip(sample.completion_ids, sample.mask, strict=True) if mine]
    assert of.decode(said) == "\n</think>\n\n4<|im_end|>\n</think>\n\n5<|im_end|>"


def test_a_turn_that_does_not_begin_so_is_trained_whole() -> None:
    """As in history from which the template takes the thoughts."""
    of = tokenizer(template(own=OTHERS, opening=f"{PLAIN}<think>\n"))
    sample = encode_supervised([ASK, Message(role="assistant", content="4")], of)
    assert of.decode(list(sample.completion_ids)).startswith("4<|im_end|>") and sample.mask[0] == 1


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("deepseek v3.1", ["<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "So.<｜end▁of▁sentence｜>"]),
        ("kimi", ["<|tool_calls_section_end|><|im_end|>", "So.<|im_end|>"]),
        ("lfm2", ["<|tool_call_end|><|im_end|>", "So.<|im_end|>"]),
        ("gpt-oss", ["<|call|>", "So.<|return|>"]),
        ("glm", ["</tool_call><|observation|>", "So.<|user|>"]),  # the token of who speaks next ends a turn
        ("mistral", ["]</s>", "So.</s>"]),
    ],
)
def test_the_end_of_a_turn_is_behind_its_calls(name: str, ends: list[str]) -> None:
    """What closes the calls is a special token of some, and not what ends the turn."""
    made = tokenizer_of(name)
    call = {"id": format_of(made).call_id(0), "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        ASK,
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="4", tool_call_id=str(call["id"]), name="f"),
        Message(role="assistant", content="So."),
    ]
    sample = encode_supervised(messages, made)
    runs = groupby(zip(sample.completion_ids, sample.mask, strict=True), key=lambda pair: pair[1])
    turns = [made.decode([token for token, _ in run]) for said, run in runs if said]
    assert [turn.endswith(end) for turn, end in zip(turns, ends, strict=True)] == [True, True]


@pytest.mark.parametrize("name", [*FAMILIES, *OTHER_FAMILIES])
def test_the_last_turn_ends_as_a_completion_does(name: str) -> None:
    """Also where the template closes it only by the next role's token, or by none: it would never learn to stop."""
    made = tokenizer_of(name)
    try:
        sample = encode_supervised([ASK, Message(role="assistant", content="4")], made)
    except ChatError:  # an answer without a thought, where the prompt opens one
        assert opens_thought(encode_prompt(Prompt(id="p", messages=(ASK,)), made).token_ids, made)
        return
    assert sample.completion_ids[-1] in stop_ids(made) and sample.mask[-1] == 1
    assert encode_completion(Prompt(id="p", messages=(ASK,)), "4", made)[-1] == sample.completion_ids[-1]


def test_a_call_that_is_the_last_turn_ends_with_who_answers_it() -> None:
    made = tokenizer_of("glm")
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    sample = encode_supervised([ASK, Message(role="assistant", content="", tool_calls=[call])], made)
    assert decode(sample.completion_ids, made, ends=()).endswith("</tool_call><|observation|>") and sample.mask[-1] == 1


@pytest.mark.parametrize("name", ["gemma", "no special tokens"])
def test_calls_that_a_template_leaves_out_are_refused(name: str) -> None:
    """A turn of no words would be learned in their place; the definition of a tool is not its call."""
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    with raises(ChatError):
        encode_supervised([ASK, Message(role="assistant", content="", tool_calls=[call])], tokenizer_of(name))
