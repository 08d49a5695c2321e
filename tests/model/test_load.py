"""Where a model is loaded: the device that `auto` means, and what a device without float64 computes in."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.engine.sampling import uniforms
from groupwise.errors import ModelError
from groupwise.model.head import Head
from groupwise.model.load import load_model, resolve_device, resolve_dtype, share_weights, widest_float
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from wording import raises

MPS = torch.device("mps")


@pytest.mark.parametrize(("cuda", "mps", "chosen"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_is_the_first_device_that_is_there(monkeypatch, cuda: bool, mps: bool, chosen: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: mps)
    assert resolve_device().type == chosen
    for named, there in (("cuda", cuda), ("mps", mps), ("cpu", True)):
        if there:
            assert resolve_device(named).type == named
        else:
            with raises(ModelError):
                resolve_device(named)


def test_types_of_a_device() -> None:
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", MPS) == resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert (widest_float(MPS), widest_float(torch.device("cpu"))) == (torch.float32, torch.float64)
    with raises(ModelError):
        resolve_dtype("float64", MPS)


class NoFloat64(TorchDispatchMode):
    """Fails where any operation makes a float64 tensor."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                raise AssertionError(f"{function} made a float64 tensor, which Apple's GPUs do not have")
        return out


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "llama4_text"])
@pytest.mark.filterwarnings("ignore:.*(in packed rows|recurrent layers).*:UserWarning")
def test_a_device_without_float64_samples_and_trains_as_any(make_base, make_samples, monkeypatch, family: str) -> None:
    """Here a CPU that is told to have none: nothing wider is made, and the numbers are the same up to rounding."""
    base = make_base(family, dtype=torch.float32)
    params = SamplingParams(max_tokens=8, seed=3, top_p=0.9, top_logprobs=2, repetition_penalty=1.1)
    asked = [
        SamplingRequest(prompt_ids=(5, 6, 7 + n), n=2, params=params, version=PolicyVersion.base()) for n in (0, 1)
    ]
    samples, loss = make_samples(((5, (4, 6)), (3, (7,)))), resolve_loss("grpo", kl="k3", kl_coeff=0.1)

    def everything() -> list[float]:
        with closing(LocalEngine(base, max_rows=8, lanes=1)) as engine:
            groups = engine.generate(asked)
            scored = engine.score((5, 6, 7), (8, 9), PolicyVersion.base())
        learner = Learner(base, threads=1)
        metrics = learner.step(samples, loss, learning_rate=1e-3)
        return [*(x for group in groups for c in group for x in c.logprobs), *scored, metrics["optim/grad_norm"]]

    expected = everything()
    for user in ("engine.rows", "engine.local", "model.packing"):
        monkeypatch.setattr(f"groupwise.{user}.widest_float", lambda device: torch.float32)
    on_host = lambda *rows: uniforms(*rows).astype(np.float32)  # noqa: E731  numpy's, rounded on the way to the device
    monkeypatch.setattr("groupwise.engine.decoder.uniforms", on_host)
    work = LocalEngine._work

    def watched(*arguments: Any) -> None:
        with NoFloat64():
            work(*arguments)

    monkeypatch.setattr(LocalEngine, "_work", watched)
    with NoFloat64():
        assert everything() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("cast", "rounds"), [("auto", True), ("none", True), ("float32", False)])
def test_logits_of_a_model_in_16_bits_are_kept_in_float32_where_asked(cast: str, rounds: bool) -> None:
    """In the engine and in the trainer: both take the head of a twin of the model."""
    base = load_model("starter", device="cpu", dtype="bfloat16", cast_lm_head=cast)
    hidden = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).bfloat16() * 4
    for model in (base.model, share_weights(base.model)):
        logits = Head.of(model).logits(hidden)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, logits.bfloat16().float()) == rounds
