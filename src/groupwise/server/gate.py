"""The gate: which versions that jobs made go live (`gate` of the configuration), and the trials after it.

    Gatekeeper    asked by the supervisor about each published version; watches the trial while `watch` runs, which
                  ends as `server.trials` says

The gate evaluates the new version and the active one on the held-out prompts (`run.evaluate`). The new version passes
only if it is not worse than the active one and not worse than the best one that ever went live through the gate
(`run.verdict`). All of them are evaluated again for each judged version, with the seeds of that look, so that a version
with lucky samples does not stay the measure. If the best one is not in the store any more, its results from the time
when it was judged are used. The best version (BEST) and the first one (START) are settings stored with the feedback;
both are forgotten when a person activates a version: this version is then the best and the first. The best is also
forgotten when prompts, rewards or sampling of the gate change.

The number of looks at the prompts is stored, too (LOOKS), as all versions share the error of one decision
(`algo.evidence.share_of_error`). With prompts to `confirm`, only versions that reach these prompts count.

A refused version stays in the store with the reason, and its name does not continue it; a person can activate it. A
trial (a shadow, then a canary) survives restarts and kills: the version on trial, the time for which servers have
answered by it, its failed requests and the compared pairs are settings stored with the feedback, as of the last look
(WATCH_S).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from groupwise.config.learn import CanaryConfig, GateConfig, ShadowConfig
from groupwise.errors import AdapterNotFoundError, ConfigError, GroupwiseError, RequestError
from groupwise.model.chat import encode_prompt
from groupwise.rewards.scorer import Scorer
from groupwise.run.evaluate import Evaluation, evaluate
from groupwise.run.verdict import (
    Beside,
    Look,
    Measured,
    Start,
    Verdict,
    divergence,
    drifted,
    judge,
    measured,
    too_few,
)
from groupwise.seeds import seed_of
from groupwise.server.learn import open_scorer
from groupwise.server.policies import Trial
from groupwise.server.shadow import Shadow
from groupwise.server.state import Parts
from groupwise.server.trials import (
    Outcome,
    Ratings,
    compared_ratings,
    in_turns,
    judge_canary,
    judge_shadow,
    ratings_needed,
)
from groupwise.store.ledger import Job
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.rollout_sources import SingleTurnRollouts, play_all
from groupwise.types import PolicyVersion, Prompt, RolloutGroup, SamplingParams

WATCH_S = 2.0
TRIAL = "gate.trial"  # the setting: what is on trial
COUNTS = "gate.trial.counts"  # the setting: `Trial.counts`
BEST = "gate.best"  # the setting: what the best version that went live did on the held-out prompts
START = "gate.start"  # the setting: the version from which lengths and divergence have totals
LOOKS = "gate.looks"  # the setting: how often each set of prompts was looked at
RATED = 64  # prompts whose ratings made a version, on which its lengths and divergence are measured
WORN = "gate.worn"  # the setting: the sets of prompts of which it was said that they are worn out

Decision = Literal["activate", "refused", "trial", "wait"]

log = logging.getLogger(__name__)
clock = time.monotonic


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
        sets = {"prompts": config.prompts, **({} if config.confirm is None else {"confirm": config.confirm})}
        self._sets = {
            name: [encode_prompt(each, tokenizer, context=context) for each in open_prompts(data, folder=folder).known]
            for name, data in sets.items()
        }
        self._refuse_shared()
        self._play = SingleTurnRollouts(parts.engine, tokenizer)
        self._fingerprint = self._hash_of_measuring()
        self._looked = clock()  # when the clock of the trial was last read
        self._noted: Trial | None = None  # the shadow that has passed, and was told of
        self._most = 0  # pairs or ratings at which the trial ends at the latest
        self._restore()

    def _refuse_shared(self) -> None:
        """Raise ConfigError for a prompt that confirms what it has let pass."""
        first, *others = ({prompt.token_ids for prompt in each} for each in self._sets.values())
        if shared := sum(len(first & other) for other in others):
            raise ConfigError(
                f"gate.confirm: {shared} of its prompts are in gate.prompts, too",
                hint="split the held-out prompts in two: what confirms must not be what was passed on",
                field="gate.confirm",
            )

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
        """Continue the trial of the server's last end, or report that the configuration has none now."""
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
        return self._config.shadowing if kept.get("stage") == "shadow" else self._config.canary

    def _begin(self, kept: Mapping[str, Any]) -> None:
        config = self._config_of(kept)
        assert config is not None
        is_shadow = isinstance(config, ShadowConfig)
        self._most = config.requests if is_shadow else config.ratings or ratings_needed(config)
        self._parts.policies.trial = Trial(
            version=PolicyVersion.parse(kept["version"]),
            against=PolicyVersion.parse(kept["against"]),
            share=config.share,
            since=float(kept["since"]),
            after=int(kept.get("after", 0)),
            stage="shadow" if is_shadow else "canary",
        )
        self._looked = clock()

    async def _count(self, trial: Trial) -> None:
        """Advance the trial's clock, and store it and the counts. The clock stops while the server is down, when no
        ratings can come, and continues after a restart."""
        now = clock()
        trial.seconds, self._looked = trial.seconds + now - self._looked, now
        await asyncio.to_thread(self._parts.feedback.set, COUNTS, trial.counts)

    def _hash_of_measuring(self) -> str:
        """Return a hash that changes whenever the same version could get other held-out rewards."""
        config = self._config
        told = config.model_dump(mode="json", include={"rewards", "samples", "temperature", "max_tokens"})
        digest = hashlib.sha256(json.dumps([told, self._parts.base.hash], sort_keys=True).encode())
        for prompt in self._sets["prompts"]:
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

    # --- looks at the prompts ---

    def _hash_of(self, name: str) -> str:
        """Return a hash of the prompts."""
        told = sorted(repr(prompt.token_ids) for prompt in self._sets[name])
        return hashlib.sha256("\n".join(told).encode()).hexdigest()

    async def _next_look(self, name: str) -> Look:
        """Return the look at this set of prompts that comes next; a sieve has the full error each time."""
        kept = await asyncio.to_thread(self._parts.feedback.setting, LOOKS, {})
        number = kept.get(self._hash_of(name), 0) + 1
        if name == "prompts" and "confirm" in self._sets:
            return Look(number=number, alpha=1 - self._config.confidence)
        return Look.of(self._config, number)

    async def _count_look(self, name: str, look: Look) -> None:
        """Count a look."""
        book = self._parts.feedback
        kept = await asyncio.to_thread(book.setting, LOOKS, {})
        await asyncio.to_thread(book.set, LOOKS, {**kept, self._hash_of(name): look.number})

    async def _note_worn(self) -> None:
        """Say once of a set of prompts that no version can pass any more that is not clearly better."""
        book = self._parts.feedback
        for name, prompts in self._sets.items():
            look, told = await self._next_look(name), await asyncio.to_thread(book.setting, WORN, [])
            message = too_few(len(prompts), self._config, look, key="gate")
            if message is not None and (its := self._hash_of(name)) not in told:
                data = {"prompts": len(prompts), "look": look.number, "set": name}
                await self._note("prompts_worn", f"gate.{name}: {message}", data, {WORN: [*told, its]})

    # --- where it began ---

    async def _start(self, active: PolicyVersion, old: Measured) -> tuple[PolicyVersion, Start]:
        """Return the version from which totals are counted, and the length of its answers. At first, and after a person
        activated a version, it is the active one; `old` has the active one's results."""
        book = self._parts.feedback
        kept, best = await asyncio.to_thread(book.setting, START), await asyncio.to_thread(book.setting, BEST)
        live = best["live"] if best is not None else [] if kept is None else [kept["version"]]
        by_hand = str(active) not in live
        if kept is not None and not by_hand and kept["fingerprint"] != self._fingerprint:
            try:  # it has to answer other prompts
                version = PolicyVersion.parse(kept["version"])
                length = measured(await self._evaluated(version, "prompts", seed=0)).length
                kept = {**kept, "fingerprint": self._fingerprint, "length": length}
            except AdapterNotFoundError:
                kept = None
        if kept is None or by_hand:
            kept = {"version": str(active), "fingerprint": self._fingerprint, "length": old.length}
        await asyncio.to_thread(book.set, START, kept)
        name = f"{kept['version']}, from which it all began,"
        return PolicyVersion.parse(kept["version"]), Start(name=name, length=kept["length"])

    @property
    def held_out(self) -> frozenset[tuple[int, ...]]:
        """Return the prompts that nothing is to be trained on, in token ids."""
        return frozenset(tuple(each.token_ids or ()) for prompts in self._sets.values() for each in prompts)

    @property
    def trial(self) -> Trial | None:
        """Return the trial, None without one."""
        return self._parts.policies.trial

    @property
    def most(self) -> int | None:
        """Return at how many pairs of answers (a shadow) or ratings of it (a canary) the trial ends at the latest."""
        return None if self.trial is None else self._most

    def heard(self) -> int | None:
        """Return how many ratings of its answers a canary has by now; None where there is none. Reads the disk."""
        trial, canary = self.trial, self._config.canary
        if trial is None or trial.stage == "shadow" or canary is None:
            return None
        return len(self._ratings(trial, canary)[0])

    def _ratings(self, trial: Trial, canary: CanaryConfig) -> tuple[Ratings, Ratings]:
        """Return the ratings that the version on trial and the active one got since it began. Reads the disk."""
        book, versions = self._parts.feedback, (trial.version, trial.against)
        return in_turns(*(book.rated(str(each), after=trial.after, of_one=canary.ratings_of_one) for each in versions))

    def _on_trial(self) -> Trial:
        if self.trial is None:
            raise RequestError("no version is on trial", hint="GET /v1/learn says what is")
        return self.trial

    async def decide(self, job: Job, version: PolicyVersion) -> tuple[Decision, str]:
        """Return the decision about a published version. Raises GroupwiseError for a temporary failure: ask again."""
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
        if verdict.passed:
            verdict = await self._on_rated(job, version, active, verdict)
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
        if isinstance(config, CanaryConfig):
            needed = ratings_needed(config)
            does += f", until its ratings say enough, or there are {config.ratings or needed} of them"
            if config.ratings is not None and config.ratings < needed:
                does += f"; one that is rated as {kept['against']} needs about {needed}, or a wider canary.margin"
            data = {**data, "ratings": config.ratings or needed, "ratings_needed": needed}
        await self._note(f"{stage}_began", f"{kept['version']} {does}", data, {TRIAL: kept})
        self._begin(kept)
        return does

    async def judge(
        self, version: PolicyVersion, active: PolicyVersion
    ) -> tuple[Verdict, dict[str, Any], dict[str, Any]]:
        """Return the verdict on the version compared with the active one, its results on the held-out prompts, and
        those of the best version so far. Raises RewardError, EngineError, AdapterError, DeadlineError."""
        verdict, new, best = await self._judged("prompts", version, active)
        if verdict.passed and "confirm" in self._sets:
            again, _, _ = await self._judged("confirm", version, active)
            numbers = {**verdict.numbers, **{f"confirm_{name}": value for name, value in again.numbers.items()}}
            verdict = replace(again, numbers=numbers)
        await self._note_worn()
        return verdict, new, best

    async def _judged(
        self, name: str, version: PolicyVersion, active: PolicyVersion
    ) -> tuple[Verdict, dict[str, Any], dict[str, Any]]:
        """Return `judge` on one set of prompts, which is a look at it."""
        look = await self._next_look(name)
        drawn = {"seed": look.number}  # the same for all that are compared, so that equal versions give equal answers
        evaluated = await self._evaluated(version, name, **drawn)
        new, old = measured(evaluated), measured(await self._evaluated(active, name, **drawn))
        best, known = None, await self._best(active)
        if known is not None:
            try:
                did = measured(await self._evaluated(PolicyVersion.parse(known[0]), name, **drawn))
                best = Beside(name=known[0], new=new, old=did)
            except AdapterNotFoundError:  # it is not kept any more
                best = Beside(name=known[0], new=new, old=known[1]) if name == "prompts" else None
        begun, start = await self._start(active, old) if name == "prompts" else (active, None)
        if start is not None and self._config.max_kl_total is not None:
            start = replace(start, kl=await self._kl(evaluated, version, begun))
        kl = None if self._config.max_kl is None else await self._kl(evaluated, version, active)
        words = {"prompts": "held-out" if name == "prompts" else "confirming"}
        verdict = judge(new, old, kl=kl, bounds=self._config, look=look, best=best, start=start, **words)
        await self._count_look(name, look)
        its_best = (str(active), old) if best is None else (best.name, best.old)
        return verdict, {"version": str(version), **new.as_dict()}, {"version": its_best[0], **its_best[1].as_dict()}

    async def _on_rated(self, job: Job, version: PolicyVersion, active: PolicyVersion, verdict: Verdict) -> Verdict:
        """Return the verdict, refused where lengths or divergence are out of bounds on what the job was rated for."""
        config, look = self._config, int(verdict.numbers["look"])
        ids = await asyncio.to_thread(self._parts.feedback.prompts_of, job.id, limit=RATED)
        if not ids:
            return verdict
        prompts = [Prompt(id=str(place), text="", token_ids=each) for place, each in enumerate(ids)]
        new, old = [
            Evaluation(mode="sampled", version=each, groups=tuple(await self._answers(prompts, each, seed=look)))
            for each in (version, active)
        ]
        wanted = config.max_kl is not None or config.max_kl_rated is not None
        kl = await self._kl(new, version, active) if wanted else None
        before = Start(name="the active version on prompts that were rated", length=measured(old).length, kl=kl)
        most = ("gate.max_kl_rated", config.max_kl_rated), ("gate.max_length_ratio", config.max_length_ratio)
        problems, numbers = drifted(measured(new), before, *most)
        told = {**verdict.numbers, **{f"{name}_rated": value for name, value in numbers.items()}}
        reason = "; ".join(problems) or verdict.reason
        return Verdict(passed=not problems, reason=reason, numbers=told)

    async def _answers(self, prompts: Sequence[Prompt], version: PolicyVersion, *, seed: int) -> list[RolloutGroup]:
        """Return a completion of each prompt, unscored."""
        patience_s, config = self._parts.config.request_timeout_s, self._config
        params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
        seeds = [seed_of("rated", seed, place) >> 2 for place in range(len(prompts))]
        async with self._parts.policies.lease(adapter=str(version), patience_s=patience_s) as leased:
            return await play_all(self._play, prompts, seeds=seeds, n=1, params=params, version=leased)

    async def _evaluated(self, version: PolicyVersion, name: str, *, seed: int) -> Evaluation:
        """Raise RewardError if nothing could be scored."""
        parts, config = self._parts, self._config
        params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
        async with parts.policies.lease(adapter=str(version), patience_s=parts.config.request_timeout_s) as leased:
            found = await evaluate(
                self._play,
                self._sets[name],
                self._scorer,
                version=leased,
                params=params,
                modes=("sampled",),
                seed=seed,
                k=config.samples,
                answer=lambda text: None,  # nothing is voted on
            )
        return found["sampled"]

    async def _kl(self, evaluated: Evaluation, new: PolicyVersion, old: PolicyVersion) -> float:
        """Return the divergence; where the sampling is greedy, at temperature 1."""
        policies, patience_s = self._parts.policies, self._parts.config.request_timeout_s
        temperature = self._config.temperature or 1.0
        async with AsyncExitStack() as held:
            for version in (new, old):
                await held.enter_async_context(policies.lease(adapter=str(version), patience_s=patience_s))
            return await asyncio.to_thread(divergence, self._parts.engine, evaluated, new, old, temperature=temperature)

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
        new, old = await asyncio.to_thread(self._ratings, trial, canary)
        outcome, reason = judge_canary(
            new,
            old,
            config=canary,
            minutes=trial.seconds / 60,
            requests=(trial.requests[True], trial.requests[False]),
            errors=(trial.errors[True], trial.errors[False]),
        )
        if outcome == "promote":
            await self.promote(reason, numbers=compared_ratings(new, old))
        elif outcome == "roll back":
            await self.reject(reason, numbers=compared_ratings(new, old))
        return outcome

    async def _look_at_shadow(self, trial: Trial) -> Outcome:
        """Judge it; one that passes continues to the canary, or live."""
        shadow = self._config.shadowing
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

    async def promote(self, reason: str, *, by_hand: bool = False, numbers: Mapping[str, float] | None = None) -> None:
        """Make the version on trial go live; `by_hand`, further versions are compared with it as the best. `numbers`:
        what was measured. Raises what a swap raises; one that cannot be swapped in is rejected."""
        trial, book = self._on_trial(), self._parts.feedback
        kept = await asyncio.to_thread(book.setting, TRIAL)
        await asyncio.to_thread(book.set, BEST, self._best_after(kept, by_hand=by_hand))
        try:
            await self._parts.policies.swap(trial.version)
        except GroupwiseError as error:
            if error.exit_code != 75:  # not one that passes by itself
                await self.reject(error.message)
            raise
        await self._end("promoted", f"{trial.version} is active: {reason}", numbers)

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
        data = {"version": str(trial.version), "against": str(trial.against), "stage": trial.stage, **(numbers or {})}
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
