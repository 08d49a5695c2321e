"""Images through the SDK: sampled from messages, trained as datums, with the log-probabilities of the model's own."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path

import pytest
import torch

from groupwise.bridges.cookbook.config import DeployConfig
from groupwise.errors import DataError
from groupwise.model.image_tokens import vision_of
from groupwise.pictures import read_picture
from groupwise.sdk.config import LoopConfig
from groupwise.sdk.datums import build_grpo_datums
from groupwise.sdk.infra import setup_infra
from groupwise.sdk.trainer import AdamParams
from seeing_models import drawn, save_seeing
from wording import raises


def png() -> bytes:
    file = io.BytesIO()
    drawn(84, 56).save(file, format="PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_it_samples_and_trains_what_it_sees(tmp_path: Path, family: str) -> None:
    model = str(save_seeing(family, tmp_path / "model"))
    config = LoopConfig(
        base_model=model, log_path=str(tmp_path / "log"), deployment=DeployConfig(tokenizer_model=model)
    )
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    said = [
        {"role": "user", "content": [{"type": "image", "image": drawn(84, 56)}, {"type": "text", "text": "How many?"}]}
    ]
    posted = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, said[0]["content"][1]]}]
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        sampler, policy = infra.sampler, infra.policy
        assert sampler is not None
        completions = asyncio.run(sampler.sample_with_tokens(said, 2, max_tokens=5, seed=3))  # type: ignore[arg-type]
        other = asyncio.run(sampler.sample_with_tokens(posted, 1, max_tokens=5))  # type: ignore[arg-type]
        assert len(other[0].full_tokens[: other[0].prompt_len]) == completions[0].prompt_len
        with raises(DataError):
            asyncio.run(sampler.sample(completions[0].full_tokens[:-1], 1, echo=True))
        data = [each.datum() for each in completions]
        vision = vision_of(policy.learner.model)
        assert vision is not None
        before = policy.forward(data).result().logprobs
        for each, row in zip(completions, before, strict=True):
            logits = vision.own_logits(each.full_tokens, read_picture(drawn(84, 56)))
            rows = logits[each.prompt_len - 1 : -1].log_softmax(-1)
            ids = torch.tensor(each.full_tokens[each.prompt_len :])
            own = rows[torch.arange(len(ids)), ids].tolist()
            assert row[each.prompt_len - 1 :] == pytest.approx(own, abs=1e-3)
            assert list(each.inference_logprobs[each.prompt_len :]) == pytest.approx(own, abs=1e-3)
        logprobs = [each.inference_logprobs[1:] for each in completions]
        lengths = [each.prompt_len for each in completions]
        scored = build_grpo_datums(data, [1.0, -1.0], logprobs, lengths)
        policy.forward_backward(scored, "importance_sampling").result()
        policy.optim_step(AdamParams(learning_rate=1e-2)).result()
        assert policy.forward(data).result().logprobs != before
