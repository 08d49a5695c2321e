"""Bodies: what is taken, what is refused and how that is told. All through `parse_body`, as the routes do."""

import inspect
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from pydantic import BaseModel, ValidationError

from groupwise.bridges.trl.schema import ChatsRequest, GenerateRequest
from groupwise.config.job import GrpoJobConfig
from groupwise.config.serve import ServeConfig
from groupwise.errors import RequestError
from groupwise.sdk.types import AnsweredMessage, ChatChoice, ChatCompletion, Usage
from groupwise.server import bodies
from groupwise.server.bodies import parse_body
from groupwise.server.schema_adapters import ActivateRequest, LoadRequest, MergeRequest
from groupwise.server.schema_completions import BatchRequest, CompletionRequest
from groupwise.server.schema_messages import OfferedFunction, StructuredOutputs
from groupwise.server.schema_openai import AdapterShare, ChatRequest
from groupwise.server.schema_train import GrpoRequest, ScoredCompletion, ScoredGroup, SftExample, SftRequest
from groupwise.server.wire import Unsupported
from groupwise.tasks.dialects.anthropic import MessagesRequest
from groupwise.tasks.dialects.chat_form import (
    CalledFunction,
    ChatMessage,
    FunctionSchema,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    as_messages,
)
from groupwise.tasks.dialects.responses import ResponsesRequest
from wording import wording

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAID = [*HI, {"role": "assistant", "content": "Well"}]
STRICT = {"type": "function", "function": {**TOOL["function"], "name": "sub", "strict": True}}
PAIR = [{"text": "a", "reward": 1}, {"text": "b", "reward": 0.5}]
VALID: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"messages": HI},
    CompletionRequest: {"prompt": "2+2="},
    BatchRequest: {"prompts": [HI, HI], "n": 8, "temperature": 0.9, "max_tokens": 64, "seed": 42},
    GrpoRequest: {"groups": [{"messages": HI, "completions": PAIR}]},
    SftRequest: {"examples": [{"messages": [*HI, {"role": "assistant", "content": "yes"}]}]},
    LoadRequest: {"name": "math"},
    ActivateRequest: {"version": 3},
    MergeRequest: {"sources": [{"name": "a", "weight": 0.5}, {"name": "b@2", "weight": 1}], "output_name": "c"},
}
LEAST: dict[type[BaseModel], dict[str, Any]] = {
    ChatMessage: {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    TextPart: {"type": "text", "text": "x"},
    ToolCall: {"function": {"name": "f", "arguments": "{}"}},
    CalledFunction: {"name": "f", "arguments": "{}"},
    Tool: TOOL,
    FunctionSchema: {"name": "f"},
    OfferedFunction: {"name": "f"},
    AdapterShare: {"name": "math"},
    ResponseFormat: {"type": "text"},
    ScoredCompletion: PAIR[0],
    ScoredGroup: {"completions": PAIR},
    SftExample: VALID[SftRequest]["examples"][0],
}  # of the parts that have fields that must be given
OWN = (BatchRequest, GrpoRequest, SftRequest, LoadRequest, ActivateRequest, MergeRequest)


def parse(model: type[BaseModel], body: Any, **limits: Any) -> Any:
    raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    return parse_body(raw, model, ServeConfig(**limits))


def refusal(model: type[BaseModel], body: Any, **limits: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        parse(model, body, **limits)
    assert refused.value.status == 400
    return refused.value


# ---- what is taken ----
@pytest.mark.parametrize("model", VALID, ids=lambda model: model.__name__)
def test_the_least_body_of_each_route(model: type[BaseModel]) -> None:
    parse(model, VALID[model])


@pytest.mark.parametrize(
    "extra",
    [
        {"stop": "x"},
        {"stop": ["x", "y"], "stop_token_ids": [5]},
        {"n": 3, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0.5, "seed": -1, "max_completion_tokens": 5},
        {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": "none"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 20},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1, "logit_bias": {"5": -100}},
        {"min_tokens": 5, "include_stop_str_in_output": True, "truncate_prompt_tokens": 7, "top_k": -1},
        {"best_of": 1, "length_penalty": 1.0, "use_beam_search": False, "skip_special_tokens": False},
        {"regex": None, "typical_p": 1, "no_repeat_ngram_size": 0, "options": {}, "do_sample": True},
        {"continue_final_message": False, "add_generation_prompt": True},
        {"chat_template_kwargs": {"enable_thinking": False, "date": "today", "depth": {"a": [1, 2.5, None]}}},
        {"model": "anything at all", "user": "u", "metadata": {"a": 1}, "store": True, "never_heard_of": [1]},
        {"adapter": "math@3"},
        {"adapters": [{"name": "math", "scale": 0.5}, {"name": "sql@2"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"temperature": None, "stop": None, "tools": None, "n": None},
    ],
)
def test_chat_options(extra: dict[str, Any]) -> None:
    parse(ChatRequest, {"messages": HI, **extra})


def test_messages_become_what_templates_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    assert as_messages(parse(ChatRequest, {"messages": messages}).messages) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "No."},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    )


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("ab", ("ab",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [4]], ("a", (4,))),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, parsed: Any) -> None:
    assert parse(CompletionRequest, {"prompt": prompt}).prompt == parsed


def test_the_smaller_of_both_names_of_max_tokens_counts() -> None:
    assert parse(ChatRequest, {"messages": HI, "max_tokens": 9, "max_completion_tokens": 5}).most_tokens == 5
    assert parse(ChatRequest, {"messages": HI}).most_tokens is None


# ---- what is refused ----
REFUSED: list[tuple[type[BaseModel], dict[str, Any], str, str]] = [
    (ChatRequest, {"messages": []}, "messages", "at least 1 item"),
    (ChatRequest, {"messages": "hi"}, "messages", "messages is 'hi'; it must be a list of messages"),
    (ChatRequest, {"messages": [{"role": "user"}]}, "messages[0].content", "role 'user' needs content"),
    (ChatRequest, {"messages": [{"role": "assistant"}]}, "messages[0].content", "content or tool_calls"),
    (ChatRequest, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'king'"),
    (ChatRequest, {"messages": [{"content": "x"}]}, "messages[0].role", "required and missing"),
    (ChatRequest, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string"),
    (ChatRequest, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1 item"),
    (ChatRequest, {"messages": [{**HI[0], "name": "n" * 10000}]}, "messages[0].name", "at most 64 characters"),
    (ChatRequest, {"messages": [{**HI[0], "tool_calls": []}, "x"]}, "messages[1]", "object"),
    (ChatRequest, {"messages": HI, "temperature": -1}, "temperature", "greater than or equal to 0"),
    (ChatRequest, {"messages": HI, "temperature": True}, "temperature", "valid number"),
    (ChatRequest, {"messages": HI, "temperature": "1.0"}, "temperature", "valid number"),
    (ChatRequest, {"messages": HI, "top_p": 0}, "top_p", "greater than 0"),
    (ChatRequest, {"messages": HI, "top_p": 1.1}, "top_p", "less than or equal to 1"),
    (ChatRequest, {"messages": HI, "n": 0}, "n", "greater than or equal to 1"),
    (ChatRequest, {"messages": HI, "n": 1.0}, "n", "valid integer"),
    (ChatRequest, {"messages": HI, "max_tokens": 10**9}, "max_tokens", "less than or equal to 1048576"),
    (ChatRequest, {"messages": HI, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (ChatRequest, {"messages": HI, "seed": 1 << 63}, "seed", "less than"),
    (ChatRequest, {"messages": HI, "stop": ""}, "stop", "at least 1 character"),
    (ChatRequest, {"messages": HI, "stop": 5}, "stop", "must be a list"),
    (ChatRequest, {"messages": HI, "model": "m" * 10000}, "model", "at most 256 characters"),
    (ChatRequest, {"messages": HI, "adapter": "../../etc"}, "adapter", "'../../etc'"),
    (ChatRequest, {"messages": HI, "adapter": "a\x00b"}, "adapter", "pattern"),
    (ChatRequest, {"messages": HI, "adapter": "a@1\n"}, "adapter", "pattern"),
    (ChatRequest, {"messages": HI, "adapter": "a", "adapters": [{"name": "b"}]}, "adapters", "exclude each other"),
    (ChatRequest, {"messages": HI, "adapters": [{"name": "b"}] * 17}, "adapters", "at most 16 items"),
    (ChatRequest, {"messages": HI, "adapters": [{"name": "b", "scale": 1e9}]}, "adapters[0].scale", "100"),
    (ChatRequest, {"messages": HI, "adapters": [{"name": "b", "weight": 1}]}, "adapters[0].weight", "unknown"),
    (ChatRequest, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    (ChatRequest, {"messages": HI, "stream_options": {}}, "stream_options", "needs stream: true"),
    (ChatRequest, {"messages": HI, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (ChatRequest, {"messages": HI, "tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'required'"),
    (BatchRequest, {"prompts": [HI], "tools": [TOOL, STRICT]}, "tools[1].function.strict", "not kept to"),
    (BatchRequest, {"prompts": [HI], "tools": [TOOL, TOOL]}, "tools", "same name"),
    (ChatRequest, {"messages": HI, "tools": [TOOL, TOOL]}, "tools", "same name"),
    (ChatRequest, {"messages": HI, "tools": [{"type": "web"}]}, "tools[0].type", "'web'"),
    (ChatRequest, {"messages": HI, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools", "server's own"),
    (ChatRequest, {"messages": HI, "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b", "no name of"),
    (BatchRequest, {"prompts": [HI], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "own"),
    (ChatRequest, {"messages": HI, "top_k": -2}, "top_k", "greater than or equal to -1"),
    (ChatRequest, {"messages": HI, "presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    (ChatRequest, {"messages": HI, "repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    (ChatRequest, {"messages": HI, "logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    (ChatRequest, {"messages": HI, "logit_bias": {"the": 1}}, "logit_bias.the", "pattern"),
    (ChatRequest, {"messages": HI, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    (ChatRequest, {"messages": HI, "min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    (ChatRequest, {"messages": HI, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves nothing"),
    (ChatRequest, {"messages": HI, "continue_final_message": True}, "continue_final_message", "role 'user'"),
    (ChatRequest, {"messages": HI, "add_generation_prompt": False}, "add_generation_prompt", "role 'user'"),
    (ChatRequest, {"messages": SAID, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message", "both true; they are opposites"),
    (ChatRequest, {"messages": HI, "echo": True}, "echo", "goes on with none"),
    (ChatRequest, {"messages": SAID, "echo": True, "continue_final_message": False}, "echo", "goes on with none"),
    (CompletionRequest, {"prompt": ""}, "prompt", "none of them empty"),
    (CompletionRequest, {"prompt": []}, "prompt", "none of them empty"),
    (CompletionRequest, {"prompt": [[1], []]}, "prompt", "none of them empty"),
    (CompletionRequest, {"prompt": [True]}, "prompt", "list of token ids"),
    (CompletionRequest, {"prompt": [1, -1]}, "prompt", "list of token ids"),
    (CompletionRequest, {"prompt": [1.0]}, "prompt", "list of token ids"),
    (CompletionRequest, {"prompt": "x", "max_tokens": 0}, "max_tokens", "needs echo"),
    (CompletionRequest, {}, "prompt", "required and missing"),
    (BatchRequest, {"prompts": []}, "prompts", "at least 1 item"),
    (BatchRequest, {"prompts": ["hi"]}, "prompts[0]", "prompts[0] is 'hi'; it must be a list of messages"),
    (BatchRequest, {"prompts": [HI], "strem": 1}, "strem", "unknown"),
    (GrpoRequest, {"groups": [{"messages": HI, "completions": [{"text": "a", "reward": "1.0"}]}]},
     "groups[0].completions[0].reward", "'1.0'"),
    (GrpoRequest, {"groups": [{"messages": HI, "completions": [{"text": "a", "reward": True}]}]},
     "groups[0].completions[0].reward", "true"),
    (LoadRequest, {"name": "C:\\x"}, "name", "pattern"),
    (ActivateRequest, {"version": 0}, "version", "greater than or equal to 1"),
    (MergeRequest, {**VALID[MergeRequest], "density": 0.5}, "density", "mode is 'weighted_average'"),
    (MergeRequest, {**VALID[MergeRequest], "output_name": ".."}, "output_name", "pattern"),
    (MergeRequest, {**VALID[MergeRequest], "mode": "mean"}, "mode", "'mean'"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "body", "param", "said"), REFUSED)
def test_refusals_say_where_and_what(model: type[BaseModel], body: Any, param: str, said: str) -> None:
    error = refusal(model, body)
    assert error.field == param
    assert said in error.message


@pytest.mark.parametrize(
    ("model", "field", "limit"),
    [
        (ChatRequest, {"n": 5}, "max_n"),
        (ChatRequest, {"stop": ["a"] * 5}, "max_stop"),
        (ChatRequest, {"stop_token_ids": [1] * 5}, "max_stop"),
        (ChatRequest, {"messages": HI * 5}, "max_messages"),
        (ChatRequest, {"tools": [{**TOOL, "function": {"name": f"f{i}"}} for i in range(5)]}, "max_tools"),
        (ChatRequest, {"logprobs": True, "top_logprobs": 5}, "max_top_logprobs"),
        (CompletionRequest, {"logprobs": 5}, "max_top_logprobs"),
        (BatchRequest, {"prompts": [HI * 5]}, "max_messages"),
    ],
)
def test_limits_are_the_configurations_and_named(model: type[BaseModel], field: dict[str, Any], limit: str) -> None:
    body = VALID[model] | {"n": 1} | field if model is not CompletionRequest else VALID[model] | field
    parse(model, body, **{limit: 5})
    error = refusal(model, body, **{limit: 4})
    assert error.code == "limit_exceeded"
    assert limit in error.message
    wording(error)


def test_a_batch_has_a_limit_of_its_own() -> None:
    parse(BatchRequest, {"prompts": [HI] * 2, "n": 4}, max_batch_completions=8)
    error = refusal(BatchRequest, {"prompts": [HI] * 2, "n": 4}, max_batch_completions=7)
    assert error.code == "batch_too_large"
    wording(error)
    assert refusal(CompletionRequest, {"prompt": ["a", "b"]}, max_batch_completions=1).code == "batch_too_large"


@pytest.mark.parametrize(
    "extra",
    [
        {"functions": [{"name": "f"}]},
        {"chat_template": "{{ 1 }}"},
        {"best_of": 2},
        {"best_of": True},
        {"use_beam_search": True},
        {"length_penalty": 1.2},
        {"prompt_logprobs": 0},
        {"skip_special_tokens": True},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"regex": "a+"},
        {"grammar": "root"},
        {"enable_thinking": False},
        {"no_repeat_ngram_size": 3},
        {"typical_p": 0.9},
        {"do_sample": False},
        {"options": {"temperature": 0}},
    ],
)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_what_is_not_offered_is_refused_not_ignored(model: Any, extra: dict[str, Any]) -> None:
    if model is CompletionRequest and next(iter(extra)) in ("functions", "chat_template", "prompt_logprobs"):
        return  # no client sends these to a route without messages, which has the last
    error = refusal(model, VALID[model] | extra)
    assert (error.code, error.field) == ("unsupported_parameter", next(iter(extra)))
    wording(error)


@pytest.mark.parametrize(
    "extra",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}},
        {"min_tokens": 4},
        {"truncate_prompt_tokens": 8},
        {"include_stop_str_in_output": True},
    ],
)
@pytest.mark.parametrize(
    ("model", "body"),
    [(BatchRequest, VALID[BatchRequest]), (GenerateRequest, {"prompts": "x"}), (ChatsRequest, {"messages": [HI]})],
)
def test_what_is_sampled_for_training_is_drawn_from_the_policy(model: Any, body: Any, extra: dict[str, Any]) -> None:
    error = refusal(model, body | extra)
    assert (error.code, error.field) == ("unsupported_parameter", next(iter(extra)))
    neutral = {"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0, "top_k": -1}
    parse(model, body | neutral)


# ---- what OpenAI's clients send ----
def known(create: Callable[..., Any]) -> set[str]:
    """The fields of a body that a method of the `openai` package can send."""
    of_the_call = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    return set(inspect.signature(create).parameters) - of_the_call


def is_refused(model: type[BaseModel], field: str) -> bool:
    return any(isinstance(each, Unsupported) for each in model.model_fields[field].metadata)


@pytest.mark.parametrize(("model", "create"), [(ChatRequest, Chat.create), (CompletionRequest, Completions.create)])
def test_each_of_openais_parameters_is_honoured_refused_or_ignored_on_purpose(model: Any, create: Any) -> None:
    parameters = known(create)
    assert {"messages", "stop"} <= parameters or {"prompt", "stop"} <= parameters
    for name in parameters - model.bookkeeping:
        assert name in model.model_fields, f"{name}: honour it, refuse it (Unsupported), or call it bookkeeping"
        error = refused_or_none(model, json.dumps(VALID[model] | {name: {"no": "sense"}}).encode())
        assert error is not None and error.field and error.field.startswith(name)
        assert (error.code == "unsupported_parameter") == is_refused(model, name)
    assert not model.bookkeeping & model.model_fields.keys()
    parse(model, VALID[model] | {name: {"any": ["thing"]} for name in model.bookkeeping})


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("slip", "meant"),
    [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("stops", "stop"), ("top_p\x1b", "top_p")],
)
def test_a_misspelt_option_is_not_ignored(model: type[BaseModel], slip: str, meant: str) -> None:
    error = refusal(model, VALID[model] | {slip: None})
    assert error.field == slip.replace("\x1b", "\\u001b") and error.hint == f"did you mean {meant}?"
    assert "\x1b" not in error.message
    wording(error)


def test_countless_unknown_fields_cost_little() -> None:
    """Of the most that a body may have, few are compared with the known ones; more are refused before."""
    parse(ChatRequest, json.dumps(VALID[ChatRequest] | {f"a{i}": 0 for i in range(4000)}))
    raw = json.dumps(VALID[ChatRequest] | {f"a{i}": 0 for i in range(200_000)})
    began = time.process_time()
    assert refusal(ChatRequest, raw).code == "invalid_json"
    assert time.process_time() - began < 5  # a tenth of a second; half a minute if all were compared


# ---- null ----
def optional_fields(kind: Any, seen: set[Any]) -> Iterator[tuple[type[BaseModel], str]]:
    """Every optional field of a model and of what its fields hold."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        for argument in get_args(kind):
            yield from optional_fields(argument, seen)
    elif kind not in seen:
        seen.add(kind)
        for name, field in kind.model_fields.items():
            yield from optional_fields(field.annotation, seen)
            if not field.is_required():
                yield kind, name


def test_null_is_a_field_that_is_left_out() -> None:
    """Wherever a field may be left out; the document says so, too."""
    found = list(optional_fields(tuple[tuple(VALID)], set()))  # pyright: ignore[reportInvalidTypeArguments]
    assert {(GrpoRequest, "config"), (GrpoJobConfig, "learning_rate"), (ToolCall, "type")} <= set(found)
    schemas = {model: model.model_json_schema()["properties"] for model, _ in found}
    for model, name in found:
        LEAST[StructuredOutputs] = {"choice": ["a"]} if name == "regex" else {"regex": "a"}  # exactly one of them
        least, sent = LEAST.get(model, VALID.get(model, {})), model.model_fields[name].alias or name
        left_out = parse(model, {key: value for key, value in least.items() if key != sent})
        assert getattr(parse(model, least | {sent: None}), name) == getattr(left_out, name), (model, name)
        assert re.search(r'"null"|: null|\[null', json.dumps(schemas[model][sent])), (model, name)


def test_null_is_no_value_of_a_field_that_must_be_given() -> None:
    completions = [{"text": "a", "reward": None}, {"text": "b", "reward": 1}]
    error = refusal(GrpoRequest, {"groups": [{"messages": HI, "completions": completions}]})
    assert error.field == "groups[0].completions[0].reward"
    assert refusal(MergeRequest, VALID[MergeRequest] | {"output_name": None}).field == "output_name"
    assert refusal(GrpoRequest, VALID[GrpoRequest] | {"config": {"lerning_rate": None}}).field == "config.lerning_rate"


def test_addresses_of_images_are_refused_by_name() -> None:
    content = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]
    error = refusal(ChatRequest, {"messages": [{"role": "user", "content": content}]})
    assert (error.code, error.field) == ("invalid_image", "messages[0].content[0].image_url.url")


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"groups": [{"messages": HI, "completions": [{"text": "a", "rewrd": 1}]}]}, "completions[0].reward?"),
        ({**VALID[GrpoRequest], "learning_rate": 1e-5}, "config.learning_rate"),
        ({**VALID[GrpoRequest], "config": {"epochs": 1}}, "config.iterations"),
        ({**VALID[GrpoRequest], "config": {"lerning_rate": 1}}, "config.learning_rate"),
        ({"prompts": 1}, "groups"),
    ],
)
def test_unknown_fields_are_told_where_they_go(body: Any, hint: str) -> None:
    error = refusal(GrpoRequest, body)
    wording(error)
    assert hint in str(error.hint)


@pytest.mark.parametrize(
    ("field", "beside", "under"),
    [
        ("lr", "write config.learning_rate: options go under config", "write config.learning_rate"),
        ("num_train_epochs", "write config.iterations: options go under config", "write config.iterations"),
        ("output_name", "write config.output_name: options go under config", None),
        ("reward_funcs", "the fields of the body are groups, config", "the fields of config are output_name, "),
    ],
)
def test_a_hint_names_fields_that_exist_and_says_what_is_news(field: str, beside: str, under: str | None) -> None:
    """`reward_funcs` is a key of a training run; a job is told its rewards."""
    assert refusal(GrpoRequest, {**VALID[GrpoRequest], field: 1}).hint == beside
    if under is not None:
        assert str(refusal(GrpoRequest, {**VALID[GrpoRequest], "config": {field: 1}}).hint).startswith(under)


def test_names_are_explained_in_words() -> None:
    assert "'math@3'" in str(refusal(ChatRequest, {"messages": HI, "adapter": "../x"}).hint)
    hint = str(refusal(GrpoRequest, {**VALID[GrpoRequest], "config": {"output_name": "a b"}}).hint)
    assert hint.startswith("a name is 1 to 64 of")


def test_a_list_that_is_too_short_is_told_in_one_clause() -> None:
    assert refusal(BatchRequest, {"prompts": []}).message.endswith("; it must have at least 1 item")


def test_a_sampled_completion_posted_whole_is_told_what_to_keep() -> None:
    sampled = {"prompt_index": 0, "completion_index": 1, "rollout_id": "r", "text": "a", "reward": 1}
    error = refusal(GrpoRequest, {"groups": [{"completions": [sampled, sampled]}]})
    assert error.field == "groups[0].completions[0].prompt_index"
    assert str(error.hint).startswith("write rollout_id and reward alone")


@pytest.mark.parametrize("field", ["credit", "turn_discount", "turn_baseline", "step_advantage_weight"])
def test_credit_of_turns_is_refused_with_what_to_do_instead(field: str) -> None:
    """A posted completion is one turn."""
    error = refusal(GrpoRequest, {**VALID[GrpoRequest], "config": {field: "turn"}})
    assert error.field == f"config.{field}"
    wording(error)
    scored = [{"text": "a", "reward": 1, "turn_rewards": [1]}, {"text": "b", "reward": 0}]
    error = refusal(GrpoRequest, {"groups": [{"messages": HI, "completions": scored}]})
    assert error.field == "groups[0].completions[0].turn_rewards"
    assert str(error.hint).startswith("write reward, what the one turn is worth")


# ---- malformed ----
MALFORMED = {
    "empty": b"",
    "truncated": b'{"messages": [{"role": "us',
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "digits": b'{"n": ' + b"1" * 6000 + b"}",
    "utf-8": b'{"messages": "\xff\xfe"}',
    "utf-16": '{"messages": []}'.encode("utf-16"),
    "surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"messages": NaN}',
    "Infinity": b'{"temperature": Infinity}',
    "-Infinity": b'{"temperature": -Infinity}',
    "NaN in what is passed on": b'{"tools": [{"type":"function","function":{"name":"f","parameters":{"x": NaN}}}]}',
    "NaN in what is ignored": b'{"never_heard_of": [{"x": NaN}]}',
    "control character": b'{"messages": "\x00"}',
    "trailing": b'{"messages": []} x',
    "comment": b'{"messages": [] /* */}',
    "quotes": b"{'messages': []}",
}


@pytest.mark.parametrize("model", [ChatRequest, GrpoRequest], ids=lambda model: model.__name__)
@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_not_json_is_invalid_json(name: str, model: type[BaseModel]) -> None:
    error = refusal(model, MALFORMED[name])
    assert (error.code, error.field) == ("invalid_json", None)
    assert len(error.message) < 300


def test_a_huge_float_is_no_number() -> None:
    assert refusal(ChatRequest, b'{"messages": [], "temperature": 1e999}').field in ("messages", "temperature")
    parameters = b'{"type":"function","function":{"name":"f","parameters":{"x":[{"y":1e999}]}}}'
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":[' + parameters + b"]}"
    assert refusal(ChatRequest, body).field == "tools[0].function.parameters"


def test_words_in_a_text_are_not_numbers() -> None:
    text = "NaN and Infinity are words"
    assert parse(ChatRequest, {"messages": [{"role": "user", "content": text}]}).messages[0].content == text


@pytest.mark.parametrize("body", ["5", "null", "[1]", '"x"', "true"])
@pytest.mark.parametrize("model", [ChatRequest, GrpoRequest])
def test_a_body_is_an_object(model: type[BaseModel], body: str) -> None:
    assert "it must be an object" in refusal(model, body).message


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GrpoRequest, '{"groups":[{"completions":[{"text":"a","reward":1,"reward":0}]}]}'),
        (ChatRequest, '{"messages":[{"role":"user","content":"x"}],"n":1,"reward":2,"reward":2}'),
        (CompletionRequest, '{"prompt":"x","reward":1,"reward":2}'),
        (MessagesRequest, '{"messages":[{"role":"user","content":"x","reward":1,"reward":2}],"max_tokens":3}'),
        (ResponsesRequest, '{"input":"x","reward":1,"reward":2}'),
    ],
)
def test_of_two_equal_keys_none_is_taken(model: type[BaseModel], body: str) -> None:
    error = refusal(model, body)
    assert error.code == "invalid_json"
    wording(error)


def test_nothing_is_echoed_at_length() -> None:
    secret = "s" * 1000
    for body in ({"messages": secret}, {"messages": HI, "adapter": secret}, {"messages": HI, "n": secret}):
        message = refusal(ChatRequest, body).message
        assert "s" * 40 in message and "s" * 65 not in message
    error = refusal(GrpoRequest, {"\x1b[31m\n" * 500: 1})
    assert "\x1b" not in error.message + str(error.field) and len(error.message) < 400


# ---- many problems ----
@pytest.mark.parametrize(
    ("model", "raw"),
    [
        (ChatRequest, b'{"messages":[' + b"1," * 100_000 + b"1]}"),
        (ChatRequest, b'{"messages":[{"role":"user","content":[' + b"1," * 100_000 + b"1]}]}"),
        (BatchRequest, b'{"prompts":[' + b"[]," * 100_000 + b"[]]}"),
        (GrpoRequest, b'{"groups":[' + b"1," * 100_000 + b"1]}"),
        (GrpoRequest, b'{"groups":[{"completions":[' + b'{"text":"a"},' * 50_000 + b"1]}]}"),
        (GrpoRequest, b'{"groups":[{"completions":[{"reward":1,"token_ids":[' + b"null," * 100_000 + b"1]}]}]}"),
    ],
)
def test_a_hundred_thousand_bad_items_are_not_told_apart(model: type[BaseModel], raw: bytes) -> None:
    """Each problem that is kept costs more memory than the item it is about."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate_json(raw)
    assert refused.value.error_count() <= 5
    assert len(refusal(model, raw).message) < 400


def test_an_object_of_ours_has_few_keys() -> None:
    error = refusal(LoadRequest, b"{" + b",".join(b'"%d":0' % i for i in range(5000)) + b"}")
    wording(error)


def test_a_body_has_a_bounded_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_OBJECTS", 5)
    parse(GrpoRequest, {"groups": [{"messages": HI, "completions": PAIR}]})  # the body, a group, a message, two
    refused = refusal(GrpoRequest, {"groups": [{"messages": HI, "completions": [*PAIR, PAIR[0]]}]})
    assert refused.code == "invalid_json"
    wording(refused)
    assert refusal(ChatRequest, {"messages": HI * 9}).code == "invalid_json"


def test_the_number_of_untold_problems_is_told() -> None:
    body = {"messages": HI, "n": 0, "top_p": 2, "temperature": -1, "min_p": 5, "seed": "x"}
    assert "; and 2 more problems" in refusal(ChatRequest, body).message


# ---- whatever comes ----
def refused_or_none(model: type[BaseModel], raw: bytes) -> RequestError | None:
    """Anything but these two outcomes is a bug."""
    try:
        parse(model, raw)
    except RequestError as error:
        json.dumps(error.as_dict())
        return error
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(VALID)), st.data())
def test_any_json_is_taken_or_refused_with_400(model: type[BaseModel], data: st.DataObject) -> None:
    """Starting from a valid body, any value is put anywhere."""
    body: Any = json.loads(json.dumps(VALID[model]))
    target = body
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from([*keys, *(model.model_fields if target is body else ())]))
        inner = target[key] if key in keys else None
        if not (isinstance(inner, dict | list) and inner and data.draw(st.booleans())):
            break
        target = inner
    target[key] = data.draw(JSON)
    error = refused_or_none(model, json.dumps(body).encode())
    assert error is None or 0 < len(error.message) < 1500


@settings(max_examples=150)
@given(st.sampled_from(list(VALID)), st.data())
def test_any_bytes_are_taken_or_refused_with_400(model: type[BaseModel], data: st.DataObject) -> None:
    raw = bytearray(json.dumps(VALID[model]).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        raw = raw or bytearray(b" ")
    error = refused_or_none(model, bytes(raw))
    assert error is None or (error.code and len(error.message) < 1500)


@pytest.mark.parametrize("model", OWN, ids=lambda model: model.__name__)
def test_own_bodies_refuse_unknown_fields(model: type[BaseModel]) -> None:
    error = refusal(model, VALID[model] | {"zzz": 1})
    assert error.field == "zzz" and error.hint


# ---- answers ----
def test_an_answer_leaves_out_what_is_absent_and_keeps_what_is_null() -> None:
    message = AnsweredMessage(content=None)
    choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason="stop")
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    chat = ChatCompletion(id="x", created=1, model="m", choices=[choice], usage=usage, system_fingerprint="base")
    dumped = json.loads(chat.model_dump_json())
    assert dumped["object"] == "chat.completion" and "prompt_token_ids" not in dumped
    assert dumped["choices"][0]["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert dumped["choices"][0]["logprobs"] is None and "token_ids" not in dumped["choices"][0]
