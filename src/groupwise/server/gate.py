"""The gate: which versions that jobs made go live (`gate` of the configuration), and the canary after it.

    judge_trial  ratings and errors under two versions -> go on, promote or roll back: pure
    Gatekeeper   asked by the supervisor about each published version; watches the canary while `watch` runs

The gate evaluates the new version and the active one on the held-out prompts (`run.evaluate`), and lets the new one
pass only if it is not worse than that and than the best one that ever went live through the gate (`run.verdict`). What
the best one did on the held-out prompts is a setting beside the feedback (BEST): nothing is sampled for it again. It is
forgotten when prompts, rewards or sampling of the gate change, and when somebody activates a version by hand: from then
on that version is the best.

A refused version stays in the store with the reason and is not continued by its name; it can be activated by hand. A
trial (canary) survives restarts and kills: what is on trial, for how long a server has answered by it, and how many of
its requests failed are settings beside the feedback, the counts as of the last look (WATCH_S).
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

from groupwise.config.learn import CanaryConfig, GateConfig
from groupwise.errors import GroupwiseError, RequestError
from groupwise.model.chat import encode_prompt
from groupwise.run.evaluate import Evaluation, evaluate
from groupwise.run.verdict import Measured, Verdict, divergence, judge, measured, resampled_means
from groupwise.server.learn import open_scorer
from groupwise.server.policies import Trial
from groupwise.server.state import Server
from groupwise.store.ledger import Job
from groupwise.tasks.episode import SingleTurnRollouts
from groupwise.tasks.prompts import open_prompts
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


# ---- the canary ----
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

    def __init__(self, server: Server, config: GateConfig):
        self._server, self._config = server, config
        folder, tokenizer = server.config.folder, server.base.tokenizer
        self._scorer = open_scorer(config.rewards, config.scoring, folder=folder)
        context = server.engine.context_length
        source = open_prompts(config.prompts, folder=folder)
        self._prompts = [encode_prompt(prompt, tokenizer, context=context) for prompt in source.all()]
        self._play = SingleTurnRollouts(server.engine, tokenizer)
        self._fingerprint = self._hash_of_measuring()
        self._looked = clock()  # when the clock of the trial was last read
        self._restore()

    def _restore(self) -> None:
        """Go on with the trial that there was when the server ended."""
        kept = self._server.feedback.setting(TRIAL)
        if kept is not None and self._config.canary is not None:
            self._begin(kept, self._config.canary)
            if (counts := self._server.feedback.setting(COUNTS)) is not None and self.trial is not None:
                self.trial.go_on(counts)

    def _begin(self, kept: Mapping[str, Any], canary: CanaryConfig) -> None:
        self._server.policies.trial = Trial(
            version=PolicyVersion.parse(kept["version"]),
            against=PolicyVersion.parse(kept["against"]),
            share=canary.share,
            since=float(kept["since"]),
        )
        self._looked = clock()

    async def _count(self, trial: Trial) -> None:
        """Move the trial's clock on, and keep it and the counts: nobody rates while the server is away, so the clock
        stands still then, and goes on after a restart."""
        now = clock()
        trial.seconds, self._looked = trial.seconds + now - self._looked, now
        await asyncio.to_thread(self._server.feedback.set, COUNTS, trial.counts)

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
        return None if best["version"] == str(active) else (best["version"], Measured.from_dict(best))

    def _best_after(self, trial: Mapping[str, Any], *, by_hand: bool = False) -> dict[str, Any]:
        """The setting BEST when a version that passed is swapped in: the better of it and the best before; by hand, it.
        Until the swap has ended either version of `live` may be active."""
        new, before = trial["measured"], trial["best"]
        better = by_hand or not Measured.from_dict(new).reward < Measured.from_dict(before).reward
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
        evaluated = await self._evaluated(version)
        new, old = measured(evaluated), measured(await self._evaluated(active))
        best = await self._best(active)
        kl = None if self._config.max_kl is None else await asyncio.to_thread(self._kl, evaluated, version, active)
        verdict = judge(new, old, kl=kl, bounds=self._config, best=best)
        name, best_so_far = best or (str(active), old)
        return verdict, {"version": str(version), **new.as_dict()}, {"version": name, **best_so_far.as_dict()}

    async def _evaluated(self, version: PolicyVersion) -> Evaluation:
        """Raises RewardError if nothing could be scored."""
        server, config = self._server, self._config
        params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
        async with server.policies.lease(adapter=str(version), patience_s=server.config.request_timeout_s) as leased:
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
        """In a thread; where the sampling is greedy, at temperature 1."""
        return divergence(self._server.engine, evaluated, new, old, temperature=self._config.temperature or 1.0)

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
        await self._count(trial)
        book = self._server.feedback
        new, old = await asyncio.to_thread(
            lambda: [book.rated(str(version), since=trial.since) for version in (trial.version, trial.against)]
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
