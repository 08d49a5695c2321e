"""Submitting a training job: a validated request -> what the ledger keeps and what the worker trains.

    read_grpo      a body -> Submission; of groups of scored completions, by `prepare_grpo`
    read_sft       a body -> Submission; of conversations, by `prepare_sft`

What can be known now is checked now, so that a job that was accepted fails only if its training does. Every refusal
says which field (its JSON path), what it holds, what would be valid and what to do.

From here on there is no text: prompts, and completions known only by their text, go through the chat template here,
once. A completion known by its rollout or its token ids is taken as it was sampled. `job_payload` says what is spooled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from groupwise.algo.advantage import differ
from groupwise.config.job import GrpoJobConfig, JobConfig
from groupwise.config.serve import ServeConfig
from groupwise.errors import AdapterError, AdapterNotFoundError, FieldError, RequestError
from groupwise.server.bodies import parse_body
from groupwise.server.encode import at_field, encode_example, encode_group
from groupwise.server.schema_train import GrpoRequest, ScoredCompletion, ScoredGroup, SftRequest
from groupwise.store import files as adapter_files
from groupwise.store.adapters import AdapterStore
from groupwise.store.job_payload import EncodedExample as EncodedExample
from groupwise.store.job_payload import EncodedGroup as EncodedGroup
from groupwise.store.job_payload import dump_examples, dump_groups
from groupwise.store.ledger import RolloutRecord, kept_rollouts
from groupwise.types import BASE, PolicyVersion, unrecorded

if TYPE_CHECKING:
    from groupwise.server.reader import TextModel

FindRollouts = Callable[[Sequence[str]], Mapping[str, RolloutRecord]]

MAX_REWARD = 1e6

SHOWN = 5  # paths that one message names


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Holds a job that can be queued. `config` parses as the job's configuration; `effective` has the values in use
    where it has null; `summary` has "warnings"; `rewards` are those of the rollouts that were named by their ids."""

    id: str
    effective: dict[str, Any]
    kind: str
    adapter: str
    config: dict[str, Any]
    summary: dict[str, Any]
    payload: bytes
    steps: int
    auto_load: bool
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        return self.summary["warnings"]


def read_grpo(
    raw: bytes,
    base: TextModel,
    config: ServeConfig,
    *,
    store: AdapterStore,
    ledger: Path,
    tenant: str | None,
    pending: Collection[str],
) -> Submission:
    """Return the job that a body of /v1/train/grpo asks for. `ledger`: where the rollouts are, of which those count
    that `tenant` sees. Raises RequestError."""
    request, rollouts = parse_body(raw, GrpoRequest, config), partial(kept_rollouts, ledger, tenant)
    return prepare_grpo(request, base=base, store=store, rollouts=rollouts, pending=pending)


def read_sft(
    raw: bytes, base: TextModel, config: ServeConfig, *, store: AdapterStore, pending: Collection[str]
) -> Submission:
    """Return the job that a body of /v1/train/sft asks for. Raises RequestError."""
    return prepare_sft(parse_body(raw, SftRequest, config), base=base, store=store, pending=pending)


def prepare_grpo(
    request: GrpoRequest,
    *,
    base: TextModel,
    store: AdapterStore,
    rollouts: FindRollouts,
    pending: Collection[str] = (),
) -> Submission:
    """Check and tokenise groups of scored completions. `pending` are the adapters that jobs ahead of it will make.

    Raises:
        RequestError: what is wrong with the request, and where.
    """
    groups, config = request.groups, request.config
    _check_groups(groups)
    flat = [i for i, group in enumerate(groups) if not differ([c.reward for c in group.completions])]
    flat = [i for i in flat if all(c.teacher_logprobs is None for c in groups[i].completions)]
    if len(flat) == len(groups):
        raise _no_signal(groups)
    _check_teacher(groups, config)
    start, effective = _continued(config, base=base, store=store, pending=pending)
    records = _found(groups, rollouts)
    temperature = _temperature(config, groups, records)
    _check_replay(config, records, base)
    recorded = any(c.logprobs is not None or c.rollout_id is not None for _, c in _completions(groups))
    left_out = set() if config.trains_flat(recorded=recorded) else set(flat)
    trained = sum(len(group.completions) for i, group in enumerate(groups) if i not in left_out)
    steps = config.steps(completions=trained)
    _check_warmup(config, steps)
    id, name = _named("grpo", config, store)
    rewards = [completion.reward for group in groups for completion in group.completions]
    tokens = {"prompt_tokens": 0, "completion_tokens": 0}

    def encoded() -> Iterator[EncodedGroup]:
        for i, group in enumerate(groups):
            one = encode_group(group, f"groups[{i}]", records, base)
            tokens["prompt_tokens"] += len(one.prompt_ids)
            tokens["completion_tokens"] += sum(len(completion.ids) for completion in one.completions)
            yield one

    payload = dump_groups(encoded(), temperature=temperature)
    return Submission(
        id=id,
        effective=effective,
        kind="grpo",
        adapter=name,
        config=config.model_dump(mode="json") | {"output_name": name, "temperature": temperature},
        summary={
            "groups": len(groups),
            "groups_equal": len(flat),  # those whose rewards are all equal
            "completions": len(rewards),
            **tokens,
            "rollouts": len(records),
            "reward_mean": math.fsum(rewards) / len(rewards),
            **_reward_stderr(groups),
            "changed": _changed(config),
            "warnings": [
                *_passed_over(config, store, start),
                *_warnings(config, groups, flat=flat, trained=trained, recorded=recorded, records=records, start=start),
            ],
        },
        payload=payload,
        steps=steps,
        auto_load=config.auto_load,
        rewards={each.rollout_id: each.reward for _, each in _completions(groups) if each.rollout_id is not None},
    )


def prepare_sft(
    request: SftRequest, *, base: TextModel, store: AdapterStore, pending: Collection[str] = ()
) -> Submission:
    """Check and tokenise conversations. Raises RequestError."""
    examples, config = request.examples, request.config
    if not examples:
        raise RequestError("examples is empty", hint="give at least one conversation", field="examples")
    start, effective = _continued(config, base=base, store=store, pending=pending)
    steps = config.steps(examples=len(examples))
    _check_warmup(config, steps)
    id, name = _named("sft", config, store)
    tokens = {"tokens": 0, "trained_tokens": 0}

    def encoded() -> Iterator[EncodedExample]:
        for i, example in enumerate(examples):
            one = encode_example(example, f"examples[{i}]", base)
            tokens["tokens"] += len(one.prompt_ids) + len(one.completion_ids)
            tokens["trained_tokens"] += sum(one.mask)
            yield one

    payload = dump_examples(encoded())
    return Submission(
        id=id,
        effective=effective,
        kind="sft",
        adapter=name,
        config=config.model_dump(mode="json") | {"output_name": name},
        summary={
            "examples": len(examples),
            **tokens,
            "changed": _changed(config),
            "warnings": list(_passed_over(config, store, start)),
        },
        payload=payload,
        steps=steps,
        auto_load=config.auto_load,
    )


def _named(kind: str, config: JobConfig, store: AdapterStore) -> tuple[str, str]:
    """Return an id for the job, and what its adapter is called: a name that is made up begins as the id does."""
    while True:
        id = uuid4().hex
        name = config.output_name or f"{kind}-{id[:8]}"
        if config.output_name or not store.versions(name):
            return id, name


def _changed(config: JobConfig) -> list[str]:
    """Return the keys that the request gave something else than the default, which may depend on other keys."""
    told, fields = config.model_dump(), type(config).model_fields
    usual = {name: fields[name].get_default(call_default_factory=True, validated_data=told) for name in fields}
    return [name for name in fields if name in config.model_fields_set and getattr(config, name) != usual[name]]


# ---- what is wrong by itself ----
def _check_groups(groups: Sequence[ScoredGroup]) -> None:
    if not groups:
        raise RequestError("groups is empty", hint="give at least one group of scored completions", field="groups")
    seen: dict[str, str] = {}
    for i, group in enumerate(groups):
        at, count = f"groups[{i}]", len(group.completions)
        if count < 2:
            what = "no completions" if count == 0 else "one completion, and there is nothing to compare it with"
            hint = "sample several completions of each prompt (n = 4 or more) and post them in one group"
            raise RequestError(f"{at} has {what}; a group needs at least 2", hint=hint, field=f"{at}.completions")
        for j, completion in enumerate(group.completions):
            where = f"{at}.completions[{j}]"
            _check_completion(completion, where, has_messages=group.messages is not None)
            if completion.rollout_id is not None:
                first = seen.setdefault(completion.rollout_id, where)
                if first != where:
                    raise RequestError(
                        f"{where} has the same rollout_id as {first}: {completion.rollout_id!r}",
                        hint="each rollout counts once; remove one of the two",
                        field=f"{where}.rollout_id",
                    )


def _check_completion(completion: ScoredCompletion, at: str, *, has_messages: bool) -> None:
    reward = completion.reward
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        raise RequestError(
            f"{at}.reward is {reward}; it must be a finite number from {-MAX_REWARD:g} to {MAX_REWARD:g}",
            hint="only differences within a group count, so rewards can be scaled down; leave out a completion whose "
            "reward failed",
            field=f"{at}.reward",
        )
    sources = [name for name in ("text", "rollout_id", "token_ids") if getattr(completion, name) is not None]
    if len(sources) != 1:
        what = "neither text nor rollout_id nor token_ids" if not sources else " and ".join(sources)
        hint = "give its text, or the rollout_id that /v1/completions/batch answered, or its token_ids; one of them"
        raise RequestError(
            f"{at} has {what}; it needs exactly one", hint=hint, field=f"{at}.{(sources or ['text'])[-1]}"
        )
    for name in ("logprobs", "prompt_token_ids"):
        if getattr(completion, name) is not None and completion.token_ids is None:
            hint = f"remove it: {'a rollout knows its own' if completion.rollout_id else 'text has none'}"
            raise RequestError(f"{at} has {name} without token_ids", hint=hint, field=f"{at}.{name}")
    if not has_messages and completion.rollout_id is None and completion.prompt_token_ids is None:
        group = at.partition(".")[0]
        raise RequestError(
            f"{group} has no messages, and {at} does not bring its prompt",
            hint="give the group's messages; only rollout_id, or token_ids with prompt_token_ids, can do without",
            field=f"{group}.messages",
        )


def _reward_stderr(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the standard error of the mean reward over groups, whose completions are not independent of each other."""
    means = [fmean(completion.reward for completion in group.completions) for group in groups]
    return {"reward_stderr": stdev(means) / math.sqrt(len(means))} if len(means) > 1 else {}


def _check_teacher(groups: Sequence[ScoredGroup], config: GrpoJobConfig) -> None:
    """Raise RequestError for a weight of a teacher that none of the completions has."""
    weight, default = config.teacher_coefficient, GrpoJobConfig.model_fields["teacher_coefficient"].default
    if weight != default and all(completion.teacher_logprobs is None for _, completion in _completions(groups)):
        raise RequestError(
            f"config.teacher_coefficient is {weight:g}, and no completion has teacher_logprobs",
            hint="give them, or leave the option out",
            field="config.teacher_coefficient",
        )


def _no_signal(groups: Sequence[ScoredGroup]) -> RequestError:
    rewards = {completion.reward for group in groups for completion in group.completions}
    value = f" (they are {rewards.pop():g})" if len(rewards) == 1 else ""
    where = "groups[0]" if len(groups) == 1 else f"each of the {len(groups)} groups"
    return RequestError(
        f"in {where} the rewards are all equal{value}, so there is nothing to learn from",
        hint="a completion is trained by how it differs from its group: sample more completions or at a higher "
        "temperature, take prompts that are solved sometimes, or give partial credit",
        field="groups",
        code="no_signal",
    )


def _check_warmup(config: JobConfig, steps: int) -> None:
    if config.warmup_steps > steps:
        raise RequestError(
            f"config.warmup_steps is {config.warmup_steps}, and the job has {steps} steps",
            hint=f"give {steps} or less, or more steps",
            field="config.warmup_steps",
        )


# ---- what it continues ----
def _continued(
    config: JobConfig, *, base: TextModel, store: AdapterStore, pending: Collection[str]
) -> tuple[PolicyVersion | None, dict[str, Any]]:
    """Return the version from which the job would start now, None if a job ahead of it decides that; and what then acts
    where the request says nothing.

    A bare name is left as it is: it means the newest version when the job runs, so that queued rounds add up.
    """
    asked = config.base_adapter
    targets = _targeted(config, base)
    if (asked or config.output_name) in pending:
        return None, config.effective({})
    try:
        version = config.parent(store, name=config.output_name)
        if version.is_base:
            return version, config.effective(None)
        store.check_base(version, base.hash)
        directory = store.path(version)
        saved = json.loads((directory / adapter_files.CONFIG).read_bytes())
        adapted = adapter_files.adapted_names(directory)
    except (AdapterNotFoundError, AdapterError) as error:
        field = "output_name" if asked is None else "base_adapter"
        raise at_field(error, f"config.{field}") from error
    _check_shape(config, version, saved, same_targets=targets is None or set(targets) == set(adapted))
    return version, config.effective(saved)


def _passed_over(config: JobConfig, store: AdapterStore, start: PolicyVersion | None) -> Iterator[str]:
    """Yield a note that a newer version is not continued, since it is unhealthy."""
    versions = store.versions(config.base_adapter or config.output_name or "")
    if start is not None and versions and (newest := versions[-1]) != start:
        yield (
            f"training starts from {start}: {newest}, the newest version, is unhealthy ({store.unhealthy(newest)}); "
            f"config.base_adapter: '{newest}' continues it all the same"
        )


def _check_shape(config: JobConfig, version: PolicyVersion, saved: Mapping[str, Any], *, same_targets: bool) -> None:
    """Refuse another shape: an adapter that is continued keeps its rank, scale and targets."""
    differences = config.differences(saved)
    if not same_targets:
        differences += [("target_modules", config.target_modules, saved.get("target_modules"))]
    for name, given, has in differences:
        raise RequestError(
            f"config.{name} is {given}; the job continues {version}, which has {has}",
            hint=f"leave {name} out, or start a fresh adapter with base_adapter: {BASE!r}",
            field=f"config.{name}",
        )


def _targeted(config: JobConfig, base: TextModel) -> list[str] | None:
    """Return the modules that `target_modules` means; None where it is left out and those of an adapter may be
    meant."""
    given = config.target_modules
    for i, target in enumerate(given if isinstance(given, tuple) else ()):
        try:
            base.adaptable.meant([target])
        except FieldError as error:
            ours = error.renamed(f"config.target_modules[{i}]")
            raise RequestError(ours.message, hint=ours.hint, field=ours.field, kind=ours.kind) from error
    return None if given is None else base.adaptable.meant(given)


# ---- rollouts ----
def _completions(groups: Sequence[ScoredGroup]) -> Iterator[tuple[str, ScoredCompletion]]:
    for i, group in enumerate(groups):
        for j, completion in enumerate(group.completions):
            yield f"groups[{i}].completions[{j}]", completion


def _found(groups: Sequence[ScoredGroup], rollouts: FindRollouts) -> Mapping[str, RolloutRecord]:
    """Return the records of the rollouts that the request names. Raises RequestError if some are not kept."""
    where = {c.rollout_id: at for at, c in _completions(groups) if c.rollout_id is not None}
    records = rollouts(list(where)) if where else {}
    missing = [id for id in where if id not in records]
    if missing:
        shown = ", ".join(f"{where[id]}: {id!r}" for id in missing[:SHOWN])
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise RequestError(
            f"{len(missing)} of {len(where)} rollouts are not known here ({shown}{more})",
            hint="rollouts are kept for 7 days, by the server that sampled them; sample again, or post text",
            field=f"{where[missing[0]]}.rollout_id",
            code="rollout_not_found",
        )
    return records


def _temperature(config: GrpoJobConfig, groups: Sequence[ScoredGroup], records: Mapping[str, RolloutRecord]) -> float:
    """Return what the completions were sampled at: log-probabilities are computed at it, and it must be one for all."""
    first: tuple[str, float] | None = None
    for at, completion in _completions(groups):
        if completion.rollout_id is None:
            continue
        record = records[completion.rollout_id]
        if names := ", ".join(unrecorded(record.reshaped, record.kept)):
            hint = f"sample rollouts without {names}; a lower temperature can be trained"
            message = f"{at} was sampled with {names}, from another distribution than is trained"
            raise RequestError(message, hint=hint, field=f"{at}.rollout_id")
        temperature = record.temperature
        if temperature <= 0:
            hint = "sample at a temperature above 0, or post the text instead of the rollout_id"
            message = f"{at} was sampled greedily (temperature 0), so its tokens have no probabilities to train"
            raise RequestError(message, hint=hint, field=f"{at}.rollout_id")
        first = first or (at, temperature)
        if temperature != first[1]:
            message = f"{at} was sampled at temperature {temperature:g}, {first[0]} at {first[1]:g}"
            raise RequestError(message, hint="submit a job for each temperature", field=f"{at}.rollout_id")
    if first is None:
        return 1.0 if config.temperature is None else config.temperature
    if config.temperature not in (None, first[1]):
        message = f"config.temperature is {config.temperature:g}, but {first[0]} was sampled at {first[1]:g}"
        raise RequestError(message, hint="leave temperature out: rollouts know theirs", field="config.temperature")
    return first[1]


def _check_replay(config: GrpoJobConfig, records: Mapping[str, RolloutRecord], base: TextModel) -> None:
    """Raise RequestError where `router_replay` is true and cannot act."""
    if not config.router_replay or any(record.routed_experts is not None for record in records.values()):
        return
    why, hint = f"{base.name} has no routers of experts", "leave it out"
    if base.routing is not None:
        why = "the experts of none of the completions are recorded"
        hint = "give the rollout_id of what this server sampled with engine local, or leave it out"
    raise RequestError(f"config.router_replay is true, but {why}", hint=hint, field="config.router_replay")


def _warnings(
    config: GrpoJobConfig,
    groups: Sequence[ScoredGroup],
    *,
    flat: Sequence[int],
    trained: int,
    recorded: bool,
    records: Mapping[str, RolloutRecord],
    start: PolicyVersion | None,
) -> Iterator[str]:
    if 2 * len(flat) > len(groups):  # some are equal in every round; most of them say that the prompts do not fit
        shown = ", ".join(f"groups[{i}]" for i in flat[:SHOWN]) + (", ..." if len(flat) > SHOWN else "")
        kept = config.trains_flat(recorded=recorded)
        what = (
            "only terms that read no reward (a KL, say) train them" if kept else "they teach nothing and are left out"
        )
        yield f"{len(flat)} of {len(groups)} groups have equal rewards; {what}: {shown}"
    if config.minibatches > trained:
        yield f"config.minibatches is {config.minibatches}; steps a pass: {trained}, one per completion that is trained"
    stale = sorted({record.version for record in records.values()} - {str(start)})
    if start is not None and stale:
        count = sum(record.version != str(start) for record in records.values())
        versions = ", ".join(stale[:SHOWN]) + (", ..." if len(stale) > SHOWN else "")
        one = start.is_base and len(stale) == 1 and "*" not in versions  # and no composition: that is not stored
        meant = f"; config.base_adapter: {versions!r} continues it" if one else ""
        yield f"{count} of {len(records)} rollouts were sampled by {versions}; training starts from {start}{meant}"
    loss = config.loss(recorded=recorded)
    steps = config.steps(completions=trained)
    yield from loss.off_policy_warnings(steps, stale=bool(stale), section="config.")
