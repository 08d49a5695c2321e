"""TOML files: the values, and the line of each."""

from __future__ import annotations

import pytest

from groupwise.config.yaml import Document
from groupwise.errors import ConfigError
from groupwise.run.config_file import read_run
from wording import raises

TEXT = '''\
# a comment
title = "x"
servers.alpha.ip = "10.0.0.1"

[owner]
name = "me" # after it
"quoted key" = 1
bio = """
[not.a.table]
key = "value"
"""
sizes = [ # of what "it" has
  1, # one
  2,
]

[[steps]]
name = "first"
tool = { id = "a", options = { deep = true } }

[steps.inner]
depth = 1

[[steps.parts]]
n = 1

[[steps]]
name = "second"

[[steps.parts]]
n = 2

[[steps.parts]]
n = 3
[owner.late]
'''

LINES = {
    ("title",): 2,
    ("servers", "alpha", "ip"): 3,
    ("owner",): 5,
    ("owner", "name"): 6,
    ("owner", "quoted key"): 7,
    ("owner", "bio"): 8,
    ("owner", "sizes"): 12,
    ("owner", "sizes", 1): 12,
    ("steps", 0): 17,
    ("steps", 0, "name"): 18,
    ("steps", 0, "tool", "options", "deep"): 19,
    ("steps", 0, "inner", "depth"): 22,
    ("steps", 0, "parts", 0, "n"): 25,
    ("steps", 1, "name"): 28,
    ("steps", 1, "parts", 0, "n"): 31,
    ("steps", 1, "parts", 1): 33,
    ("steps", 1, "parts", 1, "n"): 34,
    ("owner", "late"): 35,
}


@pytest.fixture
def document(tmp_path):
    (tmp_path / "c.toml").write_text(TEXT)
    return Document.read(tmp_path / "c.toml")


@pytest.mark.parametrize(("keys", "line"), LINES.items())
def test_every_key_has_its_line(document, keys, line):
    assert document.origin(keys) == f"c.toml:{line}"


def test_the_values_are_tomls(document):
    assert document.data["owner"]["bio"] == '[not.a.table]\nkey = "value"\n'
    assert document.data["steps"][1]["parts"] == [{"n": 2}, {"n": 3}]


def test_a_key_that_is_not_there_has_the_line_around_it(document):
    assert document.origin(("owner", "age")) == "c.toml:5"


@pytest.mark.parametrize(
    "text",
    [
        "name = x\n",
        "a = 1\na = 2\n",
        "",
    ],
)
def test_what_is_not_toml(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    with raises(ConfigError):
        Document.read(tmp_path / "c.toml")


def test_a_run_may_be_written_in_toml(tmp_path):
    (tmp_path / "run.toml").write_text('rewards = ["m:f"]\n[data]\nsource = "p.jsonl"\n[train]\nsteps = 7\n')
    loaded = read_run(tmp_path / "run.toml", ["train.learning_rate=1e-3"])
    assert loaded.system == "Groupwise" and (loaded.config.train.steps, loaded.config.train.learning_rate) == (7, 1e-3)
    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace("steps", "stepz"))
    with raises(ConfigError, field="train.stepz", kind="unknown"):
        read_run(tmp_path / "run.toml")
    with raises(ConfigError):
        read_run(tmp_path / "runs.toml")
