"""The configuration's `chat` section, of a run and of a server: how conversations become tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from groupwise.config.section import Section, Text

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]\w{0,63}$")]


class ChatConfig(Section):
    """Configures the chat template and its variables. The section applies wherever the model's chats are rendered:
    in training, evaluation, environments, `groupwise check`, `chat` and `serve`."""

    template: Text | None = None
    """A chat template in the place of the model's own: a Jinja file, the template itself, or the name of one of several
    that the tokenizer has."""
    template_kwargs: dict[Variable, Any] = Field(default_factory=dict)
    """Variables that the template reads, by its names: `enable_thinking: false`, `reasoning_effort: low`."""
