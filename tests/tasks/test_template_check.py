"""What is said of each family's template before the first episode."""

from __future__ import annotations

import pytest

from groupwise.tasks.template_check import Growth, template_check
from template_families import FAMILIES, PLAIN, tokenizer_of, with_tokens

APPENDS, REWRITES, REFUSES = Growth

# turns, tool calls, thoughts, thoughts before tool calls, whether tools are shown
FOUND = {
    "starter": (APPENDS, APPENDS, APPENDS, APPENDS, True),
    "hermes": (APPENDS, APPENDS, APPENDS, APPENDS, True),
    "qwen3": (APPENDS, APPENDS, REWRITES, APPENDS, True),
    "qwen3_5": (REWRITES, APPENDS, REWRITES, APPENDS, True),
    "llama3": (APPENDS, APPENDS, APPENDS, REWRITES, True),  # writes nothing beside a call
    "mistral": (APPENDS, APPENDS, APPENDS, REWRITES, True),
    "gemma": (APPENDS, REFUSES, APPENDS, REFUSES, False),
    "deepseek": (REWRITES, REWRITES, REWRITES, REWRITES, False),
    "nemotron": (APPENDS, APPENDS, REWRITES, APPENDS, True),
    "glm": (APPENDS, APPENDS, REWRITES, APPENDS, True),
    "no special tokens": (APPENDS, APPENDS, APPENDS, APPENDS, False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_found(name):
    found = template_check(tokenizer_of(name))
    assert (found.turns, found.tools, found.thoughts, found.tool_thoughts, found.shows_tools) == FOUND[name]
    assert found.appends is (REWRITES not in FOUND[name])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("starter", "the chat template only appends: an episode is trained as one sequence"),
        (
            "qwen3",
            "the chat template rewrites thoughts once the conversation goes on: what follows is trained as a sequence "
            "of its own (env/forks counts them)",
        ),
        (
            "gemma",
            "the chat template only appends: an episode is trained as one sequence; it cannot render tool calls and "
            "thoughts before tool calls; it does not show tools to the policy",
        ),
    ],
)
def test_the_line_that_is_shown(name, line):
    assert str(template_check(tokenizer_of(name))) == line


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}"])
def test_a_template_that_renders_nothing(template):
    """... is said to be one, and no error: the run's own messages may be another matter."""
    tokenizer = with_tokens(PLAIN, (), eos="</s>")
    tokenizer.chat_template = template
    found = template_check(tokenizer)
    assert {found.turns, found.tools, found.thoughts, found.tool_thoughts} == {REFUSES}
    assert "cannot render turns, tool calls, thoughts and thoughts before tool calls" in str(found)
