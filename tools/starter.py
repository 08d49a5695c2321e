"""The starter, the small model in the wheel: how it was made, and what it can do.

    python tools/starter.py build --out starter-model    train it from scratch, about an hour on two CPU cores
    python tools/starter.py info [--measure]             its accuracy on held-out problems, skill by skill
    python tools/starter.py lesson chats.jsonl --out DIR  a further lesson for it, of conversations in a file

The architecture is Qwen3's (grouped-query attention, q/k norms, SwiGLU, tied embeddings, head size 64), which
transformers, PEFT, vLLM and llama.cpp load; the data is `groupwise.tasks.starter.tasks`; the training is the learner's
supervised path over all parameters. Everything is seeded. `build` writes what it measured beside the model: a row is
one skill in one style of answer, `greedy` and `sampled` are shares of right replies by `tasks.is_correct`, `sampled` at
temperature 1 as in training.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from groupwise.cli.frame import OPTIONS, AsJson, Debug
from groupwise.cli.output import print_json, print_pairs, say
from groupwise.config.run import STARTER, STARTER_DIR, OptimizerConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError, DataError, ModelError
from groupwise.model.chat import encode_prompt
from groupwise.model.load import load_model, wrap_model
from groupwise.model.supervised import encode_supervised
from groupwise.tasks.prompts import to_prompt
from groupwise.tasks.starter.tasks import (
    CURIOUS_SKILLS,
    CURIOUS_STYLES,
    SKILLS,
    Conversation,
    Mix,
    Row,
    Style,
    is_correct,
    prompts,
    supervised_conversations,
)
from groupwise.tasks.starter.tokenizer import build_tokenizer, render
from groupwise.train.learner import Learner, learning_rate_at
from groupwise.types import Sample, SamplingParams, SamplingRequest

app = typer.Typer(help="The small model in the package: what it can do, and how it is made.", **OPTIONS)


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One pass of supervised training: AdamW from rest, warm-up, cosine to zero, on a mix of conversations."""

    steps: int
    learning_rate: float
    mix: Mix = field(default_factory=Mix)


# First everything; then more of sums and differences, worked out; last, to forget when one was asked to think.
LESSONS = (
    Lesson(steps=2200, learning_rate=3e-3),
    Lesson(steps=1100, learning_rate=2e-3, mix=Mix(skills=CURIOUS_SKILLS, asked=CURIOUS_STYLES)),
    Lesson(steps=200, learning_rate=5e-4, mix=Mix(skills=CURIOUS_SKILLS, asked=CURIOUS_STYLES, noise={"think": 0.75})),
)


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """The recipe of the model in the wheel."""

    lessons: tuple[Lesson, ...] = LESSONS
    seed: int = 0
    tokens_per_step: int = 4096
    warmup_steps: int = 100
    weight_decay: float = 0.1
    vocab_size: int = 1024
    hidden_size: int = 192
    layers: int = 4
    context_length: int = 1024


def build_starter(directory: Path, spec: BuildSpec, *, report: Callable[[str], None]) -> None:
    """Train the starter and write it into `directory`, after every lesson; the next begins from what was written.

    `report` receives a line now and then.
    """
    torch.manual_seed(spec.seed)
    texts = [render(c["messages"], tools=c["tools"]) for c in supervised_conversations(spec.seed, 20000)]
    tokenizer = build_tokenizer(texts, vocab_size=spec.vocab_size)
    save(new_model(spec, tokenizer), tokenizer, directory)
    for number, lesson in enumerate(spec.lessons):
        report(f"lesson {number + 1} of {len(spec.lessons)}: {lesson.steps} steps, seed {spec.seed}")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        drawn = draw_conversations(lesson.mix, first_seed=spec.seed * 1_000_003 + number * 10_000)
        teach(model, tokenizer, lesson, spec, conversations=drawn, report=report)
        save(model, tokenizer, directory)


def further_lesson(
    source: Path, directory: Path, rows: Sequence[Conversation], lesson: Lesson, *, report: Callable[[str], None]
) -> None:
    """Teach the model in `source` the conversations in `rows`, again and again in another order, and write it into
    `directory`. All parameters are trained; `lesson.mix` is not read."""
    tokenizer = load_model(str(source)).tokenizer
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    spec = BuildSpec(warmup_steps=30)
    drawn = itertools.chain.from_iterable(_shuffled(rows, seed) for seed in itertools.count(spec.seed))
    teach(model, tokenizer, lesson, spec, conversations=drawn, report=report)
    save(model, tokenizer, directory)


def _shuffled(rows: Sequence[Conversation], seed: int) -> list[Conversation]:
    order = list(rows)
    random.Random(seed).shuffle(order)
    return order


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lesson: Lesson,
    spec: BuildSpec,
    *,
    conversations: Iterator[Conversation],
    report: Callable[[str], None],
) -> None:
    """One lesson: train all parameters of `model` in place, on as many of the conversations as it has steps for."""
    learner = Learner(
        wrap_model(model, tokenizer, name=STARTER),
        lora=None,
        optimizer=OptimizerConfig(weight_decay=spec.weight_decay, betas=(0.9, 0.98)),
        micro_tokens=spec.tokens_per_step * 2,
        autocast=torch.bfloat16,
    )
    start, smoothed = time.monotonic(), math.nan
    stream = batches(spec, tokenizer, conversations)
    warmup = min(spec.warmup_steps, lesson.steps // 4)
    for step, samples in zip(range(lesson.steps), stream, strict=False):
        loss = learner.forward_backward_supervised(samples)["loss/cross_entropy"]
        rate = learning_rate_at(
            step, peak=lesson.learning_rate, warmup_steps=warmup, steps=lesson.steps, schedule="cosine"
        )
        learner.optim_step(learning_rate=rate)
        smoothed = loss if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * loss
        if (step + 1) % 50 == 0:
            report(f"step {step + 1}/{lesson.steps}  loss {smoothed:.4f}  {time.monotonic() - start:.0f} s")


def new_model(spec: BuildSpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The untrained model."""
    end: Any = tokenizer.eos_token_id  # an int; the stubs admit more
    padding: Any = tokenizer.pad_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.hidden_size * 8 // 3,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.hidden_size // 64,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=spec.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    return AutoModelForCausalLM.from_config(config)


def draw_conversations(mix: Mix, *, first_seed: int) -> Iterator[Conversation]:
    """Endless conversations of a mix; none twice."""
    for seed in itertools.count(first_seed + 1):
        yield from supervised_conversations(seed, 2000, mix=mix)


def batches(
    spec: BuildSpec, tokenizer: PreTrainedTokenizerBase, conversations: Iterator[Conversation]
) -> Iterator[list[Sample]]:
    """Batches of about `tokens_per_step` tokens, as many as the conversations fill."""
    batch: list[Sample] = []
    used = 0
    for conversation in conversations:
        sample = encode_supervised(conversation["messages"], tokenizer, tools=conversation.get("tools"))
        length = len(sample.prompt_ids) + len(sample.completion_ids)
        if batch and used + length > spec.tokens_per_step:
            yield batch
            batch, used = [], 0
        batch.append(_joined(sample))
        used += length


def _joined(sample: Sample) -> Sample:
    """The same sample without a separate prompt: nothing is shared here, and one causal row is cheaper."""
    prompt = sample.prompt_ids
    return Sample(
        prompt_ids=(), completion_ids=(*prompt, *sample.completion_ids), mask=(*(0 for _ in prompt), *sample.mask)
    )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write config, bf16 weights and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.config.dtype = "bfloat16"
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(directory, state_dict=state)
    tokenizer.save_pretrained(directory)


# ---- what it can do ----

MAX_TOKENS = 96
BARE: Style = "bare"
ROWS: tuple[tuple[str, Style], ...] = (
    *((skill, BARE) for skill in SKILLS),
    ("add", "sentence"),
    ("add", "think"),
    ("sub", "think"),
    ("add", "tags"),
)


def measure_starter(
    directory: Path, *, problems: int = 300, samples: int = 2, seed: int = 0, note: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the model in `directory` on up to `problems` held-out problems a row, `samples` completions each.

    `note` receives a line per row. Raises ModelError if there is no model.
    """
    base = load_model(str(directory))
    engine = LocalEngine(base)
    rows: list[dict[str, Any]] = []
    try:
        for skill, style in ROWS:
            asked = held_out(skill, style=style, at_most=problems)
            greedy, sampled = accuracies(
                engine, base.tokenizer, asked, is_right_reply, max_tokens=MAX_TOKENS, samples=samples, seed=seed
            )
            rows.append({"skill": skill, "style": style, "problems": len(asked), "greedy": greedy, "sampled": sampled})
            note(f"{skill} ({style}): greedy {greedy:.1%}, sampled {sampled:.1%} of {len(asked)} held-out problems")
    finally:
        engine.close()
    return {
        "parameters": sum(parameter.numel() for parameter in base.model.parameters()),
        "base_hash": base.hash,
        "context_length": base.context_length,
        "samples": samples,
        "max_tokens": MAX_TOKENS,
        "skills": rows,
    }


def held_out(skill: str, *, style: Style, at_most: int) -> list[Row]:
    """Held-out problems: `at_most` of them, or nearly all of a skill that has fewer."""
    while True:
        try:
            return prompts(skill, "test", n=at_most, style=style)
        except DataError:
            if at_most <= 1:
                raise
            at_most = at_most * 9 // 10  # what fewer ask for is a prefix of what more do


def is_right_reply(row: Row, reply: str) -> bool:
    """Return whether a reply to a held-out row is right."""
    return is_correct(row["skill"], reply, row["answer"], row["style"])


def accuracies(
    engine: LocalEngine,
    tokenizer: PreTrainedTokenizerBase,
    asked: list[Row],
    is_right: Callable[[Row, str], bool],
    *,
    max_tokens: int,
    samples: int,
    seed: int,
) -> tuple[float, float]:
    """Return the shares of right replies: one to each row at temperature 0, and `samples` at temperature 1."""
    encoded = [encode_prompt(to_prompt(row, id=str(i)), tokenizer) for i, row in enumerate(asked)]

    def share(temperature: float, n: int) -> float:
        requests = [
            SamplingRequest(
                prompt_ids=prompt.token_ids,
                params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed * 1_000_003 + i),
                n=n,
            )
            for i, prompt in enumerate(encoded)
        ]
        replies = zip(asked, engine.generate(requests), strict=True)
        right = [is_right(row, completion.text) for row, completions in replies for completion in completions]
        return sum(right) / len(right)

    return share(0.0, 1), share(1.0, samples)


REPORT = "report.json"


def write_report(directory: Path, measured: dict[str, Any]) -> Path:
    """Put the report beside the model."""
    path = directory / REPORT
    path.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return path


def read_report(directory: Path) -> dict[str, Any]:
    """The report beside the model. Raises ModelError if it is not there."""
    path = directory / REPORT
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="measure the model anew with --measure") from error


def describe(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    """The report as the rows of a table, the first its headings."""
    rows = [("skill", "style", "greedy", "sampled", "problems", "what it is")]
    for row in measured["skills"]:
        rates = (f"{row['greedy']:.1%}", f"{row['sampled']:.1%}", str(row["problems"]))
        rows.append((row["skill"], row["style"], *rates, SKILLS[row["skill"]].description))
    return rows


# ---- commands ----


@app.command()
def info(
    measure: Annotated[bool, typer.Option("--measure", help="Measure it now instead of reading the report.")] = False,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems a row, with --measure.")] = 300,
    directory: Annotated[Path | None, typer.Option("--dir", help="A model that `build` made; default: ours.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What the starter can do: its accuracy on held-out problems, skill by skill."""

    path = directory or STARTER_DIR
    report = measure_starter(path, problems=problems, note=say) if measure else read_report(path)
    if as_json:
        return print_json(report)
    print_pairs(describe(report))


@app.command()
def build(
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new directory for the model.")] = Path("starter-model"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="At most this many steps a lesson; default: the recipe's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data and the weights.")] = 0,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems a row of the report.")] = 300,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train the starter from scratch, about an hour on two CPU cores, and measure it."""
    from groupwise.store.rundir import owned

    spec = BuildSpec(seed=seed)
    if steps is not None:
        spec = replace(spec, lessons=tuple(replace(each, steps=min(steps, each.steps)) for each in spec.lessons))
    with owned(out):
        if (out / "config.json").exists():
            hint = "name another directory with --out, or remove it first"
            raise ConfigError(f"{out} holds a model already", hint=hint)
        build_starter(out, spec, report=say)
        report = measure_starter(out, problems=problems, note=say)
        write_report(out, report)
    if as_json:
        return print_json(report)
    print_pairs(describe(report))


CONVERSATIONS = 'a line is a JSON object with "messages", a list as in chat completions'


@app.command("lesson")
def give_lesson(
    conversations: Annotated[Path, typer.Argument(help="JSONL: `messages` a line, and `tools` where there are any.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new directory for the model.")],
    source: Annotated[Path, typer.Option("--from", metavar="DIR", help="The model to be taught.")] = STARTER_DIR,
    steps: Annotated[int, typer.Option(min=1, help="Of about 4,096 tokens each.")] = 700,
    learning_rate: Annotated[float, typer.Option(min=0, help="The highest: after warm-up, before its decay.")] = 1.5e-3,
    debug: Debug = False,
) -> None:
    """Give the starter a further lesson, of conversations in a file; about 0.5 s of one core a step."""
    from groupwise.store.rundir import owned

    rows = read_conversations(conversations)
    with owned(out):
        if (out / "config.json").exists():
            hint = "name another directory with --out, or remove it first"
            raise ConfigError(f"{out} holds a model already", hint=hint)
        further_lesson(source, out, rows, Lesson(steps=steps, learning_rate=learning_rate), report=say)


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations in a file of JSON lines. Raises DataError, with the line's number."""
    rows: list[Conversation] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({"messages": list(row["messages"]), "tools": row.get("tools")})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number} is not a conversation: {error!r}", hint=CONVERSATIONS) from error
    if not rows:
        raise DataError(f"{path} has no conversations", hint=CONVERSATIONS)
    return rows


if __name__ == "__main__":
    app()
