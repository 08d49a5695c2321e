"""Evaluation: the modes, the means and their breakdown, with the real engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from random import Random

import pytest
import torch

from groupwise.engine.local import LocalEngine
from groupwise.errors import ContextLengthError, DataError, RewardError
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.math import final_answer
from groupwise.rewards.scorer import Scorer
from groupwise.run.evaluate import (
    BestVersion,
    Evaluation,
    compare,
    evaluate,
    load_evaluations,
    majority,
    paired,
    paired_tests,
    pass_at_k,
    prepare_all,
    save_evaluations,
)
from groupwise.tasks.rollout_sources import SingleTurnRollouts
from groupwise.types import FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, SamplingParams
from wording import raises

BASE = PolicyVersion.base()
PROMPTS = [Prompt(id=str(i), text=f"{i}+{i}=", columns={"skill": ("add", "sub")[i % 2], "gold": i}) for i in range(4)]


@pytest.fixture
def engine(make_base) -> Iterator[LocalEngine]:
    engine = LocalEngine(make_base(dtype=torch.float32))
    yield engine
    engine.close()


def gold(completions, gold):
    return [None if each == 3 else float(each) for each in gold]


def prepared(engine: LocalEngine) -> list[Prompt]:
    play = SingleTurnRollouts(engine, engine._base.tokenizer)
    return prepare_all(PROMPTS, play, context=engine.context_length)


GOLD = Scorer([RewardFunction(name="gold", function=gold, args={})])


def run(engine: LocalEngine, *, score=GOLD, seed: int = 0, k: int = 1, answer=final_answer, counted=None, **params):
    return asyncio.run(
        evaluate(
            SingleTurnRollouts(engine, engine._base.tokenizer),
            prepared(engine),
            score,
            version=BASE,
            params=SamplingParams(max_tokens=6, temperature=1.3, top_k=50, **params),
            modes=("greedy", "sampled"),
            seed=seed,
            k=k,
            answer=answer,
            counted=counted,
        )
    )


def ids(evaluation: Evaluation) -> list[tuple[int, ...]]:
    return [group.rollouts[0].completion.token_ids for group in evaluation.groups]


def test_modes(engine):
    """Greedy is the likeliest continuation whatever the seed; sampled follows the parameters and the seed."""
    first, again, other = run(engine), run(engine), run(engine, seed=1)
    assert list(first) == ["greedy", "sampled"]
    for mode in first:
        assert ids(first[mode]) == ids(again[mode])
        assert first[mode].version == BASE and [len(g.rollouts) for g in first[mode].groups] == [1] * 4
    assert ids(first["greedy"]) == ids(other["greedy"])
    assert ids(first["sampled"]) != ids(other["sampled"])
    model = engine._base.model
    prompt = prepared(engine)[0].token_ids
    with torch.no_grad():
        assert ids(first["greedy"])[0][0] == int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())


def test_means(engine):
    """What cannot be scored is left out; a group without any reward is NaN, not zero."""
    greedy = run(engine)["greedy"]
    assert greedy.mean() == pytest.approx((0 + 1 + 2) / 3)
    assert greedy.mean(column="skill", value="sub") == 1.0
    assert math.isnan(greedy.mean(column="skill", value="mul"))
    assert greedy.metrics() == {"eval/greedy/reward": 1.0}
    assert greedy.metrics(by="skill") == {
        "eval/greedy/reward": 1.0,
        "eval/greedy/add/reward": 1.0,
        "eval/greedy/sub/reward": 1.0,
    }


def test_compare(engine):
    before = run(engine)
    rows = compare(before, before, by="skill")
    assert [row[0] for row in rows] == [
        f"{mode}{part}/reward" for mode in ("greedy", "sampled") for part in ("", "/add", "/sub")
    ]
    assert all(first == last for _, first, last in rows)
    several = run(engine, k=2)
    names = [row[0] for row in compare(several, several, by=None)]
    assert names == ["greedy/reward", "sampled/reward", "sampled/pass@2", "sampled/maj@2"]


# ---- several samples ----


def test_other_rewards_than_those_of_training_count(engine, tmp_path):
    """`eval.rewards`: the same completions, measured by other functions; the training's own are told beside, also where
    they fail, and are there again when the evaluation is read."""

    def twice(completions, gold):
        return [2.0 * each for each in gold]

    def odd(completions, gold):
        if gold[0] == 1:
            raise RuntimeError("out")
        return [None if each == 3 else float(each) for each in gold]

    by_gold = Scorer([RewardFunction(name="odd", function=odd, args={})])
    counted = by_gold.beside([RewardFunction(name="twice", function=twice, args={})])
    both, alone = run(engine, score=by_gold, counted=counted, k=2), run(engine, k=2)
    assert ids(both["sampled"]) == ids(alone["sampled"])
    assert both["sampled"].training == ((0.0, 0.0), (None, None), (2.0, 2.0), (None, None))
    assert both["greedy"].metrics(by="skill") == {
        "eval/greedy/reward": 3.0,
        "eval/greedy/training_reward": 1.0,  # of 0 and 2
        "eval/greedy/add/reward": 2.0,
        "eval/greedy/sub/reward": 4.0,
    }
    assert both["greedy"].said() == "3.000 (the training reward 1.000)" and alone["greedy"].said() == "1.000"
    assert both["sampled"].failed == 0 and "eval/greedy/training_reward" not in alone["greedy"].metrics()
    save_evaluations(tmp_path, 5, both)
    assert load_evaluations(tmp_path, 5) == both
    assert ("greedy/training_reward", 1.0, 1.0) in compare(both, both, by=None)


def test_what_an_environment_gave_does_not_count_beside_other_rewards(engine):
    """It is a part of what is trained by."""

    async def played(group: RolloutGroup) -> RolloutGroup:
        return replace(group, rollouts=tuple(replace(r, rewards={"env": 9.0}, reward=9.0) for r in group.rollouts))

    class Env:
        async def __call__(self, group: RolloutGroup) -> RolloutGroup:
            return await GOLD(await played(group))

    result = run(engine, score=Env(), counted=GOLD)["greedy"]
    assert result.training == ((9.0,), (10.0,), (11.0,), (9.0,))
    assert [each.rollouts[0].reward for each in result.groups] == [0.0, 1.0, 2.0, None]


def test_k_samples_in_mode_sampled(engine):
    """The first sample of each prompt is that of k = 1; greedy is done once."""
    one, three = run(engine), run(engine, k=3)
    assert [len(group.rollouts) for group in three["sampled"].groups] == [3] * 4
    assert [len(group.rollouts) for group in three["greedy"].groups] == [1] * 4
    assert (three["sampled"].k, three["greedy"].k) == (3, 1)
    assert ids(three["sampled"]) == ids(one["sampled"]) and ids(three["greedy"]) == ids(one["greedy"])
    assert len({r.completion.token_ids for r in three["sampled"].groups[0].rollouts}) > 1


def evaluation(*rewards_PG: Sequence[float | None], **options) -> Evaluation:
    """An evaluation with these rewards, None where scoring failed."""
    groups = tuple(
        RolloutGroup(
            prompt=Prompt(id=str(i), text="x"),
            rollouts=tuple(Rollout(turns=(), reward=r, error="failed" if r is None else None) for r in rewards),
        )
        for i, rewards in enumerate(rewards_PG)
    )
    return Evaluation(mode="sampled", version=BASE, groups=groups, **options)


def test_pass_at_k_is_the_chance_over_all_subsets():
    for n in range(1, 7):
        for c in range(n + 1):
            outcomes = [i < c for i in range(n)]
            for k in range(1, n + 1):
                subsets = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
                assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)
    assert pass_at_k(1024, 1, 512) == 0.5
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with raises(ValueError):
            pass_at_k(n, c, k)


def test_means_over_several_samples():
    """Each prompt counts the same, however many of its completions could be scored."""
    result = evaluation([1.0, 0.0, 0.0, 0.0], [1.0, None, None, 1.0], [0.0, 0.0, 0.0, 0.0], [None] * 4)
    assert result.mean() == pytest.approx((0.25 + 1 + 0) / 3)
    assert result.measured("pass@4") == pytest.approx((1 + 0) / 2)  # the second prompt has two that were scored
    assert result.measured("pass@2") == pytest.approx((0.5 + 1 + 0) / 3)
    assert math.isnan(result.measured("pass@5"))
    spread = statistics.stdev([0.25, 1.0, 0.0])
    assert result.details() == {
        "eval/sampled/reward_stderr": pytest.approx(spread / math.sqrt(3)),
        "eval/sampled/failed": 6.0,
        "eval/sampled/avg@4": result.mean(),
        "eval/sampled/avg@4_stderr": pytest.approx(spread / math.sqrt(3)),
        "eval/sampled/pass@1": pytest.approx((0.25 + 1 + 0) / 3),
        "eval/sampled/pass@1_stderr": pytest.approx(spread / math.sqrt(3)),
        "eval/sampled/pass@4": 0.5,
        "eval/sampled/pass@4_stderr": pytest.approx(statistics.stdev([1, 0]) / math.sqrt(2)),
    }


def test_the_reward_of_a_success():
    result = evaluation([0.4, 0.6], [0.5, 0.1 + 0.2])
    assert result.measured("pass@1") == 0.0
    assert evaluation([0.4, 0.6], [0.5, 0.1 + 0.2], success=0.5).measured("pass@1") == 0.5
    assert evaluation([0.3, 0.1 + 0.2], success=0.1 + 0.2).measured("pass@1") == 1.0  # equal but for rounding


def test_the_standard_error_is_that_of_the_prompts():
    """Over many repetitions, the means spread by what the standard error says; samples of one prompt are not
    independent, so that to count each as one would say half of it here."""
    random = Random(0)

    def once():
        rates = [random.choice([0.0, 1.0]) for _ in range(40)]
        return evaluation(*([float(random.random() < p) for _ in range(4)] for p in rates))

    results = [once() for _ in range(300)]
    spread = statistics.stdev([each.mean() for each in results])
    assert statistics.fmean(each.standard_error() for each in results) == pytest.approx(spread, rel=0.15)
    assert math.isnan(evaluation([1.0, 0.0]).standard_error())


# ---- the answer of the majority ----


def test_the_majority_is_that_of_votes_drawn_at_random_where_several_lead():
    """Against counting: every order of the votes is as likely, and the first to reach the most wins."""
    random = Random(3)
    for _ in range(50):
        answers = [random.choice(["a", "b", "c", None]) for _ in range(4)]
        right = random.choice(["a", "b", "c"])
        solved = [each == right for each in answers]
        said = [each for each in answers if each is not None]
        winners = [each for each in dict.fromkeys(said) if said.count(each) == max(map(said.count, said))]
        assert majority(answers, solved) == pytest.approx(winners.count(right) / len(winners) if winners else 0.0)
    assert majority(["1", "1"], [True, False]) == 0.5  # a reward of the form, too: half of those that say so are right


def test_maj_at_k():
    """It counts prompts of which all k completions were scored, each by its majority; its error is over prompts."""
    result = evaluation(
        [1.0, 1.0, 0.0],
        [0.0, 0.0, 1.0],
        [1.0, None, 1.0],
        [0.0, 1.0, 0.0],
        answers=(("5", "5", "6"), ("7", "7", "8"), ("1", None, "1"), ("2", "3", "4")),
    )
    assert result.values("maj@3")[:2] == [1.0, 0.0] and math.isnan(result.values("maj@3")[2])
    assert result.values("maj@3")[3] == pytest.approx(1 / 3)  # none leads: as one drawn at random
    assert result.measured("maj@3") == pytest.approx((1 + 0 + 1 / 3) / 3)
    assert result.standard_error("maj@3") == pytest.approx(statistics.stdev([1, 0, 1 / 3]) / math.sqrt(3))
    assert result.measures == ("reward", "pass@1", "pass@3", "maj@3")
    assert {"eval/sampled/maj@3", "eval/sampled/maj@3_stderr"} <= set(result.details())


def test_votes_are_read_from_what_was_sampled_and_kept_with_it(engine, tmp_path):
    """`answer` gets each scored completion's text; what it says is in the file of the evaluation."""
    result = run(engine, k=3, answer=lambda text: len(text) % 2)
    sampled = result["sampled"]
    for group, votes in zip(sampled.groups, sampled.answers, strict=True):
        scored = [rollout.reward is not None for rollout in group.rollouts]
        expected = [str(len(rollout.completion.text) % 2) for rollout in group.rollouts]
        assert votes == tuple(said if each else None for said, each in zip(expected, scored, strict=True))
    assert result["greedy"].answers == () and run(engine)["sampled"].answers == ()
    save_evaluations(tmp_path, 7, result)
    loaded = load_evaluations(tmp_path, 7)
    assert loaded["sampled"].answers == sampled.answers and loaded["greedy"].answers == ()
    assert loaded["sampled"].values("maj@3")[:3] == sampled.values("maj@3")[:3]

    def fails(text):
        raise KeyError("no such answer")

    with raises(RewardError):
        run(engine, k=2, answer=fails)


# ---- two policies on the same prompts ----


def test_the_p_value_is_the_share_of_signs_as_far_from_zero():
    """Against all signs in plain Python, with differences of many sizes, and McNemar's binomial for those of one."""
    random = Random(1)
    for size in (1, 2, 5, 9):
        first, second = ([random.random() for _ in range(size)] for _ in range(2))
        differences = [a - b for a, b in zip(first, second, strict=True)]
        sums = [
            abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((-1, 1), repeat=size)
        ]
        expected = sum(each >= abs(sum(differences)) - 1e-9 for each in sums) / len(sums)
        assert paired(first, second).p_value == pytest.approx(expected)
    test = paired([1.0] * 9 + [0.0] * 3, [0.0] * 9 + [1.0] + [0.0] * 2)
    assert test.p_value == pytest.approx(2 * (1 + 10) / 2**10)  # 9 won, 1 lost
    assert (test.won, test.lost, test.prompts) == (9 / 12, 1 / 12, 12)
    assert test.difference == pytest.approx(8 / 12)
    assert test.standard_error == pytest.approx(statistics.stdev([1.0] * 9 + [-1.0] + [0.0] * 2) / math.sqrt(12))


def test_a_pair_without_a_value_is_left_out():
    test = paired([1.0, math.nan, 0.5], [0.0, 1.0, 0.5])
    assert (test.prompts, test.difference, test.won, test.lost) == (2, 0.5, 0.5, 0.0)
    assert paired([0.5], [0.5]).p_value == 1.0 and math.isnan(paired([0.5], [0.5]).standard_error)
    with raises(DataError):
        paired([math.nan], [1.0])


@pytest.mark.long
def test_equal_policies_are_told_apart_as_often_as_p_says():
    """Under the null hypothesis p is below 0.05 in at most that share of many repetitions; drawn signs agree with it,
    and a difference that is there is found."""
    random = Random(2)

    def draw(shift: float, size: int = 40) -> float:
        easy = [random.random() for _ in range(size)]  # prompts differ more than the policies do
        return paired(
            [each + random.gauss(shift, 0.1) for each in easy], [each + random.gauss(0, 0.1) for each in easy]
        ).p_value

    assert sum(draw(0.0) < 0.05 for _ in range(200)) <= 20
    assert all(draw(0.2) < 0.001 for _ in range(5))
    assert draw(0.2) == pytest.approx(1 / 20_001)  # no drawn sign is as far


def test_versions_are_tested_by_mode_and_measure():
    first = {"sampled": evaluation([1.0, 1.0], [1.0, 0.0], answers=(("a", "a"), ("a", "b")))}
    second = {"sampled": evaluation([0.0, 1.0], [0.0, 0.0], answers=(("b", "a"), ("b", "b")))}
    tests = paired_tests(first, second)
    assert list(tests) == ["sampled/reward", "sampled/pass@1", "sampled/pass@2", "sampled/maj@2"]
    assert tests["sampled/reward"].difference == 0.5 and tests["sampled/reward"].won == 1.0
    assert tests["sampled/pass@2"].difference == 0.5 and tests["sampled/pass@2"].won == 0.5
    assert tests["sampled/maj@2"].difference == pytest.approx(0.75 - 0.25)
    other = {"sampled": replace(second["sampled"], groups=second["sampled"].groups[::-1])}
    with raises(DataError):
        paired_tests(first, other)


# ---- failures ----


def sometimes(completions, gold):
    if gold[0] % 2:
        raise ArithmeticError("no score")
    return [1.0] * len(completions)


def never(completions):
    raise ArithmeticError("no score")


def test_what_fails_is_counted_and_left_out(engine):
    result = run(engine, score=Scorer([RewardFunction(name="sometimes", function=sometimes, args={})]), k=2)
    assert (result["sampled"].failed, result["greedy"].failed) == (4, 2)
    assert result["sampled"].mean() == result["greedy"].mean() == 1.0
    assert "sampled: 4 of 8 completions could not be scored" in str(result["sampled"].failures())
    assert "no score" in str(result["greedy"].failures()) and run(engine)["greedy"].failures() is None
    with raises(RewardError):
        run(engine, score=Scorer([RewardFunction(name="never", function=never, args={})]))


def test_an_aborted_completion_is_a_failure(engine, monkeypatch):
    submit = engine.submit

    def abort_the_first(requests):
        first, *rest = submit(requests)
        aborted: Future = Future()
        aborted.set_result([replace(each, finish_reason=FinishReason.ABORT) for each in first.result()])
        return [aborted, *rest]

    monkeypatch.setattr(engine, "submit", abort_the_first)
    greedy = run(engine)["greedy"]
    assert greedy.failed == 1 and greedy.mean() == pytest.approx((1 + 2) / 2)  # of 0, 1, 2 and one without a gold


# ---- the best version ----


def version(number: int) -> PolicyVersion:
    return PolicyVersion("math", number)


def test_the_best_version_is_the_first_with_the_highest_value():
    best = BestVersion()
    assert best.version is None and not best.stop
    assert not best.observe(version(0), math.nan)
    values = [(1, 0.3, True), (2, 0.5, True), (3, 0.5, False), (4, math.nan, False), (5, 0.4, False)]
    assert [best.observe(version(number), value) for number, value, _ in values] == [new for *_, new in values]
    assert (best.version, best.value, best.waited, best.stop) == (version(2), 0.5, 3, False)
    assert best.observe(version(6), 0.6) and best.version == version(6)


def test_patience():
    best = BestVersion(patience=2)
    stops = []
    for number, value in enumerate([0.1, 0.1, 0.2, 0.2, 0.1, 0.3]):
        best.observe(version(number), value)
        stops.append(best.stop)
    assert stops == [False, False, False, False, True, False]


def test_the_best_version_after_a_restart():
    for seen in ([], [0.1, 0.4, 0.2], [-1.0]):
        best = BestVersion(patience=2)
        for number, value in enumerate(seen):
            best.observe(version(number), value)
        restored = BestVersion(patience=2)
        restored.load_state_dict(json.loads(json.dumps(best.state_dict(), allow_nan=False)))
        assert vars(restored) == vars(best)
    with raises(DataError):
        BestVersion().load_state_dict({"version": "nonsense", "value": 1, "waited": 0})


def test_a_prompt_that_fills_the_context(make_base):
    base = make_base()
    engine = LocalEngine(base)
    with raises(ContextLengthError):
        prepare_all(
            [*PROMPTS, Prompt(id="long", text="=" * 400)],
            SingleTurnRollouts(engine, base.tokenizer),
            context=base.context_length,
        )


def test_values_of_a_column_that_are_written_alike_are_one_group():
    """A file's 1 and "1" have one metric, which is the mean over both; True, equal to 1, is not among them."""
    columns = [(1, 1.0), ("1", 0.0), (True, 0.25)]
    groups = tuple(
        RolloutGroup(prompt=Prompt(id=str(i), columns={"level": level}), rollouts=(Rollout(turns=(), reward=reward),))
        for i, (level, reward) in enumerate(columns)
    )
    found = Evaluation(mode="greedy", version=BASE, groups=groups).metrics(by="level")
    assert (found["eval/greedy/1/reward"], found["eval/greedy/True/reward"]) == (0.5, 0.25)
