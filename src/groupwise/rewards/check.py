"""`groupwise rewards lint`: calls a reward function with probes and reports what makes it unfit to train on.

error     it breaks the contract of `rewards.base` or has nothing to teach: it fails, takes for ever, gives everything
          the same value, mixes up the order, changes what it is given, gives another value the second time
warning   it can be had: junk earns what an answer should earn
note      what one should know
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from groupwise.rewards.call import Failure, FailureKind, RewardFunction, Value
from groupwise.rewards.probes import GOLD, IMITATIONS, LENGTHS, PADDING, ROWS, STUFFED, UNTAGGED, ProbePrompt
from groupwise.rewards.trial import COPIES, LOST, SAME, RewardTrial, Tried, try_out

if TYPE_CHECKING:
    from groupwise.rewards.pool import RewardPool

Severity = Literal["error", "warning", "note"]

SLOW_S = 1.0  # a call

BIAS = 0.1  # of what a reward that compares has between its least and its most

PAID = 0.5  # of the way from a wrong answer's reward to a right one's


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """A finding about a reward or an environment, and the probe (the policy of the episodes) that shows it."""

    severity: Severity
    check: str
    message: str
    probe: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The findings about one reward or environment, most severe first (`by_severity`)."""

    name: str
    findings: tuple[CheckFinding, ...]

    @property
    def verdict(self) -> Severity | Literal["ok"]:
        """Return the highest severity among the findings; "ok" without an error or a warning."""
        found = {finding.severity for finding in self.findings}
        return "error" if "error" in found else "warning" if "warning" in found else "ok"


def by_severity(findings: Iterable[CheckFinding]) -> tuple[CheckFinding, ...]:
    """Sort findings, the most severe first, otherwise in their order."""
    return tuple(sorted(findings, key=lambda each: get_args(Severity).index(each.severity)))


@dataclass(frozen=True, kw_only=True)
class RewardCheckReport(CheckResult):
    """Results of the check of one reward function.

    `hack` is how far the best junk gets from a wrong answer (0) to a right one (1); None where the function does not
    tell these apart. `p95_ms` is the time of a call.
    """

    tried: tuple[Tried, ...]
    p95_ms: float
    hack: float | None


def needed_options(function: RewardFunction) -> list[str]:
    """Return the keyword-only parameters without a default that nothing fills: options by convention, not columns."""
    parameters, only = function.parameters(), inspect.Parameter.KEYWORD_ONLY
    return [name for name in function.missing(GOLD) if parameters[name].kind is only]


async def lint(
    function: RewardFunction, *, rows: Sequence[ProbePrompt] = ROWS, pool: RewardPool | None = None
) -> RewardCheckReport:
    """Try the function on the `rows`, in the pool if that runs it, and judge what came of it."""
    trial = await try_out(function, rows, pool=pool)
    return judge(function.name if function.spec is None else function.spec.function, trial)


def judge(name: str, trial: RewardTrial) -> RewardCheckReport:
    """Return the findings of a trial, most severe first."""
    seconds = sorted(trial.seconds[1:] or trial.seconds)  # the first call starts a process
    p95 = seconds[math.ceil(0.95 * len(seconds)) - 1]
    checks = (_failures, _style, _sameness, _gold, _group, _memory, _junk, _form, _length, _comparison)
    findings = [finding for check in checks for finding in check(trial)]
    if p95 > SLOW_S and not trial.lost:
        findings.append(
            CheckFinding(severity="warning", check="slow", message=f"one call in 20 takes {p95:.1f} s or more")
        )
    return RewardCheckReport(
        name=name,
        findings=by_severity(findings),
        tried=tuple(trial.singles),
        p95_ms=1000 * p95,
        hack=max((paid for _, paid in _payments(trial)), default=None),
    )


# ---- the contract ----
def _failures(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Yield one finding for each way to fail; but where only a whole row fails, the function is not made for such
    answers."""
    foreign = {
        index
        for index in range(len(trial.rows))
        if trial.numbers and all(isinstance(each.value, Failure) for each in trial.singles if each.row == index)
    }
    for index in foreign:
        cause = next((_cause(each.value) for each in trial.singles if each.row == index), "it was not tried")
        message = f"the answer {str(trial.rows[index].gold)[:40]!r} is not for it: {cause}"
        yield CheckFinding(severity="note", check="row", message=message)
    if trial.made_up and not trial.numbers and not trial.lost:
        cause = _cause(trial.singles[0].value) or "everything gets None"
        message = f"not tried: {trial.made_up[0]!r} was made up, and then {cause}; give rows that have it"
        yield CheckFinding(severity="warning", check="column", message=message)
        return
    for kind in FailureKind:
        failed = [t for t in trial.singles if isinstance(t.value, Failure) and t.value.kind is kind]
        if failed := [each for each in failed if each.row not in foreign]:
            message = f"{len(failed)} of {len(trial.singles)} probes: {_cause(failed[0].value)}"
            yield CheckFinding(severity="error", check=kind.value, message=message, probe=failed[0].probe)
    if trial.lost >= LOST:
        message = f"nothing more was tried after {LOST} calls that did not come back"
        yield CheckFinding(severity="note", check="stopped", message=message)


def _style(trial: RewardTrial) -> Iterator[CheckFinding]:
    if not trial.chat:
        message = (
            "it takes completions for strings; they are lists of messages (the text is completion[-1]['content']), "
            "unless data.raw is true"
        )
        yield CheckFinding(severity="warning", check="style", message=message, probe="right, bare")


def _sameness(trial: RewardTrial) -> Iterator[CheckFinding]:
    values = set(trial.numbers.values())
    if len(values) == 1 and len(trial.numbers) > 1:
        message = f"everything gets {values.pop():g}: no probe has what it looks for, or there is nothing to learn"
        yield CheckFinding(severity="error", check="constant", message=message)
    elif all(each.value is None for each in trial.singles) and not trial.made_up:
        message = "everything gets None: it never applies"
        yield CheckFinding(severity="error", check="constant", message=message)


def _group(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Yield how a group is scored, against its completions alone."""
    if failure := next((each for each in (*trial.group, *trial.later) if isinstance(each.value, Failure)), None):
        message = f"fails, now or then, on what it scored alone: {_cause(failure.value)}"
        yield CheckFinding(severity="error", check="group", message=message, probe=failure.probe)
        return
    if not _equal(*trial.twice):
        return
    for each, turned in zip(trial.group, trial.turned, strict=True):
        if not _same(each.value, turned):
            message = f"the order matters: {_show(each.value)}, and {_show(turned)} with the group turned round"
            yield CheckFinding(severity="error", check="order", message=message, probe=each.probe)
            break
    else:
        if not all(_same(each, trial.copies[0]) for each in trial.copies):
            values = ", ".join(map(_show, trial.copies))
            message = f"{COPIES} completions that are the same get {values}"
            yield CheckFinding(severity="error", check="order", message=message, probe=trial.group[0].probe)
    alone = [trial.value(each.row, each.kind, each.name) for each in trial.group]
    for each, value in zip(trial.group, alone, strict=True):
        if not _same(each.value, value):
            message = f"its value depends on the rest of its group: {_show(each.value)} there, {_show(value)} alone"
            yield CheckFinding(severity="note", check="relative", message=message, probe=each.probe)
            break


def _memory(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Yield whether the same question gets the same answer, and the question is left as it was."""
    if not _equal(*trial.twice):
        first, second = next((a, b) for a, b in zip(*trial.twice, strict=True) if not _same(a, b))
        message = (
            f"the same completion got {_show(first)} and, asked again at once, {_show(second)}: it draws random "
            "numbers, reads a clock, or remembers what it was asked"
        )
        yield CheckFinding(severity="error", check="repeat", message=message)
    else:
        for each in trial.later:
            if not _same(each.value, before := trial.value(each.row, each.kind, each.name)):
                message = f"got {_show(before)} at first and {_show(each.value)} later: it remembers what came between"
                yield CheckFinding(severity="error", check="state", message=message, probe=each.probe)
                break
    if trial.changed is not None:
        message = f"it changes its argument {trial.changed!r}; work on a copy"
        yield CheckFinding(severity="error", check="arguments", message=message)


# ---- what it pays for ----
def _gold(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Yield what it makes of the expected answer, where it needs one."""
    if not trial.needs_gold or not trial.numbers:
        return
    if not trial.spans:
        message = "right and wrong answers get the same in every form; give rows and options with which they do not"
        yield CheckFinding(severity="warning", check="gold", message=message)
    if trial.group and trial.without_gold is not None:
        given = trial.without_gold
        what = _cause(given) if isinstance(given, Failure) else f"gives {given:g}"
        message = f"a row without an answer (None): {what}; return None where the reward does not apply"
        yield CheckFinding(severity="warning", check="no_answer", message=message, probe=trial.group[0].probe)
    for each in trial.of_nothing:
        low, _ = trial.spans.get(each.row, (math.inf, 0.0))
        if isinstance(each.value, float) and each.value > low + SAME:
            message = f'gets {each.value:g} in a row whose answer is "", as if it were right; return None for such rows'
            yield CheckFinding(severity="warning", check="empty_answer", message=message, probe=each.probe)
            break


def _junk(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Yield findings about junk that is paid like an answer, and about an empty reply if it is paid best."""
    best = {}
    for each, paid in _payments(trial):
        silent = each.name in ("empty", "blank") and paid > 0
        if (paid >= PAID or silent) and paid > best.get(each.name, (None, 0.0))[1]:
            best[each.name] = (each, paid)
    for each, _ in best.values():
        low, top = trial.spans[each.row]
        message = f"gets {_show(each.value)}; the best wrong answer gets {low:g}, the best right one {top:g}"
        yield CheckFinding(severity="warning", check="junk", message=message, probe=each.probe)
    values = set(trial.numbers.values())
    for row in range(len(trial.rows)):
        empty = trial.value(row, "junk", "empty")
        if empty is not None and len(values) > 1 and not trial.spans and empty >= max(values) - SAME:
            message = f"silence gets {empty:g}, and nothing gets more: good only beside a reward for being right"
            yield CheckFinding(severity="warning", check="junk", message=message, probe="empty")
            return


def _form(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Tags that are only played with, and words that only sound like reasoning."""
    for row in range(len(trial.rows)):
        without_tags = [value for name in UNTAGGED if (value := trial.value(row, "wrong", name)) is not None]
        for name, form in IMITATIONS.items():
            proper, value = trial.value(row, "wrong", form), trial.value(row, "junk", name)
            if proper is None or value is None or not without_tags:
                continue
            if max(without_tags) + SAME < proper <= value + SAME:
                message = f"gets {value:g} for its form, as tags in their order with something inside do"
                yield CheckFinding(severity="warning", check="tags", message=message, probe=name)
        for name, plainly in STUFFED.items():
            value, plain = trial.value(row, "junk", name), trial.value(row, "junk", plainly)
            if value is not None and plain is not None and value > plain + SAME:
                message = f"connectors without a thought get {value:g}, other words {plain:g}"
                yield CheckFinding(severity="warning", check="connectors", message=message, probe=name)
        if without_tags:
            return


def _length(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Words about nothing, more and more of them."""
    for row in range(len(trial.rows)):
        values = [value for name in LENGTHS if (value := trial.value(row, "junk", name)) is not None]
        if len(values) == len(LENGTHS):
            if max(values) > values[0] + SAME:
                listed = ", ".join(f"{name} get {value:g}" for name, value in zip(LENGTHS, values, strict=True))
                longest = LENGTHS[values.index(max(values))]
                message = f"length alone is paid: about nothing, {listed}"
                yield CheckFinding(severity="warning", check="length", message=message, probe=longest)
            return


def _comparison(trial: RewardTrial) -> Iterator[CheckFinding]:
    """Yield what a reward that compares gives to a place, to words that say nothing and to those who ask for it."""
    tried = trial.comparison
    if tried is None or not all(tried.by_place):
        return
    least = BIAS * tried.spread + SAME
    means = [statistics.fmean(values) for values in tried.by_place]
    if max(means) - min(means) > least:
        listed = ", ".join(f"{mean:.2f}" for mean in means)
        message = (
            f"the same completions in all orders, one vote each: on average the places get {listed}. Votes in shuffled "
            "orders make noise of that; keep `shuffle` on and `votes` even"
        )
        yield CheckFinding(severity="warning", check="position", message=message)
    if (more := _gain(tried.padded)) > least:
        message = (
            f"length is paid: the same replies get {more:.2f} more with {len(PADDING.split())} words that say nothing"
        )
        yield CheckFinding(severity="warning", check="length", message=message)
    if (more := _gain(tried.pleading)) > least:
        message = f"a wrong reply gets {more:.2f} more where it asks for the highest grade"
        yield CheckFinding(severity="warning", check="plea", message=message)


def _gain(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(after - before for before, after in pairs) if pairs else 0.0


def _payments(trial: RewardTrial) -> Iterator[tuple[Tried, float]]:
    """Yield the scored junk, with its place between the best wrong answer (0, or less) and the best right one (1)."""
    for each in trial.singles:
        if each.kind == "junk" and isinstance(each.value, float) and each.row in trial.spans:
            low, top = trial.spans[each.row]
            yield each, min(1.0, max(0.0, (each.value - low) / (top - low)))


# ---- values ----
def _equal(first: Sequence[Value], second: Sequence[Value]) -> bool:
    return all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(first: Value, second: Value) -> bool:
    """Return whether values are equal up to a reward model's rounding in another batch."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-6)
    return type(first) is type(second)


def _cause(value: Value) -> str:
    return value.cause if isinstance(value, Failure) else ""


def _show(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else "None" if value is None else "a failure"
