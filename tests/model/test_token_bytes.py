"""A text that is joined from the bytes of tokens is the text that `tokenizers` decodes, whatever the tokens are."""

from __future__ import annotations

import copy
import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from groupwise.model.chat import decode, stopped_text
from groupwise.model.token_bytes import _bytes_of_characters, token_bytes
from groupwise.types import SamplingParams
from tiny_tokenizer import starter_tokenizer

SPECIAL = ["<é|>", "<|x y|>", "Ġ"]  # one with characters that stand for no byte, one with a space, one byte's


def bytes_tokenizer(decoder: decoders.Decoder | None = None) -> PreTrainedTokenizerFast:
    """A token for each byte, and some special ones behind."""
    vocabulary = dict(_bytes_of_characters())
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoder or decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def slowly(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def test_every_byte_has_a_character():
    assert sorted(_bytes_of_characters().values()) == list(range(256))


def test_any_bytes_are_the_text_that_is_decoded():
    """Parts of characters, parts that are none, ids that there are not."""
    tokenizer, draw = bytes_tokenizer(), random.Random(0)
    known = token_bytes(tokenizer)
    assert known is not None
    kinds = [(0, 256), (0xC0, 256), (0x80, 0xC0), (250, 256 + len(SPECIAL) + 2)]
    for _ in range(20_000):
        ids = [draw.randrange(*draw.choice(kinds)) for _ in range(draw.randrange(9))]
        assert known.text(ids) == slowly(ids, tokenizer), ids


def test_words_of_the_starter_are_the_text_that_is_decoded():
    tokenizer, draw = starter_tokenizer(), random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(60))]
        assert decode(ids, tokenizer, ends=()) == slowly(ids, tokenizer)


def test_a_token_that_is_added_later_is_known():
    tokenizer = bytes_tokenizer()
    new, known = 256 + len(set(SPECIAL) - {"Ġ"}), token_bytes(tokenizer)
    assert known is not None and known.text([new]) == ""
    tokenizer.add_tokens(["later"])
    assert known.text([new]) == slowly([new], tokenizer) == "later"


def test_a_copy_has_its_own():
    tokenizer = bytes_tokenizer()
    token_bytes(tokenizer)
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["later"])
    assert token_bytes(other) is not token_bytes(tokenizer) and decode([len(other) - 1], other, ends=()) == "later"


def test_others_are_decoded_as_they_decode():
    sentences = bytes_tokenizer(decoders.Metaspace())
    assert token_bytes(sentences) is None and decode([65, 66], sentences, ends=()) == slowly([65, 66], sentences)

    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args, **options) -> str:
            return "its own"

    own = Own(tokenizer_object=bytes_tokenizer().backend_tokenizer)
    assert token_bytes(own) is None and decode([65], own, ends=()) == "its own"


@pytest.mark.parametrize("stop", [(), ("B",)])
def test_without_stop_strings_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]):
    tokenizer, asked = bytes_tokenizer(), list[int]()
    known = token_bytes(tokenizer)
    assert known is not None
    monkeypatch.setattr(type(known), "text", lambda self, ids: (asked.append(len(ids)), "AB")[1])
    assert stopped_text((65, 66), SamplingParams(stop=stop), tokenizer) == ("A" if stop else None)
    assert bool(asked) == bool(stop)
