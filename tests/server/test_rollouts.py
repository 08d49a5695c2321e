"""/v1/completions/batch over real sockets, on the starter: shape, seeds, what is kept for training, and refusals."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.errors import StorageFullError
from groupwise.model.chat import encode_completion, encode_prompt
from groupwise.server import chat, completions, rollouts
from groupwise.tasks.starter.tasks import CALCULATOR, prompts
from groupwise.types import Prompt, SamplingParams, SamplingRequest
from serving import Served, served, starter

SEED_PAGE = {
    "prompts": [
        [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}],
        [{"role": "user", "content": "What is 23 * 17? Reply with just the number."}],
    ],
    "n": 8,
    "temperature": 0.9,
    "max_tokens": 64,
    "seed": 42,
}
THINK = [{"role": "user", "content": "What is 47 + 138? Think step by step."}]


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state"), [rollouts.router, chat.router, completions.router]) as server:
        yield server


def batch(api: Served, body: dict[str, Any], *, status: int = 200) -> Any:
    answer = httpx2.post(f"{api.url}/v1/completions/batch", json=body, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def texts(answer: dict[str, Any]) -> list[str]:
    return [completion["text"] for completion in answer["completions"]]


def test_the_seed_pages_request_has_the_answer_that_it_promises(api: Served) -> None:
    answer = batch(api, SEED_PAGE)
    assert set(answer) == {"id", "object", "created", "model", "completions", "usage"}
    assert answer["id"].startswith("batchcmpl-") and answer["object"] == "batch.completion"
    places = [(one["prompt_index"], one["completion_index"]) for one in answer["completions"]]
    assert places == [(p, j) for p in range(2) for j in range(8)]
    fields = {"prompt_index", "completion_index", "rollout_id", "adapter", "text", "finish_reason", "usage"}
    for one in answer["completions"]:
        assert set(one) - {"reasoning_content"} == fields
        assert set(one["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert one["finish_reason"] in ("stop", "length") and one["adapter"] == "base"
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][key] == sum(one["usage"][key] for one in answer["completions"])
    assert len(set(texts(answer)[:8])) > 1 and len(set(texts(answer)[8:])) > 1


def test_a_batch_is_what_the_engine_samples_and_its_first_prompt_what_a_chat_does(api: Served) -> None:
    ids = encode_prompt(Prompt(id="", messages=tuple(SEED_PAGE["prompts"][0])), starter().tokenizer).token_ids
    params = SamplingParams(temperature=0.9, max_tokens=64, seed=42)
    (group,) = api.engine.generate([SamplingRequest(prompt_ids=ids, n=8, params=params)])
    answer = batch(api, {**SEED_PAGE, "return_token_ids": True, "logprobs": True})
    for one, completion in zip(answer["completions"][:8], group, strict=True):
        assert (one["text"], tuple(one["token_ids"])) == (completion.text, completion.token_ids)
        assert one["logprobs"] == pytest.approx(completion.logprobs, abs=1e-5)
        assert tuple(one["prompt_token_ids"]) == ids
    body = {"messages": SEED_PAGE["prompts"][0], **{key: SEED_PAGE[key] for key in ("n", "temperature", "seed")}}
    said = httpx2.post(f"{api.url}/v1/chat/completions", json=body, timeout=120).json()["choices"]
    for one, choice in zip(answer["completions"], said, strict=False):
        thought, content = choice["message"].get("reasoning_content"), choice["message"]["content"]
        assert one["text"] == (f"<think>\n{thought}\n</think>\n\n{content}" if thought else content)


def test_every_completion_has_a_seed_of_its_own_and_a_batch_repeats(api: Served) -> None:
    same = {**SEED_PAGE, "prompts": [SEED_PAGE["prompts"][0]] * 3, "temperature": 3.0, "max_tokens": 12, "n": 4}
    once, again = batch(api, same), batch(api, same)
    assert len(set(texts(once))) == 12
    assert texts(once) == texts(again) != texts(batch(api, {**same, "seed": 43}))
    ids = [one["rollout_id"] for answer in (once, again) for one in answer["completions"]]
    assert len(set(ids)) == 24
    unseeded = {key: value for key, value in same.items() if key != "seed"}
    assert texts(batch(api, unseeded)) != texts(batch(api, unseeded))


def test_what_was_sampled_is_kept_under_its_id(api: Served) -> None:
    answer = batch(api, {**SEED_PAGE, "return_token_ids": True, "logprobs": True})
    kept = api.server.ledger.rollouts([one["rollout_id"] for one in answer["completions"]])
    assert len(kept) == 16
    for one in answer["completions"]:
        record = kept[one["rollout_id"]]
        assert list(record.completion_ids) == one["token_ids"]
        assert list(record.prompt_ids) == one["prompt_token_ids"]
        assert list(record.logprobs) == pytest.approx(one["logprobs"])
        assert (record.version, record.temperature, record.text) == ("base", 0.9, one["text"])
        assert record.finish_reason == one["finish_reason"] and record.reshaped == ()


def test_what_was_drawn_from_a_part_of_the_vocabulary_is_marked_and_recorded(api: Served) -> None:
    """So that a job can train it under that, and refuse it where it is not recorded."""
    asked = [{}, {"top_p": 0.9}, {"top_k": 4, "min_p": 0.05}, {"top_p": 1, "top_k": -1}]
    answers = [batch(api, {"prompts": [THINK], "n": 1, **options}) for options in asked]
    ids = [answer["completions"][0]["rollout_id"] for answer in answers]
    kept = api.server.ledger.rollouts(ids)
    assert [kept[id].reshaped for id in ids] == [(), ("top_p",), ("top_k", "min_p"), ()]
    assert [kept[id].kept is not None for id in ids] == [False, True, True, False]
    record = kept[ids[2]]
    assert record.kept is not None and all(record.kept.has(record.completion_ids))
    assert record.kept.array().sum(-1).max() <= 4
    assert all(ours >= whole - 1e-6 for ours, whole in zip(record.kept_logprobs, record.logprobs, strict=True))


def test_the_text_alone_is_enough_to_train_on_what_was_sampled(api: Served) -> None:
    """Posted back as text, a completion that ended by itself has the ids that were sampled."""
    answer = batch(api, {"prompts": [THINK], "n": 8, "temperature": 0.5, "seed": 1, "return_token_ids": True})
    prompt = Prompt(id="", messages=tuple(THINK))
    ended = [one for one in answer["completions"] if one["finish_reason"] == "stop"]
    assert len(ended) >= 6
    for one in ended:
        assert list(encode_completion(prompt, one["text"], starter().tokenizer)) == one["token_ids"]


def test_the_text_has_the_thought_and_reasoning_content_has_it_again(api: Served) -> None:
    answer = batch(api, {"prompts": [THINK, SEED_PAGE["prompts"][0]], "temperature": 0, "n": 2})
    thought, _, plain, _ = answer["completions"]
    assert thought["text"].startswith("<think>\n7+8=15") and thought["text"].endswith("</think>\n\n185")
    assert thought["text"] == f"<think>\n{thought['reasoning_content']}\n</think>\n\n185"
    assert "reasoning_content" not in plain
    assert texts(answer)[0] == texts(answer)[1], "greedy"


def test_tools_are_offered_to_all_prompts(api: Served) -> None:
    rows = prompts("tool", "test", n=3)
    answer = batch(api, {"prompts": [row["prompt"] for row in rows], "tools": [CALCULATOR], "temperature": 0})
    assert all(text.startswith('<tool_call>\n{"name": "calculator"') for text in texts(answer))


def test_all_groups_enter_the_engine_together_behind_those_who_wait(api: Served, monkeypatch) -> None:
    submitted = []
    submit = api.engine.submit
    monkeypatch.setattr(api.engine, "submit", lambda asked, **kw: submitted.append(list(asked)) or submit(asked, **kw))
    batch(api, {**SEED_PAGE, "n": 2})
    httpx2.post(f"{api.url}/v1/chat/completions", json={"messages": THINK}, timeout=120)
    assert [(len(asked), {one.interactive for one in asked}) for asked in submitted] == [(2, {False}), (1, {True})]
    assert len({one.params.seed for one in submitted[0]}) == 2


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"prompts": ["What is 2 + 2?"]}, "invalid_value", "prompts[0]"),
        ({"prompts": []}, "invalid_value", "prompts"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 65, "prompts": SEED_PAGE["prompts"] * 8}, "batch_too_large", "n"),
        ({"stream": True}, "invalid_value", "stream"),
        ({"max_tokens": 5000}, "context_length_exceeded", None),
        ({"prompts": [THINK, [*THINK, {"role": "system", "content": "late"}]]}, "invalid_messages", "prompts[1]"),
        ({"prompts": [THINK, [{"role": "user"}]]}, "invalid_messages", "prompts[1][0].content"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(api: Served, change: dict, code: str, param: str | None) -> None:
    error = batch(api, {**SEED_PAGE, **change}, status=400)
    assert (error["code"], error["param"]) == (code, param)


def test_unknown_policies_and_a_full_disk_are_told(api: Served, monkeypatch) -> None:
    assert batch(api, {**SEED_PAGE, "adapter": "gone"}, status=404)["code"] == "adapter_not_found"

    def full(records) -> None:
        raise StorageFullError("saving rollouts: no space left on device")

    monkeypatch.setattr(api.server.ledger, "save_rollouts", full)
    assert batch(api, SEED_PAGE, status=507)["code"] == "storage_full"


def test_an_adapter_answers_and_is_named(api: Served, make_adapter) -> None:
    api.publish(make_adapter(starter(), seed=3), "noise")
    answer = batch(api, {**SEED_PAGE, "adapter": "noise"})
    assert {one["adapter"] for one in answer["completions"]} == {"noise@1"}
    (kept,) = api.server.ledger.rollouts([answer["completions"][0]["rollout_id"]]).values()
    assert kept.version == "noise@1"


def test_a_client_that_leaves_stops_the_batch(api: Served) -> None:
    body = json.dumps({**SEED_PAGE, "ignore_eos": True, "max_tokens": 900}).encode()
    connection = socket.create_connection(("127.0.0.1", api.port))
    head = f"POST /v1/completions/batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    assert api.is_busy_within(120)
    connection.close()
    assert api.is_idle_within(5)
    time.sleep(0.05)
    latest = api.server.recorder.recent()[0]
    assert (latest["route"], latest["finish_reason"]) == ("/v1/completions/batch", "client_disconnect")


def test_the_deadline_is_a_504(tmp_path: Path, api: Served) -> None:
    with served(tmp_path, [rollouts.router], engine=api.engine, request_timeout_s=0.2) as slow:
        error = batch(slow, {**SEED_PAGE, "ignore_eos": True, "max_tokens": 900}, status=504)
        assert error["code"] == "deadline_exceeded"
        assert slow.is_idle_within(5)
