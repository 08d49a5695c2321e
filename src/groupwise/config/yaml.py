"""Reads a YAML or TOML file into a pydantic model, with errors that name file, line and the nearest valid key.

    Document    the parsed mapping, and where each of its values was written (file and line, or a command-line override)
    validate    a Document against a model; every problem at once, as one ConfigError
    to_yaml     the inverse of reading; `inline` on one line

YAML is version 1.2 (https://yaml.org/spec/1.2.2/): `1e-5` is a number, `no` and `on` are strings, a duplicate key is an
error. A file whose name ends with .toml is TOML, with .py or .ipynb a script (`script.py`). An override is `a.b=c` or
`a[0].b=c`; its value is YAML, and the last of several wins.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from groupwise.config.formats.format import parser_of
from groupwise.config.toml import parse_toml
from groupwise.errors import ConfigError

Keys = tuple[str | int, ...]

ModelT = TypeVar("ModelT", bound=BaseModel)

_OVERRIDE = re.compile(r"([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*|\[\d+\])*)=(.*)", re.DOTALL)

_KINDS = {"extra_forbidden": "unknown", "missing": "missing", "conflict": "conflict", "value_error": "conflict"}

FILES = (".yaml", ".yml", ".toml")  # what a configuration's name ends with

_ECHO = 80  # longest value repeated in a message, characters

_NOTHING = (False, "none", "no", "off", "false")  # what people write for null


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 1 << 16
    return yaml


def to_yaml(data: Mapping[str, Any]) -> str:
    """Return `data` (plain dicts, lists and scalars) as YAML 1.2, in the order of its keys."""
    stream = io.StringIO()
    _yaml().dump(dict(data), stream)
    return stream.getvalue()


def inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    stream, yaml = io.StringIO(), _yaml()
    yaml.default_flow_style = True
    yaml.dump(value, stream)
    return stream.getvalue().removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True)
class Document:
    """A mapping and where its values come from. `data` belongs to the document and may be changed by it."""

    data: dict[str, Any]
    name: str = ""
    root: Node | None = None
    overrides: list[tuple[Keys, str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> Document:
        """Parse the file. Raises ConfigError: unreadable, not UTF-8, malformed (line, column), empty, not a mapping."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise ConfigError(
                f"cannot read the configuration {path}: {error.strerror or error}", hint=_beside(path)
            ) from None
        known = {".toml": parse_toml} | dict.fromkeys((".yaml", ".yml", ".json"), _parse)
        parse = known.get(path.suffix) or parser_of(path.suffix) or _parse
        data, root = parse(text, source=str(path))
        if data is None:
            raise ConfigError(f"{path} is empty", hint="a run needs at least `data` and `rewards`")
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds a {_kind(data)} at the top level; it must be a mapping such as `name: x`")
        return cls(data, path.name, root)

    def resolve_folder(self, beside: Path) -> None:
        """Make `folder` absolute: a relative one is meant from `beside`, and without one it is `beside` itself."""
        if isinstance(folder := self.data.get("folder", "."), str):
            self.data["folder"] = str((beside / os.path.expanduser(folder)).resolve())

    def override(self, text: str, *, shorthand: Mapping[str, str]) -> None:
        """Apply `a.b=c`. A string in the list `key` of `shorthand` stands for the mapping {shorthand[key]: string}."""
        match = _OVERRIDE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is not an override; write key=value, such as train.steps=10 or rewards[0].weight=2"
            )
        keys = parse_keys(match[1])
        value, _ = _parse(match[2], source=f"the value of {text!r}")
        target: Any = self.data
        for depth, key in enumerate(keys[:-1]):
            empty: Any = [] if isinstance(keys[depth + 1], int) else {}
            inner = _get(target, key, keys[:depth], text)
            if inner is None:
                inner = empty
            elif isinstance(inner, str) and isinstance(key, int) and keys[0] in shorthand:
                inner = {shorthand[str(keys[0])]: inner}
            _set(target, key, inner)
            target = inner
        _get(target, keys[-1], keys[:-1], text)  # refuses what cannot be assigned to
        _set(target, keys[-1], value)
        self.overrides.append((keys, text))

    def where(self, keys: Keys) -> str:
        """Return where the value at `keys` comes from, as a remark: " (cfg.yaml:14)", or ""."""
        origin = self.origin(keys)
        return f" ({origin})" if origin else ""

    def assigned(self, keys: Keys) -> str:
        """Return "=VALUE" of the override that gave this key its value, or ""."""
        for assigned, text in reversed(self.overrides):
            if keys == assigned:
                return f"={text.partition('=')[2]}"
        return ""

    def origin(self, keys: Keys) -> str:
        """Return where the value at `keys`, or the nearest section around it, was written: "cfg.yaml:14", or ""."""
        for assigned, text in reversed(self.overrides):
            if keys[: len(assigned)] == assigned:
                return f"given as {text!r}"
        if self.root is None:
            return ""
        node, line = self.root, None
        for key in keys:
            entry = _entry(node, key)
            if entry is None:
                break
            node, line = entry
        return f"{self.name}:{line}" if line is not None else self.name


def names_file(text: str) -> bool:
    """Return whether a word stands for a configuration's file: there is one, or its name ends as one's does."""
    return Path(text).is_file() or Path(text).suffix in FILES


def _beside(path: Path) -> str | None:
    """Return what a file that cannot be read was probably meant to be."""
    folder = path if path.is_dir() else path.parent
    names = (
        sorted(each.name for each in folder.iterdir() if each.suffix in FILES and each.is_file())
        if folder.is_dir()
        else []
    )
    if path.is_dir():
        return f"name a file in it: {', '.join(names[:5])}" if names else "name a YAML or TOML file"
    similar = difflib.get_close_matches(path.name, names, n=1)
    if path.exists():
        return None
    if similar:
        return f"did you mean {folder / similar[0]}?"
    return f"the files here are {', '.join(names[:5])}" if names else "groupwise init my-task writes one to begin with"


def _parse(text: str, *, source: str) -> tuple[Any, Node | None]:
    """Return what the text says, and its nodes, which know their lines."""
    try:
        root = _composed(text) if "<<" not in text else _yaml().compose(text)  # reading a merge changes its nodes
        return (None if root is None else _yaml().constructor.construct_document(root)), root
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or str(error.context)
        raise ConfigError(f"malformed YAML in {source}{place}: {problem}", hint=_yaml_hint(problem)) from None
    except YAMLError as error:
        raise ConfigError(f"malformed YAML in {source}: {str(error).splitlines()[0]}") from None


@lru_cache(maxsize=16)
def _composed(text: str) -> Node | None:
    """Return the nodes of a text from a cache; do not change them. A command reads a run's configuration several times,
    and each parse would take a tenth of a second."""
    return _yaml().compose(text)


def _yaml_hint(problem: str) -> str:
    if "'\\t'" in problem:
        return "YAML is indented with spaces: replace the tab"
    if "duplicate key" in problem:
        return "keep one of the two: which of them was meant cannot be known"
    return "quote a string that holds YAML's own characters, as in 'a: b'"


def _kind(value: Any) -> str:
    names = {dict: "mapping", list: "list", str: "string", bool: "true/false value", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def parse_keys(dotted: str) -> Keys:
    """Parse "a.b[0].c" to ("a", "b", 0, "c")."""
    return tuple(int(index) if index else name for index, name in re.findall(r"\[(\d+)\]|([\w-]+)", dotted))


def dotted(keys: Sequence[str | int]) -> str:
    """Return the inverse of `parse_keys`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")


def _get(target: Any, key: str | int, parents: Keys, text: str) -> Any:
    """Return what stands at `key`, None where nothing does yet. Raises ConfigError where nothing can."""
    if isinstance(key, str) and isinstance(target, dict):
        return target.get(key)
    if isinstance(key, int) and isinstance(target, list) and key <= len(target):
        return target[key] if key < len(target) else None
    held = f"a list of {len(target)}" if isinstance(target, list) else f"a {_kind(target)}"
    wanted = f"no entry [{key}]" if isinstance(key, int) else f"no key {key!r}"
    place = dotted(parents) or "the configuration"
    of_value = parents and isinstance(parents[-1], str) and not isinstance(target, list | dict)
    hint = f"did you mean {place}={text.partition('=')[2]}?" if of_value else None
    raise ConfigError(f"cannot apply {text!r}: {place} is {held} and has {wanted}", hint=hint)


def _set(target: Any, key: Any, value: Any) -> None:
    if isinstance(target, list) and key == len(target):
        target.append(value)
    else:
        target[key] = value


def _entry(node: Node, key: str | int) -> tuple[Node, int] | None:
    """Return the value under `key` and the line (from 1) of the key, or of the list's item."""
    if isinstance(node, MappingNode):
        for name, value in node.value:
            if isinstance(name, ScalarNode) and name.value == str(key):
                return value, name.start_mark.line + 1
    if isinstance(node, SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key], node.value[key].start_mark.line + 1
    return None


# ---- validation ----
def validate(
    document: Document,
    model: type[ModelT],
    *,
    other_names: Mapping[str, str],
    other_values: Mapping[tuple[str, Any], str] = MappingProxyType({}),
    elsewhere: Callable[[str, str], str] = lambda name, value: "",
) -> ModelT:
    """Return the document as a `model`. Raises ConfigError naming every unknown key, wrong value and conflict; its
    `field` is the first key that is wrong, its `kind` "unknown", "missing", "conflict" or "invalid".

    `other_names` maps a key that people know from elsewhere to ours, or to an override that does the same, and
    `other_values` a key of ours with a value from elsewhere to the override that does it, for the suggestions;
    `elsewhere` says of any other name what other systems' key of that name is here, or "" (its second argument is
    "=VALUE" where one was given in an override).
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        # A default that follows from a wrong value is missing, but that is not a second problem.
        found = [each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called"]
        suggest = partial(suggest_key, model=model, other_names=other_names, elsewhere=elsewhere)
        problems = [_explain(details, document, model, suggest, other_values) for details in found]
        field, kind = dotted(found[0]["loc"]) or None, _KINDS.get(found[0]["type"], "invalid")
    raise problems_error(document, problems, field=field, kind=kind)


def problems_error(
    document: Document, problems: Sequence[str], *, field: str | None = None, kind: str | None = None
) -> ConfigError:
    """Return one or several problems as one error; `field` and `kind` are those of the first."""
    if len(problems) == 1:
        return ConfigError(problems[0], field=field, kind=kind)
    name = document.name or "the configuration"
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"{name} has {len(problems)} problems:{listed}", field=field, kind=kind)


def _explain(
    details: ErrorDetails,
    document: Document,
    model: type[BaseModel],
    suggest: Callable[[Keys, str], str],
    other_values: Mapping[tuple[str, Any], str],
) -> str:
    keys: Keys = details["loc"]
    place = (dotted(keys) or "the configuration") + document.where(keys)
    if details["type"] == "extra_forbidden":
        meant = _innermost(keys, details["input"])
        return f"{dotted(keys)}{document.where(meant)}: unknown; {suggest(meant, document.assigned(meant))}"
    message = details["msg"]
    if details["type"] in ("value_error", "conflict"):
        return f"{place}: {message.removeprefix('Value error, ')}"
    if details["type"] == "missing":
        return f"{place}: required and missing"
    if details["type"] == "invalid_key":
        return f"{place}: every key must be a string; quote it"
    value = repr(details["input"])
    value = value if len(value) <= _ECHO else value[: _ECHO - 3] + "..."
    message = re.sub(r"valid dictionary or instance of \w+", "mapping", message).replace("valid tuple", "list")
    message = re.sub("^[A-Z][a-z]+ should", "it must", message)
    return f"{place}: {value} is not valid; {message}{_correction(details, keys, model, document, other_values)}"


def _innermost(keys: Keys, given: Any) -> Keys:
    """Return the one key that an unknown section has, as in `server.port=9000`; the section's own where it has
    several."""
    while isinstance(given, dict) and len(given) == 1:
        ((name, given),) = given.items()
        keys = (*keys, name)
    return keys


def _correction(
    details: ErrorDetails,
    keys: Keys,
    model: type[BaseModel],
    document: Document,
    other_values: Mapping[tuple[str, Any], str],
) -> str:
    """Return how a value of the wrong kind is written, where it can be guessed: as an override where it came in one."""
    given, kind, name = details["input"], details["type"], keys[-1] if keys else ""
    said, overridden = given.lower() if isinstance(given, str) else given, bool(document.assigned(keys))
    if isinstance(said, str | bool | int) and (meant := other_values.get((dotted(keys), said))):
        return f"; did you mean {meant}?"
    if isinstance(given, str) and kind in ("int_type", "float_type", "bool_type"):
        value, _ = _parse(given, source=str(name))
        wanted = {"int_type": int, "float_type": (int, float), "bool_type": bool}[kind]
        right = isinstance(value, wanted) and (kind == "bool_type") == isinstance(value, bool)
        return f"; write it without quotes: {name}: {given}" if right else ""
    if isinstance(given, str | dict) and kind in ("list_type", "tuple_type"):
        listed = f"{dotted(keys)}=[{given}]" if overridden else f"{name}: [{given}]"
        return f"; write {listed}" if isinstance(given, str) else "; put `- ` before its first line"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        section = [key for key in keys if isinstance(key, str)]
        known = [path[len(section)] for path in key_paths(model) if list(path[:-1]) == section]
        null = f"{dotted(keys)}=null" if overridden else f"{name}: null"
        without = f"; {null} is without" if said in _NOTHING and _may_be_null(keys, model) else ""
        return f" such as {name}: {{{known[0]}: ...}}; its keys are {', '.join(known)}{without}" if known else ""
    return ""


def _may_be_null(keys: Keys, model: type[BaseModel]) -> bool:
    """Return whether the field at this place of a model takes null."""
    annotation: Any = model
    for key in keys:
        found = next((each for each in models_in(annotation) if key in each.model_fields), None)
        if found is None:
            return False
        annotation = found.model_fields[str(key)].annotation
    return type(None) in get_args(annotation)


def suggest_key(
    keys: Keys,
    value: str = "",
    *,
    model: type[BaseModel],
    other_names: Mapping[str, str],
    elsewhere: Callable[[str, str], str],
) -> str:
    """Return the key that was probably meant: the same key in a section of a similar name, one of the same name in
    another section, our key for another system's key of that name, a similar one in the same section, a similar one
    anywhere, or one in place of the section. `value` is "=VALUE" for an override: it is repeated after a key that holds
    a single value, so that the proposal can be typed."""
    name, section = str(keys[-1]), [key for key in keys[:-1] if isinstance(key, str)]
    everywhere = list(key_paths(model))
    beside = [path[-1] for path in everywhere if list(path[:-1]) == section]
    inside = {".".join(path) for path in everywhere if path[-1] == name and len(path) == len(section) + 1}
    others = {path[-1]: ".".join(path) for path in reversed(everywhere)}
    sections = {".".join(path[:-1]) for path in everywhere}

    def meant(key: str) -> str:
        one_value = key not in sections and re.fullmatch(r"[\w.]+", key)
        return f"did you mean {key}{value if one_value else ''}?"

    if not beside and (similar := difflib.get_close_matches(".".join((*section, name)), inside, n=1, cutoff=0.8)):
        return meant(similar[0])
    if name in other_names:
        return meant(other_names[name])
    if name in others:
        return meant(others[name])
    if said := elsewhere(name, value):
        return said
    if similar := difflib.get_close_matches(name, beside, n=1):
        return meant(dotted((*keys[:-1], similar[0])))
    if similar := difflib.get_close_matches(name, others, n=1, cutoff=0.75):
        return meant(others[similar[0]])
    if not beside and section:
        return suggest_key(keys[:-1], model=model, other_names=other_names, elsewhere=elsewhere)
    return f"the keys of {dotted(keys[:-1]) or 'the configuration'} are {', '.join(beside)}"


def key_paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of a model and of the models inside it; a list's index is left out."""
    for name, info in ((info.alias or name, info) for name, info in model.model_fields.items()):
        yield (*prefix, name)
        for inner in models_in(info.annotation):
            yield from key_paths(inner, (*prefix, name))


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a configuration that is not a section, under its dotted name."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's annotation, such as the T of `tuple[T, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
