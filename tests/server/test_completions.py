"""/v1/completions over real sockets, on the starter: prompts in four forms, echo, log-probabilities, streams."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from tokenizers import processors

from groupwise.model.chat import encode_prompt
from groupwise.server import completions
from groupwise.types import PolicyVersion, Prompt, SamplingParams, SamplingRequest
from serving import Served, served, starter
from wording import raises

QUESTION = "<|im_start|>user\nWhat is 47 + 138? Reply with just the number.<|im_end|>\n<|im_start|>assistant\n"
OTHER = "<|im_start|>user\nSort: 31, 7, 54.<|im_end|>\n<|im_start|>assistant\n"
BASE = PolicyVersion.base()


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state"), [completions.router]) as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, prompt: Any, **options) -> Any:
    names = ("return_token_ids", "ignore_eos", "prompt_logprobs")
    extra = {key: options.pop(key) for key in names if key in options}
    return client.completions.create(model="starter", prompt=prompt, extra_body=extra, **options)


def ids_of(text: str) -> tuple[int, ...]:
    return encode_prompt(Prompt(id="", text=text), starter().tokenizer).token_ids


def sampled(api: Served, prompt: str | tuple[int, ...], *, n: int = 1, **params):
    ids = ids_of(prompt) if isinstance(prompt, str) else prompt
    request = SamplingRequest(prompt_ids=ids, n=n, params=SamplingParams(**{"max_tokens": 64, **params}))
    return api.engine.generate([request])[0]


def test_the_four_forms_of_a_prompt(api: Served, client: OpenAI) -> None:
    question, other = (sampled(api, text, temperature=0)[0].text for text in (QUESTION, OTHER))
    ids = [list(ids_of(text)) for text in (QUESTION, OTHER)]
    for prompt in (QUESTION, ids[0], [QUESTION], [ids[0]]):
        answer = ask(client, prompt, temperature=0, max_tokens=64)
        assert [choice.text for choice in answer.choices] == [question]
    for prompt in ([QUESTION, OTHER], ids):
        answer = ask(client, prompt, temperature=0, max_tokens=64, n=2)
        assert [(choice.index, choice.text) for choice in answer.choices] == [
            *((i, question) for i in (0, 1)),
            *((i, other) for i in (2, 3)),
        ]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert (answer.object, answer.system_fingerprint) == ("text_completion", "base")


def test_the_text_is_raw(api: Served, client: OpenAI) -> None:
    """No template, no parsing: thoughts and space stay where they are."""
    prompt = QUESTION.replace("Reply with just the number.", "Think step by step.")
    (completion,) = sampled(api, prompt, temperature=0)
    assert ask(client, prompt, temperature=0, max_tokens=64).choices[0].text == completion.text
    assert completion.text.startswith("<think>\n")


def test_equal_prompts_are_sampled_apart(api: Served, client: OpenAI) -> None:
    options = {"temperature": 3.0, "max_tokens": 16, "seed": 5, "ignore_eos": True}
    texts = [choice.text for choice in ask(client, [OTHER] * 3, n=2, **options).choices]
    assert len(set(texts)) == 6
    assert texts[:2] == [one.text for one in sampled(api, OTHER, n=2, **options)]


def test_echo_puts_the_prompt_in_front(api: Served, client: OpenAI) -> None:
    (completion,) = sampled(api, QUESTION, temperature=0)
    for prompt in (QUESTION, list(ids_of(QUESTION))):
        assert (
            ask(client, prompt, temperature=0, max_tokens=64, echo=True).choices[0].text == QUESTION + completion.text
        )


def test_logprobs_of_the_completion(api: Served, client: OpenAI) -> None:
    (completion,) = sampled(api, QUESTION, temperature=0, top_logprobs=3)
    choice = ask(client, QUESTION, temperature=0, max_tokens=64, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert logprobs.token_logprobs == pytest.approx(completion.logprobs, abs=1e-6)
    assert "".join(logprobs.tokens) == choice.text + "<|im_end|>"
    assert [choice.text[a:b] for a, b in zip(logprobs.text_offset, logprobs.text_offset[1:], strict=False)] == (
        logprobs.tokens[:-1]
    )
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and list(top.values()) == sorted(top.values(), reverse=True)
        assert top[token] == max(top.values()) == logprob, "greedy takes the likeliest"
    assert ask(client, QUESTION, logprobs=0).choices[0].logprobs.top_logprobs is None
    assert ask(client, QUESTION).choices[0].logprobs is None


def test_a_prompt_can_be_scored_alone(api: Served, client: OpenAI) -> None:
    """What evaluation harnesses do: no token is sampled, and the prompt's log-probabilities are the trainer's."""
    ids = ids_of(QUESTION + "185<|im_end|>")
    answer = ask(client, [QUESTION + "185<|im_end|>", [7, 8]], max_tokens=0, echo=True, logprobs=1)
    first, second = answer.choices
    assert first.logprobs.token_logprobs[0] is None
    assert first.logprobs.token_logprobs[1:] == pytest.approx(api.engine.score(ids[:1], ids[1:], BASE), abs=1e-6)
    assert "".join(first.logprobs.tokens) == first.text == QUESTION + "185<|im_end|>"
    none, *tops = first.logprobs.top_logprobs
    assert none is None and all(len(top) == 1 for top in tops)
    scored = zip(first.logprobs.tokens[1:], first.logprobs.token_logprobs[1:], tops, strict=True)
    assert all(max(top.values()) > logprob or top == {token: logprob} for token, logprob, top in scored)
    for length in (1, 5, len(ids) - 1):  # the likeliest token is what greedy sampling takes
        (greedy,) = sampled(api, ids[:length], temperature=0, max_tokens=1, ignore_eos=True)
        assert list(tops[length - 1].values()) == pytest.approx([greedy.logprobs[0]], abs=1e-5)
    assert len(second.logprobs.tokens) == 2 and answer.usage.completion_tokens == 0
    assert first.finish_reason == "length"
    streamed = ask(client, QUESTION + "185<|im_end|>", max_tokens=0, echo=True, logprobs=1, stream=True)
    assert [value for chunk in streamed for value in chunk.choices[0].logprobs.token_logprobs] == pytest.approx(
        first.logprobs.token_logprobs
    )


def test_the_prompt_is_told_by_ids(api: Served, client: OpenAI) -> None:
    """As vLLM's `prompt_logprobs`, at temperature 1 whatever is sampled: what a teacher's server tells."""
    prompts = [ids_of(QUESTION), ids_of(QUESTION)[:9]]
    answer = ask(client, prompts, max_tokens=1, n=2, temperature=0.5, prompt_logprobs=3)
    assert [len(choice.prompt_logprobs) for choice in answer.choices] == [len(prompts[0])] * 2 + [9] * 2
    none, *rows = answer.choices[0].prompt_logprobs
    scores = api.engine.score_sequence(prompts[0], BASE, first=1, top=3)
    assert none is None and [row[str(id)]["logprob"] for id, row in zip(prompts[0][1:], rows, strict=True)] == (
        pytest.approx(scores.logprobs, abs=1e-6)
    )
    for id, row, top in zip(prompts[0][1:], rows, scores.top, strict=True):
        assert set(row) == {str(id), *(str(each) for each, _ in top)}
    tokens = [row[str(id)]["decoded_token"] for id, row in zip(prompts[0][1:], rows, strict=True)]
    assert "".join(tokens) == starter().tokenizer.decode(prompts[0][1:])
    (own,) = ask(client, [7, 8], max_tokens=1, prompt_logprobs=0).choices
    assert own.prompt_logprobs[0] is None and list(own.prompt_logprobs[1]) == ["8"]
    assert not hasattr(ask(client, [7, 8], max_tokens=1).choices[0], "prompt_logprobs")
    with raises(BadRequestError):
        ask(client, [7, 8], max_tokens=1, prompt_logprobs=0, stream=True)


def test_what_the_tokenizer_puts_in_front_is_scored_and_not_shown(api: Served, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(starter().tokenizer)
    first = ("<|endoftext|>", tokenizer.pad_token_id)
    template = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.bos_token = first[0]
    base = replace(starter(), tokenizer=tokenizer)
    with served(tmp_path, [completions.router], base=base, engine=api.engine) as other:
        client = OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0)
        (choice,) = ask(client, "2 + 2 = 4", max_tokens=2, temperature=0, echo=True, logprobs=1).choices
    logprobs = choice.logprobs
    assert choice.text.startswith("2 + 2 = 4")
    assert (logprobs.tokens[0], logprobs.text_offset[0]) == ("<|endoftext|>", 0)
    ends = [*logprobs.text_offset[2:], len(choice.text)]
    spans = zip(logprobs.text_offset[1:], ends, strict=True)
    assert [choice.text[a:b] for a, b in spans] == logprobs.tokens[1:]


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2, "temperature": 1.0},
        {"n": 2, "temperature": 1.0, "echo": True, "logprobs": 2},
        {"temperature": 3.0, "ignore_eos": True, "logprobs": 1, "stop": ["e", "1"], "n": 4},
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI, options: dict[str, Any]) -> None:
    options = {"seed": 3, "max_tokens": 40, "return_token_ids": True, **options}
    whole = ask(client, [QUESTION, OTHER], **options)
    chunks = list(ask(client, [QUESTION, OTHER], stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        assert [i for one in mine for i in one.token_ids] == choice.token_ids
        assert mine[0].prompt_token_ids == choice.prompt_token_ids
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            expected = getattr(choice.logprobs, field, None)
            got = [x for one in mine if one.logprobs for x in getattr(one.logprobs, field)]
            assert got == (expected or [])


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_before_the_first_byte(client: OpenAI, stream: bool) -> None:
    with raises(BadRequestError) as ids:
        ask(client, [[1, 2], [3, 99999]], stream=stream)
    assert ids.value.param == "prompt"
    with raises(BadRequestError) as long:
        ask(client, [1] * 1024, stream=stream)
    assert long.value.code == "context_length_exceeded"
    for prompt in ("", [], [""], [[]], [-1]):
        with pytest.raises(BadRequestError) as empty:
            ask(client, prompt, stream=stream)
        assert empty.value.param.startswith("prompt")
    with raises(BadRequestError):
        ask(client, QUESTION, max_tokens=0, stream=stream)


def test_requests_are_recorded(api: Served, client: OpenAI) -> None:
    ask(client, list(ids_of(QUESTION)), temperature=0, max_tokens=64)
    latest = api.server.recorder.recent()[0]
    assert latest["route"] == "/v1/completions" and latest["prompt_preview"] == QUESTION
