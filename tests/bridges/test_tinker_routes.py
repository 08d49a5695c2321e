"""The Tinker wire as a client that knows only the protocol meets it: losses, order, snapshots, what is saved."""

import asyncio
import io
import json
import math
import random
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from wording import wording

pytest.importorskip("google.protobuf")

import torch

from cli_project import save_model
from groupwise.bridges.tinker.checkpoints import Checkpoint
from groupwise.bridges.tinker.routes import NOT_OFFERED
from groupwise.bridges.tinker.training import ALPHA
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.errors import StorageError
from groupwise.sdk.datums import Datum
from groupwise.sdk.trainer import AdamParams, TrainingService
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from raw_http import connect
from serving import running
from tinker_wire import (
    PROTOBUF,
    Wire,
    datum,
    read_output,
    read_samples,
    request,
    sample,
    snapshot,
    supervised,
    tinker_site,
)
from whole_server import Whole

GOLDEN = json.loads((Path(__file__).parents[1] / "algo" / "golden" / "toy_batch.json").read_text())["inputs"]


@contextmanager
def shared_threads(site: Whole, count: int) -> Iterator[None]:
    """The routes of the server share so many threads: by default as many as there are processors, and four."""

    async def share(count: int) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(count))

    portal = site.http.portal
    assert portal is not None
    portal.call(share, count)
    yield
    portal.call(share, 8)


def is_answered(site: Whole) -> bool:
    """Whether /health answers, which looks at the disk in a shared thread."""
    asked = ThreadPoolExecutor(1).submit(site.http.get, "/health")
    try:
        return asked.result(timeout=20).status_code == 200
    except TimeoutError:
        return False


# ---- who waits for whom ----
def test_nobody_waits_for_models_that_train(wire: Wire) -> None:
    model, go_on = wire.model(), threading.Event()
    service = wire.tinker.models.find(model).trainer.service
    with shared_threads(wire.site, 1):
        service.submit(go_on.wait)  # a pass that takes long
        asked = wire.backward(model, 1, supervised(0)).json()["request_id"]
        answered = is_answered(wire.site)
        go_on.set()
        rows, _ = read_output(wire.answer(asked))
    assert answered and len(rows) == len(supervised(0))


def test_nobody_waits_for_prompts_that_are_scored(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, go_on = wire.site.server.engine, threading.Event()
    score = engine.score_sequence

    def slow(*args: Any, **options: Any) -> Any:
        go_on.wait()
        return score(*args, **options)

    monkeypatch.setattr(engine, "score_sequence", slow)
    sampler = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=1)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    body = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 1, "prompt": prompt}
    echoed = {"prompt": "one two", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    with shared_threads(wire.site, 1), ThreadPoolExecutor(1) as clients:
        params = {"max_tokens": 1, "seed": 1, "stop": []}
        asked = wire.ok("asample", **body, sampling_params=params, prompt_logprobs=True)["request_id"]
        answered = [is_answered(wire.site)]
        completion = clients.submit(wire.http.post, "/v1/completions", json=echoed)
        answered += [is_answered(wire.site) for _ in range(5)]
        go_on.set()
        assert read_samples(wire.answer(asked)).sequences and completion.result().status_code == 200
    assert all(answered)


def test_samples_that_take_too_long_are_said_to_and_what_to_do(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tinker_site(tmp_path, model_dir, request_timeout_s=0.05) as site:
        wire, go_on = Wire(site), threading.Event()
        monkeypatch.setattr(site.server.engine, "score_sequence", lambda *args, **options: go_on.wait())
        sampler = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=1)
        failed = sample(wire, sampler["sampling_session_id"], 1, prompt_logprobs=True)
        go_on.set()
    assert failed["code"] == "deadline_exceeded" and "request_timeout_s" in failed["error"], failed


# ---- losses ----
def test_losses_are_those_of_the_published_tables(wire: Wire) -> None:
    """q is chosen so that p - q is the golden batch's: losses of the ratio alone are its numbers, the others are
    computed from the log-probabilities that came back."""
    model = wire.model()
    rng = random.Random(0)
    rows = [[rng.randrange(1, 250) for _ in range(4 + i)] for i in (1, 0)]  # 4 and 3 targets
    masks = [GOLDEN["mask"][0], GOLDEN["mask"][1][:3]]
    advantages = [[a * m for m in mask] for a, mask in zip(GOLDEN["advantages"], masks, strict=True)]
    plain = [datum(row, weights=mask) for row, mask in zip(rows, masks, strict=True)]
    p, metrics = wire.backward_answer(model, 1, plain, forward_only=True)
    assert metrics["loss:sum"] == pytest.approx(-sum(np.dot(*each) for each in zip(p, masks, strict=True)), abs=1e-4)
    gaps = [np.subtract(GOLDEN["logprobs"][i], GOLDEN["behaviour"][i])[: len(p[i])] for i in range(2)]
    q = [(row - gap).tolist() for row, gap in zip(p, gaps, strict=True)]

    def formula(loss: str) -> float:
        total = 0.0
        for i in range(2):
            for lp, lq, a in zip(p[i], q[i], advantages[i], strict=True):
                if loss == "cispo":
                    total -= min(math.exp(lp - lq), 4.0) * lp * a
                else:
                    total -= lp * a - 0.025 * (lp - lq) ** 2
        return total

    expected = {"importance_sampling": 3.01245, "ppo": 3.02758, "gspo": 1.97291}
    expected |= {"cispo": formula("cispo"), "dro": formula("dro")}
    for seq, (loss, value) in enumerate(expected.items(), start=1):
        values = [{"advantages": a, "logprobs": lq} for a, lq in zip(advantages, q, strict=True)]
        if loss == "gspo":
            values = [{**each, "sequence_ratio_mask": mask} for each, mask in zip(values, masks, strict=True)]
        data = [datum(row, **each) for row, each in zip(rows, values, strict=True)]
        for k, forward_only in enumerate((True, False)):
            logprobs, metrics = wire.backward_answer(model, 2 * seq + k, data, loss, forward_only=forward_only)
            assert metrics["loss:sum"] == pytest.approx(value, abs=2e-4), (loss, forward_only)
            for i in range(2):
                read = np.array(masks[i], bool) if loss == "gspo" else slice(None)
                np.testing.assert_allclose(logprobs[i][read], p[i][read], atol=1e-5)


def test_stable_reinforce_is_trained_as_the_loss_that_the_owner_named(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = [datum([9, 8, 7, 6], logprobs=[-1.0, -2.0, -3.0], advantages=[0.5, -1.0, 2.0])]
    with tinker_site(tmp_path, model_dir, tinker_stable_reinforce="cispo") as site:
        wire = Wire(site)
        named, asked = wire.model(0), wire.model(1)
        expected = wire.backward_answer(named, 1, data, "cispo")
        assert "cispo" not in caplog.text
        for seq in (1, 2):
            rows, metrics = wire.backward_answer(asked, seq, data, "stable_reinforce")
            assert metrics == expected[1] and np.array_equal(rows, expected[0])
            if seq == 1:
                assert np.array_equal(wire.gradient(named), wire.gradient(asked))
        assert caplog.text.count(f"{asked} asks for stable_reinforce, and trains cispo") == 1
        config = {"clip_high_threshold": 2.0}  # a knob of cispo's: of stable_reinforce nobody knows what it would mean
        failed = wire.backward_answer(asked, 3, data, "stable_reinforce", config=config)
        assert failed["category"] == "user" and "another meaning" in failed["error"], failed
        sampler = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=1)
        assert sample(wire, sampler["sampling_session_id"], 1, record_stability_info=True).sequences


def test_other_models_are_sampled_from_and_not_trained(model_dir: Path, make_base, tmp_path: Path) -> None:
    other = make_base("llama", dtype=torch.float32, context=128, seed=3)
    names = {"Big/Teacher": str(save_model(other, tmp_path / "teacher")), "same/one": str(model_dir)}
    with tinker_site(tmp_path / "state", model_dir, tinker_other_models=names) as site:
        wire = Wire(site)
        told = {
            each["model_name"]: each for each in wire.http.get("/api/v1/get_server_capabilities").json().popitem()[1]
        }
        assert told["Big/Teacher"] == {
            "model_name": "Big/Teacher",
            "max_context_length": 128,
            "trainable": False,
            "sampleable": True,
        }

        def sampled(number: int, **base: str) -> Any:
            about = {"session_id": wire.session, "sampling_session_seq_id": number, **base}
            made = wire.ok("create_sampling_session", **about)["sampling_session_id"]
            found = sample(wire, made, 1, num_samples=2, prompt_logprobs=True)
            return wire.http.get(f"/api/v1/samplers/{made}").json()["base_model"], found

        tokenizer, found = sampled(1, base_model="Big/Teacher")
        assert tokenizer == names["Big/Teacher"]
        engine = LocalEngine(other, max_rows=4)
        try:
            params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
            expected = engine.submit([SamplingRequest(prompt_ids=(5, 6, 7), params=params, n=2)])[0].result()
            scores = engine.score((5,), (6, 7), PolicyVersion.base())
        finally:
            engine.close()
        for mine, theirs in zip(found.sequences, expected, strict=True):
            assert np.frombuffer(mine.tokens, "<i4").tolist() == list(theirs.token_ids)
            np.testing.assert_allclose(np.frombuffer(mine.logprobs, "<f4"), theirs.logprobs, atol=1e-5)
        np.testing.assert_allclose(np.frombuffer(found.prompt_logprobs, "<f4")[1:], scores, atol=1e-5)
        assert sampled(2, base_model="same/one") == sampled(3)
        assert site.app.state.server.more["tinker"].samplers.others["same/one"].engine is site.server.engine

        lora = {"rank": 4}
        made = wire.post(
            "create_model", session_id=wire.session, model_seq_id=1, base_model="Big/Teacher", lora_config=lora
        )
        assert made.status_code == 400, made.text
        wording(made.json()["error"])
        made = wire.post(
            "create_sampling_session", session_id=wire.session, sampling_session_seq_id=9, base_model="none"
        )
        assert made.status_code == 400 and "Big/Teacher" in made.text, made.text


def test_a_custom_loss_through_signed_weights_is_the_built_in_one(wire: Wire) -> None:
    """forward_backward_custom sends cross_entropy with weights -dL/dp: the same gradient as the loss itself."""
    builtin, custom = wire.model(0), wire.model(1)
    tokens = [[9, 8, 7, 6, 5], [4, 3, 2, 1]]
    p, _ = wire.backward_answer(builtin, 1, [datum(row) for row in tokens], forward_only=True)
    q = [row + np.linspace(-0.3, 0.3, len(row)) for row in p]
    a = [np.linspace(-1, 1, len(row)) for row in p]
    data = [datum(t, logprobs=lq, advantages=adv) for t, lq, adv in zip(tokens, q, a, strict=True)]
    wire.backward_answer(builtin, 2, data, "importance_sampling")
    slopes = [np.exp(lp - lq) * adv for lp, lq, adv in zip(p, q, a, strict=True)]
    wire.backward_answer(custom, 1, [datum(t, weights=w) for t, w in zip(tokens, slopes, strict=True)])
    one = wire.gradient(builtin)
    np.testing.assert_allclose(one, wire.gradient(custom), atol=1e-5)
    assert np.abs(one).max() > 1e-3


def test_cross_entropy_without_weights_weighs_every_target_one(wire: Wire) -> None:
    bare, weighed = wire.model(0), wire.model(1)
    tokens = [[9, 8, 7, 6, 5], [4, 3, 2, 1]]
    data = [[datum(row) for row in tokens], [datum(row, weights=[1.0] * (len(row) - 1)) for row in tokens]]
    for forward_only in (True, False):
        found = [
            wire.backward_answer(model, 2 - forward_only, rows, forward_only=forward_only)[1]["loss:sum"]
            for model, rows in zip((bare, weighed), data, strict=True)
        ]
        assert found[0] == pytest.approx(found[1]) and found[0] > 1
    assert np.array_equal(wire.gradient(bare), wire.gradient(weighed)) and np.abs(wire.gradient(bare)).max() > 1e-3


def test_inputs_may_be_as_long_as_the_context(wire: Wire) -> None:
    model, most = wire.model(), wire.tinker.models.base.context_length
    tokens = [1 + i % 250 for i in range(most + 2)]
    rows, _ = wire.backward_answer(model, 1, [datum(tokens[: most + 1])], forward_only=True)
    assert len(rows[0]) == most
    rows, _ = wire.backward_answer(model, 2, [datum(tokens[: most + 1])])
    assert len(rows[0]) == most and np.isfinite(rows[0]).all()
    told = wire.backward_answer(model, 3, [datum([1, 2]), datum(tokens)])
    assert f"data[1] has {most + 1} tokens; the model reads at most {most}" in told["error"]
    base = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=0)["sampling_session_id"]
    prompt = {"chunks": [{"tokens": tokens[:most]}]}
    found = sample(wire, base, 0, prompt=prompt, prompt_logprobs=True, sampling_params={"max_tokens": 1})
    np.testing.assert_allclose(np.frombuffer(found.prompt_logprobs, "<f4")[1:], rows[0][:-1], atol=1e-3)
    assert [(each.tokens, each.stop_reason) for each in found.sequences] == [(b"", 1)]  # there is no room for one
    assert "no room" in sample(wire, base, 1, prompt=prompt)["error"]
    wrong = {"chunks": [{"tokens": [5, 6, 9999]}]}  # an id that the model has not, in the place that is not read
    told = sample(wire, base, 2, prompt=wrong, prompt_logprobs=True)
    assert told["category"] == "user" and "9999" in told["error"]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo", "cross_entropy"])
def test_metrics_are_of_what_the_policy_said_and_padding_changes_none(wire: Wire, loss: str) -> None:
    """The same completions behind prompts of other lengths: what clients fill the prompt's part with moves no metric,
    and the KL to the sampler is that of the completions."""
    model, tokens = wire.model(), [9, 8, 7, 6, 5, 4, 3, 2]
    (p,), _ = wire.backward_answer(model, 1, [datum(tokens)], forward_only=True)
    advantages = [0.0] * 3 + [0.5, -1.0, 0.7, -0.2]
    gaps = [0.3, -0.2, 0.1, 0.0]
    found = []
    for seq, filler in enumerate((0.0, -3.0), start=2):
        q = [filler] * 3 + [float(lp - gap) for lp, gap in zip(p[3:], gaps, strict=True)]
        values: dict[str, list[float]] = {"logprobs": q, "advantages": advantages}
        if loss == "gspo":
            values["sequence_ratio_mask"] = [0.0] * 3 + [1.0] * 4
        if loss == "cross_entropy":
            values = {"weights": [float(a != 0) for a in advantages]}
        inputs = datum(tokens, **values)
        if loss == "dro":  # whose penalty is of every position, unless its target is padding
            inputs[1]["target_tokens"][:3] = [0, 0, 0]
        found.append(wire.backward_answer(model, seq, [inputs], loss)[1])
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, abs=1e-6), name
    if loss != "cross_entropy":
        kl = np.mean([math.exp(gap) - gap - 1 for gap in gaps])
        assert found[0]["mismatch/kl:mean"] == pytest.approx(kl, abs=1e-4)
        assert found[0]["mismatch/logprob_diff_max:max"] == pytest.approx(0.3, abs=1e-4)
    nothing = datum(tokens, **{name: [0.0] * 7 for name in values if name != "sequence_ratio_mask"})
    if loss == "gspo":
        nothing[1]["sequence_ratio_mask"] = [0.0] * 7
    assert set(wire.backward_answer(model, 4, [nothing], loss)[1]) == {"loss:sum"}


# ---- order ----
def train(wire: Wire, model: str, order: list[int], *, twice: bool = False) -> np.ndarray:
    """Two steps of three chunks each, sent in this order of their numbers -> the adapter."""

    def send(seq: int) -> str:
        if seq in (4, 8):
            return wire.step(model, seq)
        return wire.backward(model, seq, supervised(seq)).json()["request_id"]

    ids = [send(seq) for seq in order for _ in range(1 + twice)]
    for id in ids:
        assert isinstance(wire.answer(id), bytes) or "error" not in wire.answer(id)
    return wire.weights(model)


def test_order_and_retries_change_nothing(wire: Wire) -> None:
    inorder = train(wire, wire.model(0), [1, 2, 3, 4, 5, 6, 7, 8])
    shuffled = train(wire, wire.model(1), [4, 3, 2, 8, 6, 7, 5, 1], twice=True)
    assert np.array_equal(inorder, shuffled)
    fresh = wire.weights(wire.model(2))
    assert not np.allclose(inorder, fresh)


def test_a_connection_that_drops_before_the_answer_costs_nothing(wire: Wire) -> None:
    """The request arrived, its answer did not: the client sends it again, and it has been run once."""
    dropped, whole = wire.model(0), wire.model(1)
    with running(wire.site.app) as port:
        for seq in (1, 2, 3):
            raw = request(dropped, seq, supervised(seq)).SerializeToString()
            head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n"
            connect(port, f"{head}content-type: application/x-protobuf\r\n\r\n".encode() + raw).close()
            half = connect(port, f"{head}content-type: application/x-protobuf\r\n\r\n".encode() + raw[:20])
            half.close()
        for seq in (1, 2, 3):
            sent = httpx2.post(
                f"http://127.0.0.1:{port}/api/v1/forward_backward",
                content=request(dropped, seq, supervised(seq)).SerializeToString(),
                headers=PROTOBUF,
                timeout=120,
            )
            wait = {"request_id": sent.json()["request_id"]}
            future = f"http://127.0.0.1:{port}/api/v1/retrieve_future"
            assert httpx2.post(future, json=wait, timeout=120).status_code == 200
        stepped = {"model_id": dropped, "seq_id": 4, "adam_params": {"learning_rate": 1e-2}}
        sent = httpx2.post(f"http://127.0.0.1:{port}/api/v1/optim_step", json=stepped, timeout=120).json()
        assert "metrics" in httpx2.post(future, json=sent, timeout=120).json()
    assert np.array_equal(wire.weights(dropped), train(wire, whole, [1, 2, 3, 4]))


def test_two_adapters_at_once_are_those_that_each_alone_would_be(wire: Wire) -> None:
    alone = [train(wire, wire.model(n, seed=n), [1, 2, 3, 4, 5, 6, 7, 8]) for n in (0, 1)]
    together = [wire.model(n + 2, seed=n) for n in (0, 1)]
    ids = []
    for seq in range(1, 9):
        for model in together:
            given = wire.step(model, seq) if seq in (4, 8) else wire.backward(model, seq, supervised(seq))
            ids.append(given if isinstance(given, str) else given.json()["request_id"])
    for id in ids:
        wire.answer(id)
    for before, model in zip(alone, together, strict=True):
        np.testing.assert_allclose(wire.weights(model), before, atol=1e-5)
    assert not np.allclose(alone[0], alone[1])


def test_it_is_what_the_sdk_makes_in_process(wire: Wire) -> None:
    model = wire.model(rank=4, seed=3)
    service = TrainingService(wire.site.server.base)
    policy = service.create_training_client(lora=LoraSpec(rank=4, alpha=ALPHA), seed=3)
    for seq in (1, 3):
        data = supervised(seq)
        wire.backward_answer(model, seq, data)
        wire.answer(wire.step(model, seq + 1))
        policy.forward_backward([Datum(model_input=t, loss_fn_inputs=v) for t, v in data], "cross_entropy").result()
        policy.optim_step(AdamParams(learning_rate=1e-2)).result()
    mine = np.concatenate([parameter.detach().numpy().ravel() for parameter in policy.learner.parameters])
    service.close()
    np.testing.assert_allclose(wire.weights(model), mine, atol=1e-5)


# ---- sampling ----
def step(wire: Wire, model: str, seq: int) -> None:
    wire.backward_answer(model, seq, supervised(seq))
    wire.answer(wire.step(model, seq + 1, learning_rate=0.1))


def test_a_snapshot_stays_what_it_was_and_one_in_flight_follows(wire: Wire) -> None:
    model = wire.model()
    step(wire, model, 1)
    fixed = snapshot(wire, model, 3, 0)["sampling_session_id"]
    moving = snapshot(wire, model, 4, 1, kind="inflight")["sampling_session_id"]
    scored = {"prompt_logprobs": True}
    before = sample(wire, fixed, 0, **scored)
    assert sample(wire, moving, 0, **scored).prompt_logprobs == before.prompt_logprobs
    step(wire, model, 5)
    newer = snapshot(wire, model, 7, 2, kind="inflight")["sampling_session_id"]
    after = sample(wire, fixed, 1, **scored)
    assert after.prompt_logprobs == before.prompt_logprobs
    assert after.sequences[0].tokens == before.sequences[0].tokens
    assert sample(wire, moving, 1, **scored).prompt_logprobs == sample(wire, newer, 0, **scored).prompt_logprobs
    assert sample(wire, moving, 2, **scored).prompt_logprobs != before.prompt_logprobs
    base = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=9)
    assert sample(wire, base["sampling_session_id"], 0, **scored).prompt_logprobs != before.prompt_logprobs


def test_the_sampler_gives_the_trainers_log_probabilities(wire: Wire) -> None:
    model = wire.model()
    step(wire, model, 1)
    sampler = snapshot(wire, model, 3, 0)["sampling_session_id"]
    options = {"num_samples": 3, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 4}
    found = sample(wire, sampler, 0, **options)
    assert len({each.tokens for each in found.sequences}) > 1 and all(each.stop_reason == 1 for each in found.sequences)
    prompt = np.frombuffer(found.prompt_logprobs, "<f4")
    assert len(prompt) == 3 and np.isnan(prompt[0])
    top = np.frombuffer(found.topk_prompt_logprobs.logprobs, "<f4").reshape(3, 2)
    assert (top[0] == -99999).all() and (top[1:, 0] >= prompt[1:] - 1e-5).all()
    for seq, each in enumerate(found.sequences, start=4):
        tokens, logprobs = (np.frombuffer(raw, kind) for raw, kind in ((each.tokens, "<i4"), (each.logprobs, "<f4")))
        best = np.frombuffer(each.topk_sampled_logprobs.logprobs, "<f4").reshape(-1, 4)
        assert len(tokens) == len(best) == 6
        rows, _ = wire.backward_answer(model, seq, [datum([5, 6, 7, *tokens.tolist()])], forward_only=True)
        np.testing.assert_allclose(rows[0], [*prompt[1:], *logprobs], atol=1e-4)
    last = sample(wire, sampler, 1, prompt_logprobs=True, prompt_logprobs_last_n=1)
    np.testing.assert_allclose(np.frombuffer(last.prompt_logprobs, "<f4"), [np.nan, np.nan, prompt[2]], atol=1e-5)
    stopped = sample(wire, sampler, 2, sampling_params={"max_tokens": 50, "seed": 1, "stop": tokens[:1].tolist()})
    assert stopped.sequences[0].stop_reason in (0, 1)


def test_a_named_snapshot_that_cannot_be_recorded_leaves_no_version(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = wire.model(), wire.site.server.store
    before = store.names()

    def full(_: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(wire.tinker.checkpoints, "_write", full)
        assert "the disk is full" in snapshot(wire, model, 1, 0, path="a")["error"]
    assert store.names() == before
    assert snapshot(wire, model, 2, 1, path="a")["path"]
    assert wire.http.delete(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/a").status_code == 204


def test_files_that_a_record_names_stay_although_its_writing_ends_in_an_error(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails when the record is in place, before its directories are synchronised."""
    model, checkpoints = wire.model(), wire.tinker.checkpoints
    write = checkpoints._write

    def fails_late(checkpoint: Checkpoint) -> None:
        write(checkpoint)
        raise StorageError("the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write", fails_late)
        asked = wire.ok("save_weights_external", model_id=model, seq_id=1, path="a")
        assert "the disk failed" in wire.answer(asked["request_id"])["error"]
    saved = checkpoints.find(f"tinker://{model}/external_weights/a")
    assert sum(each.stat().st_size for each in checkpoints.directory(saved).iterdir()) == saved.size_bytes > 0


def test_of_snapshots_those_last_sampled_from_stay_and_what_is_in_flight(model_dir: Path, tmp_path: Path) -> None:
    """A step's snapshot goes when newer ones have taken its place; one that is sampled from again and again stays."""
    with tinker_site(tmp_path, model_dir, tinker_snapshots=3) as site:
        wire = Wire(site)
        model, other = wire.model(0), wire.model(1)
        kept = snapshot(wire, other, 1, 100)["sampling_session_id"]  # each model has its own
        moving = snapshot(wire, model, 1, 99, kind="inflight")["sampling_session_id"]
        reference, superseded = (snapshot(wire, model, 2 + n, n)["sampling_session_id"] for n in range(2))
        long = {"sampling_params": {"max_tokens": 200, "seed": 1, "stop": []}, "num_samples": 16}
        busy = snapshot(wire, model, 4, 2)["sampling_session_id"]
        body = {"prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_session_id": busy, "seq_id": 0, **long}
        running = wire.ok("asample", **body)["request_id"]
        for number in range(3, 15):
            assert sample(wire, reference, number).sequences
            newest = snapshot(wire, model, 2 + number, number)["sampling_session_id"]
            if number == 6:  # one that was in flight all the time is whole
                assert len(read_samples(wire.answer(running)).sequences) == 16
        for sampler in (kept, moving, reference, newest):
            assert sample(wire, sampler, 100).sequences
        for sampler in (superseded, busy):
            gone = wire.post("asample", **(body | {"sampling_session_id": sampler, "seq_id": 9}))
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "session_gone"
            assert "tinker_snapshots" in gone.text and "save_weights_for_sampler" in gone.text
        on_disk = [path for path in (tmp_path / "tinker" / "snapshots").glob("*/v*") if path.is_dir()]
        assert len(on_disk) == 3 + 1 + 1  # and the one that follows, and the other model's


# ---- checkpoints ----
def test_going_on_from_a_state_is_as_if_nothing_had_been_and_a_chat_can_name_a_sampler(wire: Wire) -> None:
    first = wire.model(0)
    step(wire, first, 1)
    saved = wire.answer(wire.ok("save_weights", model_id=first, seq_id=3, path="one")["request_id"])["path"]
    assert saved == f"tinker://{first}/weights/one"
    step(wire, first, 4)
    made = wire.ok("load_weights", session_id=wire.session, model_seq_id=1, path=saved, optimizer=True)
    second = wire.answer(made["request_id"])["model_id"]
    wire.backward_answer(second, 1, supervised(4))
    wire.answer(wire.step(second, 2, learning_rate=0.1))
    assert np.array_equal(wire.weights(first), wire.weights(second))
    made = wire.ok("load_weights", session_id=wire.session, model_seq_id=2, path=saved, optimizer=False)
    third = wire.answer(made["request_id"])["model_id"]
    assert not wire.tinker.models.find(third).trainer.learner.optimizer.state
    wire.answer(wire.ok("load_weights", model_id=first, seq_id=6, path=saved, optimizer=True)["request_id"])
    assert np.array_equal(wire.weights(first), wire.weights(third))
    attention = {"rank": 2, "train_mlp": False}
    made = wire.ok(
        "create_model",
        session_id=wire.session,
        model_seq_id=3,
        base_model=wire.tinker.models.name,
        lora_config=attention,
    )
    narrow = wire.answer(made["request_id"])["model_id"]
    refused = wire.ok("load_weights", model_id=narrow, seq_id=1, path=saved, optimizer=True)
    assert wire.answer(refused["request_id"])["category"] == "user"
    own = wire.answer(wire.ok("save_weights", model_id=narrow, seq_id=2, path="own")["request_id"])["path"]
    assert wire.answer(wire.ok("load_weights", model_id=narrow, seq_id=3, path=own, optimizer=True)["request_id"])[
        "path"
    ]
    assert wire.ok("weights_info", tinker_path=own)["train_mlp"] is False

    again = wire.answer(wire.ok("save_weights", model_id=first, seq_id=7, path="one")["request_id"])
    assert again["category"] == "user" and "overwrite" in again["error"]
    again = wire.ok("save_weights", model_id=first, seq_id=8, path="one", overwrite=True, ttl_seconds=7200)
    assert wire.answer(again["request_id"])["path"] == saved

    path = snapshot(wire, first, 9, 5, path="final")["path"]
    made = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=6, model_path=path)
    assert sample(wire, made["sampling_session_id"], 0).sequences
    adapter = wire.site.server.store.names()[0]
    messages = [{"role": "user", "content": "hi"}]
    chat = wire.http.post("/v1/chat/completions", json={"model": adapter, "messages": messages, "max_tokens": 2})
    assert chat.status_code == 200

    listed = wire.http.get("/api/v1/checkpoints").json()["checkpoints"]
    assert {each["tinker_path"] for each in listed} >= {saved, path}
    run = wire.http.get(f"/api/v1/training_runs/{first}").json()
    assert run["last_checkpoint"]["tinker_path"] == saved and run["lora_rank"] == 4
    assert wire.ok("weights_info", tinker_path=saved)["lora_rank"] == 4
    ttl = wire.http.put(f"/api/v1/training_runs/{first}/checkpoints/weights/one/ttl", json={"ttl_seconds": None})
    assert ttl.json()["expires_at"] is None
    for name in ("weights/one", "sampler_weights/final"):
        assert wire.http.delete(f"/api/v1/training_runs/{first}/checkpoints/{name}").status_code == 204
        assert wire.http.delete(f"/api/v1/training_runs/{first}/checkpoints/{name}").status_code == 404
    assert wire.http.get(f"/api/v1/training_runs/{first}/checkpoints").json() == {"checkpoints": []}
    assert wire.post("weights_info", tinker_path=saved).json()["error"]["code"] == "checkpoint_not_found"


def test_a_checkpoint_is_there_after_a_restart_and_one_that_is_past_its_time_is_not(
    model_dir: Path, tmp_path: Path
) -> None:
    with tinker_site(tmp_path, model_dir) as site:
        wire = Wire(site)
        model = wire.model()
        step(wire, model, 1)
        saved = wire.answer(wire.ok("save_weights", model_id=model, seq_id=3, path="s")["request_id"])["path"]
        brief = wire.ok("save_weights", model_id=model, seq_id=4, path="t", ttl_seconds=1)
        assert wire.answer(brief["request_id"])["path"]
        snapshot(wire, model, 5, 0)
        weights = wire.weights(model)
    time.sleep(1.01)
    with tinker_site(tmp_path, model_dir) as site:
        assert not list((tmp_path / "tinker" / "snapshots").glob("*/v*"))
        wire = Wire(site)
        assert wire.post("get_info", model_id=model).json()["error"]["code"] == "session_gone"
        assert [c["tinker_path"] for c in wire.http.get("/api/v1/checkpoints").json()["checkpoints"]] == [saved]
        assert not (tmp_path / "tinker" / "runs" / model / "weights" / "t").exists()
        made = wire.ok("load_weights", session_id=wire.session, model_seq_id=0, path=saved, optimizer=True)
        again = wire.answer(made["request_id"])["model_id"]
        assert np.array_equal(wire.weights(again), weights)


# ---- files to take away ----
@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_an_archive_has_the_adapter_and_its_address_needs_no_key(model_dir: Path, tmp_path: Path, kind: str) -> None:
    """As packages up to 0.25 ask for it: a redirection, whose address is fetched without a key."""
    with tinker_site(tmp_path / "state", model_dir, api_key="secret") as site:
        wire = Wire(site)
        model = wire.model()
        step(wire, model, 1)
        if kind == "weights":
            wire.answer(wire.ok("save_weights", model_id=model, seq_id=3, path="a")["request_id"])
        else:
            assert snapshot(wire, model, 3, 0, path="a")["path"]
        place = f"/api/v1/training_runs/{model}/checkpoints/{kind}/a"
        given = wire.http.get(f"{place}/archive", follow_redirects=False)
        assert given.status_code == 302 and "expires" in given.headers
        again = wire.http.get(f"{place}/archive", follow_redirects=False)
        assert given.headers["location"] == again.headers["location"]  # and no second copy
        del site.http.headers["authorization"]
        assert wire.http.get(f"{place}/archive").status_code == 401
        found = wire.http.get(given.headers["location"])
        assert found.status_code == 200 and int(found.headers["content-length"]) == len(found.content)
        with tarfile.open(fileobj=io.BytesIO(found.content)) as archive:
            archive.extractall(tmp_path / "out", filter="data")
        assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        learner = wire.tinker.models.find(model).trainer.learner
        before = wire.weights(model)
        for parameter in learner.parameters:
            parameter.data.zero_()
        learner.load_adapter(tmp_path / "out")
        assert np.array_equal(wire.weights(model), before)
        for wrong in ("nothing", "../../etc/passwd", "%2e%2e%2frecord.json"):
            assert wire.http.get(given.headers["location"].replace("adapter.tar.gz", wrong)).status_code in (401, 404)
        assert wire.http.get("/api/v1/links/guess/adapter.tar.gz").status_code == 404
        for link in wire.tinker.downloads._links.values():
            object.__setattr__(link, "until", 0.0)
        assert wire.http.get(given.headers["location"]).status_code == 404
        site.http.headers["authorization"] = "Bearer secret"
        wire.http.get(f"{place}/archive", follow_redirects=False)
        assert len(list((tmp_path / "state" / "tinker" / "exports").iterdir())) == 1  # the old copy is gone


def test_what_has_no_meaning_here_says_so(wire: Wire) -> None:
    routes = wire.http.get("/openapi.json").json()["paths"]
    for route, (why, _) in NOT_OFFERED.items():
        method, path = route.split()
        given = wire.http.request(method, f"/api/v1{path.format(session=wire.session)}")
        assert given.status_code == 404 and given.json()["error"]["code"] == "not_offered", given.text
        assert why in given.json()["error"]["message"] and f"/api/v1{path}" not in routes
