import pytest

from groupwise.config.yaml import Document, dotted, inline, parse_keys, to_yaml
from groupwise.errors import ConfigError
from wording import raises

SHORTHAND = {"rewards": "function"}


def read(tmp_path, text: str | bytes) -> Document:
    path = tmp_path / "cfg.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Document.read(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "- 1\n",
        "a: 1\na: 2\n",
        "a: [1\nb: 2\n",
        "a:\n\tb: 1\n",
        "a: !!python/object:os.system x\n",
        "a: 1\n---\nb: 2\n",
        b"a: \xff\n",
        "a: \x00\n",
    ],
)
def test_files_that_cannot_be_read(tmp_path, text):
    with raises(ConfigError):
        read(tmp_path, text)


def test_a_missing_file_and_a_directory(tmp_path):
    with raises(ConfigError):
        Document.read(tmp_path / "none.yaml")
    with raises(ConfigError):
        Document.read(tmp_path)


def test_yaml_is_version_1_2(tmp_path):
    assert read(tmp_path, "a: 1e-5\nb: no\nc: 12:30\nd: on\n").data == {"a": 1e-5, "b": "no", "c": "12:30", "d": "on"}


def test_where_a_value_was_written(tmp_path):
    document = read(tmp_path, "a:\n  b: 1\n  c:\n    - 2\n    - {d: 3}\ne:\n")
    assert document.where(("a", "b")) == " (cfg.yaml:2)"
    assert document.where(("a", "c", 1, "d")) == " (cfg.yaml:5)"
    assert document.where(("a", "c", 7)) == " (cfg.yaml:3)"
    assert document.where(("none",)) == " (cfg.yaml)"
    document.override("a.b=2", shorthand={})
    assert document.where(("a", "b")) == " (given as 'a.b=2')"
    assert Document({}).where(("a",)) == ""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a.b=1e-3", {"a": {"b": 1e-3}}),
        ("a.b[0].c=yes", {"a": {"b": [{"c": "yes"}]}}),
        ("a=", {"a": None}),
        ("a=[1, x=y]", {"a": [1, "x=y"]}),
        ("a=pkg.mod:function", {"a": "pkg.mod:function"}),
        ("a={b: 2}", {"a": {"b": 2}}),
    ],
)
def test_overrides_make_what_is_not_there(override, expected):
    document = Document({})
    document.override(override, shorthand=SHORTHAND)
    assert document.data == expected


def test_the_last_override_wins():
    document = Document({"a": {"b": 1, "c": 2}})
    for text in ("a.b=5", "a.b=6", "a.d=7"):
        document.override(text, shorthand=SHORTHAND)
    assert document.data == {"a": {"b": 6, "c": 2, "d": 7}}


def test_an_override_inside_a_shorthand():
    document = Document({"rewards": ["m:f"], "other": ["m:f"]})
    document.override("rewards[0].weight=0.5", shorthand=SHORTHAND)
    document.override("rewards[1]=m:g", shorthand=SHORTHAND)
    assert document.data["rewards"] == [{"function": "m:f", "weight": 0.5}, "m:g"]
    with raises(ConfigError):
        document.override("other[0].weight=1", shorthand=SHORTHAND)


@pytest.mark.parametrize(
    "override",
    [
        "steps",
        "=3",
        "a..b=3",
        "a[x]=3",
        "steps.x=3",
        "list[5]=3",
        "list.x=3",
        "a=[1",
    ],
)
def test_overrides_that_are_refused(override):
    document = Document({"steps": 1, "list": [1, 2]})
    with raises(ConfigError):
        document.override(override, shorthand=SHORTHAND)


def test_keys_and_their_spelling():
    assert parse_keys("a.b_c[0][12].d-e") == ("a", "b_c", 0, 12, "d-e")
    assert dotted(("a", "b_c", 0, 12, "d-e")) == "a.b_c[0][12].d-e"


def test_the_order_of_keys_is_kept():
    assert to_yaml({"b": 1, "a": [True, None, "no"]}).splitlines() == ["b: 1", "a:", "- true", "- null", "- no"]


def test_a_value_on_one_line():
    values = (1, 1e-5, "no", "a: b", None, True, [1, {"a": "x"}], {"b": [1, 2]}, "1e-5")
    assert [Document({}).data | {"v": value} for value in values] == [_read_back(inline(value)) for value in values]
    assert not any("\n" in inline(value) for value in values)


def _read_back(text: str) -> dict:
    document = Document({})
    document.override(f"v={text}", shorthand={})
    return document.data


def test_the_origin_of_a_value(tmp_path):
    document = read(tmp_path, "a:\n  b: [1, {c: 2}]\nd: 3\n")
    document.override("a.e=4", shorthand={})
    origins = {("a", "b", 1, "c"): "cfg.yaml:2", ("d",): "cfg.yaml:3", ("a", "nothing"): "cfg.yaml:1"}
    origins |= {("a", "e"): "given as 'a.e=4'", ("nothing",): "cfg.yaml"}
    assert {keys: document.origin(keys) for keys in origins} == origins
    assert document.where(("d",)) == " (cfg.yaml:3)" and Document({}).where(("d",)) == ""
