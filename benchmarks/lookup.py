"""What do drafts from earlier text bring? `LocalEngine` with and without `draft_tokens`, few rows at a time.

    python benchmarks/lookup.py --json lookup.json
    python benchmarks/lookup.py --draft 4 --rows 1 2
    python benchmarks/lookup.py --quick               does it run?

The starter, in one process by turns; the same requests on both sides, prefill included:

    json      a person as JSON, after three others in the same conversation
    copy      words to repeat, after three others
    tool      a calculator call, whose form and operands are in the prompt
    sums      column addition worked out: little was there before
    loops     greedy text of random prompts, to full length, which soon repeats itself: the best that there can be

All but the last at temperature 1, to the end of the turn. `accepted` is the share of drafted tokens that stood; `same`
the completions that are the same on both sides. In float32 a forward of more tokens rounds otherwise, so that now and
then a draw at the border of two tokens falls on the other one; in float64 the tests ask for all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from step_vs_trl import machine
from subjects import load, random_ids

from groupwise.config.run import STARTER
from groupwise.engine.local import LocalEngine
from groupwise.model.chat import encode_rendered, render_prompt
from groupwise.model.load import LoadedModel
from groupwise.tasks.starter.tasks import prompts
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

EXAMPLES = 3  # before the question
SIDES = ("without", "with")


@dataclass(frozen=True)
class Work:
    """A case: its prompts and how they are sampled."""

    name: str
    prompts: Sequence[tuple[int, ...]]
    params: SamplingParams

    def requests(self) -> list[SamplingRequest]:
        """One completion of each prompt."""
        base = PolicyVersion.base()
        return [SamplingRequest(prompt_ids=ids, params=self.params, n=1, version=base) for ids in self.prompts]


def ids_of(base: LoadedModel, messages: list[Any], tools: Any = None) -> tuple[int, ...]:
    """The prompt in the starter's template."""
    return encode_rendered(render_prompt(messages, base.tokenizer, tools=tools), base.tokenizer)


def after_examples(base: LoadedModel, skill: str, count: int) -> list[tuple[int, ...]]:
    """Questions, each after others with their answers."""
    rows = prompts(skill, n=count * (EXAMPLES + 1))
    found = []
    for at in range(0, len(rows), EXAMPLES + 1):
        *examples, last = rows[at : at + EXAMPLES + 1]
        said = [[*row["prompt"], {"role": "assistant", "content": row["answer"]}] for row in examples]
        found.append(ids_of(base, [*chain(*said), *last["prompt"]]))
    return found


def cases(base: LoadedModel, options: argparse.Namespace) -> list[Work]:
    """What is measured."""
    turn = SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=0)
    loops = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True, seed=0)
    works = [Work(skill, after_examples(base, skill, options.prompts), turn) for skill in ("json", "copy")]
    n = options.prompts
    for name, rows in {"tool": prompts("tool", n=n), "sums": prompts("add", n=n, style="think")}.items():
        works.append(Work(name, [ids_of(base, row["prompt"], row.get("tools")) for row in rows], turn))
    return [*works, Work("loops", [random_ids(16, seed=seed) for seed in range(options.prompts)], loops)]


def compare(engines: dict[str, LocalEngine], work: Work, repeats: int) -> dict[str, Any]:
    """Both sides by turns, after a first time."""
    texts = {name: engine.generate(work.requests()) for name, engine in engines.items()}
    before, rates = engines["with"].stats(), {name: [] for name in engines}
    for repeat in range(repeats):
        for name in SIDES if repeat % 2 == 0 else reversed(SIDES):
            started = time.perf_counter()
            done = engines[name].generate(work.requests())
            rates[name].append(sum(len(c.token_ids) for group in done for c in group) / (time.perf_counter() - started))
    drafted, accepted = (engines["with"].stats()[key] - before[key] for key in ("drafted", "accepted"))
    tokens = sum(len(group[0].token_ids) for group in texts["with"])
    same = sum(a[0].token_ids == b[0].token_ids for a, b in zip(*texts.values(), strict=True))
    return {
        "case": work.name,
        "prompts": len(work.prompts),
        "tokens": tokens,
        "tokens_per_s": {name: statistics.median(rate) for name, rate in rates.items()},
        "rates": rates,
        "accepted_share": accepted / drafted if drafted else None,
        "from_drafts": accepted / repeats / tokens,
        "same": same,
    }


def table_of(results: Sequence[dict[str, Any]], draft: int) -> Table:
    """A line per case and number of rows."""
    table = Table("case", title=f"Drafts of up to {draft} tokens", caption="tokens a second, medians")
    for heading in ("rows", "tokens", "without", "with", "ratio", "accepted", "from drafts", "same"):
        table.add_column(heading, justify="right")
    for result in results:
        plain, drafting = (result["tokens_per_s"][side] for side in SIDES)
        share = result["accepted_share"]
        table.add_row(
            result["case"],
            str(result["rows"]),
            str(result["tokens"]),
            f"{plain:,.0f}",
            f"{drafting:,.0f}",
            f"{drafting / plain:.2f}x",
            "-" if share is None else f"{share:.0%}",
            f"{result['from_drafts']:.0%}",
            f"{result['same']}/{result['prompts']}",
        )
    return table


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"draft": 8, "prompts": 32, "tokens": 96, "repeats": 5, "threads": torch.get_num_threads()}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="completions decoded at once")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few and short completions")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.repeats, options.rows = 4, 24, 1, [1, 4]
    return options


def main() -> None:
    options, console = parse_options(), Console()
    torch.set_num_threads(options.threads)
    base, results = load(STARTER), []
    works = cases(base, options)
    for rows in options.rows:
        with ExitStack() as stack:
            engines = {
                side: stack.enter_context(closing(LocalEngine(base, max_rows=rows, draft_tokens=most)))
                for side, most in zip(SIDES, (0, options.draft), strict=True)
            }
            results += [{"rows": rows, **compare(engines, work, options.repeats)} for work in works]
    console.print(table_of(results, options.draft))
    if options.json is not None:
        whole = {"machine": machine(options.threads), "draft": options.draft, "results": results}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
