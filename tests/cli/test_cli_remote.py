"""The commands that talk to a server, against one of the wire format with real sockets; and which server or store."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli_project import cli
from groupwise.cli.main import app
from groupwise.sdk import drivers as client_drive
from groupwise.sdk import transport as client_http
from groupwise.server.app import Start
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from wire_server import Fault, ToyJob, WireServer, wire_server
from wording import wording

SUM = "What is 2 + 3?"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server but those that a test starts, no waiting between tries, an empty folder."""
    monkeypatch.setattr(client_http, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(client_drive, "DEFAULT_URL", "http://127.0.0.1:9")
    for name in ("GROUPWISE_URL", "GROUPWISE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WireServer]:
    with wire_server() as running:
        monkeypatch.setenv("GROUPWISE_URL", running.url)
        yield running


def cli_with(stdin: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def write(path: str, value: object) -> str:
    Path(path).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def trained(server: WireServer, *, name: str = "math") -> str:
    """The id of a job that has been completed."""
    submitted = cli("train", "grpo", write("groups.json", {"groups": []}), "--output-name", name, "--json", "--wait")
    assert submitted.exit_code == 0, submitted.stderr
    return json.loads(submitted.stdout)["job_id"]


# ---- help, and errors ----


@pytest.mark.parametrize(
    "command",
    ["serve", "chat", "rollouts sample", "health", "adapters upload", "adapters merge", "adapters delete"]
    + [f"train {verb}" for verb in ("grpo", "sft", "status", "cancel", "wait")],
)
def test_every_command_has_help(command):
    result = cli(*command.split(), "--help")
    assert result.exit_code == 0 and "--api-key" in result.stdout
    assert command == "serve" or ("--url" in result.stdout and "--json" in result.stdout)


def test_help_and_errors_need_neither_torch_nor_the_server():
    code = (
        "import sys; from typer.testing import CliRunner; from groupwise.cli.main import app\n"
        "run = lambda *a: CliRunner().invoke(app, a).exit_code\n"
        "assert run('train', '--help') == run('serve', '--help') == 0\n"
        "assert run('health', '--url', 'http://127.0.0.1:9') == 75\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'groupwise.server'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_server_that_is_not_there_is_temporary():
    result = cli("health")
    assert result.exit_code == 75
    wording(result.stderr)
    as_json = cli("train", "status", "--json")
    assert json.loads(as_json.stdout)["error"]["code"] == "unreachable"


def test_a_wrong_key_exits_with_4(monkeypatch):
    with wire_server(api_key="s3cret") as server:
        refused = cli("train", "wait", "x", "--url", server.url)
        assert refused.exit_code == 4
        wording(refused.stderr)
        assert cli("train", "status", "--url", server.url, "--api-key", "s3cret").exit_code == 0
        monkeypatch.setenv("GROUPWISE_API_KEY", "s3cret")
        assert cli("adapters", "list", "--url", server.url).exit_code == 0


def test_an_error_of_the_server_is_its_message_hint_and_request_id(server):
    server.plan("GET", "/v1/train/status", Fault(status=400, code="invalid_value"))
    result = cli("train", "status", "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2
    wording(result.stderr)
    assert (error["code"], error["hint"], error["request_id"]) == ("invalid_value", "rest", "req-7")


def test_what_is_waited_for_is_said(server):
    server.plan("GET", "/v1/train/status", Fault(status=503, headers={"retry-after": "0"}, code="not_ready"))
    result = cli("train", "status")
    assert result.exit_code == 0 and not result.stdout
    wording(result.stderr)


# ---- health and chat ----


def test_health(server):
    shown = cli("health").stdout
    assert server.url in shown and "61 s" in shown
    wording(shown)
    assert json.loads(cli("health", "--json").stdout)["uptime_seconds"] == 61.0


def test_chat_prints_the_reply_and_says_who_gave_it(server):
    result = cli("chat", "What is 123 + 456?", "--max-tokens", 9, "--seed", 1, "--system", "Be brief.")
    assert (result.stdout, result.stderr) == ("579\n", "(base)\n")
    sent = server.seen[-1].json
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["max_tokens"], sent["seed"], sent["stream"]) == (9, 1, True) and "adapter" not in sent
    as_json = json.loads(cli("chat", SUM, "--json").stdout)
    assert as_json["choices"][0]["message"]["content"] == "5" and as_json["system_fingerprint"] == "base"


def test_chat_reads_stdin(server):
    assert cli_with(SUM, "chat").stdout == "5\n"


def test_a_reply_cannot_repaint_the_terminal(server, monkeypatch):
    monkeypatch.setattr(server, "text", lambda messages, index: "\x1b[31mred")
    assert cli("chat", SUM).stdout == "␛[31mred\n"
    assert "\x1b" not in cli("rollouts", "sample", SUM).stdout


# ---- rollouts and training ----


def test_rollouts_scored_and_trained(server):
    sampled = cli("rollouts", "sample", SUM, "What is 1 + 1?", "-n", 4, "--max-tokens", 8, "--json")
    groups = json.loads(sampled.stdout)
    assert [len(group["completions"]) for group in groups["groups"]] == [4, 4]
    for group in groups["groups"]:
        for completion, reward in zip(group["completions"], (1.0, 0.5, 0.0, None), strict=True):
            completion["reward"] = reward
    write("scored.json", groups)
    result = cli("train", "grpo", "scored.json", "--output-name", "math", "--set", "learning_rate=1e-4", "--wait")
    assert result.exit_code == 0, result.stderr
    (job,) = server.jobs
    assert job in result.stdout
    wording(result.stdout)
    wording(result.stderr)
    sent = server.of("POST", "/v1/train/grpo")[0].json
    assert sent["config"] == {"output_name": "math", "learning_rate": 1e-4}
    named = [{"rollout_id": f"rollout-0-{i}", "reward": reward} for i, reward in enumerate((1.0, 0.5, 0.0))]
    assert sent["groups"][0] == {"messages": [{"role": "user", "content": SUM}], "completions": named}


def test_rollouts_are_a_table_for_people(server):
    lines = cli("rollouts", "sample", SUM, "-n", 2).stdout.splitlines()
    assert lines == [SUM, "  rollout-0-0  5", "  rollout-0-1  6"]


def test_prompts_of_a_file(server):
    messages = [{"role": "user", "content": "What is 4 + 4?"}]
    lines = [
        json.dumps(row, ensure_ascii=False)
        for row in ({"prompt": SUM}, {"messages": messages}, "What is\u20281 + 1?", {"prompt": messages})
    ]
    file = write("p.jsonl", "\n\n".join(lines))
    result = cli("rollouts", "sample", "--file", file, "-n", 1, "--token-ids", "--json")
    groups = json.loads(result.stdout)["groups"]
    assert [group["completions"][0]["text"] for group in groups] == ["5", "8", "2", "8"]
    assert groups[0]["completions"][0]["token_ids"] == [7, 2]
    assert cli("rollouts", "sample").exit_code == 2
    for content, place in (('"a"\n{}', "bad.jsonl:2"), ("{", "bad.jsonl:1")):
        refused = cli("rollouts", "sample", "--file", write("bad.jsonl", content))
        assert refused.exit_code == 2 and place in refused.stderr
        wording(refused.stderr)


def test_a_line_of_json_may_hold_a_separator_of_lines(server):
    """U+2028 and U+0085, which `ensure_ascii=False` leaves as they are, end no line of JSON."""
    lines = [json.dumps({"prompt": f"What is{mark}2 + 3?"}, ensure_ascii=False) for mark in ("\u2028", "\x85")]
    result = cli("rollouts", "sample", "--file", write("p.jsonl", "\n".join(lines)), "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["groups"]) == 2
    group = {"messages": [], "completions": [{"text": "a\u2028b", "reward": 1}, {"text": "b", "reward": 0}]}
    lines = [json.dumps(group, ensure_ascii=False)] * 2
    result = cli("train", "grpo", write("g.jsonl", "\n".join(lines)), "--output-name", "m", "--json")
    assert result.exit_code == 0, result.output


def test_the_three_forms_of_what_is_trained(server):
    group = {"messages": [], "completions": [{"text": "a", "reward": 1}, {"text": "b", "reward": 0}]}
    whole = {"groups": [group], "config": {"learning_rate": 1e-3, "output_name": "a"}}
    by_id = {"completions": [{"rollout_id": "a", "reward": 1}, {"rollout_id": "b", "reward": 0}]}  # has its prompt so
    forms = (whole, json.dumps(group) + "\n" + json.dumps(group), group, [group], by_id)
    for number, content in enumerate(forms, start=1):
        result = cli("train", "grpo", write(f"{number}.json", content), "--output-name", "b")
        assert result.exit_code == 0, result.stderr
        assert result.stdout == f"{number:032x}\n" and f"groupwise train wait {number:032x} --follow" in result.stderr
    bodies = [seen.json for seen in server.of("POST", "/v1/train/grpo")]
    assert [len(body["groups"]) for body in bodies] == [1, 2, 1, 1, 1] and bodies[-1]["groups"] == [by_id]
    assert bodies[0]["config"] == {"learning_rate": 1e-3, "output_name": "b"} and bodies[0]["groups"] == [group]
    example = {"messages": [{"role": "user", "content": "one\u2028two"}]}
    lines = json.dumps(example, ensure_ascii=False) + "\n" + json.dumps(example)
    examples = cli_with(lines, "train", "sft", "-", "--set", "epochs=2")
    assert examples.exit_code == 0, examples.stderr
    assert server.seen[-1].json == {"examples": [example] * 2, "config": {"epochs": 2}}


@pytest.mark.parametrize(
    "content",
    [{"groups": [], "learning_rate": 1}, {"examples": []}, "{}\nno", "7"],
    ids=["an option beside them", "no groups", "no JSON", "a number"],
)
def test_a_file_that_is_no_submission(server, content):
    result = cli("train", "grpo", write("x.json", content))
    assert result.exit_code == 2 and not server.seen
    wording(result.stderr)
    assert cli("train", "grpo", "nothing.json").exit_code == 2


def test_status_is_a_table_and_a_page(server):
    wording(cli("train", "status").stderr)
    job = trained(server)
    header, row = (line.split() for line in cli("train", "status").stdout.splitlines())
    assert header == ["job", "kind", "state", "done", "step", "loss", "reward", "adapter", "seconds"]
    assert row == [job, "grpo", "completed", "100%", "1/1", "-0.25", "0.5", "math@1", "1.0"]
    page = cli("train", "status", job).stdout
    assert "math@1" in page and "2026-01-02 03:04:07 UTC" in page and "reward/mean" in page
    assert json.loads(cli("train", "status", job, "--json").stdout)["adapter_version"] == "math@1"
    assert [each["job_id"] for each in json.loads(cli("train", "status", "--json").stdout)] == [job]
    missing = cli("train", "status", "nope")
    assert missing.exit_code == 2
    wording(missing.stderr)


def test_what_a_job_waits_for_and_its_deadline_are_on_its_page(server, monkeypatch):
    told = ToyJob.as_json
    waits = {"reason": "room", "message": "as many are trained", "job_id": None, "about_seconds": None}
    due = {"at": "2030-01-31T18:00:00Z", "outlook": "late", "message": "about 600 s late", "about_seconds": 2400.0}
    monkeypatch.setattr(ToyJob, "as_json", lambda self: told(self) | {"waits": waits, "deadline": due})
    page = dict(line.split(maxsplit=1) for line in cli("train", "status", trained(server)).stdout.splitlines())
    assert page["waits"].strip() == waits["message"]
    assert page["deadline"].strip() == f"{due['at']}: {due['message']}"


def test_warnings_of_a_submission_are_said(server):
    result = cli("train", "grpo", write("x.json", {"groups": []}), "--set", "seed=13")
    assert result.exit_code == 0
    wording(result.stderr)


def test_a_setting_without_a_value_is_told_how_one_looks(server):
    refused = cli("train", "grpo", write("x.json", {"groups": []}), "--set", "learning_rate")
    assert refused.exit_code == 2
    wording(refused.stderr)


def interrupted(process: subprocess.Popen[str]) -> str:
    """Its last words. Python can lose a Ctrl-C that comes in the middle of a clean-up; people press it again."""
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[1]
    process.kill()
    pytest.fail("it does not end")


@pytest.mark.parametrize("submit", [True, False])
def test_ctrl_c_ends_the_waiting_and_says_that_the_job_goes_on(server, submit):
    server.next_outcome = "running"
    write("x.json", {"groups": []})
    command = ["grpo", "x.json", "--wait"] if submit else ["wait", cli("train", "grpo", "x.json").stdout.strip()]
    command += [] if submit else ["--follow"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in background
    with subprocess.Popen([sys.executable, "-um", "groupwise", "train", *command], **pipes) as waiting:
        while "state" not in (waiting.stderr if submit else waiting.stdout).readline():
            assert waiting.poll() is None
        said = interrupted(waiting)
    (job,) = server.jobs
    assert waiting.returncode == 130
    assert f"groupwise train cancel {job}" in said
    wording("\n".join(said.splitlines()[-2:]))


def test_waiting_follows_and_ends_with_the_jobs_fate(server):
    job = trained(server)
    lines = cli("train", "wait", job, "--follow").stdout.splitlines()
    assert len(lines) == 5 and lines[-1] == f"{job} completed: math@1"
    wording("\n".join(lines))
    objects = [json.loads(line) for line in cli("train", "wait", job, "--follow", "--json").stdout.splitlines()]
    assert [each.get("seq") for each in objects] == [1, 2, 3, 4, None] and objects[-1]["state"] == "completed"
    server.next_outcome = "failed"
    failed = cli("train", "grpo", write("x.json", {"groups": []}), "--wait")
    assert failed.exit_code == 5
    wording(failed.stderr)
    server.next_outcome = "running"
    endless = cli("train", "grpo", "x.json").stdout.strip()
    late = cli("train", "wait", endless, "--timeout", 0.3)
    assert late.exit_code == 75
    wording(late.stderr)
    assert cli("train", "cancel", endless).stdout == f"{endless} cancelled\n"
    assert cli("train", "wait", endless).exit_code == 5
    again = cli("train", "cancel", endless)
    assert again.exit_code == 2
    wording(again.stderr)


# ---- adapters ----


def test_adapters_of_a_server(server):
    wording(cli("adapters", "list").stderr)
    trained(server)
    trained(server)
    listed = cli("adapters", "list")
    header, row = listed.stdout.splitlines()
    assert header.split() == ["adapter", "active", "versions", "size", "modified"]
    assert row.split() == ["*", "math", "math@2", "1", "to", "2", "3.0", "MiB", "2026-01-02", "03:04:05"]
    assert server.url in listed.stderr
    wording(listed.stderr)
    assert json.loads(cli("adapters", "list", "--json").stdout)["active_version"] == "math@2"
    wording(cli("adapters", "show", "math").stdout)
    (first,) = json.loads(cli("adapters", "show", "math", "--json").stdout)["history"]
    assert (first["step"], first["surplus"]) == (4, True)
    assert cli("adapters", "activate", "math@1").stdout == "math@1\n"
    assert cli("adapters", "rollback").stdout == "math@2\n"
    assert json.loads(cli("adapters", "activate", "base", "--json").stdout)["version"] == "base"
    assert cli("adapters", "delete", "math").stdout == "deleted math@1\n"
    merged = cli("adapters", "merge", "math=0.7", "code@3=0.3", "--output-name", "both", "--mode", "concat")
    assert merged.stdout == "both@1\n"
    sources = [{"name": "math", "weight": 0.7}, {"name": "code@3", "weight": 0.3}]
    assert server.seen[-1].json == {"output_name": "both", "mode": "concat", "sources": sources}
    assert cli("adapters", "merge", "math", "--output-name", "both").exit_code == 2
    assert cli("adapters", "show", "nope").exit_code == 2


def test_notes_of_adapters_are_printed(server, store):
    trained(server)
    assert cli("adapters", "note", "math@1", "good at sums").stdout == "math@1\n"
    header, row = cli("adapters", "list").stdout.splitlines()
    assert header.endswith("note") and row.endswith("good at sums")
    assert cli("adapters", "show", "math").stdout.splitlines()[-1].endswith("good at sums")
    assert cli("adapters", "note", "nope", "x").exit_code == 2
    here = ("--run", "runs/one")
    assert (
        json.loads(cli("adapters", "note", "local", "weak at carries", "--json", *here).stdout)["version"] == "local@1"
    )
    assert cli("adapters", "list", *here).stdout.rstrip().endswith("weak at carries")
    assert "note           weak at carries" in cli("adapters", "show", "local", *here).stdout
    refused = cli("adapters", "note", "local", "x" * 501, *here)
    assert refused.exit_code != 0
    wording(refused.stderr)
    cli("adapters", "note", "local", "", *here)
    assert json.loads(cli("adapters", "list", "--json", *here).stdout)["versions"][0]["note"] is None


@pytest.fixture(scope="module")
def adapter(make_base, make_adapter) -> Path:
    return make_adapter(make_base("qwen3"), seed=1)


def test_adapters_go_up_and_come_down(server, adapter):
    assert cli("adapters", "upload", "mine", adapter).stdout == "mine@1\n"
    assert cli("adapters", "download", "mine").stdout == "mine.tar.gz\n"
    with tarfile.open("mine.tar.gz") as archive:
        assert set(archive.getnames()) == {"mine/adapter_config.json", "mine/adapter_model.safetensors"}
    assert cli("adapters", "upload", "mine", "mine.tar.gz", "--new-version").stdout == "mine@2\n"
    exported = cli("adapters", "export", "mine", "plain", "--json")
    assert json.loads(exported.stdout) == {"version": "mine@2", "path": "plain"}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert Path("plain", name).read_bytes() == (adapter / name).read_bytes()
    again = cli("adapters", "export", "mine", "plain")
    assert again.exit_code == 1
    wording(again.stderr)
    assert cli("adapters", "upload", "other", "nowhere").exit_code == 2


def test_what_a_run_trained_goes_up_by_the_names_that_eval_takes(store, server):
    """And `--run` takes a run's name, as every command does."""
    for number, name in enumerate(("local@1", "local", "one", "runs/one/local@1"), start=1):
        assert cli("adapters", "upload", f"up{number}", name).stdout == f"up{number}@1\n"
    assert "local@1" in cli("adapters", "list", "--run", "one").stdout


# ---- a server, or a store ----


@pytest.fixture
def store(adapter) -> AdapterStore:
    """One version of `local` in the newest run of this folder."""
    opened = AdapterStore(Path("runs") / "one" / "adapters")
    info = Provenance(base_model="toy", base_hash="0" * 64, metrics={})
    opened.publish("local", lambda directory: shutil.copytree(adapter, directory, dirs_exist_ok=True), info=info)
    return opened


def test_what_is_named_is_used(store, server):
    assert "local@1" in cli("adapters", "list", "--run", "runs/one").stdout
    assert "local@1" in cli("adapters", "list", "--store", "runs/one/adapters").stdout
    assert not server.seen  # GROUPWISE_URL names it, but the store was named closer
    nothing = cli("adapters", "list", "--url", server.url).stderr
    assert server.url in nothing
    wording(nothing)
    both = cli("adapters", "list", "--url", server.url, "--run", "runs/one")
    assert both.exit_code == 2
    wording(both.stderr)


def test_without_a_name_the_server_of_this_machine_is_asked_first(store, monkeypatch):
    assert "local@1" in cli("adapters", "list").stdout  # none answers
    assert cli("adapters", "activate", "local").stdout == "local@1\n"
    with wire_server() as server:
        monkeypatch.setattr(client_drive, "DEFAULT_URL", server.url)
        result = cli("adapters", "activate", "base")
        assert result.stdout == "base\n" and server.url in result.stderr
        wording(result.stderr)
        assert [seen.path for seen in server.seen] == ["/health", "/v1/adapters/base/activate"]
        server.plan("GET", "/health", Fault(status=404, body=b"something else"))
        assert "local@1" in cli("adapters", "list").stdout
    assert str(store.active) == "local@1"


def test_neither_a_server_nor_a_store(tmp_path):
    result = cli("adapters", "list")
    assert result.exit_code == 2
    wording(result.stderr)
    assert not any(tmp_path.iterdir())


# ---- serve ----


def test_serve_passes_on_what_it_was_told(monkeypatch):
    served, repairs = [], []

    def serve(config, *, repair_ledger, start, ready):
        assert (start, ready) == (Start(), None)
        served.append(config)
        repairs.append(repair_ledger)

    monkeypatch.setattr("groupwise.server.app.serve", serve)
    monkeypatch.setenv("GROUPWISE_API_KEY", "s3cret")
    flags = ["--host", "0.0.0.0", "--port", 0, "--state-dir", "state", "--dtype", "float32", "--worker-threads", 1]
    result = cli("serve", "some/Model", *flags, "--set", "max_queued_jobs=3", "--set", "allowed_hosts=[a.example]")
    assert result.exit_code == 0, result.stderr
    config = served[0]
    assert (config.model, config.host, config.port, config.state_dir) == ("some/Model", "0.0.0.0", 0, Path("state"))
    assert (config.dtype, config.worker_threads, config.max_queued_jobs) == ("float32", 1, 3)
    assert config.allowed_hosts == ("a.example",) and config.api_key == "s3cret"
    assert cli("serve").exit_code == 0 and served[1].model == "starter" and served[1].port == 8420
    assert cli("serve", "--repair-ledger").exit_code == 0 and repairs == [False, False, True]


def test_serve_refuses_what_cannot_be(monkeypatch):
    unknown = cli("serve", "--set", "max_queue=3")
    assert unknown.exit_code == 2
    wording(unknown.stderr)
    public = cli("serve", "--host", "0.0.0.0")
    assert public.exit_code == 2
    wording(public.stderr)
    key = cli("serve", "--api-key", "two words")
    assert key.exit_code == 2 and "two words" not in key.stderr
