"""Episodes in an environment: many at once over one engine, against one after another, in one run.

    python benchmarks/episodes.py [--cases 8] [--peer-cases 1] [--hidden 512] [--layers 8] [--tool-seconds 1.0]

Environments in the three-method form, which ask the model for every turn after the first, are scored with the same
model, prompts and limits on turns and tokens: as Groupwise plays them, and as trainers do that call `score_episode`
one completion after another with transformers' own `generate` (first completions in one batch; fewer of them, since it
is the rate that is compared). A model that is trained with gradient checkpointing, which is aitraining's default, is
loaded there with `use_cache` off: every token of a later turn costs a pass over the whole conversation. Compared are
that and the same with the key-value cache on. Once the examples' hotel with the model that knows it
(examples/envs/hotel_form.py makes it), once talk of four turns with a model of `--hidden` and `--layers` and random
weights (22M parameters). Then 64 episodes whose tool takes a second, by how many of them may be under way at once.
Each side has a process of its own, and plays something before it is timed. Prints a table with the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from subjects import write_model

from groupwise.config.run import parse_config
from groupwise.engine.local import LocalEngine
from groupwise.model.chat import decode, encode_prompt
from groupwise.model.load import LoadedModel, load_model
from groupwise.run.assemble import open_envs, open_play
from groupwise.run.plan import make_plan
from groupwise.tasks.rollout_sources import play_all
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


class Talk:
    """Some turns, whatever is said: for a model that knows nothing."""

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": self._asked(number), "case_idx": number} for number in range(64)]

    def get_tools(self) -> list[dict[str, Any]]:
        return []

    def score_episode(self, model: Any, tokenizer: Any, completion: Any, case_idx: int) -> float:
        messages, said = self._asked(case_idx), completion[-1]["content"]
        for turn in range(1, TURNS):
            again = f"That was turn {turn} of {TURNS}. What do you say to {case_idx * 7919 + turn}, {said[:40]!r}?"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": again}]
            said = model.chat(messages)
        return float(len(said) % 2)

    def _asked(self, number: int) -> list[dict[str, Any]]:
        rules = " ".join(f"Rule {rule}: after {rule * number} comes {rule * number + 1}." for rule in range(1, 21))
        return [{"role": "user", "content": f"{rules} What comes after {number}?"}]


class OneAtATime:
    """The `model` of `score_episode` as others hand it over: transformers' own model, a turn at a time."""

    def __init__(self, base: LoadedModel, *, cache: bool):
        self.base, self.cache, self.turns = base, cache, 0

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        prompt = encode_prompt(Prompt(id="x", messages=tuple(messages), tools=tuple(tools or ())), self.base.tokenizer)  # type: ignore[arg-type]
        self.turns += 1
        return self.generate([prompt.token_ids], cache=self.cache)[0]

    @torch.no_grad()
    def generate(self, prompts: list[tuple[int, ...]], *, cache: bool) -> list[str]:
        """Completions of prompts of one length."""
        ids = torch.tensor(prompts)
        out = self.base.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=True,
            top_k=0,
            use_cache=cache,
            eos_token_id=list(self.base.eos_ids),
            pad_token_id=self.base.tokenizer.pad_token_id,
        )
        return [decode(row[ids.shape[1] :].tolist(), self.base.tokenizer) for row in out]


Rate = tuple[float, int]  # seconds and turns


def ours(model: str, env: dict[str, Any], cases: int, group: int) -> Rate:
    """`cases` groups."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run: the engine has the helpers
    base = load_model(model, device="cpu", dtype="float32")
    config = parse_config(
        {
            "env": env,
            "folder": str(EXAMPLES if "hotel" in env["environment"] else Path(__file__).parent),
            "rollout": {"group_size": group, "max_tokens": MAX_TOKENS},
        }
    )
    plan, engine = make_plan(config), LocalEngine(base, threads=threads)
    play = open_play(plan, base, engine, open_envs(plan))
    prompts = [play.prepare(prompt) for prompt in plan.source.all(cases)]

    async def all_of(some: list[Prompt]) -> list[RolloutGroup]:
        seeds, sampling = list(range(len(some))), config.rollout.sampling()
        return await play_all(play, some, seeds=seeds, n=group, params=sampling, version=PolicyVersion.base())

    try:
        asyncio.run(all_of(prompts[:1]))  # processes are started, memory is allocated
        started = time.perf_counter()
        groups = asyncio.run(all_of(prompts))
        seconds = time.perf_counter() - started
    finally:
        play.close()
        engine.close()
    errors = {rollout.error for each in groups for rollout in each.rollouts} - {None}
    if errors:
        sys.exit(f"episodes failed: {errors}")
    return seconds, sum(len(rollout.turns) for each in groups for rollout in each.rollouts)


def one_after_another(model: str, name: str, cases: int, group: int, cache: bool) -> Rate:
    """The same with `score_episode` called for one completion after another; `cache`: of later turns."""
    sys.path.insert(0, str(EXAMPLES))
    from hotel_booking import HotelThreeMethods

    env: Any = HotelThreeMethods() if name == "hotel" else Talk()
    policy = OneAtATime(load_model(model, device="cpu", dtype="float32"), cache=cache)
    tokenizer, asked_of = policy.base.tokenizer, env.build_dataset(policy.base.tokenizer)[: cases + 1]

    def play(rows: list[dict[str, Any]], group: int) -> None:
        for row in rows:
            asked = Prompt(id="x", messages=tuple(row["prompt"]), tools=tuple(env.get_tools()))
            texts = policy.generate([encode_prompt(asked, tokenizer).token_ids] * group, cache=True)
            policy.turns += group
            for text in texts:
                env.score_episode(policy, tokenizer, [{"role": "assistant", "content": text}], row["case_idx"])

    play(asked_of[cases:], 1)
    policy.turns, started = 0, time.perf_counter()
    play(asked_of[:cases], group)
    return time.perf_counter() - started, policy.turns


def apart(side: Callable[..., Rate], *arguments: Any) -> Rate:
    """What it returns, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(side, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--peer-cases", type=int, default=1, help="how many of them go one after another")
    parser.add_argument("--model", default="runs/hotel-form", help="as examples/envs/hotel_form.py makes it")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    options = parser.parse_args()
    console, table = Console(width=100), Table("what", "seconds", "turns", "turns a second", "ratio")
    count = options.cases * options.group
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), hidden=options.hidden, layers=options.layers)
        for name, model, place in (
            ("hotel", options.model, "hotel_booking:HotelThreeMethods"),
            ("talk", directory, "episodes:Talk"),
        ):
            env = {"environment": place, "max_turns": TURNS}
            mine, turns = apart(ours, model, env, options.cases, options.group)
            rate = turns / mine
            table.add_row(f"{count} {name} episodes at once", f"{mine:.2f}", str(turns), f"{rate:.1f}")
            for cache in (False, True):
                theirs, asked = apart(one_after_another, model, name, options.peer_cases, options.group, cache)
                how, speed = "with the cache" if cache else "as by default", asked / theirs
                cells = (f"{theirs:.2f}", str(asked), f"{speed:.1f}", f"{rate / speed:.1f}x")
                table.add_row(f"one after another, {how}", *cells)
    for concurrency in (8, 16, 64):
        args = {"seconds": options.tool_seconds, "count": 8}
        env = {"environment": "episodes:SlowTool", "args": args, "concurrency": concurrency}
        seconds, turns = apart(ours, options.model, env, 8, 8)
        ideal = 64 / concurrency * options.tool_seconds
        table.add_row(f"64 slow tools, {concurrency} at once", f"{seconds:.2f}", str(turns), "", f"ideal {ideal:.0f} s")
    console.print(table)


if __name__ == "__main__":
    main()
