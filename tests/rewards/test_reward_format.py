import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.errors import ConfigError
from groupwise.rewards.format import json_format, regex_match, tag_format, tag_progress, think_format
from wording import raises


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": each}] for each in texts]


# ---- tags ----

WELL_FORMED = ["<think>a</think><answer>b</answer>", "\n<think>\na\n</think>\n\n<answer>b</answer>\n"]
MALFORMED = {
    "reversed": "<answer>b</answer><think>a</think>",
    "more behind": "<think>a</think><answer>b</answer>!",
    "more before": "so <think>a</think><answer>b</answer>",
    "more between": "<think>a</think> so <answer>b</answer>",
    "empty thought": "<think> </think><answer>b</answer>",
    "empty answer": "<think>a</think><answer></answer>",
    "only tags": "<think></think><answer></answer>",
    "answer twice": "<think>a</think><answer>b</answer><answer>c</answer>",
    "thought twice": "<think>a</think><think>a</think><answer>b</answer>",
    "all twice": "<think>a</think><answer>b</answer>" * 2,
    "opened twice": "<think>a<think></think><answer>b</answer>",
    "closed twice": "<think>a</think></think><answer>b</answer>",
    "nested": "<think>a<answer>b</answer></think>",
    "crossed": "<think>a<answer>b</think>c</answer>",
    "closed before opened": "</think>a<think></answer>b<answer>",
    "no answer": "<think>a</think>",
    "tag-only answer": "<answer>42</answer>",
    "other case": "<Think>a</Think><Answer>b</Answer>",
    "blanks in tags": "<think >a</think><answer>b</answer>",
    "stuffed": "<think><think><think></answer></answer>" * 100,
    "empty": "",
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed(text):
    assert tag_format([text]) == tag_format(chat(text)) == tag_progress([text]) == [1.0]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name):
    text = MALFORMED[name]
    assert tag_format([text]) == tag_format(chat(text)) == [0.0]
    assert tag_progress([text])[0] < 1.0


def test_other_tags():
    assert tag_format(["<plan>a</plan>", WELL_FORMED[0]], tags=["plan"]) == [1.0, 0.0]
    assert tag_progress(["<plan>a</plan>", "<a>1</a><b>"], tags=["plan"]) == [1.0, 0.0]
    assert tag_progress(["<a>1</a><b>2</b><c>3"], tags=["a", "b", "c"]) == [pytest.approx(2.5 / 3)]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 0.0),
        ("<think>", 0.25),
        ("<think>a", 0.25),
        ("<think>a</think>", 0.5),
        ("<think>a</think><answer>", 0.75),
        ("<think>a</think><answer>b", 0.75),
        ("<think></think><answer>b</answer>", 0.25 - 0.018),  # what stands behind an empty tag is outside
        ("<answer>b</answer><think>a</think>", 0.5 - 0.018),  # the answer counts only behind the thought
        ("<answer>b</answer>", 0.0),
        ("</think></answer>", 0.0),
        ("<think><think>", 0.0),
        ("<think>a</think><answer>b</answer>" + "x" * 100, 0.9),
        ("<think>a</think> 12345 <answer>b</answer>", 0.995),
        ("<think>a</think><answer>b</answer>" + "x" * 5000, 0.0),
    ],
)
def test_progress(text, score):
    assert tag_progress([text]) == [pytest.approx(score)]


def test_progress_grows_with_each_tag():
    texts = ["", "<think>a", "<think>a</think>", "<think>a</think><answer>b", "<think>a</think><answer>b</answer>"]
    assert tag_progress(texts) == sorted(tag_progress(texts)) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_think_format():
    texts = [
        "<think>a</think> 42",
        "<think>a</think>",
        "<think></think> 42",
        "a</think> 42",
        "42",
        "x <think>a</think> 4",
    ]
    assert think_format(texts) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert think_format(texts, opened=True) == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    twice = ["<think>a</think> b <think>c</think> 42", "<think>a</think></think> 42", "<think><think>a</think> 42"]
    assert think_format(twice) == [0.0, 0.0, 0.0]
    assert think_format(["<plan>a</plan> b"], tag="plan") == [1.0]


# ---- JSON ----


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"a": 1}', 1),
        (" [1, 2]\n", 1),
        ('```json\n{"a": 1}\n```', 1),
        ("```\n[]\n```", 1),
        ("{}", 1),
        ("3", 0),
        ('"text"', 0),
        ("null", 0),
        ("true", 0),
        ("", 0),
        ("``````", 0),
        ("```json\n```", 0),
        ('Here it is: {"a": 1}', 0),
        ('{"a": 1} {"a": 2}', 0),
        ('{"a": 1, "a": 2}', 0),
        ('{"a": NaN}', 0),
        ('{"a": -Infinity}', 0),
        ("{'a': 1}", 0),
        ('{"a": 1,}', 0),
        ('{"a": ' + "9" * 5000 + "}", 0),
        ("[" * 100_000, 0),
        ("[" * 100_000 + "]" * 100_000, 0),
    ],
    ids=lambda value: str(value)[:16],
)
def test_json(text, score):
    assert json_format([text]) == json_format(chat(text)) == [score]


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "score"),
    [
        ({"city": "Paris", "people": 2}, 1),
        ({"city": "Paris", "people": -2}, 0),
        ({"city": "Paris", "people": True}, 0),
        ({"city": "", "people": 2}, 0),
        ({"city": "Paris"}, 0),
        ({"city": "Paris", "people": 2, "score": 1.0}, 0),
        ({}, 0),
        ([], 0),
    ],
)
def test_json_of_a_schema(value, score):
    assert json_format([json.dumps(value)], schema=SCHEMA) == [score]


def test_types_and_places():
    assert json_format(["3", "true", '"a"', "null"], types=["number", "boolean"]) == [1, 1, 0, 0]
    assert json_format(["3", "true"], types=["number"]) == [1, 0]
    assert json_format(["3", "{}"], schema={"type": "integer"}) == [1, 0]
    assert json_format(["3", "{}"], schema={}, types=["object"]) == [0, 1]
    assert json_format(["<answer>{}</answer>", "{}"], tag="answer") == [1, 0]
    assert json_format(["<think>so</think>\n{}", "{} </think> 4"], after="</think>") == [1, 0]
    assert json_format(['{"a": "\\ud800"}'], schema={"type": "array"}) == [0]
    deep = '{"a": ' * 400 + "1" + "}" * 400
    assert json_format([deep], schema={"type": "object"})[0] in (0.0, 1.0)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "http://127.0.0.1:9/x"},
        {"$ref": "file:///etc/hosts"},
        {"minimum": "three"},
    ],
)
def test_a_schema_that_is_none_is_refused(schema):
    with raises(ConfigError):
        json_format(["{}"], schema=schema)


def test_unknown_types_are_refused():
    with raises(ConfigError):
        json_format(["{}"], types=["map"])


# ---- patterns ----


def test_regex_match():
    assert regex_match(["a\nb", "b"], pattern="a.b") == [1.0, 0.0]
    assert regex_match(["42", "is 42", "٤٢"], pattern="[0-9]+", full=True) == [1.0, 0.0, 0.0]
    assert regex_match(["PARIS"], pattern="paris", ignore_case=True) == [1.0]
    assert regex_match(["<a>4</a>", "4", "<a></a>"], pattern="4|", tag="a") == [1.0, 0.0, 1.0]
    assert regex_match(["4</think>x"], pattern="4", after="</think>") == [0.0]


# ---- all of them ----


@pytest.mark.parametrize("flood", ["<think>", "</think>", "<think>a</think>", "<", "[{", "```", "a " * 5])
def test_long_texts_take_linear_time(flood):
    text = flood * (200_000 // len(flood))
    start = time.process_time()
    assert tag_format([text]) == think_format([text]) == json_format([text]) == [0.0]
    assert tag_progress([text])[0] <= 0.5
    assert time.process_time() - start < 4


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "{", "}"]), max_size=9))
def test_full_credit_is_exactly_the_form(pieces):
    text = "".join(pieces)
    (whole,), (part,) = tag_format([text]), tag_progress([text])
    assert whole in (0.0, 1.0) and 0 <= part <= 1
    if whole:
        assert part == 1.0
    if part == 1.0:  # the only difference: tag_progress lets a tag enclose a marker of another one
        assert whole == 1.0 or text.count("<answer>") + text.count("</answer>") != 2
