"""The routes that trainers call of vLLM servers, with the bodies that their clients send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.bridges.trl import routes as trainer_routes
from groupwise.model.chat import encode_prompt
from groupwise.server import chat, completions
from groupwise.types import PolicyVersion, Prompt
from serving import Served, served, starter

QUESTION = [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}]
TRL = {  # what its client (1.8) sends besides prompts or messages
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 8,
    "logprobs": 0,
    "structured_outputs_regex": None,
    "generation_kwargs": {},
}
Post = Callable[..., Any]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "state", [trainer_routes.router, chat.router, completions.router]) as server:
        yield server


@pytest.fixture
def post(site: Served) -> Iterator[Post]:
    with httpx2.Client(base_url=site.url, timeout=60) as client:

        def send(path: str, status: int = 200, **body: Any) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        yield send


def question_ids() -> tuple[int, ...]:
    return encode_prompt(Prompt(id="", messages=tuple(QUESTION)), starter().tokenizer).token_ids


def test_generated_tokens_and_their_log_probabilities(site: Served, post: Post) -> None:
    ids = question_ids()
    answer = post("/generate/", prompts=[list(ids), list(ids[:5])], images=None, **TRL)
    assert answer["prompt_ids"] == [list(ids), list(ids[:5])]
    assert len(answer["completion_ids"]) == len(answer["logprobs"]) == 4
    for row, tokens in enumerate(answer["completion_ids"]):
        prompt = ids if row < 2 else ids[:5]
        assert [[token] for token in tokens] == answer["logprob_token_ids"][row]
        scored = site.engine.score(prompt, tokens, PolicyVersion.base())
        assert [value for (value,) in answer["logprobs"][row]] == pytest.approx(scored, abs=1e-4)


def test_conversations_go_through_the_template_and_texts_do_not(post: Post) -> None:
    greedy = TRL | {"n": 1, "temperature": 0.0, "max_tokens": 32}
    text = starter().tokenizer.decode(question_ids())
    said = post("/chat/", messages=[QUESTION], tools=None, chat_template_kwargs={}, **greedy)
    written = post("/generate/", prompts=[text], **greedy)
    assert said == written and said["prompt_ids"] == [list(question_ids())]


def test_alternatives_come_likeliest_first_with_the_sampled_token_among_them(post: Post) -> None:
    body = TRL | {"logprobs": 3, "n": 4, "temperature": 2.0}
    answer = post("/generate/", prompts=[list(question_ids())], **body)
    for tokens, ids, values in zip(
        *(answer[k] for k in ("completion_ids", "logprob_token_ids", "logprobs")), strict=True
    ):
        for token, alternatives, each in zip(tokens, ids, values, strict=True):
            assert token in alternatives and len(alternatives) in (3, 4)
            assert each == sorted(each, reverse=True)
    without = post("/generate/", prompts=[list(question_ids())], **TRL | {"logprobs": None})
    assert without["logprobs"] is None and without["logprob_token_ids"] is None


def test_generation_kwargs_win_and_what_is_not_here_is_refused_by_name(post: Post) -> None:
    prompts = [list(question_ids())]
    twice = [
        post("/generate/", prompts=prompts, **TRL | {"generation_kwargs": {"seed": 5, "max_tokens": 3, "n": 3}})
        for _ in range(2)
    ]
    assert twice[0] == twice[1] and [len(ids) <= 3 for ids in twice[0]["completion_ids"]] == [True] * 3
    for wrong in (
        {"structured_outputs_regex": "("},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"frequency_penalty": 0.5}},
        {"generation_kwargs": {"use_beam_search": True}},
        {"images": [["aGVsbG8="]]},
    ):
        error = post("/generate/", 400, prompts=prompts, **TRL | wrong)["error"]
        name = next(iter(wrong.get("generation_kwargs", wrong)))
        assert name in error["message"]
    error = post("/generate/", 400, prompts=prompts * 600, **TRL)["error"]
    assert error["code"] == "batch_too_large"


def test_an_adapter_that_is_set_answers_and_the_one_before_it_goes(site: Served, post: Post, make_adapter) -> None:
    first, second = (make_adapter(starter(), seed=seed) for seed in (1, 2))
    ids = list(question_ids())
    greedy = TRL | {"n": 1, "temperature": 0.0}
    before = post("/generate/", prompts=[ids], **greedy)
    for number, directory in enumerate((first, second), 1):
        body = {"lora_name": "active_lora", "lora_int_id": number, "lora_path": str(directory)}
        assert post("/set_lora_adapter/", **body)["status"] == "ok"
        assert site.server.store.versions("active_lora") == (PolicyVersion("active_lora", number),)
        sampled = post("/generate/", prompts=[ids], **TRL)
        token, value = sampled["completion_ids"][0], sampled["logprobs"][0]
        scored = site.engine.score(tuple(ids), token, PolicyVersion("active_lora", number))
        assert [each for (each,) in value] == pytest.approx(scored, abs=1e-4)
    post("/clear_lora_adapter/")
    assert site.server.policies.active == PolicyVersion.base()
    assert post("/generate/", prompts=[ids], **greedy) == before
    assert post("/reset_prefix_cache/")["success"] is True


def test_a_bad_adapter_changes_nothing(site: Served, post: Post, make_adapter, tmp_path: Path) -> None:
    good = make_adapter(starter(), seed=1)
    post("/set_lora_adapter/", lora_name="mine", lora_int_id=1, lora_path=str(good))
    for wrong in (tmp_path / "missing", tmp_path):
        error = post("/set_lora_adapter/", 400, lora_name="mine", lora_int_id=2, lora_path=str(wrong))["error"]
        assert str(wrong) in error["message"] or "adapter_config" in error["message"]
    assert site.server.policies.active == PolicyVersion("mine", 1)
    assert site.server.store.versions("mine") == (PolicyVersion("mine", 1),)


def test_adapters_under_names_of_their_own(site: Served, post: Post, make_adapter) -> None:
    """vLLM's routes: the name of a hub's model is one, too."""
    body = {"lora_name": "Org/some model", "lora_path": str(make_adapter(starter(), seed=1))}
    assert "Org-some-model" in post("/v1/load_lora_adapter", **body)["message"]
    assert site.server.policies.active == PolicyVersion.base()
    answer = post("/v1/chat/completions", model="Org-some-model", messages=QUESTION, max_tokens=4)
    assert answer["model"] == "Org-some-model"
    post("/v1/load_lora_adapter", 409, **body)
    post("/v1/load_lora_adapter", **body, load_inplace=True)
    assert site.server.policies.active == PolicyVersion("Org-some-model", 2)
    post("/clear_lora_adapter/")
    post("/v1/unload_lora_adapter", lora_name="Org/some model")
    assert not site.server.store.versions("Org-some-model")
    post("/v1/unload_lora_adapter", 404, lora_name="Org/some model")


def test_weights_are_refused_with_what_to_do_instead(site: Served, post: Post) -> None:
    for path in ("/init_communicator/", "/update_named_param/", "/batch_update_named_params/", "/http_update_weights/"):
        assert "set_lora_adapter" in post(path, 400, params=[])["error"]["hint"]
    with httpx2.Client(base_url=site.url, timeout=120) as client:
        assert client.get("/health/").json()["status"] == "ok"
        assert client.get("/get_world_size/").json() == {"world_size": 1}
