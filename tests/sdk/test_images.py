"""Images through the SDK: sampled from messages, trained as datums, with the log-probabilities of the model's own."""

from __future__ import annotations

import asyncio
import base64
import io
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from groupwise.bridges.cookbook.config import DeployConfig
from groupwise.config.trained import parts_of
from groupwise.errors import ConfigError, DataError, FieldError
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import load_model
from groupwise.pictures import read_picture
from groupwise.sdk.config import LoopConfig
from groupwise.sdk.datums import build_grpo_datums
from groupwise.sdk.infra import setup_infra
from groupwise.sdk.trainer import AdamParams, TrainingService
from groupwise.store.adapters import AdapterStore
from groupwise.types import PolicyVersion
from seeing_models import drawn, save_seeing
from wording import raises


def png() -> bytes:
    file = io.BytesIO()
    drawn(84, 56).save(file, format="PNG")
    return file.getvalue()


SAID: Any = [
    {"role": "user", "content": [{"type": "image", "image": drawn(84, 56)}, {"type": "text", "text": "How many?"}]}
]


def looped(config: LoopConfig, *, steps: int = 2) -> tuple[set[str], PolicyVersion, list[Any]]:
    """Run a loop over an image. -> The tensors that it moved; the last version, and what that says of the image."""
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        sampler, policy, weights = infra.sampler, infra.policy, infra.weights
        assert sampler is not None and weights is not None
        before = {name: tensor.detach().clone() for name, tensor in policy.learner.model.named_parameters()}
        said: list[Any] = []
        for step in range(1, steps + 1):
            said = asyncio.run(sampler.sample_with_tokens(SAID, 2, max_tokens=5, seed=step))
            told = [each.inference_logprobs[1:] for each in said]
            data = build_grpo_datums([each.datum() for each in said], [1.0, -1.0], told, [s.prompt_len for s in said])
            found = policy.forward_backward(data, "importance_sampling").result().logprobs
            for each, row, mine in zip(said, found, told, strict=True):
                assert row[each.prompt_len - 1 :] == pytest.approx(list(mine[each.prompt_len - 1 :]), abs=1e-4)
            policy.optim_step(AdamParams(learning_rate=1e-2)).result()
            version = weights.sync().result()
        said = asyncio.run(sampler.sample_with_tokens(SAID, 2, max_tokens=5, seed=9))
        after = policy.learner.model.named_parameters()
        return {name for name, tensor in after if not torch.equal(tensor, before[name])}, version, said


@pytest.mark.parametrize("targets", ["all-linear", ["vision", "projector"]])
def test_a_loop_ends_in_an_adapter_with_which_peft_answers_the_same(tmp_path: Path, targets: Any) -> None:
    model = str(save_seeing("qwen2_5_vl", tmp_path / "model"))
    deployment = DeployConfig(tokenizer_model=model)
    config = LoopConfig(
        base_model=model, log_path=str(tmp_path / "log"), deployment=deployment, lora_rank=4, lora_targets=targets
    )
    moved, version, said = looped(config)
    assert moved and all((".visual." in name) == (targets != "all-linear") for name in moved)
    base = load_model(model, device="cpu", dtype="float32")
    vision, picture = vision_of(base.model), read_picture(drawn(84, 56))
    assert vision is not None
    vision.expand([vision.token_id], [picture])
    for adapted in (False, True):
        if adapted:
            PeftModel.from_pretrained(base.model, str(AdapterStore(tmp_path / "log" / "adapters").path(version)))
        for each in said:
            own = vision.own_logits(each.full_tokens, picture)[each.prompt_len - 1 : -1].log_softmax(-1)
            ids = torch.tensor(each.full_tokens[each.prompt_len :])
            own = own[torch.arange(len(ids)), ids].tolist()
            told = list(each.inference_logprobs[each.prompt_len :])
            assert (told == pytest.approx(own, abs=3e-4)) == adapted


@pytest.mark.parametrize("parameters", ["text", "projector", ("vision", "projector"), "all"])
def test_the_parts_that_are_named_are_trained(tmp_path: Path, parameters: Any) -> None:
    """Exactly those, and what is sampled follows them (`looped`)."""
    model = str(save_seeing("qwen2_5_vl", tmp_path / "model"))
    deployment = DeployConfig(tokenizer_model=model)
    config = LoopConfig(
        base_model=model, log_path=str(tmp_path / "log"), deployment=deployment, lora_rank=0, parameters=parameters
    )
    moved, _, _ = looped(config)
    parts = {"projector" if ".merger." in n else "vision" if ".visual." in n else "text" for n in moved}
    assert parts == {*parts_of(parameters)}


def test_what_trains_is_said_once(tmp_path: Path) -> None:
    with raises(ConfigError, field="parameters"):
        LoopConfig(base_model="starter-vl", log_path="log", parameters="all")
    with raises(ConfigError, field="parameters"):
        LoopConfig(base_model="starter-vl", log_path="log", lora_rank=0, parameters="eyes")
    with raises(ConfigError, field="lora_targets"):
        LoopConfig(base_model="starter-vl", log_path="log", lora_targets="eyes")
    with closing(TrainingService(load_model("starter", device="cpu", dtype="float32"))) as service:
        with raises(ConfigError, field="parameters"):
            service.create_training_client(parameters="vision")
        with raises(FieldError, field="train.parameters"):
            service.create_training_client(lora=None, parameters="vision")


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
