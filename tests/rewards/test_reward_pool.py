"""Reward functions at their worst, in a pool; and that a pool changes nothing for those that behave."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from groupwise.config.rewards import RewardConfig
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.base import RewardLog, load_rewards, score, score_group
from groupwise.rewards.call import RewardFunction, TrainerState
from groupwise.rewards.pool import RewardPool
from groupwise.rewards.pool_call import Patience
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from processes import becomes, descendants, many_files, running
from slow_cases import slow_but
from wording import raises

HERE = Path(__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks things up in /proc")


def group(*texts: str, id: str = "p/1", **columns) -> RolloutGroup:
    completions = [Completion(token_ids=(1,), logprobs=(-1.0,), text=t, finish_reason=FinishReason.STOP) for t in texts]
    rollouts = tuple(Rollout(turns=(Turn((1,), completion),)) for completion in completions)
    return RolloutGroup(prompt=Prompt(id=id, text="2+2?", columns=columns), rollouts=rollouts)


def specs_of(*names: str, **args) -> list[RewardConfig]:
    return [RewardConfig(function=f"unruly:{name}", args=args) for name in names]


def scored(pool: RewardPool | None, groups: Sequence[RolloutGroup], *names: str, log: RewardLog | None = None, **args):
    functions = load_rewards(specs_of(*names, **args), folder=HERE)
    return asyncio.run(score(groups, functions, pool=pool, log=log))


def told(groups: Sequence[RolloutGroup]) -> list[tuple[float | None, str | None]]:
    return [(rollout.reward, rollout.error) for each in groups for rollout in each.rollouts]


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    """A pool for functions that neither hang nor crash."""
    names = ("returns", "lengths", "by_kind", "by_kind_async", "logs", "logs_async", "spoils", "where", "waits")
    more = ("prints", "reads_stdin", "forks_and_goes_on", "with_a_loop_of_its_own", "disturbs")
    home = tmp_path_factory.mktemp("home")
    (home / "rewards_home").mkdir()
    before = os.getcwd()
    os.chdir(home)
    try:
        with RewardPool(specs_of(*names, *more), folder=HERE) as pool:
            asyncio.run(score([group("a")], load_rewards(specs_of("where", "lengths"), folder=HERE), pool=pool))
            os.chdir(before)
            yield pool
    finally:
        os.chdir(before)


@pytest.fixture
def pool_of(request: pytest.FixtureRequest) -> Callable[..., RewardPool]:
    def make(*names: str, **options) -> RewardPool:
        pool = RewardPool(specs_of(*names), folder=HERE, **{"timeout_s": 60.0, **options})
        request.addfinalizer(pool.close)
        return pool

    return make


# ---- the same with and without ----


@pytest.mark.parametrize(
    "what",
    [
        [1.0, 0.5],
        (True, 2),
        [None, 1.0],
        [math.nan, 1.0],
        [1.0, math.inf],
        ["1.0", 1.0],
        [[1.0], 1.0],
        [10**400, 1.0],
        [1j, 1.0],
        [1.0],
        [],
        1.0,
        "ab",
        None,
        {1: 1.0, 2: 2.0},
        np.array([0.25, 1.0]),
        [np.float32(0.5), np.bool_(True)],
        np.ones((2, 2)),
    ],
    ids=repr,
)
def test_what_is_returned_means_the_same(what, steady):
    assert both_ways(steady, [group("a", "b", what=what), group("c", what=[1.0])], "returns")


@pytest.mark.parametrize("function", ["by_kind", "by_kind_async"])
@pytest.mark.parametrize("kind", ["good", "raise", "raise SystemExit", "raise Unprintable"])
def test_what_is_raised_means_the_same(kind, function, steady):
    assert both_ways(steady, [group("a", "b", kind=kind), group("c", kind="good")], function)


@pytest.mark.parametrize("names", [["lengths", "by_kind"], ["spoils", "lengths"], ["lengths", "by_kind_async"]])
def test_several_functions_mean_the_same(names, steady):
    assert both_ways(steady, [group("aa", "b", kind="good"), group("c", "d", kind="raise")], *names)


def test_a_column_that_is_missing_means_the_same(steady):
    assert both_ways(steady, [group("a"), group("b", kind="good")], "by_kind")


@pytest.mark.parametrize("kind", ["good", "nan"])
@pytest.mark.parametrize("names", [["logs"], ["logs", "logs_async"]])
def test_what_is_logged_means_the_same(kind, names, steady):
    groups = [group("aaa", "b", kind="good"), group("c", kind=kind)]
    _, log = both_ways(steady, groups, *names)
    assert log.metrics()["reward/logs/log/length"] == ((3 + 2) / 2 + 1) / 2
    assert log.metrics()["reward/logs/failed"] == (kind == "nan")


def both_ways(pool: RewardPool, groups: Sequence[RolloutGroup], *names: str) -> tuple[list, RewardLog]:
    """What comes of it, which is the same in a pool as in this process."""
    state = TrainerState(global_step=3, max_steps=50)
    functions = load_rewards(specs_of(*names), folder=HERE)
    outcomes = []
    for where in (pool, None):
        log = RewardLog()
        result = told(asyncio.run(score(groups, functions, pool=where, log=log, state=state)))
        outcomes.append((result, log))
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1].failures == outcomes[1][1].failures
    assert outcomes[0][1].metrics() == outcomes[1][1].metrics()
    return outcomes[0]


def test_the_trainers_state_arrives(steady):
    (result, *_), _ = both_ways(steady, [group("a", kind="good")], "logs")
    assert result == (3.5, None)


def test_a_batch_of_failures_is_refused_with_the_cause(steady):
    for pool in (steady, None):
        with raises(RewardError):
            scored(pool, [group("a", "b", kind="raise"), group("c", kind="raise")], "by_kind")


# ---- where it runs ----


def test_calls_run_elsewhere_and_in_one_place(steady):
    first, second = (told(scored(steady, [group("a")], "where"))[0][0] for _ in range(2))
    assert first == second != os.getpid()


def test_a_function_without_a_reference_runs_here(steady):
    function = RewardFunction(name="where", function=lambda completions: [float(os.getpid())], args={})
    assert not steady.runs(function)
    (result,) = asyncio.run(score([group("a")], [function], pool=steady))
    assert result.rollouts[0].reward == os.getpid()


def test_another_function_of_the_same_name_is_not_the_pools(steady):
    (function,) = load_rewards([RewardConfig(function="unruly:where", args={}, weight=2.0)], folder=HERE)
    assert not steady.runs(function)


def test_options_and_several_names(pool_of):
    specs = [*specs_of("lengths", scale=3.0), *specs_of("lengths")]
    functions = load_rewards(specs, folder=HERE)
    with RewardPool(specs, folder=HERE) as pool:
        (result,) = asyncio.run(score([group("ab")], functions, pool=pool))
    assert result.rollouts[0].rewards == {"lengths": 6.0, "lengths_2": 2.0}


def test_two_equal_names_are_refused():
    with raises(ConfigError):
        RewardPool([RewardConfig(function="unruly:where", name="a"), RewardConfig(function="unruly:when", name="a")])


def test_a_function_may_run_an_event_loop_of_its_own(steady):
    assert told(scored(steady, [group("a")], "with_a_loop_of_its_own")) == [(1.0, None)]


def test_time_limits_by_signals_work():
    specs = [RewardConfig(function="groupwise.rewards.math:math_match")]
    boxed = group(r"\boxed{\frac{1}{2}}", r"\boxed{3}", answer="0.5")
    with RewardPool(specs) as pool:
        (result,) = asyncio.run(score([boxed], load_rewards(specs), pool=pool))
    assert told([result]) == [(1.0, None), (0.0, None)]


# ---- how it runs ----


def test_workers_run_at_the_same_time(pool_of):
    pool = pool_of("when", workers=2)
    log = RewardLog()
    scored(pool, [group("a", seconds=0.0), group("b", seconds=0.0)], "when")  # both have started
    scored(pool, [group("a", seconds=1.0), group("b", seconds=1.0)], "when", log=log)
    began, ended = log.logged["when", "began"], log.logged["when", "ended"]
    assert max(began) < min(ended)


def test_async_functions_of_all_groups_run_beside_each_other(steady):
    groups = [group("a", seconds=1.0, id=str(i)) for i in range(32)]
    scored(steady, groups[:1], "waits")
    began = time.monotonic()
    assert told(scored(steady, groups, "waits")) == [(1.0, None)] * 32
    assert time.monotonic() - began < 1.0 * 32 / 2


def test_a_worker_that_answers_while_calls_are_sent_to_it_is_heard(pool_of):
    """Calls and answers are each more than a socket holds."""
    text = "x" * 20_000
    groups = [group("a", text=text, id=str(i)) for i in range(128)]
    rewards = {
        reward
        for reward, _ in told(scored(pool_of("prints_and_answers", timeout_s=10.0), groups, "prints_and_answers"))
    }
    assert len(rewards) == 1 and None not in rewards  # one process answered all: it was not taken for hanging


def test_a_process_with_many_open_files_has_workers_too(pool_of):
    with many_files():
        pool = pool_of("lengths", timeout_s=20.0)
        assert told(scored(pool, [group("aa")], "lengths")) == [(2.0, None)]
        pool.close()


def test_a_group_is_done_before_those_behind_it(pool_of):
    pool = pool_of("when")
    functions = load_rewards(specs_of("when"), folder=HERE)

    async def stream() -> tuple[int, int]:
        pending = {asyncio.create_task(score_group(group("a", seconds=s), functions, pool=pool)) for s in (0.0, 1.0)}
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        counts = len(done), len(pending)
        await asyncio.wait(pending)
        return counts

    assert asyncio.run(stream()) == (1, 1)


def test_a_task_that_is_cancelled_leaves_the_pool_as_it_was(pool_of):
    pool = pool_of("when")
    functions = load_rewards(specs_of("when"), folder=HERE)

    async def cancelled() -> None:
        tasks = [asyncio.create_task(score_group(group("a", seconds=0.5), functions, pool=pool)) for _ in range(3)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(cancelled())
    assert told(scored(pool, [group("b", seconds=0.0)], "when")) == [(1.0, None)]


# ---- what goes wrong ----

HEALTHY = group("c", "d", kind="good", id="p/good")
WRONGS = {
    "hang": ("timeout", "did not answer within 1.5 s on prompt 'hang' (0.75 s for each of 2 completions)"),
    "exit": ("crash", "ended its worker (exit status 3) on prompt 'exit'"),
    "crash": ("crash", "killed its worker (signal 11, SIGSEGV) on prompt 'crash'; it last printed: 'about to crash'"),
    "kill": ("crash", "killed its worker (signal 9, SIGKILL; was memory short?) on prompt 'kill'"),
    "close everything": ("crash", " its worker"),
    "raise KeyboardInterrupt": ("exception", "failed on prompt 'raise KeyboardInterrupt': KeyboardInterrupt: "),
    "print and raise": ("exception", "ValueError: then not; it last printed: 'so far so good'"),
    "sleep": ("timeout", "did not answer within 1.5 s on prompt 'sleep' (0.75 s for each of 2 completions)"),
}


@pytest.mark.parametrize("function", slow_but((), of=("by_kind", "by_kind_async"), long={"by_kind"}))
def test_only_the_group_that_does_it_fails(function, pool_of):
    pool, log = pool_of(function, timeout_s=0.75), RewardLog()
    bad = [group("a", "b", id=kind, kind=kind) for kind in WRONGS]
    result = scored(pool, [HEALTHY, *bad, HEALTHY], function, log=log)
    assert told([result[0], result[-1]]) == [(1.0, None)] * 4
    for each, (_, cause) in zip(result[1:-1], WRONGS.values(), strict=True):
        assert [rollout.reward for rollout in each.rollouts] == [None, None]
        assert all(f"reward '{function}' " in r.error and cause in r.error for r in each.rollouts), each.rollouts[
            0
        ].error
    assert log.failures == {function: {"timeout": 4, "crash": 8, "exception": 4}}
    assert log.metrics()[f"reward/{function}/failed"] == 16.0


def test_an_async_function_that_waits_for_ever(pool_of):
    pool = pool_of("by_kind_async", timeout_s=0.5)
    kinds = ["await for ever", "await for ever and refuse to be cancelled"]
    one, two, good = scored(pool, [*(group("a", "b", kind=kind) for kind in kinds), HEALTHY], "by_kind_async")
    for each in (one, two):
        assert "did not answer within 1 s on prompt 'p/1'" in each.rollouts[0].error
    assert told([good]) == [(1.0, None)] * 2


def test_one_function_of_several_fails_alone(pool_of):
    pool = pool_of("by_kind", "lengths")
    bad, good = scored(pool, [group("aaa", "b", kind="exit"), HEALTHY], "by_kind", "lengths")
    assert [rollout.rewards for rollout in bad.rollouts] == [
        {"by_kind": None, "lengths": 3.0},
        {"by_kind": None, "lengths": 1.0},
    ]
    assert [rollout.reward for rollout in good.rollouts] == [2.0, 2.0]


@pytest.mark.slow
def test_a_batch_in_which_everything_hangs_ends_after_three_deadlines(pool_of):
    pool, log = pool_of("by_kind", timeout_s=0.5), RewardLog()
    groups = [group("a", kind="hang", id=str(i)) for i in range(12)]
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"no reward for any of 12 completions; .* did not answer within 0.5 s"):
        scored(pool, groups, "by_kind", log=log)
    assert log.failures["by_kind"] == {"timeout": 12}
    assert time.monotonic() - began < 30


def test_patience_ends_and_comes_back():
    patience = Patience(pause_s=0.2)
    for _ in range(3):
        assert patience.refusal("f", 10) is None
        patience.timed_out("f", "did not answer")
    assert patience.refusal("f", 10) == "was not called: 3 times running it did not answer"
    assert patience.refusal("g", 10) is None
    time.sleep(0.25)
    assert patience.refusal("f", 10) is None  # one tries
    assert patience.refusal("f", 10) is not None  # and the others wait for what comes of it
    patience.answered("f")
    assert patience.refusal("f", 10) is None


@linux
def test_what_a_function_started_ends_with_the_pool(pool_of):
    marker = f"spawned-{os.getpid()}-{time.monotonic_ns()}"
    pool = pool_of("spawn")
    scored(pool, [group("a", marker=marker)], "spawn")
    assert becomes(lambda: running(marker))
    pool.close()
    assert not running(marker)


@pytest.mark.slow
@linux
def test_what_a_function_started_ends_with_its_worker(pool_of):
    marker = f"bred-{os.getpid()}-{time.monotonic_ns()}"
    bad, good = scored(pool_of("by_kind"), [group("a", kind=f"breed {marker}"), HEALTHY], "by_kind")
    assert "ended its worker (exit status 1)" in bad.rollouts[0].error
    assert told([good]) == [(1.0, None)] * 2
    assert not running(marker)


@linux
def test_nothing_survives_a_parent_that_is_killed(tmp_path):
    marker = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    parent = f"""
    import asyncio, sys
    sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
    from test_reward_pool import HERE, group, load_rewards, score, specs_of, RewardPool
    specs = specs_of("spawn", "by_kind", "by_kind_async")
    pool = RewardPool(specs, folder=HERE, workers=2, timeout_s=1000)
    groups = [group("a", marker={marker!r}, kind="hang")]
    asyncio.run(score(groups, load_rewards(specs, folder=HERE), pool=pool))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)])
    try:
        assert becomes(lambda: running(marker))
        started = descendants(process.pid)
        assert len(started) >= 5  # two keepers, two workers, and what one of these spawned
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert becomes(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


# ---- what it leaves behind ----


def test_a_function_cannot_disturb_the_next_call(steady):
    for _ in range(3):
        assert told(scored(steady, [group("a")], "disturbs")) == [(1.0, None)]
    assert told(scored(steady, [group("a", kind="good")], "by_kind")) == [(1.0, None)]


def test_a_child_that_returns_answers_nothing(steady):
    (pid,) = {
        reward for reward, _ in told(scored(steady, [group("a", id=str(i)) for i in range(3)], "forks_and_goes_on"))
    }
    assert told(scored(steady, [group("a")], "where")) == [(pid, None)]


def test_there_is_nothing_to_read(steady):
    assert told(scored(steady, [group("a")], "reads_stdin")) == [(0.0, None)]


@linux
def test_what_is_printed_costs_no_memory(steady):
    with raises(RewardError) as raised:
        scored(steady, [group("a", megabytes=64)], "prints")
    assert len(raised.value.message) < 1000
    keepers = [pid for pid in descendants(os.getpid()) if b"sandbox_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    peaks = [int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) for pid in keepers]
    assert keepers and max(peaks) < 40_000  # kB


@linux
def test_memory_can_be_limited(pool_of):
    pool = pool_of("takes_memory", memory_mb=2048)
    with raises(RewardError):
        scored(pool, [group("a")], "takes_memory")


# ---- beginning and end ----


def test_nothing_is_started_before_it_is_needed_and_warm_starts_it(pool_of):
    pool = pool_of("where", workers=2)
    assert not pool_threads_of(pool)
    pool.warm()
    assert len(pool_threads_of(pool)) == 2
    pool.close()


def pool_threads_of(pool: RewardPool) -> list:
    return [lane for lane in (*pool._alone_lanes, pool._together_lane) if lane.is_alive()]


def test_closing_does_not_wait_for_what_hangs(pool_of):
    pool = pool_of("by_kind", "by_kind_async")
    functions = load_rewards(specs_of("by_kind", "by_kind_async"), folder=HERE)

    async def close_meanwhile() -> tuple[RolloutGroup, float]:
        task = asyncio.create_task(score_group(group("a", kind="sleep"), functions, pool=pool))
        while not all(lane.running for lane in (*pool._alone_lanes, pool._together_lane)):
            await asyncio.sleep(0.02)
        began = time.monotonic()
        await asyncio.to_thread(pool.close)
        return await task, time.monotonic() - began

    result, seconds = asyncio.run(close_meanwhile())
    assert seconds < 10
    assert result.rollouts[0].error.count("was not answered: the pool was closed") == 2
    assert not pool_threads_of(pool)
    with raises(RewardError):
        asyncio.run(score([group("a", kind="good")], functions, pool=pool))


@pytest.mark.slow
def test_a_module_that_a_worker_cannot_load(tmp_path, monkeypatch):
    text = "import os\nif 'BROKEN' in os.environ: raise RuntimeError('broken')\ndef f(completions): return [1.0]\n"
    (tmp_path / "loads_once.py").write_text(text)
    specs = [RewardConfig(function="loads_once:f")]
    functions = load_rewards(specs, folder=tmp_path)
    monkeypatch.setenv("BROKEN", "1")
    with RewardPool(specs, folder=tmp_path) as pool:
        with pytest.raises(RewardError, match=r"'f' could not be called: .*could not load .*RuntimeError: broken"):
            asyncio.run(score([group("a")], functions, pool=pool))
        monkeypatch.delenv("BROKEN")
        assert told(asyncio.run(score([group("a")], functions, pool=pool))) == [(1.0, None)]


def test_a_column_that_cannot_be_sent_fails_where_it_is_used(steady):
    groups = [group("a", kind="good", what=lambda: 1), group("b", kind="good", what=[1.0])]
    assert told(scored(steady, groups, "by_kind")) == [(1.0, None)] * 2
    (failed, _), fine = told(scored(steady, groups, "returns"))
    assert (failed, fine) == (None, (1.0, None))


@pytest.mark.parametrize("options", [{"workers": 0}, {"timeout_s": 0}])
def test_options_are_positive(options):
    with raises(ValueError):
        RewardPool([], **options)
