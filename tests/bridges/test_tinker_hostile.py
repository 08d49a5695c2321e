"""Clients of the Tinker wire that err or mean harm: typed errors, no hang, and nothing that stays."""

import gc
import random
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("google.protobuf")

from cli_project import save_model
from groupwise.bridges.tinker import routes as tinker_routes
from groupwise.bridges.tinker import sessions as tinker_sessions
from groupwise.bridges.tinker import training as tinker_training
from groupwise.model.load import LoadedModel
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
        (wire.http.post("/api/v1/forward_backward", json={}), 400, "invalid_value"),
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


def csr(ends: list[int], columns: list[int], shape: tuple[int, int] = (2, 3)) -> dict[str, object]:
    return {"data": columns, "shape": shape, "sparse_crow_indices": ends, "sparse_col_indices": columns}


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": [1, 2, 3], "shape": [3, 1]},  # of a prompt of 3 tokens it is [2, K]
        {"data": [1, 2, 3], "shape": [2, 2]},
        {"data": [], "shape": [2, 1 << 62]},
        {"data": [1], "shape": [2, 2], "sparse_crow_indices": [0, 1, 1]},
        csr([0, 2], [0, 1]),
        csr([1, 1, 1], []),
        csr([0, 2, 1], [0]),
        csr([0, 1, 3], [0, 1]),
        csr([0, 1, 1], [3]),
        csr([0, 2, 2], [1, 1]),
        csr([0, 2, 2], [1, 0]),
        {"data": [1, 9999], "shape": [2, 1]},
    ],
)
def test_targets_that_do_not_fit_the_prompt_are_refused_by_name(wire: Wire, wrong: dict[str, object]) -> None:
    base = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=0)["sampling_session_id"]
    told = sample(wire, base, 1, target_prompt_logprobs={"dtype": "int64", **wrong})
    assert told["category"] == "user" and "target_prompt_logprobs has" in told["error"], told
    assert sample(wire, base, 2).sequences


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"shape": [2]}, "shape"),
        ({"shape": [2, -1]}, "shape"),
        ({"dtype": "float32"}, "dtype"),
        ({"data": [1, -2]}, "data"),
        ({"data": [1, 0.5]}, "data"),
        ({"data": [1, 1 << 40]}, "data"),
    ],
)
def test_targets_that_are_no_ids_are_refused_at_once(wire: Wire, wrong: dict[str, object], field: str) -> None:
    base = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=0)["sampling_session_id"]
    targets = {"data": [1, 2], "dtype": "int64", "shape": [2, 1], **wrong}
    about = {"sampling_session_id": base, "seq_id": 1, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}}
    given = wire.post("asample", **about, target_prompt_logprobs=targets)
    assert given.status_code == 400 and f"target_prompt_logprobs.{field}" in given.text, given.text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n is 3.* 1 to 2"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n.* needs prompt_logprobs"),
    ],
)
def test_a_number_of_last_tokens_that_cannot_act_is_refused(
    wire: Wire, options: dict[str, object], wanted: str
) -> None:
    base = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=0)["sampling_session_id"]
    told = sample(wire, base, 1, **options)
    assert told["category"] == "user" and re.search(wanted, told["error"]), told


REFUSED = {
    "optim_step": {"adam_params": {"learning_rate": None}},  # how the package sends NaN
    "save_weights": {"path": "x", "ttl_seconds": 0},
    "save_weights_for_sampler": {"path": "x", "ttl_seconds": 10**10},
    "load_weights": {"path": 7, "optimizer": True},
    "save_weights_external": {"path": "x", "ttl_seconds": 0},
}


def refused(wire: Wire, model: str, seq: int, route: str) -> str:
    """The id of a request whose body is refused."""
    return wire.ok(route, model_id=model, seq_id=seq, **REFUSED[route])["request_id"]


@pytest.mark.parametrize("route", [*REFUSED])
def test_a_body_that_is_refused_is_its_numbers_answer(wire: Wire, route: str) -> None:
    model = wire.model()
    wire.backward_answer(model, 1, supervised(1))
    told = wire.answer(refused(wire, model, 2, route))
    assert told["category"] == "user" and "must" in told["error"] and told["code"] == "invalid_value"
    saved = wire.answer(wire.ok("save_weights", model_id=model, seq_id=3, path="kept")["request_id"])
    assert saved["path"] == f"tinker://{model}/weights/kept"  # at once, and with a gradient that waits for its step
    assert wire.answer(wire.step(model, 4))["metrics"]["refused:sum"] == 0


def test_what_the_package_cannot_write_as_json_and_wrong_models_are_answers_too(wire: Wire) -> None:
    model = wire.model()
    raw = b'{"model_id": "%s", "seq_id": 1, "adam_params": {"learning_rate": NaN}}' % model.encode()
    headers = {"content-type": "application/json"}
    given = wire.http.post("/api/v1/optim_step", content=raw, headers=headers)
    assert "NaN is not JSON" in wire.answer(given.json()["request_id"])["error"]
    other = {"path": f"tinker://{model}/weights/a", "optimizer": True, "base_model": "other"}
    told = wire.answer(wire.ok("load_weights", model_id=model, seq_id=2, **other)["request_id"])
    assert told["category"] == "user" and "no base model" in told["error"]
    dimuon = {**other, "base_model": None, "optimizer_config": {"type": "dimuon"}}
    told = wire.answer(wire.ok("load_weights", model_id=model, seq_id=3, **dimuon)["request_id"])
    assert told["category"] == "user" and "dimuon" in told["error"]
    wire.backward_answer(model, 4, supervised(4))


def test_after_a_gap_the_rest_runs_but_no_step_is_made_of_half_a_batch(wire: Wire) -> None:
    model = wire.model()
    before = wire.weights(model)
    late = wire.backward(model, 3, supervised(3)).json()["request_id"]
    step, save = wire.step(model, 4), wire.ok("save_weights", model_id=model, seq_id=5, path="a")["request_id"]
    far = wire.backward(model, 2**30, supervised(3)).json()["request_id"]
    assert "more than" in wire.answer(far)["error"]
    assert isinstance(wire.answer(late), bytes)  # after half a second
    told = wire.answer(step)
    assert told["category"] == "user" and "seq_id 1 to 2 did not come within 0.5 s" in told["error"]
    assert wire.answer(save)["path"] and np.array_equal(wire.weights(model), before)
    told = wire.answer(wire.backward(model, 1, supervised(1)).json()["request_id"])
    assert told["category"] == "user" and "seq_id 1 comes too late" in told["error"]
    assert train_on(wire, model, 6) == train_on(wire, wire.model(1), 1)  # nothing of the batch that was cut is left


def test_a_state_that_is_loaded_makes_a_gap_good(wire: Wire) -> None:
    model = wire.model()
    state = wire.answer(wire.ok("save_weights", model_id=model, seq_id=1, path="s")["request_id"])["path"]
    wire.answer(wire.backward(model, 3, supervised(3)).json()["request_id"])  # 2 never comes
    other = snapshot(wire, model, 4, 0, path="sampler")["path"]
    for seq, path in ((5, other), (6, state)):
        answered = wire.answer(
            wire.ok("load_weights", model_id=model, seq_id=seq, path=path, optimizer=True)["request_id"]
        )
        assert (answered.get("path") == state) if path == state else "no state of the trainer" in answered["error"]
    assert train_on(wire, model, 7) == train_on(wire, wire.model(1), 1)


def train_on(wire: Wire, model: str, seq: int) -> list[float]:
    wire.backward_answer(model, seq, supervised(1))
    assert wire.answer(wire.step(model, seq + 1))["metrics"]["refused:sum"] == 0
    return wire.weights(model).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_no_mixture_of_good_bad_and_missing_requests_keeps_a_model_from_being_saved(patient: Whole, seed: int) -> None:
    wire, rng = Wire(patient), random.Random(seed)
    model, asked = wire.model(), []

    def good_or_bad(seq: int) -> str:
        kind = rng.choice(["backward", "bad data", "step", "bad step", "save", "sampler", *REFUSED])
        match kind:
            case "backward":
                return wire.backward(model, seq, supervised(seq)).json()["request_id"]
            case "bad data":
                wrong = [[datum([1, 2, 3], weights=[1])], [datum([1, 9999], weights=[1])], []]
                return wire.backward(model, seq, rng.choice(wrong)).json()["request_id"]
            case "step" | "bad step":
                return wire.step(model, seq, learning_rate=-1.0 if kind == "bad step" else 1e-3)
            case "save":
                return wire.ok("save_weights", model_id=model, seq_id=seq, path="a", overwrite=True)["request_id"]
            case "sampler":
                body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
                return wire.ok("save_weights_for_sampler", **body)["request_id"]
        return refused(wire, model, seq, kind)

    numbers = [seq for seq in range(1, 12) if rng.random() > 0.15]  # some are lost on their way
    for start in range(0, len(numbers), 4):  # and some overtake others
        asked += [good_or_bad(seq) for seq in rng.sample(numbers[start : start + 4], len(numbers[start : start + 4]))]
    for id in asked:
        wire.answer(id)
    saved = wire.answer(wire.ok("save_weights", model_id=model, seq_id=12, path="end")["request_id"])
    assert saved["path"] == f"tinker://{model}/weights/end"
    wire.backward_answer(model, 13, supervised(1))
    wire.answer(wire.step(model, 14))  # which may be told of a gap, once
    wire.backward_answer(model, 15, supervised(1))
    assert wire.answer(wire.step(model, 16))["metrics"]["refused:sum"] == 0
    wire.ok(f"sessions/{wire.session}/finish")


@pytest.fixture(scope="module")
def patient(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """A server that waits a short while for a request that is missing."""
    with tinker_site(tmp_path_factory.mktemp("state"), model_dir, tinker_gap_s=0.05) as site:
        yield site


def test_futures_are_bounded_and_go_with_their_session(model_dir: Path, tmp_path: Path) -> None:
    with tinker_site(tmp_path, model_dir, tinker_pending=100, tinker_gap_s=600, tinker_body_bytes=20_000) as site:
        wire = Wire(site)
        model = wire.model()
        statuses = [wire.post("optim_step", model_id=model, seq_id=n + 2).status_code for n in range(400)]
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


def test_models_are_bounded_and_one_too_many_is_told_so(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by 429, which the package repeats for five minutes without a word."""
    monkeypatch.setattr(tinker_training, "PLACE_S", 0.3)
    monkeypatch.setattr(tinker_routes, "POLL_S", 0.05)
    with tinker_site(tmp_path, model_dir, tinker_models=1) as site:
        wire = Wire(site)
        model = wire.model()
        made = wire.ok("create_model", session_id=wire.session, model_seq_id=1, base_model=site.server.base.name)
        waits = wire.ok("retrieve_future", request_id=made["request_id"])
        assert waits["queue_state"] == "paused_capacity" and "tinker_models" in waits["queue_state_reason"]
        told = wire.answer(made["request_id"])
        assert told["category"] == "user" and "1 models are in training" in told["error"]
        assert wire.post("get_info", model_id=made["model_id"]).status_code == 404
        wire.backward_answer(model, 1, supervised(1))


def test_a_silent_session_ends(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_sessions, "LOOK_EVERY_S", 0.05)
    with tinker_site(tmp_path, model_dir, tinker_models=1, tinker_idle_s=3600) as site:
        wire = Wire(site)
        model = wire.model()
        snapshot(wire, model, 1, 0)
        wire.tinker.sessions.touch(wire.session).last_seen -= 3601
        assert becomes(lambda: wire.post("get_info", model_id=model).status_code != 200)
        assert becomes(lambda: wire.tinker.samplers.of(wire.session) == [] and len(wire.tinker.futures) == 0)
        assert not list((tmp_path / "tinker" / "snapshots").glob("*/v*"))


def test_a_client_that_is_gone_makes_room(model_dir: Path, tmp_path: Path) -> None:
    with tinker_site(tmp_path, model_dir, tinker_models=1) as site:
        gone, idle, next_one = Wire(site), Wire(site), Wire(site)
        model = gone.model()
        asked = {"session_id": next_one.session, "model_seq_id": 0, "base_model": site.server.base.name}
        made = next_one.ok("create_model", **asked)  # which waits: heartbeats may still come
        for wire in (gone, idle):
            gone.tinker.sessions.touch(wire.session).last_seen -= 61
        made = next_one.answer(made["request_id"])["model_id"]
        assert gone.post("get_info", model_id=model).status_code == 404
        assert next_one.post("get_info", model_id=made).status_code == 200
        assert idle.session in gone.tinker.sessions.ids  # it has no model


def test_a_part_that_a_model_does_not_name_so_cannot_be_trained_alone(
    make_base: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    model = save_model(make_base("gpt2", dtype=torch.float32, context=64), tmp_path / "gpt2")
    with tinker_site(tmp_path / "state", model) as site:
        wire = Wire(site)
        about = {"session_id": wire.session, "base_model": site.server.base.name}
        made = wire.ok("create_model", **about, model_seq_id=0, lora_config={"rank": 2, "train_mlp": False})
        told = wire.answer(made["request_id"])
        assert told["category"] == "user" and "leave train_attn and train_mlp true" in told["error"]
        assert "train.lora" not in told["error"]
        assert "error" not in wire.answer(wire.ok("create_model", **about, model_seq_id=1)["request_id"])


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
