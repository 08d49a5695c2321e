"""Drawing from a stream of prompts without training on them."""

from __future__ import annotations

from groupwise.tasks.prompt_stream import PromptStream
from groupwise.types import Prompt


def take(stream: PromptStream, n: int) -> list[Prompt]:
    """The next n prompts, resolved at once."""
    issued = stream.issue(n)
    for each in issued:
        stream.resolve(each.ticket)
    return [each.prompt for each in issued]
