"""docs/api.md, made from the server's own OpenAPI document.

    python docs/generate_api.py    write docs/api.md

No model is loaded and nothing is served: the document depends on the code alone. Limits are the defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from groupwise.config.serve import ServeConfig
from groupwise.server.app import build_app
from groupwise.server.assemble import server_over
from groupwise.server.metrics import Recorder
from groupwise.server.openapi import EVERYWHERE, WITH_BODY, WITH_KEY
from groupwise.server.state import Parts

TARGET = Path(__file__).parent / "api.md"
TITLES = {"OpenAI": "Completions", "rollouts": "Rollouts", "training": "Training", "adapters": "Adapters"}
TITLES |= {
    "Anthropic": "Anthropic's Messages API",
    "metrics": "Metrics",
    "feedback": "Feedback",
    "Server": "The server itself",
}

INTRODUCTION = """# API reference

Made by `python docs/generate_api.py` from the server's OpenAPI document; do not edit. A running server has the same at
`GET /openapi.json`, with its own limits. How to use it is in [server.md](server.md), what each error code means in
[troubleshooting.md](troubleshooting.md).

"""
CONVENTIONS = """
A server with an API key asks for `Authorization: Bearer <key>`, or `x-api-key: <key>`, on every route but `/health`.
Bodies are JSON in UTF-8, with `Content-Type: application/json`, except for uploads. Unknown fields are refused,
except on `/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages`, which ignore them as their
clients expect. An `x-request-id` of the client's (letters, digits, `_` and `-`, 64 at most) is taken over. 429 and
503 bring `retry-after`, in seconds. An answer's field that is not always there is marked *optional*.
"""
COMMON = (("any route", EVERYWHERE), ("any route of a server with a key", WITH_KEY), ("any body", WITH_BODY))


def document() -> dict[str, Any]:
    """The OpenAPI document of a server with the default configuration and a key."""
    config = ServeConfig(api_key="a-key")
    nothing = cast(Any, None)
    parts = Parts(
        config=config,
        base=nothing,
        engine=nothing,
        store=nothing,
        ledger=nothing,
        policies=nothing,
        recorder=Recorder(model_name=config.served_name),
        feedback=nothing,
        quotas=nothing,
    )
    return build_app(server_over(parts, reader=nothing, supervisor=nothing)).openapi()


def page(api: Mapping[str, Any]) -> str:
    """The whole reference as Markdown."""
    parts = [INTRODUCTION, api["info"]["description"], "\n", CONVENTIONS, "\n", *_common_errors()]
    by_tag: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    parts += ["\n", *_contents(by_tag)]
    for tag, operations in by_tag.items():
        parts += ["\n", *_routes(TITLES[tag], operations)]
    parts.append("\n## Bodies and answers\n")
    asked = _used(api, "requestBody")
    for name, schema in api["components"]["schemas"].items():
        parts += ["\n", *_schema(name, schema, is_body=name in asked)]
    return "".join(parts)


def _common_errors() -> Iterator[str]:
    yield "| status | on | code |\n|---|---|---|\n"
    rows = [(status, where, text) for where, errors in COMMON for status, text in errors.items()]
    for status, where, text in sorted(rows, key=lambda row: row[0]):
        yield f"| {status} | {where} | {text} |\n"


# ---- routes ----
def _contents(by_tag: Mapping[str, Sequence[tuple[str, str, Mapping[str, Any]]]]) -> Iterator[str]:
    """What there is, by what it is for; a route by the first sentence of its description."""
    yield "| group | route | |\n|---|---|---|\n"
    for tag, operations in by_tag.items():
        for number, (method, path, operation) in enumerate(operations):
            group = "" if number else f"[{TITLES[tag]}](#{_anchor(TITLES[tag])})"
            about = re.split(r"(?<=[^.]\.)\s", operation.get("description", "").strip(), maxsplit=1)[0]
            route = f"{method} {path}"
            yield f"| {group} | [`{route}`](#{_anchor(route)}) | {_cell(' '.join(about.split()))} |\n"


def _anchor(heading: str) -> str:
    """A heading's anchor, as GitHub and docs/site_hooks.py make them."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _routes(title: str, operations: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Iterator[str]:
    yield f"## {title}\n"
    for method, path, operation in operations:
        yield f"\n### `{method} {path}`\n\n{operation.get('description', '').strip()}\n"
        for block in (_parameters(operation), _body(operation), [_answer(operation)], _errors(operation)):
            if lines := "\n".join(block):
                yield f"\n{lines}\n"


def _parameters(operation: Mapping[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        kind, default = _type(parameter["schema"]), parameter["schema"].get("default")
        about = parameter.get("description") or parameter["schema"].get("description") or ""
        shown = f"- `{parameter['name']}` ({parameter['in']}, {kind}"
        yield shown + (f", default {_value(default)}" if default is not None else "") + f") {about}".rstrip()


def _body(operation: Mapping[str, Any]) -> Iterator[str]:
    if "requestBody" not in operation:
        return
    optional = "" if operation["requestBody"].get("required") else " (may be left out)"
    for media, content in operation["requestBody"]["content"].items():
        schema = content["schema"]
        fields = schema.get("properties", {})
        yield f"Body{optional}: " + (f"`{media}`\n" if fields else _type(schema))
        for name, field in fields.items():
            needed = ", required" if name in schema.get("required", ()) else ""
            yield f"- `{name}` ({_type(field)}{needed}) {field.get('description', '')}".rstrip()


def _answer(operation: Mapping[str, Any]) -> str:
    answer = operation["responses"]["200"]
    kinds = []
    for media, content in answer.get("content", {}).items():
        schema = content.get("schema", {})
        if "$ref" in schema or "items" in schema:
            kinds.append(_type(schema))
        elif media != "application/json":
            kinds.append(f"`{media}`")
    return f"Answer: {' or '.join(kinds or ['`application/json`'])}"


def _errors(operation: Mapping[str, Any]) -> Iterator[str]:
    """The errors that not every route can answer."""
    found = []
    for status, response in operation["responses"].items():
        everywhere = " ".join(errors.get(int(status), "") for _, errors in COMMON)
        codes = [code for code in re.findall(r"`\w+`", response["description"]) if code not in f"{everywhere} `param`"]
        if int(status) >= 400 and codes:
            found.append(f"{status} {', '.join(codes)}")
    if found:
        yield f"Errors of its own: {'; '.join(found)}"


# ---- schemas ----
def _used(api: Mapping[str, Any], under: str) -> set[str]:
    """The schemas that are reached from `under` of the operations."""
    schemas = api["components"]["schemas"]
    found: set[str] = set()
    waiting = [each[under] for path in api["paths"].values() for each in path.values() if under in each]
    while waiting:
        for name in set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(waiting.pop()))) - found:
            found.add(name)
            waiting.append(schemas[name])
    return found


def _schema(name: str, schema: Mapping[str, Any], *, is_body: bool) -> Iterator[str]:
    yield f"### {name}\n"
    if about := schema.get("description"):
        yield f"\n{about}\n"
    required = set(schema.get("required", ()))
    yield "\n| field | type | default | |\n" if is_body else "\n| field | type | |\n"
    yield "|---|---|---|---|\n" if is_body else "|---|---|---|\n"
    for field, kind in schema.get("properties", {}).items():
        about = _cell(" ".join(str(kind.get("description", "")).split()))
        if is_body:
            default = "*required*" if field in required else _value(kind["default"]) if "default" in kind else ""
            yield f"| `{field}` | {_cell(_type(kind))} | {_cell(default)} | {about} |\n"
        else:
            optional = "" if field in required else "*optional* "
            yield f"| `{field}` | {_cell(_type(kind))} | {(optional + about).strip()} |\n"


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(dict.fromkeys(map(_value, schema.get("enum", [schema.get("const")]))))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        item = _type(schema.get("items") or schema.get("prefixItems", [{}])[0])
        kind = f"list of ({item})" if " or " in item else f"list of {item}"
    if schema.get("format") == "binary":
        kind = "file"
    bounds = ", ".join(_bounds(schema))
    return f"{kind} ({bounds})" if bounds else kind


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    is_list = schema.get("type") == "array"
    least, most = (schema.get(key) for key in (("minItems", "maxItems") if is_list else ("minimum", "maximum")))
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is not None:
        yield f"above {_short(above)}"
    if least is not None and most is not None:
        yield _short(most) if least == most else f"{_short(least)} to {_short(most)}"
    elif least is not None:
        yield f"{_short(least)} or more"
    elif most is not None:
        yield f"at most {_short(most)}"
    if below is not None:
        yield f"below {_short(below)}"


def _short(number: float) -> str:
    size = abs(int(number))
    if size >= 1 << 20 and size.bit_count() == 1:
        return f"{'-' if number < 0 else ''}2^{size.bit_length() - 1}"
    return str(int(number)) if int(number) == number else str(number)


def _value(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(page(document()), encoding="utf-8")
