"""/v1/feedback over real sockets: what is taken, what is refused, what is kept over a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from groupwise import AsyncClient, Client
from groupwise.errors import RemoteError
from groupwise.server import chat, completions, dialects, feedback, messages, rollout_log, rollouts
from groupwise.server.feedback import AnswerLog
from groupwise.store.feedback import FeedbackLog
from groupwise.store.ledger import Ledger
from serving import Served, served
from wording import raises

assert dialects  # the routes below answer through it
ROUTERS = [chat.router, completions.router, messages.router, rollouts.router, rollout_log.router, feedback.router]
SUM = [{"role": "user", "content": "What is 47 + 38? Reply with just the number."}]


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state"), ROUTERS) as server:
        yield server


@pytest.fixture
def client(api: Served) -> Iterator[Client]:
    with Client(api.url) as client:
        yield client


def chat(api: Served, **options: Any) -> dict[str, Any]:
    body = {"messages": SUM, "max_tokens": 8, **options}
    return httpx2.post(f"{api.url}/v1/chat/completions", json=body, timeout=60).json()


def refused(api: Served, body: dict[str, Any], *, status: int = 400) -> dict[str, Any]:
    answer = httpx2.post(f"{api.url}/v1/feedback", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_a_chat_can_be_rated_by_its_id(api: Served, client: Client) -> None:
    answer = chat(api)
    kept = client.feedback(answer["id"], thumb="down", correction="85", user="ann", comment="off by one")
    assert (kept.rollout_id, kept.version, kept.score, kept.correction) == (answer["id"], "base", 0.0, "85")
    assert (kept.user, kept.comment, kept.state, kept.job_id) == ("ann", "off by one", "waiting", None)
    page = client.list_feedback(rollout_id=answer["id"])
    assert page.feedback == [kept] and page.next is None and page.counts["waiting"] >= 1


def test_every_choice_and_every_route_that_answers_can_be_rated(api: Served, client: Client) -> None:
    two = chat(api, n=2, seed=3)
    first, second = client.feedback(two["id"], score=0.25), client.feedback(f"{two['id']}-1", score=0.75)
    assert {first.score, second.score} == {0.25, 0.75}
    texts = {r.id: r.text for r in api.server.ledger.rollouts([first.rollout_id, second.rollout_id]).values()}
    assert [texts[two["id"]], texts[f"{two['id']}-1"]] == [
        f"<think>\n{c['message']['reasoning_content']}" for c in two["choices"]
    ]
    raw = httpx2.post(f"{api.url}/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3}, timeout=60).json()
    assert client.feedback(f"{raw['id']}-1", thumb="up").score == 1.0
    said = {"model": "starter", "messages": SUM, "max_tokens": 8}
    anthropic = httpx2.post(f"{api.url}/v1/messages", json=said, timeout=60).json()
    assert client.feedback(anthropic["id"], thumb="up").score == 1.0
    (group,) = client.sample([SUM], n=2, max_tokens=8)
    better, worse = (completion.rollout_id for completion in group.completions)
    assert client.feedback(better, better_than=worse).better_than == worse


def test_a_streamed_chat_can_be_rated(api: Served, client: Client) -> None:
    body = {"messages": SUM, "stream": True}
    with httpx2.stream("POST", f"{api.url}/v1/chat/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    id = lines[0].split('"id":"')[1].split('"')[0]
    assert client.feedback(id, thumb="up").rollout_id == id


def test_the_same_key_is_the_same_feedback_and_another_body_is_a_conflict(api: Served, client: Client) -> None:
    id = chat(api)["id"]
    once = client.feedback(id, score=0.5, idempotency_key="k-1")
    assert client.feedback(id, score=0.5, idempotency_key="k-1") == once
    with raises(RemoteError) as error:
        client.feedback(id, score=0.6, idempotency_key="k-1")
    assert (error.value.status, error.value.code) == (409, "idempotency_conflict")
    assert len(client.list_feedback(rollout_id=id).feedback) == 1


def test_the_asyncio_client_says_the_same(api: Served) -> None:
    async def rate() -> None:
        async with AsyncClient(api.url) as client:
            kept = await client.feedback(chat(api)["id"], thumb="up")
            assert (await client.list_feedback(limit=1)).feedback == [kept]

    asyncio.run(rate())


def test_pages_go_back_in_time(api: Served, client: Client) -> None:
    id = chat(api)["id"]
    ids = [client.feedback(id, score=i / 4).id for i in range(5)]
    first = client.list_feedback(rollout_id=id, limit=3)
    second = client.list_feedback(rollout_id=id, limit=3, before=first.next)
    assert [each.id for each in (*first.feedback, *second.feedback)] == ids[::-1] and second.next is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "score"),
        ({"score": 0.5, "thumb": "up"}, "thumb"),
        ({"score": 1.5}, "score"),
        ({"score": True}, "score"),
        ({"thumb": "sideways"}, "thumb"),
        ({"correction": ""}, "correction"),
        ({"rating": 1}, "rating"),
    ],
)
def test_what_says_nothing_or_is_not_valid_is_refused_by_its_field(api: Served, body: dict, field: str) -> None:
    error = refused(api, {"rollout_id": chat(api)["id"], **body})
    assert error["param"] == field, error


def test_what_is_not_known_here_is_404_and_another_prompts_answer_is_400(api: Served) -> None:
    id = chat(api)["id"]
    assert refused(api, {"rollout_id": "chatcmpl-x", "thumb": "up"}, status=404)["param"] == "rollout_id"
    error = refused(api, {"rollout_id": id, "better_than": "chatcmpl-x"}, status=404)
    assert (error["param"], error["code"]) == ("better_than", "rollout_not_found")
    other = chat(api, messages=[{"role": "user", "content": "What is 3 * 4?"}])["id"]
    assert "another prompt" in refused(api, {"rollout_id": id, "better_than": other})["message"]
    assert refused(api, {"rollout_id": id, "better_than": id})["param"] == "better_than"


def test_feedback_comes_after_a_restart_from_another_process_too(tmp_path: Path) -> None:
    with served(tmp_path, ROUTERS) as first:
        id = chat(first)["id"]
        first.server.answers.close()
    with served(tmp_path, ROUTERS) as again, Client(again.url) as client:
        kept = client.feedback(id, thumb="up", idempotency_key="later")
    ledger = Ledger(tmp_path / "ledger.db")
    try:
        (found,) = FeedbackLog(ledger).list()
        assert (found.id, found.rollout, found.score) == (kept.id, id, 1.0)
    finally:
        ledger.close()


def test_without_keep_answers_only_batches_can_be_rated(tmp_path: Path) -> None:
    with served(tmp_path, ROUTERS, keep_answers=False) as api, Client(api.url) as client:
        assert refused(api, {"rollout_id": chat(api)["id"], "thumb": "up"}, status=404)["code"] == "rollout_not_found"
        (group,) = client.sample([SUM], n=1, max_tokens=4)
        assert client.feedback(group.completions[0].rollout_id, thumb="up").score == 1.0


def test_who_rates_waits_for_what_was_answered_by_then_and_not_for_more() -> None:
    """Under load there is always another answer to be kept."""

    class Busy:
        def save_rollouts(self, records: list[Any]) -> None:
            for _ in range(2):
                if not ended.is_set():
                    book.keep([record])  # it comes while these are written
                    written.append(record)

    record, ended, written = cast(Any, object()), threading.Event(), list[Any]()
    book = AnswerLog(cast(Any, Busy()))
    book.keep([record])
    waits = threading.Thread(target=lambda: book.flush(timeout_s=3600), daemon=True)
    waits.start()
    waits.join(timeout=20)
    is_over = not waits.is_alive()
    ended.set()
    book.close()
    assert is_over and written


def test_a_disk_that_fails_costs_no_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.errors import StorageFullError

    with served(tmp_path, ROUTERS) as api:

        def full(records: Any) -> None:
            raise StorageFullError("the disk is full")

        monkeypatch.setattr(api.server.ledger, "save_rollouts", full)
        answer = chat(api)
        assert answer["choices"]
        api.server.answers.flush()
        assert refused(api, {"rollout_id": answer["id"], "thumb": "up"}, status=404)
