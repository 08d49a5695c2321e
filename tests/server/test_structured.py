"""Structured outputs over HTTP: what OpenAI's, vLLM's and TRL's clients send for them, on the starter."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError, OpenAI, RateLimitError
from pydantic import BaseModel

from calls import MOVE
from groupwise.bridges.trl import routes as trl
from groupwise.engine import grammar as grammars
from groupwise.engine import vetting
from groupwise.server import chat, completions, rollouts
from groupwise.server import sampling as admission
from groupwise.types import Grammar
from processes import becomes
from serving import Served, served, starter
from wording import raises

HI = [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["apples", "pears"]},
        "ok": {"type": "boolean"},
    },
    "required": ["sum", "unit", "ok"],
    "additionalProperties": False,
}
WAIT = {"type": "function", "function": {"name": "wait"}}


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Served]:
    with served(
        tmp_path_factory.mktemp("state"), [chat.router, completions.router, rollouts.router, trl.router]
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, *, extra: dict[str, Any] = PLAIN, **options: Any) -> Any:
    options = {"max_tokens": 160, "seed": 3, "n": 3} | options
    return client.chat.completions.create(model="starter", messages=HI, extra_body=extra, **options)


def test_a_request_does_not_wait_for_its_grammar_twice(client: OpenAI, monkeypatch) -> None:
    """Where so many others are asked for that it is not kept: it would be compiled again in the event loop's time."""
    compiled, compile_one = list[Grammar](), grammars.GrammarCompiler._compile
    monkeypatch.setattr(
        grammars.GrammarCompiler, "_compile", lambda self, each: compiled.append(each) or compile_one(self, each)
    )
    monkeypatch.setattr(grammars, "MOST_COMPILED", 0)
    said = ask(client, extra={**PLAIN, "guided_regex": "[0-9]{7}x"}, n=1).choices[0].message.content
    assert re.fullmatch("[0-9]{7}x", said) and len(compiled) == 1


def whole(answer: Any) -> list[str]:
    """The contents of choices that were not cut, of which there are some."""
    contents = [each.message.content for each in answer.choices if each.finish_reason == "stop"]
    assert contents
    return contents


# ---- what the answer is ----
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("strict", [None, True, False])
def test_json_that_a_schema_allows(client: OpenAI, strict: bool | None, temperature: int) -> None:
    named = {"name": "sum", "schema": SCHEMA, "strict": strict}
    format = {"type": "json_schema", "json_schema": named}
    for content in whole(ask(client, response_format=format, temperature=temperature)):
        Draft202012Validator(SCHEMA).validate(json.loads(content))


def test_a_json_object_and_plain_text(client: OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"}, n=6)
    assert all(each.message.content.lstrip()[0] == "{" for each in answer.choices)
    text = ask(client, response_format={"type": "text"}, temperature=0, n=1)
    assert text == ask(client, temperature=0, n=1).model_copy(update={"id": text.id, "created": text.created})


def test_pydantic_models_are_parsed_by_openais_client(client: OpenAI) -> None:
    class Sum(BaseModel):
        value: int
        exact: bool

    parsed = client.chat.completions.parse(
        model="starter", messages=HI, response_format=Sum, max_tokens=60, seed=1, extra_body=PLAIN
    )
    assert isinstance(parsed.choices[0].message.parsed, Sum)


FORMS = {
    "json": (SCHEMA, lambda text: Draft202012Validator(SCHEMA).is_valid(json.loads(text))),
    "regex": (r"[A-Z]{2}-\d{3}", lambda text: re.fullmatch(r"[A-Z]{2}-\d{3}", text)),
    "choice": (["left", "right"], lambda text: text in ("left", "right")),
    "grammar": ('start: "a"+ "b"', lambda text: re.fullmatch("a+b", text)),
}


@pytest.mark.parametrize("form", FORMS)
def test_vllms_names_on_every_route(client: OpenAI, api: Served, form: str) -> None:
    value, fits = FORMS[form]
    tokenizer, length = api.server.base.tokenizer, {"max_tokens": 120, "seed": 3}
    for body in ({"structured_outputs": {form: value}}, {f"guided_{form}": value}):
        assert all(map(fits, whole(ask(client, extra=PLAIN | body))))
        completed = client.completions.create(model="starter", prompt=["4 + 5", "x"], extra_body=body, **length)
        texts = [each.text for each in completed.choices if each.finish_reason == "stop"]
        assert texts and all(map(fits, texts))
        batch = httpx2.post(
            f"{api.url}/v1/completions/batch", json={"prompts": [HI], **length, **PLAIN, **body}, timeout=120
        )
        assert all(fits(each["text"]) for each in batch.json()["completions"])
        drawn = httpx2.post(f"{api.url}/generate/", json={"prompts": ["4 + 5"], **length, **body}, timeout=120).json()
        assert fits(tokenizer.decode(drawn["completion_ids"][0], skip_special_tokens=True))
    as_text = {"structured_outputs": {"json": json.dumps(SCHEMA)}}
    assert all(map(FORMS["json"][1], whole(ask(client, extra=PLAIN | as_text))))


@pytest.mark.parametrize("name", ["structured_outputs_regex", "guided_decoding_regex"])
@pytest.mark.parametrize("route", ["generate", "chat"])
def test_trls_name(api: Served, name: str, route: str) -> None:
    asked = {"prompts": ["4 + 5"]} if route == "generate" else {"messages": [HI], **PLAIN}
    bodies = ({name: r"\d{3}"}, {name: "[a-z]+", "generation_kwargs": {"guided_regex": r"\d{3}"}})
    for body in bodies:
        drawn = httpx2.post(f"{api.url}/{route}/", json={**asked, "n": 2, **body}, timeout=120)
        texts = [
            api.server.base.tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn.json()["completion_ids"]
        ]
        assert all(re.fullmatch(r"\d{3}", text) for text in texts)


def test_a_stream_joins_to_the_whole(client: OpenAI) -> None:
    options = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "n": 1}
    answered = ask(client, **options).choices[0]
    chunks = list(ask(client, stream=True, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answered.message.content
    assert chunks[-1].choices[0].finish_reason == answered.finish_reason == "stop"


def test_thoughts_are_free_and_the_answer_is_not(client: OpenAI) -> None:
    answer = ask(client, extra={"structured_outputs": {"choice": ["185"]}}, n=8)
    thoughts = [getattr(each.message, "reasoning_content", None) for each in answer.choices]
    assert all(content == "185" for content in whole(answer)) and any(thoughts)
    begun = client.chat.completions.create(
        model="starter",
        messages=[*HI, {"role": "assistant", "content": "<think>\n4"}],
        n=8,
        max_tokens=200,
        extra_body={"structured_outputs": {"choice": ["185"]}},
    )
    assert set(whole(begun)) == {"185"}


def test_what_is_cut_says_so_and_what_is_used_up_is_counted(client: OpenAI) -> None:
    cut = ask(client, extra=PLAIN | {"guided_regex": "a{60}"}, max_tokens=5, n=1)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 5
    stopped = ask(client, extra=PLAIN | {"guided_choice": ["one two three"]}, stop=["two"], n=1)
    assert stopped.choices[0].message.content == "one " and stopped.choices[0].finish_reason == "stop"


# ---- tools ----
def check_calls(choice: Any, names: set[str]) -> None:
    for call in choice.message.tool_calls:
        assert call.function.name in names
        if call.function.name == "move":
            Draft202012Validator(MOVE["function"]["parameters"]).validate(json.loads(call.function.arguments))
        else:
            assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made_and_valid(client: OpenAI, stream: bool) -> None:
    options = {"tools": [MOVE, WAIT], "tool_choice": "required", "stream": stream, "parallel_tool_calls": False}
    if stream:
        chunks = list(ask(client, n=1, **options))
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert call.function.name in ("move", "wait") and chunks[-1].choices[0].finish_reason == "tool_calls"
        return
    for choice in ask(client, n=8, **options).choices:
        assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
        assert not choice.message.content
        check_calls(choice, {"move", "wait"})


def test_a_named_call_is_that_one(client: OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "move"}}
    for answered in ask(client, n=6, tools=[WAIT, MOVE], tool_choice=choice).choices:
        assert len(answered.message.tool_calls) == 1
        check_calls(answered, {"move"})


def test_auto_leaves_text_free_and_keeps_strict_calls_to_their_form(client: OpenAI) -> None:
    strict = {"type": "function", "function": {**MOVE["function"], "strict": True}}
    free = ask(client, n=1, temperature=0, tools=[MOVE])
    kept = ask(client, n=1, temperature=0, tools=[strict])
    assert free.choices[0].message.content == kept.choices[0].message.content
    opened = "<tool_call>"
    begun = [*HI, {"role": "assistant", "content": "I will."}]
    answer = client.chat.completions.create(
        model="starter", messages=begun, tools=[strict, WAIT], n=6, max_tokens=160, seed=2,
        extra_body={"logit_bias": {str(starter().tokenizer.convert_tokens_to_ids(opened)): 12}},
    )  # fmt: skip
    called = [each for each in answer.choices if each.finish_reason == "tool_calls"]
    assert called and all(opened not in (each.message.content or "") for each in called)
    for each in called:
        check_calls(each, {"move", "wait"})


def test_tools_beside_a_format_are_either(client: OpenAI) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    for choice in ask(client, n=12, tools=[MOVE], response_format=format).choices:
        if choice.finish_reason == "length":
            continue
        if choice.message.tool_calls:
            check_calls(choice, {"move"})
        else:
            Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content))


# ---- what is refused ----
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"properties": {"a": {"type": "strin"}}}}, "guided_json.properties.a"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WAIT], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [WAIT], "tool_choice": {"type": "function", "function": {"name": "move"}}},
            "tool_choice",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_with_its_path(
    client: OpenAI, body: dict[str, Any], param: str, stream: bool
) -> None:
    with raises(BadRequestError) as refused:
        ask(client, n=1, extra=body, stream=stream)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, ".properties.a.items"),
        (
            {"properties": {"a": {"anyOf": [{"type": "null"}, {"pattern": "(?=x)"}]}}},
            ".properties.a.anyOf[1]",
        ),
        ({"$ref": "#/$defs/none"}, ""),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_its_path(
    client: OpenAI, schema: dict[str, Any], path: str
) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    with raises(BadRequestError) as refused:
        ask(client, response_format=format)
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", f"response_format.json_schema.schema{path}")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    with raises(BadRequestError) as refused:
        ask(client, tools=[WAIT, tool], tool_choice="required")
    assert refused.value.param == f"tools[1].function.parameters.properties.x{path}"


ENDLESS = 'start: %json {"type": "integer", "multipleOf": 99999989}'  # gigabytes of states
STEP = {"type": "integer", "multipleOf": 99_999_989}
MANY = {"patternProperties": {f"^a{i:04}": {"type": "integer"} for i in range(1500)}}


@pytest.mark.parametrize(("schema", "key"), [(STEP, "multipleOf"), (MANY, "patternProperties")])
def test_a_schema_that_would_explode_is_refused_with_its_key_on_every_route(
    api: Served, schema: dict[str, Any], key: str
) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}, "strict": True}
    tools = [{"type": "function", "function": function}]
    chat, in_tool = {"messages": HI}, f"tools[0].function.parameters.properties.x.{key}"
    asked = [
        ("/v1/chat/completions", {**chat, "response_format": format}, f"response_format.json_schema.schema.{key}"),
        ("/v1/chat/completions", {**chat, "guided_json": schema}, f"guided_json.{key}"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": schema}}, f"structured_outputs.json.{key}"),
        ("/v1/completions/batch", {"prompts": [HI], "guided_json": schema}, f"guided_json.{key}"),
        ("/generate/", {"prompts": ["x"], "guided_json": schema}, f"guided_json.{key}"),
    ]
    if schema is STEP:  # the others do not fit into the prompt, where tools stand
        asked.append(("/v1/chat/completions", {**chat, "tools": tools}, in_tool))
        asked.append(("/v1/chat/completions", {**chat, "tools": tools, "tool_choice": "required"}, in_tool))
    for path, body, field in asked:
        answer = httpx2.post(f"{api.url}{path}", json={"max_tokens": 8, **body}, timeout=60)
        said = answer.json().get("error", answer.json())
        assert (answer.status_code, said["code"]) == (400, "invalid_grammar"), answer.text
        assert said.get("param", said.get("field")) == field


def test_two_grammars_that_explode_hold_up_nobody_and_end(client: OpenAI, api: Served) -> None:
    refused: list[BadRequestError] = []

    def wait(number: int) -> None:
        with pytest.raises(BadRequestError) as caught:
            ask(client, extra={"guided_grammar": ENDLESS.replace("89", str(number))})
        refused.append(caught.value)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in (89, 71)]
    for thread in waiting:
        thread.start()
    assert becomes(lambda: len(api.engine._grammars._vetting._asked) == 2)
    assert whole(ask(client, extra=PLAIN | {"guided_choice": ["meanwhile"]})) == ["meanwhile"] * 3
    assert not refused
    for thread in waiting:
        thread.join(60)
    assert [(each.code, each.param) for each in refused] == [("invalid_grammar", "guided_grammar")] * 2
    api.engine._grammars._debts._owed.clear()  # other tests have this one's address


def test_who_sends_what_explodes_is_told_to_wait(client: OpenAI, api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    api.engine._grammars._debts._owed.clear()  # other tests have this one's address
    monkeypatch.setattr(vetting, "MOST_DEBT_S", 0.0)
    monkeypatch.setattr(vetting, "PAID", 1e-9)  # a busy machine lets no debt run out meanwhile
    with pytest.raises(BadRequestError):
        ask(client, extra={"guided_regex": "(("})
    with pytest.raises(RateLimitError) as told:
        ask(client, extra={"guided_choice": ["a new one"]})
    assert told.value.code == "overloaded" and int(told.value.response.headers["retry-after"]) >= 1
    api.engine._grammars._debts._owed.clear()
    assert whole(ask(client, extra=PLAIN | {"guided_choice": ["a new one"]}))


@pytest.mark.long
def test_what_takes_long_to_compile_holds_up_nobody_and_ends(
    client: OpenAI, api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    compile_one = grammars.GrammarCompiler._compile

    def slow(self: Any, grammar: Grammar) -> Any:
        if "slow" in grammar.source:
            begun.set()
            go_on.wait(60)
        return compile_one(self, grammar)

    monkeypatch.setattr(grammars.GrammarCompiler, "_compile", slow)
    monkeypatch.setattr(admission, "COMPILE_S", 1.0)
    refused: list[BadRequestError] = []

    def wait() -> None:
        with pytest.raises(BadRequestError) as caught:
            ask(client, extra={"guided_choice": ["slow"]})
        refused.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(60)
    assert whole(ask(client, extra=PLAIN | {"guided_choice": ["fast"]}))
    waiting.join(60)
    go_on.set()
    assert refused[0].param == "guided_choice" and "was not compiled" in refused[0].message
    deadline = time.monotonic() + 60
    while not refused or time.monotonic() > deadline:
        time.sleep(0.05)
    assert whole(ask(client, extra=PLAIN | {"guided_choice": ["slow"]})) == ["slow"] * 3
