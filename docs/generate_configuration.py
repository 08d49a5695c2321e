"""docs/configuration.md, made from the models of a run's configuration.

python docs/generate_configuration.py    write docs/configuration.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig
from groupwise.config.yaml import inline

TARGET = Path(__file__).parent / "configuration.md"
INTRODUCTION = """# Every key of a run

Made by `python docs/generate_configuration.py` from the models in [`config/`](../src/groupwise/config/run.py); do not
edit. What the keys are for is in [the recipe](recipe.md). An unknown key, a value out of bounds and keys that exclude
each other are errors that name the key and the file's line; `config.yaml` in a run directory has the effective value of
each. On the command line `train.steps=50` overrides `steps` in the section `train`.
"""
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def page() -> str:
    schema = RunConfig.model_json_schema()
    sections = schema["$defs"]
    parts = [INTRODUCTION, *_section("The run", "", schema, sections)]
    return "\n".join(parts)


def _section(title: str, prefix: str, model: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    """A heading and a table of a model's own keys; then the same for each of the sections in it."""
    inner = {key: name for key, field in model["properties"].items() if (name := _model_of(field)) in models}
    yield from (
        f"## {title}",
        "",
        _line(model.get("description", "")),
        "",
        "| key | takes | default | |",
        "|---|---|---|---|",
    )
    required = model.get("required", ())
    for key, field in model["properties"].items():
        takes = f"[section](#{(prefix + key).replace('.', '')})" if key in inner else _cell(_takes(field))
        default = "required" if key in required else _default(field, section=key in inner)
        yield f"| `{key}` | {takes} | {default} | {_cell(_line(field.get('description', '')))} |"
    yield ""
    for key, name in inner.items():
        yield from _section(f"`{prefix}{key}`", f"{prefix}{key}.", models[name], models)


def _default(field: Mapping[str, Any], *, section: bool) -> str:
    """The default as YAML; nothing for a section that is always there, whose keys have their own."""
    if "default" not in field or (section and isinstance(field["default"], dict)):
        return "" if section else {"array": "`[]`", "object": "`{}`"}.get(field.get("type", ""), "")
    return f"`{_cell(inline(field['default']))}`"


def _model_of(field: Mapping[str, Any]) -> str:
    """The name of the model that a field holds: itself, or null, or a list of it, or one for each name."""
    named = field.get("additionalProperties", {})
    for each in (
        field,
        field.get("items", {}),
        named if isinstance(named, dict) else {},
        *field.get("anyOf", ()),
        *field.get("allOf", ()),
    ):
        if "$ref" in each:
            return each["$ref"].rpartition("/")[2]
    return ""


def _takes(field: Mapping[str, Any]) -> str:
    """A JSON schema in words: "integer >= 1", "auto, float32 or bfloat16", "list of string"."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_takes(each) for each in field["anyOf"]))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{each}`" for each in field.get("enum", [field.get("const")]))
    kind = field.get("type", "anything")
    if kind == "array":
        return "list" if not field.get("items") else f"list of {_takes(field['items'])}"
    words = {"object": "mapping", "boolean": "true or false"}.get(kind, kind)
    bounds = [f"{sign} {field[bound]}" for bound, sign in BOUNDS.items() if bound in field]
    return " ".join([words, ", ".join(bounds)]).strip()


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
