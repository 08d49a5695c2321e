"""The gate: which versions that jobs made go live (`gate` of the configuration), and the canary after it.

    compare      held-out rewards, lengths and KL of two versions -> a Verdict: pure
    judge_trial  ratings and errors under two versions -> go on, promote or roll back: pure
    Gatekeeper   asked by the supervisor about each published version; watches the canary while `watch` runs

The gate samples the held-out prompts from the new version and from the active one, and lets the new one pass only if it
is not worse. With d_p the difference of the mean rewards of prompt p, the lower bound of a one-sided bootstrap interval
of the mean of d (resampled over prompts, Efron 1979) must be at least -margin: non-inferiority. The KL is the mean over
the new version's tokens of log p_new - log p_active, an estimate of KL(new || active) in nats a token.

Losses within the margin would add up over versions that are each compared with the one before, so a version must pass
the same test against the best one that ever went live through the gate, too. What that one did on the held-out prompts
is a setting beside the feedback (BEST): nothing is sampled for it again. It is forgotten when prompts, rewards or
sampling of the gate change, and when somebody activates a version by hand: from then on that version is the best.

A refused version stays in the store with the reason and is not continued by its name; it can be activated by hand. A
trial (canary) survives restarts: what is on trial is a setting beside the feedback; the counts of errors begin anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from groupwise.config.learn import CanaryConfig, GateConfig
from groupwise.errors import GroupwiseError, RequestError
from groupwise.model.chat import encode_prompt
from groupwise.rewards.base import refuse_failed
from groupwise.server.learn import open_scorer
from groupwise.server.policies import Trial
from groupwise.server.sampling import Generation
from groupwise.server.state import Server
from groupwise.store.ledger import Job
from groupwise.tasks.episode import group_of
from groupwise.tasks.prompts import open_prompts
from groupwise.types import (
    Completion,
    PolicyVersion,
    SamplingParams,
    SamplingRequest,
)

RESAMPLES = 2000
WATCH_S = 2.0
LEAST_RATINGS = 5  # of each version, before ratings alone roll a trial back, or decide it when its time is over
TRIAL = "gate.trial"  # the setting: what is on trial
BEST = "gate.best"  # the setting: what the best version that went live did on the held-out prompts
SEED = 0  # both versions answer with the same draws, so that equal versions give equal answers

Outcome = Literal["go on", "promote", "roll back"]
Decision = Literal["activate", "refused", "trial", "wait"]

log = logging.getLogger(__name__)


# ---- comparing two versions ----
@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one version did on the held-out prompts: the mean reward of each prompt (nan where none could be scored),
    and the mean length of its completions in tokens."""

    rewards: Sequence[float]
    length: float

    @property
    def reward(self) -> float:
        """The mean over the prompts that could be scored; nan without any."""
        known = [each for each in self.rewards if math.isfinite(each)]
        return fmean(known) if known else math.nan


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a version passes, why, and what was measured."""

    passed: bool
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def lower_bound(differences: Sequence[float], *, confidence: float, seed: int = SEED) -> float:
    """The one-sided lower confidence bound of the mean of paired differences, by the percentile bootstrap."""
    values = np.asarray(differences, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    return float(np.quantile(values[drawn].mean(axis=1), 1.0 - confidence))


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How two versions compare on the prompts that were scored for both: the mean rewards, the mean of the paired
    differences, and its lower confidence bound."""

    prompts: int
    new: float
    old: float
    difference: float
    bound: float


def margin_between(new: Measured, old: Measured, *, confidence: float) -> Margin | None:
    """None if no prompt was scored for both."""
    both = [(n, o) for n, o in zip(new.rewards, old.rewards, strict=True) if math.isfinite(n) and math.isfinite(o)]
    if not both:
        return None
    differences = [n - o for n, o in both]
    return Margin(
        prompts=len(both),
        new=fmean(n for n, _ in both),
        old=fmean(o for _, o in both),
        difference=fmean(differences),
        bound=lower_bound(differences, confidence=confidence),
    )


def compare(
    new: Measured, old: Measured, *, kl: float | None, config: GateConfig, best: tuple[str, Measured] | None = None
) -> Verdict:
    """Whether `new` may take the place of `old`. `kl` is in nats a token; None was not measured. `best` is the best
    version that ever passed, by its name, if that is not `old`: `new` must be non-inferior to both."""
    found = margin_between(new, old, confidence=config.confidence)
    beside = margin_between(new, best[1], confidence=config.confidence) if best else None
    if found is None or (best is not None and beside is None):
        return Verdict(passed=False, reason="no held-out prompt could be scored for both versions")
    ratio = new.length / old.length if old.length else 1.0
    numbers = {
        "prompts": float(found.prompts),
        "reward": found.new,
        "reward_active": found.old,
        "difference": found.difference,
        "lower_bound": found.bound,
        "length_ratio": ratio,
        **({} if kl is None else {"kl": kl}),
        **({} if beside is None else {"reward_best": beside.old, "lower_bound_best": beside.bound}),
    }
    problems = []
    others = [("the active version", found)]
    if best is not None and beside is not None:
        others.append((f"{best[0]}, the best that went live,", beside))
    for other, margin in others:
        if margin.bound < -config.margin:
            problems.append(
                f"its held-out reward is {margin.new:.3f}, that of {other} {margin.old:.3f}; it may be "
                f"{-margin.bound:.3f} lower (confidence {config.confidence:.0%}), and gate.margin is {config.margin:g}"
            )
    if kl is not None and config.max_kl is not None and not kl <= config.max_kl:
        problems.append(f"its KL from the active version is {kl:.4f} nats a token; gate.max_kl is {config.max_kl:g}")
    most = config.max_length_ratio
    if most is not None and not 1 / most <= ratio <= most:
        words = f"its completions are {ratio:.2f} times as long as those of the active version"
        problems.append(f"{words}; gate.max_length_ratio is {most:g}")
    passed = f"held-out reward {found.new:.3f}, before {found.old:.3f}"
    return Verdict(passed=not problems, reason="; ".join(problems) or passed, numbers=numbers)


def judge_trial(
    new: Sequence[float],
    old: Sequence[float],
    *,
    config: CanaryConfig,
    minutes: float,
    requests: tuple[int, int] = (0, 0),
    errors: tuple[int, int] = (0, 0),
) -> tuple[Outcome, str]:
    """What becomes of a trial, and why. `new` and `old` are the ratings that both versions got since it began;
    `requests` and `errors` are (under the new, under the old)."""
    shares = [failed / asked if asked else 0.0 for failed, asked in zip(errors, requests, strict=True)]
    if errors[0] >= config.max_errors and shares[0] > shares[1]:
        return (
            "roll back",
            f"{errors[0]} of {requests[0]} requests failed under it, {shares[1]:.1%} under the active one",
        )
    means = (fmean(new) if new else math.nan, fmean(old) if old else math.nan)
    told = f"mean rating {means[0]:.3f} of {len(new)}, that of the active version {means[1]:.3f} of {len(old)}"
    if min(len(new), len(old)) >= LEAST_RATINGS:
        rng = np.random.default_rng(SEED)
        drawn = [rng.choice(np.asarray(each), size=(RESAMPLES, len(each))).mean(axis=1) for each in (new, old)]
        if float((drawn[0] - drawn[1] < -config.margin).mean()) >= config.confidence:
            return "roll back", told
    over, compared = minutes >= config.minutes, min(len(new), len(old)) >= LEAST_RATINGS
    if (len(new) >= config.ratings and len(old) >= 2) or (over and compared):
        return ("roll back" if means[0] < means[1] - config.margin else "promote"), told
    if over:
        words = f"{minutes:.0f} minutes were over with {len(new)} ratings of it and {len(old)} of the active version"
        outcome: Outcome = "promote" if config.undecided == "promote" else "roll back"
        return outcome, f"{words} (canary.undecided is {config.undecided})"
    return "go on", told


# ---- the gate of a server ----
class Gatekeeper:
    """Decides about the versions of one server. Reads the prompts and loads the rewards when it is made.

    Raises ConfigError, DataError, LoadError, ChatError or ContextLengthError for a gate that cannot work.
    """

    def __init__(self, server: Server, config: GateConfig):
        self._server, self._config = server, config
        folder, tokenizer = server.config.folder, server.base.tokenizer
        self._scorer = open_scorer(config.rewards, config.scoring, folder=folder)
        context = server.engine.context_length
        source = open_prompts(config.prompts, folder=folder)
        self._prompts = [encode_prompt(prompt, tokenizer, context=context) for prompt in source.all()]
        self._fingerprint = self._hash_of_measuring()
        self._began = time.time()
        self._restore()

    def _restore(self) -> None:
        """Go on with the trial that there was when the server ended."""
        kept = self._server.feedback.setting(TRIAL)
        if kept is not None and self._config.canary is not None:
            self._begin(kept, self._config.canary)

    def _begin(self, kept: Mapping[str, Any], canary: CanaryConfig) -> None:
        self._server.policies.trial = Trial(
            version=PolicyVersion.parse(kept["version"]),
            against=PolicyVersion.parse(kept["against"]),
            share=canary.share,
            since=float(kept["since"]),
        )

    def _hash_of_measuring(self) -> str:
        """Another value whenever other held-out rewards could come of the same version."""
        config = self._config
        told = config.model_dump(mode="json", include={"rewards", "samples", "temperature", "max_tokens"})
        digest = hashlib.sha256(json.dumps([told, self._server.base.hash], sort_keys=True).encode())
        for prompt in self._prompts:
            digest.update(repr((prompt.token_ids, sorted(prompt.columns.items()))).encode())
        for module in sorted({each.function.__module__ for each in self._scorer.functions}):
            if source := getattr(sys.modules.get(module), "__file__", None):
                digest.update(Path(source).read_bytes())
        return digest.hexdigest()

    # --- the best version that went live ---

    async def _best(self, active: PolicyVersion) -> tuple[str, Measured] | None:
        """The best version, by its name, and what it did; None if it is the active one, or nothing is known."""
        kept = await asyncio.to_thread(self._server.feedback.setting, BEST)
        if kept is None or kept["fingerprint"] != self._fingerprint or str(active) not in kept["live"]:
            return None
        best = kept["best"] if kept["live"][-1] == str(active) else kept["before"]  # or else its swap did not succeed
        return None if best["version"] == str(active) else (best["version"], _measured_of(best))

    def _best_after(self, trial: Mapping[str, Any], *, by_hand: bool = False) -> dict[str, Any]:
        """The setting BEST when a version that passed is swapped in: the better of it and the best before; by hand, it.
        Until the swap has ended either version of `live` may be active."""
        new, before = trial["measured"], trial["best"]
        better = by_hand or not _measured_of(new).reward < _measured_of(before).reward
        live = [str(self._server.policies.active), trial["version"]]
        best = new if better else before
        return {"fingerprint": trial["fingerprint"], "live": live, "best": best, "before": before}

    async def _settle_best(self) -> None:
        """The swap to the newest live version is over: who goes back from it does so by hand."""
        kept = await asyncio.to_thread(self._server.feedback.setting, BEST)
        if kept is not None and len(kept["live"]) > 1 and kept["live"][-1] == str(self._server.policies.active):
            await asyncio.to_thread(self._server.feedback.set, BEST, {**kept, "live": kept["live"][-1:]})

    @property
    def trial(self) -> Trial | None:
        """What is on trial."""
        return self._server.policies.trial

    def _on_trial(self) -> Trial:
        if self.trial is None:
            raise RequestError("no version is on trial", hint="GET /v1/learn says what is")
        return self.trial

    async def decide(self, job: Job, version: PolicyVersion) -> tuple[Decision, str]:
        """What the supervisor does with a published version. What fails for now raises GroupwiseError: ask again."""
        server, store = self._server, self._server.store
        if self.trial is not None:
            return (
                ("trial", "is on trial") if self.trial.version == version else ("wait", "another version is on trial")
            )
        if (refused := await asyncio.to_thread(store.refused, version)) is not None:
            return "refused", refused
        active = server.policies.active
        if active == version:
            return "activate", "is active already"
        await self._settle_best()
        verdict, new, best = await self.judge(version, active)
        data = {"version": str(version), "against": str(active), "job_id": job.id, **verdict.numbers}
        if not verdict.passed:
            reason = f"the gate refused it: {verdict.reason}"
            await asyncio.to_thread(store.refuse, version, reason)
            await self._note("gate_refused", f"{version} was refused: {verdict.reason}", data)
            return "refused", reason
        kept = {"version": str(version), "against": str(active), "since": time.time(), "measured": new, "best": best}
        kept["fingerprint"] = self._fingerprint
        live = {BEST: self._best_after(kept)} if self._config.canary is None else None
        await self._note("gate_passed", f"{version} passed the gate: {verdict.reason}", data, live)
        if self._config.canary is None:
            return "activate", verdict.reason
        share = self._config.canary.share
        await self._note("canary_began", f"{version} answers {share:.0%} of the requests", data, {TRIAL: kept})
        self._begin(kept, self._config.canary)
        return "trial", f"is on trial: it answers {share:.0%} of the requests"

    async def judge(
        self, version: PolicyVersion, active: PolicyVersion
    ) -> tuple[Verdict, dict[str, Any], dict[str, Any]]:
        """Both versions on the held-out prompts: the verdict, what the new one did, and what the best one so far did.
        Raises RewardError, EngineError, AdapterError, DeadlineError."""
        new_groups, old_groups = await self._sampled(version), await self._sampled(active)
        new, old = await self._measured(new_groups), await self._measured(old_groups)
        best = await self._best(active)
        kl = None if self._config.max_kl is None else await asyncio.to_thread(self._kl, new_groups, version, active)
        verdict = compare(new, old, kl=kl, config=self._config, best=best)
        return verdict, _kept(str(version), new), _kept(*(best or (str(active), old)))

    async def _sampled(self, version: PolicyVersion) -> list[list[Completion]]:
        server, config = self._server, self._config
        requests = []
        async with server.policies.lease(adapter=str(version), patience_s=server.config.request_timeout_s) as leased:
            for index, prompt in enumerate(self._prompts):
                room = server.engine.context_length - len(prompt.token_ids)
                params = SamplingParams(
                    temperature=config.temperature, max_tokens=max(1, min(config.max_tokens, room)), seed=SEED + index
                )
                request = SamplingRequest(prompt_ids=prompt.token_ids, params=params, n=config.samples, version=leased)
                requests.append(request)
            generation = Generation(server.engine, requests, timeout_s=server.config.request_timeout_s)
            return await generation.completions()

    async def _measured(self, groups: Sequence[Sequence[Completion]]) -> Measured:
        """Raises RewardError if nothing could be scored."""
        made = [group_of(prompt, group) for prompt, group in zip(self._prompts, groups, strict=True)]
        scored = await asyncio.gather(*map(self._scorer, made))
        refuse_failed(scored)
        rewards = [[each.reward for each in group.rollouts if each.reward is not None] for group in scored]
        lengths = [len(completion.token_ids) for group in groups for completion in group]
        return Measured(rewards=[fmean(each) if each else math.nan for each in rewards], length=fmean(lengths))

    def _kl(self, groups: Sequence[Sequence[Completion]], new: PolicyVersion, old: PolicyVersion) -> float:
        """The mean over the tokens that `new` sampled of log p_new - log p_old, both at the sampling temperature, or at
        1 where that is greedy. In a thread."""
        score, temperature, gaps = self._server.engine.score, self._config.temperature or 1.0, list[float]()
        for prompt, group in zip(self._prompts, groups, strict=True):
            for completion in group:
                ids = (prompt.token_ids, completion.token_ids)
                ours, theirs = (score(*ids, version, temperature=temperature) for version in (new, old))
                gaps += [a - b for a, b in zip(ours, theirs, strict=True)]
        return fmean(gaps) if gaps else 0.0

    # --- the trial ---

    async def watch(self) -> None:
        """Look at the trial again and again; a failure is logged, and the next look may succeed."""
        while True:
            try:
                await self.look()
            except GroupwiseError as error:
                log.warning("the trial was not judged: %s", error)
            except Exception:
                log.exception("the trial was not judged")
            await asyncio.sleep(WATCH_S)

    async def look(self) -> Outcome:
        """Judge the trial, and end it if it is time."""
        await self._settle_best()
        trial, canary = self.trial, self._config.canary
        if trial is None or canary is None:
            return "go on"
        if self._server.policies.active != trial.against:
            await self._end("trial_ended", f"{trial.version} is not on trial any more: another version was activated")
            return "go on"
        book = self._server.feedback
        new, old = await asyncio.to_thread(
            lambda: [book.rated(str(version), since=trial.since) for version in (trial.version, trial.against)]
        )
        outcome, reason = judge_trial(
            new,
            old,
            config=canary,
            minutes=(time.time() - max(trial.since, self._began)) / 60,  # nobody rates while the server is away
            requests=(trial.requests[True], trial.requests[False]),
            errors=(trial.errors[True], trial.errors[False]),
        )
        if outcome == "promote":
            await self.promote(reason)
        elif outcome == "roll back":
            await self.reject(reason)
        return outcome

    async def promote(self, reason: str, *, by_hand: bool = False) -> None:
        """The version on trial goes live; `by_hand`, further versions are compared with it as the best. Raises what a
        swap raises; one that cannot be swapped in is rejected."""
        trial, book = self._on_trial(), self._server.feedback
        kept = await asyncio.to_thread(book.setting, TRIAL)
        await asyncio.to_thread(book.set, BEST, self._best_after(kept, by_hand=by_hand))
        try:
            await self._server.policies.swap(trial.version)
        except GroupwiseError as error:
            if error.exit_code != 75:  # not one that passes by itself
                await self.reject(error.message)
            raise
        await self._end("promoted", f"{trial.version} is active: {reason}")

    async def reject(self, reason: str) -> None:
        """The version on trial answers no more requests, and stays in the store with the reason."""
        trial = self._on_trial()
        message = f"its canary was rolled back: {reason}"
        await asyncio.to_thread(self._server.store.refuse, trial.version, message)
        await self._end("rolled_back", f"{trial.version} was rolled back: {reason}")

    async def _end(self, kind: str, message: str) -> None:
        trial = self._on_trial()
        data = {"version": str(trial.version), "against": str(trial.against)}
        self._server.policies.trial = None
        await self._note(kind, message, data, {TRIAL: None})

    async def _note(
        self, kind: str, message: str, data: Mapping[str, Any], settings: Mapping[str, Any] | None = None
    ) -> None:
        log.info("%s", message)
        await asyncio.to_thread(self._server.feedback.note, kind, message, data=data, settings=settings)

    def close(self) -> None:
        """End the reward processes."""
        self._scorer.close()


def _kept(version: str, measured: Measured) -> dict[str, Any]:
    """As it is kept in a setting: JSON has no nan."""
    rewards = [each if math.isfinite(each) else None for each in measured.rewards]
    return {"version": version, "rewards": rewards, "length": measured.length}


def _measured_of(kept: Mapping[str, Any]) -> Measured:
    rewards = [math.nan if each is None else each for each in kept["rewards"]]
    return Measured(rewards=rewards, length=kept["length"])
