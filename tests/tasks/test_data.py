import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.config.data import DataConfig, DatasetConfig
from groupwise.errors import ConfigError, DataError, LoadError
from groupwise.tasks.prompt_stream import PromptSource, Ticket
from groupwise.tasks.prompts import open_prompts, to_prompt
from groupwise.types import Prompt
from prompt_streams import take
from wording import raises

CHAT = [{"role": "user", "content": "2+2?"}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def write_rows(folder, rows, name="rows.jsonl"):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / name).write_text(text, encoding="utf-8")


def refusal(row, **options) -> str:
    with pytest.raises(DataError) as caught:
        to_prompt(row, id="rows.jsonl:3", **options)
    return str(caught.value)


def numbered(count: int) -> list[Prompt]:
    return [Prompt(id=str(index), text="x") for index in range(count)]


# ---- rows ----


def test_json_lines(tmp_path):
    write_rows(tmp_path, [{"prompt": "a", "answer": 1}, "", {"messages": CHAT, "answer": "é"}])
    source = open_prompts(DataConfig(source="rows.jsonl"), folder=tmp_path)
    first, second = source.known
    assert (first.id, first.messages, first.columns) == ("rows.jsonl:1", (user("a"),), {"answer": 1})
    assert (second.id, second.text, second.columns) == ("rows.jsonl:3", None, {"answer": "é"})
    assert second.messages == ({"role": "user", "content": "2+2?"},)
    assert len(source) == 2


def test_the_prompt_key_and_the_limit(tmp_path):
    write_rows(tmp_path, [{"question": str(index), "prompt": "other"} for index in range(5)] + ["not JSON"])
    config = DataConfig(source="rows.jsonl", prompt_key="question", limit=3)
    prompts = open_prompts(config, folder=tmp_path).known
    assert [prompt.text for prompt in prompts] == ["0", "1", "2"]
    assert prompts[0].columns == {"prompt": "other"}


def test_the_system_message_and_tools():
    tool = {"type": "function", "function": {"name": "add"}}
    prompt = to_prompt({"prompt": CHAT, "tools": [tool]}, id="x", system="Be brief.")
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, *CHAT)
    assert (prompt.tools, prompt.columns) == ((tool,), {})


def test_a_conversation_with_tool_calls():
    messages = [
        {"role": "user", "content": "2+2?", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},  # as many servers say it
        {"role": "tool", "content": "4", "tool_call_id": "2"},
    ]
    prompt = to_prompt({"messages": messages}, id="x")
    assert prompt.messages is not None
    assert prompt.messages[0] == {"role": "user", "content": "2+2?"}
    assert "content" not in prompt.messages[1]
    assert prompt.messages[2]["content"] == prompt.messages[3]["content"] == ""


def test_a_string_is_a_message_of_the_user():
    row = {"prompt": "2+2?", "answer": "4"}
    plain = to_prompt(row, id="x")
    assert (plain.messages, plain.text, plain.columns) == ((user("2+2?"),), "2+2?", {"answer": "4"})
    asked = to_prompt(row, id="x", system="Be brief.")
    assert asked.messages == ({"role": "system", "content": "Be brief."}, user("2+2?")) and asked.text is None
    tool = {"type": "function", "function": {"name": "add"}}
    offered = to_prompt(row | {"tools": [tool]}, id="x")
    assert (offered.tools, offered.text) == ((tool,), None)  # a model without a template must not lose them in silence
    raw = to_prompt(row, id="x", raw=True)
    assert (raw.messages, raw.text) == (None, "2+2?")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "the row is a list; it must be an object"),
        ({"answer": 1}, "no 'prompt' and no 'messages'; the columns are 'answer'"),
        ({}, "the columns are none"),
        ({"prompt": "a", "messages": CHAT}, "both 'messages' and 'prompt' are there"),
        ({"prompt": " \n"}, "'prompt' is an empty string"),
        ({"prompt": 3}, "prompt is 3 (int); it must be a string or a list of messages"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": ["hi"]}, "messages[0] is a str; a message is"),
        ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role is 'human'; it must be one of system"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role is ['user']"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing or empty"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content is missing or empty"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content is a int"),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "messages[0].content is a list; it must be text or a list of",
        ),
        ({"messages": [*CHAT, {"role": "assistant", "content": "4"}]}, "which as a rule is the answer"),
        ({"prompt": [*CHAT, {"role": "system", "content": "4"}]}, "ends with a message of 'system'"),
        ({"prompt": [*CHAT, {"role": "assistant", "tool_calls": [{}]}]}, "which nothing can continue"),
        ({"prompt": "a", "completions": 1}, "the column 'completions' has a name that rewards get from us"),
        ({"prompt": CHAT, "tools": "add"}, "'tools' is 'add'; it must be a list"),
    ],
)
def test_bad_rows_are_named(row, message):
    text = refusal(row)
    assert message in text
    assert text.startswith("rows.jsonl:3: ")


def test_options_that_do_not_fit_the_row():
    assert "no column 'question'; it has 'prompt'" in refusal({"prompt": "a"}, prompt_key="question")
    assert "data.system needs a chat prompt" in refusal({"prompt": "a"}, system="s", raw=True)
    assert "tools need a chat prompt" in refusal({"prompt": "a", "tools": [{}]}, raw=True)
    row = {"prompt": [{"role": "system", "content": "x"}, *CHAT]}
    assert "prompt[0] is a system message already" in refusal(row, system="s")


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a"',
        b"3",
        b'{"prompt": "\xff"}',
    ],
)
def test_bad_lines_are_named(tmp_path, line):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with raises(DataError):
        open_prompts(DataConfig(source="rows.jsonl"), folder=tmp_path)


def test_missing_and_empty_files(tmp_path):
    write_rows(tmp_path, [])
    with raises(DataError):
        open_prompts(DataConfig(source="rows.jsonl"), folder=tmp_path)
    with raises(DataError):
        open_prompts(DataConfig(source="row.jsonl"), folder=tmp_path)
    with raises(DataError):
        PromptSource([])


ROWS = [
    {"prompt": CHAT, "answer": "4", "level": 1, "note": None},
    {"prompt": [{"role": "user", "content": "3+\n3?"}], "answer": "6", "level": 2, "note": "x"},
]


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet", "lines.json", "inside.json", "one.json"])
def test_one_local_file_of_another_kind(tmp_path, name):
    """A list of objects, one in an object, lines with the wrong suffix, a table: the same rows."""
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "inside.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0]))
    write_rows(tmp_path, ROWS, "lines.json")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    prompts = open_prompts(DataConfig(source=name), folder=tmp_path).known
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["2+2?", "3+\n3?"][: len(prompts)]
    assert len(prompts) == (1 if name == "one.json" else 2)
    assert prompts[0].columns == {"answer": "4", "level": 1, "note": None}


def test_a_local_csv_has_the_types_that_its_columns_look_like(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt,answer,level\n"2+\n2?",four,1\n3+3?,"six, or 6",2\n')
    prompts = open_prompts(DataConfig(source="rows.csv", limit=5), folder=tmp_path).known
    assert [(prompt.text, prompt.columns) for prompt in prompts] == [
        ("2+\n2?", {"answer": "four", "level": 1}),
        ("3+3?", {"answer": "six, or 6", "level": 2}),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", b'[{"prompt": "a"},'),
        ("rows.json", b'["\xff"]'),
        ("rows.json", b"[1]"),
        ("rows.csv", b"prompt,answer\na\n"),
        ("rows.parquet", b"not one"),
    ],
)
def test_files_that_are_not_what_they_are_called(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with raises(DataError):
        open_prompts(DataConfig(source=name), folder=tmp_path)


def test_a_file_that_is_not_there_names_one_like_it(tmp_path):
    (tmp_path / "train.parquet").touch()
    with raises(DataError):
        open_prompts(DataConfig(source="trian.parquet"), folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"split": "test"}, "split"), ({"split": "train[5]"}, "split"), ({"args": {"sep": ";"}}, "args")],
)
def test_a_file_has_no_other_splits_and_takes_no_arguments(options, field):
    with pytest.raises(ValidationError) as caught:
        DataConfig(source="rows.csv", **options)
    assert caught.value.errors()[0]["loc"] == (field,)


def test_rows_from_a_function(tmp_path):
    (tmp_path / "my_rows.py").write_text(
        "import itertools\n"
        "def rows(start): return ({'prompt': str(n), 'answer': n} for n in itertools.count(start))\n"
        "def fails(): raise KeyError('x')\n"
        "def nothing(): return None\n"
    )
    config = DataConfig(source="my_rows:rows", args={"start": 5}, limit=3)
    prompts = open_prompts(config, folder=tmp_path).known
    assert [(prompt.id, prompt.text) for prompt in prompts] == [
        ("my_rows:rows:0", "5"),
        ("my_rows:rows:1", "6"),
        ("my_rows:rows:2", "7"),
    ]
    with raises(DataError):
        open_prompts(DataConfig(source="my_rows:fails"), folder=tmp_path)
    with raises(DataError):
        open_prompts(DataConfig(source="my_rows:nothing", args={"a": 1}), folder=tmp_path)
    with raises(DataError):
        open_prompts(DataConfig(source="my_rows:nothing"), folder=tmp_path)
    with raises(LoadError):
        open_prompts(DataConfig(source="my_rows:row"), folder=tmp_path)


def test_saved_hugging_face_datasets(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"messages": CHAT, "answer": str(index)} for index in range(3)])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(tmp_path / "several")

    one = open_prompts(DatasetConfig(source="one"), folder=tmp_path)
    assert [prompt.columns["answer"] for prompt in one.known] == ["0", "1", "2"]
    assert one.known[0].messages == tuple(CHAT)
    test = open_prompts(DatasetConfig(source="several", split="test"), folder=tmp_path)
    assert [prompt.id for prompt in test.known] == ["several:0"]
    assert len(open_prompts(DatasetConfig(source="several"), folder=tmp_path)) == 3
    with raises(DataError):
        open_prompts(DatasetConfig(source="several", split="dev"), folder=tmp_path)
    with raises(ConfigError):
        open_prompts(DatasetConfig(source="one", split="test"), folder=tmp_path)


def test_datasets_through_a_builder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.csv").write_text("prompt,answer\na,1\nb,2\n")
    args = {"data_files": str(tmp_path / "rows.csv"), "cache_dir": str(tmp_path / "cache")}
    prompts = open_prompts(DatasetConfig(source="csv", args=args), folder=tmp_path).known
    assert [(prompt.text, prompt.columns) for prompt in prompts] == [("a", {"answer": 1}), ("b", {"answer": 2})]
    with raises(DataError):
        open_prompts(DatasetConfig(source="csv", split="nosuch", args=args), folder=tmp_path)


# ---- the stream ----


def test_without_shuffling_the_rows_come_in_order():
    source = PromptSource(numbered(3), shuffle=False)
    assert [prompt.id for prompt in take(source, 7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_epochs_are_shuffled_by_seed_and_number():
    first, second = PromptSource(numbered(20), seed=1), PromptSource(numbered(20), seed=1)
    epochs = [[prompt.id for prompt in take(first, 20)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(str(index) for index in range(20))
    assert [prompt.id for prompt in take(second, 40)] == epochs[0] + epochs[1]
    assert [prompt.id for prompt in take(PromptSource(numbered(20), seed=2), 20)] != epochs[0]


def test_evaluation_data_is_read_in_order_and_does_not_move_the_stream(tmp_path):
    write_rows(tmp_path, [{"prompt": str(index)} for index in range(10)])
    source = open_prompts(DataConfig(source="rows.jsonl"), folder=tmp_path, seed=3)
    assert [prompt.text for prompt in source.known[:2]] == ["0", "1"]
    assert source.cursor == {"epoch": 0, "position": 0, "rows": 10, "unresolved": []}
    ordered = open_prompts(DatasetConfig(source="rows.jsonl"), folder=tmp_path, seed=3)
    assert [prompt.text for prompt in take(ordered, 10)] == [str(index) for index in range(10)]


@settings(max_examples=40)
@given(rows=st.integers(1, 7), takes=st.lists(st.integers(0, 9), max_size=5), rest=st.integers(0, 20))
def test_a_restored_stream_goes_on_as_if_it_had_not_stopped(rows, takes, rest):
    original = PromptSource(numbered(rows), seed=4)
    for n in takes:
        take(original, n)
    cursor = json.loads(json.dumps(original.cursor))
    restored = PromptSource(numbered(rows), seed=4)
    restored.restore(cursor)
    assert take(restored, rest) == take(original, rest)
    assert restored.cursor == original.cursor


def test_a_cursor_of_another_dataset_is_refused():
    source = PromptSource(numbered(3))
    with raises(DataError):
        source.restore(PromptSource(numbered(4)).cursor)
    with raises(DataError):
        source.restore({"epoch": 0, "position": 9, "rows": 3})


# ---- tickets ----


def test_a_row_has_another_ticket_in_every_epoch():
    source = PromptSource(numbered(3), seed=5)
    issued = source.issue(9)
    assert len({each.ticket for each in issued}) == 9
    assert [each.ticket.epoch for each in issued] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [each.prompt for each in issued] == take(PromptSource(numbered(3), seed=5), 9)
    assert not any(each.again for each in issued) and source.epochs == 3.0


def test_what_was_not_resolved_is_issued_again_first():
    source = PromptSource(numbered(5), shuffle=False)
    issued = source.issue(7)
    for index in (6, 1, 3, 0):
        source.resolve(issued[index].ticket)
    restored = PromptSource(numbered(5), shuffle=False)
    restored.restore(json.loads(json.dumps(source.cursor)))
    again = restored.issue(4)
    assert [each.prompt.id for each in again] == ["2", "4", "0", "2"]
    assert [tuple(each.ticket) for each in again] == [(0, 2), (0, 4), (1, 0), (1, 2)]
    assert [each.again for each in again] == [True, True, True, False]


def test_a_ticket_is_resolved_once():
    source = PromptSource(numbered(3))
    [issued] = source.issue(1)
    cursor = source.cursor
    source.resolve(issued.ticket)
    with raises(ValueError):
        source.resolve(issued.ticket)
    with raises(ValueError):
        source.resolve(Ticket(0, 2))
    source.restore(cursor)
    with raises(ValueError):  # not yet again
        source.resolve(issued.ticket)
    assert source.issue(1)[0].ticket == issued.ticket
    source.resolve(issued.ticket)


ACTS = st.tuples(st.sampled_from(["issue", "resolve", "resolve", "save", "kill"]), st.integers(0, 99))


@settings(max_examples=60)
@given(rows=st.integers(1, 6), shuffle=st.booleans(), acts=st.lists(ACTS, max_size=40))
def test_no_prompt_is_lost_or_trained_twice(rows, shuffle, acts):
    """Whatever the order in which prompts are done, and wherever the run is killed and resumed from its last cursor."""

    def begin():
        return PromptSource(numbered(rows), seed=2, shuffle=shuffle)

    source = begin()
    trained, flying, saved = {}, {}, (source.cursor, {})
    for act, number in acts:
        if act == "issue":
            for each in source.issue(1 + number % 3):
                assert each.ticket not in trained and each.ticket not in flying
                flying[each.ticket] = each.prompt
        elif act == "resolve" and flying:
            ticket = sorted(flying)[number % len(flying)]
            source.resolve(ticket)
            trained[ticket] = flying.pop(ticket)
        elif act == "save":
            saved = json.loads(json.dumps(source.cursor)), dict(trained)
        elif act == "kill":
            source = begin()
            source.restore(saved[0])
            trained, flying = dict(saved[1]), {}
    unresolved = len(source.cursor["unresolved"])
    done = trained | {each.ticket: each.prompt for each in source.issue(unresolved - len(flying))} | flying
    assert [done[ticket] for ticket in sorted(done)] == take(begin(), len(done))


@pytest.mark.parametrize(
    "unresolved", [[[0, 1]], [[0, 0], [0, 0]], [[0]], [[-1, 0]], [[1, 0]], [[0, 3]]], ids=lambda each: json.dumps(each)
)
def test_a_cursor_with_tickets_that_cannot_be_is_refused(unresolved):
    with raises(DataError):
        PromptSource(numbered(3)).restore({"epoch": 0, "position": 1, "rows": 3, "unresolved": unresolved})


def test_a_cursor_without_tickets_has_nothing_on_its_way():
    source = PromptSource(numbered(3), shuffle=False)
    source.restore({"epoch": 1, "position": 2, "rows": 3})
    assert [each.prompt.id for each in source.issue(2)] == ["2", "0"]


def test_a_prompt_by_its_id():
    source = PromptSource(numbered(3))
    assert source.prompt("2").id == "2" and source.cursor["position"] == 0
    with raises(DataError):
        source.prompt("x")


def test_a_case_needs_no_prompt(tmp_path):
    (tmp_path / "cases.jsonl").write_text('{"question": "2+2?", "answer": "4", "tools": ["a"]}\n', encoding="utf-8")
    config = DatasetConfig(source="cases.jsonl")
    with raises(DataError):
        open_prompts(config, folder=tmp_path)
    (prompt,) = open_prompts(config, folder=tmp_path, cases=True).known
    assert dict(prompt.columns) == {"question": "2+2?", "answer": "4", "tools": ["a"]}
    assert prompt.text is None and prompt.messages is None
    with raises(DataError):
        open_prompts(DatasetConfig(source="cases.jsonl", system="Be brief."), folder=tmp_path, cases=True)
