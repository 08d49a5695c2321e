"""The proof on a GPU as an instrument: what it skips, goes on with, stops and prints. (That it runs whole: slow.)"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from processes import becomes
from rank_pairs import on_ranks
from threads import THREADS

ROOT = Path(__file__).parent.parent
STOPPED = "the case that does not end"
PARTS = ("tests", "learner", "profile", "rollouts", "curve", "memory", "step", "sharded", "job")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of benchmarks/gpu as its process does; it and the benchmarks beside it are forgotten after."""
    ours = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {"starter", "gpu"}

    def forget() -> None:
        for name in [each for each in sys.modules if each.partition(".")[0] in ours]:
            monkeypatch.delitem(sys.modules, name)

    forget()
    for folder in ("benchmarks", "tools"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    yield lambda name: importlib.import_module(f"gpu.{name}")
    forget()


@pytest.fixture
def part(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs a part of these cases in this process, as if it were `memory` -> exit code, and what it wrote."""
    cases, calls = gpu("cases"), itertools.count()
    monkeypatch.setattr(cases, "fingerprint", lambda: "this code")

    def run(call: str = "", **functions: Any) -> tuple[int, dict[str, Any]]:
        setting = cases.Setting("cpu", True, tmp_path, call or str(next(calls)))
        monkeypatch.setattr(cases, "cases_of", lambda name, setting: functions)
        return cases.run_cases("memory", setting), json.loads((tmp_path / "memory.json").read_text())

    return run


def proof(*arguments: str | Path, limit: int = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": THREADS}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


def fails() -> dict[str, Any]:
    raise ValueError("a shape of 7")


def test_a_result_stays_and_what_failed_is_tried_again(part: Any) -> None:
    ran: list[str] = []

    def works(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: ran.append(name) or {"row": {"x": 1.5}}

    code, found = part(one=works("one"), two=fails, three=works("three"))
    assert code == 1 and ran == ["one", "three"] and found["listed"] == ["one", "two", "three"]
    assert found["cases"]["two"]["why"] == "ValueError: a shape of 7"
    assert "in fails" in found["cases"]["two"]["error"], "with its traceback"
    code, found = part(one=works("one"), two=works("two"), three=works("three"))
    assert code == 0 and ran == ["one", "three", "two"]
    assert [entry["result"]["row"] for entry in found["cases"].values()] == [{"x": 1.5}] * 3


@pytest.mark.slow
def test_other_code_runs_all_of_it_again(part: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part(one=lambda: {"row": {"x": 1}})
    monkeypatch.setattr(gpu("cases"), "fingerprint", lambda: "other code")
    assert part(one=lambda: {"row": {"x": 2}})[1]["cases"]["one"]["result"] == {"row": {"x": 2}}


@pytest.mark.slow
def test_after_an_error_of_cuda_another_process_goes_on(part: Any) -> None:
    def breaks() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    works = {"row": {}}
    code, found = part("a call", one=breaks, two=lambda: works)
    assert code == 3 and list(found["cases"]) == ["one"] and "running" not in found
    code, found = part("a call", one=breaks, two=lambda: works)
    assert code == 1 and found["cases"]["two"]["result"] == works, "and what broke is not tried again in this call"
    assert part("another", one=lambda: works, two=fails)[0] == 0


def test_too_little_memory_is_a_failure(part: Any) -> None:
    def large() -> dict[str, Any]:
        raise torch.cuda.OutOfMemoryError("tried to allocate 64 GiB")

    code, found = part(one=large)
    assert code == 1 and found["cases"]["one"]["why"].startswith("OutOfMemoryError: ")


def test_generate_that_is_out_of_memory_with_small_batches_too_has_no_result(gpu: Any, monkeypatch, tmp_path) -> None:
    rollouts, cases = gpu("rollouts"), gpu("cases")
    tried: list[int] = []

    class Peer(rollouts.Peer):
        def run(self, *_: Any) -> Any:
            tried.append(self.batch)
            raise torch.cuda.OutOfMemoryError("tried to allocate 64 GiB")

    monkeypatch.setattr(rollouts, "Peer", Peer)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        rollouts.generate_side("tiny", cases.Setting("cpu", True, tmp_path))
    assert tried == [8, 2]


def test_two_processes_with_half_of_the_weights_each_are_beside_one(gpu: Any, monkeypatch, tmp_path: Path) -> None:
    """Forks take the place of the processes that a GPU needs; a difference is a failure."""
    sharded, setting = gpu("sharded"), gpu("cases").Setting("cpu", True, tmp_path)

    def in_forks(model: str, lora: Any, setting: Any) -> list[dict[str, Any]]:
        return on_ranks(lambda ranks: sharded.trained(model, lora, setting, ranks))

    monkeypatch.setattr(sharded, "in_processes", in_forks)
    (case, *_) = sharded.cases(setting).values()
    row = case()["row"]
    assert row["off by"] < 1e-5 and row["held"] == pytest.approx(0.5, abs=0.05)

    def others(model: str, lora: Any, setting: Any) -> list[dict[str, Any]]:
        return [sharded.trained(model, None, setting, None)]

    monkeypatch.setattr(sharded, "in_processes", others)
    with pytest.raises(ValueError, match="off by"):
        case()


def test_a_run_with_vllm_says_that_it_is_missing(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job, cases = gpu("job"), gpu("cases")
    monkeypatch.setattr(cases, "find_spec", lambda name: None)
    (run,) = [case for name, case in job.cases(cases.Setting("cuda", False, tmp_path)).items() if "vLLM" in name]
    assert "vllm not installed" in run()["row"]["note"]


def test_what_was_stopped_comes_last_and_not_for_ever(gpu: Any) -> None:
    order = gpu("cases").order_of
    done = {"a": {"result": {}}, "b": {"stops": 1}, "c": {"stops": 2}, "d": {"error": "x"}, "f": {"call": "now"}}
    assert order(["a", "b", "c", "d", "e", "f"], done, "now") == ["e", "b", "d"]


def test_covered_time_counts_what_overlaps_once(gpu: Any) -> None:
    assert gpu("profile").covered([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7


def test_a_profile_counts_what_the_host_and_the_device_did(gpu: Any) -> None:
    """Of two steps: events as torch.profiler has them on a GPU."""

    def event(name: str, start: float, end: float, device: str) -> Any:
        return SimpleNamespace(
            name=name, device_type=f"DeviceType.{device}", time_range=SimpleNamespace(start=start, end=end)
        )

    def average(key: str, count: int, us: float, device: str) -> Any:
        return SimpleNamespace(key=key, count=count, self_device_time_total=us, device_type=f"DeviceType.{device}")

    host = ["aten::mm", "cudaLaunchKernel", "aten::item", "aten::_local_scalar_dense", "cudaStreamSynchronize"] * 2
    host += ["cudaGraphLaunch", "cudaDeviceSynchronize"]
    events = [event(name, 0, 1, "CPU") for name in host]
    events += [event("gemm", 0, 100, "CUDA"), event("Memcpy DtoH (Device -> Pageable)", 50, 150, "CUDA")]
    averages = [
        average("gemm", 2, 100.0, "CUDA"),
        average("Memcpy", 1, 7.0, "CUDA"),
        average("aten::mm", 2, 0.0, "CPU"),
    ]
    seen = SimpleNamespace(events=lambda: events, key_averages=lambda: averages)
    told = gpu("profile").told((seen, 300e-6), steps=2)
    row = told["row"]
    assert (row["launches"], row["waits"], row["items"], row["to host"], row["operations"]) == (1.5, 1, 1, 0.5, 3)
    assert row["device"] == pytest.approx(0.5) and row["ms"] == pytest.approx(0.15)
    assert told["kernels"] == [{"name": "gemm", "times": 1, "us": 50.0}, {"name": "Memcpy", "times": 0.5, "us": 3.5}]


def test_the_sequence_and_the_groups_have_as_many_tokens_as_they_say(gpu: Any, tmp_path: Path) -> None:
    learner, cases = gpu("learner"), gpu("cases")
    for name, _, shape, _, _ in learner.listed(cases.Setting("cuda", False, tmp_path)):
        assert str(shape.packed) in name
        samples = learner.batch_of(shape)
        assert sum(len(s.completion_ids) for s in samples) + shape.prompts * shape.prompt == shape.packed


@pytest.fixture
def parent(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs a part whose process is this script: it finds what is there in `found`, and has `leave` to write it."""
    main = gpu("__main__")
    (tmp_path / "process").mkdir()
    out = tmp_path / "memory.json"
    head = f"""
import json, sys, time
from pathlib import Path
out = Path({str(out)!r})
found = json.loads(out.read_text()) if out.exists() else {{"part": "memory", "listed": ["one", "two"], "cases": {{}}}}
def leave(**changes):
    out.with_suffix(".part").write_text(json.dumps(found | changes))
    out.with_suffix(".part").rename(out)
"""

    class Limited(subprocess.Popen):  # type: ignore[type-arg]
        """Its limit is over when the script says that something runs, however busy the machine is."""

        def wait(self, timeout: float | None = None) -> int:
            running = f'"running": "{STOPPED}"'
            if timeout is None:
                return super().wait()
            becomes(lambda: self.poll() is not None or (out.exists() and running in out.read_text()), within_s=120)
            if self.poll() is None:
                raise subprocess.TimeoutExpired("the part", timeout)
            return self.returncode

    def run(script: str) -> dict[str, Any]:
        (tmp_path / "process" / "__main__.py").write_text(head + script)
        monkeypatch.setattr(main, "HERE", tmp_path / "process")
        monkeypatch.setattr(main.subprocess, "Popen", Limited)
        options = argparse.Namespace(out=tmp_path, device="cpu", smoke=True, limit=5.0, call="now")
        main.run_part("memory", options)
        return json.loads(out.read_text())

    return run


def test_a_case_that_takes_too_long_is_stopped_and_named(parent: Any) -> None:
    found = parent(f"leave(running={STOPPED!r}); time.sleep(1000)")
    assert found["cases"] == {STOPPED: {"stops": 1, "why": "stopped at the part's limit of 5 s", "call": "now"}}
    assert parent(f"leave(running={STOPPED!r}); time.sleep(1000)")["cases"][STOPPED]["stops"] == 2


def test_after_a_crash_another_process_goes_on(parent: Any) -> None:
    found = parent("""
if "one" not in found["cases"]:
    leave(running="one")
    sys.exit(7)
leave(cases=found["cases"] | {"two": {"result": {}}})
""")
    assert found["cases"]["one"]["why"] == "its process ended with 7"
    assert found["cases"]["two"] == {"result": {}}


def test_what_ran_when_it_was_ended_from_outside_is_not_blamed(parent: Any) -> None:
    found = parent("""
if "running" in found: sys.exit("still there")
leave()
""")
    assert found["cases"] == {}


def test_the_table_has_what_is_there(tmp_path: Path) -> None:
    about = {"device": "NVIDIA H100", "torch": "2.13.0", "smoke": False}
    cases = {
        "one": {"result": {"row": {"tokens/s": 12345.6, "share": 0.25}}},
        "two": {"why": "ValueError: a shape of 7"},
        "three": {"result": {"rows": [{"share": 0.5}, {"note": "a|b"}]}},
    }
    found = {"part": "learner", "about": about, "listed": list(cases), "cases": cases}
    (tmp_path / "learner.json").write_text(json.dumps(found))
    printed = proof("--table", "--out", tmp_path).stdout.splitlines()
    assert printed[:4] == ["### learner", "", "device NVIDIA H100, torch 2.13.0", ""]
    assert printed[4:] == [
        "| case | tokens/s | share | note |",
        "| --- | --- | --- | --- |",
        "| one | 12,346 | 0.25 |  |",
        "| two |  |  | ValueError: a shape of 7 |",
        "| three |  | 0.5 |  |",
        "| three |  |  | a/b |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = proof("--part", "memory", "--out", tmp_path)
    assert done.returncode == 1 and "torch sees no CUDA GPU" in done.stderr and "it did not run" in done.stdout


def test_the_sizes_of_a_gpu_are_not_run_on_a_cpu() -> None:
    done = proof("--device", "cpu")
    assert done.returncode == 2 and "--smoke" in done.stderr


@pytest.mark.slow
def test_the_whole_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """And is there when it is called again."""
    done = proof("--smoke", "--device", "cpu", "--out", tmp_path, limit=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert written.keys() == {f"{part}.json" for part in PARTS}
    results = {part: json.loads((tmp_path / f"{part}.json").read_text())["cases"] for part in PARTS}
    assert all("result" in entry for cases in results.values() for entry in cases.values())
    assert results["step"]["groupwise"]["result"]["row"]["tokens/s"] > 0
    again = proof("--smoke", "--device", "cpu", "--out", tmp_path, "--part", "step", "--part", "curve", limit=120)
    assert again.returncode == 0 and "groupwise\n" not in again.stdout
