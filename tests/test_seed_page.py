"""What the guide of the feedback loop promises, request by request, against `groupwise serve` with the starter.

The requests are sent with curl, as people send them; what the guide says around them is checked too. The commands of
docs/server.md run as they stand, but for the port.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from seed_page import GROUP, JOB_S, ROLLOUTS, SCORED, Live

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
    pytest.mark.xdist_group("live server"),
]


@pytest.mark.long
def test_the_page_from_rollouts_to_the_confirmed_adapter(live: Live) -> None:
    batch = live.post("/v1/completions/batch", ROLLOUTS)
    places = [(c["prompt_index"], c["completion_index"]) for c in batch["completions"]]
    assert places == [(prompt, i) for prompt in range(2) for i in range(8)]
    assert len({c["text"] for c in batch["completions"]}) > 2

    began = time.monotonic()
    queued = live.post("/v1/train/grpo", SCORED)
    assert (queued["state"], queued["adapter_name"]) == ("queued", "math-correctness")
    assert "1 groups (4 completions" in queued["message"]
    seen = live.job(queued["job_id"])
    assert seen["state"] in ("queued", "running", "completed") and time.monotonic() - began < 30
    assert queued["job_id"] in live.shell("groupwise train status")

    job = live.ended(queued["job_id"])
    assert (job["state"], job["adapter_version"], job["error"]) == ("completed", "math-correctness@1", None), job
    assert (job["step"], job["progress"], job["warnings"]) == (1, 1.0, [])
    assert job["metrics"]["reward/mean"] == pytest.approx(0.7)

    adapters = live.get("/v1/adapters")
    assert (adapters["active"], adapters["active_version"]) == ("math-correctness", "math-correctness@1")
    (listed,) = [each for each in adapters["available"] if each["name"] == "math-correctness"]
    assert listed["has_weights"] and listed["has_config"]
    assert live.chat()["system_fingerprint"] == "math-correctness@1"
    assert "math-correctness@1" in live.shell("groupwise train status")
    (line,) = [each for each in live.shell("groupwise adapters list").splitlines() if "math-correctness" in each]
    assert line.startswith("*")
    assert "math-correctness" in live.shell(f"env -u GROUPWISE_URL groupwise train status --url {live.url}")


def test_groups_alone_are_a_whole_request(live: Live) -> None:
    """Every option has the default that the guide names, and the new adapter becomes active."""
    job = live.ended(live.train())
    assert job["state"] == "completed", job
    options = ("learning_rate", "kl_coeff", "clip_epsilon", "auto_load")
    assert [job["config"][option] for option in options] == [1e-5, 0.1, 0.2, True]
    assert live.get("/v1/adapters")["active_version"] == job["adapter_version"] == f"{job['adapter_name']}@1"
    events = live.shell(f"curl -sN {live.url}/v1/train/events/{job['job_id']}")
    assert "begins with a fresh adapter of rank 16" in events
    archive = live.shell(
        f"curl -s {live.url}/v1/adapters/{job['adapter_name']}/download | tar -xzO --wildcards '*.json'"
    )
    assert (json.loads(archive)["r"], json.loads(archive)["lora_alpha"]) == (16, 32)


@pytest.mark.slow
def test_it_serves_while_it_trains(live: Live) -> None:
    """And a job of another adapter ends meanwhile; one of the same adapter waits."""
    job_id = live.train(iterations=10_000, learning_rate=0.0, output_name="endless")
    end = time.monotonic() + JOB_S
    while (job := live.job(job_id))["state"] == "queued" or job["step"] == 0:
        assert time.monotonic() < end, job
        time.sleep(0.1)
    waiting, beside = live.train(output_name="endless"), live.train(output_name="beside")
    answers = [live.chat(seed=seed)["choices"][0]["message"] for seed in range(5)]
    batch = live.post("/v1/completions/batch", ROLLOUTS)
    assert len(answers) == 5 and len(batch["completions"]) == 16
    then = live.job(job_id)
    assert then["state"] == "running" and job["step"] < then["step"] < 10_000
    assert live.ended(beside)["state"] == "completed"
    assert [job["job_id"] for job in live.get("/v1/train/status")][:2] == [job_id, waiting]
    queue = live.get("/v1/train/queue")
    assert (queue["running"]["job_id"], queue["queued"][0]["job_id"]) == (job_id, waiting)
    assert (queue["queued"][0]["waits"]["reason"], queue["queued"][0]["waits"]["job_id"]) == ("adapter", job_id)
    live.shell(f"groupwise train cancel {job_id}")
    assert live.ended(job_id)["state"] == "cancelled"
    assert live.ended(waiting)["state"] == "completed"


@pytest.mark.slow
def test_base_adapter_continues_and_output_name_is_stable(live: Live) -> None:
    """And `auto_load: false` leaves what answers as it is."""
    live.ended(live.train(output_name="rounds", learning_rate=1e-3))
    live.ended(live.train(output_name="rounds", learning_rate=1e-3))
    job = live.ended(live.train(output_name="other", base_adapter="rounds@1", auto_load=False))
    assert job["adapter_version"] == "other@1"
    adapters = live.get("/v1/adapters")
    assert adapters["active_version"] == "rounds@2"
    parents = {
        v["version"]: v["parent"] for name in ("rounds", "other") for v in live.get(f"/v1/adapters/{name}")["history"]
    }
    assert parents == {"rounds@1": "base", "rounds@2": "rounds@1", "other@1": "rounds@1"}
    assert live.chat(adapter="other")["system_fingerprint"] == "other@1"


@pytest.mark.slow
def test_a_destroyed_policy_does_not_become_active_by_itself(live: Live) -> None:
    """A learning rate of 1 leaves nothing of the model. The version is kept; it answers when somebody says so."""
    before = live.get("/v1/adapters")["active_version"]
    job = live.ended(live.train(learning_rate=1.0, output_name="wrecked"))
    assert (job["state"], job["phase"], job["adapter_version"]) == ("completed", "done", "wrecked@1"), job
    assert job["metrics"]["final/logprob_drop"] > 0.5 and "policy.destroyed" in job["unhealthy"]
    (warning,) = job["warnings"]
    assert "not made active" in warning and 'POST /v1/adapters/wrecked/activate {"version": 1}' in warning
    assert live.get(f"/v1/train/health/{job['job_id']}")["status"] == "error"
    assert live.get("/v1/adapters")["active_version"] == live.chat()["system_fingerprint"] == before
    assert "wrecked@1 was not made active" in live.shell(f"curl -sN {live.url}/v1/train/events/{job['job_id']}")
    assert "not made active" in live.shell(f"groupwise train wait {job['job_id']} 2>&1")
    assert live.post("/v1/adapters/wrecked/activate", {"version": 1})["version"] == "wrecked@1"  # by hand
    assert live.chat()["system_fingerprint"] == "wrecked@1"
    assert live.post("/v1/adapters/rollback", {})["version"] == before


def test_the_guardrails_say_what_to_do(live: Live) -> None:
    alone = {**GROUP, "completions": GROUP["completions"][:1]}
    renamed = {**GROUP, "completions": [{"text": c["text"], "score": c["reward"]} for c in GROUP["completions"]]}
    equal = {**GROUP, "completions": [{**c, "reward": 1.0} for c in GROUP["completions"]]}
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"groups": [GROUP], "learning_rate": 1e-5}, "learning_rate", "config.learning_rate"),
        ({"groups": [GROUP], "output_name": "x"}, "output_name", "config.output_name"),
        ({"groups": [GROUP], "config": {"epochs": 3}}, "config.epochs", "iterations"),
        ({"groups": [GROUP], "epochs": 3}, "epochs", "iterations"),
        ({"groups": [alone]}, "groups[0].completions", "several completions"),
        ({"groups": [renamed]}, "groups[0].completions[0].score", "reward"),
        ({"groups": [equal]}, "groups", "sample more completions"),
        ({"groups": []}, "groups", "at least one group"),
        ({"completions": [GROUP]}, "completions", "groups[i].completions"),
        ({"groups": [GROUP], "config": {"base_adapter": "nobody"}}, "config.base_adapter", "there are"),
    ]
    before = len(live.get("/v1/train/status"))
    for body, param, remedy in refused:
        error = live.post("/v1/train/grpo", body)["error"]
        assert error["param"] == param and error["message"], error
        assert remedy in f"{error['message']} {error['hint']}", error
    assert len(live.get("/v1/train/status")) == before


def test_the_commands_of_the_guide_run_as_they_stand(live: Live, tmp_path: Path) -> None:
    """In order, in one shell, on the base model; an error of the server ends it."""
    guide = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```", guide, re.MULTILINE | re.DOTALL))
    assert script.count("curl ") > 12
    (tmp_path / ".curlrc").write_text("fail-with-body\n")
    live.shell("groupwise adapters activate base")
    said = live.shell(script.replace("http://localhost:8420", live.url), cwd=tmp_path, config=tmp_path)
    version = re.search(r'"message": "(sums@\d+) is active"', said)  # another test may have made some
    assert version is not None and f'"active_version": "{version[1]}"' in said
    assert (tmp_path / "sums" / "adapter_model.safetensors").exists()
    assert '"output_name":"both"' in said and '"status":"deleted"' in said
