"""Raters: who is found to rate otherwise than is known, what becomes of their ratings, and how one is trusted again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.server.raters import dishonest
from groupwise.store.keys import KeyFile
from whole_server import Whole, whole

QUESTION = "What is {} + {}? Reply with just the number."
SUMS = [(a, b) for a in (3, 4, 5, 6) for b in (11, 25, 37)]
OWNER = {"authorization": "Bearer owner-key"}


def short(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Score an answer of an even number of characters with 1, so that greedy answers of both kinds are there."""
    return [float(len(completion[0]["content"]) % 2 == 0) for completion in completions]


# ---- the test ----


def test_honest_raters_are_found_dishonest_as_seldom_as_promised_and_others_soon() -> None:
    """At the bound the error is 1 - confidence at most, however often one looks; 300 raters of each kind."""
    random, bound = np.random.default_rng(0), {"honest": 0.7, "confidence": 0.95}

    def share(agrees: float, known: int) -> float:
        found = [dishonest(list(random.random(known) < agrees), **bound) for _ in range(300)]
        return sum(found) / len(found)

    assert share(0.7, 200) <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5
    assert share(0.85, 200) == 0
    assert share(0.0, 10) == 1 and share(0.5, 200) > 0.9


@pytest.mark.parametrize("agreed", [[], [False] * 3, [True] * 100])
def test_a_few_or_right_ratings_distrust_nobody(agreed: list[bool]) -> None:
    assert not dishonest(agreed, honest=0.7, confidence=0.99)


# ---- a server that judges raters ----


LEARN = {"adapter": "helper", "after": 4, "config": {"learning_rate": 1e-3}, "max_tokens": 8}


def raters_of(folder: Path) -> dict[str, Any]:
    known = folder / "known.jsonl"
    known.write_text("".join(json.dumps({"prompt": QUESTION.format(*each)}) + "\n" for each in SUMS))
    return {"prompts": {"source": str(known)}, "rewards": [f"{__name__}:short"], "scoring": {"workers": 0}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Whole]:
    raters = raters_of(tmp_path)
    with whole(tmp_path / "state", Path("starter"), learn=LEARN, raters=raters, api_key="owner-key") as server:
        yield server


def asked(
    server: Whole, sums: Sequence[tuple[int, int]], *, n: int = 1, temperature: float = 1.0
) -> list[dict[str, Any]]:
    prompts = [[{"role": "user", "content": QUESTION.format(*each)}] for each in sums]
    body = {"prompts": prompts, "n": n, "max_tokens": 8, "temperature": temperature, "seed": 7}
    return server.http.post("/v1/completions/batch", json=body).json()["completions"]


def rate(server: Whole, answer: dict[str, Any], *, headers: dict[str, str] = OWNER, **said: Any) -> None:
    body = {"rollout_id": answer["rollout_id"], **said}
    assert server.http.post("/v1/feedback", json=body, headers=headers).status_code == 200


def is_good(answer: dict[str, Any]) -> bool:
    return len(answer["text"]) % 2 == 0


def look(server: Whole) -> list[Any]:
    assert server.server.raters is not None and server.http.portal is not None
    return server.http.portal.call(server.server.raters.look)


def shown(server: Whole) -> dict[str, Any]:
    return server.http.get("/v1/learn").json()


def rated_by_both(server: Whole, sums: Sequence[tuple[int, int]] = SUMS) -> None:
    for answer in asked(server, sums):
        rate(server, answer, score=float(is_good(answer)), user="ann")
        rate(server, answer, score=float(not is_good(answer)), user="liar")


def test_whoever_contradicts_what_is_known_counts_nowhere(server: Whole) -> None:
    rated_by_both(server)
    assert look(server) == [("", "liar")] and look(server) == []
    liar, ann = shown(server)["raters"]
    assert (liar["user"], liar["known"], liar["agreed"], liar["counts"]) == ("liar", 12, 0, False)
    assert (ann["user"], ann["known"], ann["agreed"], ann["counts"]) == ("ann", 12, 12, True)
    (told,) = shown(server)["transitions"]
    assert (told["kind"], told["data"]["user"], told["data"]["agreed"]) == ("rater_distrusted", "liar", 0)
    assert shown(server)["counts"]["distrusted"] == 12 and shown(server)["counts"]["waiting"] == 12
    for answer in asked(server, [(8, 9)], n=2):  # later ones, of other prompts
        rate(server, answer, thumb="up" if is_good(answer) else "down", user="liar")
    book = server.server.feedback
    assert {each.author for each in book.waiting()} == {"ann"}
    assert len(book.rated("base", after=0)) == 12, "a canary does not hear them"


def test_the_first_word_of_a_prompt_counts_and_comparisons_do(server: Whole) -> None:
    answers, pairs = asked(server, SUMS, n=4, temperature=3.0), 0
    for group in (answers[at : at + 4] for at in range(0, len(answers), 4)):
        good, bad = ([each for each in group if is_good(each) is which] for which in (True, False))
        if good and bad:
            pairs += 1
            rate(server, bad[0], better_than=good[0]["rollout_id"], user="liar")
            rate(server, good[0], score=1.0, user="liar")  # too late
    look(server)
    (liar,) = shown(server)["raters"]
    assert pairs > 2 and (liar["known"], liar["agreed"]) == (pairs, 0)


def test_what_is_heard_outlives_the_server_and_is_heard_once(server: Whole) -> None:
    rated_by_both(server, SUMS[:3])
    assert look(server) == []
    assert server.server.raters is not None
    server.server.raters._newest = -1  # as after a start
    assert look(server) == [] and shown(server)["raters"][0]["known"] == 3
    rated_by_both(server, SUMS[3:])
    assert look(server) == [("", "liar")]


def test_a_rater_is_a_user_of_a_key(server: Whole) -> None:
    secret = KeyFile(server.server.config.state_dir).add("phone", role="sample")
    phone = {"authorization": f"Bearer {secret}"}
    for answer in asked(server, SUMS):
        rate(server, answer, score=float(is_good(answer)), user="ann")
        rate(server, answer, score=float(not is_good(answer)), user="ann", headers=phone)
    assert look(server) == [("phone", "ann")]
    assert [(row["key"], row["counts"]) for row in shown(server)["raters"]] == [("phone", False), (None, True)]


def test_a_rater_is_trusted_again_by_hand(server: Whole) -> None:
    rated_by_both(server)
    look(server)
    trusted = server.http.post("/v1/learn/raters/trust", json={"user": "liar"})
    assert trusted.status_code == 200 and [row["user"] for row in trusted.json()["raters"]] == ["ann"]
    assert trusted.json()["transitions"][0]["kind"] == "rater_trusted"
    assert trusted.json()["counts"]["distrusted"] == 0 and len(server.server.feedback.waiting()) == 24
    again = server.http.post("/v1/learn/raters/trust", json={"user": "liar"})
    assert again.status_code == 400


def test_what_the_gate_judges_by_trains_nothing(tmp_path: Path) -> None:
    """A pair of the gate's own prompt and one of another: only the latter waits."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": QUESTION.format(3, 4), "answer": "7"}) + "\n")
    gate = {"prompts": {"source": str(held_out)}, "rewards": [f"{__name__}:short"], "scoring": {"workers": 0}}
    learn = {"adapter": "helper", "after": 4, "max_tokens": 8}
    with whole(tmp_path / "state", Path("starter"), learn=learn, gate=gate, api_key="owner-key") as server:
        for one, two in zip(*[iter(asked(server, [(3, 4), (5, 6)], n=2))] * 2, strict=True):
            rate(server, one, thumb="up")
            rate(server, two, thumb="down")
        assert server.server.trainer is not None and server.http.portal is not None
        assert server.http.portal.call(server.server.trainer.step) is None
        (told,) = shown(server)["transitions"]
        assert (told["kind"], told["data"]) == ("held_out_rated", {"ratings": 2})
        assert (shown(server)["counts"]["dropped"], shown(server)["counts"]["waiting"]) == (2, 2)


def test_without_raters_everybody_counts(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter")) as server:
        assert shown(server)["raters"] == []
        answer = server.http.post("/v1/learn/raters/trust", json={"user": "ann"})
        assert answer.status_code == 400


def test_those_who_are_not_proven_are_one_rater_to_a_job(tmp_path: Path) -> None:
    """Four new names have no more than half of a job together, as one of them would."""
    learn, raters = {**LEARN, "max_share": 0.5, "proven": 2}, raters_of(tmp_path)
    with whole(tmp_path / "state", Path("starter"), learn=learn, raters=raters, api_key="owner-key") as server:
        assert server.server.trainer is not None and server.http.portal is not None
        attempt = server.server.trainer.attempt

        def rated(user: str, number: int) -> None:
            for answer, thumb in zip(asked(server, [(number, 12)], n=2), ("up", "down"), strict=True):
                rate(server, answer, thumb=thumb, user=user)

        for number in range(20, 24):
            rated(f"new {number}", number)
        assert server.http.portal.call(attempt) is None and "3 groups wait" in shown(server)["reason"]
        for user, known in (("ann", SUMS[:2]), ("bob", SUMS[:2]), ("liar", SUMS[:2]), ("once", SUMS[:1])):
            for answer in asked(server, known):
                rate(server, answer, thumb="up" if is_good(answer) != (user == "liar") else "down", user=user)
        look(server)
        for number, user in enumerate(("ann", "bob", "liar", "once"), start=30):
            rated(user, number)
        assert server.http.portal.call(attempt) is not None
        rows = server.http.get("/v1/feedback", params={"limit": 100}).json()["feedback"]
        taken = [row["user"] for row in rows if row["state"] == "training"]
        assert taken.count("ann") == taken.count("bob") == 2 and len(taken) == 8
