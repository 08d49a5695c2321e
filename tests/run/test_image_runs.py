"""Runs on prompts with images, from a file of rows to an adapter that PEFT loads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine.local import LocalEngine
from groupwise.errors import ChatError, ConfigError
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import FIRST, vision_of
from groupwise.model.load import load_model
from groupwise.pictures import read_picture
from groupwise.run.loop import RunResult, run_loop
from groupwise.store.adapters import AdapterStore
from groupwise.types import Prompt
from running_jobs import Dies, adapter_bytes, metrics_of
from seeing_models import save_seeing
from slow_cases import long_case
from vllm_peer import serving
from wording import raises

REWARDS = """
def sees(completions, image, prompts, **columns):
    assert all(each.size == (84, 56) and each.getpixel((1, 1)) == (255, 255, 255) for each in image)
    assert all(prompt[0]["content"][0]["image"].size == (84, 56) for prompt in prompts)
    return [len(said[-1]["content"]) % 7 / 7 for said in completions]
"""


def dots(count: int) -> Image.Image:
    """Return a white picture with so many red dots."""
    image = Image.new("RGB", (84, 56), "white")
    for i in range(count):
        ImageDraw.Draw(image).ellipse((5 + 15 * i, 10, 15 + 15 * i, 20), fill="red")
    return image


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def place(folder: Path, model: Path, **sections: Any) -> RunConfig:
    """A folder with a run's rows, images and rewards; six prompts over five images."""
    for count in range(1, 6):
        dots(count).save(folder / f"{count}.png")
    rows = [{"prompt": "How many?", "image": f"{1 + i % 5}.png", "answer": str(1 + i % 5)} for i in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards_that_see.py").write_text(REWARDS)
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "output_dir": str(folder / "runs"),
        "data": {"source": "rows.jsonl"},
        "rewards": ["rewards_that_see.sees"],
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 2, "learning_rate": 1e-3},
        "scoring": {"workers": 0},
    }
    return parse_config(settings | {"folder": str(folder)} | sections)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunResult:
    """The plain run, in a folder with its pictures."""
    return run_loop(place(tmp_path_factory.mktemp("plain"), model))


def test_it_trains_what_it_sees(ran: RunResult) -> None:
    folder = ran.run_dir.parents[1]
    assert ran.trained
    measured = metrics_of(ran.run_dir)
    steps = [line for line in measured if "optim/grad_norm" in line]
    assert len(steps) == 2 and all(line["optim/grad_norm"] > 0 for line in steps)
    assert all(line["mismatch/logprob_diff_max"] < 1e-4 for line in steps)
    kept = sorted(path.name for path in (ran.run_dir / "images").iterdir())
    pictures = [read_picture(f"{count}.png", folder=folder) for count in range(1, 6)]
    assert kept == sorted(f"{each.digest}.png" for each in pictures)
    lines = [
        json.loads(line) for path in (ran.run_dir / "rollouts").iterdir() for line in path.read_text().splitlines()
    ]
    (part, text) = lines[0]["prompt"]["messages"][0]["content"]
    assert text == {"type": "text", "text": "How many?"}
    assert part["type"] == "image" and part["image"] in [f"sha256:{each.digest}" for each in pictures]


def test_the_adapter_answers_the_same_with_peft(ran: RunResult, model: Path) -> None:
    base = load_model(str(model), device="cpu", dtype="float32")
    vision = vision_of(base.model)
    assert vision is not None
    picture = read_picture(dots(3))
    said = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "How many?"}]}
    ids = encode_prompt(Prompt(id="1", messages=(said,)), base.tokenizer).token_ids  # type: ignore[arg-type]
    adapter = AdapterStore(ran.run_dir / "adapters").path(ran.version)
    before = vision.own_logits(ids, picture)
    PeftModel.from_pretrained(base.model, str(adapter))
    after = vision.own_logits(ids, picture)
    fresh = load_model(str(model), device="cpu", dtype="float32")
    encode_prompt(Prompt(id="1", messages=(said,)), fresh.tokenizer)  # type: ignore[arg-type]
    engine = LocalEngine(fresh, max_rows=4)
    try:
        engine.load(ran.version, adapter)
        scores = engine.score(ids, [9], ran.version)
    finally:
        engine.close()
    assert scores[0] == pytest.approx(float(after.log_softmax(-1)[-1, 9]), abs=1e-4)
    assert not torch.allclose(before, after, atol=1e-4)


def test_what_it_sees_is_trained_too(tmp_path: Path, model: Path) -> None:
    """Sampler and trainer see the same with each new version."""
    targets = ["vision", "projector", "all-linear"]
    train = {"steps": 3, "learning_rate": 1e-2, "lora": {"targets": targets, "rank": 4}}
    ran = run_loop(place(tmp_path, model, train=train))
    measured = metrics_of(ran.run_dir)
    gaps = [line["mismatch/logprob_diff_max"] for line in measured if "mismatch/logprob_diff_max" in line]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    written = load_file(AdapterStore(ran.run_dir / "adapters").path(ran.version) / "adapter_model.safetensors")
    moved = {name for name, tensor in written.items() if name.endswith("lora_B.weight") and tensor.abs().max() > 0}
    assert any(".visual.blocks." in name for name in moved) and any(".merger." in name for name in moved)


WHOLE: dict[str, Any] = {
    "train": {"steps": 4, "learning_rate": 1e-3, "lora": None, "parameters": "all"},
    "algo": {"kl": "k3", "kl_coeff": 0.1, "reference": "ema", "reference_decay": 0.5},
    "checkpoint": {"every": 1},
}


@pytest.mark.long
def test_all_parameters_are_trained_and_go_on_bit_for_bit(tmp_path: Path, model: Path) -> None:
    """The tower's with them, against a reference with a tower of its own; what is exported sees the same."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = run_loop(place(tmp_path / "whole", model, **WHOLE))
    gaps = [line["mismatch/logprob_diff_max"] for line in metrics_of(whole.run_dir) if "optim/grad_norm" in line]
    assert len(gaps) == 4 and max(gaps) < 1e-4
    cut = place(tmp_path / "cut", model, resume="auto", **WHOLE)
    with pytest.raises(Dies.Now):
        run_loop(cut, display=Dies(3, total=4, stream=io.StringIO()))
    again = run_loop(cut)
    before, written, same = (
        load_file(folder / "model.safetensors") for folder in (model, whole.run_dir / "model", again.run_dir / "model")
    )
    assert written.keys() == same.keys() == before.keys()
    assert all(torch.equal(written[name], same[name]) for name in written)
    moved = {name for name in before if not torch.equal(before[name], written[name])}
    for part in (".patch_embed.", ".blocks.", ".merger.", "embed_tokens"):
        assert any(part in name for name in moved), part
    exported = load_model(str(whole.run_dir / "model"), device="cpu", dtype="float32")
    said = {"role": "user", "content": [{"type": "image", "image": read_picture(dots(3))}]}
    assert encode_prompt(Prompt(id="1", messages=(said,)), exported.tokenizer).token_ids  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [["projector"], ["text"]])
def test_only_the_parts_that_are_named_are_trained(tmp_path: Path, model: Path, parts: list[str]) -> None:
    train = {"steps": 1, "warmup_steps": 0, "learning_rate": 1e-3, "lora": None, "parameters": parts}
    ran = run_loop(place(tmp_path, model, train=train))
    before, written = (load_file(folder / "model.safetensors") for folder in (model, ran.run_dir / "model"))
    moved = {name for name in before if not torch.equal(before[name], written[name])}
    assert moved and all((".merger." in name) == (parts == ["projector"]) for name in moved)
    assert not any(".blocks." in name for name in moved)


@pytest.mark.parametrize(
    "sections", [{"engine": "vllm"}, {"train": {"parallel": "fsdp", "devices": 2, "lora": {"targets": "projector"}}}]
)
def test_where_it_cannot_be_trained_it_is_refused(tmp_path: Path, model: Path, sections: dict[str, Any]) -> None:
    with raises(ConfigError):
        place(tmp_path, model, **({"train": {"lora": {"targets": ["vision"]}}} | sections))
    if "train" in sections:
        train = sections["train"] | {"lora": None, "parameters": "vision"}
        with raises(ConfigError, field="train.parameters"):
            place(tmp_path, model, **(sections | {"train": train}))


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"steps": 3, "learning_rate": 1e-2, "lora": {"rank": 4}}},
        long_case({"train": {"steps": 3, "learning_rate": 1e-3, "lora": None, "parameters": "all"}}),
        long_case(
            {"train": {"steps": 3, "learning_rate": 1e-2, "lora": {"rank": 4, "targets": ["vision", "projector"]}}}
            | {"vllm": {"push": "merged"}}
        ),
    ],
    ids=["adapter", "all", "merged"],
)
def test_vllm_samples_what_it_sees(tmp_path: Path, model: Path, sections: dict[str, Any]) -> None:
    """By a server with eyes of its own; whose tower is read anew where it trains."""
    with serving(load_model(str(model), device="cpu", dtype="float32")) as peer:
        vllm = {"urls": [peer.url], "max_loras": 3, "health_interval_s": 0.1} | sections.get("vllm", {})
        ran = run_loop(place(tmp_path, model, **(sections | {"engine": "vllm", "vllm": vllm})))
        gaps = [line["mismatch/logprob_diff_max"] for line in metrics_of(ran.run_dir) if "optim/grad_norm" in line]
        assert len(gaps) == 3 and max(gaps) < 1e-5
        whole = sections["train"]["lora"] is None or "vllm" in sections
        assert (len(peer.sent), len(peer.checkpoints)) == ((3, 1) if whole else (0, 0))  # the base is read
        assert len({*peer.images}) == 6 and len(peer.images) < 9  # once, but for prompts that are asked at once


def test_it_goes_on_bit_for_bit(tmp_path: Path, model: Path) -> None:
    """Groups that wait in the buffer have images that are only on the run's shelf."""
    sections: dict[str, Any] = {
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_tokens": 8, "replay": {"size": 8, "share": 0.5}},
        "train": {"steps": 4, "learning_rate": 1e-3},
        "checkpoint": {"every": 1},
    }
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = run_loop(place(tmp_path / "whole", model, **sections))
    cut = place(tmp_path / "cut", model, resume="auto", **sections)
    with pytest.raises(Dies.Now):
        run_loop(cut, display=Dies(3, total=4, stream=io.StringIO()))
    assert adapter_bytes(run_loop(cut).run_dir) == adapter_bytes(whole.run_dir)


LOOKING = """
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from groupwise.tasks.tool_env import ToolEnv

class Looking:
    def reset(self, case, seed):
        self.looked = 0
        return [{"role": "user", "content": [{"type": "image", "image": self.seen()}, {"type": "text", "text": "?"}]}]

    def seen(self):
        image = Image.new("RGB", (56, 56), "white")
        ImageDraw.Draw(image).rectangle((4, 4, 20 + 10 * self.looked, 20), fill="blue")
        return image

    def step(self, message):
        self.looked += 1
        said = [{"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "image", "image": self.seen()}]}]
        return said, len(message["content"]) % 5 / 5, self.looked == 2

    def cases(self):
        return [{"n": 1}, {"n": 2}]
"""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_environment_shows_what_is_seen(tmp_path: Path, model: Path, workers: int) -> None:
    """Two pictures in two turns; in a process of its own they come as files."""
    (tmp_path / "looking.py").write_text(LOOKING)
    env = {"environment": "looking:Looking", "workers": workers, "stop_at_cut": False}
    ran = run_loop(place(tmp_path, model, env=env, data=None, rewards=[]))
    assert ran.trained
    measured = metrics_of(ran.run_dir)
    assert all(line["mismatch/logprob_gap"] < 1e-4 for line in measured if "mismatch/logprob_gap" in line)
    kept = {path.stem for path in (ran.run_dir / "images").iterdir()}
    lines = [
        json.loads(line) for path in (ran.run_dir / "rollouts").iterdir() for line in path.read_text().splitlines()
    ]
    turns = lines[0]["rollouts"][0]["turns"]
    assert len(turns) == 2
    ids = [turn.get("prompt_ids") or lines[0]["prompt"]["token_ids"] for turn in turns]
    of_images = [len({token for token in prompt if token >= FIRST}) for prompt in ids]
    assert of_images[1] == 2 * of_images[0] > 0
    shown = [part["image"] for each in lines[0]["rollouts"][0]["messages"] for part in pictured(each)]
    assert len(kept) == 2 and shown[0].removeprefix("sha256:") in kept
    assert len(shown) == 2 and shown[1].removeprefix("sha256:") not in kept  # said at the end, and seen by nobody


def pictured(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


TWO_TURNS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": [{"type": "text", "text": "And here?"}, {"type": "image"}]},
    {"role": "assistant", "content": "Four."},
]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How many?", "image": "2.png", "answer": "Two."},
        {"messages": TWO_TURNS, "images": ["1.png", "4.png"]},
        {"prompt": TWO_TURNS[:1], "completion": TWO_TURNS[1:2], "images": ["3.png"]},
    ],
    ids=["answer", "messages", "completion"],
)
def test_examples_with_images_are_learned(tmp_path: Path, model: Path, row: dict[str, Any]) -> None:
    """In TRL's forms."""
    config = place(tmp_path, model, kind="sft", rewards=[], train={"steps": 4, "learning_rate": 5e-3})
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    ran = run_loop(config)
    losses = [line["loss/cross_entropy"] for line in metrics_of(ran.run_dir) if "loss/cross_entropy" in line]
    assert losses[-1] < losses[0]
    assert len([*(ran.run_dir / "images").iterdir()]) == len(row.get("images", [1]))


@pytest.mark.parametrize("whole", [False, True])
def test_pairs_with_images_are_learned(tmp_path: Path, model: Path, whole: bool) -> None:
    """TRL's forms: the prompt apart, and conversations that begin alike."""
    asked, (right, wrong) = TWO_TURNS[:1], ([{"role": "assistant", "content": said}] for said in ("Three.", "One."))
    pair = {"chosen": asked + right, "rejected": asked + wrong} if whole else {"chosen": right, "rejected": wrong}
    row = pair | {"images": ["3.png"]} | ({} if whole else {"prompt": asked})
    config = place(tmp_path, model, kind="dpo", rewards=[], train={"steps": 4, "learning_rate": 5e-3})
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    measured = [line for line in metrics_of(run_loop(config).run_dir) if "loss/preference" in line]
    assert measured[0]["preference/margin"] == pytest.approx(0, abs=1e-4) and measured[-1]["preference/margin"] > 0.01


def test_a_model_that_reads_text_is_told_before_a_step(tmp_path: Path) -> None:
    with raises(ChatError):
        run_loop(place(tmp_path, Path("starter")))
