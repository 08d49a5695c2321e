"""A stop string that ends inside a token: the text is cut there, the token stays whole, in every path alike."""

from __future__ import annotations

from contextlib import closing

import pytest

from groupwise.engine.local import LocalEngine
from groupwise.model.chat import encode_prompt
from groupwise.tasks.reply import TextStream
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, SamplingParams, SamplingRequest
from serving import starter

ASK = {"role": "user", "content": "What is 47 + 138?"}


def request(**options) -> SamplingRequest:
    """Greedy replies that begin with "The", which stands in the prompt, so that words follow and not only digits."""
    ids = encode_prompt(Prompt(id="p", messages=(ASK,)), starter().tokenizer).token_ids
    begun = tuple(starter().tokenizer("The", add_special_tokens=False).input_ids)
    params = SamplingParams(max_tokens=24, temperature=0.0, **options)
    return SamplingRequest(prompt_ids=(*ids, *begun), n=2, params=params, version=PolicyVersion.base())


def inside(completion: Completion) -> tuple[str, int]:
    """A stop string that ends before the last character of a token, and how many tokens there are up to that one."""
    decode, before = starter().tokenizer.decode, ""
    for count, token in enumerate(completion.token_ids, start=1):
        text = decode(list(completion.token_ids[:count]))
        stop = text[max(0, len(before) - 2) : -1]
        if token not in starter().tokenizer.all_special_ids and len(text) - len(before) >= 2 and stop not in text[:-2]:
            return stop, count
        before = text
    raise AssertionError(f"no token has two characters: {before!r}")


@pytest.fixture(scope="module")
def plain() -> Completion:
    with closing(LocalEngine(starter(), max_rows=2)) as engine:
        return engine.generate([request()])[0][0]


@pytest.mark.parametrize("drafts", [0, 8])
def test_the_text_is_cut_and_the_token_is_kept(plain: Completion, drafts: int) -> None:
    stop, count = inside(plain)
    whole = starter().tokenizer.decode(list(plain.token_ids[:count]))
    asked = request(stop=(stop,))
    streamed: list[list[int]] = [[], []]
    with closing(LocalEngine(starter(), max_rows=4, draft_tokens=drafts)) as engine:
        (future,) = engine.submit([asked], on_token=lambda row, token, *_: streamed[row].append(token))
        answers = future.result()
    for completion, tokens in zip(answers, streamed, strict=True):
        assert completion.finish_reason is FinishReason.STOP
        assert completion.token_ids == plain.token_ids[:count] == tuple(tokens)
        assert len(completion.logprobs) == count
        assert completion.text == whole[: whole.index(stop)] and not whole.endswith(stop)
        stream = TextStream(starter().tokenizer, asked.params)
        assert "".join(map(stream.push, tokens)) + stream.finish(completion.text) == completion.text
