"""A function's signature and docstring -> the JSON schema of its parameters, and a check of arguments against it.

The schema is pydantic's of the type hints, without titles. Descriptions come from the docstring: what stands before
its first section describes the function, the section `Args:` (Google's style) or lines `:param x:` describe
parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from groupwise.errors import ConfigError

SECTION = re.compile(
    r"^\s*(?:(args|arguments|parameters|returns?|yields?|raises|examples?|notes?)\s*:?\s*|>>>.*|:(param|returns?)\b.*)$",
    re.IGNORECASE,
)

ARGS = re.compile(r"^\s*(args|arguments|parameters)\s*:\s*$", re.IGNORECASE)

ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")

PARAM = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")

_known: WeakKeyDictionary[Callable[..., Any], dict[bool, Signature]] = WeakKeyDictionary()  # each episode asks again


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The signature of a function, as a tool's schema. `model` has a field for each parameter, in their order, whose
    alias is the parameter's name."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    model: type[BaseModel]

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the type hints want them; defaults are left to the function.

        Raises ValueError, with all that is wrong in one line.
        """
        try:
            checked = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ValueError("; ".join(map(_fault, error.errors(include_url=False)))) from None
        except RecursionError:
            raise ValueError("nested too deeply") from None
        fields = self.model.model_fields
        return {str(fields[key].alias): getattr(checked, key) for key in fields if key in checked.model_fields_set}


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of a function or bound method, without `self`.

    Raises ConfigError: it is not a function with a name, or a parameter has no type hint, no schema, or no name to pass
    it by.
    """
    if not callable(function) or not isinstance(getattr(function, "__name__", None), str):
        raise ConfigError(f"{function!r} cannot be a tool", hint="give a function or a method with type hints")
    plain = getattr(function, "__func__", function)
    known = _known.setdefault(plain, {})
    bound = plain is not function
    if bound not in known:
        known[bound] = _signature(plain, bound=bound)
    return known[bound]


def _signature(function: Callable[..., Any], *, bound: bool) -> Signature:
    name = function.__name__
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"the type hints of the tool {name!r} cannot be read: {error}") from error
    summary, described = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for i, parameter in enumerate(list(inspect.signature(function).parameters.values())[bound:]):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"the tool {name!r} takes {parameter}, which a model cannot pass by name")
        if parameter.name not in hints:
            raise ConfigError(
                f"the parameter {parameter.name!r} of the tool {name!r} has no type hint",
                hint=f"write {parameter.name}: int, or whatever it is; the model is told",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        about = described.get(parameter.name)
        alias = parameter.name  # an explicit None would hide a description in the hint
        field = Field(default, alias=alias, description=about) if about else Field(default, alias=alias)
        fields[f"p{i}"] = (hints[parameter.name], field)
    model, schema = _model(name, fields)
    return Signature(name=name, description=summary, parameters=schema, model=model)


def _model(name: str, fields: dict[str, Any]) -> tuple[type[BaseModel], dict[str, Any]]:
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the type hints of the tool {name!r} have no JSON schema: {reason}",
            hint="use numbers, text, lists, dicts, Literal, dataclasses or pydantic models",
        ) from error
    plain = _without_titles(schema)
    plain.pop("description", None)
    plain.setdefault("properties", {})
    return model, plain


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """`schema` without pydantic's titles; under `properties` and `$defs` keys are `names`, and "title" may be one."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=key in ("properties", "$defs") and not names)
        for key, value in schema.items()
        if names or key != "title"
    }


def _fault(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    return f"{where}: {error['msg']}" if where else str(error["msg"])


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return, of a docstring without its indent, what stands before the first section, each parameter's description.

    >>> read_docstring("Add.\\n\\nArgs:\\n    a: One.\\n    b (int): Two\\n        and more.\\n\\nReturns:\\n    It.")
    ('Add.', {'a': 'One.', 'b': 'Two and more.'})
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if SECTION.match(line)), len(lines))
    about: dict[str, str] = {}
    name, inside, indent = None, False, 0
    for line in lines[first:]:
        depth = len(line) - len(line.lstrip())
        if param := PARAM.match(line):
            name, inside = param[1], False
            about[name] = param[2]
        elif ARGS.match(line):
            name, inside, indent = None, True, 0
        elif line.strip() and depth == 0:
            name, inside = None, False
        elif inside and line.strip() and (not indent or depth <= indent) and (entry := ENTRY.match(line.strip())):
            name, indent = entry[1], depth
            about[name] = entry[2]
        elif name is not None and line.strip():
            about[name] = f"{about[name]} {line.strip()}".strip()
    return "\n".join(lines[:first]).strip(), about
