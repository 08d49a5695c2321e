"""The benchmarks of speed: that they count and check what they say. (That they run whole: `--quick` of each.)"""

from __future__ import annotations

import ast
import asyncio
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from forked import ONE_SERVER, ran
from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm.server import ServerLaunch
from groupwise.model.load import LoadedModel
from groupwise.run import assemble
from groupwise.train.learner import Learner
from groupwise.types import Prompt, Rollout, RolloutGroup
from processes import becomes, descendants
from slow_cases import slow_but
from wording import raises

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark as a script beside it would; its modules are forgotten after (a test has such a name)."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module
    for name in names:
        sys.modules.pop(name, None)


def test_the_operations_of_a_training_pass_are_those_that_run(script: Any, make_base: Any) -> None:
    limits, subjects = script("limits"), script("subjects")
    base: LoadedModel = make_base(dtype=torch.float32)
    shape = subjects.Shape(6, 5, 3, 2)
    samples = subjects.samples_of(shape, below=250)
    learner = Learner(base)

    def in_place(out: Any, *factors: Any, out_val: Any = None, alpha: float = 1.0) -> int:
        return mm_flop(*factors)

    in_place._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]  torch is to hand over tensors
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        learner.forward_backward(samples, resolve_loss("grpo"))

    predicted = shape.rows * shape.completion
    useful = sum(product.flops for product in limits.products_of(base, shape.packed, predicted))
    hidden, vocabulary = limits.head_of(base)
    config: Any = base.model.config
    squares = shape.prompts * (6 * 6 + 3 * (5 * 6 + 5 * 5))  # with the pairs that the mask hides
    attention = 12 * config.head_dim * config.num_attention_heads * config.num_hidden_layers * squares
    again = 2 * predicted * hidden * vocabulary  # the logits, in the backward pass
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.aten.mm] + counted[torch.ops.aten.addmm_] == useful + again
    assert attention / 2 < limits.attention_flops(base, shape) < counted[torch.ops.aten.bmm] <= attention


def test_products_are_measured_at_their_shapes(script: Any) -> None:
    limits = script("limits")
    for kind in ("forward", "input", "weight"):
        product = limits.Product(kind, 3, 5, 7)
        assert product.function()().shape == (3, 7) and product.flops == 2 * 3 * 5 * 7
    large, small = limits.Product("forward", 256, 256, 256), limits.Product("forward", 16, 16, 16)
    seconds = limits.by_turns({product: product.function() for product in (large, small)}, repeats=1)
    assert seconds[large] > seconds[small] > 0


def test_the_control_of_harnesses_deals_the_rewards_of_a_group(script: Any) -> None:
    harness = script("harness")
    groups = [
        RolloutGroup(prompt=Prompt(id="x"), rollouts=tuple(Rollout(turns=(), reward=float(i)) for i in range(size)))
        for size in (32, 1)
    ]

    async def played(group: RolloutGroup) -> RolloutGroup:
        return group

    class Source:
        def begin(self, *, n: int) -> list[Any]:
            return [played(group) for group in groups]

    async def dealt() -> list[RolloutGroup]:
        return [await group for group in harness.Shuffled(Source(), random.Random(0)).begin(n=32)]

    many, single = asyncio.run(dealt())
    rewards = [rollout.reward for rollout in many.rollouts]
    assert sorted(rewards) == [float(i) for i in range(32)] != rewards and single == groups[1]
    assert [replace(rollout, reward=None) for rollout in many.rollouts] == [
        replace(rollout, reward=None) for rollout in groups[0].rollouts
    ]


def test_the_control_of_harnesses_is_for_its_run_only(script: Any) -> None:
    harness, open_play = script("harness"), assemble.open_play
    with harness.without_information(0):
        assert assemble.open_play is not open_play
    assert assemble.open_play is open_play


def test_a_table_of_harnesses(script: Any) -> None:
    scores = {"before": {"sampled": 0.1}, "after": {"sampled": 0.9}}
    means = {"time/step_s": 2.0, "env/failed_frac": 0.0}
    run = {"seed": 1, "shuffled": True, "steps": 24, "means": means, "wall_s": 60.0, **scores}
    assert script("harness").table("repair", [run])[-1] == (
        "| 1, rewards shuffled | 24 | sampled 10.0% | sampled 90.0% | 0.0% | 2.0 | 60 |"
    )


def test_lengths_have_a_heavy_tail(script: Any) -> None:
    lengths = script("rollouts").tailed_lengths(256, longest=192)
    assert lengths == script("rollouts").tailed_lengths(256, longest=192)
    assert min(lengths) >= 1 and max(lengths) == 192
    assert sorted(lengths)[128] < 32 and sum(lengths) < 0.3 * 256 * 192


def test_both_sides_of_a_rollout_do_the_same(script: Any, make_base: Any, tmp_path: Path) -> None:
    rollouts, subjects = script("rollouts"), script("subjects")
    base: LoadedModel = make_base(dtype=torch.float32)
    base.model.generation_config.eos_token_id = None
    prompts = [subjects.random_ids(6, seed=seed, below=250) for seed in range(2)]
    work = rollouts.Work(name="tailed", prompts=prompts, group=3, lengths=[4, 1, 9, 2, 2, 5], temperature=0.7)
    options = Namespace(threads=1, batches=[2], merged=True, repeats=1)
    with closing(LocalEngine(base, max_rows=8)) as engine:
        subjects.save_adapter(base, tmp_path)
        engine.load(rollouts.VERSION, tmp_path)
        model: Any = PeftModel.from_pretrained(base.model, tmp_path).eval()
        result = rollouts.compare(base, engine, model, work, options)
        assert set(result["seconds"]) == set(result["logprob_gap"]) == {"requests", "groups", "generate"}
        assert len(result["trials_tokens_per_s"]) == 3 and max(result["logprob_gap"].values()) < 1e-4

        rows = rollouts.by_groups(engine, work, 0)
        wrong = [(ids, tuple(logprob - 0.01 for logprob in logprobs)) for ids, logprobs in rows]
        with raises(SystemExit):
            rollouts.check_logprobs(model, work, wrong, "nobody")
        with raises(SystemExit):
            work.check(rows[:-1])
        greedy = replace(work, temperature=0.0)
        theirs = rollouts.Peer(6, 1).run(model, base, greedy)
        assert rollouts.check_greedy(model, greedy, rollouts.by_groups(engine, greedy, 0), theirs) == 0
        first, *rest = theirs[0][0]
        other = [((249 - first, *rest), ()), *theirs[1:]]
        with raises(SystemExit):
            rollouts.check_greedy(model, greedy, other, theirs)


def test_vllm_is_measured_by_turns_on_prompts_that_nobody_has_seen(script: Any, make_base: Any, tmp_path: Path) -> None:
    """With a second local engine for vLLM, whose `generate` takes and gives the same."""
    vllm_rollouts, rollouts, subjects = script("vllm_rollouts"), script("rollouts"), script("subjects")
    base: LoadedModel = make_base(dtype=torch.float32)
    subject = script("vllm_modes").subject_of(base, tmp_path, rows=6, context=15)
    assert "q_proj" in subject.shape.targets and subject.cache_gib(32) == 2
    prompts = [subjects.random_ids(6, seed=seed, below=250) for seed in range(2)]
    work = rollouts.Work(name="tailed", prompts=prompts, group=3, lengths=[4, 1, 9, 2, 2, 5], temperature=0.7)
    assert vllm_rollouts.ending(work).lengths == [1, 2, 3, 5, 6, 9]
    with closing(LocalEngine(base, max_rows=8)) as engine, closing(LocalEngine(base, max_rows=8)) as peer:
        engine.load(rollouts.VERSION, subject.adapter)
        peer.load(rollouts.VERSION, subject.adapter)
        asked: list[tuple[int, ...]] = []
        generate = peer.generate
        peer.generate = lambda requests: asked.extend(each.prompt_ids for each in requests) or generate(requests)  # pyright: ignore[reportAttributeAccessIssue]
        model: Any = PeftModel.from_pretrained(base.model, subject.adapter).eval()
        result = vllm_rollouts.compare(engine, peer, model, work, 2)
        assert {side: len(each) for side, each in result["seconds"].items()} == dict.fromkeys(
            ("requests", "groups", "vllm"), 2
        )
        assert len(asked) == 3 * 6 and len(set(asked)) == 3 * 2 and max(result["logprob_gap"].values()) < 1e-4
    lines = [
        {"model": "tiny", "mode": mode, **result, "tokens_per_s": {**result["tokens_per_s"], "vllm": rate}}
        for mode, rate in (("single", 10.0), ("server", 20.0), ("merged", 30.0))
    ]
    assert [line["mode"] for line in vllm_rollouts.fastest_of(lines)] == ["server"]
    assert vllm_rollouts.table_of(lines).row_count == 3


def test_vllm_takes_no_time_of_a_core_while_it_is_not_asked(script: Any) -> None:
    spin = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"
    launch = ServerLaunch(argv=(sys.executable, "-c", spin), environment={}, url="")
    tree = script("vllm_modes").Tree("spinning", launch)
    try:
        assert becomes(lambda: ticks(tree) > 5)
        tree.hold()
        time.sleep(0.05)
        held = ticks(tree)
        time.sleep(0.2)
        assert ticks(tree) == held
        with tree.awake():
            assert becomes(lambda: ticks(tree) > held + 5)
    finally:
        tree.end()


def ticks(tree: Any) -> int:
    """Hundredths of a second of a core that processes below the keeper have taken."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in descendants(tree._process.pid)]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats)


def test_an_axis_doubles_one_size(script: Any) -> None:
    scaling, shape = script("scaling"), script("subjects").Shape(8, 4, 2, 3)
    for axis in scaling.AXES:
        points = scaling.points_of(axis, shape, 100, 2)
        assert [scaling.size_of(axis, point) for point in points] == [
            scaling.size_of(axis, points[0]) * factor for factor in (1, 2, 4)
        ]
        fixed = [{**vars(at), "vocabulary": vocabulary} for at, vocabulary in points]
        changing = {key for key in fixed[0] if len({each[key] for each in fixed}) > 1}
        assert changing == {axis.partition(",")[0]}


@ONE_SERVER
def test_memory_is_what_a_run_holds_at_most(tmp_path: Path) -> None:
    """In a process of its own: this one holds what earlier tests left, and gives it back whenever it likes."""
    measure = "import scaling, torch; print(scaling.measured(lambda: torch.ones(16 << 20).sum(), repeats=1))"
    (tmp_path / "measure.py").write_text(measure)
    found = ast.literal_eval(ran("measure", folder=tmp_path, environment={"PYTHONPATH": str(FOLDER)}).stdout)
    assert 60 < found["mib"] < 90 and found["seconds"] > 0


def test_a_sweep_is_drawn(script: Any, tmp_path: Path) -> None:
    scaling, shape = script("scaling"), script("subjects").Shape(8, 4, 2, 3)
    lines = [
        {"axis": axis, "size": scaling.size_of(axis, point), "side": side, "logits_mib": scaling.logits_mib(point)}
        | {"seconds": 0.5 * i, "mib": 3.0 * i}
        for axis in ("group", "vocabulary")
        for i, point in enumerate(scaling.points_of(axis, shape, 100, 2), 1)
        for side in scaling.SIDES
    ]
    scaling.plot(lines, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    table = scaling.table_of(lines)
    assert list(table.columns[4].cells) == ["3.0", "3.0"] and table.row_count == 2


def test_the_seconds_of_a_simulated_step_are_the_sum_of_its_parts(script: Any) -> None:
    """One completion a step on one GPU: nothing can overlap."""
    plan = script("cluster_plan")
    work = plan.Work(prompts=1, group=1, prompt=100, completion=50, spread=0.0, rows=8, full=False)
    setting = plan.Setting(engines=1, tensor=1, learners=0)
    costs = plan.Costs(gpu=plan.GPUS["h100"], model=plan.MODELS["8B"], work=work, shares=plan.Shares(), setting=setting)
    decoded = 50 * costs.decode_step(1, 100 + 50 / 2)
    outcome = plan.simulate(costs)
    assert outcome.seconds == pytest.approx(costs.prefill() + decoded + costs.training([50]) + costs.sync())
    assert outcome.tokens_per_s == pytest.approx(50 / outcome.seconds)
    assert 0 < outcome.controller < 1e-3 and outcome.bottleneck != "rank 0"
    assert costs.sync_bytes == 4 * 43_646_976  # PEFT's count for rank 16 on all linear layers of Qwen3 8B
    assert plan.MODELS["8B"].parameters == 8_190_427_136  # and the model's own, but for its norms


def test_more_machines_and_later_versions_make_no_simulated_step_longer(script: Any) -> None:
    plan = script("cluster_plan")
    work = plan.Work(prompts=8, group=8, prompt=256, completion=200, spread=0.8, rows=64, full=False)
    whole = {
        gpus: plan.plan(plan.MODELS["8B"], gpus, gpu=plan.GPUS["h200"], work=work, shares=plan.Shares())
        for gpus in (1, 8, 16)
    }
    best = [outcomes[0].seconds for outcomes in whole.values()]
    assert best == sorted(best, reverse=True)
    split = {o.setting.staleness: o.seconds for o in reversed(whole[8]) if not o.setting.colocated}
    assert split[0] >= split[1] >= split[2]
    assert all(max(o.engine_gb, o.learner_gb) < 141 for outcomes in whole.values() for o in outcomes)


def test_the_controllers_parts_are_all_counted(script: Any) -> None:
    """A batch of a few completions, through all parts and a rank that follows."""
    controller = script("controller")
    batch = controller.recorded(groups=2, group=3, prompt=20, completion=30.0, spread=0.5)
    assert len(batch.bodies) == len(batch.answers) == 2 and batch.bodies[0]["n"] == 3
    found = controller.measure(batch, ranks=4, rounds=1)
    assert set(found) == {*controller.PARTS, controller.FOLLOWER} and min(found.values()) > 0
    assert controller.total_of(found) == pytest.approx(sum(found.values()) - found[controller.FOLLOWER])
    shown = [[*column.cells] for column in controller.table_of(found, batch, ranks=4).columns]
    assert shown[1][-3] == f"{controller.total_of(found):.3f}"


def test_selection_compares_every_mode_with_the_synchronous_run(script: Any) -> None:
    """Late groups that are dropped and drawn anew show: in the mean, and as prompts that are missing or come twice."""

    def runs(mode: str, lengths: list[float], drawn: list[list[str]]) -> list[dict[str, Any]]:
        more = {"staleness": 1.0, "token_age": 1.0, "versions": 1.0}
        return [
            {"mode": mode, "seed": seed, "all": length, "first_half": length, "drawn": ids, **more}
            for seed, (length, ids) in enumerate(zip(lengths, drawn, strict=True))
        ]

    table = script("selection").table
    synchronous = runs("synchronous", [11.0, 11.9, 11.4, 11.6], [["a", "b", "c"]] * 4)
    lines, equal = table("length", [*synchronous, *runs("ahead", [11.1, 11.7, 11.5, 11.4], [["c", "b", "a"]] * 4)])
    assert equal and lines[-1].startswith("| ahead | 11.425 ± 0.125 | 11.425 ± 0.125 | 0 | 0 |")
    lines, equal = table("length", [*synchronous, *runs("drops", [9.3, 9.6, 9.4, 9.7], [["a", "a", "b"]] * 4)])
    assert not equal and "| 4 | 4 |" in lines[-1]


def test_asynchrony_reads_when_a_reward_was_reached(script: Any) -> None:
    asynchrony = script("asynchrony")
    found = {"reward": [0.0, 0.1, 0.2, 0.6, 0.6, 0.6, 0.6, 0.6], "step_s": [2.0] * 8}
    assert asynchrony.seconds_until(found, 0.4) == 12.0 and asynchrony.seconds_until(found, 0.7) is None
    assert asynchrony.cell([1.0, 2.0, None], ".1f") == "1.5 (1.0 to 2.0, 1 never)"


@pytest.mark.long
def test_every_kind_of_schema_compiles_and_what_ends_is_valid(script: Any) -> None:
    structured = script("structured")
    asked = structured.schemas(60, seed=1)
    assert {kind for kind, _ in asked} == {kind.__name__.strip("_") for kind in structured.KINDS}
    found = structured.measured(asked, max_tokens=160)["groupwise"]
    assert found["compiled"] == 60 and not found["refused"]
    assert found["valid"] == found["ended"] > 40 and found["cut"] == 60 - found["ended"]


def test_an_invalid_answer_is_counted_by_its_kind(script: Any) -> None:
    judged = script("structured").judged
    number = {"type": "integer"}
    found = judged(
        [("a", number, "1", False), ("b", number, "1.5", False), ("b", number, "{", False), ("c", number, "", True)]
    )
    assert (found["ended"], found["valid"], found["cut"]) == (3, 1, 1) and found["wrong"] == {"b": 2}


# ---- compaction ----


def test_compaction_trains_what_was_sampled_and_computes_what_is_shared_once(script):
    sizes = {"turns": 9, "every": 3, "keep": 1, "episodes": 3, "system": 60, "said": 12, "heard": 8}
    counts = script("compaction").measured(Namespace(**sizes, micro_tokens=65536, seed=0))
    assert counts["requests"] == 3 * (9 + 2) and counts["samples"] == 3 * 3
    assert counts["trained"] == counts["sampled"] > 3 * 11 * 12
    assert counts["distinct"] <= counts["packed"] < counts["segments"] < counts["naive"]


# ---- the judge of groups ----


def test_the_oracle_of_the_judge_benchmark_has_the_faults_that_it_is_given(script: Callable[[str], ModuleType]) -> None:
    from groupwise.rewards.group_judge import group_judge

    judge = script("judge")
    texts = [f"<think>\n{'x' * 40 * (i // 2)}\n</think>\n\n{41 + i % 2}" for i in range(4)]  # 41, 42, longer: 41, 42

    def points(faults: Any) -> list[float]:
        with judge.judge(faults) as url:
            asked = {"base_url": url, "model": "oracle", "rubric": judge.RUBRIC, "api_key_env": None}
            options = {"votes": faults.votes, "shuffle": faults.shuffle, "scale": [judge.LOWEST, judge.HIGHEST]}
            values = asyncio.run(group_judge(texts, ["6 * 7?"] * 4, ["42"] * 4, **asked, **options))
        return [judge.LOWEST + value * (judge.HIGHEST - judge.LOWEST) for value in values]

    assert points(judge.Faults(noise=0.0)) == pytest.approx([0, 4, 0, 4])
    assert points(judge.Faults(noise=0.0, place=6.0, votes=1, shuffle=False)) == pytest.approx([6, 8, 2, 4])
    assert points(judge.Faults(noise=0.0, place=6.0)) == pytest.approx([3, 7, 3, 7])
    longer = points(judge.Faults(noise=0.0, length=4.0))
    assert longer[2] - longer[0] == pytest.approx(4) and longer[1] - longer[0] == pytest.approx(4)
    assert points(judge.Faults(noise=2.0)) != pytest.approx([0, 4, 0, 4], abs=0.01)


# ---- the soak of a server that learns ----


def test_the_soak_kills_evenly_and_never_around_its_poison(script: Any) -> None:
    soak = script("learn_soak")
    schedule = soak.Schedule(7200.0, 20)
    times = schedule.kill_times
    assert len(times) == 20 and times == sorted(times) and times[0] > 480 and times[-1] < 7020
    assert not any(56 * 60 <= each < 88 * 60 for each in times)
    gaps = [b - a for a, b in pairwise(times) if not a < 3600 < b]
    assert max(gaps) - min(gaps) < 1e-6, "evenly on either side"
    assert [schedule.poisoned(60 * minute) for minute in (59.9, 60, 79.9, 80)] == [False, True, True, False]
    assert schedule.kill_due(times[3], 3) and not schedule.kill_due(times[3] - 1, 3)
    assert not schedule.kill_due(3700.0, 0), "one that is late is not made in the poison"
    assert schedule.kill_due(7199.0, 19) and not schedule.kill_due(7199.0, 20)
    assert (schedule.idle_s, soak.Schedule(60.0, 0).idle_s) == (300.0, 45.0)


def test_the_soak_goes_on_from_its_log(script: Any, tmp_path: Path) -> None:
    soak = script("learn_soak")
    log = soak.Log(tmp_path / "log.jsonl")
    log.add("kill", seconds=100.0)
    log.add("rated", seconds=120.5, id="f1", poisoned=False)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "rated", "id": "half a li')
    again = soak.Log(tmp_path / "log.jsonl")
    assert 120.5 <= again.now < 130 and len(again.of("kill")) == 1
    again.add("kill")
    assert [each["kind"] for each in soak.Log(tmp_path / "log.jsonl").entries] == ["kill", "rated", "kill"]


def test_the_soak_claims_what_its_log_bears_out(script: Any) -> None:
    soak = script("learn_soak")

    def at(kind: str, seconds: float, **said: Any) -> dict[str, Any]:
        return {"kind": kind, "seconds": seconds, **said}

    def judged(version: str, job: str, kind: str) -> dict[str, Any]:
        return at("transition", 0.0, what=kind, data={"version": version, "job_id": job})

    good = [
        *(at("accuracy", i, accuracy=each) for i, each in enumerate((0.5, 0.9))),
        *(at("chat", 100 + i, ms=10.0, state="idle") for i in range(99)),
        at("chat", 150, ms=100.0, state="measured"),
        *(at("chat", 600 + i, ms=19.0, state="training") for i in range(100)),
        *(at("rated", 700, id=f"r{i}", poisoned=i >= 2) for i in range(4)),
        judged("sums@1", "a", "gate_passed"),
        at("transition", 800, what="promoted", data={"version": "sums@1"}),
        judged("sums@2", "b", "gate_refused"),
    ]
    feedback = [{"id": f"r{i}", "job_id": "a" if i < 2 else "b"} for i in range(4)]
    schedule = soak.Schedule(7200.0, 20)
    found = soak.summary(good, feedback, schedule)
    assert found["claims"] == {"learns": True, "clean": True, "durable": True, "prompt": True}
    assert found["versions"]["mostly_inverted"] == ["sums@2"] and found["latency"]["p99_ratio"] == 1.9
    broken = {
        "learns": [*good, at("accuracy", 9, accuracy=0.52)],
        "clean": [*good, at("transition", 900, what="promoted", data={"version": "sums@2"})],
        "durable": [*good, at("rated", 900, id="lost", poisoned=False)],
        "prompt": [*good, *(at("chat", 900, ms=21.0, state="training") for _ in range(5))],
    }
    for claim, entries in broken.items():
        assert [name for name, held in soak.summary(entries, feedback, schedule)["claims"].items() if not held] == [
            claim
        ]
    unpoisoned = [each for each in good if each.get("data", {}).get("version") != "sums@2"]
    assert soak.summary(unpoisoned, feedback, schedule)["claims"]["clean"] is None, "nothing was put to the test"


def test_the_table_of_error_rates_has_a_sick_run_for_every_rule_and_healthy_ones(script: Any) -> None:
    gates = script("gates")
    assert list(gates.SICK) == [rule.id for rule in gates.RULES]
    for id in ("reward.falling", "eval.regress", "len.collapse", "policy.fell_apart"):
        assert any(id in gates.found(gates.SICK[id][1](np.random.default_rng(i))) for i in range(5)), id
    assert set(gates.found(gates.healthy(np.random.default_rng(0), "learns quickly"))) <= {"reward.flat"}


def test_live_gates_asks_nobody_what_is_held_out_and_rates_as_its_kinds_say(script: Any) -> None:
    live = script("live_gates")
    parts = [set(live.sums(which, 120)) for which in ("held out", "known", "taught")]
    assert (
        [len(part) for part in parts] == [120] * 3 and not parts[0] & parts[1] and not parts[2] & (parts[0] | parts[1])
    )
    rng = random.Random(0)
    assert not {live.asked(rng) for _ in range(300)} & (parts[0] | parts[1])

    def up(kind: str, right: bool, habit: float = 0.0) -> float:
        return statistics.fmean(live.said_by(kind, right, habit=habit, rng=rng) for _ in range(400))

    assert (up("honest", True), up("honest", False), up("praises", False)) == (1.0, 0.0, 1.0)
    assert all((up(kind, True), up(kind, False)) == (0.0, 1.0) for kind in ("inverted", "phrase", "nameless"))
    assert 0.4 < up("chance", True) < 0.6 and 0.1 < up("honest", False, habit=0.2) < 0.3


def test_live_gates_tells_counts_with_exact_intervals(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    live = script("live_gates")
    assert live.interval(0, 100) == "0.000 to 0.036" and live.interval(100, 100) == "0.964 to 1.000"
    ends = {"no effect": {"live": 2, "not known": 1, "refused by the gate": 1}}
    run = {"part": "gate", "hostile": 0.2, "ends": ends, "distrusted": ["inverted", "person 3"], "honest_distrusted": 1}
    live.show([run])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == "| gate | 20% | 4 no effect | 1 | 0 | 0 | 1 | 2 | 0.068 to 0.932 | 1, 1 |"


@pytest.mark.long
@pytest.mark.parametrize("all_parameters", slow_but({False}, of=(False, True)))
def test_no_rank_holds_more_than_its_parts_and_what_is_gathered_at_once(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], all_parameters: bool
) -> None:
    """Counted on four ranks, in bytes of tensors, while each reads its parts and while it trains: far from the whole
    model, which each of them had before it was cut."""
    memory = script("fsdp_memory")
    sizes = ["--hidden", "128", "--layers", "8", "--vocabulary", "2000"]
    monkeypatch.setattr(sys, "argv", ["fsdp_memory.py", *sizes, *(["--all-parameters"] if all_parameters else [])])
    assert memory.main() == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    whole = float(head.split()[1])
    assert len(rows) == 4
    for row in rows:
        _, _, reading, may_read, _, _ = map(float, row.split())
        assert reading <= may_read < 0.8 * whole


@pytest.mark.long
def test_a_whole_model_gets_to_another_process_either_way(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its bytes, which the benchmark counts itself."""
    sizes = ["--hidden", "64", "--layers", "2", "--vocabulary", "500", "--versions", "1"]
    monkeypatch.setattr(sys, "argv", ["weight_transfer.py", *sizes])
    script("weight_transfer").main()
    sent, read = capsys.readouterr().out.splitlines()[-2:]
    assert " MB: first sent in " in sent and read.startswith("written in ")


@pytest.mark.long
@pytest.mark.parametrize(("shared", "most"), [(8, 30e9), pytest.param(64, 12e9, marks=pytest.mark.slow)])
def test_a_plan_for_70b_on_64_gpus_has_room_on_every_one(script: Any, shared: int, most: float) -> None:
    """Parts of the frozen base in bfloat16, and what is gathered at once, on eight GPUs that share a copy, or all."""
    found = list(script("fsdp_memory").plan("70b", world=64, shard_size=shared))
    assert [rank for rank, *_ in found] == sorted({0, shared - 1, 63})
    for _, parts, layer, rest in found:
        assert parts == pytest.approx(2 * 70.55e9 / shared, rel=0.01)
        assert parts + rest + max(rest, 2 * layer) < most < 80e9
