"""What clients sample with top_p or top_k is trained under what each token was drawn from."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

import torch

from groupwise.bridges.tinker.datums import SampledMasks
from groupwise.model.load import plain_attention
from groupwise.recorded import SamplingMask
from groupwise.sdk.datums import Datum
from groupwise.types import Completion, FinishReason
from tinker_wire import PROTOBUF, Wire, datum, read_output, request, sample


def narrowed(wire: Wire, sampler: str, seq: int, count: int = 4, **params: Any) -> list[tuple[list[int], list[float]]]:
    """Completions of the prompt (5, 6, 7) and their log-probabilities."""
    params = {"max_tokens": 6, "seed": seq, "stop": [], "top_p": 0.5, **params}
    found = sample(wire, sampler, seq, num_samples=count, sampling_params=params)
    read = [(np.frombuffer(each.tokens, "<i4"), np.frombuffer(each.logprobs, "<f4")) for each in found.sequences]
    return [(ids.tolist(), logprobs.tolist()) for ids, logprobs in read]


def sampled_datum(ids: list[int], logprobs: list[float], advantage: float) -> Any:
    """A completion as training loops send it, with zeros in the prompt's part."""
    return datum([5, 6, 7, *ids], logprobs=[0.0, 0.0, *logprobs], advantages=[0.0, 0.0, *[advantage] * len(ids)])


@pytest.fixture
def base_sampler(wire: Wire) -> str:
    made = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=1)
    return made["sampling_session_id"]


def test_what_was_sampled_with_top_p_is_trained_as_it_was_drawn(wire: Wire, base_sampler: str) -> None:
    drawn = narrowed(wire, base_sampler, 1)
    data = [sampled_datum(*each, advantage) for each, advantage in zip(drawn, (1.0, -1.0, 0.5, 0.5), strict=True)]
    model, other = wire.model(0), wire.model(1)
    rows, metrics = wire.backward_answer(model, 1, data, "importance_sampling")
    for row, (_, told) in zip(rows, drawn, strict=True):
        np.testing.assert_allclose(row[2:], told, atol=1e-5)  # a fresh adapter changes nothing: the ratio is 1
    assert metrics["loss:sum"] == pytest.approx(-6.0, abs=1e-3)  # -sum of the advantages
    whole = [(tokens, {**values, "logprobs": [lp + 1e-3 for lp in values["logprobs"]]}) for tokens, values in data]
    plain, _ = wire.backward_answer(other, 1, whole, "importance_sampling")  # nothing that the server knows
    assert all((a[2:] > b[2:] + 0.1).any() for a, b in zip(rows, plain, strict=True))
    assert not np.allclose(wire.gradient(model), wire.gradient(other), rtol=0.05)


def test_the_gradient_is_that_of_the_policy_restricted_to_what_could_be_drawn(wire: Wire, base_sampler: str) -> None:
    (ids, told), *_ = narrowed(wire, base_sampler, 2, count=1, top_p=1.0, top_k=3)
    model = wire.model()
    wire.backward_answer(model, 1, [sampled_datum(ids, told, 2.0)], "importance_sampling")
    learner = wire.tinker.models.find(model).trainer.learner
    with plain_attention(learner.model):
        logits = learner.model(input_ids=torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1]
    kept = torch.full_like(logits, -torch.inf).scatter(1, logits.topk(3).indices, 0.0)
    p = (logits + kept).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    loss = -2.0 * (p - torch.tensor(told)).exp().sum()
    grads = torch.autograd.grad(loss, learner.parameters)
    expected = np.concatenate([grad.numpy().ravel() for grad in grads])
    np.testing.assert_allclose(wire.gradient(model), expected, atol=1e-5 * np.abs(expected).max())


def test_turns_and_cut_completions_are_known_and_others_are_not(wire: Wire, base_sampler: str) -> None:
    masks = wire.tinker.models.masks
    (ids, told), *_ = narrowed(wire, base_sampler, 3, count=1)
    prompt = [5, 6, 7, *ids, 8, 9]
    chunks = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
    params = {"max_tokens": 3, "seed": 1, "stop": [], "top_p": 0.5}
    (second,) = sample(wire, base_sampler, 4, prompt=chunks, sampling_params=params).sequences
    more, told_more = np.frombuffer(second.tokens, "<i4").tolist(), np.frombuffer(second.logprobs, "<f4").tolist()

    def kept(tokens: list[int], logprobs: list[float]) -> list[bool] | None:
        """Which targets were drawn from a part of the vocabulary."""
        inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": [1.0] * len(logprobs)}
        found = masks.attach(Datum(model_input=tokens[:-1], loss_fn_inputs=inputs)).kept
        return None if found is None else (~found.array().all(-1)).tolist()

    both, told_both = [*prompt, *more], [0.0, 0.0, *told, 0.0, 0.0, *told_more]
    marks = kept(both, told_both)
    assert marks is not None and not any(marks[:2]) and not any(marks[8:10]) and any(marks[2:8]) and any(marks[10:])
    assert kept(both[:6], told_both[:5]) == marks[:5]
    assert kept([4, *both[1:]], told_both) is None  # another prompt
    assert kept(both, [lp + 1e-4 for lp in told_both]) is None  # other log-probabilities
    greedy = narrowed(wire, base_sampler, 5, count=1, temperature=0.0)[0]
    assert kept([5, 6, 7, *greedy[0]], [0.0, 0.0, *greedy[1]]) is None


def test_what_is_remembered_is_bounded_and_the_log_says_what_that_costs(caplog: pytest.LogCaptureFixture) -> None:
    masks = SampledMasks(most=5000)
    kept = SamplingMask.of(np.array([[True, True, False]] * 4))

    def completion(i: int) -> Completion:
        probs = {"logprobs": (-1.0,) * 4, "kept_logprobs": (-0.5 - i,) * 4}
        return Completion(token_ids=(0, 1, 0, 1), text="", finish_reason=FinishReason.LENGTH, kept=kept, **probs)

    def is_known(i: int) -> bool:
        inputs = {"target_tokens": [0, 1, 0, 1], "logprobs": [-0.5 - i] * 4, "advantages": [1.0] * 4}
        return masks.attach(Datum(model_input=[2, 0, 1, 0], loss_fn_inputs=inputs)).kept is not None

    for i in range(50):
        masks.remember((2,), completion(i))
    known = [i for i in range(50) if is_known(i)]
    assert 2 < len(known) < 12 and known == list(range(50 - len(known), 50))
    assert caplog.text.count("tinker_mask_bytes is 5000") == 1


def test_spans_that_do_not_cover_the_targets_are_refused(wire: Wire, base_sampler: str) -> None:
    (ids, told), *_ = narrowed(wire, base_sampler, 6, count=1)
    model = wire.model()
    good = [("prompt_tokens", 2), ("sampled_tokens", 0), ("sampled_tokens", len(ids))]
    cases = [
        good,
        good[:2],
        [*good, ("sampled_tokens", 1)],
        [*good, ("prompt_tokens", -1)],
        [("prompt_tokens", 1 << 62)],
    ]
    for seq, spans in enumerate(cases, start=1):
        message = request(model, seq, [sampled_datum(ids, told, 1.0)], "importance_sampling")
        for arm, length in spans:
            getattr(message.data[0].loss_fn_input_spans.add(), arm).length = length
        given = wire.http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=PROTOBUF)
        found = wire.answer(given.json()["request_id"])
        if spans is good:
            assert read_output(found)[1]["loss:sum"] == pytest.approx(-len(ids), abs=1e-3)
        else:
            assert found["category"] == "user" and "data[0].loss_fn_input_spans do not cover its 8" in found["error"]
