"""Learners that compute together: what each gets is to the byte what it gets alone, whatever becomes of the others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from learner_cases import SPECS, parameters

from groupwise.config.lora import LoraSpec
from groupwise.config.preference import PreferenceConfig
from groupwise.config.run import OptimizerConfig
from groupwise.errors import TrainingError
from groupwise.train import joint_trial
from groupwise.train.joint_trial import why_not_as_alone
from groupwise.train.learner import Learner
from groupwise.train.strategy import SingleProcess
from groupwise.train.together import JOIN_TOKENS, Joined, JointPasses, may_join
from groupwise.types import Sample
from slow_cases import slow_but

TARGETS = (("q_proj", "v_proj"), ("down_proj",), ("k_proj", "o_proj", "gate_proj"), ("up_proj", "q_proj"))
PAIRS = PreferenceConfig()

Work = Callable[[Learner], Any]


def learner(base, number: int, place: JointPasses | None, **options: Any) -> Learner:
    """A learner whose adapter, of a rank, a scale and targets of its own, already differs from the base."""
    draw = random.Random(number)
    lora = LoraSpec(rank=draw.choice((1, 2, 4, 8, 16)), alpha=draw.choice((4.0, 16.0)), targets=TARGETS[number % 4])
    strategy = SingleProcess() if place is None else Joined(place)
    made = Learner(base, **{"lora": lora, "threads": 1, "strategy": strategy} | options)
    g = torch.Generator().manual_seed(number)
    for parameter in made.parameters:
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return made


def outcome(made: Learner, work: Work) -> tuple[Any, list[torch.Tensor | None]]:
    """What a verb says, and the gradient that it leaves; the error where it raises one."""
    made.zero_grad()
    try:
        said = work(made)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, [None if p.grad is None else p.grad.clone() for p in made.parameters]


def at_once(place: JointPasses, learners: Sequence[Learner], works: Sequence[Work], *, lanes: int = 1) -> list[Any]:
    """What comes of each, in a thread of its own, where all first micro-batches, `lanes` of each, wait for a pass when
    the first begins."""
    place._free, expected = 0, lanes * len(learners)
    with ThreadPoolExecutor(len(learners)) as threads:
        begun = [threads.submit(outcome, *each) for each in zip(learners, works, strict=True)]
        until = time.monotonic() + 30
        while len(place._waiting) < expected and time.monotonic() < until:
            time.sleep(0.001)
        waiting = len(place._waiting)
        with place._changed:
            place._free = 1
            place._changed.notify_all()
        found = [future.result() for future in begun]
    assert waiting == expected
    return found


def assert_same_bytes(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for (said, gradients), (also_said, others) in zip(found, expected, strict=True):
        assert str(said) == str(also_said)  # of floats: all digits, and NaN is NaN
        for a, b in zip(gradients, others, strict=True):
            assert (
                (a is None or not a.any())
                if b is None
                else (a is not None and a.numpy().tobytes() == b.numpy().tobytes())
            )


@pytest.fixture(scope="module")
def base(make_base):
    return make_base("qwen3", dtype=torch.float32)


def grpo(samples: Sequence[Sample], loss: str = "grpo") -> Work:
    return partial(Learner.forward_backward, samples=samples, spec=SPECS[loss])


def batch(make_samples, draw: random.Random) -> list[Sample]:
    groups = [
        (draw.choice((0, 1, 3, 9, 9, 17)), [draw.choice((2, 3, 6, 6, 6)) for _ in range(draw.choice((1, 2, 4)))])
        for _ in range(draw.randint(1, 3))
    ]
    return make_samples(groups, seed=draw.randrange(1 << 30))


def some_work(make_samples, draw: random.Random) -> Work:
    """One of the verbs, on a batch of its own, by a loss and at a temperature of its own."""
    samples, kind = batch(make_samples, draw), draw.randrange(8)
    if kind == 0:
        return lambda made: made.forward_backward_supervised(samples)
    if kind == 1:
        return lambda made: made.forward(samples, temperature=0.7, reference=True)
    if kind == 2:
        pairs = [(sample, replace(sample, completion_ids=sample.completion_ids[::-1])) for sample in samples]
        return lambda made: made.forward_backward_preference(pairs, PAIRS)
    if kind == 3:
        return lambda made: made.forward_backward_custom(samples, lambda rows: (torch.cat(rows).nansum() ** 2, {}))
    spec, temperature = draw.choice([*SPECS.values()]), draw.choice((0.6, 1.0, 1.3))
    return lambda made: made.forward_backward(samples, spec, temperature=temperature)


@pytest.mark.parametrize(
    "architecture",
    slow_but(["qwen3", "of odd widths"], of=("qwen3", "qwen2", "llama", "of odd widths"), long=["qwen2"]),
)
def test_mixtures_have_the_bytes_that_each_has_alone(make_base, make_samples, architecture: str):
    """8 of each of 2 to 8 learners with ranks, scales, targets, losses, lengths and temperatures of their own."""
    draw, place = random.Random(architecture), JointPasses()
    if architecture == "of odd widths":  # rows of several begin anywhere in memory
        base = make_base("llama", dtype=torch.float32, intermediate_size=173)
    else:
        base = make_base(architecture, dtype=torch.float32)
    numbers = [draw.randrange(100) for _ in range(8)]
    together = [learner(base, number, place) for number in numbers]
    alone = [learner(base, number, None) for number in numbers]
    for _ in range(8):
        chosen = draw.sample(range(8), draw.randint(2, 8))
        works = [some_work(make_samples, draw) for _ in chosen]
        if draw.random() < 0.5:  # prompts that several have
            works[1] = works[0]
        found = at_once(place, [together[i] for i in chosen], works)
        assert_same_bytes(found, [outcome(alone[i], work) for i, work in zip(chosen, works, strict=True)])
    assert place.why_not is None and place.counts.failed == 0
    assert place.counts.seats > 1.5 * place.counts.passes


def test_double_precision_and_checkpointing(make_base, make_samples):
    draw, place = random.Random(7), JointPasses()
    base = make_base("qwen3", dtype=torch.float64)
    options = [{"gradient_checkpointing": number % 2 == 1} for number in range(6)]
    together = [learner(base, number, place, **mine) for number, mine in enumerate(options)]
    alone = [learner(base, number, None, **mine) for number, mine in enumerate(options)]
    samples = [batch(make_samples, draw) for _ in range(6)]
    works = [grpo(mine, "grpo with k3") for mine in samples]
    assert_same_bytes(at_once(place, together, works), list(map(outcome, alone, works)))
    assert place.counts.passes < place.counts.seats


def trained(made: Learner, samples: Sequence[Sample], spec: Any, *, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        made.forward_backward(samples, spec)
        made.optim_step(learning_rate=0.01 * (step + 1))
    return parameters(made)


@pytest.mark.parametrize("passes", [1, 2])
def test_several_steps_whoever_meets_whom(base, make_samples, passes: int):
    """Each with an optimizer, a schedule and a norm of its own; one is refused all of its steps."""
    place = JointPasses(at_once=passes)
    norms = [OptimizerConfig(max_grad_norm=norm) for norm in (0.1, 1.0, 1e9, 1.0, 1.0)]
    together = [learner(base, number, place, optimizer=norm) for number, norm in enumerate(norms)]
    alone = [learner(base, number, None, optimizer=norm) for number, norm in enumerate(norms)]
    works = [
        (make_samples([(9, (6, 5)), (4, (6,))], seed=number), spec)
        for number, spec in zip(range(5), SPECS.values(), strict=False)
    ]
    for each in (together[3], alone[3]):
        each.parameters[0].data[0, 0] = torch.nan
    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(lambda each, work: trained(each, *work), together, works))
    expected = [trained(each, *work) for each, work in zip(alone, works, strict=True)]
    for mine, theirs in zip(found, expected, strict=True):
        assert [x.numpy().tobytes() for x in mine] == [x.numpy().tobytes() for x in theirs]
    assert [each.refused_steps for each in together] == [0, 0, 0, 4, 0]
    assert [each.steps for each in together] == [4, 4, 4, 0, 4]


@pytest.mark.parametrize("kind", ["gradients", "log-probabilities"])
def test_micro_batches_of_one_learner_that_run_side_by_side_are_in_passes_of_their_own(base, make_samples, kind: str):
    """In one pass each would get the gradient of both, as they have the same parameters: the sum was twice too large,
    and only its norm said so."""
    place = JointPasses()
    together, alone = ([learner(base, n, which, threads=2) for n in range(3)] for which in (place, None))
    works: list[Work] = []
    for number in range(3):
        samples = make_samples([(40, (30, 30, 30)), (40, (30, 30, 30))], seed=number)
        works.append(grpo(samples) if kind == "gradients" else partial(Learner.forward, samples=samples))
    found = at_once(place, together, works, lanes=2)
    assert_same_bytes(found, [outcome(each, work) for each, work in zip(alone, works, strict=True)])
    assert place.counts.seats == 6 and place.counts.failed == 0 and 2 <= place.counts.passes <= 6


def test_numbers_that_are_not_finite_stay_with_their_learner(base, make_samples):
    """Also in the padding of grids that several share: its prompts and completions are the shorter ones."""
    place = JointPasses()
    together, alone = ([learner(base, n, which) for n in range(3)] for which in (place, None))
    for each in (together[1], alone[1]):
        for parameter in each.parameters:
            parameter.data.fill_(torch.nan)
    groups = [[(9, (6, 2)), (5, (3, 6))]] * 3
    works = [grpo(make_samples(mine, seed=n)) for n, mine in enumerate(groups)]
    found = at_once(place, together, works)
    assert place.counts.passes == 1 and place.counts.seats == 3
    assert_same_bytes([found[0], found[2]], [outcome(alone[n], works[n]) for n in (0, 2)])
    assert all(not bool(torch.isfinite(g).all()) for g in found[1][1] if g is not None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("a bug")])
def test_a_pass_that_fails_is_computed_again_by_each(base, make_samples, error: Exception):
    """One's backward fails, with others and alone: it sees that, and they see nothing of it."""
    place = JointPasses()
    together, alone = ([learner(base, n, which) for n in range(3)] for which in (place, None))

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise error

    together[2].parameters[0].register_hook(fail)
    works = [grpo(make_samples([(4 + n, (6,))], seed=n)) for n in range(3)]
    found = at_once(place, together, works)
    assert_same_bytes(found[:2], [outcome(alone[n], works[n]) for n in (0, 1)])
    expected = TrainingError if isinstance(error, torch.OutOfMemoryError) else ValueError
    assert found[2][0].startswith(expected.__name__) and not any(g is not None for g in found[2][1])
    assert place.counts.failed == 1 and place.counts.passes == 1


def test_a_loss_that_raises_is_left_out(base, make_samples):
    place = JointPasses()
    together, alone = ([learner(base, n, which) for n in range(2)] for which in (place, None))
    samples = make_samples([(5, (6, 4))])

    def broken(logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> Any:
        raise ValueError("a bug")

    def bad(made: Learner) -> Any:
        return made._accumulate(samples, lambda batch, _: broken, lambda batch: (1.0, 1.0), 1.0)

    good = grpo(samples)
    found = at_once(place, together, [good, bad])
    assert_same_bytes(found, [outcome(alone[0], good), outcome(alone[1], bad)])
    assert found[1][0] == "ValueError: a bug"
    assert place.counts.failed == 0 and place.counts.passes == 1


def test_a_reference_without_its_adapter_does_not_decide_who_joins(base, make_samples):
    """A run looks at the reference before it trains. With DoRA its adapter is nothing that joins, off or on."""
    place = JointPasses()
    made = learner(base, 0, place, lora=LoraSpec(rank=2, targets=["q_proj"], use_dora=True))
    samples = make_samples([(5, (6, 4))])
    made.forward(samples, reference=True)
    made.forward_backward(samples, SPECS["grpo"])
    assert (place.counts.passes, place.counts.failed) == (0, 0)


def test_who_computes_alone(make_base, make_samples):
    """Large micro-batches, and learners of anything but plain LoRA over a small model with the lean backbone."""
    base, place = make_base("qwen3", dtype=torch.float32, context=512), JointPasses()
    samples = make_samples([(9, (6, 5))])
    plain = learner(base, 0, place)
    plain.forward_backward(samples, SPECS["grpo"])
    assert (place.counts.passes, place.counts.seats) == (1, 1)
    plain.forward_backward(make_samples([(200, (JOIN_TOKENS - 199,))]), SPECS["grpo"])
    assert place.counts.passes == 1
    kinds = {"lora": None}, {"lora": LoraSpec(rank=2, dropout=0.5)}, {"lora": LoraSpec(rank=2, use_dora=True)}
    for options in kinds:
        other = learner(base if options["lora"] else make_base("qwen3", dtype=torch.float32), 0, place, **options)
        assert not may_join(other.model)
        other.forward_backward(samples, SPECS["grpo"])
    gemma = learner(make_base("gemma2", dtype=torch.float32), 0, place)
    gemma.forward_backward(samples, SPECS["grpo"])
    assert place.counts.passes == 1


def test_a_pass_has_a_bound(base, make_samples, monkeypatch):
    """Who has waited longest is in the next one, with what fits beside it."""
    monkeypatch.setattr("groupwise.train.together.PASS_TOKENS", 40)
    place = JointPasses()
    together = [learner(base, n, place) for n in range(4)]
    works = [partial(Learner.forward, samples=make_samples([(9, (6,))], seed=n)) for n in range(4)]
    at_once(place, together, works)
    assert place.counts.passes == 2 and place.counts.tokens == 4 * 15


def test_what_differs_on_this_processor_is_not_done(base, make_samples, monkeypatch):
    assert why_not_as_alone(base) is None
    own = joint_trial.joint_gradients

    def rounded(seats: Any) -> Any:
        passed = [each for each in own(seats) if each is not None]
        return [(each[0], each[1], [None if g is None else g + 1e-7 for g in each[2]]) for each in passed]

    monkeypatch.setattr(joint_trial, "joint_gradients", rounded)
    place = JointPasses()
    made = learner(base, 0, place)
    assert place.why_not == "gradients"
    made.forward_backward(make_samples([(9, (6,))]), SPECS["grpo"])
    assert place.counts.passes == 0


def test_an_interrupted_thread_leaves_the_others_to_themselves(base, make_samples, monkeypatch):
    place = JointPasses()
    together, alone = ([learner(base, n, which) for n in range(3)] for which in (place, None))
    works = [partial(Learner.forward, samples=make_samples([(9, (6,))], seed=n)) for n in range(3)]
    struck = threading.Event()

    def interrupted(seats: Any) -> Any:
        if not struck.is_set():
            struck.set()
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr("groupwise.train.together.joint_logprobs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        at_once(place, together, works)
    with place._changed:
        assert place._free == 1 and not place._waiting
    monkeypatch.undo()
    assert_same_bytes([outcome(together[0], works[0])], [outcome(alone[0], works[0])])


def test_an_interrupted_wait_for_the_processors_blocks_nobody(monkeypatch):
    place = JointPasses()

    def interrupted(condition: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt), place.halted():
        pass
    monkeypatch.undo()
    assert not place._halting and not place._halted
    with place.halted():
        assert place._halted
