"""docs/python.md, made of the docstrings and signatures of what `groupwise` makes public, and of the examples below.

    python docs/generate_python.py    write docs/python.md

The page is in the repository, as it is read on GitHub too, where a plugin of the site's would show nothing.
tests/test_docs_python.py runs the examples, and checks that each public name stands in one.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import groupwise
from groupwise import RunConfig

TARGET = Path(__file__).parent / "python.md"

HEAD = """# Python

Made by `python docs/generate_python.py` from the package's own docstrings; do not edit. These are all the public names
([what is stable](stability.md)): `import groupwise` is quick, and a name brings torch along only when it is used.
Letters in brackets are shapes; log-probabilities are in nats. Every error is a [`GroupwiseError`](#groupwiseerror)
with `code`, `field`, `kind` and a `hint`.

"""

RUNS = """from pathlib import Path

from groupwise import RewardFunction, RunConfig, RunResult, dump_resolved, load_config, parse_config, run_loop

Path("prompts.jsonl").write_text('{"prompt": "What is 3 + 4? Reply with just the number.", "answer": "7"}\\n' * 4)


def exact(completions, answer, **columns):
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]


config: RunConfig = parse_config(
    {
        "model": "starter",
        "data": {"source": "prompts.jsonl"},
        "rewards": ["groupwise.rewards.text:exact_match"],
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 2, "learning_rate": 2.0e-3},
        "scoring": {"workers": 0},
    }
)
Path("my_run.yaml").write_text(dump_resolved(config))
config = load_config("my_run.yaml", ["train.steps=1", "eval=null"])
mine = RewardFunction(name="exact", function=exact, args={})
result: RunResult = run_loop(config, rewards=[mine])
print(result.run_dir, result.version, result.trained)
"""

FROM_TRL = """from groupwise import from_trl

args = {"output_dir": "out", "num_generations": 4, "max_completion_length": 8, "max_steps": 1, "learning_rate": 1e-3}
rows = [{"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}] * 8
config = from_trl(args, model="starter", rewards="groupwise.rewards.text:exact_match", data=rows)
print(config.rollout.group_size, config.train.steps)
"""

PARTS = """from groupwise import (
    AdapterStore,
    Completion,
    FinishReason,
    Grammar,
    Learner,
    LoadedModel,
    LocalEngine,
    LossSpec,
    Message,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    SamplingParams,
    SamplingRequest,
    Turn,
    compute_advantages,
    load_model,
    resolve_loss,
)
from groupwise.store.files import Provenance

base: LoadedModel = load_model("starter")
question: Message = {"role": "user", "content": "What is 3 + 4? Reply with just the number."}
prompt = Prompt(id="0", messages=(question,), columns={"answer": "7"})
ids = tuple(base.tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False))

engine = LocalEngine(base)
params = SamplingParams(max_tokens=4, seed=0, grammar=Grammar.regex("[0-9]{1,2}"))
request = SamplingRequest(prompt_ids=ids, params=params, n=8, version=PolicyVersion.base())
completions: list[Completion] = engine.generate([request])[0]
rewards = [float(each.text.strip() == "7") for each in completions]
ended = [each.finish_reason is FinishReason.STOP for each in completions]
rollouts = tuple(
    Rollout(turns=(Turn(ids, completion),), reward=reward, rewards={"exact": reward})
    for completion, reward in zip(completions, rewards, strict=True)
)
group = RolloutGroup(prompt=prompt, rollouts=rollouts)

learner = Learner(base)
samples = [
    Sample(
        prompt_ids=ids,
        completion_ids=each.turns[0].completion.token_ids,
        mask=(1,) * len(each.turns[0].completion.token_ids),
        advantage=advantage,
        behaviour_logprobs=each.turns[0].completion.behaviour_logprobs,
        kept=each.turns[0].completion.kept,
    )
    for each, advantage in zip(group.rollouts, compute_advantages(rewards), strict=True)
]
loss: LossSpec = resolve_loss("dapo")
learner.forward_backward(samples, loss)
learner.optim_step(learning_rate=2e-3)

store = AdapterStore("adapters")
made_of = Provenance(base_model=base.name, base_hash=base.hash, step=1)
version = store.publish("sums", learner.save_adapter, info=made_of)
store.activate(version)
print(version, store.active)
engine.close()
"""

LOOP = """import asyncio

from groupwise import (
    AdamParams,
    Datum,
    DeployConfig,
    DeploymentSampler,
    Infra,
    InfraConfig,
    LoopConfig,
    SampledCompletion,
    TrainingClient,
    TrainingService,
    WeightSyncConfig,
    WeightSyncScope,
    build_grpo_datums,
    compute_advantages,
    grpo_loss,
    make_grpo_loss_fn,
    setup_infra,
)

config = LoopConfig(
    log_path="mine",
    base_model="starter",
    infra=InfraConfig(training_shape_id="cpu-small"),
    deployment=DeployConfig(tokenizer_model="starter", weight_sync_scope=WeightSyncScope.PER_TRAINER),
    weight_sync=WeightSyncConfig(weight_sync_interval=1),
)


async def step(infra: Infra) -> None:
    sampler: DeploymentSampler | None = infra.sampler
    policy: TrainingClient = infra.policy
    service: TrainingService = infra.service  # makes further policies over the same base
    assert sampler is not None and service is policy.service
    question = [{"role": "user", "content": "What is 47 + 38? Think step by step."}]
    sampled: list[SampledCompletion] = await sampler.sample_with_tokens(question, n=8, max_tokens=40, seed=0)
    advantages = compute_advantages([float("85" in each.text) for each in sampled])
    datums: list[Datum] = build_grpo_datums(
        [each.datum() for each in sampled],
        advantages,
        inf_logprobs=[each.inference_logprobs for each in sampled],
        prompt_lens=[each.prompt_len for each in sampled],
    )
    await policy.forward_backward(datums, grpo_loss(kl_beta=0))
    await policy.optim_step(AdamParams(learning_rate=3e-3))

    # the same loss as a function of log-probabilities, to be changed
    logprobs = [each.inference_logprobs for each in sampled]
    loss_fn = make_grpo_loss_fn(advantages, None, [each.prompt_len for each in sampled], logprobs, kl_beta=0)
    await policy.forward_backward_custom([each.datum() for each in sampled], loss_fn)
    await policy.optim_step(AdamParams(learning_rate=3e-3))
    await infra.weights.after_step(1)


with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
    asyncio.run(step(infra))
"""

CLIENT = """import asyncio

from groupwise import AsyncClient, Client, GroupwiseError, JobFailedError, RemoteError

with Client() as client:  # of `groupwise serve`
    (group,) = client.sample(["What is 47 + 38? Think step by step."], n=8, max_tokens=40)
    rewards = [float("85" in text) for text in group.texts]
    try:
        job = client.train_grpo([group.scored(rewards)], output_name="sums", learning_rate=1.5e-3)
        print(client.wait(job.job_id).adapter_version)
    except JobFailedError as failed:  # also a job that was cancelled
        print(failed.code, failed.hint)
    except RemoteError as refused:  # equal rewards, say: `no_signal`
        print(refused.code, refused.field, refused.hint)
    except GroupwiseError as other:  # every other one: the server is away, ...
        print(other)


async def ask() -> str:
    async with AsyncClient() as client:
        return (await client.chat("What is 1 + 1?", max_tokens=8)).text


print(asyncio.run(ask()))
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page: names that belong together, and an example in which each of them stands."""

    title: str
    about: str
    example: str
    names: str


SECTIONS = (
    Section(
        "A run",
        "What `groupwise run` does, from a program.",
        RUNS,
        "run_loop RunResult load_config parse_config RunConfig dump_resolved RewardFunction",
    ),
    Section("A run of TRL's", "A script for `GRPOTrainer` as a run.", FROM_TRL, "from_trl"),
    Section(
        "The client of a server",
        "Sample, score and train over HTTP ([the live server](server.md)), and catch what can go wrong.",
        CLIENT,
        "Client AsyncClient GroupwiseError RemoteError JobFailedError",
    ),
    Section(
        "A loop of your own",
        "Four verbs over this machine's learner and engine ([the SDK](sdk.md)).",
        LOOP,
        """setup_infra Infra LoopConfig InfraConfig DeployConfig WeightSyncConfig WeightSyncScope DeploymentSampler
        SampledCompletion TrainingClient TrainingService AdamParams Datum build_grpo_datums compute_advantages grpo_loss
        make_grpo_loss_fn""",
    ),
    Section(
        "The parts, and the words they speak",
        "Engine, learner and store by themselves, and the types that everything hands on.",
        PARTS,
        """load_model LoadedModel LocalEngine Learner AdapterStore resolve_loss LossSpec Prompt Message SamplingParams
        SamplingRequest Grammar Completion FinishReason Turn Rollout RolloutGroup Sample PolicyVersion""",
    ),
)
NAMES_OF_SECTIONS = ("Args", "Raises", "Returns")


def page() -> str:
    """Return the whole reference as Markdown."""
    return HEAD + "\n".join("".join(_section(section)) for section in SECTIONS)


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n\n{section.about}\n\n```python\n{section.example}```\n"
    for name in section.names.split():
        yield f"\n### `{name}`\n\n"
        yield from _entry(name, getattr(groupwise, name))


def _entry(name: str, public: Any) -> Iterator[str]:
    made = inspect.isclass(public)
    if not made or not issubclass(public, enum.Enum | dict | RunConfig):
        yield f"```text\n{_signature(name, public)}\n```\n\n"
    yield _markdown(inspect.getdoc(public) or "")
    if made and not issubclass(public, enum.Enum | dict | RunConfig):
        yield from _methods(public)


def _signature(name: str, public: Any) -> str:
    """One line where it fits, else a parameter a line."""
    signature = inspect.signature(public)
    shown, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown, starred = [*shown, "*"], True
        stars = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        shown.append(f"{stars}{parameter.name}{kind}{_default(parameter)}")
    gives = signature.return_annotation
    behind = "" if gives in (signature.empty, None, "None") else f" -> {_type(gives)}"
    line = f"{name}({', '.join(shown)}){behind}"
    return line if len(line) < 110 else f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){behind}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.replace('"', "'")


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    shown = repr(parameter.default)
    if isinstance(parameter.default, enum.Enum):
        shown = f"{type(parameter.default).__name__}.{parameter.default.name}"
    return f" = {shown}" if len(shown) < 40 and "<" not in shown else " = ..."


def _markdown(docstring: str) -> str:
    """A docstring's paragraphs; `Args:` and `Raises:` as lists, sessions and drawings as blocks."""
    parts, lines = [], docstring.splitlines()
    while lines:
        line = lines.pop(0)
        if line.rstrip(":") in NAMES_OF_SECTIONS and line.endswith(":"):
            block = _indented(lines)
            items = re.split(r"\n(?=\S)", textwrap.dedent("\n".join(block)).strip("\n"))
            parts.append(f"**{line}**\n\n" + "".join(f"- {_item(item)}\n" for item in items))
        elif line.startswith(">>>"):
            session = [line]
            while lines and lines[0].strip():
                session.append(lines.pop(0))
            parts.append("```pycon\n" + "\n".join(session) + "\n```\n")
        elif line.startswith("    ") and line.strip():
            drawing = textwrap.dedent("\n".join([line, *_indented(lines)])).rstrip()
            parts.append(f"```text\n{drawing}\n```\n")
        elif line.strip():
            paragraph = [line]
            while lines and lines[0].strip() and not lines[0].startswith((" ", ">>>")):
                paragraph.append(lines.pop(0))
            parts.append("\n".join(paragraph) + "\n")
    return "\n".join(parts)


def _indented(lines: list[str]) -> list[str]:
    """Take the indented lines, and blank ones between them, off the front."""
    taken = []
    while lines and (not lines[0].strip() or lines[0].startswith("    ")):
        taken.append(lines.pop(0))
    return taken


def _item(item: str) -> str:
    name, _, about = " ".join(item.split()).partition(": ")
    return f"`{name}`: {about}" if about else name


def _methods(public: type) -> Iterator[str]:
    """What can be asked of it, by the first sentences of the docstrings."""
    rows = []
    for name in dict.fromkeys(
        key for each in public.__mro__[:-1] if each.__module__.startswith("groupwise") for key in vars(each)
    ):
        member = inspect.getattr_static(public, name)
        is_method = isinstance(member, classmethod | staticmethod | property) or inspect.isfunction(member)
        about = inspect.getdoc(getattr(public, name))
        if name.startswith("_") or not is_method or not about or dataclasses.is_dataclass(member):
            continue
        called = f"`.{name}`" if isinstance(member, property) else f"`.{name}{_parameters(getattr(public, name))}`"
        rows.append(f"- {called}: {' '.join(about.partition(chr(10) * 2)[0].split())}\n")
    if rows:
        yield "\n" + "".join(rows)


def _parameters(method: Any) -> str:
    names = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    return f"({', '.join(('**' if p.kind is p.VAR_KEYWORD else '') + p.name for p in names)})"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
