"""GET /v1/rollouts: what was sampled and what jobs were posted, in pages, by filter, and group by group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.algo.advantage import advantages, gdpo_advantages
from groupwise.config.run import AdvantageConfig
from groupwise.store.job_payload import EncodedCompletion, EncodedGroup, GrpoPayload, dump_payload
from groupwise.store.ledger import RolloutRecord
from whole_server import Whole, whole

HELLO = {"role": "user", "content": "Hello?"}
MANY = 100_000


@pytest.fixture(scope="module")
def site(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with whole(tmp_path_factory.mktemp("state"), model_dir) as site:
        yield site


@pytest.fixture(scope="module")
def sampled(site: Whole) -> list[dict[str, Any]]:
    body = {"prompts": [[HELLO], [{"role": "user", "content": "Well?"}]], "n": 3, "max_tokens": 5, "seed": 1}
    body |= {"logprobs": True, "return_token_ids": True}
    return site.http.post("/v1/completions/batch", json=body).json()["completions"]


@pytest.fixture(scope="module")
def job(site: Whole) -> str:
    return submitted(site, advantage="mean")


def submitted(site: Whole, **config: Any) -> str:
    def group(prompt: int, rewards: list[float]) -> EncodedGroup:
        done = tuple(EncodedCompletion(ids=(5 + i, 6), logprobs=(-1.0, -0.5), reward=r) for i, r in enumerate(rewards))
        return EncodedGroup(prompt_ids=(prompt, 3), completions=done)

    payload = dump_payload(GrpoPayload(groups=(group(1, [0.0, 1.0]), group(2, [0.5, 0.5, 0.5]), group(3, [2.0, 3.0]))))
    made, _ = site.server.ledger.submit(
        kind="grpo", adapter="x", config=config, summary={}, payload=payload, steps=1, auto_load=True
    )
    return made.id


def listed(site: Whole, **query: Any) -> dict[str, Any]:
    answer = site.http.get("/v1/rollouts", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_was_sampled_is_listed_newest_first(site: Whole, sampled: list[dict[str, Any]]) -> None:
    rows = listed(site)["rows"]
    assert [row["id"] for row in rows] == [each["rollout_id"] for each in reversed(sampled)]
    assert [row["text"] for row in rows] == [each["text"] for each in reversed(sampled)]
    assert len({row["group"] for row in rows}) == 2 and all("Well?" in row["prompt"] for row in rows[:3])
    assert {row["reward"] for row in rows} == {None} and {row["version"] for row in rows} == {"base"}


def test_pages_follow_each_other(site: Whole, sampled: list[dict[str, Any]]) -> None:
    found, after = [], None
    while True:
        page = listed(site, limit=4) if after is None else listed(site, limit=4, after=after)
        found += [row["id"] for row in page["rows"]]
        if (after := page["next"]) is None:
            break
    assert found == [each["rollout_id"] for each in reversed(sampled)]


def test_rollouts_are_found_by_text_end_and_version(site: Whole, sampled: list[dict[str, Any]]) -> None:
    wanted = next(each["text"] for each in sampled if each["text"])
    assert [row["text"] for row in listed(site, contains=wanted)["rows"]] == [
        each["text"] for each in reversed(sampled) if wanted in each["text"]
    ]
    cut = [each["rollout_id"] for each in reversed(sampled) if each["finish_reason"] == "length"]
    assert [row["id"] for row in listed(site, finish_reason="length")["rows"]] == cut
    assert len(listed(site, version="base")["rows"]) == 6 and listed(site, version="other@1")["rows"] == []


def test_a_rollout_brings_its_group_token_by_token(site: Whole, sampled: list[dict[str, Any]]) -> None:
    group = site.http.get(f"/v1/rollouts/{sampled[1]['rollout_id']}").json()
    assert [each["id"] for each in group["rollouts"]] == [each["rollout_id"] for each in sampled[:3]]
    assert group["prompt_token_ids"] == sampled[0]["prompt_token_ids"] and "Hello?" in group["prompt"]
    for shown, said in zip(group["rollouts"], sampled[:3], strict=True):
        assert shown["token_ids"] == said["token_ids"] and shown["logprobs"] == said["logprobs"]
        assert len(shown["tokens"]) == len(said["token_ids"]) and "".join(shown["tokens"]).startswith(said["text"])


def test_what_a_job_was_posted_has_rewards_and_advantages(site: Whole, job: str) -> None:
    rows = listed(site, job=job)["rows"]
    assert [row["reward"] for row in rows] == [0.0, 1.0, 0.5, 0.5, 0.5, 2.0, 3.0]
    assert [row["advantage"] for row in rows] == [-0.5, 0.5, 0.0, 0.0, 0.0, -0.5, 0.5]
    assert rows[-1]["id"] == f"{job}.2.1" and rows[-1]["group"] == f"{job}.2"
    assert listed(site, job=job, limit=3) == {"rows": rows[:3], "next": 3}
    assert listed(site, job=job, after=3) == {"rows": rows[3:], "next": None}
    assert [row["reward"] for row in listed(site, job=job, reward_min=0.6, reward_max=2)["rows"]] == [1.0, 2.0]
    group = site.http.get(f"/v1/rollouts/{job}.2.0").json()
    assert [each["reward"] for each in group["rollouts"]] == [3.0, 2.0]
    assert group["rollouts"][0]["logprobs"] == [-1.0, -0.5]


def test_its_advantages_are_those_that_it_is_trained_with(site: Whole) -> None:
    rewards = [[0.0, 1.0], [0.5, 0.5, 0.5], [2.0, 3.0]]
    gdpo = AdvantageConfig(aggregation="normalize_then_sum")
    for config, expected in (
        ({"advantage_ddof": 0}, advantages(rewards, AdvantageConfig(advantage_ddof=0))),
        ({"advantage": "batch_std"}, advantages(rewards, AdvantageConfig(advantage="batch_std"))),
        (
            {"aggregation": "normalize_then_sum"},
            gdpo_advantages([[{"reward": reward} for reward in group] for group in rewards], gdpo),
        ),
    ):
        rows = listed(site, job=submitted(site, **config))["rows"]
        assert [row["advantage"] for row in rows] == pytest.approx([a for group in expected for a in group])


def test_what_is_not_kept_is_not_found(site: Whole, job: str) -> None:
    codes = {"rollout-none": "rollout_not_found", f"{job}.9.0": "rollout_not_found", "x.0": "job_not_found"}
    for id, code in codes.items():
        answer = site.http.get(f"/v1/rollouts/{id}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == code
    assert site.http.get("/v1/rollouts", params={"job": "x"}).status_code == 404
    assert site.http.get("/v1/rollouts", params={"limit": 0}).status_code == 400


def test_a_supervised_job_has_no_rollouts(site: Whole) -> None:
    sft, _ = site.server.ledger.submit(
        kind="sft", adapter="s", config={}, summary={}, payload=b'{"examples": []}', steps=1, auto_load=True
    )
    answer = site.http.get("/v1/rollouts", params={"job": sft.id})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "job"


def test_a_page_of_a_hundred_thousand_costs_what_a_page_costs(site: Whole) -> None:
    record = {"prompt_ids": (1, 2), "completion_ids": (3,), "logprobs": (-1.0,), "version": "many@1"}
    rest = {"temperature": 1.0, "finish_reason": "stop", "text": "x"}
    site.server.ledger.save_rollouts([RolloutRecord(id=f"many-{i}", **record, **rest) for i in range(MANY)])
    seen = [row["id"] for row in listed(site, version="many@1", limit=2000)["rows"]]
    assert seen[0] == f"many-{MANY - 1}" and len(seen) == 2000
