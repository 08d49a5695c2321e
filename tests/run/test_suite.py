"""What lm-eval and inspect-ai are told, and how their files are read; tests/slow/test_suites.py runs them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from groupwise.errors import ConfigError, DataError, EngineError
from groupwise.run.suite import SUITES, Metric, ServedVersion, SuiteResult, SuiteRun, Target, check_suite, serving
from wording import raises

TARGET = Target(model="starter", tokenizer="/models/starter", adapter="runs/toy/adapters/toy/v000004", version="toy@4")
ENDPOINT = ServedVersion(url="http://127.0.0.1:5000", key="secret", context=1024, target=TARGET)


def run_of(suite: str, output: Path, **options) -> SuiteRun:
    return SuiteRun(suite=suite, tasks=("arc_easy", "gsm8k"), output=output, python="/env/bin/python", **options)


def test_the_command_of_lm_eval(tmp_path):
    """Log-probabilities of token ids through /v1/completions; with --chat conversations, without a tokenizer."""
    suite = SUITES["lm-eval"]
    run = run_of("lm-eval", tmp_path, limit=20, folder=Path("mine"), arguments=("--log_samples",))
    words = suite.command(run, ENDPOINT)
    assert words[:5] == ["/env/bin/python", "-m", "lm_eval", "--model", "local-completions"]
    options = dict(zip(words[3::2], words[4::2], strict=False))
    assert options["--tasks"] == "arc_easy,gsm8k" and options["--limit"] == "20" and options["--include_path"] == "mine"
    model = dict(each.split("=") for each in options["--model_args"].split(","))
    assert model["base_url"] == "http://127.0.0.1:5000/v1/completions" and model["model"] == "toy@4"
    assert (model["tokenizer"], model["tokenized_requests"]) == ("/models/starter", "True")
    assert model["max_length"] == "1024" and words[-1] == "--log_samples"
    assert "secret" not in " ".join(words) and suite.environment(ENDPOINT) == {"OPENAI_API_KEY": "secret"}
    chat = suite.command(replace(run, chat=True), ENDPOINT)
    assert "local-chat-completions" in chat and "--apply_chat_template" in chat
    assert any("http://127.0.0.1:5000/v1/chat/completions" in word and "tokenizer" not in word for word in chat)


def test_the_command_of_inspect(tmp_path):
    suite = SUITES["inspect"]
    words = suite.command(run_of("inspect", tmp_path, limit=3, arguments=("--temperature", "0")), ENDPOINT)
    assert words[:6] == ["/env/bin/python", "-m", "inspect_ai", "eval", "arc_easy", "gsm8k"]
    assert words[words.index("--model") + 1] == "openai-api/groupwise/toy@4" and words[-2:] == ["--temperature", "0"]
    assert suite.environment(ENDPOINT) == {
        "GROUPWISE_BASE_URL": "http://127.0.0.1:5000/v1",
        "GROUPWISE_API_KEY": "secret",
    }


def test_the_results_of_lm_eval_are_read(tmp_path):
    """As lm-eval 0.4.13 writes them; what is no number is left out, a filter is a part of the name."""
    sums = {"name": "sums", "alias": "sums", "sample_len": 40, "acc,none": 0.275, "acc_stderr,none": 0.0715}
    text = {"alias": "text", "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A", "bleu,none": float("nan")}
    said = {"results": {"sums": sums, "text": text}, "n-samples": {"sums": {"original": 50, "effective": 40}}}
    (tmp_path / "toy@4").mkdir()
    (tmp_path / "toy@4" / "results_2026-11-23T18-00-44.json").write_text(json.dumps(said))
    assert SUITES["lm-eval"].read(tmp_path) == {
        "sums/acc": Metric(value=0.275, stderr=0.0715, samples=40),
        "text/exact_match/strict": Metric(value=0.5),
    }


def test_the_logs_of_inspect_are_read(tmp_path):
    """As inspect-ai 0.3.285 writes them; a task that broke off has no result."""
    metrics = {"accuracy": {"name": "accuracy", "value": 0.85}, "stderr": {"name": "stderr", "value": 0.08}}
    score = {"name": "match", "scored_samples": 20, "metrics": metrics}
    log = {"status": "success", "eval": {"task": "sums"}, "results": {"scores": [score]}}
    (tmp_path / "a.json").write_text(json.dumps(log))
    expected = {"sums/match/accuracy": Metric(value=0.85, stderr=0.08, samples=20)}
    assert SUITES["inspect"].read(tmp_path) == expected
    (tmp_path / "b.json").write_text(json.dumps(log | {"status": "error", "error": {"message": "no such file"}}))
    with raises(DataError):
        SUITES["inspect"].read(tmp_path)
    (tmp_path / "b.json").write_text("{")
    with raises(DataError):
        SUITES["inspect"].read(tmp_path)


def test_a_result_is_kept_as_json():
    result = SuiteResult(suite="lm-eval", release="0.4.13", metrics={"sums/acc": Metric(value=0.5, samples=4)}, limit=4)
    kept = result.as_json()
    assert json.loads(json.dumps(kept)) == kept
    assert kept["metrics"] == {"sums/acc": {"value": 0.5, "samples": 4}} and kept["created"].endswith("+00:00")


def test_an_endpoint_that_does_not_come_up_is_told(tmp_path):
    target = Target(model=str(tmp_path / "no-model"), tokenizer="starter")
    with raises(EngineError), serving(target, state=tmp_path):
        raise AssertionError("it is not served")


def test_a_python_without_the_suite_is_refused(tmp_path):
    with raises(ConfigError):
        check_suite(SuiteRun(suite="inspect", tasks=("a",), output=tmp_path, python=str(tmp_path / "nowhere")))
