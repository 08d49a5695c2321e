"""Clients of the Tinker wire that err or mean harm: typed errors, no hang, and nothing that stays."""

import gc
import random
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from processes import becomes
from tinker_wire import PROTOBUF, Wire, datum, read_output, request, sample, snapshot, supervised, tinker_site
from whole_server import Whole, whole


def test_what_names_no_request_is_an_error_of_http(wire: Wire) -> None:
    model = wire.model()
    gone = {"session_id": "no", "model_seq_id": 0, "base_model": "x"}
    cases = [
        (wire.post("create_model", **gone), 404, "session_gone"),
        (wire.post("create_model", **(gone | {"session_id": wire.session})), 400, "invalid_value"),
        (wire.post("optim_step", model_id="no", seq_id=1, adam_params={}), 404, "session_gone"),
        (wire.post("optim_step", model_id=model, seq_id=0, adam_params={}), 400, "invalid_value"),
        (wire.post("session_heartbeat", session_id="no"), 410, "session_gone"),
        (wire.post("retrieve_future", request_id="no"), 410, "future_gone"),
        (wire.post("asample", sampling_session_id="no", seq_id=0, prompt={"chunks": []}), 404, "session_gone"),
        (wire.post("weights_info", tinker_path="../../etc/passwd"), 400, "invalid_value"),
        (wire.post("weights_info", tinker_path=f"tinker://{model}/weights/.."), 400, "invalid_value"),
        (wire.http.post("/api/v1/forward_backward", content=b"\xff\xff", headers=PROTOBUF), 400, "invalid_value"),
        (wire.http.post("/api/v1/forward_backward", json={}), 415, "unsupported_media_type"),
        (wire.backward(model, 0, supervised(0)), 400, "invalid_value"),
        (wire.backward("no", 1, supervised(0)), 404, "session_gone"),
        (wire.http.get("/api/v1/training_runs/no"), 404, "session_gone"),
    ]
    for given, status, code in cases:
        assert (given.status_code, given.json()["error"]["code"]) == (status, code), given.text


def test_a_wrong_request_is_answered_with_category_user_and_changes_nothing(wire: Wire) -> None:
    model = wire.model()
    before = wire.weights(model)
    wrong = [
        request(model, 1, [datum([1, 2, 3], weights=[1])]),
        request(model, 2, [datum([1, 2, 3], weights=[1, float("nan")])]),
        request(model, 3, [datum([1, 2, 9999], weights=[1, 1])]),
        request(model, 4, [datum([1, 2, 3], advantages=[1, float("nan")], logprobs=[0, 0])], "ppo"),
        request(model, 5, [datum([1, 2, 3], advantages=[1, 1])], "ppo"),
        request(model, 6, [], "cross_entropy"),
        request(model, 7, supervised(1), "stable_reinforce"),
        request(model, 8, supervised(1), "cross_entropy", {"beta": 1.0}),
        request(model, 9, [datum([1] * 5000, weights=[1] * 4999)]),
    ]
    for message in wrong:
        given = wire.http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=PROTOBUF)
        told = wire.answer(given.json()["request_id"])
        assert told["category"] == "user" and told["error"], told
    for seq, adam in ((10, {}), (11, {"learning_rate": -1.0}), (12, {"beta1": 2.0})):
        told = wire.answer(wire.step(model, seq, **adam))
        assert told["category"] == "user", told
    told = wire.answer(
        wire.ok("optim_step", model_id=model, seq_id=13, optimizer_params={"type": "dimuon"})["request_id"]
    )
    assert told["category"] == "user" and "dimuon" in told["error"]
    told = wire.answer(wire.ok("save_weights", model_id=model, seq_id=14, path="../x")["request_id"])
    assert told["category"] == "user"
    assert np.array_equal(wire.weights(model), before)
    base = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=0)["sampling_session_id"]
    image = {"prompt": {"chunks": [{"type": "image", "data": "x"}]}}
    unsupported = [image, {"prompt_alt_tokens_k": 2}, {"record_stability_info": True}, {"topk_sample_logprobs": 999}]
    for seq, options in enumerate([*unsupported, {"prompt": {"chunks": []}}]):
        assert sample(wire, base, seq, **options)["category"] == "user"


def test_a_gap_is_told_and_nothing_hangs(wire: Wire) -> None:
    model = wire.model()
    late = wire.backward(model, 3, supervised(3)).json()["request_id"]
    far = wire.backward(model, 2**30, supervised(3)).json()["request_id"]
    assert "more than" in wire.answer(far)["error"]
    told = wire.answer(late)
    assert told["category"] == "user" and "waits for 1" in told["error"]
    wire.backward_answer(model, 1, supervised(1))
    wire.backward_answer(model, 2, supervised(2))
    wire.backward_answer(model, 3, supervised(3))


def test_futures_are_bounded_and_go_with_their_session(model_dir: Path, tmp_path: Path) -> None:
    with tinker_site(tmp_path, model_dir, tinker_pending=100, tinker_gap_s=600, tinker_body_bytes=20_000) as site:
        wire = Wire(site)
        model = wire.model()
        statuses = [wire.post("optim_step", model_id=model, seq_id=n + 2).status_code for n in range(1_500)]
        assert statuses.count(200) >= 100 and set(statuses) == {200, 429}
        assert len(wire.tinker.futures) <= 101
        wire.backward(model, 1, supervised(1))  # what all wait for has room
        wire.answer(f"{model}:2")
        large = wire.http.post("/api/v1/forward_backward", content=b"0" * 30_000, headers=PROTOBUF)
        assert large.status_code == 413 and "tinker_body_bytes" in large.text
        wire.ok(f"sessions/{wire.session}/finish")
        assert len(wire.tinker.futures) == 0 and wire.tinker.models.of() == []
        assert wire.post("optim_step", model_id=model, seq_id=5).status_code == 404


def test_what_a_session_held_goes_with_it(tinker: Whole) -> None:
    held = []
    for number in range(5):
        wire = Wire(tinker)
        model = wire.model(seed=number)
        wire.backward_answer(model, 1, supervised(number))
        wire.step(model, 2)  # whose answer nobody fetches
        sampler = snapshot(wire, model, 3, 0)["sampling_session_id"]
        assert sample(wire, sampler, 0).sequences
        held.append(weakref.ref(wire.tinker.models.find(model).trainer.learner))
        wire.ok(f"sessions/{wire.session}/finish")
    gc.collect()
    assert [each() for each in held] == [None] * 5
    assert len(wire.tinker.futures) == 0 and not wire.tinker.models.of() and not wire.tinker.samplers.of(wire.session)
    assert not list(tinker.server.config.state_dir.glob("tinker/snapshots/*/v*"))


def test_models_are_bounded_and_a_silent_session_ends(model_dir: Path, tmp_path: Path) -> None:
    with tinker_site(tmp_path, model_dir, tinker_models=1, tinker_idle_s=0.3) as site:
        wire = Wire(site)
        model = wire.model()
        given = wire.post("create_model", session_id=wire.session, model_seq_id=1, base_model=site.server.base.name)
        assert given.status_code == 429
        snapshot(wire, model, 1, 0)
        end = time.monotonic() + 10
        while wire.post("get_info", model_id=model).status_code == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert becomes(lambda: wire.tinker.samplers.of(wire.session) == [] and len(wire.tinker.futures) == 0)
        assert not list((tmp_path / "tinker" / "snapshots").glob("*/v*"))


def test_a_client_that_is_gone_makes_room(model_dir: Path, tmp_path: Path) -> None:
    with tinker_site(tmp_path, model_dir, tinker_models=1) as site:
        gone, idle, next_one = Wire(site), Wire(site), Wire(site)
        model = gone.model()
        asked = {"session_id": next_one.session, "model_seq_id": 0, "base_model": site.server.base.name}
        assert next_one.post("create_model", **asked).status_code == 429  # heartbeats may still come
        for wire in (gone, idle):
            gone.tinker.sessions.touch(wire.session).heard -= 61
        made = next_one.answer(next_one.ok("create_model", **asked)["request_id"])["model_id"]
        assert gone.post("get_info", model_id=model).status_code == 404
        assert next_one.post("get_info", model_id=made).status_code == 200
        assert idle.session in gone.tinker.sessions.ids  # it has no model


def test_the_key_is_asked_for_in_the_packages_header(model_dir: Path, tmp_path: Path) -> None:
    with tinker_site(tmp_path, model_dir, api_key="secret") as site:
        del site.http.headers["authorization"]
        for key, status in (("tml-secret", 200), ("secret", 200), ("tml-no", 401), ("", 401)):
            given = site.http.post("/api/v1/client/config", json={}, headers={"x-api-key": key})
            assert given.status_code == status


def test_there_is_no_such_route_unless_it_is_asked_for(model_dir: Path, tmp_path: Path) -> None:
    with whole(tmp_path, model_dir) as site:
        assert site.http.post("/api/v1/client/config", json={}).status_code == 404


def test_a_cut_request_is_not_run_twice(wire: Wire) -> None:
    """A client whose connection dropped sends the same again: the answer is that of the first."""
    model = wire.model()
    first = wire.backward(model, 1, supervised(1)).json()["request_id"]
    again = wire.backward(model, 1, supervised(1)).json()["request_id"]
    assert first == again
    one, other = read_output(wire.answer(first)), read_output(wire.answer(again))
    assert one[1] == other[1]
    wire.backward_answer(model, 2, supervised(2))
    assert len(wire.tinker.models.find(model).trainer.learner.parameters) > 0


def test_noise_is_refused_and_the_server_goes_on(wire: Wire) -> None:
    model, rng = wire.model(), random.Random(0)
    whole = request(model, 1, supervised(1)).SerializeToString()
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        raw = raw[: rng.randint(0, len(raw))] if rng.random() < 0.3 else raw
        given = wire.http.post("/api/v1/forward_backward", content=bytes(raw), headers=PROTOBUF)
        assert given.status_code in (200, 400, 404), given.text
    for path in ("create_session", "create_model", "asample", "optim_step", "save_weights", "load_weights"):
        for body in ([], "x", 7, {"session_id": 5}, {"model_id": [], "seq_id": "x"}, {"prompt": {"chunks": [7]}}):
            given = wire.http.post(f"/api/v1/{path}", json=body)
            assert given.status_code in (200, 400), given.text
    other = wire.model(1)
    wire.backward_answer(other, 1, supervised(1))
