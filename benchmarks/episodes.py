"""Episodes in an environment: many at once over one engine, against one after another, in one run.

    python benchmarks/episodes.py [--model runs/hotel-form] [--cases 8] [--group 8] [--tool-seconds 1.0]

The examples' hotel in its three-method form, where the environment asks the model for every turn after the first, is
scored twice with the same model, prompts and limits on turns and tokens: as Groupwise plays it, and as trainers do that
call `score_episode` one completion after another with transformers' own `generate` (first completions in one batch, the
key-value cache on). Then 64 episodes whose tool takes a second, by how many of them may be under way at once. Prints a
table with the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from groupwise.assemble import make_plan, open_play
from groupwise.chat import decode, encode_prompt
from groupwise.config import parse_config
from groupwise.engine.local import LocalEngine
from groupwise.model import LoadedModel, load_model
from groupwise.play import play_all
from groupwise.types import PolicyVersion, Prompt, RolloutGroup

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "envs"
MAX_TOKENS, TURNS = 72, 4


class SlowTool:
    """An environment of one turn whose tool takes `seconds`."""

    def __init__(self, seconds: float, count: int):
        self.seconds, self.count = seconds, count

    def cases(self) -> list[dict[str, int]]:
        return [{"number": number} for number in range(self.count)]

    def reset(self, case: dict[str, int], seed: int) -> str:
        return "What is 4 + 5?"

    def step(self, message: Any) -> Any:
        time.sleep(self.seconds)
        return [], 1.0, True


class OneAtATime:
    """The `model` of `score_episode` as others hand it over: transformers' own model, a turn at a time."""

    def __init__(self, base: LoadedModel):
        self.base, self.turns = base, 0

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        prompt = encode_prompt(Prompt(id="x", messages=tuple(messages), tools=tuple(tools or ())), self.base.tokenizer)  # type: ignore[arg-type]
        self.turns += 1
        return self.generate([prompt.token_ids])[0]

    @torch.no_grad()
    def generate(self, prompts: list[tuple[int, ...]]) -> list[str]:
        """Completions of prompts of one length."""
        ids = torch.tensor(prompts)
        out = self.base.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=True,
            top_k=0,
            eos_token_id=list(self.base.eos_ids),
            pad_token_id=self.base.tokenizer.pad_token_id,
        )
        return [decode(row[ids.shape[1] :].tolist(), self.base.tokenizer) for row in out]


def ours(base: LoadedModel, env: dict[str, Any], *, cases: int, group: int) -> tuple[float, int]:
    """Seconds and turns of `cases` groups."""
    config = parse_config(
        {
            "env": env,
            "folder": str(EXAMPLES if "hotel" in env["environment"] else Path(__file__).parent),
            "rollout": {"group_size": group, "max_tokens": MAX_TOKENS},
        }
    )
    plan, engine = make_plan(config), LocalEngine(base)
    try:
        play = open_play(plan, base, engine)
        prompts = [play.prepare(prompt) for prompt in plan.source.all(cases)]

        async def all_of_them() -> list[RolloutGroup]:
            seeds = list(range(len(prompts)))
            sampling = config.rollout.sampling()
            return await play_all(play, prompts, seeds=seeds, n=group, params=sampling, version=PolicyVersion.base())

        started = time.perf_counter()
        groups = asyncio.run(all_of_them())
        seconds = time.perf_counter() - started
    finally:
        engine.close()
    errors = {rollout.error for each in groups for rollout in each.rollouts} - {None}
    if errors:
        sys.exit(f"episodes failed: {errors}")
    return seconds, sum(len(rollout.turns) for each in groups for rollout in each.rollouts)


def one_after_another(base: LoadedModel, *, cases: int, group: int) -> tuple[float, int]:
    """The same with `score_episode` called for one completion after another."""
    sys.path.insert(0, str(EXAMPLES))
    from hotel_booking import HotelThreeMethods

    env, model = HotelThreeMethods(), OneAtATime(base)
    rows, started = env.build_dataset(base.tokenizer)[:cases], time.perf_counter()
    for row in rows:
        asked = Prompt(id="x", messages=tuple(row["prompt"]), tools=tuple(env.get_tools()))
        ids = encode_prompt(asked, base.tokenizer).token_ids
        texts = model.generate([ids] * group)
        model.turns += group
        for text in texts:
            env.score_episode(model, base.tokenizer, [{"role": "assistant", "content": text}], row["case_idx"])
    return time.perf_counter() - started, model.turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--model", default="starter", help="runs/hotel-form, which examples/envs/hotel_form.py makes")
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    options = parser.parse_args()
    console = Console(width=100)
    base = load_model(options.model, device="cpu", dtype="float32")
    env = {"environment": "hotel_booking:HotelThreeMethods", "max_turns": TURNS}
    mine, turns = ours(base, env, cases=options.cases, group=options.group)
    theirs, their_turns = one_after_another(base, cases=options.cases, group=options.group)
    table = Table("what", "seconds", "turns", "turns a second", "ratio")
    count = options.cases * options.group
    table.add_row(f"{count} hotel episodes, at once", f"{mine:.2f}", str(turns), f"{turns / mine:.1f}", "")
    ratio = (turns / mine) / (their_turns / theirs)
    table.add_row(
        "one after another", f"{theirs:.2f}", str(their_turns), f"{their_turns / theirs:.1f}", f"{ratio:.1f}x"
    )
    for concurrency in (8, 16, 64):
        slow = {"environment": "episodes:SlowTool", "args": {"seconds": options.tool_seconds, "count": 8}}
        seconds, turns = ours(base, {**slow, "concurrency": concurrency}, cases=8, group=8)
        ideal = 64 / concurrency * options.tool_seconds
        table.add_row(f"64 slow tools, {concurrency} at once", f"{seconds:.2f}", str(turns), "", f"ideal {ideal:.0f} s")
    console.print(table)


if __name__ == "__main__":
    main()
