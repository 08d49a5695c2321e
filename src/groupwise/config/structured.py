"""The configuration's `structured_outputs` section, of a run and of a server: the form of completions, as vLLM says
it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from groupwise.config.section import Section, Text, Texts, conflict
from groupwise.types import Grammar

_FORMS = ("regex", "choice", "grammar", "json_object")  # of `StructuredOutputsConfig`, besides `json`


class StructuredOutputsConfig(Section):
    """The form that completions must have, as vLLM says it: one of these keys."""

    schema_: Text | dict[str, Any] | None = Field(default=None, alias="json")
    """JSON that a JSON Schema allows: the schema itself, or as a string."""
    regex: Text | None = None
    """Text that a regular expression matches as a whole (Rust's syntax: no look-around, no back-references)."""
    choice: Annotated[Texts | None, Field(min_length=1)] = None
    """One of these texts."""
    grammar: Text | None = None
    """Text of a context-free grammar, in Lark or GBNF."""
    json_object: Literal[True] | None = None
    """Any JSON object."""

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputsConfig:
        given = list(self._given())
        if len(given) != 1:
            said = "nothing is given" if not given else f"{' and '.join(given)} exclude each other"
            key = given[1:2] or ["json"]
            raise conflict(*key, f"{said}; give one of json, regex, choice, grammar and json_object")
        return self

    @model_serializer
    def _given(self) -> dict[str, Any]:
        values = {"json": self.schema_, **{name: getattr(self, name) for name in _FORMS}}
        return {name: list(each) if name == "choice" else each for name, each in values.items() if each is not None}

    def as_grammar(self, path: str) -> Grammar:
        """Return the same as a `Grammar`, which errors call by `path` and the key."""
        ((name, given),) = self._given().items()
        return Grammar.of_option(name, given, field=f"{path}.{name}")
