"""How many tokens does training compute where harnesses compact their history?

    python benchmarks/compaction.py [--turns 20] [--every 5] [--keep 2] [--episodes 8] [--system 200] [--said 60]
                                    [--heard 40] [--out compaction.json]

A group of `--episodes` of `--turns` turns each. After every `--every` turns the policy is asked for a summary, and the
history becomes the system message, the summary and the last `--keep` turns. The episodes go through what records agents
(`tasks.conversations`) and what packs samples for training (`model.packing`), with random words for the starter's
tokenizer; nothing is computed. Compared are the tokens of a forward pass

    naive       each request is a sequence: its prompt and what was sampled
    segments    each segment is a sequence: requests that go on from each other are one
    packed      what the trainer computes: segments, equal prompts and worthwhile prefix trees once
    distinct    every shared beginning once: the least there is

and the tokens that are trained, which must be those that were sampled. Also of `--every 0`: no compaction.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from groupwise.algo.prefixes import tree_of
from groupwise.algo.samples import samples_of
from groupwise.config.run import STARTER_DIR
from groupwise.model.packing import micro_batches
from groupwise.tasks.conversations import Conversations
from groupwise.types import Completion, FinishReason, Message, Prompt, Rollout, RolloutGroup

WORDS = ("add", "sub", "what", "is", "the", "result", "of", "number", "count", "sort", "reply", "with")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"turns": 20, "every": 5, "keep": 2, "episodes": 8, "system": 200, "said": 60, "heard": 40}
    for name, default in {**sizes, "micro-tokens": 65536, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = measured(options)
    if options.out:
        options.out.write_text(json.dumps({"options": {**vars(options), "out": None}, **counts}, indent=1))
    for name in ("naive", "segments", "packed", "distinct"):
        print(f"{name:9} {counts[name]:>9,} tokens   naive / this = {counts['naive'] / counts[name]:.2f}")
    print(f"sampled   {counts['sampled']:>9,} tokens, trained {counts['trained']:,}, in {counts['samples']} segments")
    if counts["sampled"] != counts["trained"]:
        raise SystemExit("what is trained is not what was sampled")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The counts of one group."""
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(STARTER_DIR), random.Random(options.seed)
    system: Message = {"role": "system", "content": words(draw, options.system)}
    first: Message = {"role": "user", "content": words(draw, options.heard)}
    talks = [episode(tokenizer, random.Random(number), options, system, first) for number in range(options.episodes)]
    rollouts = tuple(Rollout(turns=talk.turns(), advantage=1.0) for talk in talks)
    samples = samples_of([RolloutGroup(prompt=Prompt(id="0"), rollouts=rollouts)])
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    batches = micro_batches(samples, token_budget=options.micro_tokens)
    return {
        "naive": sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in turns),
        "segments": sum(len(each.prompt_ids) + len(each.completion_ids) for each in samples),
        "packed": sum(len(batch.input_ids_S) for batch in batches),
        "distinct": sum(line.own for line in tree_of(samples, range(len(samples)))),
        "sampled": sum(len(turn.completion.token_ids) for turn in turns),
        "trained": sum(sum(each.mask) for each in samples),
        "samples": len(samples),
        "requests": len(turns),
    }


def episode(
    tokenizer: Any, draw: random.Random, options: argparse.Namespace, system: Message, first: Message
) -> Conversations:
    """One episode of a harness that compacts."""
    talk, messages = Conversations(tokenizer), [system, first]

    def answered(asked: list[Message]) -> Message:
        text = words(draw, options.said)
        ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        logprobs, stop = (-1.0,) * len(ids), FinishReason.STOP
        said = Completion(token_ids=ids, logprobs=logprobs, text=text, finish_reason=stop)
        return {"role": "assistant", "content": talk.answer(talk.ask(asked, ()), said)["content"]}

    for turn in range(1, options.turns + 1):
        messages.append(answered(messages))
        if options.every and turn % options.every == 0 and turn < options.turns:
            summary = answered([*messages, {"role": "user", "content": "Sum up what was done."}])
            kept = messages[len(messages) - (2 * options.keep - 1) :] if options.keep else []
            messages = [system, {"role": "user", "content": f"Until now: {summary.get('content')}"}, *kept]
        messages.append({"role": "user", "content": words(draw, options.heard)})
    return talk


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


if __name__ == "__main__":
    main()
