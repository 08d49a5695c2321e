"""Opening one, and what is checked before the first step."""

from __future__ import annotations

import heapq
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from groupwise.config.run import RunConfig
from groupwise.config.teacher import BEST_COMPLETION, TeacherConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError
from groupwise.model.chat import encode_prompt
from groupwise.model.load import LoadedModel, load_model
from groupwise.platform import run_coroutine
from groupwise.run.plan import RunPlan
from groupwise.run.teacher import (
    ADAPTER,
    LONGEST_PROMPTS,
    EndpointTeacher,
    EngineTeacher,
    Teacher,
    TeacherBackend,
    context_of,
)
from groupwise.sampler import Sampler
from groupwise.store.locate import find_adapter
from groupwise.types import PolicyVersion


def open_teacher(plan: RunPlan, base: LoadedModel, engine: Sampler, *, threads: int) -> Teacher | None:
    """Return the run's teacher; to be closed. None where the run has none, or one that only chooses from what the
    policy samples.

    Raises:
        ConfigError: it has another tokenizer, or no room for the run's prompts and completions; or it cannot be asked.
        ModelError, AdapterError, AdapterNotFoundError: it cannot be loaded.
    """
    config = plan.config
    if (spec := config.teacher) is None or spec.chooses:
        return None
    backend = _backend(config, spec, base, engine, threads=threads)
    teacher = Teacher(spec, backend, base.tokenizer)
    try:
        if isinstance(backend, EndpointTeacher):
            run_coroutine(backend.check_tokenizer(base.tokenizer))
        elif config.env is None:
            _check_room(plan, teacher, base)
    except BaseException:
        teacher.close()
        raise
    return teacher


def _backend(
    config: RunConfig, spec: TeacherConfig, base: LoadedModel, engine: Sampler, *, threads: int
) -> TeacherBackend:
    if spec.base_url is not None:
        return EndpointTeacher(spec)
    top, temperature = max(spec.top_k, 1), config.rollout.temperature
    if spec.self:
        if not isinstance(engine, LocalEngine):
            raise ConfigError(
                "teacher.self is scored by the engine that samples, and this run's is in other processes",
                hint="use another launcher, or name an adapter or a model",
                field="teacher.self",
            )
        return EngineTeacher(engine=engine, version=None, top=top, temperature=temperature, owned=False)
    model, version = base, PolicyVersion.base()
    if spec.model is not None:
        dtype = config.dtype if spec.dtype == "auto" else spec.dtype
        model = load_model(spec.model, device=str(base.device), dtype=dtype)
        _check_tokenizer(base.tokenizer, model.tokenizer, spec.model)
    rows = config.rollout.batch_rows if spec.loss == "sft" else 1
    own = LocalEngine(model, max_rows=rows, prefix_cache_mb=0, threads=threads)
    if spec.adapter is not None:
        located = find_adapter(spec.adapter)
        located.check_base(base.hash)
        version = ADAPTER
        with located.held():
            own.load(version, located.directory)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.model.parameters())
    return EngineTeacher(
        engine=own,
        version=version,
        top=top,
        temperature=temperature,
        weights=0 if model is base else weights,
    )


def _check_tokenizer(own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, name: str) -> None:
    """Raise ConfigError unless every token of the policy's is the teacher's under the same id."""
    ours, known = own.get_vocab(), {id: token for token, id in theirs.get_vocab().items()}
    for token, id in sorted(ours.items(), key=lambda pair: pair[1]):
        if known.get(id) != token:
            there = "none" if id not in known else repr(known[id])
            raise ConfigError(
                f"the teacher {name!r} has another tokenizer: token {id} is {token!r} here and {there} there",
                hint="a teacher reads the policy's token ids; take one of the same family",
                field="teacher.model",
            )


def _check_room(plan: RunPlan, teacher: Teacher, base: LoadedModel) -> None:
    """Raise ConfigError where a prompt (with its context) and a completion may be more than the teacher reads."""
    rollout, context, spec = plan.config.rollout, teacher.backend.context_length, teacher.config
    longest_prompt = min(base.context_length - 1, rollout.max_prompt_tokens or base.context_length)
    assert context is not None
    prompts = heapq.nlargest(LONGEST_PROMPTS, plan.source.known, key=lambda prompt: len(repr(prompt)))
    for prompt in prompts:
        encoded = encode_prompt(replace(prompt, token_ids=()), base.tokenizer)
        if len(encoded.token_ids) > longest_prompt:
            continue
        read, added = encoded.token_ids, ""
        said = min(rollout.max_tokens, base.context_length - len(read))
        if spec.context is not None:
            text = "" if spec.context == BEST_COMPLETION else context_of(prompt, spec)
            read = read if text is None else teacher.prompt_with(prompt, text)
            said += said if spec.context == BEST_COMPLETION else 0
            added = f" with teacher.context {spec.context!r}"
        if len(read) + said > context:
            raise ConfigError(
                f"the teacher has a context of {context} tokens: prompt {prompt.id!r} has {len(read)}{added}, and "
                f"{said} are left for what rollout.max_tokens = {rollout.max_tokens} allows",
                hint="lower rollout.max_tokens or rollout.max_prompt_tokens, or take a teacher with a longer context",
                field="teacher",
            )
