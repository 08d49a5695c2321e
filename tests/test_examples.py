"""The examples run as they stand: against a server of the wire format, and against the real one with the starter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wire_server import Fault, WireServer, wire_server

EXAMPLES = Path(__file__).parent.parent / "examples"
ROUND = re.compile(r"round +\d+  mean reward (\d\.\d{3})(?:  by (\S+))?")
READY_S = 240  # the real server imports torch and loads a model, maybe while many tests run

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def run(*command: str, url: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GROUPWISE_")}
    environment |= {"GROUPWISE_URL": url, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def live_loop(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(EXAMPLES / "live_loop.py"), *arguments, url=url)


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        yield running


# ---- every word that is sent ----


@pytest.mark.parametrize("text_only", [False, True])
def test_live_loop_samples_scores_trains_and_waits(server, text_only):
    flags = ["--rounds", "3", "--prompts", "2", *(["--text-only"] if text_only else [])]
    ran = live_loop(*flags, url=server.url)
    assert ran.returncode == 0, ran.stderr
    found = [match.groups() for match in ROUND.finditer(ran.stdout)]
    assert found == [("0.125", "base"), ("0.375", "sums@1"), ("0.625", "sums@2")]  # the toy's skill grows with versions
    for seen in server.of("POST", "/v1/train/grpo"):
        assert seen.json["config"]["output_name"] == "sums" and len(seen.json["groups"]) == 2
        for group in seen.json["groups"]:
            assert {frozenset(each) for each in group["completions"]} == {
                frozenset({"text", "reward"} if text_only else {"rollout_id", "reward"})
            }
    assert len(server.jobs) == 3 and server.active == "sums@3"


def test_live_loop_skips_what_cannot_teach(server):
    server.history = ["sums@9"]  # always right
    ran = live_loop("--rounds", "1", "--prompts", "2", url=server.url)
    assert ran.returncode == 0 and "mean reward 1.000" in ran.stdout and not server.jobs


@needs_curl
def test_the_same_with_curl(server):
    ran = run("bash", str(EXAMPLES / "live_loop.sh"), url=server.url, ROUNDS="2", PROMPTS="3", OUTPUT_NAME="shell")
    assert ran.returncode == 0, ran.stderr
    assert [match[1] for match in ROUND.finditer(ran.stdout)] == ["0.125", "0.375"]
    assert '"active_version": "shell@2"' in ran.stdout
    sent = server.of("POST", "/v1/train/grpo")[0].json
    assert len(sent["groups"]) == 3 and set(sent["groups"][0]["completions"][0]) == {"text", "reward"}
    assert not server.seen[0].headers.get("transfer-encoding") and "GROUPWISE" not in ran.stderr


@needs_curl
def test_with_curl_an_error_is_shown_and_ends_it(server):
    server.plan("POST", "/v1/train/grpo", Fault(status=400, code="invalid_value"))
    refused = run("bash", str(EXAMPLES / "live_loop.sh"), url=server.url, PROMPTS="1")
    assert refused.returncode == 1 and "planned invalid_value" in refused.stderr
    server.next_outcome = "failed"
    failed = run("bash", str(EXAMPLES / "live_loop.sh"), url=server.url, PROMPTS="1")
    assert failed.returncode == 5 and "the loss is not finite" in failed.stderr


# ---- the real thing ----


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `groupwise serve` with the starter, in a process of its own."""
    folder = tmp_path_factory.mktemp("server")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GROUPWISE_")}
    command = [sys.executable, "-m", "groupwise", "serve", "--port", "0", "--worker-threads", "1"]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}
        ) as process,
    ):
        assert process.stderr is not None
        overdue = threading.Timer(READY_S, process.kill)
        overdue.start()
        url = None
        for line in process.stderr:
            log.write(line)
            if found := re.match(r"ready on (\S+)", line):
                url = found[1]
                break
        overdue.cancel()
        rest = threading.Thread(target=lambda: log.writelines(process.stderr or ()))
        rest.start()
        try:
            assert url is not None, (folder / "log").read_text()
            yield url
        finally:
            process.terminate()
            code = process.wait(60)
            rest.join()
        assert code == 0


@pytest.mark.xdist_group("real server")
def test_live_loop_on_the_real_server(real):
    ran = live_loop("--rounds", "2", "--prompts", "12", "--n", "4", url=real)
    assert ran.returncode == 0, ran.stderr
    assert [match[2] for match in ROUND.finditer(ran.stdout)] == ["base", "sums@1"]
    again = live_loop("--rounds", "1", "--prompts", "12", "--n", "4", "--text-only", url=real)
    assert again.returncode == 0 and "by sums@2" in again.stdout, again.stderr


@needs_curl
@pytest.mark.xdist_group("real server")
def test_the_same_with_curl_on_the_real_server(real):
    ran = run("bash", str(EXAMPLES / "live_loop.sh"), url=real, ROUNDS="1", PROMPTS="12", OUTPUT_NAME="shell")
    assert ran.returncode == 0, ran.stderr
    assert '"active_version": "shell@1"' in ran.stdout


@pytest.mark.xdist_group("real server")
def test_the_command_line_on_the_real_server(real, tmp_path):
    def groupwise(*arguments: str) -> subprocess.CompletedProcess[str]:
        ran = run(sys.executable, "-m", "groupwise", *arguments, url=real)
        assert ran.returncode == 0, ran.stderr
        return ran

    assert "is ok" in groupwise("health").stdout
    groupwise("chat", "What is 1 + 1?", "--max-tokens", "8", "--adapter", "base")
    examples = tmp_path / "examples.jsonl"
    said = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'
    examples.write_text(said * 4)
    trained = groupwise("train", "sft", str(examples), "--output-name", "tone", "--set", "epochs=1", "--wait")
    assert trained.stdout.endswith("completed: tone@1\n")
    assert (
        "tone@1" in groupwise("train", "status").stdout
        and "* is active: tone@1" in groupwise("adapters", "list").stderr
    )
    groupwise("adapters", "download", "tone", str(tmp_path / "tone.tar.gz"))
    groupwise("adapters", "export", "tone@1", str(tmp_path / "tone"))
    assert groupwise("adapters", "upload", "again", str(tmp_path / "tone")).stdout == "again@1\n"
    assert groupwise("adapters", "merge", "tone=1", "again=1", "--output-name", "both").stdout == "both@1\n"
    assert groupwise("adapters", "rollback").stdout != "tone@1\n"
    assert groupwise("adapters", "delete", "both").stdout == "deleted both@1\n"
