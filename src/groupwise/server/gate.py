"""The gate: which versions that jobs made go live (`gate` of the configuration), and the trials after it.

    judge_trial   of a canary: ratings and errors under two versions -> go on, promote or roll back: pure
    judge_shadow  of a shadow (`server.shadow`): pairs of answers and errors -> the same: pure
    Gatekeeper    asked by the supervisor about each published version; watches the trial while `watch` runs

The gate evaluates the new version and the active one on the held-out prompts (`run.evaluate`), and lets the new one
pass only if it is not worse than that and than the best one that ever went live through the gate (`run.verdict`). What
the best one did on the held-out prompts is a setting beside the feedback (BEST): nothing is sampled for it again. It is
forgotten when prompts, rewards or sampling of the gate change, and when somebody activates a version by hand: from then
on that version is the best.

A refused version stays in the store with the reason and is not continued by its name; it can be activated by hand. A
trial (a shadow, then a canary) survives restarts and kills: what is on trial, for how long a server has answered by it,
how many of its requests failed and what pairs were compared are settings beside the feedback, as of the last look
(WATCH_S).
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
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from groupwise.config.learn import CanaryConfig, GateConfig, ShadowConfig
from groupwise.errors import GroupwiseError, RequestError
from groupwise.model.chat import encode_prompt
from groupwise.rewards.scorer import Scorer
from groupwise.run.evaluate import Evaluation, evaluate
from groupwise.run.verdict import Measured, Verdict, divergence, judge, measured, resampled_means, within_bounds
from groupwise.server.learn import open_scorer
from groupwise.server.policies import Trial
from groupwise.server.shadow import Shadow
from groupwise.server.state import Parts
from groupwise.store.ledger import Job
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.rollout_sources import SingleTurnRollouts
from groupwise.types import PolicyVersion, SamplingParams

WATCH_S = 2.0
LEAST_RATINGS = 5  # of each version, before ratings alone roll a trial back, or decide it when its time is over
TRIAL = "gate.trial"  # the setting: what is on trial
COUNTS = "gate.trial.counts"  # the setting: `Trial.counts`
BEST = "gate.best"  # the setting: what the best version that went live did on the held-out prompts
SEED = 0  # both versions answer with the same draws, so that equal versions give equal answers

Outcome = Literal["go on", "promote", "roll back"]
Decision = Literal["activate", "refused", "trial", "wait"]

log = logging.getLogger(__name__)
clock = time.monotonic


# ---- the trials ----
def failing(requests: tuple[int, int], errors: tuple[int, int], *, max_errors: int) -> str | None:
    """Return why a version on trial fails too often, (under the new, under the old); None if it does not."""
    shares = [failed / asked if asked else 0.0 for failed, asked in zip(errors, requests, strict=True)]
    if errors[0] < max_errors or shares[0] <= shares[1]:
        return None
    return f"{errors[0]} of {requests[0]} requests failed under it, {shares[1]:.1%} under the active one"


def judge_shadow(trial: Trial, *, config: ShadowConfig, scored: bool) -> tuple[Outcome, Verdict]:
    """Return what becomes of a shadow, and why. `scored`: its pairs have rewards."""
    requests, errors = ((each[True], each[False]) for each in (trial.requests, trial.errors))
    if why := failing(requests, errors, max_errors=config.max_errors):
        return "roll back", Verdict(passed=False, reason=why)
    pairs = trial.pairs
    if len(pairs) < config.requests:
        told = f"{len(pairs)} of {config.requests} pairs of answers are compared"
        if trial.seconds < 60 * config.minutes:
            return "go on", Verdict(passed=False, reason=told)
        passed = config.undecided == "promote"
        reason = f"{trial.seconds / 60:.0f} minutes were over, and {told} (shadow.undecided is {config.undecided})"
        return "promote" if passed else "roll back", Verdict(passed=passed, reason=reason)
    new, old = (
        Measured(
            rewards=[math.nan if pair.rewards is None else pair.rewards[side] for pair in pairs],
            length=fmean(pair.tokens[side] for pair in pairs),
        )
        for side in (0, 1)
    )
    gaps = [(pair.gap, pair.tokens[0]) for pair in pairs if pair.gap is not None]
    kl = sum(gap for gap, _ in gaps) / max(1, sum(tokens for _, tokens in gaps)) if gaps else None
    if scored:
        verdict = judge(new, old, kl=kl, bounds=config, key="gate.shadow", prompts="shadowed")
    else:
        problems, numbers = within_bounds(new, old, kl=kl, bounds=config, key="gate.shadow")
        passed = f"{len(pairs)} answers are within the bounds of gate.shadow"
        numbers = {"prompts": float(len(pairs)), **numbers}
        verdict = Verdict(passed=not problems, reason="; ".join(problems) or passed, numbers=numbers)
    return "promote" if verdict.passed else "roll back", verdict


def judge_trial(
    new: Sequence[float],
    old: Sequence[float],
    *,
    config: CanaryConfig,
    minutes: float,
    requests: tuple[int, int] = (0, 0),
    errors: tuple[int, int] = (0, 0),
) -> tuple[Outcome, str]:
    """Return what becomes of a canary, and why. `new` and `old` are the ratings that both versions got since it began;
    `requests` and `errors` are (under the new, under the old)."""
    if why := failing(requests, errors, max_errors=config.max_errors):
        return "roll back", why
    means = (fmean(new) if new else math.nan, fmean(old) if old else math.nan)
    told = f"mean rating {means[0]:.3f} of {len(new)}, that of the active version {means[1]:.3f} of {len(old)}"
    if min(len(new), len(old)) >= LEAST_RATINGS:
        drawn = [resampled_means(each, seed=SEED + i) for i, each in enumerate((new, old))]
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

    def __init__(self, parts: Parts, config: GateConfig):
        self._parts, self._config = parts, config
        folder, tokenizer = parts.config.folder, parts.base.tokenizer
        self._scorer = open_scorer(config.rewards, config.scoring, folder=folder)
        self._shadow_scorer: Scorer | None = None
        self.shadow = None if config.shadow is None else self._open_shadow(config.shadow)
        context = parts.engine.context_length
        source = open_prompts(config.prompts, folder=folder)
        self._prompts = [encode_prompt(prompt, tokenizer, context=context) for prompt in source.known]
        self._play = SingleTurnRollouts(parts.engine, tokenizer)
        self._fingerprint = self._hash_of_measuring()
        self._looked = clock()  # when the clock of the trial was last read
        self._noted: Trial | None = None  # the shadow that has passed, and was told of
        self._restore()

    def _open_shadow(self, config: ShadowConfig) -> Shadow:
        self._shadow_scorer = self._scorer
        if config.rewards is not None:
            folder, scoring = self._parts.config.folder, self._config.scoring
            self._shadow_scorer = open_scorer(config.rewards, scoring, folder=folder) if config.rewards else None
        try:
            return Shadow(self._parts, config, self._shadow_scorer)
        except GroupwiseError:
            self.close()
            raise

    def _restore(self) -> None:
        """Go on with the trial that there was when the server ended, or say that the configuration has none now."""
        book = self._parts.feedback
        kept = book.setting(TRIAL)
        if kept is None:
            return
        if self._config_of(kept) is None:
            message = f"{kept['version']} is not on trial any more: gate.{kept.get('stage', 'canary')} is not set"
            log.warning("%s", message)
            data = {"version": kept["version"], "against": kept["against"]}
            book.note("trial_ended", message, data=data, settings={TRIAL: None})
            return
        self._begin(kept)
        if (counts := book.setting(COUNTS)) is not None and self.trial is not None:
            self.trial.go_on(counts)

    def _config_of(self, kept: Mapping[str, Any]) -> ShadowConfig | CanaryConfig | None:
        """Return the configuration of what is on trial."""
        return self._config.shadow if kept.get("stage") == "shadow" else self._config.canary

    def _begin(self, kept: Mapping[str, Any]) -> None:
        config = self._config_of(kept)
        assert config is not None
        self._parts.policies.trial = Trial(
            version=PolicyVersion.parse(kept["version"]),
            against=PolicyVersion.parse(kept["against"]),
            share=config.share,
            since=float(kept["since"]),
            after=int(kept.get("after", 0)),
            stage="shadow" if isinstance(config, ShadowConfig) else "canary",
        )
        self._looked = clock()

    async def _count(self, trial: Trial) -> None:
        """Move the trial's clock on, and keep it and the counts: nobody rates while the server is away, so the clock
        stands still then, and goes on after a restart."""
        now = clock()
        trial.seconds, self._looked = trial.seconds + now - self._looked, now
        await asyncio.to_thread(self._parts.feedback.set, COUNTS, trial.counts)

    def _hash_of_measuring(self) -> str:
        """Another value whenever other held-out rewards could come of the same version."""
        config = self._config
        told = config.model_dump(mode="json", include={"rewards", "samples", "temperature", "max_tokens"})
        digest = hashlib.sha256(json.dumps([told, self._parts.base.hash], sort_keys=True).encode())
        for prompt in self._prompts:
            digest.update(repr((prompt.token_ids, sorted(prompt.columns.items()))).encode())
        for module in sorted({each.function.__module__ for each in self._scorer.functions}):
            if source := getattr(sys.modules.get(module), "__file__", None):
                digest.update(Path(source).read_bytes())
        return digest.hexdigest()

    # --- the best version that went live ---

    async def _best(self, active: PolicyVersion) -> tuple[str, Measured] | None:
        """Return the best version, by its name, and what it did; None if it is the active one, or nothing is known."""
        kept = await asyncio.to_thread(self._parts.feedback.setting, BEST)
        if kept is None or kept["fingerprint"] != self._fingerprint or str(active) not in kept["live"]:
            return None
        best = kept["best"] if kept["live"][-1] == str(active) else kept["before"]  # or else its swap did not succeed
        return None if best["version"] == str(active) else (best["version"], Measured.from_dict(best))

    def _best_after(self, trial: Mapping[str, Any], *, by_hand: bool = False) -> dict[str, Any]:
        """Return the setting BEST when a version that passed is swapped in: the better of it and the best before; by
        hand, it. Until the swap has ended either version of `live` may be active."""
        new, before = trial["measured"], trial["best"]
        better = by_hand or not Measured.from_dict(new).reward < Measured.from_dict(before).reward
        live = [str(self._parts.policies.active), trial["version"]]
        best = new if better else before
        return {"fingerprint": trial["fingerprint"], "live": live, "best": best, "before": before}

    async def _settle_best(self) -> None:
        """Settle the best version once the swap to the newest live one is over: who goes back from it does so by
        hand."""
        kept = await asyncio.to_thread(self._parts.feedback.setting, BEST)
        if kept is not None and len(kept["live"]) > 1 and kept["live"][-1] == str(self._parts.policies.active):
            await asyncio.to_thread(self._parts.feedback.set, BEST, {**kept, "live": kept["live"][-1:]})

    @property
    def trial(self) -> Trial | None:
        """Return what is on trial."""
        return self._parts.policies.trial

    def _on_trial(self) -> Trial:
        if self.trial is None:
            raise RequestError("no version is on trial", hint="GET /v1/learn says what is")
        return self.trial

    async def decide(self, job: Job, version: PolicyVersion) -> tuple[Decision, str]:
        """Return what the supervisor does with a published version. What fails for now raises GroupwiseError: ask
        again."""
        parts, store = self._parts, self._parts.store
        if self.trial is not None:
            return (
                ("trial", "is on trial") if self.trial.version == version else ("wait", "another version is on trial")
            )
        if (refused := await asyncio.to_thread(store.refused, version)) is not None:
            return "refused", refused
        active = parts.policies.active
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
        kept = {"version": str(version), "against": str(active), "measured": new, "best": best}
        kept["fingerprint"] = self._fingerprint
        stage = "shadow" if self._config.shadow is not None else "canary"
        at_once = self._config_of({"stage": stage}) is None
        live = {BEST: self._best_after(kept)} if at_once else None
        await self._note("gate_passed", f"{version} passed the gate: {verdict.reason}", data, live)
        if at_once:
            return "activate", verdict.reason
        return "trial", f"is on trial: it {await self._try(stage, kept, data)}"

    async def _try(self, stage: str, kept: Mapping[str, Any], data: Mapping[str, Any]) -> str:
        """Begin the trial `stage`, and return what the version does in it."""
        newest, _ = await asyncio.to_thread(self._parts.feedback.newest)
        kept = {**kept, "stage": stage, "since": time.time(), "after": newest}
        config = self._config_of(kept)
        assert config is not None
        does = f"answers {config.share:.0%} of the requests{' once more, unseen' if stage == 'shadow' else ''}"
        await self._note(f"{stage}_began", f"{kept['version']} {does}", data, {TRIAL: kept})
        self._begin(kept)
        return does

    async def judge(
        self, version: PolicyVersion, active: PolicyVersion
    ) -> tuple[Verdict, dict[str, Any], dict[str, Any]]:
        """Both versions on the held-out prompts: the verdict, what the new one did, and what the best one so far did.
        Raises RewardError, EngineError, AdapterError, DeadlineError."""
        evaluated = await self._evaluated(version)
        new, old = measured(evaluated), measured(await self._evaluated(active))
        best = await self._best(active)
        kl = None if self._config.max_kl is None else await asyncio.to_thread(self._kl, evaluated, version, active)
        verdict = judge(new, old, kl=kl, bounds=self._config, best=best)
        name, best_so_far = best or (str(active), old)
        return verdict, {"version": str(version), **new.as_dict()}, {"version": name, **best_so_far.as_dict()}

    async def _evaluated(self, version: PolicyVersion) -> Evaluation:
        """Raise RewardError if nothing could be scored."""
        parts, config = self._parts, self._config
        params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
        async with parts.policies.lease(adapter=str(version), patience_s=parts.config.request_timeout_s) as leased:
            found = await evaluate(
                self._play,
                self._prompts,
                self._scorer,
                version=leased,
                params=params,
                modes=("sampled",),
                seed=SEED,
                k=config.samples,
                answer=lambda text: None,  # nothing is voted on
            )
        return found["sampled"]

    def _kl(self, evaluated: Evaluation, new: PolicyVersion, old: PolicyVersion) -> float:
        """Return the divergence. In a thread; where the sampling is greedy, at temperature 1."""
        return divergence(self._parts.engine, evaluated, new, old, temperature=self._config.temperature or 1.0)

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
        if trial is None:
            return "go on"
        if self._parts.policies.active != trial.against:
            await self._end("trial_ended", f"{trial.version} is not on trial any more: another version was activated")
            return "go on"
        await self._count(trial)
        if trial.stage == "shadow" or canary is None:
            return await self._look_at_shadow(trial)
        book = self._parts.feedback
        new, old = await asyncio.to_thread(
            lambda: [book.rated(str(version), after=trial.after) for version in (trial.version, trial.against)]
        )
        outcome, reason = judge_trial(
            new,
            old,
            config=canary,
            minutes=trial.seconds / 60,
            requests=(trial.requests[True], trial.requests[False]),
            errors=(trial.errors[True], trial.errors[False]),
        )
        if outcome == "promote":
            await self.promote(reason)
        elif outcome == "roll back":
            await self.reject(reason)
        return outcome

    async def _look_at_shadow(self, trial: Trial) -> Outcome:
        """Judge it; one that passes goes on to the canary, or live."""
        shadow = self._config.shadow
        assert shadow is not None
        outcome, verdict = judge_shadow(trial, config=shadow, scored=self._shadow_scorer is not None)
        data = {"version": str(trial.version), "against": str(trial.against), **verdict.numbers}
        if outcome == "roll back":
            await self.reject(verdict.reason, numbers=verdict.numbers)
        if outcome == "promote":
            if self._noted is not trial:  # a swap that fails for now is tried again
                await self._note("shadow_passed", f"{trial.version} passed its shadow: {verdict.reason}", data)
                self._noted = trial
            if self._config.canary is None:
                await self.promote(verdict.reason)
            else:
                await self._try("canary", await asyncio.to_thread(self._parts.feedback.setting, TRIAL), data)
        return outcome

    async def promote(self, reason: str, *, by_hand: bool = False) -> None:
        """Make the version on trial go live; `by_hand`, further versions are compared with it as the best. Raises what
        a swap raises; one that cannot be swapped in is rejected."""
        trial, book = self._on_trial(), self._parts.feedback
        kept = await asyncio.to_thread(book.setting, TRIAL)
        await asyncio.to_thread(book.set, BEST, self._best_after(kept, by_hand=by_hand))
        try:
            await self._parts.policies.swap(trial.version)
        except GroupwiseError as error:
            if error.exit_code != 75:  # not one that passes by itself
                await self.reject(error.message)
            raise
        await self._end("promoted", f"{trial.version} is active: {reason}")

    async def reject(self, reason: str, *, numbers: Mapping[str, float] | None = None) -> None:
        """End the trial of a version, which answers no more requests and stays in the store with the reason. `numbers`:
        what was measured."""
        trial = self._on_trial()
        shadow = trial.stage == "shadow"
        message = f"its shadow was refused: {reason}" if shadow else f"its canary was rolled back: {reason}"
        await asyncio.to_thread(self._parts.store.refuse, trial.version, message)
        kind, ended = ("shadow_refused", "was refused by its shadow") if shadow else ("rolled_back", "was rolled back")
        await self._end(kind, f"{trial.version} {ended}: {reason}", numbers)

    async def _end(self, kind: str, message: str, numbers: Mapping[str, float] | None = None) -> None:
        trial = self._on_trial()
        data = {"version": str(trial.version), "against": str(trial.against), **(numbers or {})}
        self._parts.policies.trial = None
        await self._note(kind, message, data, {TRIAL: None})

    async def _note(
        self, kind: str, message: str, data: Mapping[str, Any], settings: Mapping[str, Any] | None = None
    ) -> None:
        log.info("%s", message)
        await asyncio.to_thread(self._parts.feedback.note, kind, message, data=data, settings=settings)

    def close(self) -> None:
        """End the reward processes."""
        self._scorer.close()
        if self._shadow_scorer is not None and self._shadow_scorer is not self._scorer:
            self._shadow_scorer.close()
