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
    tokens/s   of all rows together, compiling included, beside as many rows without a grammar in the same process, each
               as many tokens long

The model is small, so that its own work is little and the mask's share is large: of a larger model it is less. With
`--vllm`, the same schemas through vLLM's own structured outputs, in a Python that has it
(tests/vllm_server/install.sh); both sides by turns of 64 schemas, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
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
TURN, ROWS = 64, 32  # schemas; decoded at once
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


def measured(
    asked: Sequence[tuple[str, Schema]], *, max_tokens: int, vllm: Vllm | None = None
) -> dict[str, dict[str, Any]]:
    """What each side makes of the schemas, by turns: compile, sample, and sample as much without a grammar."""
    import torch

    from groupwise.config.run import STARTER
    from groupwise.engine.local import LocalEngine
    from groupwise.errors import GrammarError
    from groupwise.model.load import load_model
    from groupwise.types import Grammar, SamplingParams, SamplingRequest

    base = load_model(STARTER)
    prompt = prompt_of(base.tokenizer)
    ours, theirs, times, refused = Sums(), Sums(), list[float](), Counter[str]()
    with closing(LocalEngine(base, max_rows=ROWS)) as engine:
        engine.prepare(Grammar.of_json()).result()  # the tokenizer
        for at in range(0, len(asked), TURN):
            turn = asked[at : at + TURN]
            requests, kept, compiling = [], [], 0.0
            for i, (kind, schema) in enumerate(turn, at):
                grammar, began = Grammar.of_json(schema), time.perf_counter()
                try:
                    engine.prepare(grammar).result()
                except GrammarError:
                    refused[kind] += 1
                    continue
                finally:
                    compiling += time.perf_counter() - began
                times.append(time.perf_counter() - began)
                params = SamplingParams(max_tokens=max_tokens, seed=i, grammar=grammar)
                requests.append(SamplingRequest(prompt_ids=prompt, params=params))
                kept.append((kind, schema))
            groups, took = timed(lambda requests=requests: engine.generate(requests))
            lengths = [len(group[0].token_ids) for group in groups]
            free = [
                SamplingRequest(prompt_ids=prompt, params=SamplingParams(max_tokens=length, seed=i, ignore_eos=True))
                for i, length in enumerate(lengths)
            ]
            free_took = timed(lambda free=free: engine.generate(free))[1]
            said = [(group[0].text, group[0].finish_reason == "length") for group in groups]
            ours.add(kept, said, sum(lengths), compiling + took, free_took)
            if vllm is not None:
                answer = vllm.turn(at, [schema for _, schema in turn])
                pairs = [(one, each) for one, each in zip(turn, answer["said"], strict=True) if each is not None]
                said = [(text, cut) for _, (text, cut) in pairs]
                theirs.add([one for one, _ in pairs], said, answer["tokens"], answer["seconds"], answer["free_seconds"])
    compiled = {"compile_ms": {"median": 1e3 * statistics.median(times), "worst": 1e3 * max(times)}}
    sides = {"groupwise": ours.result() | compiled | {"refused": refused, "threads": torch.get_num_threads()}}
    if vllm is not None:
        sides["vllm"] = theirs.result()
    return {name: {"schemas": len(asked)} | side for name, side in sides.items()}


@dataclass
class Sums:
    """What one side said in all turns."""

    said: list[tuple[str, Schema, str, bool]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    free_seconds: float = 0.0

    def add(
        self,
        asked: Sequence[tuple[str, Schema]],
        said: Sequence[tuple[str, bool]],
        tokens: int,
        seconds: float,
        free_seconds: float,
    ) -> None:
        self.said += [(*one, text.strip(), cut) for one, (text, cut) in zip(asked, said, strict=True)]
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.free_seconds += free_seconds

    def result(self) -> dict[str, Any]:
        rates = {"tokens_per_s": self.tokens / self.seconds, "free_tokens_per_s": self.tokens / self.free_seconds}
        return {"compiled": len(self.said), **judged(self.said), "tokens": self.tokens, **rates}


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
import json, os, sys, time
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
answers = os.fdopen(int(sys.argv[1]), "w")
about = json.loads(sys.stdin.readline())
room = {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 1 << 30}  # of memory that others use too
llm = LLM(model=about["model"], max_num_seqs=about["rows"], seed=0, enable_prefix_caching=True, **room)
prompt = {"prompt_token_ids": about["prompt"]}

def sample(params):
    return llm.generate([prompt] * len(params), params, use_tqdm=False)

def constrained(i, schema):
    form = StructuredOutputsParams(json=schema)
    return SamplingParams(max_tokens=about["max_tokens"], seed=i, temperature=1.0, structured_outputs=form)

def free(length):
    return SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True)

def turn(start, schemas):
    params = [constrained(start + i, schema) for i, schema in enumerate(schemas)]
    try:
        return sample(params)
    except Exception:  # one that cannot be compiled
        outs = []
        for each in params:
            try:
                outs += sample([each])
            except Exception:
                outs.append(None)
        return outs

sample([free(8)] * about["rows"])
print(json.dumps("ready"), file=answers, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    began = time.perf_counter()
    outs = [out and out.outputs[0] for out in turn(asked["start"], asked["schemas"])]
    seconds = time.perf_counter() - began
    lengths = [len(each.token_ids) for each in outs if each]
    began = time.perf_counter()
    sample([free(length) for length in lengths])
    free_seconds = time.perf_counter() - began
    said = [each and [each.text, each.finish_reason == "length"] for each in outs]
    answer = {"said": said, "tokens": sum(lengths), "seconds": seconds, "free_seconds": free_seconds}
    print(json.dumps(answer), file=answers, flush=True)
"""


class Vllm:
    """vLLM in a process of its own, which waits between turns."""

    def __init__(self, python: str, *, max_tokens: int):
        from groupwise.config.run import STARTER_DIR
        from groupwise.model.load import load_tokenizer

        prompt = prompt_of(load_tokenizer("starter"))
        answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [python, "-c", VLLM, str(theirs)], stdin=subprocess.PIPE, text=True, pass_fds=[theirs]
        )
        os.close(theirs)
        self._answers = os.fdopen(answers)
        self._ask({"model": str(STARTER_DIR), "rows": ROWS, "prompt": prompt, "max_tokens": max_tokens})

    def turn(self, start: int, schemas: Sequence[Schema]) -> dict[str, Any]:
        """What it says of these, the first of which is the `start`-th, and how long that and as much text without a
        grammar took."""
        return self._ask({"start": start, "schemas": schemas})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, what: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._answers.readline()
        if not line:
            sys.exit(f"vLLM ended with {self._process.wait()}")
        return json.loads(line)


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
    with ExitStack() as stack:
        vllm = options.vllm and stack.enter_context(closing(Vllm(options.vllm, max_tokens=options.max_tokens)))
        sides = measured(asked, max_tokens=options.max_tokens, vllm=vllm)
    show(sides)
    if options.json:
        options.json.write_text(json.dumps(sides, indent=1))
    return 0 if all(side["valid"] == side["ended"] for name, side in sides.items() if name == "groupwise") else 1


if __name__ == "__main__":
    sys.exit(main())
