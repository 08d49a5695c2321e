"""GET /v1/rollouts: what was sampled and what jobs were posted, in pages, by filter, and group by group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.algo.advantage import advantages, gdpo_advantages
from groupwise.config.algo import AdvantageConfig
from groupwise.server import rollout_log
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


def test_text_is_searched_in_prompts_and_completions_whatever_its_case(
    site: Whole, sampled: list[dict[str, Any]]
) -> None:
    assert [row["id"] for row in listed(site, contains="hELLo?")["rows"]] == [
        each["rollout_id"] for each in reversed(sampled[:3])
    ]
    said = next(each["text"] for each in sampled if each["text"].swapcase() != each["text"])
    assert said in [row["text"] for row in listed(site, contains=said.swapcase())["rows"]]
    assert listed(site, contains="100%_of nothing")["rows"] == []


def test_a_search_looks_at_so_many_rows_and_goes_on_behind_them(
    site: Whole, sampled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_log, "SCAN_ROWS", 2)
    for sort in ("newest", "oldest", "longest"):
        found, pages, after = list[str](), 0, {}
        while True:
            page = listed(site, contains="hello?", sort=sort, **after)
            found, pages = found + [row["id"] for row in page["rows"]], pages + 1
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert sorted(found) == sorted(each["rollout_id"] for each in sampled[:3]) and pages > 2


def test_rollouts_are_sorted_by_time_and_length(site: Whole, sampled: list[dict[str, Any]]) -> None:
    ids = [each["rollout_id"] for each in sampled]
    assert [row["id"] for row in listed(site, sort="oldest")["rows"]] == ids
    first = listed(site, sort="longest", limit=4)
    rows = first["rows"] + listed(site, sort="longest", limit=4, after=first["next"])["rows"]
    lengths = [row["completion_tokens"] for row in rows]
    assert lengths == sorted(lengths, reverse=True) and sorted(row["id"] for row in rows) == sorted(ids)


def test_only_what_came_later_is_told_to_one_who_follows(site: Whole, sampled: list[dict[str, Any]]) -> None:
    newest = listed(site)["newest"]
    assert listed(site, since=newest)["rows"] == []
    body = {"prompts": [[HELLO]], "n": 1, "max_tokens": 2, "seed": 5}
    one = site.http.post("/v1/completions/batch", json=body).json()["completions"][0]["rollout_id"]
    page = listed(site, since=newest)
    assert [row["id"] for row in page["rows"]] == [one] and page["newest"] > newest
    assert listed(site, like=one)["rows"][0]["id"] == one
    alike = [row["id"] for row in listed(site, like=sampled[0]["rollout_id"])["rows"]]
    assert alike == [one, *(each["rollout_id"] for each in reversed(sampled[:3]))]
    with site.server.ledger._db.transaction("removing it again") as db:
        db.execute("DELETE FROM main.rollout WHERE id = ?", (one,))


def test_facets_count_what_can_be_filtered_by(site: Whole, sampled: list[dict[str, Any]]) -> None:
    found = site.http.get("/v1/rollouts/facets").json()
    assert found["counted"] == 6 and found["versions"] == [{"value": "base", "count": 6}]
    ends = {each["value"]: each["count"] for each in found["finish_reasons"]}
    assert ends == {reason: sum(each["finish_reason"] == reason for each in sampled) for reason in ends}


def test_a_jobs_completions_are_sorted_by_reward(site: Whole, job: str) -> None:
    rewards = [row["reward"] for row in listed(site, job=job, sort="best")["rows"]]
    assert rewards == [3.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.0]
    pages = [listed(site, job=job, sort="worst", limit=4), listed(site, job=job, sort="worst", limit=4, after=4)]
    assert [row["reward"] for page in pages for row in page["rows"]] == rewards[::-1]
    assert len(listed(site, job=job, like=f"{job}.1.2")["rows"]) == 3


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"job": "", "version": "base"}, "version"),
        ({"job": "", "finish_reason": "stop"}, "finish_reason"),
        ({"since": 1, "sort": "longest"}, "since"),
    ],
)
def test_a_filter_that_would_not_act_is_refused(site: Whole, job: str, query: dict[str, Any], field: str) -> None:
    answer = site.http.get("/v1/rollouts", params={**query, **({"job": job} if "job" in query else {})})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field and answer.json()["error"]["hint"]


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


@pytest.mark.slow
def test_a_page_of_a_hundred_thousand_costs_what_a_page_costs(site: Whole) -> None:
    record = {"prompt_ids": (1, 2), "completion_ids": (3,), "logprobs": (-1.0,), "version": "many@1"}
    rest = {"temperature": 1.0, "finish_reason": "stop", "text": "x"}
    site.server.ledger.save_rollouts([RolloutRecord(id=f"many-{i}", **record, **rest) for i in range(MANY)])
    seen = [row["id"] for row in listed(site, version="many@1", limit=2000)["rows"]]
    assert seen[0] == f"many-{MANY - 1}" and len(seen) == 2000


def test_the_reward_that_a_job_was_posted_for_a_rollout_stands_with_it(
    site: Whole, sampled: list[dict[str, Any]]
) -> None:
    """Of the first prompt's three completions two are posted, then one of them again with another reward."""
    first, second, third = (each["rollout_id"] for each in sampled[:3])
    jobs = []
    for rewards in ({first: 0.25, second: 1.0}, {second: 0.75, third: 0.0}):
        group = [{"rollout_id": id, "reward": reward} for id, reward in rewards.items()]
        made = site.http.post("/v1/train/grpo", json={"groups": [{"completions": group}]})
        assert made.status_code == 200, made.text
        jobs.append(made.json()["job_id"])
    stand = {row["id"]: (row["reward"], row["job"]) for row in listed(site)["rows"]}
    assert stand == {each["rollout_id"]: (None, None) for each in sampled} | {
        first: (0.25, jobs[0]),
        second: (0.75, jobs[1]),
        third: (0.0, jobs[1]),
    }
    assert [row["id"] for row in listed(site, sort="best")["rows"][:3]] == [second, first, third]
    assert [row["id"] for row in listed(site, sort="worst")["rows"][:3]] == [third, first, second]
    assert [row["id"] for row in listed(site, reward_min=0.25, reward_max=0.5)["rows"]] == [first]
    group = site.http.get(f"/v1/rollouts/{first}").json()["rollouts"]
    assert [each["id"] for each in group] == [second, first, third]
    assert [row["reward"] for row in listed(site, job=jobs[0])["rows"]] == [0.25, 1.0]
