"""The engine over vLLM itself, on a CPU, in float32.

    make vllm                      installs vLLM in .venv-vllm (once) and runs this: about six minutes on two cores
    pytest -m slow tests/vllm_server      the same without the installation

One server, started by `groupwise vllm-serve`, serves all tests; it is killed in the midst of one of them, and the
command that keeps it in the last.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM

from groupwise.config.engine import VllmConfig
from groupwise.config.lora import LoraSpec
from groupwise.config.run import load_config
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm.engine import VllmEngine
from groupwise.engine.vllm.handshake import linear_names
from groupwise.engine.vllm.server import free_port
from groupwise.errors import EngineError, GrammarError
from groupwise.model.load import LoadedModel, load_model, wrap_model
from groupwise.model.reply_formats.known import format_of
from groupwise.run.loop import run_loop
from groupwise.tasks.structured import reply_grammar
from groupwise.train.learner import Learner
from groupwise.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    PolicyVersion,
    Sample,
    SamplingParams,
    SamplingRequest,
)
from processes import becomes, descendants
from seed_page import ROLLOUTS, SCORED, serving
from wording import raises

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
RECIPE = ROOT / "configs" / "arithmetic.yaml"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))}
BASE, FIRST = PolicyVersion.base(), PolicyVersion("math-correctness", 1)
CLOSE = 1e-4  # nats
VOWELS = """
def vowels(completions, **columns):
    return [sum(each[0]["content"].count(vowel) for vowel in "aeiou") / 10 for each in completions]
"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
THINK = "What is 47 + 138? Think step by step."

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm: `make vllm` installs it"),
    pytest.mark.filterwarnings("ignore"),
]


@dataclass(frozen=True)
class Served:
    url: str
    command: subprocess.Popen[bytes]
    log: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`groupwise vllm-serve`, up."""
    port, log = free_port("127.0.0.1"), tmp_path_factory.mktemp("vllm") / "server.log"
    options = [f"vllm.python={PYTHON}", f"vllm.port={port}", f"vllm.log={log}", f"vllm.environment={ENVIRONMENT}"]
    command = subprocess.Popen(
        [sys.executable, "-m", "groupwise", "vllm-serve", str(RECIPE), "dtype=float32", "device=cpu", *options]
    )
    served = Served(f"http://127.0.0.1:{port}", command, log)
    try:
        assert becomes(lambda: is_up(served.url), within_s=300), log.read_text()[-2000:]
        yield served
    finally:
        command.terminate()
        command.wait(60)


def is_up(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.fixture
def attach(served: Served, starter: LoadedModel) -> Iterator[Callable[..., VllmEngine]]:
    with ExitStack() as opened:

        def make(base: LoadedModel = starter, **options: Any) -> VllmEngine:
            targets = linear_names(base.model, "all-linear")
            reference = LocalEngine(base, max_rows=1, prefix_cache_mb=0)
            engine = VllmEngine(VllmConfig(urls=(f"{served.url}/v1",)), base, reference, targets=targets, **options)
            opened.callback(engine.close)
            return engine

        yield make


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    """Three versions of an adapter of rank 16 on every linear layer, whole nats apart."""
    made = {}
    for number in (1, 2, 3):
        learner = Learner(load_model("starter", device="cpu", dtype="float32"), lora=LoraSpec(), seed=number)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in learner.parameters:
                parameter.copy_(0.07 * torch.randn(parameter.shape, generator=generator))
        path = tmp_path_factory.mktemp("adapter")
        learner.save_adapter(path)
        made[PolicyVersion("math", number)] = path
    return made


def request(length: int, seed: int, version: PolicyVersion, *, n: int = 2) -> SamplingRequest:
    """A prompt of so many tokens; those of one length begin alike, over several blocks of the prefix cache."""
    prompt = (*((31 * i + 7) % 1000 for i in range(length - 1)), seed % 1000)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=seed, ignore_eos=True)
    return SamplingRequest(prompt_ids=prompt, n=n, version=version, params=params)


def off(engine: VllmEngine, judge: LocalEngine, requests: list[SamplingRequest]) -> dict[PolicyVersion, float]:
    """The largest difference between engine's and trainer's log-probabilities of a token, by version."""
    worst: dict[PolicyVersion, float] = {}
    for asked, group in zip(requests, engine.generate(requests), strict=True):
        for each in group:
            scored = judge.score(asked.prompt_ids, each.token_ids, asked.version, temperature=asked.params.temperature)
            gap = max(abs(a - b) for a, b in zip(each.logprobs, scored, strict=True))
            worst[asked.version] = max(worst.get(asked.version, 0.0), gap)
    return worst


def test_logprobs_are_the_trainers_for_the_base_and_three_versions_in_flight_together(attach, adapters, starter):
    engine, judge = attach(), LocalEngine(starter, max_rows=1)
    (found,) = engine.servers.values()
    print("the server mixes up base and adapters:", found.mixes)
    for version, path in adapters.items():
        engine.load(version, path)
        judge.load(version, path)
        both = (BASE, version)
        for _ in range(2):  # the second time from the prefix cache
            worst = off(engine, judge, [request(length, i, both[i % 2]) for i in range(12) for length in (5, 300)])
            print({str(each): f"{gap:.1e}" for each, gap in worst.items()})
            assert worst.keys() == set(both) and max(worst.values()) < CLOSE
    everything = [BASE, *adapters]
    worst = off(engine, judge, [request(300, i, everything[i % 4]) for i in range(24)])
    assert len(worst) == 4 and max(worst.values()) < CLOSE
    judge.close()


def test_a_hot_swap_under_64_concurrent_requests_mixes_nothing(attach, adapters, starter):
    engine, judge = attach(), LocalEngine(starter, max_rows=1)
    first, second = list(adapters)[:2]
    for version in (first, second):
        judge.load(version, adapters[version])
    engine.load(first, adapters[first])
    old = [request(140, i, first, n=1) for i in range(64)]
    futures = engine.submit(old)
    engine.load(second, adapters[second])
    new = [request(140, i, second, n=1) for i in range(64)]
    futures += engine.submit(new)
    engine.unload(first)
    for asked, future in zip([*old, *new], futures, strict=True):
        (each,) = future.result(300)
        scored = judge.score(asked.prompt_ids, each.token_ids, asked.version, temperature=asked.params.temperature)
        assert max(abs(a - b) for a, b in zip(each.logprobs, scored, strict=True)) < CLOSE
    judge.close()


def test_versions_take_over_completions_under_way(attach, adapters, starter):
    """In-flight updates: every token has the log-probability of a fresh forward of the version that drew it."""
    engine, judge = attach(in_flight_updates=True), LocalEngine(starter, max_rows=1)
    first, second = list(adapters)[:2]
    for version in (first, second):
        engine.load(version, adapters[version])
        judge.load(version, adapters[version])
    params = SamplingParams(max_tokens=200, temperature=0.8, ignore_eos=True)
    asked = [
        SamplingRequest(prompt_ids=request(140, i, BASE).prompt_ids, n=2, params=replace(params, seed=i))
        for i in range(6)
    ]
    futures = engine.submit(asked)

    def heard() -> int:
        return min((len(row._ids) for row in list(engine._following)), default=0)

    assert becomes(lambda: heard() >= 10, within_s=300)
    engine.replace(BASE, first, recompute=True)
    assert becomes(lambda: heard() >= 60, within_s=300)
    engine.replace(first, second, recompute=True)
    for each, future in zip(asked, futures, strict=True):
        for said in future.result(300):
            assert len(said.token_ids) == 200 and [version for version, _ in said.spans] == [BASE, first, second]
            fresh: list[float] = []
            for version, count in said.spans:
                scored = judge.score(each.prompt_ids, said.token_ids, version, temperature=0.8)
                fresh += scored[len(fresh) : len(fresh) + count]
            assert max(abs(a - b) for a, b in zip(said.logprobs, fresh, strict=True)) < CLOSE
    assert engine.generate([request(40, 1, BASE, n=1)])[0][0].version == second
    judge.close()


def test_structured_outputs_are_text_of_the_grammar_and_are_trained(attach, starter):
    """Of every kind: what the local engine's matchers accept, with the log-probabilities that the trainer computes."""
    engine, judge = attach(), LocalEngine(starter, max_rows=1)
    learner = Learner(load_model("starter", device="cpu", dtype="float32"), lora=LoraSpec())
    form = format_of(starter.tokenizer)
    call = reply_grammar(form, [TOOL], starter.tokenizer, choice="required")
    either = reply_grammar(form, [TOOL], starter.tokenizer, answer=Grammar.of_json({"type": "boolean"}))
    assert call is not None and either is not None
    texts = {
        Grammar.of_json(SCHEMA): lambda text: Draft202012Validator(SCHEMA).is_valid(json.loads(text)),
        Grammar.of_json({"allOf": [{"type": "integer", "maximum": 900}, {"minimum": 3, "multipleOf": 5}]}): (
            lambda text: 3 <= int(text) <= 900 and int(text) % 5 == 0
        ),
        Grammar.of_json(): lambda text: isinstance(json.loads(text), dict),
        Grammar.regex(r"\d/[a-c]{4}"): lambda text: re.fullmatch(r"\d/[a-c]{4}", text),
        Grammar.choice(["yes", 'no "z"']): lambda text: text in ("yes", 'no "z"'),
        Grammar.lark('root ::= "a" [bc]'): lambda text: text in ("ab", "ac"),
        call: lambda text: "<tool_call>" in text,
        either: lambda text: text in ("true", "false") or "<tool_call>" in text,
        Grammar(GrammarKind.CHOICE, '["yes"]', thoughts="optional"): lambda text: text.endswith("yes"),
        Grammar(GrammarKind.FREE, thoughts="begun", thought_tokens=5): lambda text: "</think>" in text,
        Grammar(GrammarKind.FREE, thoughts="optional", thought_tokens=5): lambda text: (
            not text.startswith("<think>") or "</think>" in text
        ),
    }
    for i, (grammar, is_valid) in enumerate(texts.items()):
        params = SamplingParams(max_tokens=64, temperature=0.8, seed=i, grammar=grammar)
        asked = SamplingRequest(prompt_ids=(5, 6, 7, 8, 9), n=4, params=params)
        matcher = judge.prepare(grammar).result()
        for each in engine.generate([asked])[0]:
            ids = each.token_ids
            assert matcher.deep_copy().validate_tokens(list(ids)) == len(ids), (grammar, each.text)
            assert each.finish_reason is FinishReason.LENGTH or is_valid(each.text), (grammar, each.text)
            masked = {"completion_ids": ids, "mask": (1,) * len(ids), "kept": each.kept}
            (trained,) = learner.forward(
                [Sample(prompt_ids=asked.prompt_ids, advantage=0.0, **masked)], temperature=0.8
            )
            assert max(abs(a - b) for a, b in zip(each.behaviour_logprobs, trained, strict=True)) < CLOSE
    for wrong in (Grammar.regex("(a"), Grammar.of_json({"type": "strin"})):  # as vLLM itself says it
        params = SamplingParams(grammar=wrong)
        with raises(GrammarError):
            engine.generate([SamplingRequest(prompt_ids=(5, 6), params=params)])
    judge.close()


def test_a_stale_server_is_refused(attach):
    changed = load_model("starter", device="cpu", dtype="float32")
    with torch.no_grad():
        for parameter in changed.model.parameters():
            parameter.mul_(1.01)
    with raises(EngineError):
        attach(wrap_model(changed.model, changed.tokenizer, name="starter"))


def test_a_server_killed_in_the_midst_is_back_within_a_minute_and_nothing_is_lost(served, attach, adapters, starter):
    engine, judge = attach(), LocalEngine(starter, max_rows=1)
    (version, path), *_ = adapters.items()
    engine.load(version, path)
    judge.load(version, path)
    asked = [request(140, i, (BASE, version)[i % 2]) for i in range(48)]
    futures = engine.submit(asked)
    time.sleep(0.5)
    (api,) = [pid for pid in descendants(served.command.pid) if b"api_server" in cmdline(pid)]
    os.kill(api, signal.SIGKILL)
    killed = time.monotonic()
    assert becomes(lambda: engine.servers[served.url] is None, within_s=10)
    for each, future in zip(asked, futures, strict=True):
        for completion in future.result(300):
            scored = judge.score(each.prompt_ids, completion.token_ids, each.version, temperature=0.8)
            assert max(abs(a - b) for a, b in zip(completion.logprobs, scored, strict=True)) < CLOSE
    print(f"all 48 requests were answered {time.monotonic() - killed:.0f} s after the kill")
    judge.close()


def test_the_arithmetic_recipe_learns_as_with_the_local_engine(served, tmp_path):
    short = ["train.steps=12", "rollout.prompts_per_step=16", "train.warmup_steps=2", "eval.every=0", "dtype=float32"]
    short += ["eval.data.args.n=64", "device=cpu", "checkpoint.every=0", f"output_dir={tmp_path}"]
    gained = {}
    for engine, more in (("local", []), ("vllm", [f"vllm.urls=[{served.url}]"])):
        result = run_loop(load_config(RECIPE, [*short, *more, f"engine={engine}", f"name={engine}"]))
        steps = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        gaps = [each["mismatch/logprob_diff_max"] for each in steps if "mismatch/logprob_diff_max" in each]
        rewards = [each["reward/mean"] for each in steps if "reward/mean" in each]
        gained[engine] = sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3
        print(engine, "rewards", [round(each, 3) for each in rewards], "largest mismatch", max(gaps))
        assert max(gaps) < CLOSE
    assert gained["vllm"] > 0.05 and abs(gained["vllm"] - gained["local"]) < 0.2, gained


def test_the_live_server_goes_from_rollouts_to_a_swapped_adapter_over_vllm(served, starter, tmp_path):
    """The guide of the feedback loop, with another engine."""
    judge = LocalEngine(starter, max_rows=1)
    options = ["--engine", "vllm", "--set", f"vllm.urls=[{served.url}]", "--dtype", "float32", "--device", "cpu"]
    with serving(tmp_path, *options) as live:
        batch = live.post("/v1/completions/batch", {**json.loads(ROLLOUTS), "return_token_ids": True, "logprobs": True})
        assert len(batch["completions"]) == 16
        for each in batch["completions"]:
            scored = judge.score(each["prompt_token_ids"], each["token_ids"], BASE, temperature=0.9)
            assert max(abs(a - b) for a, b in zip(each["logprobs"], scored, strict=True)) < CLOSE
        job = live.ended(live.post("/v1/train/grpo", SCORED)["job_id"])
        assert (job["state"], job["adapter_version"]) == ("completed", "math-correctness@1"), job
        answer = live.chat(logprobs=True, return_token_ids=True, temperature=0.7, top_p=0.9)
        assert answer["system_fingerprint"] == "math-correctness@1"
        judge.load(FIRST, next(tmp_path.glob("**/adapters/math-correctness/*1")))
        (choice,) = answer["choices"]
        scored = judge.score(answer["prompt_token_ids"], choice["token_ids"], FIRST, temperature=0.7)
        said = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert said == pytest.approx(scored, abs=CLOSE)
        asked = {"messages": [{"role": "user", "content": THINK}], "stream": True, "temperature": 0}
        with httpx2.stream("POST", f"{live.url}/v1/chat/completions", json=asked, timeout=120) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]" and len(lines) > 12
    judge.close()


def test_nothing_is_left_when_the_command_is_killed(served):
    below = descendants(served.command.pid)
    assert any(b"EngineCore" in cmdline(pid) for pid in below)
    served.command.kill()
    served.command.wait()
    assert becomes(lambda: not any(cmdline(pid) for pid in below), within_s=20)


@pytest.mark.parametrize(
    "form", [None, "{regex: '[0-9]{1,3}'}", "{json: {type: integer, maximum: 200, multipleOf: 2}}"]
)
def test_a_run_with_vllm_in_its_own_process(tmp_path, form):
    """By vLLM's interpreter, whose environment has Groupwise too; also where all completions are of a grammar."""
    short = ["train.steps=2", "train.warmup_steps=1", "rollout.prompts_per_step=8", "eval=null", "dtype=float32"]
    short += [] if form is None else [f"rollout.structured_outputs={form}"]
    where = ["device=cpu", f"run_dir={tmp_path / 'run'}", "engine=vllm", "vllm.mode=colocate"]
    words = [str(PYTHON), "-m", "groupwise", "run", str(RECIPE), *short, *where]
    done = subprocess.run(words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [each["mismatch/logprob_diff_max"] for each in steps if "mismatch/logprob_diff_max" in each]
    assert len(gaps) == 2 and max(gaps) < CLOSE
    lines = [line for file in (tmp_path / "run" / "rollouts").glob("*.jsonl") for line in file.read_text().splitlines()]
    turns = [each["turns"][0] for line in lines for each in json.loads(line)["rollouts"]]
    ended = [each["text"].rpartition("</think>")[2].strip() for each in turns if each["finish_reason"] == "stop"]
    assert ended
    if form is not None:
        assert all(re.fullmatch(r"[0-9]{1,3}" if "regex" in form else r"-?[0-9]*[02468]", text) for text in ended)
    print("colocated, largest mismatch", max(gaps))


def test_a_run_whose_versions_are_merged(tmp_path):
    """With a server of its own, which serves no adapters (`vllm.push: merged`)."""
    short = ["train.steps=3", "train.warmup_steps=1", "rollout.prompts_per_step=8", "eval=null", "vllm.push=merged"]
    where = ["engine=vllm", f"vllm.python={PYTHON}", f"vllm.environment={ENVIRONMENT}", f"run_dir={tmp_path / 'run'}"]
    words = [sys.executable, "-m", "groupwise", "run", str(RECIPE), *short, "dtype=float32", "device=cpu", *where]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [each["mismatch/logprob_diff_max"] for each in steps if "mismatch/logprob_diff_max" in each]
    print("merged, largest mismatch", max(gaps))
    assert len(gaps) == 3 and max(gaps) < CLOSE


def test_a_run_that_trains_all_parameters(tmp_path, starter):
    """With a server of its own, which reads every version whole. The embeddings are not tied: this is a CPU."""
    torch.manual_seed(0)
    config = starter.model.config.to_dict() | {"tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(type(starter.model.config)(**config)).save_pretrained(tmp_path / "model")
    starter.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "vowels.py").write_text(VOWELS)
    short = ["train.lora=null", "train.steps=3", "train.warmup_steps=1", "rollout.prompts_per_step=8", "eval=null"]
    what = [f"model={tmp_path / 'model'}", "rewards=[vowels:vowels]", "dtype=float32", "device=cpu"]
    where = ["engine=vllm", f"vllm.python={PYTHON}", f"vllm.environment={ENVIRONMENT}", f"run_dir={tmp_path / 'run'}"]
    words = [sys.executable, "-m", "groupwise", "run", str(RECIPE), *short, *what, *where]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [each["mismatch/logprob_diff_max"] for each in steps if "mismatch/logprob_diff_max" in each]
    assert len(gaps) == 3 and max(gaps) < CLOSE and "weights go to 1 vLLM server by gloo" in done.stdout + done.stderr
    print("all parameters, largest mismatch", max(gaps))


def cmdline(pid: int) -> bytes:
    """Of a process; empty when it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
