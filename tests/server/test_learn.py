"""Automatic jobs from feedback: which groups ratings make, when a job is made of them, and what becomes of both."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from groupwise.pictures import read_picture
from groupwise.server.learn import rated_groups, scored_completion, temperature_of
from groupwise.store.feedback import Feedback
from groupwise.store.ledger import RolloutRecord
from groupwise.types import PolicyVersion
from seeing_models import drawn, save_seeing
from whole_server import Whole, whole
from wording import wording

QUESTION = "What is {} + {}? Reply with just the number."
LEARN: dict[str, Any] = {"adapter": "helper", "after": 4, "config": {"learning_rate": 1e-3}, "max_tokens": 8}


def likes_short(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [1.0 / (1 + len(completion[0]["content"])) for completion in completions]


def by_second_number(completions: Sequence[Any], prompts: Sequence[Any], **columns: Any) -> list[float]:
    """Of sums with 8: all right; with 9: all wrong; of others the shorter ones are better."""
    texts = [str(prompt) for prompt in prompts]
    return [
        1.0 if "+ 8?" in text else 0.0 if "+ 9?" in text else short
        for text, short in zip(texts, likes_short(completions), strict=True)
    ]


def broken(completions: Sequence[Any], **columns: Any) -> list[float]:
    raise RuntimeError("the judge is away")


# ---- groups of ratings ----


def record(id: str, prompt: int = 1, **fields: Any) -> RolloutRecord:
    given = {"version": "base", "temperature": 1.0, "finish_reason": "stop", "text": id, **fields}
    return RolloutRecord(id=id, prompt_ids=(prompt,), completion_ids=(7, 8), logprobs=(-1.0, -2.0), **given)


def said(seq: int, rollout: str, **fields: Any) -> Feedback:
    return Feedback(seq=seq, id=str(seq), rollout=rollout, version="base", created_at=0.0, **fields)


def grouped(ratings: Sequence[Feedback], *records: RolloutRecord, scored: bool = False) -> Any:
    return rated_groups(ratings, {each.id: each for each in records}, scored=scored)


def test_two_answers_that_were_rated_differently_are_a_group() -> None:
    ratings = [said(1, "a", score=1.0), said(2, "b", score=0.25), said(3, "c", score=1.0)]
    (group,), lost = grouped(ratings, record("a"), record("b"), record("c", prompt=2))
    assert (group.scores, group.seqs, group.complete, lost) == ((1.0, 0.25), (1, 2), True, [])
    groups, _ = grouped(ratings, record("a"), record("b"), record("c", prompt=2), scored=True)
    assert [(each.seqs, each.complete) for each in groups] == [((3,), False), ((1, 2), True)], "the newest first"


def test_a_comparison_is_a_group_and_equal_ratings_are_none() -> None:
    (group,), _ = grouped([said(1, "a", worse="b")], record("a"), record("b"))
    assert dict(zip([each.id for each in group.records], group.scores, strict=True)) == {"a": 1.0, "b": 0.0}
    assert grouped([said(1, "a", score=1.0), said(2, "b", score=1.0)], record("a"), record("b")) == ([], [])


def test_a_correction_asks_for_completions_to_compare_with_it() -> None:
    (group,), _ = grouped([said(1, "a", score=0.0, correction="85")], record("a"))
    assert (group.scores, group.correction, group.complete) == ((0.0,), "85", False)
    (alone,), _ = grouped([said(1, "a", correction="85")], record("a"))
    assert alone.scores == (None,), "the correction scores it, too"


def test_ratings_of_answers_that_are_gone_are_told() -> None:
    ratings = [said(1, "a", score=1.0), said(2, "gone", score=0.0), said(3, "a", worse="gone")]
    groups, lost = grouped(ratings, record("a"), scored=True)
    assert lost == [2, 3] and [each.seqs for each in groups] == [(1,)]


def test_a_job_has_the_temperature_of_most_answers_and_others_go_by_their_tokens() -> None:
    ratings = [said(i, name, score=i / 4) for i, name in enumerate("abc")]
    hot, cool, narrowed = record("a", temperature=0.7), record("b", temperature=0.7), record("c", reshaped=("top_p",))
    groups, _ = grouped(ratings, hot, cool, narrowed)
    assert temperature_of(groups) == 0.7 and temperature_of([]) == 1.0
    assert scored_completion(hot, 1.0, temperature=0.7) == {"rollout_id": "a", "reward": 1.0}
    by_tokens = {"token_ids": [7, 8], "prompt_token_ids": [1], "reward": 1.0}
    assert scored_completion(narrowed, 1.0, temperature=1.0) == by_tokens
    assert scored_completion(hot, 1.0, temperature=1.0) == by_tokens


# ---- a server that learns ----


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Whole]:
    with whole(tmp_path / "state", Path("starter"), learn=LEARN) as server:
        yield server


def step(server: Whole) -> str | None:
    assert server.server.trainer is not None and server.http.portal is not None
    return server.http.portal.call(server.server.trainer.step)


def sampled(server: Whole, a: int, b: int, n: int = 2, temperature: float = 1.0) -> list[str]:
    body = {"prompts": [[{"role": "user", "content": QUESTION.format(a, b)}]], "n": n, "max_tokens": 8, "seed": a}
    answer = server.http.post("/v1/completions/batch", json={**body, "temperature": temperature})
    return [each["rollout_id"] for each in answer.json()["completions"]]


def rate(server: Whole, id: str, **said: Any) -> None:
    answer = server.http.post("/v1/feedback", json={"rollout_id": id, **said})
    assert answer.status_code == 200, answer.text


def rate_pairs(server: Whole, pairs: int, *, first: int = 1) -> None:
    for a in range(first, first + pairs):
        one, two = sampled(server, a, 11)
        rate(server, one, thumb="up")
        rate(server, two, thumb="down")


def shown(server: Whole) -> dict[str, Any]:
    return server.http.get("/v1/learn").json()


def states(server: Whole) -> list[str]:
    return [each["state"] for each in server.http.get("/v1/feedback").json()["feedback"]]


def finish(server: Whole) -> None:
    """What the supervisor does with what the worker published."""
    assert server.http.portal is not None
    server.http.portal.call(server.server.supervisor._finish_owners)


def test_enough_ratings_become_a_version_and_each_is_trained_once(server: Whole) -> None:
    rate_pairs(server, 1)
    assert step(server) is None and "2 of 4 ratings" in shown(server)["reason"]
    rate_pairs(server, 1, first=2)
    job_id = step(server)
    assert job_id is not None and set(states(server)) == {"training"}
    assert step(server) is None and job_id in shown(server)["reason"]
    job = server.train()
    finish(server)
    assert (job.id, job.version, job.config["base_adapter"]) == (job_id, "helper@1", "base")
    assert (job.summary["groups"], job.summary["completions"], job.summary["rollouts"]) == (2, 4, 4)
    assert set(states(server)) == {"trained"} and shown(server)["active"] == "helper@1"
    assert [each["kind"] for each in shown(server)["transitions"]] == ["job_queued"]
    for word in ("one", "two"):
        server.server.feedback.note(word, word)
    history, before = list[Any](), None
    while before is not None or not history:
        query = {"limit": 2} if before is None else {"limit": 2, "before": before}
        page = server.http.get("/v1/learn/transitions", params=query).json()
        history, before = [*history, *page["transitions"]], page["next"]
    assert [each["kind"] for each in history] == ["two", "one", "job_queued"] and history == shown(server)[
        "transitions"
    ]
    rate_pairs(server, 2, first=3)
    assert step(server) is not None
    assert server.server.ledger.jobs()[0].config["base_adapter"] == "helper@1"


def test_ratings_of_answers_about_images_are_trained(tmp_path: Path) -> None:
    """Pairs of ratings, and a correction, for which completions are sampled from the same image."""
    model = save_seeing("smolvlm", tmp_path / "model")
    three: list[dict[str, Any]] = []
    with whole(tmp_path / "state", model, learn=LEARN) as server:
        for seed in range(2):
            drawing = base64.b64encode(read_picture(drawn(40, 30, seed=seed)).data).decode()
            part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{drawing}"}}
            asked = [{"role": "user", "content": [part, {"type": "text", "text": "How many?"}]}]
            body = {"prompts": [asked], "n": 3, "max_tokens": 4, "seed": seed}
            three = server.http.post("/v1/completions/batch", json=body).json()["completions"]
            rate(server, three[0]["rollout_id"], thumb="up")
            rate(server, three[1]["rollout_id"], thumb="down")
            rate(server, three[2]["rollout_id"], correction="7")
        kept = server.http.get(f"/v1/rollouts/{three[0]['rollout_id']}").json()
        assert len(kept["images"]) == 1
        assert step(server) is not None
        job = server.train()
        finish(server)
        assert job.version == "helper@1" and (job.summary["groups"], job.summary["rollouts"]) >= (2, 4)
        assert "waiting" not in states(server) and shown(server)["active"] == "helper@1"


def test_a_job_that_is_cancelled_gives_its_feedback_back(server: Whole) -> None:
    rate_pairs(server, 2)
    first = step(server)
    assert server.http.post(f"/v1/train/cancel/{first}").status_code == 200
    assert set(states(server)) == {"waiting"}
    second = step(server)
    assert second is not None and second != first
    kinds = [each["kind"] for each in shown(server)["transitions"]]
    assert kinds == ["job_queued", "feedback_returned", "job_queued"]


def test_corrections_and_greedy_answers_are_trained_with_completions_of_their_own(server: Whole) -> None:
    for a in range(1, 5):
        (greedy,) = sampled(server, 10 * a + 3, 58, n=1, temperature=0.0)
        rate(server, greedy, score=0.0, correction=str(10 * a + 61))
    assert step(server) is not None
    (job,) = server.server.ledger.jobs()
    assert job.summary["groups"] >= 1 and job.summary["completions"] == 8 * job.summary["groups"]
    assert job.summary["rollouts"] == 7 * job.summary["groups"], "the rated ones go by their tokens"
    assert 0 < job.summary["reward_mean"] < 1
    assert server.train().version == "helper@1"


def test_rewards_score_what_is_sampled_beside_a_rated_answer(tmp_path: Path) -> None:
    learn = {**LEARN, "after": 2, "rewards": [f"{__name__}:likes_short"], "group_size": 4, "scoring": {"workers": 0}}
    with whole(tmp_path / "state", Path("starter"), learn=learn) as server:
        for a in (3, 4):
            rate(server, *sampled(server, a, 2, n=1), thumb="down")
        assert step(server) is not None
        (job,) = server.server.ledger.jobs()
        assert job.summary["completions"] == 8 and job.summary["rollouts"] == 8


SCORED = {**LEARN, "rewards": [f"{__name__}:by_second_number"], "group_size": 4, "scoring": {"workers": 0}}


def rollouts(server: Whole) -> list[str]:
    """The versions that sampled the rollouts that are kept."""
    with server.server.ledger.database.reading("counting") as db:
        return [row["version"] for row in db.execute("SELECT version FROM rollout ORDER BY rowid")]


def test_a_job_waits_for_enough_ratings_that_have_something_to_learn(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn=SCORED) as server:
        for a, b in ((3, 2), (4, 2), (5, 2), (3, 9)):
            rate(server, *sampled(server, a, b, n=1), thumb="down")
        assert step(server) is None and "3 of 4 ratings have something to learn" in shown(server)["reason"]
        assert [each["kind"] for each in shown(server)["transitions"]] == ["nothing_to_learn"]
        assert len(rollouts(server)) == 16 and set(states(server)) == {"waiting"}
        assert step(server) is None and len(rollouts(server)) == 16, "nothing is sampled twice"
        rate(server, *sampled(server, 6, 2, n=1), thumb="down")
        assert step(server) is not None and len(rollouts(server)) == 20, "only the new group was completed"
        (job,) = server.server.ledger.jobs()
        assert (job.summary["ratings"], job.summary["groups"], job.summary["completions"]) == (4, 4, 16)
        assert sorted(states(server)) == ["training"] * 4 + ["waiting"]


def test_a_group_that_scored_alike_makes_way_for_one_that_waits(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn={**SCORED, "max_groups": 4}) as server:
        for a, b in ((3, 2), (4, 2), (5, 2), (6, 2), (3, 9)):
            rate(server, *sampled(server, a, b, n=1), thumb="down")
        assert step(server) is not None
        assert [each["kind"] for each in shown(server)["transitions"]] == ["job_queued"]
        assert shown(server)["transitions"][0]["data"]["alike"] == 1
        assert sorted(states(server)) == ["training"] * 4 + ["waiting"]


def test_a_group_that_scored_alike_is_tried_with_later_versions_and_then_dropped(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn={**SCORED, "after": 2}) as server:
        rate_pairs(server, 1)
        assert step(server) is not None
        server.train()
        finish(server)
        for a in (3, 4):
            rate(server, *sampled(server, a, 9, n=1), thumb="down")
        for kept, activated in (("waiting", "rollback"), ("waiting", "helper/activate"), ("dropped", None)):
            before = len(rollouts(server))
            assert step(server) is None and step(server) is None
            assert set(rollouts(server)[before:]) == {shown(server)["active"]} and len(rollouts(server)) == before + 6
            assert states(server) == [kept, kept, "trained", "trained"]
            if activated is not None:
                assert server.http.post(f"/v1/adapters/{activated}", json={}).status_code == 200
        assert step(server) is None and shown(server)["ratings"] == 0


def test_a_group_in_which_everything_is_right_is_spent_at_once(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn={**SCORED, "after": 2}) as server:
        for a in (3, 4):
            rate(server, *sampled(server, a, 8, n=1), thumb="up")
        assert step(server) is None and set(states(server)) == {"dropped"}


def test_a_reward_that_fails_loses_no_feedback(tmp_path: Path) -> None:
    learn = {**LEARN, "after": 2, "rewards": [f"{__name__}:broken"], "scoring": {"workers": 0}}
    with whole(tmp_path / "state", Path("starter"), learn=learn) as server:
        for a in (3, 4):
            rate(server, *sampled(server, a, 2, n=1), thumb="down")
        assert server.server.trainer is not None and server.http.portal is not None
        assert server.http.portal.call(server.server.trainer.attempt) is None
        assert "the judge is away" in shown(server)["reason"]
        assert set(states(server)) == {"waiting"} and server.server.ledger.jobs() == []


def test_of_a_backlog_the_newest_ratings_are_trained_first(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn={**LEARN, "max_groups": 2}) as server:
        rate_pairs(server, 4)
        assert step(server) is not None
        assert states(server) == ["training"] * 4 + ["waiting"] * 4, "newest first, as they are listed"


def test_who_rates_much_has_a_share_of_a_job_and_the_rest_waits(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn={**LEARN, "max_share": 0.5}) as server:

        def rated(user: str, a: int) -> None:
            for id, thumb in zip(sampled(server, a, 11), ("up", "down"), strict=True):
                rate(server, id, thumb=thumb, user=user)

        for a in range(1, 5):
            rated("flood", a)
        assert step(server) is None and "3 groups wait" in shown(server)["reason"]
        rated("ann", 5)
        rated("bob", 6)
        assert step(server) is not None
        rows = server.http.get("/v1/feedback").json()["feedback"]
        taken = [row["user"] for row in rows if row["state"] == "training"]
        assert sorted(taken) == ["ann"] * 2 + ["bob"] * 2 + ["flood"] * 4
        assert [row["state"] for row in rows].count("waiting") == 4


def test_ratings_of_versions_long_replaced_are_dropped(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn={**LEARN, "max_behind": 1}) as server:
        rate_pairs(server, 2)
        assert step(server) is not None
        server.train()
        finish(server)  # helper@1 is live
        rate_pairs(server, 1, first=3)
        first = PolicyVersion("helper", 1)
        for number in (2, 3):
            assert step(server) is None and states(server) == ["waiting"] * 2 + ["trained"] * 4
            server.publish(server.server.store.path(first), "helper", parent=PolicyVersion("helper", number - 1))
            assert server.http.post("/v1/adapters/helper/activate", json={"version": number}).status_code == 200
        rate_pairs(server, 1, first=5)
        assert step(server) is None
        assert states(server) == ["waiting"] * 2 + ["dropped"] * 2 + ["trained"] * 4
        told = shown(server)["transitions"][0]
        assert told["kind"] == "ratings_outdated" and told["data"] == {"ratings": 2, "versions": ["helper@1"]}


def test_jobs_are_limited_by_the_hour(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn={**LEARN, "max_jobs_per_hour": 1}) as server:
        rate_pairs(server, 2)
        assert step(server) is not None
        server.train()
        finish(server)
        rate_pairs(server, 2, first=3)
        assert step(server) is None and "max_jobs_per_hour" in shown(server)["reason"]


def test_a_pause_outlives_the_server(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), learn=LEARN) as server:
        rate_pairs(server, 2)
        assert server.http.post("/v1/learn/pause").json()["paused"] is True
        assert step(server) is None and shown(server)["reason"] == "paused"
    with whole(tmp_path / "state", Path("starter"), learn=LEARN) as server:
        assert step(server) is None and shown(server)["paused"] is True
        assert server.http.post("/v1/learn/resume").json()["paused"] is False
        assert step(server) is not None
        kinds = [each["kind"] for each in shown(server)["transitions"]]
        assert kinds == ["job_queued", "resumed", "paused"]


def test_a_server_without_learn_says_so(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter")) as server:
        assert shown(server)["enabled"] is False and "`learn`" in shown(server)["reason"]
        answer = server.http.post("/v1/learn/pause")
        assert answer.status_code == 400
        wording(answer.json()["error"])
