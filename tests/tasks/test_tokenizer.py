"""The starter's tokenizer: bytes, digits, markers, saving, and its chat template."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from groupwise.tasks.starter.tasks import CALCULATOR, supervised_conversations
from groupwise.tasks.starter.tokenizer import MARKERS, SPECIAL_TOKENS, build_tokenizer, render
from wording import raises

TEXTS = [render(c["messages"], tools=c["tools"]) for c in supervised_conversations(0, 1000)]
TOKENIZER = build_tokenizer(TEXTS, vocab_size=640)
PLAIN = [{"role": "user", "content": "2+2="}]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_the_vocabulary_is_filled_and_ends_with_the_added_tokens():
    assert len(TOKENIZER) == 640
    assert TOKENIZER.convert_tokens_to_ids([*SPECIAL_TOKENS, *MARKERS]) == list(range(631, 640))
    assert TOKENIZER.eos_token == "<|im_end|>" and TOKENIZER.pad_token == "<|endoftext|>"


def test_a_vocabulary_below_the_bytes_is_refused():
    with raises(ValueError):
        build_tokenizer(TEXTS, vocab_size=200)


@settings(max_examples=100)
@given(st.text())
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(ids_of(text), clean_up_tokenization_spaces=False) == text


def test_every_byte_is_a_token():
    # Between them these characters use every byte that UTF-8 can contain.
    wide = (*range(0x800, 0xD800, 64), *range(0xE000, 0x10000, 64), *range(0x10000, 0x110000, 4096))
    characters = [chr(code) for code in (*range(0x800), *wide)]
    for character in characters:
        assert TOKENIZER.decode(ids_of(character), clean_up_tokenization_spaces=False) == character
    used = {byte for character in characters for byte in character.encode()}
    assert used == set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}


def test_digits_are_single_tokens_everywhere():
    for text in ("47+138=185", "What is 4713?", "<answer>1000000</answer>", "a1b22c333"):
        digits = [token for token in TOKENIZER.tokenize(text) if any(character.isdigit() for character in token)]
        assert digits == [character for character in text if character.isdigit()]


def test_markers_are_tokens_and_only_the_first_three_are_special():
    for marker in MARKERS:
        assert len(ids_of(marker)) == 1
        assert TOKENIZER.decode(ids_of(marker), skip_special_tokens=True) == marker
    for special in SPECIAL_TOKENS:
        assert TOKENIZER.decode(ids_of(special), skip_special_tokens=True) == ""
        assert len(TOKENIZER.encode(special, add_special_tokens=False, split_special_tokens=True)) > 1


def test_equal_texts_give_an_equal_tokenizer_and_it_survives_saving(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    again = build_tokenizer(TEXTS, vocab_size=640)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert [loaded.encode(text) for text in TEXTS[:50]] == [TOKENIZER.encode(text) for text in TEXTS[:50]]
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.eos_token, loaded.pad_token, loaded.get_vocab()) == (
        "<|im_end|>",
        "<|endoftext|>",
        again.get_vocab(),
    )


# ---- the chat template ----
def apply(messages, **options) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)


def test_a_conversation_renders_as_chatml_without_a_default_system_message():
    why = {"role": "user", "content": [{"type": "text", "text": "Why?"}]}
    turns = [*PLAIN, {"role": "assistant", "content": "4"}, why]
    first = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    last = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert apply(turns, add_generation_prompt=True) == first + last
    system = {"role": "system", "content": "Be brief."}
    assert apply([system, *turns[:2]]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + first
    assert render(turns) == apply(turns)


def test_tools_calls_and_results_render():
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+2"}}}
    as_string = {"function": {"name": "calculator", "arguments": '{"expression": "2+2"}'}}
    tool = {"role": "tool", "content": "4"}
    chat = [*PLAIN, {"role": "assistant", "content": "", "tool_calls": [call, as_string]}, tool, tool]
    text = apply(chat, tools=[CALCULATOR], add_generation_prompt=True)
    block = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
    result = "\n<tool_response>\n4\n</tool_response>"
    assert text == (
        f"<|im_start|>system\n# Tools\n{json.dumps(CALCULATOR['function'])}<|im_end|>\n"
        "<|im_start|>user\n2+2=<|im_end|>\n"
        f"<|im_start|>assistant\n{block}\n{block}<|im_end|>\n<|im_start|>user{result}{result}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    assert apply([system, *PLAIN], tools=[CALCULATOR]).startswith("<|im_start|>system\nBe brief.\n\n# Tools\n{")


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_a_conversation_only_grows(options):
    thought = "<think>\n2+2=4\n</think>\n\n4"
    replies = [{"role": "assistant", "content": content} for content in ("4", thought, "<tool_call>\nno\n</tool_call>")]
    chat = [message for reply in replies for message in (*PLAIN, reply)]
    whole = apply(chat, **options)
    assert thought in whole
    for end in range(1, len(chat) + 1):
        assert whole.startswith(apply(chat[:end], **options))
    for turn in (1, 5):
        before = apply(chat[:turn], add_generation_prompt=True, **options)
        assert whole.startswith(before + chat[turn]["content"] + "<|im_end|>\n")


def test_thinking_off_opens_the_turn_with_an_empty_thought():
    assert apply(PLAIN, add_generation_prompt=True, enable_thinking=False).endswith(
        "assistant\n<think>\n\n</think>\n\n"
    )
