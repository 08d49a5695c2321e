"""Commands that people know from elsewhere: what does the same is said, and is there."""

import re

import pytest

from cli_project import cli
from groupwise.cli.frame import ELSEWHERE
from wording import wording

COMMAND = re.compile(r"groupwise ((?:[a-z-]+ )*[a-z-]+)((?: [A-Z:@]+| --[a-z-]+(?: [A-Za-z]+)?)*)")


@pytest.mark.parametrize("word", [*ELSEWHERE, "ls", "List"])
def test_a_word_from_elsewhere_is_answered(word: str):
    ended = cli(word)
    assert ended.exit_code == 2
    wording(ended.stderr)


@pytest.mark.parametrize("word", ELSEWHERE)
def test_what_is_named_in_its_place_is_there(word: str):
    named = [(words, re.findall(r"--[a-z-]+", options)) for words, options in COMMAND.findall(ELSEWHERE[word])]
    assert named
    for words, options in named:
        while True:  # words of the sentence that follow a command are none of its own
            shown = cli(*words.split(), "--help")
            if shown.exit_code == 0 and "Usage" in shown.stdout:
                break
            assert " " in words, words
            words = words.rpartition(" ")[0]
        assert all(option in shown.stdout for option in options)


def test_a_file_is_run_by_run():
    for words in (("my_run.yaml",), ("train", "my_run.yaml")):
        ended = cli(*words)
        assert ended.exit_code == 2 and "groupwise run my_run.yaml" in " ".join(ended.stderr.replace("│", "").split())


def test_other_words_are_unknown_as_ever():
    assert "No such command" in cli("nope").stderr
