"""Conversations with images over HTTP: in each dialect, sampled, kept, scored, trained; and what is refused."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from groupwise.model.image_tokens import is_of_image, vision_of
from groupwise.model.load import load_model
from groupwise.model.vision import Vision
from groupwise.pictures import read_picture
from groupwise.types import PolicyVersion
from seeing_models import drawn, save_seeing
from whole_server import Whole, whole

FAMILIES = ("qwen2_5_vl", "smolvlm")


def png(width: int = 84, height: int = 56, *, seed: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    drawn(width, height, seed=seed).save(file, format=kind)
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def asked(*images: bytes, text: str = "How many?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(image, images), {"type": "text", "text": text}]}]


@pytest.fixture(scope="module", params=FAMILIES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    model = save_seeing(request.param, tmp_path_factory.mktemp("model"))
    with whole(tmp_path_factory.mktemp("state"), model) as site:
        yield site


@pytest.fixture(scope="module")
def blind(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with whole(tmp_path_factory.mktemp("state"), model_dir) as site:
        yield site


def post(site: Whole, path: str, body: Any, *, status: int = 200) -> Any:
    answer = site.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(site: Whole, messages: list[dict[str, Any]], **options: Any) -> Any:
    body = {"messages": messages, "max_tokens": 6, "seed": 3, "logprobs": True, "return_token_ids": True, **options}
    return post(site, "/v1/chat/completions", body)


def own_logprobs(vision: Vision, prompt: list[int], said: list[int], data: bytes) -> list[float]:
    """Return what the model's own forward says of a completion."""
    logits = vision.own_logits([*prompt, *said], read_picture(data))
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows[torch.arange(len(said)), torch.tensor(said)].tolist()


# ---- what is answered ----
def test_log_probabilities_are_the_models_own(site: Whole) -> None:
    vision = vision_of(site.server.base.model)
    assert vision is not None
    answer = chat(site, asked(png()), n=3)
    for choice in answer["choices"]:
        told = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert told == pytest.approx(
            own_logprobs(vision, answer["prompt_token_ids"], choice["token_ids"], png()), abs=2e-4
        )
    other = chat(site, asked(png(seed=1)), n=1)
    assert other["prompt_token_ids"] != answer["prompt_token_ids"]


def test_every_dialect_shows_the_same_prompt(site: Whole) -> None:
    data, text = png(), {"type": "text", "text": "How many?"}
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    block = {"type": "image", "source": source}
    messages = [{"role": "user", "content": [block, text]}]
    counted = post(site, "/v1/messages/count_tokens", {"messages": messages})["input_tokens"]
    answer = chat(site, asked(data), temperature=0)
    assert counted == len(answer["prompt_token_ids"])
    said = post(site, "/v1/messages", {"messages": messages, "max_tokens": 6, "temperature": 0})
    words = answer["choices"][0]["message"]["content"]
    assert "".join(each["text"] for each in said["content"]) == words
    parts = [{"type": "input_image", "image_url": url(data)}, {"type": "input_text", "text": "How many?"}]
    told = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 6, "temperature": 0}
    response = post(site, "/v1/responses", told)
    assert response["output"][0]["content"][0]["text"] == words
    assert response["usage"]["input_tokens"] == counted
    goes_on = {"input": "And now?", "previous_response_id": response["id"], "max_output_tokens": 2}
    assert post(site, "/v1/responses", goes_on)["usage"]["input_tokens"] > counted


def test_a_tools_result_may_be_an_image(site: Whole) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    before = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [called]}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": [image(png())]}
    answer = chat(site, [*before, result])
    assert any(map(is_of_image, answer["prompt_token_ids"]))
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    shown = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "image", "source": source}]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [shown]},
    ]
    counted = post(site, "/v1/messages/count_tokens", {"messages": messages})["input_tokens"]
    assert counted == len(answer["prompt_token_ids"])


def test_a_stream_says_what_the_whole_answer_says(site: Whole) -> None:
    body = {"messages": asked(png()), "max_tokens": 6, "temperature": 0, "stream": True}
    with site.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    said = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
    assert said == chat(site, asked(png()), temperature=0)["choices"][0]["message"]["content"]


def test_the_answers_form_is_kept_to(site: Whole) -> None:
    answer = chat(site, asked(png()), structured_outputs={"choice": ["7", "12"]})
    assert answer["choices"][0]["message"]["content"] in ("7", "12")


@pytest.mark.parametrize("site", ["qwen2_5_vl"], indirect=True)
def test_a_long_body_is_read_elsewhere_and_answered_alike(site: Whole) -> None:
    """Another process makes its token ids; this one finds the image on the shelf."""
    large = png(420, 280)
    assert len(large) > 1 << 16
    prompt = chat(site, asked(large))["prompt_token_ids"]
    vision = vision_of(site.server.base.model)
    assert vision is not None and vision.has(prompt)
    again = post(site, "/v1/completions", {"prompt": prompt, "max_tokens": 6, "temperature": 0})
    said = chat(site, asked(large), temperature=0)["choices"][0]["message"]["content"]
    assert again["choices"][0]["text"].startswith(said)


def test_rollouts_show_the_prompts_images(site: Whole) -> None:
    data = png(kind="JPEG")
    body = {"prompts": [asked(data), asked(text="None here?")], "n": 2, "max_tokens": 4}
    first, *_, last = post(site, "/v1/completions/batch", body)["completions"]
    detail = site.http.get(f"/v1/rollouts/{first['rollout_id']}").json()
    (where,) = detail["images"]
    shown = site.http.get(where)
    assert shown.content == data and shown.headers["content-type"] == "image/jpeg"
    assert shown.headers["x-content-type-options"] == "nosniff"
    assert "How many?" in detail["prompt"]
    assert any(map(is_of_image, detail["prompt_token_ids"])) and site.http.get("/v1/health").json()["images"] is True
    assert "images" not in site.http.get(f"/v1/rollouts/{last['rollout_id']}").json()
    rows = site.http.get("/v1/rollouts", params={"like": first["rollout_id"]}).json()["rows"]
    assert [row["prompt_tokens"] for row in rows] == [len(detail["prompt_token_ids"])] * 2
    assert site.http.get(f"/v1/images/{'0' * 64}").status_code == 404
    assert site.http.get("/v1/images/..%2Fledger.db").status_code == 404


# ---- what is trained ----
def test_a_posted_job_trains_and_peft_answers_as_the_server(site: Whole) -> None:
    """One group is named by its rollouts, one has messages and texts, one the token ids that were answered."""
    sampled = post(site, "/v1/completions/batch", {"prompts": [asked(png(seed=11))], "n": 4, "max_tokens": 5})
    answer = chat(site, asked(png(seed=13)), n=2)
    prompt, choices = answer["prompt_token_ids"], answer["choices"]
    named = [{"rollout_id": each["rollout_id"], "reward": i % 3} for i, each in enumerate(sampled["completions"])]
    texts = [{"text": "7", "reward": 1.0}, {"text": "12", "reward": 0.0}]
    ids = [
        {
            "token_ids": each["token_ids"],
            "prompt_token_ids": prompt,
            "logprobs": [token["logprob"] for token in each["logprobs"]["content"]],
            "reward": float(i),
        }
        for i, each in enumerate(choices)
    ]
    groups = [
        {"completions": named},
        {"messages": asked(png(seed=12)), "completions": texts},
        {"completions": ids},
    ]
    config = {"output_name": "eyes", "learning_rate": 5e-3, "iterations": 2}
    job = post(site, "/v1/train/grpo", {"groups": groups, "config": config})["job_id"]
    shown = site.http.get(f"/v1/rollouts/{job}.1.0").json()
    assert shown["images"] == [f"/v1/images/{read_picture(png(seed=12)).digest}"]
    trained = site.train()
    assert trained.version is not None
    answer = chat(site, asked(png()), adapter=trained.version)
    base = load_model(site.server.config.model, device="cpu", dtype="float32")
    vision, path = vision_of(base.model), site.server.store.path(PolicyVersion.parse(trained.version))
    assert vision is not None
    told, said = answer["choices"][0]["logprobs"]["content"], answer["choices"][0]["token_ids"]
    vision.expand([vision.token_id], [read_picture(png())])
    PeftModel.from_pretrained(base.model, str(path))
    own = own_logprobs(vision, answer["prompt_token_ids"], said, png())
    assert [each["logprob"] for each in told] == pytest.approx(own, abs=2e-4)
    before = chat(site, asked(png()), adapter="base")["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in before] != pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("site", ["qwen2_5_vl"], indirect=True)
def test_a_posted_job_trains_the_parts_that_its_targets_name(site: Whole) -> None:
    """Those of a tower and a projector, and nothing else; a job has adapters alone, and says so."""
    group = {"messages": asked(png()), "completions": [{"text": "7", "reward": 1.0}, {"text": "12", "reward": 0.0}]}
    config = {"output_name": "tower", "learning_rate": 1e-2, "target_modules": ["vision", "projector"]}
    refused = post(site, "/v1/train/grpo", {"groups": [group], "config": {"parameters": "all"}}, status=400)
    assert refused["error"]["param"] == "config.parameters" and "target_modules" in refused["error"]["hint"]
    post(site, "/v1/train/grpo", {"groups": [group], "config": config})
    version = site.train().version
    assert version is not None
    written = load_file(site.server.store.path(PolicyVersion.parse(version)) / "adapter_model.safetensors")
    moved = {name for name, tensor in written.items() if name.endswith("lora_B.weight") and bool(tensor.any())}
    assert moved and all(".visual." in name for name in written)
    assert {".merger." in name for name in moved} == {True, False}


@pytest.mark.slow
def test_a_job_whose_worker_is_killed_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """The worker reads the images where the server kept them, before it was killed and after."""
    model = save_seeing("qwen2_5_vl", tmp_path / "model")
    groups = [
        {
            "messages": asked(png(seed=seed)),
            "completions": [{"text": "7", "reward": 1.0}, {"text": "12", "reward": 0.0}],
        }
        for seed in (21, 22)
    ]
    config = {"output_name": "eyes", "learning_rate": 5e-3, "iterations": 4, "checkpoint_interval": 1}
    written = {}
    for name, fault in (("whole", ""), ("killed", "train:after-step:kill@3")):
        with whole(tmp_path / name, model) as site:
            job = post(site, "/v1/train/grpo", {"groups": groups, "config": config})["job_id"]
            if fault:
                assert worker_of(site, tmp_path / name, GROUPWISE_FAULTS=fault).wait(300) == -signal.SIGKILL
                site.server.ledger.expire("worker")
            worker = worker_of(site, tmp_path / name)
            try:
                deadline = time.monotonic() + 300
                while site.server.ledger.job(job).version is None:
                    assert worker.poll() is None and time.monotonic() < deadline
                    time.sleep(0.1)
            finally:
                worker.terminate()
                worker.wait(60)
            done = site.server.ledger.job(job)
            assert (done.error, done.attempt) == (None, 2 if fault else 1)
            assert done.version is not None
            version = PolicyVersion.parse(done.version)
            written[name] = (site.server.store.path(version) / "adapter_model.safetensors").read_bytes()
    assert written["killed"] == written["whole"]


def worker_of(site: Whole, state: Path, **variables: str) -> subprocess.Popen[bytes]:
    """The process that a server has for its jobs."""
    command = [sys.executable, "-m", "groupwise.run.worker", "--state", str(state), "--model", site.server.config.model]
    environment = {**os.environ, **variables}
    return subprocess.Popen([*command, "--dtype", "float32", "--device", "cpu"], env=environment)


# ---- what is refused ----
def refused(site: Whole, path: str, body: Any) -> tuple[int, str, str | None]:
    answer = site.http.post(path, json=body)
    error = answer.json()["error"]
    return answer.status_code, error.get("code") or error["type"], error.get("param")


def test_a_model_that_reads_text_says_so(blind: Whole) -> None:
    place = "messages[0].content[0]"
    assert refused(blind, "/v1/chat/completions", {"messages": asked(png())}) == (400, "unsupported_content", place)
    batch = {"prompts": [asked(text="a"), asked(png())]}
    assert refused(blind, "/v1/completions/batch", batch) == (400, "unsupported_content", "prompts[1][0].content[0]")
    input = [{"role": "user", "content": [{"type": "input_image", "image_url": url(png())}]}]
    assert refused(blind, "/v1/responses", {"input": input}) == (400, "unsupported_content", "input")


def test_addresses_and_files_are_not_opened(site: Whole, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    for address in (
        "http://127.0.0.1/a.png",
        "https://example.com/a.png",
        f"file://{tmp_path}/a.png",
        f"{tmp_path}/a.png",
    ):
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]
        place = "messages[0].content[0].image_url.url"
        assert refused(site, "/v1/chat/completions", {"messages": messages}) == (400, "invalid_image", place)
        block = {"type": "image", "source": {"type": "url", "url": address}}
        answer = site.http.post(
            "/v1/messages", json={"max_tokens": 2, "messages": [{"role": "user", "content": [block]}]}
        )
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_image"
        part = {"type": "input_image", "image_url": address}
        body = {"input": [{"role": "user", "content": [part]}]}
        assert refused(site, "/v1/responses", body) == (400, "invalid_image", "input[0].content[0].image_url")


def test_an_image_of_the_assistants_or_cut_off_is_refused(site: Whole) -> None:
    cut = {"messages": asked(png(), png(seed=2)[:-400])}
    assert refused(site, "/v1/chat/completions", cut) == (400, "invalid_image", "messages[0].content[1]")
    said = {"messages": [*asked(text="a"), {"role": "assistant", "content": [image(png())]}, *asked(text="b")]}
    assert refused(site, "/v1/chat/completions", said) == (400, "invalid_messages", "messages[1].content[0]")
    many = {"messages": asked(*[png(2, 2)] * 257)}
    assert refused(site, "/v1/chat/completions", many) == (400, "limit_exceeded", "messages")


def test_ids_of_images_are_whole_and_known(site: Whole) -> None:
    prompt = chat(site, asked(png()))["prompt_token_ids"]
    first = next(i for i, token in enumerate(prompt) if is_of_image(token))
    unknown = [token + (1 << 20) if is_of_image(token) else token for token in prompt]
    swapped = [*prompt[:first], prompt[first + 1], prompt[first], *prompt[first + 2 :]]
    for bad in (unknown, swapped, prompt[: first + 1], prompt[first + 1 :], [1 << 70], [1, (1 << 62) + 5]):
        assert refused(site, "/v1/completions", {"prompt": bad})[::2] == (400, "prompt")
    for option in ({"echo": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 4}):
        body = {"prompt": prompt, "max_tokens": 2, **option}
        assert refused(site, "/v1/completions", body)[::2] == (400, next(iter(option)))


def test_guesses_from_the_prompt_are_no_images(tmp_path: Path) -> None:
    """The reply repeats what stands before an image; what is guessed to follow stops there."""
    model = save_seeing("qwen2_5_vl", tmp_path / "model")
    plain, guessing = tmp_path / "plain", tmp_path / "guessing"
    with whole(plain, model) as one, whole(guessing, model, draft_tokens=8) as other:
        messages = asked(*[png(28, 28, seed=i) for i in range(4)], text="")
        said = [chat(each, messages, temperature=0, max_tokens=24)["choices"][0]["token_ids"] for each in (one, other)]
    assert said[0] == said[1]


def test_old_images_go_and_those_in_use_stay(site: Whole) -> None:
    from groupwise.server.images import folder_of, prune

    chat(site, asked(png(seed=7)))
    folder = folder_of(site.server.config)
    old = folder / f"{read_picture(png(seed=7)).digest}.png"
    used = {path.name for path in folder.iterdir()}
    assert old.name in used
    os.utime(old, (0, 0))
    chat(site, asked(png(seed=7)))  # used again
    prune(site.server.config, site.server.ledger)
    assert old.exists()
    os.utime(old, (0, 0))
    prune(site.server.config, site.server.ledger)
    assert {path.name for path in folder.iterdir()} == used - {old.name}
