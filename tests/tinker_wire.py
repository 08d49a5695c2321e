"""The Tinker wire by hand: a server with it, bodies as protobuf, and answers read back, without the package."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.bridges.tinker.proto import ForwardBackwardOutput, ForwardBackwardRequest, SampleResponse
from groupwise.bridges.tinker.routes import Tinker
from serving import running
from whole_server import Whole, whole

PROTOBUF = {"content-type": "application/x-protobuf"}


class Wire:
    """One client of a server. `send` answers at once, `answer` waits."""

    def __init__(self, site: Whole, prefix: str = "/api/v1"):
        self.site, self.http, self._prefix = site, site.http, prefix
        self.session = self.ok("create_session", tags=[], sdk_version="0.38.0")["session_id"]

    @property
    def tinker(self) -> Tinker:
        return self.site.app.state.server.more["tinker"]

    def post(self, route: str, /, **body: Any) -> Any:
        return self.http.post(f"{self._prefix}/{route}", json=body)

    def ok(self, route: str, /, **body: Any) -> Any:
        given = self.post(route, **body)
        assert given.status_code == 200, given.text
        return given.json()

    def answer(self, request_id: str) -> Any:
        """The answer of a request: a dictionary, or the bytes of a message."""
        while True:
            given = self.post("retrieve_future", request_id=request_id)
            assert given.status_code == 200, given.text
            if given.headers["content-type"].startswith("application/x-protobuf"):
                return given.content
            if given.json().get("type") != "try_again":
                return given.json()

    def model(self, number: int = 0, *, rank: int = 4, seed: int = 0) -> str:
        """A new model's id."""
        made = self.ok(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=self.site.server.config.served_name,
            lora_config={"rank": rank, "seed": seed},
        )
        return self.answer(made["request_id"])["model_id"]

    def backward(self, model: str, seq: int, data: Sequence[Any], loss: str = "cross_entropy", **options: Any) -> Any:
        """The raw response to a forward_backward."""
        raw = request(model, seq, data, loss, **options).SerializeToString()
        return self.http.post(f"{self._prefix}/forward_backward", content=raw, headers=PROTOBUF)

    def backward_answer(self, *args: Any, **options: Any) -> Any:
        given = self.backward(*args, **options)
        assert given.status_code == 200, given.text
        return read_output(self.answer(given.json()["request_id"]))

    def step(self, model: str, seq: int, **adam: float) -> str:
        """The id of an optim_step."""
        adam = {"learning_rate": 1e-2, **adam}
        return self.ok("optim_step", model_id=model, seq_id=seq, adam_params=adam)["request_id"]

    def weights(self, model: str) -> np.ndarray:
        """Every trained number."""
        learner = self.tinker.models.find(model).trainer.learner
        return np.concatenate([parameter.detach().numpy().ravel() for parameter in learner.parameters])

    def gradient(self, model: str) -> np.ndarray:
        """What has been accumulated."""
        learner = self.tinker.models.find(model).trainer.learner
        return np.concatenate([parameter.grad.numpy().ravel() for parameter in learner.parameters])


@contextmanager
def tinker_site(state_dir: Path, model: Path, **settings: Any) -> Iterator[Whole]:
    """A server with the wire, until the end."""
    with whole(state_dir, model, tinker=True, **settings) as site:
        try:
            yield site
        finally:
            assert site.http.portal is not None
            site.http.portal.call(_close, site.app.state.server.more["tinker"])


@contextmanager
def listening(state_dir: Path, model: Path) -> Iterator[tuple[Whole, str]]:
    """A server with the wire that has a key, and its address, for `package_client`."""
    with tinker_site(state_dir, model, api_key="secret") as site, running(site.app) as port:
        yield site, f"http://127.0.0.1:{port}"


@contextmanager
def package_client(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the unmodified package's."""
    import tinker

    monkeypatch.setenv("TINKER_BASE_URL", address)
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client = tinker.ServiceClient()
    yield client
    client.close("success").result()


async def _close(tinker: Tinker) -> None:
    tinker.close()


Datum = tuple[list[int], dict[str, list[Any]]]


def datum(tokens: Sequence[int], **values: Sequence[float]) -> Datum:
    """A sequence and the values of its targets."""
    named = {name: list(row) for name, row in values.items()}
    return list(tokens[:-1]), {"target_tokens": list(tokens[1:]), **named}


def request(
    model: str,
    seq: int,
    data: Sequence[tuple[Sequence[int], Mapping[str, Sequence[Any]]]],
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    *,
    forward_only: bool = False,
) -> Any:
    """A ForwardBackwardRequest as tinker 0.38 writes it."""
    message = ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for name, value in (config or {}).items():
        message.loss_fn_config[name] = value
        message.loss_fn_config_v2[name].number = value
    for tokens, values in data:
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, row in values.items():
            whole = name == "target_tokens"
            tensor = one.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = np.asarray(row, "<i8" if whole else "<f4").tobytes(), 2 if whole else 1
            tensor.shape.extend(np.shape(row))
    return message


def read_output(raw: Any) -> Any:
    """(log-probabilities of each datum, metrics); a failure as it is."""
    if isinstance(raw, dict):
        return raw
    message = ForwardBackwardOutput.FromString(raw)
    rows: list[np.ndarray] = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        bounds = np.frombuffer(field.offsets, "<i8") // 4
        flat = np.frombuffer(field.data, "<f4")
        assert record.num_datums == len(bounds) - 1
        rows += [flat[a:b].reshape(-1, *field.trailing_shape) for a, b in pairwise(bounds)]
    return rows, dict(message.metrics)


def read_samples(raw: bytes) -> Any:
    """A SampleResponse."""
    return SampleResponse.FromString(raw)


def supervised(seed: int, count: int = 6) -> list[Datum]:
    """Sequences with weights of either sign."""
    rng = random.Random(seed)
    rows = [[rng.randrange(1, 250) for _ in range(rng.randint(3, 9))] for _ in range(count)]
    return [datum(row, weights=[rng.uniform(-1, 2) for _ in row[1:]]) for row in rows]


def sample(wire: Wire, sampler: str, seq: int, **options: Any) -> Any:
    """A SampleResponse, or a failure."""
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"type": "encoded_text", "tokens": [7]}]},
        "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []},
        **options,
    }
    given = wire.ok("asample", **body)
    assert len(given["sample_sequence_ids"]) == body.get("num_samples", 1)
    found = wire.answer(given["request_id"])
    return found if isinstance(found, dict) else read_samples(found)


def snapshot(wire: Wire, model: str, seq: int, number: int, **options: Any) -> dict[str, Any]:
    """The answer of a save_weights_for_sampler."""
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number, "kind": "snapshot", **options}
    return wire.answer(wire.ok("save_weights_for_sampler", **body)["request_id"])
