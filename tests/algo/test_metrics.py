"""What a step's rollouts were like: every definition by hand, nothing of nothing, and the table in docs/metrics.md."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.algo.metrics import MOST_IDS, definitions, rollout_metrics, sample_metrics, time_metrics
from groupwise.config.algo import AdvantageConfig
from groupwise.run.health_rules import RULES
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Sample, Turn

DOCS = Path(__file__).parent.parent.parent / "docs"
STOP, CUT = FinishReason.STOP, FinishReason.LENGTH


def rollout(
    reward: float | None = None,
    *,
    length: int = 3,
    finish: FinishReason = STOP,
    error: str | None = None,
    prompt: int = 4,
    ids: tuple[int, ...] | None = None,
    **rewards: float | None,
) -> Rollout:
    said = tuple(range(length)) if ids is None else ids
    completion = Completion(token_ids=said, logprobs=(0.0,) * len(said), text="", finish_reason=finish)
    return Rollout(turns=(Turn((0,) * prompt, completion),), rewards=rewards, reward=reward, error=error)


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(id="p"), rollouts=rollouts)


def of(*rewards: float | None) -> RolloutGroup:
    return group(*(rollout(reward) for reward in rewards))


def measured(*groups: RolloutGroup, **options) -> dict[str, float]:
    return rollout_metrics(groups, trained=options.pop("trained", groups), **options)


# ---- rewards ----


def test_reward_std_is_that_inside_the_groups():
    """Rewards that differ between prompts only teach nothing: 1, 1, 1, 1 and 0, 0, 0, 0 have std 0, not 0.53."""
    flat = measured(of(1, 1, 1, 1), of(0, 0, 0, 0))
    assert (flat["reward/mean"], flat["reward/std"], flat["reward/frac_zero_std"]) == (0.5, 0.0, 1.0)
    metrics = measured(of(1, 0, 1, 0), of(2, 2), of(0, 3))
    assert metrics["reward/std"] == pytest.approx((math.sqrt(1 / 3) + 0 + math.sqrt(4.5)) / 3)
    assert metrics["reward/mean"] == pytest.approx(9 / 8) and metrics["reward/frac_zero_std"] == pytest.approx(1 / 3)
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 3.0)


def test_rounding_is_no_difference():
    assert measured(of(0.1 + 0.2, 0.3))["reward/std"] == 0.0


def test_a_failed_reward_is_in_no_statistic():
    failed = [rollout(None, error="boom"), rollout(None), rollout(math.nan), rollout(math.inf, error="inf")]
    metrics = measured(group(rollout(1.0), rollout(0.0), *failed))
    assert (metrics["reward/mean"], metrics["reward/max"]) == (0.5, 1.0)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5))
    assert (metrics["rollout/error_frac"], metrics["rollout/excluded_frac"]) == (2 / 6, 4 / 6)
    assert metrics["rollout/count"] == 6


def test_a_group_that_cannot_be_compared_has_no_std_and_teaches_nothing():
    metrics = measured(of(1.0, None), of(1.0, 0.0))
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5)) and metrics["reward/frac_zero_std"] == 0.5


def test_each_function_by_itself():
    """Without weights, where it gave a value, and inside the groups."""
    one = group(rollout(2.0, exact=1.0, form=5.0), rollout(0.0, exact=0.0, form=5.0))
    two = group(rollout(1.0, exact=1.0, form=None), rollout(1.0, exact=1.0, form=3.0))
    metrics = measured(one, two, weights={"exact": 2.0, "form": 0.1})
    assert metrics["reward/exact/mean"] == 0.75 and metrics["reward/form/mean"] == pytest.approx(13 / 3)
    assert metrics["reward/exact/std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert metrics["reward/form/std"] == 0.0  # in the second group there is one value and so no spread


def test_the_share_says_who_is_heard():
    """In the groups in which a function differs: its part of all weighted spreads."""
    loud = group(rollout(0.0, big=0.0, small=0.0), rollout(0.0, big=10.0, small=1.0))
    quiet = group(rollout(0.0, big=1.0, small=0.0), rollout(0.0, big=1.0, small=1.0))
    assert "reward/big/share" not in measured(group(rollout(1.0, big=1.0), rollout(0.0, big=0.0)))  # it is alone
    metrics = measured(loud, weights={"big": 1.0, "small": 1.0})
    assert metrics["reward/small/share"] == pytest.approx(1 / 11) and metrics["reward/big/share"] == pytest.approx(
        10 / 11
    )
    both = measured(loud, quiet, weights={"big": 1.0, "small": 1.0})
    assert both["reward/small/share"] == pytest.approx((1 / 11 + 1) / 2)
    assert both["reward/big/share"] == pytest.approx(10 / 11)
    assert measured(loud, weights={"big": -0.1, "small": 1.0})["reward/small/share"] == pytest.approx(0.5)
    watched = measured(loud, weights={"big": 0.0, "small": 1.0})
    assert not any(key.endswith("/share") for key in watched)
    gdpo = AdvantageConfig(aggregation="normalize_then_sum")
    assert not any(key.endswith("/share") for key in measured(loud, advantage=gdpo))


def test_what_each_brings_to_the_mean():
    groups = group(rollout(1.0, exact=0.0, form=5.0), rollout(3.0, exact=1.0, form=5.0))
    metrics = measured(groups, weights={"exact": 2.0, "form": -0.2, "seen": 0.0})
    assert (metrics["reward/exact/part"], metrics["reward/form/part"]) == (1.0, -1.0)
    alone = measured(group(rollout(1.0, exact=1.0, seen=7.0)), weights={"exact": 1.0, "seen": 0.0})
    assert not any(key.endswith("/part") for key in alone)
    nothing = measured(group(rollout(1.0, exact=None, form=5.0)), weights={"exact": 1.0, "form": 1.0})
    assert "reward/exact/part" not in nothing and nothing["reward/form/part"] == 5.0


def test_how_many_have_the_best_reward():
    assert measured(of(1.0, 0.5), of(1.0, 0.1 + 0.2 + 0.7))["reward/frac_best"] == 0.75
    assert measured(of(None, None)).get("reward/frac_best") is None


def test_noise_is_different_values_for_the_same_completion():
    same = [rollout(ids=(1, 2), judge=value, exact=1.0) for value in (0.1, 0.9)]
    other = [rollout(ids=(3, 4), judge=0.5, exact=0.0), rollout(ids=(3, 4), judge=0.5, exact=0.0)]
    metrics = measured(group(*same, *other, rollout(ids=(5,), judge=0.7)))
    assert (metrics["reward/judge/noise"], metrics["reward/exact/noise"]) == (0.5, 0.0)
    assert not any(
        key.endswith("/noise") for key in measured(group(rollout(ids=(1,), a=1.0), rollout(ids=(2,), a=0.0)))
    )
    heard = group(rollout(prompt=4, judge=0.0), rollout(prompt=5, judge=1.0))  # the same words, after something else
    assert "reward/judge/noise" not in measured(heard)


def test_the_commonest_token():
    """The one that ends a completion counts only where it is all of it."""
    end = 99
    metrics = measured(group(rollout(ids=(7, 7, 7, end)), rollout(ids=(7, 8, end)), rollout(ids=(7, 8), finish=CUT)))
    assert metrics["rollout/top_token_frac"] == 5 / 7
    assert measured(group(rollout(ids=(end,)), rollout(ids=(end,))))["rollout/top_token_frac"] == 1.0
    beyond = (MOST_IDS + 7, MOST_IDS + 7, 3, end)  # of no vocabulary that there is
    assert measured(group(rollout(ids=beyond), rollout(ids=beyond)))["rollout/top_token_frac"] == 2 / 3
    assert measured(group(rollout(ids=(7, end)), rollout(ids=(7, end))))["rollout/top_token_frac"] == 1.0
    assert "rollout/top_token_frac" not in measured(group(Rollout(turns=(), error="x")))


def test_equal_sums_of_different_rewards_teach_something_where_each_is_normalised():
    groups = [group(rollout(1.0, a=1.0, b=0.0), rollout(1.0, a=0.0, b=1.0))]
    assert measured(*groups)["reward/frac_zero_std"] == 1.0
    gdpo = AdvantageConfig(aggregation="normalize_then_sum")
    assert measured(*groups, advantage=gdpo)["reward/frac_zero_std"] == 0.0


# ---- lengths, tokens, counts ----


def test_lengths_and_tokens():
    metrics = measured(
        group(rollout(1.0, length=2), rollout(0.0, length=6, finish=CUT)), group(rollout(1.0, length=4, prompt=10))
    )
    names = ("mean", "min", "max")
    assert [metrics[f"rollout/len_{name}"] for name in names] == [4.0, 2.0, 6.0]
    assert [metrics[f"rollout/len_terminated_{name}"] for name in names] == [3.0, 2.0, 4.0]
    assert metrics["rollout/truncated_frac"] == pytest.approx(1 / 3)
    assert (metrics["rollout/tokens"], metrics["rollout/total_tokens"]) == (12.0, 12.0 + 4 + 4 + 10)


def said(length: int, *, finish: FinishReason = STOP) -> Completion:
    return Completion(token_ids=(1,) * length, logprobs=(0.0,) * length, text="", finish_reason=finish)


def episode(*lengths: int, stop: str = "done", fork: bool = False, cut: int | None = None, **options) -> Rollout:
    """Turns of these lengths, between which the environment says 50 tokens; with `fork` the last sees none of that."""
    turns, seen = list[Turn](), (0,) * 5
    for number, length in enumerate(lengths):
        last = fork and number == len(lengths) - 1
        turns.append(Turn((9,) * 7 if last else seen, said(length, finish=CUT if number == cut else STOP)))
        seen = turns[-1].prompt_ids + turns[-1].completion.token_ids + (0,) * 50
    return Rollout(turns=tuple(turns), stop=stop, **options)


def test_what_others_said_is_not_counted():
    """Of three turns with tool results between them, only what the policy chose has length; one that was cut is cut."""
    metrics = measured(group(episode(2, 3, 4, cut=1, reward=1.0), rollout(0.0, length=9)))
    assert (metrics["rollout/len_mean"], metrics["rollout/tokens"]) == (9.0, 18.0)
    assert metrics["rollout/total_tokens"] == (5 + 2 + 50 + 3 + 50 + 4) + (4 + 9)
    assert metrics["rollout/truncated_frac"] == 0.5 and metrics["rollout/len_terminated_max"] == 9.0
    forked = measured(group(episode(2, 3, 4, fork=True)))
    assert forked["rollout/total_tokens"] == (5 + 2 + 50 + 3) + (7 + 4)


# ---- episodes ----


def test_of_single_turns_there_are_no_metrics_of_episodes():
    assert not [key for key in measured(of(1.0, 0.0)) if key.startswith("env/") or "turns" in key]


def test_episodes_are_counted_by_how_they_ended():
    failed = Rollout(turns=(), error="Env.reset raised", stop="error", info={"turns": 0.0, "failed": 1.0})
    worth_nothing = episode(1, stop="error", reward=0.0, info={"failed": 1.0})  # env.on_error: zero
    metrics = measured(
        group(episode(1, 1, 1), episode(1, stop="max_turns"), episode(1, stop="of/ its own"), failed, worth_nothing)
    )
    assert metrics["rollout/turns_mean"] == (3 + 1 + 1 + 0 + 1) / 5 and metrics["rollout/count"] == 5
    assert (metrics["env/failed_frac"], metrics["env/limit_frac"]) == (0.4, 0.4)
    stops = {key.removeprefix("env/stop/"): value for key, value in metrics.items() if key.startswith("env/stop/")}
    assert {key: value for key, value in stops.items() if value} == {
        "done": 0.2,
        "max_turns": 0.2,
        "of_ its own": 0.2,
        "error": 0.4,
    }
    assert stops["timeout"] == 0.0 and sum(stops.values()) == pytest.approx(1.0)
    assert all(map(defined, metrics))


def test_what_environments_report_is_a_mean_over_those_that_did():
    one = episode(1, info={"turns": 1.0, "tool_calls": 3.0, "forks": 1.0, "solved": 1.0, "a/b": 2.0, "odd": math.nan})
    two = episode(1, info={"turns": 1.0, "tool_calls": 0.0, "forks": 0.0})
    metrics = measured(group(one, two))
    assert (metrics["env/tool_calls"], metrics["env/forks"], metrics["env/solved"]) == (1.5, 0.5, 1.0)
    assert metrics["env/a_b"] == 2.0 and "env/odd" not in metrics and "env/turns" not in metrics
    assert "env/tool_error_frac" not in metrics


def test_tool_errors_are_a_share_of_the_calls():
    infos = [
        {"tool_calls": 4.0, "tool_errors": 2.0, "tool_malformed": 1.0},  # the malformed one is an error, and no call
        {"tool_calls": 0.0, "tool_errors": 0.0, "tool_malformed": 0.0},
        {"tool_calls": 7.0},  # says nothing of errors
    ]
    tools = ({"type": "function"}, {"type": "function"})
    episodes = tuple(episode(1, info=info) for info in infos)
    metrics = measured(RolloutGroup(prompt=Prompt(id="p", tools=tools), rollouts=episodes), group(episode(1)))
    assert metrics["env/tool_error_frac"] == 2 / 5
    assert metrics["env/tools"] == (2 + 2 + 2 + 0) / 4


def test_counts():
    groups = [of(1, 0), of(1, 1), of(0, 1)]
    metrics = measured(
        *groups,
        trained=[groups[0], groups[2], of(1, 0)],
        batch_groups=4,
        staleness=(0, 3),
        replayed=1,
        rerolled=2,
        too_long=1,
    )
    assert (metrics["rollout/groups"], metrics["rollout/groups_trained"]) == (3, 3)
    assert metrics["rollout/batch_fill"] == 0.75
    assert (metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]) == (1.5, 3.0)
    assert (metrics["replay/groups"], metrics["reroll/groups"]) == (1, 2)
    assert (metrics["data/too_long"], metrics["data/too_long_frac"]) == (1, 0.25)


def test_what_is_trained_beside_what_was_dropped():
    """A completion without a reward and a group that is left out are dropped; one of equal rewards is neither."""

    def said(length: int, reward: float | None) -> Rollout:
        ids = (5,) * length
        completion = Completion(token_ids=ids, logprobs=(0.0,) * length, text="", finish_reason=FinishReason.STOP)
        return Rollout(turns=(Turn((1,), completion),), reward=reward)

    used = group(said(4, 1.0), said(6, 0.0), said(30, None))
    late, flat = group(said(20, 0.0), said(40, 1.0)), group(said(99, 1.0), said(99, 1.0))
    metrics = measured(used, late, flat, trained=[used], used=[used])
    assert (metrics["rollout/trained_len_mean"], metrics["rollout/dropped_len_mean"]) == (5.0, 30.0)
    assert metrics["rollout/dropped_frac"] == 3 / 5 and metrics["rollout/selection_len"] == 5 / 20 - 1
    assert metrics["rollout/selection_reward"] == 0.0
    better = measured(used, group(said(5, 0.0), said(5, 0.5)), trained=[used], used=[used])
    assert better["rollout/selection_reward"] == pytest.approx((0.5 - 0.375) / stdev([1, 0, 0, 0.5]))
    assert "rollout/selection_len" not in measured(used, trained=[used])
    assert "rollout/dropped_len_mean" not in measured(flat, group(said(2, 0.0)), trained=[flat], used=[flat])


def test_versions_and_ages_of_tokens():
    def said(length: int, *switches: int) -> Rollout:
        newer = tuple((at, PolicyVersion("math", i)) for i, at in enumerate(switches, 1))
        ids = (5,) * length
        stop = FinishReason.STOP
        return Rollout(
            turns=(Turn((1,), Completion(token_ids=ids, logprobs=ids, text="", finish_reason=stop, switches=newer)),),
            reward=1.0,
        )

    mixed = group(said(4), said(6, 2, 5))
    metrics = measured(mixed, trained=[mixed], token_ages=[(2, 4), (2, 2), (1, 3), (0, 1)])
    assert metrics["rollout/versions_mean"] == 2.0 and metrics["rollout/token_age_mean"] == 1.5
    assert "rollout/versions_mean" not in measured(mixed, trained=[mixed])


def test_of_nothing_there_is_no_metric():
    assert measured() == {
        "rollout/count": 0.0,
        "rollout/groups": 0.0,
        "rollout/groups_trained": 0.0,
        "rollout/tokens": 0.0,
        "rollout/total_tokens": 0.0,
        "replay/groups": 0.0,
        "reroll/groups": 0.0,
        "data/too_long": 0.0,
    }
    unscored = measured(of(None, None))
    assert not {key for key in unscored if key.startswith("reward/")} - {"reward/frac_zero_std"}
    assert unscored["rollout/excluded_frac"] == 1.0
    cut = measured(group(rollout(1.0, finish=CUT)))
    assert "rollout/len_terminated_mean" not in cut and cut["rollout/len_mean"] == 3.0
    assert measured(RolloutGroup(prompt=Prompt(id="p"), rollouts=(Rollout(turns=()),)))["rollout/count"] == 1.0


rewards = st.none() | st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])
rollouts = st.builds(
    rollout,
    rewards,
    length=st.integers(0, 9),
    finish=st.sampled_from(FinishReason),
    error=st.none() | st.just("boom"),
    exact=rewards,
    form=rewards,
)


@settings(max_examples=60)
@given(groups=st.lists(st.lists(rollouts, max_size=4).map(lambda each: group(*each)), max_size=4))
def test_every_metric_is_finite_defined_and_does_not_depend_on_the_order_of_groups(groups):
    metrics = measured(*groups)
    assert all(math.isfinite(value) for value in metrics.values())
    assert not [key for key in metrics if not defined(key)]
    assert measured(*reversed(groups)) == pytest.approx(metrics)


def defined(metric: str) -> bool:
    return any(each.fits(metric) for each in definitions())


# ---- training and time ----


def test_masked_tokens_are_not_trained_tokens():
    samples = [
        Sample(prompt_ids=(1,), completion_ids=(1, 2, 3), mask=(1, 0, 1), advantage=-2.0),
        Sample(prompt_ids=(1,), completion_ids=(1,), mask=(1,), advantage=1.0),
    ]
    assert sample_metrics(samples) == {"train/samples": 2.0, "train/tokens": 3.0, "train/advantage_abs_mean": 1.5}
    assert sample_metrics([]) == {"train/samples": 0.0, "train/tokens": 0.0}


def test_times_and_throughput():
    counted = {"rollout/tokens": 600.0, "train/tokens": 300.0}
    metrics = time_metrics(counted, {"step": 3.0, "rollout": 2.0, "train": 0.5, "sync": 0.25})
    assert (metrics["perf/tok_s"], metrics["perf/sample_tok_s"], metrics["perf/train_tok_s"]) == (200.0, 300.0, 600.0)
    assert metrics["time/sync_s"] == 0.25 and all(map(defined, metrics))
    assert time_metrics({}, {"step": 1.0}) == {"time/step_s": 1.0}
    assert time_metrics({"rollout/tokens": 5.0}, {"step": 0.0}) == {"time/step_s": 0.0}


# ---- the document ----


def test_the_document_is_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import generate_metrics

    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert generate_metrics.page(text) == text, "run: python docs/generate_metrics.py"
    shown = re.findall(r"^\| `([^`]+)` \| [^|]+ \|", text.split("## Under TRL's names")[0], re.MULTILINE)
    assert sorted(shown) == sorted(each.metric for each in definitions())


def test_the_first_row_that_fits_a_metric_is_its_own() -> None:
    """The web interface takes the row of a name as it stands, else the first that fits: not that of pass@k for its
    standard error."""
    names = [each.metric for each in definitions()]
    for each in definitions():
        example = re.sub(r"<\w+>", "x", each.metric)
        found = example if example in names else next(row.metric for row in definitions() if row.fits(example))
        assert found == each.metric


def test_every_metric_that_health_judges_has_a_good_range() -> None:
    """A finding says that a number is outside of its range, so the table says which range that is."""
    judged = {rule.metric: re.compile(rule.metric.replace("*", "[^/]*")) for rule in RULES}
    rows = {name: [each for each in definitions() if like.fullmatch(each.metric)] for name, like in judged.items()}
    assert [name for name, found in rows.items() if not any(each.good for each in found)] == []
