"""Rollout groups to JSON and back without loss: lines of `rollouts/*.jsonl`, entries of the replay buffer.

Token ids and logprobs come back bit for bit (JSON holds the shortest decimal that reads as the same float64). A number
that is NaN or infinite is the string "NaN", "Infinity" or "-Infinity". Only `columns` come back as far as JSON has
their types: a tuple is a list, a date is text; and of what a teacher said of a token only its likeliest one.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.errors import DataError
from groupwise.recorded import RoutedExperts, SamplingMask
from groupwise.store.number_texts import NumberTexts
from groupwise.types import (
    Completion,
    FinishReason,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SequenceScores,
    Turn,
)

Numbers = Callable[[Sequence[float]], str | None]


def group_line(group: RolloutGroup) -> str:
    """Return `json.dumps(group_to_json(group), allow_nan=False)`."""
    numbers = NumberTexts()
    return numbers.filled(json.dumps(group_to_json(group, numbers), allow_nan=False))


def group_to_json(group: RolloutGroup, numbers: Numbers | None = None) -> dict[str, Any]:
    """Return what `json.dumps(..., allow_nan=False)` takes, whatever the columns hold. `numbers` is given each list of
    token ids or log-probabilities, and returns what stands for it, or None for what is to stand there itself."""
    prompt = group.prompt
    return {
        "prompt": {
            "id": prompt.id,
            "messages": None if prompt.messages is None else plain(prompt.messages),
            "text": prompt.text,
            "tools": prompt.tools,
            "columns": plain(prompt.columns),
            "token_ids": _ids(prompt.token_ids, numbers),
            **({"shows_opening": True} if prompt.shows_opening else {}),
            **({"answer": plain(prompt.answer)} if prompt.answer else {}),
            **({"rejected": plain(prompt.rejected)} if prompt.rejected else {}),
        },
        "rollouts": [_rollout_to_json(rollout, prompt, numbers) for rollout in group.rollouts],
        **(
            {"demonstrations": [_rollout_to_json(rollout, prompt, numbers) for rollout in group.demonstrations]}
            if group.demonstrations
            else {}
        ),
    }


def _rollout_to_json(rollout: Rollout, prompt: Prompt, numbers: Numbers | None) -> dict[str, Any]:
    return {
        "turns": [_turn_to_json(turn, prompt, numbers) for turn in rollout.turns],
        "rewards": plain(rollout.rewards),
        "reward": plain(rollout.reward),
        "advantage": plain(rollout.advantage),
        "error": rollout.error,
        **({} if rollout.error_kind is None else {"error_kind": rollout.error_kind}),
        **({} if not rollout.teacher else {"teacher": [_scores_to_json(each, numbers) for each in rollout.teacher]}),
        **_episode_to_json(rollout),
    }


def group_from_json(raw: Any) -> RolloutGroup:
    """Return the inverse of `group_to_json`. Raises DataError for what is not a group."""
    try:
        fields = raw["prompt"]
        prompt = Prompt(
            id=fields["id"],
            messages=None if fields["messages"] is None else tuple(fields["messages"]),
            text=fields["text"],
            tools=tuple(fields["tools"]),
            columns=fields["columns"],
            token_ids=tuple(fields["token_ids"]),
            shows_opening=fields.get("shows_opening", False),
            answer=tuple(fields.get("answer", ())),
            rejected=tuple(fields.get("rejected", ())),
        )
        rollouts, demonstrations = (
            tuple(_rollout_from_json(entry, prompt) for entry in entries)
            for entries in (raw["rollouts"], raw.get("demonstrations", ()))
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"not a rollout group: {type(error).__name__}: {error}") from error
    return RolloutGroup(prompt=prompt, rollouts=rollouts, demonstrations=demonstrations)


def plain(value: Any) -> Any:
    """Return `value` with every NaN and infinity as a string, and what JSON does not have (dates, arrays) as text."""
    if isinstance(value, list | tuple) and set(map(type, value)) == {float} and all(map(math.isfinite, value)):
        return list(value)  # log-probabilities, which are most of a file
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, str | bool | int) else str(value)


def _episode_to_json(rollout: Rollout) -> dict[str, Any]:
    """Return what only an episode in an environment has."""
    if rollout.stop is None:
        return {}
    raw = {"messages": plain(rollout.messages), "stop": rollout.stop, "info": plain(rollout.info)}
    raw |= {"role_rewards": plain(rollout.role_rewards)} if rollout.role_rewards else {}
    return raw | ({"columns": plain(rollout.columns)} if rollout.columns else {})


def _scores_to_json(scores: SequenceScores, numbers: Numbers | None) -> dict[str, Any]:
    return {"logprobs": _logprobs(scores.logprobs, numbers), "top": plain([each[:1] for each in scores.top])}


def _scores_from_json(raw: Mapping[str, Any]) -> SequenceScores:
    top = tuple(tuple((id, _exact(value)) for id, value in likeliest) for likeliest in raw["top"])
    return SequenceScores(logprobs=tuple(map(_exact, raw["logprobs"])), top=top)


def _ids(values: Sequence[int], numbers: Numbers | None) -> Any:
    mark = None if numbers is None else numbers(values)
    return values if mark is None else mark


def _logprobs(values: Sequence[float], numbers: Numbers | None) -> Any:
    """Return what stands for log-probabilities, of which any may be infinite."""
    mark = None if numbers is None else numbers(values)
    return plain(values) if mark is None else mark


def _turn_to_json(turn: Turn, prompt: Prompt, numbers: Numbers | None) -> dict[str, Any]:
    completion = turn.completion
    raw = {
        # most often the prompt itself; writing it once per group and not once per rollout halves the file
        "prompt_ids": None if turn.prompt_ids == prompt.token_ids else _ids(turn.prompt_ids, numbers),
        "text": completion.text,
        "token_ids": _ids(completion.token_ids, numbers),
        "logprobs": _logprobs(completion.logprobs, numbers),
        "finish_reason": completion.finish_reason.value,
        "version": str(completion.version),
    }
    if completion.switches:
        raw["switches"] = [[at, str(version)] for at, version in completion.switches]
    if turn.reward is not None:
        raw["reward"] = plain(turn.reward)
    if not turn.trained:
        raw["trained"] = False
    raw |= {name: value for name in ("state", "role", "taken") if (value := getattr(turn, name)) is not None}
    if turn.advantage is not None:
        raw["advantage"] = plain(turn.advantage)
    if completion.routed_experts is not None:
        raw["routed_experts"] = b64encode(completion.routed_experts.to_bytes()).decode()
    if completion.kept is not None:
        raw["kept"] = b64encode(completion.kept.to_bytes()).decode()
        raw["kept_logprobs"] = _logprobs(completion.kept_logprobs, numbers)
    if completion.top_logprobs:
        raw["top_logprobs"] = plain(completion.top_logprobs)
    return raw


def _rollout_from_json(raw: Mapping[str, Any], prompt: Prompt) -> Rollout:
    return Rollout(
        turns=tuple(_turn_from_json(turn, prompt) for turn in raw["turns"]),
        rewards={name: _exact(value) for name, value in raw["rewards"].items()},
        reward=_exact(raw["reward"]),
        advantage=_exact(raw["advantage"]),
        error=raw["error"],
        error_kind=raw.get("error_kind"),
        messages=tuple(raw.get("messages", ())),
        stop=raw.get("stop"),
        info={name: _exact(value) for name, value in raw.get("info", {}).items()},
        columns=raw.get("columns", {}),
        role_rewards={name: _exact(value) for name, value in raw.get("role_rewards", {}).items()},
        teacher=tuple(map(_scores_from_json, raw.get("teacher", ()))),
    )


def _turn_from_json(raw: Mapping[str, Any], prompt: Prompt) -> Turn:
    routed = raw.get("routed_experts")
    completion = Completion(
        token_ids=tuple(raw["token_ids"]),
        logprobs=tuple(_exact(value) for value in raw["logprobs"]),
        text=raw["text"],
        finish_reason=FinishReason(raw["finish_reason"]),
        version=PolicyVersion.parse(raw["version"]),
        switches=tuple((at, PolicyVersion.parse(version)) for at, version in raw.get("switches", ())),
        top_logprobs=tuple(
            tuple((id, _exact(value)) for id, value in likeliest) for likeliest in raw.get("top_logprobs", ())
        ),
        routed_experts=None if routed is None else RoutedExperts.from_bytes(b64decode(routed, validate=True)),
        kept=None if "kept" not in raw else SamplingMask.from_bytes(b64decode(raw["kept"], validate=True)),
        kept_logprobs=tuple(_exact(value) for value in raw.get("kept_logprobs", ())),
    )
    return Turn(
        prompt.token_ids if raw["prompt_ids"] is None else tuple(raw["prompt_ids"]),
        completion,
        reward=_exact(raw.get("reward")),
        trained=raw.get("trained", True),
        state=raw.get("state"),
        role=raw.get("role"),
        advantage=_exact(raw.get("advantage")),
        taken=raw.get("taken"),
    )


def _exact(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
