"""The verdict of `groupwise env check`: findings from the trial episodes that `tasks.check.play` played.

error     it breaks the contract: a method fails or hangs, what it returns is not as agreed, a tool has no valid schema,
          the same case, seed and replies give another episode
warning   training would be for nothing, or would learn something else: canned replies are paid, all rewards are equal,
          no episode ends by itself, no tool is ever called
note      what one should know
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from groupwise.algo.metrics import DONE, FAILED
from groupwise.rewards.check import CheckFinding, CheckResult, by_severity
from groupwise.tasks.check.play import MODEL, EnvTrial, Played
from groupwise.tasks.check.scripts import function_of

SLOW_S = 1.0  # a call of a method

PAID = 0.5  # of the best reward

PAID_AGAIN = 3  # turns of the same words

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# the kind of an EnvError -> what it fails
_CHECKS: Mapping[str | None, str] = {
    "timeout": "time",
    "exception": "exception",
}  # the kind of an EnvError -> what it fails

_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """Holds a policy's episodes in numbers; rewards are None if none could be scored. `stops` counts the episodes by
    the reason of their end."""

    policy: str
    episodes: int
    turns: float
    low: float | None
    mean: float | None
    high: float | None
    stops: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """Holds the calls of a method: their number, seconds, how many raised and how many have not returned."""

    method: str
    calls: int
    mean_s: float
    max_s: float
    failed: int
    hung: int


@dataclass(frozen=True, kw_only=True)
class EnvReport(CheckResult):
    """Results of `groupwise env check`; `shown` is the episode to look at."""

    cases: int
    tools: tuple[str, ...]
    policies: tuple[PolicyRow, ...]
    methods: tuple[MethodRow, ...]
    shown: Played | None


def judge(trial: EnvTrial, *, best: float = 1.0) -> EnvReport:
    """Return the findings, the gravest first. `best` is what an episode is worth in which all is right."""
    checks = (_failures, _tools, _sameness, _cases, _stops, _calls, _forks, _slowness)
    findings = [finding for check in checks for finding in check(trial)]
    findings += [*_rewards(trial), *_hacks(trial, best)]
    return EnvReport(
        name=trial.opened.name,
        cases=len(trial.opened.prompts),
        tools=tuple(str(function_of(tool).get("name")) for tool in trial.tools),
        findings=by_severity(findings),
        policies=tuple(_policies(trial)),
        methods=tuple(_methods(trial)),
        shown=_shown(trial),
    )


def refused(name: str, message: str) -> EnvReport:
    """Return the report of an environment that could not be played."""
    finding = CheckFinding(severity="error", check="cases", message=message)
    return EnvReport(name=name, cases=0, tools=(), findings=(finding,), policies=(), methods=(), shown=None)


# ---- the contract ----
def _failures(trial: EnvTrial) -> Iterator[CheckFinding]:
    """Yield one finding for each error, and how often it came."""
    failed = [(each.rollout.error, each) for each in trial.episodes if each.rollout.error is not None]
    causes: dict[str, list[Played]] = {}
    for cause, each in failed:  # addresses of objects tell no two causes apart
        causes.setdefault(re.sub(r"0x[0-9a-f]+", "0x...", cause), []).append(each)
    for cause, episodes in causes.items():
        check = _CHECKS.get(episodes[0].rollout.error_kind, "contract")
        message = f"{cause} ({len(episodes)} of {len(trial.episodes)} episodes)"
        yield CheckFinding(severity="error", check=check, message=message, probe=episodes[0].policy)
    closing = [called for called in trial.opened.calls if called.method == "close"]  # when the episode has its reward
    if raised := [called for called in closing if called.error is not None]:
        message = f"{trial.opened.name}.close raised {raised[0].error} ({len(raised)} of {len(closing)} times)"
        yield CheckFinding(severity="error", check="exception", message=message)
    if trial.stopped:
        message = f"after {trial.lost} methods that took too long no more was tried"
        yield CheckFinding(severity="error", check="time", message=message)
    for note in dict.fromkeys(trial.opened.notes):
        yield CheckFinding(severity="note", check="told", message=note)


def _tools(trial: EnvTrial) -> Iterator[CheckFinding]:
    """Yield findings about tools that do not have the form of OpenAI's API and the chat templates."""
    names = Counter(str(function_of(tool).get("name")) for each in trial.episodes[:1] for tool in each.prompt.tools)
    for name, count in names.items():
        if count > 1:
            yield CheckFinding(severity="error", check="tool", message=f"{count} tools are named {name!r}")
    for tool in trial.tools:
        function = function_of(tool)
        name, parameters = function.get("name"), function.get("parameters")
        if tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
            shown = json.dumps(tool, default=str)[:80]
            message = f'{shown} is not of the form {{"type": "function", "function": {{"name": ...}}}}'
            yield CheckFinding(severity="error", check="tool", message=message)
        elif not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"the name {name!r} is not of letters, digits, _ and -, at most 64"
            yield CheckFinding(severity="error", check="tool", message=message)
        elif parameters is not None and (why := _no_schema(parameters)):
            yield CheckFinding(severity="error", check="tool", message=f"the parameters of {name}: {why}")
        elif not function.get("description"):
            message = f"{name} has no description: the policy must guess what it does"
            yield CheckFinding(severity="warning", check="tool", message=message)


def _no_schema(parameters: Any) -> str:
    """Return why a value is not a JSON schema of an object; "" if it is one."""
    import jsonschema_rs

    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        return f"{json.dumps(parameters, default=str)[:80]} is no schema of type object"
    try:
        jsonschema_rs.validator_for(dict(parameters))
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        return str(error).splitlines()[0]
    return ""


def _sameness(trial: EnvTrial) -> Iterator[CheckFinding]:
    """Yield findings about episodes that should have been the same."""
    for when, why in (
        ("again", "the same case, seed and replies"),
        ("at once", "beside other episodes"),
    ):
        different = [each for each in trial.differences if each.when == when]
        if different:
            says = "gave another episode" if when == "again" else "it plays another episode than alone"
            also = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            message = f"{why} {says}: {different[0].what}{also}; draw from the seed, keep state on self"
            check = "determinism" if when == "again" else "shared state"
            yield CheckFinding(severity="error", check=check, message=message, probe=different[0].policy)
    if not trial.differences and trial.other_seed is not None:
        yield CheckFinding(severity="note", check="seed", message=f"another seed changes {trial.other_seed}")
    if trial.changed_case is not None:
        message = f"case {trial.changed_case} was changed while it was played, and other episodes are given it too"
        yield CheckFinding(severity="error", check="case", message=f"{message}: copy it in reset")


def _cases(trial: EnvTrial) -> Iterator[CheckFinding]:
    opened = trial.opened
    cases = [json.dumps(_case(prompt), sort_keys=True, default=str) for prompt in opened.prompts]
    if twice := len(cases) - len(set(cases)):
        yield CheckFinding(severity="note", check="cases", message=f"{twice} of {len(cases)} cases are there twice")
    if opened.held_out is None:
        if opened.steps:
            message = "there is no eval_cases(): give eval.data in a run, or it cannot be evaluated on its own cases"
            yield CheckFinding(severity="note", check="cases", message=message)
        return
    seen = set(cases)
    held = [json.dumps(_case(prompt), sort_keys=True, default=str) for prompt in opened.held_out]
    if both := sum(case in seen for case in held):
        message = f"{both} of {len(held)} held-out cases are also training cases"
        yield CheckFinding(severity="warning", check="cases", message=message)


def _case(prompt: Any) -> Any:
    return [dict(prompt.columns), prompt.messages, prompt.text]


# ---- what training would make of it ----
def _stops(trial: EnvTrial) -> Iterator[CheckFinding]:
    """Yield whether episodes end by themselves."""
    stops = Counter(each.rollout.stop for each in trial.episodes if each.rollout.stop != FAILED)
    if stops and not stops[DONE]:
        ends = ", ".join(f"{count} {stop}" for stop, count in stops.most_common())
        message = f"no episode was ended by the environment ({ends}): is done=True ever returned from step?"
        heard = any(each.policy == MODEL for each in trial.episodes)  # canned replies seldom succeed
        yield CheckFinding(severity="warning" if heard else "note", check="limits", message=message)


def _calls(trial: EnvTrial) -> Iterator[CheckFinding]:
    """Yield whether the model ever calls a tool, and what becomes of calls that keep the schema."""
    of_model = [each.rollout for each in trial.episodes if each.policy == MODEL and each.rollout.stop != FAILED]
    if trial.tools and of_model and not any(each.info.get("tool_calls", 1.0) for each in of_model):
        message = f"in {len(of_model)} episodes it called no tool: what is never tried is never learned"
        yield CheckFinding(severity="warning", check="tool", message=message, probe=MODEL)
    made_up = [each.rollout.info for each in trial.episodes if each.policy == "each tool once"]
    errors = sum(info.get("tool_errors", 0.0) for info in made_up)
    if errors:
        calls = sum(info.get("tool_calls", 0.0) for info in made_up)
        message = f"{errors:.0f} of {calls:.0f} calls with made-up arguments were answered with an error"
        yield CheckFinding(severity="note", check="tool", message=message, probe="each tool once")


def _forks(trial: EnvTrial) -> Iterator[CheckFinding]:
    forked = [each for each in trial.episodes if each.rollout.info.get("forks")]
    if forked:
        message = (
            f"in {len(forked)} of {len(trial.episodes)} episodes a turn did not go on from the one before (another "
            "conversation, or a chat template that rewrites what was said) and is a trained segment of its own"
        )
        yield CheckFinding(severity="note", check="forks", message=message, probe=forked[0].policy)


def _slowness(trial: EnvTrial) -> Iterator[CheckFinding]:
    for row in _methods(trial):
        if row.calls > row.hung and row.mean_s > SLOW_S:
            message = f"{row.method} takes {row.mean_s:.1f} s on average, {row.max_s:.1f} s at most"
            yield CheckFinding(severity="warning", check="slow", message=message)


def _rewards(trial: EnvTrial) -> Iterator[CheckFinding]:
    """Yield whether rewards tell anything apart, and their range."""
    values = [each.rollout.reward for each in trial.episodes if each.rollout.reward is not None]
    if not values:
        return
    low, high = min(values), max(values)
    if high - low <= _SAME and len(values) > 1:
        message = f"all {len(values)} scored episodes are worth {low:g}: nothing that was tried makes a difference"
        yield CheckFinding(severity="warning", check="constant", message=message)
    if low < 0 or high > 1:
        message = f"rewards from {low:g} to {high:g}; 0 to 1 is usual (--best says what a perfect episode is worth)"
        yield CheckFinding(severity="note", check="range", message=message)


def _hacks(trial: EnvTrial, best: float) -> Iterator[CheckFinding]:
    """Yield findings about canned replies that are paid."""
    rows = {row.policy: row for row in _policies(trial)}
    top = max([best, *(row.high for row in rows.values() if row.policy == MODEL and row.high is not None)])
    canned = {name: row for name, row in rows.items() if name != MODEL}
    for name, row in canned.items():
        if row.mean is not None and row.mean >= PAID * top - _SAME and row.mean > 0:
            message = f"gets {row.mean:.3g} on average, where the best is {top:g}, without doing anything"
            yield CheckFinding(severity="warning", check="hack", message=message, probe=name)
    heard = [row for name, row in rows.items() if name != "nothing" and set(row.stops) != {"max_tokens"}]
    others = [row.mean for row in heard if row.mean is not None]
    silence = rows["nothing"].mean if "nothing" in rows else None
    if silence is not None and others and silence > max(others) + _SAME:
        message = f"saying nothing gets {silence:.3g}, more than any other policy: whoever tries is punished"
        yield CheckFinding(severity="warning", check="hack", message=message, probe="nothing")
    for each in trial.episodes:
        if each.policy in ("the same words", "the same call", "nothing"):
            paid = [turn.reward for turn in each.rollout.turns if turn.reward is not None and turn.reward > 0]
            if len(paid) >= PAID_AGAIN:
                message = f"is paid in {len(paid)} turns of one episode for saying the same ({paid[-1]:g} at last)"
                yield CheckFinding(severity="warning", check="hack", message=message, probe=each.policy)
                return


# ---- tables ----
def _policies(trial: EnvTrial) -> Iterator[PolicyRow]:
    for policy in dict.fromkeys(each.policy for each in trial.episodes):
        rollouts = [each.rollout for each in trial.episodes if each.policy == policy]
        values = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        yield PolicyRow(
            policy=policy,
            episodes=len(rollouts),
            turns=fmean(len(rollout.turns) for rollout in rollouts),
            low=min(values, default=None),
            mean=fmean(values) if values else None,
            high=max(values, default=None),
            stops=dict(Counter(str(rollout.stop) for rollout in rollouts)),
        )


def _methods(trial: EnvTrial) -> Iterator[MethodRow]:
    ordered = sorted(trial.opened.calls, key=lambda called: called.method)
    for method, group in groupby(ordered, key=lambda called: called.method):
        calls: Sequence[Any] = list(group)
        seconds = [called.seconds for called in calls if called.seconds is not None]
        yield MethodRow(
            method=method,
            calls=len(calls),
            mean_s=fmean(seconds) if seconds else 0.0,
            max_s=max(seconds, default=0.0),
            failed=sum(called.error is not None for called in calls),
            hung=sum(called.seconds is None for called in calls),
        )


def _shown(trial: EnvTrial) -> Played | None:
    """Return the episode that says most: the model's with forks or else with most turns; without a model, a
    script's."""
    spoken = [each for each in trial.episodes if each.rollout.turns]
    of_model = [each for each in spoken if each.policy == MODEL] or spoken

    def says(each: Played) -> tuple[float, float, float]:
        info = each.rollout.info
        return info.get("forks", 0.0), float(len(each.rollout.turns)), each.rollout.reward or 0.0

    return max(of_model, key=says, default=None)
