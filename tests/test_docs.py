"""docs/server.md, api.md and troubleshooting.md are true of the code: fields, defaults, error codes, the webhook."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise.config.job import GrpoJobConfig, SftJobConfig
from groupwise.config.run import RunConfig
from groupwise.config.serve import ServeConfig
from groupwise.config.yaml import key_paths
from groupwise.server.schema_openai import ChatRequest
from groupwise.server.wire import Unsupported
from groupwise.tasks.dialects.anthropic import MessagesRequest
from groupwise.tasks.dialects.form import PASSED_ON, DialectRequest
from groupwise.tasks.dialects.responses import ResponsesRequest
from sources import SOURCE, nodes_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CHAT_PARAMETERS = ("honoured", "refused", "ignored")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@cache
def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def fenced(document: str, *languages: str) -> list[str]:
    """The blocks of code in some languages."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    return [block for language, block in blocks if language in languages]


def prose(document: str) -> str:
    """What is not in a block of code."""
    return re.sub(r"^```.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)


# ---- the API reference ----
@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_api", DOCS / "generate_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_reference_is_what_the_script_makes() -> None:
    made = generator().page(generator().document())
    assert made == text("api.md"), "run: python docs/generate_api.py"


def test_the_api_reference_has_every_route_and_every_field() -> None:
    api = generator().document()
    routes = {f"{method.upper()} {path}" for path, operations in api["paths"].items() for method in operations}
    assert routes == set(re.findall(r"^### `(\w+ /\S*)`$", text("api.md"), re.MULTILINE))
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^###? |\Z)", text("api.md"), re.MULTILINE | re.DOTALL))
    assert set(sections) == set(api["components"]["schemas"])
    for name, schema in api["components"]["schemas"].items():
        assert set(re.findall(r"^\| `(\w+)`", sections[name], re.MULTILINE)) == set(schema.get("properties", ()))


# ---- the reference of a run's keys ----
def test_the_page_of_keys_is_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import generate_configuration

    assert generate_configuration.page() == text("configuration.md"), "run: python docs/generate_configuration.py"


def test_what_never_ran_is_what_the_marks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import generate_untested

    written = text("performance.md")
    assert generate_untested.page(written) == written, "run: python docs/generate_untested.py"


def test_the_page_of_keys_has_every_key() -> None:
    shown = {
        f"{prefix}{key}"
        for heading, table in re.findall(
            r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text("configuration.md"), re.MULTILINE | re.DOTALL
        )
        for prefix in ["" if heading == "The run" else f"{heading.strip('`')}."]
        for key in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    }
    assert shown >= {".".join(path) for path in key_paths(RunConfig)}


# ---- error codes ----
reads_all = pytest.mark.xdist_group("sources")  # once a process


@cache
def codes() -> frozenset[str]:
    """Every error code in the source: of classes, arguments and literal errors."""
    found = set[str]()
    for path in SOURCE.rglob("*.py"):
        for node in nodes_of(path):
            found |= set(_codes_of(node))
    return frozenset(found)


def _codes_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            names, values = [target], [node.value]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                names, values = target.elts, node.value.elts
            for name, value in zip(names, values, strict=True):
                if getattr(name, "id", getattr(name, "attr", None)) == "code":
                    yield from _strings(value)
    elif isinstance(node, ast.keyword) and node.arg == "code":
        yield from _strings(node.value)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "fault" and node.args:
        yield from _strings(node.args[0])
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "code":
                yield from _strings(value)


def _strings(node: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*_strings(node.body), *_strings(node.orelse))


@reads_all
def test_the_search_for_codes_finds_each_kind() -> None:
    of_class, of_argument, of_fault = "adapter_not_found", "no_signal", "unsupported_content"
    of_dict, of_attribute, of_tuple = "out_of_memory", "internal_error", "unreachable"
    assert {of_class, of_argument, of_fault, of_dict, of_attribute, of_tuple} <= codes()


@reads_all
def test_every_error_code_has_an_entry_and_every_entry_a_code() -> None:
    entries = re.findall(r"^### `(\w+)`\n\n(\S.*)", text("troubleshooting.md"), re.MULTILINE)
    names = [name for name, _ in entries]
    assert set(names) == codes()
    assert names == sorted(names)
    assert all(len(explanation) > 40 for _, explanation in entries)


# ---- tables of options ----
def rows(document: str) -> dict[str, str]:
    """Field -> default, of the tables whose second column is a default; a row may name several fields."""
    found: dict[str, str] = {}
    for table in re.findall(r"^\| (?:option|setting) \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", document, re.MULTILINE):
        for line in table.splitlines():
            fields, default = (cell.strip() for cell in line.split("|")[1:3])
            names = re.findall(r"`(\w+)`", fields)
            values = default.split(", ") if len(names) > 1 and ", " in default else [default] * len(names)
            found |= dict(zip(names, values, strict=True))
    return found


def value(shown: str) -> Any:
    number, _, unit = shown.partition(" ")
    return int(number) * UNITS[unit] if unit in UNITS else json.loads(shown)


def test_the_guide_says_what_happens_to_each_parameter_of_a_chat() -> None:
    honoured, refused, ignored = parameters("With OpenAI's clients")
    fields = ChatRequest.model_fields
    unsupported = {name for name, field in fields.items() if any(isinstance(m, Unsupported) for m in field.metadata)}
    assert refused == unsupported
    assert ignored == ChatRequest.bookkeeping
    (beyond,) = re.findall(
        r"^- \*\*Beyond OpenAI's\*\*, for `extra_body`: (.*?)\.\n", prose(text("server.md")), re.M | re.S
    )
    assert not honoured & set(re.findall(r"`(\w+)`", beyond))
    assert honoured | set(re.findall(r"`(\w+)`", beyond)) == fields.keys() - unsupported


DIALECTS = [("With Anthropic's clients", MessagesRequest), ("OpenAI's Responses", ResponsesRequest)]


@pytest.mark.parametrize(("section", "request_model"), DIALECTS)
def test_the_guide_says_what_happens_to_each_parameter_of_a_dialect(
    section: str, request_model: type[DialectRequest]
) -> None:
    honoured, refused, ignored = parameters(section)
    fields = request_model.model_fields.keys()
    assert fields <= honoured | refused | ignored, fields - honoured - refused - ignored
    assert request_model.refused.keys() <= refused, request_model.refused.keys() - refused
    assert {name for name in request_model.bookkeeping if not name.startswith("anthropic_")} <= ignored
    (ours,) = re.findall(r"^- \*\*Ours\*\*, for `extra_body`: (.*)\.$", prose(part(section)), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", ours)) == set(PASSED_ON) - fields


def part(section: str) -> str:
    """A section of the guide to the server."""
    return text("server.md").partition(f"### {section}\n")[2].partition("\n##")[0]


def parameters(section: str) -> list[set[str]]:
    """What the section's table names as honoured, refused and ignored."""
    cells = [re.findall(rf"^\| {word}\b[^|]*\|(.*)\|$", part(section), re.MULTILINE) for word in CHAT_PARAMETERS]
    return [set(re.findall(r"`(\w+)[`.]", row)) for (row,) in cells]


@pytest.mark.parametrize("kind", [GrpoJobConfig, SftJobConfig])
def test_the_guide_has_every_option_with_its_default(kind: type[GrpoJobConfig] | type[SftJobConfig]) -> None:
    shown, actual = rows(text("server.md")), kind().model_dump(mode="json")
    supervised = {"epochs": 3, "batch_size": 8, "learning_rate": 1e-4}
    if kind is SftJobConfig:
        assert {key: actual.pop(key) for key in supervised} == supervised
        assert "`epochs` (3), `batch_size` (8 examples a step) and a `learning_rate` of 1e-4" in text("server.md")
    assert {key: value(shown[key]) for key in actual} == actual


def test_the_guide_names_no_option_or_setting_that_is_not_there() -> None:
    known = {**ServeConfig().model_dump(mode="json"), **GrpoJobConfig().model_dump(mode="json")}
    shown = {key: value(default) for key, default in rows(text("server.md")).items()}
    assert shown == {key: known[key] for key in shown}


# ---- the guide's webhook receiver ----
def test_the_webhook_receiver_takes_what_is_signed_and_nothing_else() -> None:
    """The guide's receiver, without its server."""
    from groupwise.server.webhooks import signature

    (source,) = [block for block in fenced(text("server.md"), "python") if "Hook" in block]
    names: dict[str, Any] = {}
    exec(source.rpartition("HTTPServer(")[0], names)
    now = int(names["time"].time())
    body = b'{"job_id": "1"}'

    def status(*, secret: str = "the same as GROUPWISE_WEBHOOK_SECRET", at: int = now, sent: bytes = body) -> int:
        answered: list[int] = []
        hook = object.__new__(names["Hook"])
        headers = {"content-length": str(len(sent)), "x-groupwise-timestamp": str(at)}
        hook.headers = headers | {"x-groupwise-signature": signature(secret, timestamp=at, body=body)}
        hook.rfile = io.BytesIO(sent)
        hook.send_response, hook.end_headers = answered.append, lambda: None
        hook.do_POST()
        return answered[0]

    assert status() == 204
    assert status(secret="another") == status(at=now - 3600) == status(sent=b'{"job_id": "2"}') == 401


# ---- the map of files ----
def test_the_map_of_files_is_of_the_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generate_architecture

    written = generate_architecture.PAGE.read_text(encoding="utf-8")
    assert generate_architecture.page(written) == written


# ---- errors by their text ----
THEIRS = {"No matching distribution found for groupwise", "No module named 'vllm'", "CUDA out of memory", "Killed"}
THEIRS |= {"device-side assert triggered", "an illegal memory access was encountered"}


def test_the_errors_that_are_listed_by_their_text_say_that() -> None:
    """Of ours each piece between `...` stands in the code, or in what the tests met."""
    table = text("troubleshooting.md").partition("## By its text\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[1:]
    said = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/wording.txt"))
    said += "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    shown = {each for cell in cells for each in re.findall(r"`([^`]+)`", cell)} - THEIRS
    pieces = {piece.strip() for each in shown for piece in each.split("...")} - {""}
    assert len(shown) > 20
    assert {piece for piece in pieces if piece not in said} == set()


def test_the_list_for_language_models_is_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import generate_llms

    assert generate_llms.text() == (ROOT / "llms.txt").read_text(encoding="utf-8"), "run: python docs/generate_llms.py"
