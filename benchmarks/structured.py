"""What do structured outputs cost, and do they hold? JSON Schemas of 16 kinds, written by the starter at temperature 1.

    python benchmarks/structured.py --json structured.json
    python benchmarks/structured.py --schemas 100 --vllm .venv-vllm/bin/python
    python benchmarks/structured.py --quick               does it run?

The schemas are drawn with a seed: nested objects, enums, references (also recursive ones), patterns, arrays and strings
with bounds, numbers with ranges and steps, tuples, constants, formats, alternatives that exclude each other (oneOf) and
that do not (anyOf), several schemas at once (allOf), additional and nullable properties.

    compiled   schemas that the engine takes, and how long that took
    valid      answers that ended by themselves and that the `jsonschema` package finds valid (formats included)
    cut        answers that ended at `--max-tokens`: an unfinished answer is no wrong one, and is counted apart
    tokens/s   of all rows together, beside as many rows without a grammar in the same process, each as many tokens long

The model is small, so that its own work is little and the mask's share is large: of a larger model it is less. With
`--vllm`, the same schemas through vLLM's own structured outputs, in a Python that has it
(tests/vllm_server/install.sh).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from rich.console import Console
from rich.table import Table

Schema = dict[str, Any]
WORDS = (
    *("id", "name", "age", "city", "email", "price", "total", "status", "tags"),
    *("items", "note", "title", "score", "unit", "code", "level", "owner", "date"),
)
PATTERNS = (r"^[A-Z]{3}-\d{4}$", r"^(\d{1,3}\.){3}\d{1,3}$", r"^#[0-9a-f]{6}$", r"^[a-z]\w{0,9}$", r"^v\d+\.\d+$")
TURN = 64  # schemas
FORMATS = ("date", "date-time", "uuid", "email", "ipv4", "ipv6")


# ---- schemas ----
def schemas(count: int, *, seed: int = 0) -> list[tuple[str, Schema]]:
    """(kind, schema) by turns of the kinds."""
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    return [(kind.__name__.strip("_"), kind(random.Random(f"{seed},{i}"))) for i, kind in enumerate(kinds)]


def _leaf(draw: random.Random) -> Schema:
    return draw.choice(
        [
            {"type": "string", "maxLength": draw.randint(3, 20)},
            {"type": "integer", "minimum": 0, "maximum": draw.randint(1, 999)},
            {"type": "integer"},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": draw.sample(WORDS, 3)},
        ]
    )


def _object(draw: random.Random, leaf: Callable[[random.Random], Schema] = _leaf, *, depth: int = 0) -> Schema:
    names = draw.sample(WORDS, draw.randint(1, 5))
    deeper = [depth > 0 and draw.random() < 0.5 for _ in names]
    made = [_object(draw, leaf, depth=depth - 1) if deep else leaf(draw) for deep in deeper]
    required = draw.sample(names, draw.randint(0, len(names)))
    properties = dict(zip(names, made, strict=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _nested(draw: random.Random) -> Schema:
    return _object(draw, depth=3)


def _enums(draw: random.Random) -> Schema:
    values = [*WORDS, 1, 2, 3.5, True, None, 'a "quoted" one', "ünïcode", "", "\n"]
    return _object(draw, lambda draw: {"enum": draw.sample(values, draw.randint(1, 8))})


def _refs(draw: random.Random) -> Schema:
    point, label = {"$ref": "#/$defs/point"}, {"$ref": "#/$defs/label"}
    whole = {
        "type": "object",
        "properties": {"a": point, "b": label, "c": {"type": "array", "items": point, "maxItems": 2}},
    }
    return {"$defs": {"point": _object(draw), "label": _leaf(draw)}, **whole, "required": ["a"]} | _closed()


def _recursive(draw: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": draw.randint(1, 2)}
    node = {"type": "object", "properties": {"value": _leaf(draw), "children": children}, "required": ["value"]}
    return {"$defs": {"node": node | _closed()}, "$ref": "#/$defs/node"}


def _patterns(draw: random.Random) -> Schema:
    return _object(draw, lambda draw: {"type": "string", "pattern": draw.choice(PATTERNS)})


def _arrays(draw: random.Random) -> Schema:
    least = draw.randint(0, 4)
    items = draw.choice([_leaf, _object])(draw)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 4)}


def _numbers(draw: random.Random) -> Schema:
    def number(draw: random.Random) -> Schema:
        least = draw.choice([draw.randint(-1000, 1000), round(draw.uniform(-10, 10), 2)])
        whole = isinstance(least, int) and draw.random() < 0.6
        low, high = draw.choice(["minimum", "exclusiveMinimum"]), draw.choice(["maximum", "exclusiveMaximum"])
        step = {"multipleOf": draw.choice([2, 5, 10])} if whole and draw.random() < 0.3 else {}
        return {"type": "integer" if whole else "number", low: least, high: least + draw.randint(30, 500), **step}

    return _object(draw, number)


def _tagged(draw: random.Random, tag: str) -> Schema:
    schema = _object(draw)
    properties = {"type": {"const": tag}, **schema["properties"]}
    return schema | {"properties": properties, "required": ["type", *schema["required"]]}


def _one_of(draw: random.Random) -> Schema:
    return {"oneOf": [_tagged(draw, f"kind_{i}") for i in range(draw.randint(2, 4))]}


def _any_of(draw: random.Random) -> Schema:
    return _object(draw, lambda draw: {"anyOf": [_leaf(draw) for _ in range(draw.randint(2, 3))]})


def _all_of(draw: random.Random) -> Schema:
    def part(names: Sequence[str]) -> Schema:
        return {"type": "object", "properties": {name: _leaf(draw) for name in names}, "required": list(names)}

    return {"allOf": [part(["a", "b"]), part(["c"])]}


def _additional(draw: random.Random) -> Schema:
    return _object(draw) | {"additionalProperties": {"type": "boolean"}}


def _nullable(draw: random.Random) -> Schema:
    return _object(draw, lambda draw: {"type": [draw.choice(["string", "integer", "boolean", "number"]), "null"]})


def _formats(draw: random.Random) -> Schema:
    return _object(draw, lambda draw: {"type": "string", "format": draw.choice(FORMATS)})


def _tuples(draw: random.Random) -> Schema:
    items = [_leaf(draw) for _ in range(draw.randint(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 1}


def _lengths(draw: random.Random) -> Schema:
    def text(draw: random.Random) -> Schema:
        least = draw.randint(0, 6)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 20)}

    return _object(draw, text)


def _consts(draw: random.Random) -> Schema:
    return _object(draw, lambda draw: {"const": draw.choice([1, "x", None, True, [1, 2], {"a": 1}, -3.5])})


def _closed() -> Schema:
    return {"additionalProperties": False}


KINDS = (
    *(_nested, _enums, _refs, _recursive, _patterns, _arrays, _numbers, _one_of),
    *(_any_of, _all_of, _additional, _nullable, _formats, _tuples, _lengths, _consts),
)


# ---- what was said ----
def is_valid(text: str, schema: Schema) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(value)


def judged(said: Sequence[tuple[str, Schema, str, bool]]) -> dict[str, Any]:
    """Of (kind, schema, text, cut): how many are valid, and of which kinds those are that are not."""
    ended = [(kind, is_valid(text, schema)) for kind, schema, text, cut in said if not cut]
    wrong = Counter(kind for kind, valid in ended if not valid)
    return {
        "ended": len(ended),
        "valid": sum(valid for _, valid in ended),
        "cut": len(said) - len(ended),
        "wrong": wrong,
    }


def measured(asked: Sequence[tuple[str, Schema]], *, max_tokens: int) -> dict[str, Any]:
    """The local engine: compile, sample, and sample as much without a grammar."""
    import torch

    from groupwise.config.run import STARTER
    from groupwise.engine.local import LocalEngine
    from groupwise.errors import GrammarError
    from groupwise.model.load import load_model
    from groupwise.types import Grammar, SamplingParams, SamplingRequest

    base = load_model(STARTER)
    prompt = prompt_of(base.tokenizer)
    with closing(LocalEngine(base, max_rows=32)) as engine:
        engine.prepare(Grammar.of_json()).result()  # the tokenizer
        times, refused, requests, kept = [], Counter(), [], []
        for i, (kind, schema) in enumerate(asked):
            grammar, began = Grammar.of_json(schema), time.perf_counter()
            try:
                engine.prepare(grammar).result()
            except GrammarError:
                refused[kind] += 1
                continue
            times.append(time.perf_counter() - began)
            params = SamplingParams(max_tokens=max_tokens, seed=i, grammar=grammar)
            requests.append(SamplingRequest(prompt_ids=prompt, params=params))
            kept.append((kind, schema))
        said, seconds, free_seconds = [], 0.0, 0.0
        for at in range(0, len(requests), TURN):  # by turns, so that a busy machine slows both
            groups, took = timed(lambda at=at: engine.generate(requests[at : at + TURN]))
            lengths = [len(group[0].token_ids) for group in groups]
            free = [
                SamplingRequest(prompt_ids=prompt, params=SamplingParams(max_tokens=length, seed=i, ignore_eos=True))
                for i, length in enumerate(lengths)
            ]
            seconds, free_seconds = seconds + took, free_seconds + timed(lambda free=free: engine.generate(free))[1]
            said += [group[0] for group in groups]
    texts = [(*one, each.text.strip(), each.finish_reason == "length") for one, each in zip(kept, said, strict=True)]
    return {
        "schemas": len(asked),
        "compiled": len(times),
        "refused": refused,
        "compile_ms": {"median": 1e3 * statistics.median(times), "worst": 1e3 * max(times)},
        **judged(texts),
        "tokens": (tokens := sum(len(each.token_ids) for each in said)),
        "tokens_per_s": tokens / seconds,
        "free_tokens_per_s": tokens / free_seconds,
        "threads": torch.get_num_threads(),
    }


def prompt_of(tokenizer: Any) -> tuple[int, ...]:
    question = [{"role": "user", "content": "Write JSON."}]
    return tuple(
        tokenizer.apply_chat_template(question, add_generation_prompt=True, enable_thinking=False)["input_ids"]
    )


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


# ---- vLLM, in the Python that has it ----
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
asked = json.load(open(sys.argv[1]))
llm = LLM(model=asked["model"], max_num_seqs=32, seed=0)
said, kept = [], []
def params(i, schema):
    form = {} if schema is None else {"structured_outputs": StructuredOutputsParams(json=schema)}
    return SamplingParams(max_tokens=asked["max_tokens"], seed=i, temperature=1.0, **form)
prompt = {"prompt_token_ids": asked["prompt"]}
began, count = time.perf_counter(), 0
for at in range(0, len(asked["schemas"]), 32):
    chosen = asked["schemas"][at : at + 32]
    try:
        outs = llm.generate([prompt] * len(chosen), [params(at + i, s) for i, s in enumerate(chosen)], use_tqdm=False)
    except Exception:
        outs = []
        for i, schema in enumerate(chosen):
            try:
                outs += llm.generate([prompt], [params(at + i, schema)], use_tqdm=False)
            except Exception:
                outs.append(None)
    for out in outs:
        each = out and out.outputs[0]
        count += len(each.token_ids) if each else 0
        said.append(each and [each.text, each.finish_reason == "length"])
json.dump({"said": said, "tokens": count, "seconds": time.perf_counter() - began}, open(sys.argv[2], "w"))
"""


def measured_vllm(python: str, asked: Sequence[tuple[str, Schema]], *, max_tokens: int) -> dict[str, Any]:
    from groupwise.config.run import STARTER_DIR
    from groupwise.model.load import load_tokenizer

    prompt = prompt_of(load_tokenizer("starter"))
    with tempfile.TemporaryDirectory() as place:
        given, made = Path(place) / "asked.json", Path(place) / "said.json"
        only = [schema for _, schema in asked]
        given.write_text(
            json.dumps({"model": str(STARTER_DIR), "prompt": prompt, "max_tokens": max_tokens, "schemas": only})
        )
        subprocess.run([python, "-c", VLLM, str(given), str(made)], check=True)
        answer = json.loads(made.read_text())
    pairs = [(one, each) for one, each in zip(asked, answer["said"], strict=True) if each is not None]
    return {
        "schemas": len(asked),
        "compiled": len(pairs),
        **judged([(*one, text.strip(), cut) for one, (text, cut) in pairs]),
        "tokens": answer["tokens"],
        "tokens_per_s": answer["tokens"] / answer["seconds"],
    }


def show(sides: dict[str, dict[str, Any]]) -> None:
    table = Table("", *sides)
    for row in (
        "schemas",
        "compiled",
        "compile_ms",
        "ended",
        "valid",
        "wrong",
        "cut",
        "tokens_per_s",
        "free_tokens_per_s",
    ):
        table.add_row(row, *(_shown(side.get(row, "")) for side in sides.values()))
    Console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:.3g}" for name, count in value.items()) or "none"
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", help="a Python that has vLLM, to be measured beside")
    parser.add_argument("--json", type=Path, help="where the numbers are written")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    asked = schemas(32 if options.quick else options.schemas, seed=options.seed)
    sides = {"groupwise": measured(asked, max_tokens=options.max_tokens)}
    if options.vllm:
        sides["vllm"] = measured_vllm(options.vllm, asked, max_tokens=options.max_tokens)
    show(sides)
    if options.json:
        options.json.write_text(json.dumps(sides, indent=1))
    return 0 if all(side["valid"] == side["ended"] for name, side in sides.items() if name == "groupwise") else 1


if __name__ == "__main__":
    sys.exit(main())
