"""The verbs on a real model: their values, that they add up, that what is refused changes nothing."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from sdk_cases import ADAM, gradient, scored, sequences, weights

from groupwise.config.lora import LoraSpec
from groupwise.config.loss import resolve_loss
from groupwise.errors import ConfigError, ContextLengthError, DataError, StorageError, TrainingError
from groupwise.model.load import LoadedModel, plain_attention
from groupwise.sdk import losses
from groupwise.sdk.datums import Datum, build_grpo_datums, datum_of
from groupwise.sdk.losses import make_loss_fn
from groupwise.sdk.trainer import AdamParams, TrainingClient, TrainingService
from wording import raises

LORA = LoraSpec(rank=3, alpha=6.0)


@pytest.fixture
def service(tiny: LoadedModel) -> Iterator[TrainingService]:
    with closing(TrainingService(tiny)) as opened:
        yield opened


@pytest.fixture
def policy(service: TrainingService) -> TrainingClient:
    """One that has left the base model."""
    client = service.create_training_client(lora=LORA)
    client.forward_backward(sequences(9)[0], "cross_entropy")
    client.optim_step(ADAM).result()
    return client


def test_forward_gives_a_logprob_for_every_target(policy: TrainingClient) -> None:
    data, _ = sequences()
    before = weights(policy)
    found = policy.forward(data).result().logprobs
    assert [len(row) for row in found] == [len(datum.tokens) - 1 for datum in data]  # N - 1 for N tokens
    model = policy.learner.base.model
    reference = policy.create_base_reference().forward(data).result().logprobs
    for datum, mine, base in zip(data, found, reference, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([datum.model_input])).logits[0]
        plain = logits.log_softmax(-1).gather(1, torch.tensor(datum.targets)[:, None])[:, 0]
        assert base == pytest.approx(plain.tolist(), abs=1e-4)
        assert mine != pytest.approx(plain.tolist(), abs=1e-4)
    assert weights(policy) == before and not gradient(policy).any()


def test_forward_backward_says_what_the_policy_said_before_it(policy: TrainingClient) -> None:
    data = scored(policy)
    every = policy.forward(data).result().logprobs
    output = policy.forward_backward(data, "ppo").result()
    for datum, row, whole in zip(data, output.logprobs, every, strict=True):
        for trained, value, known in zip(datum.mask, row, whole, strict=True):
            assert value == pytest.approx(known, abs=1e-5) if trained else math.isnan(value)
    unmasked = [datum.having(mask=None, logprobs=row) for datum, row in zip(data, every, strict=True)]
    for row, whole in zip(policy.forward_backward(unmasked, "ppo").result().logprobs, every, strict=True):
        assert row == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in losses.BUILT_IN if name != "cross_entropy"])
def test_a_custom_loss_is_the_built_in_one(policy: TrainingClient, name: str) -> None:
    data = scored(policy, drift=0.5)
    built_in = policy.forward_backward(data, name).result()
    expected = gradient(policy)
    policy.optim_step(AdamParams(learning_rate=0.0)).result()
    custom = policy.forward_backward_custom(data, lambda d, rows: losses.datum_loss(d, rows, name)).result()
    assert custom.metrics["loss/custom"] == pytest.approx(built_in.metrics["loss/policy"], rel=1e-4)
    assert expected.abs().max() > 1e-3
    assert torch.allclose(gradient(policy), expected, atol=1e-4 * float(expected.abs().max()))


def test_make_grpo_loss_fn_is_build_grpo_datums_with_grpo_loss(policy: TrainingClient) -> None:
    data, lengths = sequences()
    now = policy.forward(data).result().logprobs
    sampler = [(None, *(value - 0.1 for value in row)) for row in now]
    snapshot, reference = [[value - 0.3 for value in row] for row in now], [[v + 0.2 for v in row] for row in now]
    advantages = [1.0, -0.5, -0.5, 0.7, 0.7, -1.4]
    spec = losses.grpo_loss(kl_beta=0.1)
    built = build_grpo_datums(data, advantages, sampler, lengths, old_policy_logprobs=snapshot, ref_logprobs=reference)
    one = policy.forward_backward(built, spec).result()
    expected = gradient(policy)
    policy.optim_step(AdamParams(learning_rate=0.0)).result()
    loss_fn = make_loss_fn(spec, advantages, reference, lengths, sampler, snapshot)
    two = policy.forward_backward_custom(data, loss_fn).result()
    total = one.metrics["loss/policy"] + 0.1 * one.metrics["loss/kl"] * sum(d.loss_tokens for d in data)
    assert two.metrics["loss/custom"] == pytest.approx(total, rel=1e-4)
    assert torch.allclose(gradient(policy), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "sum"])
def test_calls_add_up_to_the_whole(service: TrainingService, reduction: str) -> None:
    """However a batch is cut into calls, the step is the learner's own on all of it."""
    whole, parts, own = (service.create_training_client(lora=LORA, seed=4) for _ in range(3))
    data, spec = scored(whole, drift=0.0), resolve_loss("grpo", reduction=reduction)
    whole.forward_backward(data, spec).result()
    for datum in data:
        parts.forward_backward([datum], spec)
    own.learner.forward_backward([datum.sample("advantages") for datum in data], spec)
    expected, adam = gradient(own), AdamParams(learning_rate=1e-3, eps=1e-2)
    norms = [client.optim_step(adam).result().grad_norm for client in (whole, parts)]
    assert norms == pytest.approx([float(expected.norm())] * 2, rel=1e-4)
    own.learner.zero_grad()


def test_a_sum_is_divided_in_optim_step(policy: TrainingClient) -> None:
    data = scored(policy)
    norms = []
    for normalization in (None, "NUM_LOSS_TOKENS", "NUM_SEQUENCES"):
        policy.forward_backward(data, "importance_sampling")
        step = policy.optim_step(AdamParams(learning_rate=0.0), grad_accumulation_normalization=normalization)
        norms.append(step.result().grad_norm)
    tokens = sum(datum.loss_tokens for datum in data)
    assert norms == pytest.approx([norms[0], norms[0] / tokens, norms[0] / len(data)], rel=1e-4)


def test_several_policies_are_trained_at_once_over_one_base(service: TrainingService) -> None:
    alone = service.create_training_client(lora=LORA, seed=1)
    for seed in range(3):
        alone.forward_backward(sequences(seed)[0], "cross_entropy")
        alone.optim_step(ADAM).result()
    one, other = (service.create_training_client(lora=LORA, seed=1) for _ in range(2))
    for seed in range(3):  # interleaved, nothing is waited for
        one.forward_backward(sequences(seed)[0], "cross_entropy")
        other.forward_backward(sequences(seed + 7)[0], "cross_entropy")
        one.optim_step(ADAM)
        other.optim_step(ADAM).result()
    assert weights(one) == weights(alone) != weights(other)
    assert len({client.name for client in (alone, one, other)}) == 3


def test_an_answer_can_be_awaited(policy: TrainingClient) -> None:
    async def loop() -> bool:
        output = policy.forward_backward(sequences()[0], "cross_entropy")
        step = policy.optim_step(ADAM)
        return (await step).applied and output.done() and bool((await output).logprobs)

    assert asyncio.run(loop())


@pytest.fixture
def gate(service: TrainingService) -> Iterator[threading.Event]:
    """Until it is set, no verb of the service begins."""
    opened = threading.Event()
    service.submit(opened.wait)
    yield opened
    opened.set()


@pytest.mark.parametrize("verb", ["forward_backward", "forward_backward_custom"])
def test_what_becomes_of_a_list_after_the_call_is_another_matter(service: TrainingService, verb: str) -> None:
    one, other = (service.create_training_client(lora=LORA, seed=4) for _ in range(2))
    loss: Any = "ppo" if verb == "forward_backward" else lambda data, rows: losses.datum_loss(data, rows, "ppo")
    data, gate = scored(one, drift=0.0), threading.Event()
    expected = getattr(one, verb)(data, loss).result().metrics
    service.submit(gate.wait)
    batch = list(data)
    pending = getattr(other, verb)(batch, loss)
    batch.clear()
    gate.set()
    assert pending.result().metrics == expected and torch.equal(gradient(other), gradient(one))


def test_what_a_state_is_to_give_back_is_taken_at_the_call(
    policy: TrainingClient, gate: threading.Event, tmp_path: Path
) -> None:
    extra = {"cursor": 3, "seen": [1, 2]}
    policy.save_state(tmp_path / "state", extra=extra)
    extra["cursor"], extra["seen"][:] = 4, []
    gate.set()
    assert policy.load_state(tmp_path / "state").result() == {"cursor": 3, "seen": [1, 2]}


def test_a_verb_that_nobody_waits_for_any_more_still_runs(policy: TrainingClient, gate: threading.Event) -> None:
    async def gives_up() -> None:
        policy.forward_backward(sequences()[0], "cross_entropy")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(policy.optim_step(ADAM), 0.01)

    before = policy.learner.steps
    asyncio.run(gives_up())
    gate.set()
    assert policy.service.submit(lambda: policy.learner.steps).result() == before + 1


def test_a_verb_that_waits_for_another_is_told_so(policy: TrainingClient) -> None:
    data = sequences()[0]
    reference = policy.create_base_reference()

    def waits(data: Sequence[Datum], rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        reference.forward(data).result(timeout=5.0)
        return rows[0].sum(), {}

    with raises(TrainingError):
        policy.forward_backward_custom(data, waits).result()
    known = reference.forward(data).result().logprobs
    assert policy.forward_backward_custom(data, lambda data, rows: (rows[0].sum() - sum(known[0]), {})).result()


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [7.0] * 4,
}
LONGEST: dict[str, dict[str, Any]] = {  # rows of these models, and options
    "qwen3": {},
    "gpt2": {},
    "phi3": {"original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE},
    "llama4_text": {"rope_parameters": LONG_ROPE},  # in padded rows
}


@pytest.mark.filterwarnings("ignore:.*padded rows")
@pytest.mark.parametrize("architecture", LONGEST)
def test_as_many_tokens_as_the_context_has_are_read_and_the_last_target_is_not_one(
    make_base: Callable[..., LoadedModel], architecture: str
) -> None:
    base = make_base(architecture, dtype=torch.float32, context=64, **LONGEST[architecture])
    most = base.context_length
    assert most == (16 if LONGEST[architecture] else 64)
    tokens = torch.randint(1, 250, (most + 2,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        whole = base.model(torch.tensor([tokens[:most]])).logits[0].log_softmax(-1)
    wanted = [float(whole[j, tokens[j + 1]]) for j in range(most)]
    service = TrainingService(base)
    with closing(service):
        policy = service.create_training_client(lora=LoraSpec(rank=4))
        row, longer = datum_of(tokens[: most + 1], prompt_len=1), datum_of(tokens, prompt_len=1)
        (found,) = policy.forward([row]).result().logprobs
        assert found == pytest.approx(wanted, abs=1e-4)
        policy.forward_backward([row], "cross_entropy").result()
        with raises(ContextLengthError):
            policy.forward([row, longer])


REFUSED: dict[str, type[Exception]] = {
    "empty": DataError,
    "long": ContextLengthError,
    "vocabulary": DataError,
    "missing": DataError,
    "loss": ConfigError,
    "mixed": ConfigError,
    "raises": ZeroDivisionError,
    "nan": TrainingError,
}


@pytest.mark.parametrize(("what", "error"), REFUSED.items())
def test_what_is_refused_loses_nothing(policy: TrainingClient, what: str, error: type[Exception]) -> None:
    data = scored(policy)
    policy.forward_backward(data, "ppo").result()
    held, before = gradient(policy), weights(policy)

    def attempt() -> object:
        if what == "empty":
            return policy.forward_backward([], "ppo")
        if what == "long":
            return policy.forward_backward([datum_of([1] * 200, prompt_len=1)], "cross_entropy")
        if what == "vocabulary":
            return policy.forward([datum_of([1, 100_000], prompt_len=1)])
        if what == "missing":
            return policy.forward_backward(sequences()[0], "ppo")
        if what == "loss":
            return policy.forward_backward(data, "grpo")
        if what == "mixed":
            return policy.forward_backward(data, resolve_loss("grpo")).result()
        broken = (lambda *_: 1 / 0) if what == "raises" else (lambda _, rows: (rows[0].sum() * math.nan, {}))
        return policy.forward_backward_custom(data, broken).result()

    with pytest.raises(error):
        attempt()
    assert torch.equal(gradient(policy), held) and weights(policy) == before
    assert policy.optim_step(ADAM).result().applied and weights(policy) != before


def test_a_gradient_that_is_not_finite_changes_nothing(policy: TrainingClient) -> None:
    before = weights(policy)
    policy.forward_backward_custom(
        sequences()[0], lambda _, rows: (torch.stack([r.sum() for r in rows]).sum().sqrt(), {})
    )
    with raises(TrainingError):
        policy.optim_step(ADAM).result()
    assert weights(policy) == before


def test_steps_without_a_gradient_and_twice_divided_are_refused(policy: TrainingClient) -> None:
    with raises(TrainingError):
        policy.optim_step(ADAM).result()
    policy.forward_backward(scored(policy), resolve_loss("dapo"))
    with raises(ConfigError):
        policy.optim_step(ADAM, grad_accumulation_normalization="NUM_LOSS_TOKENS").result()
    assert policy.optim_step(ADAM).result().applied


@pytest.mark.parametrize("name", ["learning_rate", "beta1", "eps", "weight_decay", "grad_clip_norm"])
def test_adam_has_bounds(name: str) -> None:
    with raises(ConfigError):
        AdamParams(**{name: math.nan})


def test_the_reference_has_no_optim_step(policy: TrainingClient) -> None:
    assert not hasattr(policy.create_base_reference(), "optim_step")


def test_a_state_goes_on_with_the_same_bytes(service: TrainingService, tmp_path: Path) -> None:
    def train(client: TrainingClient, seeds: range) -> None:
        for seed in seeds:
            client.forward_backward(scored(client, seed), "ppo")
            client.optim_step(ADAM).result()

    straight, first, second = (service.create_training_client(lora=LORA, seed=2) for _ in range(3))
    train(straight, range(4))
    train(first, range(2))
    first.save_state(tmp_path / "state", extra={"cursor": 17}).result()
    assert weights(first) != weights(second)
    assert second.load_state(tmp_path / "state").result() == {"cursor": 17}
    assert weights(first) == weights(second) and second.learner.steps == 2
    train(second, range(2, 4))
    assert weights(second) == weights(straight)
    straight.learner.save(tmp_path / "straight")
    second.learner.save(tmp_path / "second")
    for name in ("learner.safetensors", "learner.json"):  # the optimizer's moments and all counters too
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_state_is_whole_and_of_this_policy(service: TrainingService, policy: TrainingClient, tmp_path: Path) -> None:
    policy.forward_backward(sequences()[0], "cross_entropy")
    with raises(TrainingError):
        policy.save_state(tmp_path / "state").result()
    policy.optim_step(ADAM)
    with raises(ConfigError):
        policy.save_state(tmp_path / "state", extra={"x": object()}).result()
    policy.save_state(tmp_path / "state").result()
    before = weights(policy)
    with raises(ConfigError):
        service.create_training_client(lora=LoraSpec(rank=2)).load_state(tmp_path / "state").result()
    with raises(StorageError):
        policy.load_state(tmp_path / "nothing").result()
    (tmp_path / "state").rename(tmp_path / ".replaced-state")  # a kill while it was being replaced
    policy.load_state(tmp_path / "state").result()
    policy.save_state(tmp_path / "state").result()
    assert not (tmp_path / ".replaced-state").exists()
    for path in (tmp_path / "state").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with raises(StorageError):
        policy.load_state(tmp_path / "state").result()
    assert weights(policy) == before and not list(tmp_path.glob(".staging-*"))


def test_all_parameters_have_no_reference_of_their_own(tiny: LoadedModel, make_base) -> None:
    with closing(TrainingService(make_base("qwen3", dtype=torch.float32))) as service:
        client = service.create_training_client(lora=None)
        client.forward_backward(sequences()[0], "cross_entropy")
        assert client.optim_step(ADAM).result().applied
        with raises(ConfigError):
            client.create_base_reference()


def test_closing_ends_the_thread(tiny: LoadedModel) -> None:
    before = set(threading.enumerate())
    with closing(TrainingService(tiny)) as service:
        service.create_training_client(lora=LORA).forward(sequences()[0]).result()
    assert not [thread for thread in threading.enumerate() if thread not in before]


def test_a_datum_may_be_padded_as_recipes_pad(policy: TrainingClient) -> None:
    tokens, prompt = (5, 6, 7, 8, 9), 3
    padded = Datum(
        model_input=tokens[:-1],
        loss_fn_inputs={"target_tokens": (0, 0, 8, 9), "logprobs": (0, 0, -5.0, -5.0), "advantages": (0, 0, 1.0, 1.0)},
    )
    whole = datum_of(tokens, prompt_len=prompt)
    (row,), (full,) = policy.forward([padded]).result().logprobs, policy.forward([whole]).result().logprobs
    assert row[2:] == full[2:] and row[:2] != full[:2] and all(map(math.isfinite, row))
    policy.forward_backward([padded], "importance_sampling").result()
    found = gradient(policy)
    policy.optim_step(AdamParams(learning_rate=0.0)).result()
    (built,) = build_grpo_datums([whole], [1.0], [(-5.0, -5.0)], prompt)
    policy.forward_backward([built], "importance_sampling").result()
    assert torch.allclose(found, gradient(policy), atol=1e-6)


def targeted(seed: int = 0) -> list[Datum]:
    """Sequences with targets of their own and weights of either sign, some 0; every other twice over equal tokens."""
    rng = random.Random(seed)
    data = []
    for i, datum in enumerate(sequences(seed)[0]):
        for _ in range(1 + i % 2):
            targets = [rng.randrange(280) for _ in datum.model_input]
            weights = [rng.choice((-1.0, 0.0, 0.5, 2.0)) for _ in targets]
            data.append(
                Datum(model_input=datum.model_input, loss_fn_inputs={"target_tokens": targets, "weights": weights})
            )
    return data


def plain(policy: TrainingClient, data: Sequence[Datum]) -> list[torch.Tensor]:
    """log p of every target by the policy's own module tree, with transformers' attention, and a graph."""
    model = policy.learner.model
    with plain_attention(model):
        logits = [model(input_ids=torch.tensor([datum.model_input])).logits[0] for datum in data]
    return [
        row.log_softmax(-1).gather(1, torch.tensor(datum.targets)[:, None])[:, 0]
        for row, datum in zip(logits, data, strict=True)
    ]


@pytest.mark.parametrize("verb", ["forward_backward", "forward_backward_custom"])
def test_targets_may_be_any_tokens(policy: TrainingClient, verb: str) -> None:
    data = targeted()
    rows = plain(policy, data)
    weighed = [torch.tensor(datum.loss_fn_inputs["weights"]) for datum in data]
    loss = -torch.stack([(w * row).sum() for w, row in zip(weighed, rows, strict=True)]).sum()
    loss.backward()
    expected = gradient(policy)
    policy.learner.zero_grad()
    for found, row in zip(policy.forward(data).result().logprobs, rows, strict=True):
        assert found == pytest.approx(row.tolist(), abs=1e-4)
    if verb == "forward_backward":
        output = policy.forward_backward(data, "cross_entropy").result()
        assert output.metrics["loss/policy"] == pytest.approx(loss.item(), rel=1e-5)
        for row, datum, known in zip(output.logprobs, data, rows, strict=True):
            trained = [j for j, marked in enumerate(datum.mask) if marked]
            assert [row[j] for j in trained] == pytest.approx([known[j].item() for j in trained], abs=1e-4)
    else:
        output = policy.forward_backward_custom(
            data, lambda d, rows: losses.datum_loss(d, rows, "cross_entropy")
        ).result()
        assert output.metrics["loss/custom"] == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(gradient(policy), expected, atol=1e-5 * float(expected.abs().max()))


def test_a_ratio_may_be_of_any_tokens(policy: TrainingClient) -> None:
    data = [datum.having(weights=None, advantages=datum.loss_fn_inputs["weights"]) for datum in targeted(1)]
    rows = plain(policy, data)
    advantages = [torch.tensor(datum.loss_fn_inputs["advantages"]) for datum in data]
    sampler = [row.detach() + 0.1 * torch.sin(torch.arange(len(row))) for row in rows]
    ratios = [((p - q).exp() * a).sum() for p, q, a in zip(rows, sampler, advantages, strict=True)]
    (-torch.stack(ratios).sum()).backward()
    expected = gradient(policy)
    policy.learner.zero_grad()
    data = [datum.having(logprobs=q) for datum, q in zip(data, sampler, strict=True)]
    policy.forward_backward(data, "importance_sampling").result()
    assert torch.allclose(gradient(policy), expected, atol=1e-4 * float(expected.abs().max()))


def test_a_target_that_the_model_does_not_have_is_refused(policy: TrainingClient) -> None:
    wrong = Datum(model_input=(5, 6, 7), loss_fn_inputs={"target_tokens": (6, 280, 2), "weights": (1.0, 1.0, 1.0)})
    for verb in (policy.forward, lambda d: policy.forward_backward(d, "cross_entropy")):
        with raises(DataError):
            verb([wrong])
    unread = wrong.having(weights=(1.0, 0.0, 1.0))  # padding
    assert policy.forward_backward([unread], "cross_entropy").result().metrics["loss/policy"] > 0
    policy.learner.zero_grad()


# ---- misuse ----
def wrong_losses() -> dict[str, Any]:
    """What a function of one's own may return that is no loss and metrics, and what is said of it."""
    return {
        "no metrics": (lambda _, rows: rows[0].sum(), "returned a Tensor; it must return .loss, metrics."),
        "nothing": (lambda _, rows: None, "returned a NoneType; it must return .loss, metrics."),
        "a vector": (lambda _, rows: (rows[0], {}), r"the loss has shape \[\d+\]; it must be one number"),
        "a float": (lambda _, rows: (1.0, {}), "the loss is a float; it must be a tensor"),
        "cut": (lambda _, rows: (rows[0].sum().detach(), {}), "the loss has no gradient"),
        "metrics None": (lambda _, rows: (rows[0].sum(), None), "the metrics are a NoneType; they must be a mapping"),
        "a text": (lambda _, rows: (rows[0].sum(), {"x": "y"}), "metric 'x' is 'y'; it must be a number"),
        "a row": (lambda _, rows: (rows[0].sum(), {"x": rows[0]}), "metric 'x' is a Tensor; it must be a number"),
    }


@pytest.mark.parametrize("what", wrong_losses())
def test_a_loss_of_ones_own_that_is_none_is_told_what_it_must_be(policy: TrainingClient, what: str) -> None:
    data = sequences()[0]
    policy.forward_backward(data, "cross_entropy").result()
    held, (broken, _words) = gradient(policy), wrong_losses()[what]
    with raises(ConfigError):
        policy.forward_backward_custom(data, broken).result()
    assert torch.equal(gradient(policy), held)
    right = policy.forward_backward_custom(data, lambda _, rows: (rows[0].sum(), {"x": torch.tensor(2.0), "n": 3}))
    found = right.result()
    assert found.metrics == pytest.approx({"x": 2.0, "n": 3.0, "loss/custom": sum(found.logprobs[0])})


@pytest.mark.parametrize(
    "call",
    [
        lambda policy, data: policy.optim_step({"learning_rate": 1e-3}),
        lambda policy, data: policy.optim_step(None),
        lambda policy, data: AdamParams(learning_rate="1e-3"),
        lambda policy, data: AdamParams(beta1=True),
        lambda policy, data: policy.forward_backward("abc", "cross_entropy"),
        lambda policy, data: policy.forward_backward(data[0], "ppo"),
        lambda policy, data: policy.forward([{"model_input": [1]}]),
        lambda policy, data: policy.forward_backward(data, None),
        lambda policy, data: policy.forward_backward(data, lambda *_: 0),
        lambda policy, data: policy.forward_backward(data, "ppo", [1]),
        lambda policy, data: policy.forward_backward_custom(data, "ppo"),
        lambda policy, data: policy.save_state(None),
        lambda policy, data: policy.load_state(7),
    ],
)
def test_what_is_of_another_kind_is_told_what_it_must_be(policy: TrainingClient, call: Any) -> None:
    with raises((ConfigError, DataError)):
        call(policy, sequences()[0])


def test_a_closed_trainer_says_so(tiny: LoadedModel) -> None:
    service = TrainingService(tiny)
    policy = service.create_training_client(lora=LORA)
    reference, data = policy.create_base_reference(), sequences()[0]
    service.close()
    calls: list[Callable[[], object]] = [
        lambda: policy.forward(data),
        lambda: policy.forward_backward(data, "cross_entropy"),
        lambda: policy.optim_step(ADAM),
        lambda: policy.save_state("x"),
        lambda: reference.forward(data),
        lambda: service.create_training_client(),
    ]
    for call in calls:
        with raises(TrainingError):
            call()


def test_a_gradient_can_be_forgotten(policy: TrainingClient, tmp_path: Path) -> None:
    before = weights(policy)
    policy.forward_backward(sequences(1)[0], "cross_entropy").result()
    policy.zero_grad().result()
    assert not gradient(policy).any() and weights(policy) == before
    with raises(TrainingError):
        policy.optim_step(ADAM).result()
    policy.forward_backward(sequences(2)[0], "cross_entropy").result()
    one = policy.optim_step(AdamParams(learning_rate=0.0)).result().grad_norm
    policy.forward_backward(sequences(2)[0], "cross_entropy").result()
    assert policy.optim_step(AdamParams(learning_rate=0.0)).result().grad_norm == pytest.approx(one)
    assert policy.save_state(tmp_path / "state").result()
