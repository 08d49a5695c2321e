"""`groupwise check`: everything that a run needs, loaded and tried, and nothing of it kept.

The rewards see a few completions of the untrained policy, which is what they will see in the first step; whatever is
suspicious about them, the data or the memory comes back as a warning. On these completions one step is trained,
published in a temporary folder, loaded by the engine and sampled with, as a run does it after each step.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from groupwise.algo.algorithm import with_token_weights
from groupwise.algo.credit import with_advantages
from groupwise.algo.distillation import (
    demonstration_metrics,
    demonstrations,
    teacher_scores,
    with_reward_weight,
    with_teacher,
)
from groupwise.algo.distillation_metrics import teacher_metrics
from groupwise.algo.kl import logprob_drop
from groupwise.algo.preference import pairs_of
from groupwise.algo.samples import samples_of
from groupwise.config.run import RunConfig
from groupwise.config.stages import stage_names
from groupwise.errors import ConfigError, ContextLengthError, GroupwiseError
from groupwise.model.chat import template_thinks
from groupwise.model.load import load_config, load_tokenizer
from groupwise.model.memory import Memory, StepSize, memory, step_size
from groupwise.model.packed_check import PLAIN_COST, Ways, ways_of
from groupwise.model.reply_formats.known import format_of, shown_format
from groupwise.pictures import text_of
from groupwise.platform import run_coroutine
from groupwise.rewards.base import refuse_failed, summarize
from groupwise.rewards.check import PAID
from groupwise.rewards.probes import COMPARED_LENGTH, GOLD, ProbePrompt, answers, junk
from groupwise.run.assemble import Components, open_components
from groupwise.run.memory_budget import device_memory, load_of, longest_allowed, within_context
from groupwise.run.plan import RunPlan, plan_or_all_problems
from groupwise.run.policy import Policy
from groupwise.run.teacher import taught
from groupwise.run.thoughts import ThoughtCost, thought_cost
from groupwise.run.update import learner_thread
from groupwise.store.adapters import AdapterStore
from groupwise.tasks.answers import AnswerRollouts
from groupwise.tasks.rollout_sources import group_of, play_all
from groupwise.tasks.template_check import TemplateCheck, template_check
from groupwise.train.learner import Learner
from groupwise.train.preference_step import train_on_pairs
from groupwise.types import (
    Completion,
    FinishReason,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    SamplingParams,
    SamplingRequest,
)

PROMPTS, COMPLETIONS = 4, 4  # how many are tried
DESTROYED = 0.5  # nats a token, as `policy.destroyed` of `groupwise health` has it
MEASURED_PROMPTS = 1000  # how many are tokenised for the statistics
TRUNCATED = 0.3  # share of cut completions from which there is a warning


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Results of `groupwise check`. `groups` are the scored trial completions; lengths are in tokens."""

    plan: RunPlan
    parameters: int
    trained: int
    device: str
    dtype: str
    quantization: str | None
    longest_prompt: int
    micro_tokens: int
    groups: tuple[RolloutGroup, ...]
    step: StepSize
    memory: Memory
    available: int
    trained_step: StepTrial
    pace: StepPace
    template: TemplateCheck | None  # with an environment: whether episodes can be trained as one sequence
    family: ModelRow | None
    thoughts: ThoughtCost | None  # None where nothing thinks
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """The row of docs/models.md for a run's model, found on a small random model of the same configuration.

    `tool_calls` is the format that the chat template shows, None if none that is read here; `thinks` is what begins a
    thought, None where nothing does.
    """

    ways: Ways
    tool_calls: str | None
    thinks: str | None

    @classmethod
    def of(cls, config: RunConfig) -> ModelRow | None:
        """Return that of a run's model and chat template; None where transformers cannot make a small model of this
        configuration: it is known once it is loaded.

        Raises:
            ModelError: configuration or tokenizer cannot be read, or the model can be neither trained nor sampled.
        """
        shape = load_config(config.model)
        tokenizer = load_tokenizer(config.model, chat=config.chat, folder=config.folder)
        try:
            ways = ways_of(shape)
        except GroupwiseError:
            raise
        except Exception:  # of an architecture that is not made of what its configuration says, as others are
            return None
        form = shown_format(tokenizer)
        return cls(
            ways=ways,
            tool_calls=None if form is None else form.name,
            thinks=format_of(tokenizer).thought.start if template_thinks(tokenizer) else None,
        )

    def __str__(self) -> str:
        calls = "no tool calls that are read here" if self.tool_calls is None else f"{self.tool_calls} tool calls"
        thoughts = f", {self.thinks} thoughts" if self.thinks else ""
        return f"{self.ways}; adapts {', '.join(self.ways.adapted) or 'nothing'}; {calls}{thoughts}"


@dataclass(frozen=True, kw_only=True)
class StepTrial:
    """The step that was tried. `grad_norm` is None where no completion could be trained on; `teacher` are the metrics
    of the run's teacher on the trial completions, empty without one."""

    version: str
    grad_norm: float | None
    made_up: bool  # all groups had equal rewards, so advantages of 1 and -1 were taken
    seconds: float  # of training, without publishing
    teacher: Mapping[str, float]
    logprob_drop: float  # nats a token by which what was sampled is less likely after it


@dataclass(frozen=True, kw_only=True)
class StepPace:
    """Seconds of a step, extrapolated from the trial's few completions. `sampling` is a range: as long as the trial's
    if more rows decode in the same time (a GPU that is not full), and in proportion to the rows if they do not (a CPU).
    Scoring, publishing and evaluations are not in it."""

    sampling: tuple[float, float]
    training: float

    @classmethod
    def of(cls, config: RunConfig, step: StepSize, *, sampled_s: float, trained_s: float, tokens: float) -> StepPace:
        """Make it of a step, from the seconds in which the trial's completions were sampled and its `tokens`
        trained."""
        high = sampled_s * step.completions / (PROMPTS * COMPLETIONS)
        training = trained_s * step.tokens / tokens * config.train.passes if tokens else 0.0
        return cls(sampling=(min(high, sampled_s * step.decode_waves), high), training=training)

    def of_run(self, config: RunConfig) -> tuple[float, float]:
        """Return seconds of the run, at least and at most."""
        low, high = (config.train.steps * (each + self.training) for each in self.sampling)
        return low, high


def check(
    config: RunConfig,
    *,
    plan: RunPlan | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    on_family: Callable[[ModelRow], None] = lambda row: None,
) -> CheckReport:
    """Try out a run; `plan` is its plan, if that was made already (`plan_or_all_problems`). `on_family` is told how the
    model will run, before it is loaded.

    Raises:
        ConfigError: rewards, data and loss have problems (all of them are named), or what `open_components` raises.
        RewardError: no completion could be scored.
    """
    plan = plan or plan_or_all_problems(config)
    on_phase("trying the model's configuration")
    family = ModelRow.of(config)
    if family is not None:
        on_family(family)
    with open_components(plan, on_phase=on_phase, say=on_phase) as parts:
        on_phase("reading the prompts")
        encoded = [parts.play.prepare(prompt) for prompt in plan.source.known[:MEASURED_PROMPTS]]
        longest = longest_allowed(config, context=parts.base.context_length)
        usable = [prompt for prompt in encoded if len(prompt.token_ids) <= longest]
        if not usable:
            raise ConfigError(
                f"all of the first {len(encoded)} prompts {_too_long(config, context=parts.base.context_length)}",
                hint="shorten the prompts, raise rollout.max_prompt_tokens, or use a model with a longer context",
            )
        usable, longer = _answerable(usable, parts)
        on_phase("sampling and scoring")
        groups, sampled_s = run_coroutine(_try_out(usable[:PROMPTS], plan, parts))
        asked = plan.env is None and bool(plan.rewards) and not config.supervised
        recognised = run_coroutine(_try_answers(groups, parts)) if asked else None
        paid = run_coroutine(_try_junk(groups, plan, parts)) if asked else None
        on_phase("training, publishing and loading one step")
        with learner_thread(parts.learner.threads) as thread:
            tried = _try_step(plan, parts, groups, thread)
        report = _report(plan, parts, encoded, usable, groups, tried, family, sampled_s)
        found = tuple(filter(None, (longer, recognised, paid)))
        return replace(report, warnings=(*found, *report.warnings)) if found else report


def _answerable(prompts: Sequence[Prompt], parts: Components) -> tuple[list[Prompt], str | None]:
    """Return the prompts that are short enough together with the answers to be learned, and what to say of the others.
    Raises ConfigError where none is."""
    if not isinstance(parts.rollouts, AnswerRollouts):
        return list(prompts), None
    usable, refused = list[Prompt](), list[ContextLengthError]()
    with warnings.catch_warnings(action="ignore"):  # all of them are told of below
        for prompt in prompts:
            try:
                usable.append(parts.rollouts.prepare(prompt))
            except ContextLengthError as error:
                refused.append(error)
    if not refused:
        return usable, None
    said = (
        f"{len(refused)} of the first {len(prompts)} examples are longer than the context, such as {refused[0].message}"
    )
    if not usable:
        raise ConfigError(said, hint="shorten them, or use a model with a longer context", field="data")
    return usable, f"{said}; they will be passed over"


def _try_step(plan: RunPlan, parts: Components, groups: Sequence[RolloutGroup], thread: Executor) -> StepTrial:
    """Train on the groups, publish, load, and sample with what came of it."""
    config, rollout = plan.config, plan.config.rollout
    teacher = config.teacher
    weighed = with_advantages(groups, plan.config.algo, weights=plan.reward_weights, algorithm=plan.algorithm)
    weighed = weighed if teacher is None else with_reward_weight(weighed, teacher.reward_weight)
    made_up = not any(any(sample.weights or (sample.advantage,)) for sample in samples_of(weighed))
    made_up = made_up and not any(rollout.teacher for group in weighed for rollout in group.rollouts)
    shown = demonstrations(weighed)
    made_up = made_up and not shown
    if made_up:
        weighed = [
            replace(group, rollouts=tuple(map(_made_up, range(COMPLETIONS), group.rollouts))) for group in groups
        ]
    samples = samples_of(weighed, mask_truncated=config.algo.mask_truncated and not made_up)
    if plan.algorithm is not None:
        samples = with_token_weights(samples, weighed, plan.algorithm)
    samples = [] if config.learns_no_rewards else samples
    told = {} if teacher is None else teacher_metrics(samples, teacher_scores(weighed) if samples else [])
    told |= demonstration_metrics(shown) if shown and config.kind != "dpo" else {}
    samples = with_teacher(samples, weighed, teacher)
    metrics, seconds, drop = dict[str, float](), 0.0, 0.0
    if pairs := pairs_of(shown) if config.kind == "dpo" else []:
        whole = partial(train_on_pairs, parts.learner, config=config.dpo)
        thread.submit(whole, pairs[:1], learning_rate=0.0).result()  # what is done once only is not timed
        began = time.perf_counter()
        metrics = thread.submit(whole, pairs, learning_rate=config.train.learning_rate).result()
        seconds = time.perf_counter() - began
    elif trained := next((sample for sample in (*samples, *shown) if any(sample.mask)), None):
        step = partial(parts.learner.step, spec=plan.loss, temperature=rollout.temperature)
        first = partial(step, samples[:0], demonstrations=[trained]) if trained in shown else partial(step, [trained])
        thread.submit(first, learning_rate=0.0).result()  # what is done once only is not timed
        began = time.perf_counter()
        whole = partial(step, demonstrations=shown, coefficient=1.0 if teacher is None else teacher.coefficient)
        metrics = thread.submit(whole, samples, learning_rate=config.train.learning_rate).result()
        seconds = time.perf_counter() - began
        if samples:
            drop = thread.submit(_drop, parts.learner, samples, rollout.temperature).result()
    with TemporaryDirectory(prefix="groupwise-check-", dir=_shared(config)) as folder:
        policy = Policy(
            parts.learner,
            AdapterStore(folder),
            parts.engine,
            name=config.name,
            base=parts.base,
            keep=1,
            config_hash=plan.config_hash,
        )
        version = policy.publish(step=1, metrics={}, sync=True)
        params = replace(rollout.sampling(), max_tokens=1)
        run_coroutine(_sampled(parts, groups[0], version, params))
    return StepTrial(
        version=str(version),
        grad_norm=metrics.get("optim/grad_norm"),
        made_up=made_up,
        seconds=seconds,
        teacher=told,
        logprob_drop=drop,
    )


def _drop(learner: Learner, samples: Sequence[Sample], temperature: float) -> float:
    """Return the nats per token by which the samples are less likely now than when they were sampled."""
    return logprob_drop(
        samples,
        [sample.behaviour_logprobs or () for sample in samples],
        learner.forward(samples, temperature=temperature),
    )


def _made_up(number: int, rollout: Rollout) -> Rollout:
    return replace(rollout, advantage=1.0 if number % 2 == 0 else -1.0)


def _shared(config: RunConfig) -> str | None:
    """Return where versions are written: a run's folder for vLLM, which may see no other, else any temporary one."""
    if config.engine == "local":
        return None
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    return config.output_dir


async def _sampled(parts: Components, group: RolloutGroup, version: PolicyVersion, params: SamplingParams) -> None:
    """Sample one token behind what the policy was first asked."""
    asked = next((turn.prompt_ids for rollout in group.rollouts for turn in rollout.turns), None)
    if asked is not None:
        await parts.engine.sample([SamplingRequest(prompt_ids=asked, params=params, version=version)])


def _too_long(config: RunConfig, *, context: int) -> str:
    limit = config.rollout.max_prompt_tokens
    if limit is not None and limit < context:
        return f"have more than rollout.max_prompt_tokens = {limit} tokens"
    return f"fill the context of {context} tokens"


async def _try_out(
    prompts: Sequence[Prompt], plan: RunPlan, parts: Components
) -> tuple[tuple[RolloutGroup, ...], float]:
    """Sample and score trial groups; return them, and the seconds that this took without the first start."""
    first = replace(plan.config.rollout.sampling(), max_tokens=1)
    if plan.env is None:
        await play_all(parts.rollouts, prompts[:1], seeds=[0], n=1, params=first, version=PolicyVersion.base())
    began = time.perf_counter()
    groups = await play_all(
        parts.rollouts,
        prompts,
        seeds=[plan.config.seed + i for i in range(len(prompts))],
        n=COMPLETIONS,
        params=plan.config.rollout.sampling(),
        version=PolicyVersion.base(),
    )
    seconds = time.perf_counter() - began
    score = taught(parts.scorer, parts.teacher, plan.config)
    scored = await asyncio.gather(*(score(group) for group in groups))
    refuse_failed(scored)
    return tuple(scored), seconds


def _is_given(value: object) -> bool:
    """Return whether a column has an answer; a numpy array, of which equality is one array more, is asked for its
    length."""
    return value is not None and (len(value) > 0 if isinstance(value, Sized) else True)


async def _try_answers(groups: Sequence[RolloutGroup], parts: Components) -> str | None:
    """Return what the dataset's own answer gets, in the forms that answers come in, where all completions have one
    reward."""
    prompt, rewards = groups[0].prompt, {rollout.reward for group in groups for rollout in group.rollouts}
    column = next((name for name in GOLD if _is_given(prompt.columns.get(name))), None)
    if len(rewards) != 1 or column is None:
        return None
    forms, all_have = answers(prompt.columns[column]), rewards.pop() or 0.0
    given = {name: reward or 0.0 for name, reward in (await _scored(prompt, forms, parts)).items()}
    best = max(given, key=lambda name: given[name])
    answer = prompt.columns[column]
    of = f"the dataset's own {column} of {prompt.id}, {answer!r:.80},"
    if given[best] > all_have:
        return f"{of} gets {given[best]:g} ({best}): the reward recognises it, and the model does not say it yet"
    kind = "" if isinstance(answer, str) else f"; it is no text but {_a(answer)}: compare with str({column})"
    return (
        f"{of} gets no more than {all_have:g} in any of {len(forms)} forms ({', '.join(forms)}): the rewards do not "
        f"recognise a right answer{kind}; groupwise rewards lint tries one by itself"
    )


async def _try_junk(groups: Sequence[RolloutGroup], plan: RunPlan, parts: Components) -> str | None:
    """Return the first case in which the run's rewards together pay for junk as for an answer. The reward of an answer
    is measured with the trial prompts' expected answers; another prompt's answer serves as the wrong one.

    Runs with async rewards, such as judges, are not tried, because each call may cost money.
    """
    column = next((name for name in GOLD if all(_is_given(group.prompt.columns.get(name)) for group in groups)), None)
    if column is None or any(function.is_async for function in plan.rewards):
        return None
    for group in groups:
        prompt, gold = group.prompt, group.prompt.columns[column]
        wrong = next((other for each in groups if str(other := each.prompt.columns[column]) != str(gold)), None)
        if wrong is None:
            continue
        question = prompt.text or text_of((prompt.messages or ({},))[-1].get("content"))
        row = ProbePrompt(prompt=question, gold=gold, wrong=wrong)
        tried = {name: text for name, text in junk(row).items() if len(text) <= COMPARED_LENGTH}
        right, mistaken, paid = [
            await _scored(prompt, texts, parts) for texts in (answers(gold), answers(wrong), tried)
        ]
        top, low = (
            max((value for value in each.values() if value is not None), default=0.0) for each in (right, mistaken)
        )
        name, most = max(paid.items(), key=lambda pair: -math.inf if pair[1] is None else pair[1])
        if top > low and most is not None and most >= low + PAID * (top - low):
            return (
                f"what is no answer is paid like one: {name!r} ({tried[name]!r:.70}) gets {most:g} for {prompt.id}, "
                f"where a right answer gets {top:g} and a wrong one {low:g}; a policy will find it. groupwise rewards "
                "lint tries each reward, and eval.rewards can count by another one"
            )
    return None


async def _scored(prompt: Prompt, texts: Mapping[str, str], parts: Components) -> dict[str, float | None]:
    """Return what the run's rewards give to completions by name."""
    said = [
        Completion(token_ids=(), logprobs=(), text=text, finish_reason=FinishReason.STOP) for text in texts.values()
    ]
    group = await parts.scorer(group_of(prompt, said))
    return {name: rollout.reward for name, rollout in zip(texts, group.rollouts, strict=True)}


def _a(value: object) -> str:
    """Return the kind of a value with its article, as "an int64"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _report(
    plan: RunPlan,
    parts: Components,
    encoded: Sequence[Prompt],
    usable: Sequence[Prompt],
    groups: tuple[RolloutGroup, ...],
    tried: StepTrial,
    family: ModelRow | None,
    sampled_s: float,
) -> CheckReport:
    config, model = plan.config, parts.base.model
    asked = usable if plan.env is None else [group.prompt for group in groups]  # an environment asks when it is played
    lengths = [len(prompt.token_ids) for prompt in asked]
    said = [rollout for group in groups for rollout in (*group.rollouts, *group.demonstrations)]
    completions = [_answer_length(rollout) for rollout in said]
    step = step_size(
        config,
        prompt_tokens=sum(lengths) / len(lengths),
        completion_tokens=sum(completions) / len(completions),
        rows=plan.rows,
        micro_tokens=parts.learner.micro_tokens,
        packed=parts.learner.packed,
    )
    tried_tokens = sum(len(group.prompt.token_ids) for group in groups) + sum(completions)
    pace = StepPace.of(config, step, sampled_s=sampled_s, trained_s=tried.seconds, tokens=tried_tokens)
    config = within_context(config, context=parts.base.context_length)
    load = parts.load or load_of(
        config,
        parts.base,
        parts.learner,
        longest_prompt=max(lengths),
        reads_reference=plan.reads_reference,
        teacher=parts.teacher,
        engine=parts.engine,
    )
    needed = memory(config, load, micro_tokens=parts.learner.micro_tokens)
    available = device_memory(parts.learner.device)
    thoughts = thought_cost(groups, parts.base.tokenizer)
    thinking = None if thoughts is None else thoughts.warning(config.rollout, parts.base.tokenizer)
    context = parts.base.context_length
    warnings = [
        *filter(None, (thinking,)),
        *_of_the_rate(config, tried),
        *_of_rewards(groups, explained=thinking is not None, stages=stage_names(config)),
        *_of_data(plan, encoded, context=context),
        *_of_batch(config),
        *plan.warnings,
    ]
    if not parts.learner.packed:
        warnings.append(f"{type(model).__name__} cannot be trained packed; padded rows are {PLAIN_COST}")
    if parts.learner.why_not_flex is not None:
        warnings.append(
            f"train.attention is {config.train.attention}, and merged is used: {parts.learner.why_not_flex}"
        )
    if needed.total > available:
        warnings.append(
            f"the estimate of {needed.total / 2**30:.1f} GiB is more than the {available / 2**30:.1f} GiB of memory; "
            f"set train.memory_gb to what there is, or train.gradient_checkpointing; or lower {_sampling(config)}"
            "train.micro_tokens or rollout.max_tokens"
        )
    return CheckReport(
        plan=plan,
        parameters=load.model.parameters,
        trained=load.trained,
        device=str(parts.learner.device),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=parts.base.quantization,
        longest_prompt=max(lengths),
        micro_tokens=parts.learner.micro_tokens,
        groups=groups,
        step=step,
        memory=needed,
        available=available,
        trained_step=tried,
        pace=pace,
        template=None if plan.env is None else template_check(parts.base.tokenizer),
        family=family,
        thoughts=thoughts,
        warnings=tuple(warnings),
    )


def _sampling(config: RunConfig) -> str:
    """Return the key that says how much memory sampling takes here, if there is one."""
    if config.engine == "local":
        return "rollout.batch_rows, "
    return "vllm.gpu_memory_utilization, " if config.vllm.mode == "colocate" else ""


def _answer_length(rollout: Rollout) -> int:
    """Return tokens behind the prompt, at the longest: of an episode also what was said between its turns."""
    longest = max((len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in rollout.turns), default=0)
    return longest - len(rollout.turns[0].prompt_ids) if rollout.turns else 0


def _of_the_rate(config: RunConfig, tried: StepTrial) -> list[str]:
    """Return what is suspicious about the step that was tried."""
    if tried.logprob_drop < DESTROYED:
        return []
    rate = config.train.learning_rate
    return [
        f"one step at train.learning_rate {rate:g} makes what was sampled {tried.logprob_drop:.2g} nats a token less "
        f"likely: the policy will not survive a few of them; lower it, to {rate * 0.03:.1g} say"
    ]


def _of_rewards(groups: Sequence[RolloutGroup], *, explained: bool, stages: Sequence[str]) -> Iterator[str]:
    """Yield what is suspicious about the trial completions and their rewards; `explained` is said already why they are
    cut. `stages` come before the run: what is tried is the policy that they begin with."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    count = len(rollouts)
    rewards = {rollout.reward for rollout in rollouts if rollout.reward is not None}
    if any(rollout.teacher for rollout in rollouts) or any(group.demonstrations for group in groups):
        pass  # whatever the rewards are, the teacher has something to say
    elif len(rewards) == 1:
        only = rewards.pop()
        said = f"all {count} trial completions have the reward {only:g}: a group of equal rewards teaches nothing"
        untaught = "; where the model cannot do the task at all, show it examples first (stages, kind: sft)"
        look = "look at the completions, and see whether the reward can tell good from bad" + untaught * (only == 0)
        before = f"they are of the policy that the stages ({', '.join(stages)}) begin with"
        yield f"{said}; {before if stages else look}"
    elif all(len({rollout.reward for rollout in group.rollouts}) == 1 for group in groups):
        yield f"in each of the {len(groups)} trial groups the rewards are equal; such groups teach nothing"
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.rewards):
        values = {rollout.rewards.get(name) for rollout in rollouts} - {None}
        if len(values) == 1 and len(rewards) > 1:
            yield f"reward {name!r} is {values.pop():g} for everything it scored"
        elif not values:
            yield f"reward {name!r} scored none of the {count} trial completions"
    report = summarize(groups)
    if report.failed:
        yield f"{report.failed} of {count} trial completions could not be scored; the first cause: {report.first_cause}"
    cut = sum(any(t.completion.finish_reason is FinishReason.LENGTH for t in rollout.turns) for rollout in rollouts)
    if cut > count * TRUNCATED and not explained:
        yield f"{cut} of {count} trial completions were cut at their longest; raise rollout.max_tokens"


def _of_batch(config: RunConfig) -> Iterator[str]:
    """Yield what is suspicious about the sizes."""
    prompts, minibatches = config.rollout.prompts_per_step, config.train.minibatches
    if prompts == minibatches:
        yield (
            "every optimizer step sees the completions of one prompt, and its gradient is as noisy as that; raise "
            "rollout.prompts_per_step (accumulation, or the micro-batch), or lower train.minibatches"
        )


def _of_data(plan: RunPlan, encoded: Sequence[Prompt], *, context: int) -> Iterator[str]:
    """Yield what is suspicious about the prompts."""
    longest = longest_allowed(plan.config, context=context)
    too_long = sum(len(prompt.token_ids) > longest for prompt in encoded)
    if too_long:
        why = _too_long(plan.config, context=context)
        yield f"{too_long} of {len(encoded)} prompts {why} and will be passed over"
    max_tokens = plan.config.rollout.max_tokens
    short = sum(len(prompt.token_ids) + max_tokens > context for prompt in encoded) - too_long
    if short and not plan.config.supervised:
        yield (
            f"{short} of {len(encoded)} prompts leave less than rollout.max_tokens = {max_tokens} of the context of "
            f"{context} tokens; their completions will be cut sooner"
        )
    asked = {_question(prompt) for prompt in plan.source.known}
    held_out = plan.eval_prompts or plan.eval_answers
    if both := sum(_question(prompt) in asked for prompt in held_out):
        yield f"{both} of {len(held_out)} evaluation prompts are also training prompts: they are not held out"
    if plan.config.kind == "dpo" and (same := sum(each.answer == each.rejected for each in plan.source.known)):
        yield f"in {same} of {len(plan.source.known)} pairs both completions are the same: they teach nothing"


def _question(prompt: Prompt) -> str:
    """Return what a prompt asks, to be compared with others: its messages or text, or the columns of an environment's
    case."""
    if prompt.messages is None and prompt.text is not None:
        return prompt.text
    if prompt.messages is not None:
        return json.dumps(prompt.messages, sort_keys=True, default=str)
    return repr([(name, _plain(value)) for name, value in sorted(prompt.columns.items())])


def _plain(value: Any) -> object:
    """Return a numpy array or scalar as Python's lists and numbers: its repr leaves out the middle of long ones."""
    return value.tolist() if hasattr(value, "tolist") else value
