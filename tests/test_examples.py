"""The examples run as they stand: against a server of the wire format, and against the real one with the starter."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_project import cli
from groupwise import Client
from threads import THREADS
from wire_server import Fault, WireServer, wire_server

EXAMPLES = Path(__file__).parent.parent / "examples"
ROUND = re.compile(r"round +\d+  mean reward (\d\.\d{3})(?:  by (\S+))?")

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def run(*command: str, url: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GROUPWISE_")}
    environment |= {"GROUPWISE_URL": url, "OMP_NUM_THREADS": THREADS, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def live_loop(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(EXAMPLES / "live_loop.py"), *arguments, url=url)


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        yield running


# ---- the notebooks ----

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells_of(notebook: Path) -> list[str]:
    """The code of a notebook's cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


async def run_cell(cell: str, names: dict[str, Any]) -> None:
    """As a notebook runs it: in the thread of a running event loop. Of its own commands it has those of ours."""
    if cell.startswith("%%writefile "):
        name, _, text = cell.removeprefix("%%writefile ").partition("\n")
        Path(name).write_text(text, encoding="utf-8")
    elif cell.startswith("!groupwise "):
        said = await asyncio.to_thread(cli, *shlex.split(cell)[1:])  # in no event loop, as a process of its own
        assert said.exit_code == 0, said.stderr
        names["said"] = said.stdout
    elif not cell.startswith("%pip "):
        exec(compile(cell, "a cell", "exec"), names)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg")
def test_the_notebook_of_the_first_hour(tmp_path, monkeypatch):
    """Its cells in order, with fewer and smaller steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    cells = cells_of(EXAMPLES / "first_hour.ipynb")
    shorter = [('"steps": 40', '"steps": 2'), ('"prompts_per_step": 32', '"prompts_per_step": 8'), ("2128", "2004")]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        for long, short in shorter:
            cell = cell.replace(long, short)
        asyncio.run(run_cell(cell, names))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    assert all(any(a in cell for cell in cells) for a, _ in shorter)
    assert names["result"].steps == 2 and names["result"].version.number == 2
    assert len(names["trained"]) == 2 and re.search(r"\d", names["said"])
    assert Path("sums-adapter/adapter_config.json").is_file()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*logits(names["model"], names["inputs"]))


def logits(model, inputs):
    """Of a PEFT model with its adapter, and without."""
    with torch.no_grad():
        adapted = model(**inputs).logits
        with model.disable_adapter():
            return adapted, model(**inputs).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prints"),
    [("own_reward", r"held out, sampled"), ("agent", r"calls an episode"), ("live_server", r"round 8 .* by sums@7")],
)
def test_another_notebook_runs_as_it_is(name, prints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("my_rewards", "calculator"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for cell in cells_of(EXAMPLES / f"{name}.ipynb"):
            asyncio.run(run_cell(cell, names))
    finally:
        if "server" in names:
            names["server"].kill()
        for module in ("my_rewards", "calculator"):
            monkeypatch.delitem(sys.modules, module, raising=False)
    assert re.search(prints, capsys.readouterr().out)
    if "result" in names:
        assert names["result"].after["sampled"].mean() > names["result"].before["sampled"].mean()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_what_its_cells_said(path):
    """Small, without an error, and with links and an installation that work where it is opened alone, as on Colab."""
    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and not any(output["output_type"] == "error" for output in outputs)
    assert path.stat().st_size < 60_000 and str(Path.home()) not in text
    assert "".join(cells[0]["source"]).startswith('%pip install --quiet "groupwise @ git+https://github.com/')
    assert f"colab.research.google.com/github/groupwise/groupwise/blob/main/examples/{path.name}" in text
    linked = re.findall(r"\]\(https://github.com/groupwise/groupwise/blob/main/([^)#]+)", text)
    assert "](../" not in text and all((EXAMPLES.parent / each).exists() for each in linked)


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


@pytest.mark.xdist_group("live server")
def test_live_loop_on_the_real_server(live):
    assert cli("adapters", "activate", "base", "--url", live.url).exit_code == 0
    # sixteen answers of any draw must not spoil the version
    few = ("--prompts", "4", "--n", "4", "--learning-rate", "1e-4")
    given = (*few, "--output-name", "looped")
    ran = live_loop("--rounds", "2", *given, url=live.url)
    assert ran.returncode == 0, ran.stderr
    assert [match[2] for match in ROUND.finditer(ran.stdout)] == ["base", "looped@1"]
    jobs = [job for job in Client(live.url).jobs() if job.adapter_name == "looped"]
    printed = sorted(match[1] for match in ROUND.finditer(ran.stdout))
    assert sorted(f"{job.summary['reward_mean']:.3f}" for job in jobs) == printed  # no group is missing
    assert [job.summary["groups"] for job in jobs] == [4, 4]
    again = live_loop("--rounds", "1", *given, "--text-only", url=live.url)
    assert again.returncode == 0 and "by looped@2" in again.stdout, again.stderr


@pytest.mark.slow
@needs_curl
@pytest.mark.xdist_group("live server")
def test_the_same_with_curl_on_the_real_server(live):
    ran = run("bash", str(EXAMPLES / "live_loop.sh"), url=live.url, ROUNDS="1", PROMPTS="4", OUTPUT_NAME="shell")
    assert ran.returncode == 0, ran.stderr
    assert '"active_version": "shell@1"' in ran.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("live server")
def test_the_command_line_on_the_real_server(live, tmp_path, monkeypatch):
    """Two commands as processes, the others in this one: each process takes a second to start."""

    def groupwise(*arguments: str, anew: bool = False) -> tuple[str, str]:
        if anew:
            ran = run(sys.executable, "-m", "groupwise", *arguments, url=live.url)
            assert ran.returncode == 0, ran.stderr
        else:
            ran = cli(*arguments)
            assert ran.exit_code == 0, ran.stderr
        return ran.stdout, ran.stderr

    monkeypatch.setenv("GROUPWISE_URL", live.url)
    monkeypatch.delenv("GROUPWISE_API_KEY", raising=False)
    assert "is ok" in groupwise("health", anew=True)[0]
    groupwise("chat", "What is 1 + 1?", "--max-tokens", "8", "--adapter", "base")
    examples = tmp_path / "examples.jsonl"
    said = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'
    examples.write_text(said * 4)
    words = ("train", "sft", str(examples), "--output-name", "tone", "--set", "epochs=1", "--wait")
    assert groupwise(*words, anew=True)[0].endswith("completed: tone@1\n")
    assert "tone@1" in groupwise("train", "status")[0]
    assert "* is active: tone@1" in groupwise("adapters", "list")[1]
    groupwise("adapters", "download", "tone", str(tmp_path / "tone.tar.gz"))
    groupwise("adapters", "export", "tone@1", str(tmp_path / "tone"))
    assert groupwise("adapters", "upload", "again", str(tmp_path / "tone"))[0] == "again@1\n"
    assert groupwise("adapters", "merge", "tone=1", "again=1", "--output-name", "merged")[0] == "merged@1\n"
    assert groupwise("adapters", "rollback")[0] != "tone@1\n"
    assert groupwise("adapters", "delete", "merged")[0] == "deleted merged@1\n"
