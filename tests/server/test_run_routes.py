"""The routes of `groupwise ui`: runs, their metrics as they come, configurations, findings and completions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from groupwise.config.serve import ServeConfig
from groupwise.server.run_app import build_run_app
from groupwise.server.run_files import RunFiles, open_runs
from groupwise.server.run_rollouts import PLACES
from groupwise.types import Rollout
from run_place import ASKED, END, TOKENIZER, group, make_run, scored, turn, write_line
from serving import running
from wording import wording

STEPS = {
    step: [
        group(scored("4", 1.0, parts={"exact": 1.0, "brief": 0.25}, version=step), scored("five", 0.0, version=step)),
        group(scored("2+2=4", None, parts={"exact": None, "brief": 0.5}), scored("no", 0.5, cut=True), id="p:2"),
    ]
    for step in (1, 2, 3)
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    make_run(place / "s0", rollouts=STEPS, seed=0)
    make_run(place / "s1", seed=1)
    make_run(place / "empty", steps=0)
    sick = {"reward/frac_zero_std": 1.0, "reward/mean": 0.5}
    make_run(place / "sick", steps=12, planned=12, metrics=sick, train={"steps": 12, "learning_rate": 1e-3})
    (place / "s0" / "adapters" / "toy" / "v000003").mkdir(parents=True)
    return place


@pytest.fixture(scope="module")
def http(place: Path) -> TestClient:
    runs = open_runs([place / name for name in ("s0", "s1", "empty", "sick")])
    return TestClient(build_run_app(runs, ServeConfig()), base_url="http://127.0.0.1:8421")


def get(http: TestClient, path: str, **query: Any) -> Any:
    answer = http.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- runs ----
def test_runs_are_listed_as_they_were_named(http: TestClient) -> None:
    runs = get(http, "/v1/runs")["runs"]
    assert [run["run"] for run in runs] == ["s0", "s1", "empty", "sick"]
    assert (runs[0]["state"], runs[0]["step"], runs[0]["steps"], runs[0]["reward"]) == ("finished", 3, 3, 0.3)
    assert (runs[2]["step"], runs[2]["reward"], runs[2]["started"]) == (0, None, None)


def test_a_run_has_its_configuration_and_its_versions(http: TestClient) -> None:
    run = get(http, "/v1/runs/s0")
    assert run["config"]["train.steps"] == 3 and run["versions"] == ["toy@3"] and run["notes"] == []
    missing = http.get("/v1/runs/none")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "run_not_found"


def test_configurations_are_compared(http: TestClient) -> None:
    diff = get(http, "/v1/diff", run=["s0", "s1", "s0"])
    assert diff["differs"] == ["seed"] and {id: each["seed"] for id, each in diff["configs"].items()} == {
        "s0": 0,
        "s1": 1,
    }
    assert "train.learning_rate" in get(http, "/v1/diff", run=["s0", "sick"])["differs"]
    assert http.get("/v1/diff").status_code == 400


def test_findings_come_with_overrides_of_the_run(http: TestClient) -> None:
    health = get(http, "/v1/runs/sick/health")
    (finding,) = [each for each in health["findings"] if each["id"] == "group.zero_std"]
    assert health["status"] == "error" and any("rollout.group_size=16" in each for each in finding["remedies"])
    assert get(http, "/v1/runs/empty/health") == {"run": "empty", "status": "ok", "findings": []}


# ---- metrics ----
def test_metrics_go_on_from_a_cursor(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=2, planned=4)
    http = TestClient(build_run_app(open_runs([run]), ServeConfig()), base_url="http://localhost")
    first = get(http, "/v1/runs/r/metrics")
    assert [step["step"] for step in first["steps"]] == [1, 2]
    write_line(run, 3, {"loss": 1.0})
    more = get(http, "/v1/runs/r/metrics", after=first["next"])
    assert [step["step"] for step in more["steps"]] == [3] and not more["anew"]
    assert get(http, "/v1/runs/r/metrics", after=more["next"])["steps"] == []
    assert get(http, "/v1/runs/r/metrics", after="1-5")["anew"]
    wrong = http.get("/v1/runs/r/metrics", params={"after": "yesterday"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "after"


def test_a_run_that_is_being_written_is_followed_to_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=1, planned=3)
    told: list[dict[str, Any]] = []
    with running(build_run_app(open_runs([run]), ServeConfig())) as port:
        url = f"http://127.0.0.1:{port}/v1/events"

        def write() -> None:
            write_line(run, 2, newline=False)
            with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write("\n")  # a line that never was whole
            for step in (2, 3):
                write_line(run, step, {"loss": float(step)})

        with httpx2.stream("GET", f"{url}/r", timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    told.append(json.loads(line[6:]))
                    if len(told) == 1:
                        threading.Thread(target=write).start()
        steps = [step["step"] for each in told for step in each["steps"]]
        assert steps == [1, 2, 3] and told[0]["anew"] and not any(each["anew"] for each in told[1:])
        assert httpx2.get(f"{url}/r", params={"after": told[-1]["next"]}, timeout=120).status_code == 204
        with httpx2.stream("GET", url, timeout=120) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: runs" and json.loads(next(lines)[6:])["runs"][0]["state"] == "finished"


# ---- completions ----
def test_completions_newest_step_first_in_pages(http: TestClient) -> None:
    rows = get(http, "/v1/runs/s0/rollouts")["rows"]
    assert [row["id"] for row in rows] == [f"{s}.{g}.{i}" for s in (3, 2, 1) for g in (0, 1) for i in (0, 1)]
    assert rows[0]["text"] == "4" and rows[0]["version"] == "toy@3" and "2+2?" in rows[0]["prompt"]
    paged, after = [], None
    while True:
        page = get(http, "/v1/runs/s0/rollouts", limit=5, **({} if after is None else {"after": after}))
        paged += page["rows"]
        if (after := page["next"]) is None:
            break
    assert paged == rows


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"step": 2}, ["2.0.0", "2.0.1", "2.1.0", "2.1.1"]),
        ({"step": 2, "contains": "4"}, ["2.0.0", "2.1.0"]),
        ({"step": 9}, []),
        ({"finish_reason": "length"}, ["3.1.1", "2.1.1", "1.1.1"]),
        ({"version": "toy@1"}, ["1.0.0", "1.0.1"]),
        ({"reward_min": 0.5, "step": 1}, ["1.0.0", "1.1.1"]),
        ({"reward_max": 0.5, "step": 1}, ["1.0.1", "1.1.1"]),
    ],
)
def test_filters(http: TestClient, query: dict[str, Any], expected: list[str]) -> None:
    assert [row["id"] for row in get(http, "/v1/runs/s0/rollouts", **query)["rows"]] == expected


def test_a_long_search_is_many_short_requests(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.server.run_rollouts.READ_BYTES", 1)
    first = get(http, "/v1/runs/s0/rollouts", version="toy@1")
    assert first == {"rows": [], "next": 2 * PLACES}
    second = get(http, "/v1/runs/s0/rollouts", version="toy@1", after=first["next"])
    third = get(http, "/v1/runs/s0/rollouts", version="toy@1", after=second["next"])
    assert len(third["rows"]) == 2 and third["next"] is None


def test_a_group_has_the_parts_of_each_reward_and_best_is_first(http: TestClient) -> None:
    found = get(http, "/v1/runs/s0/rollouts/1.0.1")
    best, worst = found["rollouts"]
    assert best["rewards"] == {"exact": 1.0, "brief": 0.25} and (best["reward"], worst["reward"]) == (1.0, 0.0)
    assert "".join(best["tokens"]) == "4<|im_end|>" and best["text"] == "4"
    assert best["logprobs"] == [-0.5] * len(best["token_ids"]) and len(best["tokens"]) == len(best["token_ids"])
    assert found["prompt_token_ids"] == ASKED and found["prompt"].startswith("<|im_start|>user")
    cut, failed = get(http, "/v1/runs/s0/rollouts/1.1.0")["rollouts"]
    assert failed["reward"] is None and failed["rewards"] == {"exact": None, "brief": 0.5}
    assert failed["error"] == "ValueError: no number in it" and cut["finish_reason"] == "length"


def test_an_episode_is_shown_with_what_the_policy_was_told(tmp_path: Path) -> None:
    first = turn("look", logprob=-1.0)
    told = TOKENIZER.encode("<|im_start|>user\n12<|im_end|>\n").ids
    second = turn("twelve", prompt=[*first.prompt_ids, *first.completion.token_ids, *told])
    episode = Rollout(turns=(first, second), rewards={"env": 1.0}, reward=1.0, advantage=0.0)
    http = TestClient(
        build_run_app(open_runs([make_run(tmp_path / "r", rollouts={1: [group(episode)]})]), ServeConfig()),
        base_url="http://localhost",
    )
    (shown,) = get(http, "/v1/runs/r/rollouts/1.0.0")["rollouts"]
    assert "".join(shown["tokens"]) == "look<|im_end|><|im_start|>user\n12<|im_end|>\ntwelve<|im_end|>"
    assert len(shown["logprobs"]) == len(shown["tokens"])
    given = shown["tokens"].index("<|im_start|>user\n12<|im_end|>\n")
    assert shown["logprobs"][given] is None and shown["logprobs"].count(None) == 1
    assert (
        shown["token_ids"] == [*first.completion.token_ids, *second.completion.token_ids]
        and shown["token_ids"][-1] == END
    )
    assert get(http, "/v1/runs/r/rollouts")["rows"][0]["text"] == "look\ntwelve"


def test_without_the_tokenizer_a_completion_is_shown_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", rollouts=STEPS, model="/nowhere/model")
    http = TestClient(build_run_app(open_runs([run]), ServeConfig()), base_url="http://localhost")
    found = get(http, "/v1/runs/r/rollouts/1.0.0")
    assert found["prompt"] == "user: 2+2?" and found["rollouts"][0]["tokens"] == ["4"]
    assert found["rollouts"][0]["logprobs"] == [-0.5]


@pytest.mark.parametrize("id", ["9.0.0", "1.7.0", "1", "x", "1.0.0.0", "-1.0.0", "99999999999999.0.0", "1.0.0%00"])
def test_what_is_not_there(http: TestClient, id: str) -> None:
    answer = http.get(f"/v1/runs/s0/rollouts/{id}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "rollout_not_found"


def test_damage_costs_the_line_that_it_is_in(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", rollouts=STEPS)
    path = run / "rollouts" / "step_000003.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text(whole[0] + "{torn\n" + '{"prompt": {}}\n' + whole[1])
    http = TestClient(build_run_app(open_runs([run]), ServeConfig()), base_url="http://localhost")
    rows = get(http, "/v1/runs/r/rollouts", step=3)["rows"]
    assert [row["id"] for row in rows] == ["3.0.0", "3.0.1", "3.3.0", "3.3.1"]
    damaged = http.get("/v1/runs/r/rollouts/3.2.0")
    assert damaged.status_code == 404
    wording(damaged.json()["error"])


# ---- the server ----
def test_it_is_guarded_and_documented_as_the_live_one(place: Path) -> None:
    runs = {"s0": RunFiles(place / "s0", id="s0")}
    http = TestClient(build_run_app(runs, ServeConfig(api_key="sk-planted")), base_url="http://127.0.0.1:8421")
    assert http.get("/ui/").status_code == 200 and http.get("/v1/runs").status_code == 401
    assert http.get("/v1/runs", headers={"authorization": "Bearer sk-planted"}).status_code == 200
    assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
    document = build_run_app(runs, ServeConfig()).openapi()
    assert "401" not in str(document["paths"]["/v1/runs"]) and document["info"]["description"].startswith("Runs of")
    assert {method for operations in document["paths"].values() for method in operations} == {"get"}


def test_the_guide_has_every_route(http: TestClient) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "ui.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(/[^`]*)` \|", guide, re.MULTILINE))
    assert told == set(get(http, "/openapi.json")["paths"])


PARTS = ("metrics", "health", "evaluations", "rollouts", "rollouts/1.0.0")


def test_nothing_is_written(place: Path, http: TestClient) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(place.rglob("*"))}

    before = state()
    for path in ("/v1/runs", "/v1/runs/s0", *(f"/v1/runs/s0/{part}" for part in PARTS)):
        get(http, path)
    assert state() == before


def test_no_torch_and_no_transformers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", rollouts=STEPS)
    code = (
        "import sys; from pathlib import Path; from starlette.testclient import TestClient\n"
        "from groupwise.config.serve import ServeConfig; from groupwise.server.run_app import build_run_app\n"
        "from groupwise.server.run_files import open_runs\n"
        f"http = TestClient(build_run_app(open_runs([Path({str(run)!r})]), ServeConfig()), base_url='http://localhost')\n"
        f"for part in {PARTS}:\n"
        "    assert http.get(f'/v1/runs/r/{part}').status_code == 200, part\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert ran.returncode == 0, ran.stderr
