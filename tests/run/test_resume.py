"""A run that died and goes on is the run that did not die: the same metrics, rollouts and adapter bytes."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from cli_project import save_model
from cuda_errors import ASSERT, cuda_error
from groupwise.config.run import RunConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import DeviceLostError, StorageError
from groupwise.run.display import LineDisplay
from groupwise.run.loop import RunResult, run_loop
from groupwise.run.stop_request import StopRequest
from groupwise.run.training_run import TrainingRun
from groupwise.store.adapters import AdapterStore
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion
from running_jobs import Dies, Interrupts, adapter_bytes, config, metrics_of, rollouts_of, sidecars_of
from slow_cases import long_case, slow_but

EVALUATED = {
    "eval": {
        "data": {
            "source": "groupwise.tasks.starter.tasks:prompts",
            "args": {"skill": ["add"], "style": "bare", "n": 4, "split": "test"},
        },
        "every": 3,
        "modes": ["greedy"],
        "best": "greedy",
    }
}
ALL = {
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8, "refill": 2.0}
    | {"replay": {"size": 8, "share": 0.5}, "reroll": {"max_groups": 1}},
    "train": {"steps": 4, "learning_rate": 1e-3, "minibatches": 2, "passes": 2, "lora": {"rank": 4, "dropout": 0.1}},
    "algo": {"kl": "k3", "kl_coeff": 0.1, "kl_target": 0.01, "reference": "ema", "reference_decay": 0.5},
    "data": {"curriculum": {"weight": True}},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the plain run, which nothing disturbed."""
    return run_loop(config(tmp_path_factory.mktemp("plain"))).run_dir


def died(tmp_path: Path, step: int, **sections) -> Path:
    """A run that ended while `step` was shown: trained, published, logged; not evaluated, not checkpointed."""
    display = Dies(step, total=6, stream=io.StringIO())
    with pytest.raises(Dies.Now):
        run_loop(config(tmp_path, resume="auto", **sections), display=display)
    (run_dir,) = (tmp_path / "runs").iterdir()
    return run_dir


KEPT = {"adapters": {"keep": 100}}

SOURCES = [
    {
        "source": "groupwise.tasks.starter.tasks:prompts",
        "args": {"skill": [skill], "n": 12},
        "name": skill,
        "weight": weight,
    }
    for skill, weight in (("add", 1), ("sub", 3))
]
MIXED = {"data": {"source": None, "args": {}, "sources": SOURCES}}
STREAMED = {"data": {**MIXED["data"], "streaming": True, "shuffle_buffer": 4}}


def test_a_finished_run_goes_on_for_more_steps(tmp_path: Path) -> None:
    """At a constant rate it is the run that was asked for as many from the beginning."""

    def ran(place: Path, steps: int, **sections) -> RunResult:
        return run_loop(config(place, train={"steps": steps, "warmup_steps": 1}, **sections))

    short, whole = ran(tmp_path / "short", 2), ran(tmp_path / "whole", 4)
    result = ran(tmp_path / "short", 4, resume="auto")
    assert (result.run_dir, result.steps, result.newest) == (short.run_dir, 4, whole.newest)
    assert metrics_of(result.run_dir) == metrics_of(whole.run_dir)
    assert rollouts_of(result.run_dir) == rollouts_of(whole.run_dir)
    kept, expected = adapter_bytes(result.run_dir), adapter_bytes(whole.run_dir)
    assert kept.keys() >= expected.keys() and {name: kept[name] for name in expected} == expected != {}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(ALL, id="with everything"),
        pytest.param(MIXED, id="a mixture of sources", marks=pytest.mark.slow),
        long_case(STREAMED, id="streams"),
        pytest.param({**EVALUATED, **KEPT}, id="every version", marks=pytest.mark.slow),
        pytest.param(KEPT, id="without evaluations", marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_bit_for_bit(tmp_path: Path, sections: dict) -> None:
    sections = {"train": {"steps": 4}, **sections}
    whole = run_loop(config(tmp_path / "whole", **sections)).run_dir
    first = died(tmp_path, 3, **sections)
    result = run_loop(config(tmp_path, resume="auto", **sections))
    assert result.run_dir == first and result.steps == 4
    assert metrics_of(first) == metrics_of(whole)
    assert rollouts_of(first) == rollouts_of(whole)
    assert adapter_bytes(first) == adapter_bytes(whole) != {}
    assert sidecars_of(first) == sidecars_of(whole)


@pytest.mark.parametrize("where", ["training", long_case("sampling")])
def test_a_run_whose_gpu_is_lost_says_so_and_goes_on_bit_for_bit(tmp_path: Path, plain: Path, monkeypatch, where: str):
    calls = iter(range(100))
    owner, name = (LocalEngine, "submit") if where == "sampling" else (Learner, "step")
    working = getattr(owner, name)

    def breaks(*args, **options):
        if next(calls) == 4:
            raise cuda_error(ASSERT)
        return working(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks)
        with pytest.raises(DeviceLostError) as raised:
            run_loop(config(tmp_path, resume="auto"))
    assert raised.value.exit_code == 75
    result = run_loop(config(tmp_path, resume="auto"))
    assert result.steps == 6 and metrics_of(result.run_dir) == metrics_of(plain)
    assert adapter_bytes(result.run_dir) == adapter_bytes(plain) != {}


@pytest.fixture(scope="module")
def mixture(make_base, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Sections of a run of a mixture in bfloat16, whose routers hesitate."""
    base = make_base("qwen3_moe", dtype=torch.bfloat16, context=256, num_experts=16, num_experts_per_tok=4)
    model = save_model(base, tmp_path_factory.mktemp("mixture") / "model")
    return {"model": str(model), "dtype": "bfloat16", "rewards": [{"function": "running_jobs:says_a"}]}


def replayed_of(run_dir: Path) -> list[float]:
    """Of every step, the share of its tokens that were trained with the experts that they were sampled with."""
    return [record["router/recorded_frac"] for record in metrics_of(run_dir)]


@pytest.mark.slow
def test_with_routing_replay_it_goes_on_bit_for_bit(tmp_path: Path, mixture: dict) -> None:
    """The groups of the replay buffer, carried over from steps before the death, keep their experts."""
    train = {
        **ALL["train"],
        "steps": 6,
        "lora": {"rank": 2, "targets": ["all-linear", "experts"]},
        "router_replay": True,
    }
    # no KL, and of pairs about half have equal rewards: in every step they make room for others
    rollout = {**ALL["rollout"], "refill": 1.0, "prompts_per_step": 8, "group_size": 2}
    sections = {**mixture, **KEPT, "train": train, "rollout": rollout}
    whole = run_loop(config(tmp_path / "whole", **sections)).run_dir
    first = died(tmp_path, 5, **sections)
    assert run_loop(config(tmp_path, resume="auto", **sections)).run_dir == first
    assert metrics_of(first) == metrics_of(whole)
    assert adapter_bytes(first) == adapter_bytes(whole) != {}
    assert rollouts_of(first) == rollouts_of(whole)
    assert min(replayed_of(whole)) > 0.95 and any(each["router/mismatch_frac"] > 0 for each in metrics_of(whole))
    assert any(each["replay/groups"] > 0 for each in metrics_of(whole)[4:])
    unlike = run_loop(config(tmp_path / "unlike", **{**sections, "train": {**train, "router_replay": False}})).run_dir
    assert adapter_bytes(unlike) != adapter_bytes(whole)


@pytest.mark.slow
def test_it_dies_before_the_first_checkpoint_and_twice(tmp_path: Path, plain: Path) -> None:
    died(tmp_path, 1)
    died(tmp_path, 4)
    first = run_loop(config(tmp_path, resume="auto")).run_dir
    assert metrics_of(first) == metrics_of(plain) and adapter_bytes(first) == adapter_bytes(plain)
    again = run_loop(config(tmp_path, resume="auto"))  # it was finished: another run begins
    assert again.run_dir != first and again.steps == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [pytest.param(EVALUATED, id="best"), pytest.param({"train": {"steps": 6, "lora": None}}, id="all parameters")],
)
def test_one_that_dies_after_its_last_checkpoint_is_only_concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict
) -> None:
    whole = run_loop(config(tmp_path / "whole", **sections))

    async def dies(self: TrainingRun, step: int, **how: bool) -> None:
        raise Dies.Now

    named = {"run_dir": str(tmp_path / "here"), "resume": "auto", **sections}
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "conclude", dies)
        with pytest.raises(Dies.Now):
            run_loop(config(tmp_path, **named))
    records = (tmp_path / "here" / "metrics.jsonl").read_bytes()
    for _ in range(2):  # and again, which changes nothing
        result = run_loop(config(tmp_path, **named))
        assert (result.version, result.steps, result.interrupted) == (whole.version, 6, False)
        assert (result.before.keys(), result.after.keys()) == (whole.before.keys(), whole.after.keys())
        assert (tmp_path / "here" / "metrics.jsonl").read_bytes() == records
        assert adapter_bytes(result.run_dir) == adapter_bytes(whole.run_dir)
        if "eval" in sections:
            assert AdapterStore(result.run_dir / "adapters").active == whole.version
        else:
            assert (result.run_dir / "model" / "model.safetensors").exists()


@pytest.mark.long
def test_one_that_dies_before_it_is_concluded_is_concluded_and_then_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint says that no step is left; which version is its policy was not settled yet."""
    sections = {"train": {"steps": 2, "learning_rate": 0.0}, "eval": {**EVALUATED["eval"], "every": 1}}

    async def dies(self: TrainingRun, step: int, **how: bool) -> None:
        raise Dies.Now

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "conclude", dies)
        with pytest.raises(Dies.Now):
            run_loop(config(tmp_path, **sections))
    (run_dir,) = (tmp_path / "runs").iterdir()
    result = run_loop(config(tmp_path, resume="auto", **sections))
    assert (result.run_dir, result.steps, result.version) == (run_dir, 2, PolicyVersion.base())
    assert AdapterStore(run_dir / "adapters").active == result.version != result.newest
    assert run_loop(config(tmp_path, resume="auto", **sections)).run_dir != run_dir


def test_one_that_was_interrupted_in_its_last_step_is_over(tmp_path: Path) -> None:
    stop = StopRequest()
    given = config(tmp_path, resume="auto", train={"steps": 2})
    first = run_loop(given, display=Interrupts(stop, step=2, total=2), stop=stop)
    assert first.interrupted and first.steps == 2
    assert run_loop(given).run_dir != first.run_dir


@pytest.mark.long
@pytest.mark.parametrize("step", slow_but({4}, of=(2, 3, 4)))
def test_what_is_interrupted_is_saved_before_it_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Killed in the evaluation: nothing is lost, and one that was due after that step (not after step 3) is done."""
    sections = {"eval": {**EVALUATED["eval"], "every": 2}, "train": {"steps": 4}, "checkpoint": {"every": 0}}
    whole = run_loop(config(tmp_path / "whole", **sections))
    stop, evaluate = StopRequest(), TrainingRun.evaluate

    async def dies(self: TrainingRun, at: int) -> bool:
        if at == step:
            raise Dies.Now
        return await evaluate(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "evaluate", dies)
        with pytest.raises(Dies.Now):
            run_loop(
                config(tmp_path, resume="auto", **sections),
                display=Interrupts(stop, step=step, total=4),
                stop=stop,
            )
    notes = io.StringIO()
    result = run_loop(config(tmp_path, resume="auto", **sections), display=LineDisplay(4, stream=notes))
    assert f"going on after step {step}" in notes.getvalue() and result.version == whole.version
    assert metrics_of(result.run_dir) == metrics_of(whole.run_dir)
    assert adapter_bytes(result.run_dir).items() >= adapter_bytes(whole.run_dir).items() != set()


@pytest.mark.long
def test_the_versions_of_a_checkpoint_outlive_an_evaluation_after_it(tmp_path: Path) -> None:
    """A checkpoint after step 3, an evaluation after step 4, and only the newest version is kept besides."""
    evaluated = {"eval": {**EVALUATED["eval"], "every": 4, "best": None}}
    sections = {**evaluated, "checkpoint": {"every": 3}, "adapters": {"keep": 1}}
    whole = run_loop(config(tmp_path / "whole", **sections))
    first = died(tmp_path, 5, **sections)
    result = run_loop(config(tmp_path, resume="auto", **sections))
    assert result.run_dir == first and result.steps == 6
    assert metrics_of(first) == metrics_of(whole.run_dir)


class Intruded(LineDisplay):
    """Begins the run a second time when `step` is shown, as another process would."""

    def __init__(self, again: RunConfig, step: int):
        super().__init__(6, stream=io.StringIO())
        self._again, self._step = again, step
        self.said = ""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        if step == self._step:
            with pytest.raises(StorageError) as refused:
                run_loop(self._again)
            self.said = str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_second_process_takes_nothing_from_a_run_that_is_being_trained(
    tmp_path: Path, plain: Path, named: bool
) -> None:
    """Its records go beyond its checkpoint: who resumed it would wind them back."""
    given = config(tmp_path, resume="auto", **({"run_dir": str(tmp_path / "here")} if named else {}))
    display = Intruded(given, step=5)
    result = run_loop(given, display=display)
    assert "another process is training in" in display.said
    assert metrics_of(result.run_dir) == metrics_of(plain)
    assert rollouts_of(result.run_dir) == rollouts_of(plain)
    assert adapter_bytes(result.run_dir) == adapter_bytes(plain)


def test_one_that_stopped_early_is_not_trained_on(tmp_path: Path) -> None:
    """`eval.patience` ended it before `train.steps`."""
    early = {"eval": {**EVALUATED["eval"], "every": 1, "patience": 1}, "train": {"steps": 6, "learning_rate": 0.0}}
    named = {"run_dir": str(tmp_path / "here"), "resume": "auto", **early}
    first, again = run_loop(config(tmp_path, **named)), run_loop(config(tmp_path, **named))
    assert first.steps == again.steps < 6 and again.version == first.version


OVERLAPPED = ({"weight_sync_interval": 3}, {"max_staleness": 2}, {"weight_sync_interval": 0})


@pytest.mark.long
@pytest.mark.parametrize("rollout", slow_but([{"max_staleness": 2}], of=OVERLAPPED))
def test_overlapped_every_prompt_is_trained_once(tmp_path: Path, rollout: dict) -> None:
    """64 prompts are an epoch of 16 steps: within six, none may come twice and none of the first be missing."""
    sections = {"rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8, **rollout}}
    first = died(tmp_path, 3, **sections)
    result = run_loop(config(tmp_path, resume="auto", **sections))
    assert result.run_dir == first and result.steps == 6
    drawn = Counter(group["prompt"]["id"] for group in rollouts_of(first))
    assert max(drawn.values()) == 1 and len(drawn) >= 24
    assert [record["step"] for record in metrics_of(first)] == [1, 2, 3, 4, 5, 6]


IN_FLIGHT = {"max_staleness": 2, "in_flight_updates": True}


@pytest.mark.parametrize("rollout", slow_but([], of=({"max_staleness": 2}, IN_FLIGHT), long=[IN_FLIGHT]))
def test_groups_that_were_under_way_are_replayed(tmp_path: Path, mixture: dict, rollout: dict) -> None:
    """Overlapped, what was being sampled when the run died is sampled again, and trained with its experts."""
    sections = {
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8, "refill": 1.0, **rollout},
        **mixture,
    }
    first = died(tmp_path, 3, **sections)
    assert run_loop(config(tmp_path, resume="auto", **sections)).run_dir == first
    assert len(replayed_of(first)) == 6 and min(replayed_of(first)) > 0.95
    turns = [turn for group in rollouts_of(first) for rollout in group["rollouts"] for turn in rollout["turns"]]
    assert turns and all("routed_experts" in turn for turn in turns)
