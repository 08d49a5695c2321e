"""The commands around a run: help, errors, check, eval, and the adapter store."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import groupwise
from cli_project import cli, row, save_model, write_rows
from groupwise.cli.main import PANELS, app
from groupwise.model.load import load_model
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.store.tracking import read_metrics
from wording import wording


@pytest.fixture(scope="module")
def base(make_base):
    return make_base("qwen3", dtype=torch.float32, context=256)


@pytest.fixture(scope="module")
def adapter(base, make_adapter):
    return make_adapter(base, seed=1)


@pytest.fixture
def store(project, adapter, model_dir):
    """Two versions of `toy` in the run runs/toy-1, the second active."""
    opened = AdapterStore(project.folder / "runs" / "toy-1" / "adapters")
    info = Provenance(
        base_model=str(model_dir), base_hash=load_model(str(model_dir)).hash, metrics={"reward/mean": 0.5}
    )
    for _ in range(2):
        version = opened.publish(
            "toy", lambda directory: shutil.copytree(adapter, directory, dirs_exist_ok=True), info=info
        )
        opened.activate(version)
    return opened


# ---- the frame ----


def test_help_names_the_commands_and_the_exit_codes():
    result = cli("--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for word in ("run", "check", "eval", "adapters", "doctor", "75 temporary", "130 interrupted"):
        assert word in text


def test_help_is_in_the_order_of_a_users_day():
    """Every command is in a panel, and what one begins with is in front."""
    named = [name for names in PANELS.values() for name in names]
    assert sorted(named) == sorted(typer.main.get_command(app).commands)
    shown = re.findall(r"^│ ([a-z-]+) {2,}\S", cli("--help").stdout, re.MULTILINE)
    assert [name for name in shown if name in named] == named


@pytest.mark.parametrize("command", ["run", "check", "eval", "doctor", "adapters list", "adapters export"])
def test_every_command_has_help(command):
    result = cli(*command.split(), "--help")
    assert result.exit_code == 0 and "--json" in result.stdout


def test_version_and_the_module_that_is_the_command():
    assert cli("--version").stdout == f"groupwise {groupwise.__version__}\n"
    ran = subprocess.run([sys.executable, "-m", "groupwise", "--version"], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, f"groupwise {groupwise.__version__}\n")


def test_usage_errors_exit_with_2():
    assert cli("run").exit_code == 2
    assert cli("run", "x.yaml", "--no-such-option").exit_code == 2
    assert cli("nonsense").exit_code == 2


def test_an_error_is_a_message_and_as_json_an_object(tmp_path):
    missing = tmp_path / "nothing.yaml"
    plain = cli("run", missing)
    assert plain.exit_code == 2 and plain.stdout == ""
    assert "Traceback" not in plain.stderr
    wording(plain.stderr)
    as_json = cli("run", missing, "--json")
    error = json.loads(as_json.stdout)["error"]
    assert as_json.exit_code == 2 and error["code"] == "invalid_config" and str(missing) in error["message"]


def test_debug_shows_where_an_error_comes_from(tmp_path):
    result = cli("run", tmp_path / "nothing.yaml", "--debug")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "ConfigError" in result.stderr


# ---- check ----


def files_under(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def parts(page: str) -> dict[str, str]:
    """The parts of the page that `groupwise check` prints, by their heads, without what depends on completions."""
    found: dict[str, str] = {}
    for line in page.strip().rpartition("\n\n")[2].splitlines():
        if line.startswith("warning:"):
            break
        if head := line[:11].strip():
            found[head] = line[11:].strip()
        else:
            found[[*found][-1]] += " " + line.strip()
    return {head: re.sub(r"about \d+ tokens", "about N tokens", text) for head, text in found.items()}


def test_check_says_what_a_run_would_do_and_writes_nothing(project):
    before = files_under(project.folder)
    result = cli("check", project.config)
    assert result.exit_code == 0, result.stderr
    assert "What is 0?" in result.stdout
    page = parts(result.stdout)
    for head in ("it runs", "a step", "the run", "sampling", "loss", "advantage"):
        wording(page[head])
    wording(re.sub(r"[\d.,]+ [KMGT]iB", "N", page["memory"]))
    wording(re.sub(r"norm [\d.e-]+", "norm N", page["one step"]))
    wording(result.stderr)
    assert files_under(project.folder) == before


@pytest.mark.filterwarnings("ignore:.*in packed rows.*:UserWarning")
def test_check_of_a_model_without_attention(project, make_base):
    model = save_model(make_base("mamba", dtype=torch.float32, context=256), project.folder / "mamba")
    result = cli("check", project.config, f"model={model}", "--json")
    assert result.exit_code == 0, result.stderr
    told = result.stderr
    assert told.index("MambaForCausalLM") < told.index("loading ...")
    wording(next(line for line in told.splitlines() if line.startswith("MambaForCausalLM")).partition(" (")[0])
    report = json.loads(result.stdout)
    assert report["family"]["ways"]["why_not_cached"] and report["memory_bytes"]["kv_cache"] == 0


def test_check_as_json(project):
    result = cli("check", project.config, "algo.policy_loss=dapo", "train.steps=8", "--json")
    report = json.loads(result.stdout)
    assert len(report["completions"]) == 16 and all(0 <= each["reward"] <= 1 for each in report["completions"])
    assert report["step"]["completions"] == 6 and report["step"]["epochs"] == 2.0
    assert report["loss"]["clip_high"] == 0.28
    parts = ("process", "weights", "merged", "reference", "trained", "kv_cache", "vllm", "activations")
    assert report["memory_bytes"]["total"] == sum(report["memory_bytes"][part] for part in parts)
    assert report["model"]["trained"] < report["model"]["parameters"]
    assert report["family"]["ways"]["why_not_packed"] is None and report["family"]["tool_calls"] == "hermes"
    tried = report["one_step"]
    assert (tried["version"], tried["made_up"]) == ("toy@1", False) and tried["grad_norm"] > 0


def test_check_finds_what_only_the_first_publish_would(project, monkeypatch):
    def fails(self, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("groupwise.train.learner.Learner.save_adapter", fails)
    result = cli("check", project.config)
    assert result.exit_code != 0
    wording(result.stderr)


def test_check_tries_a_step_where_all_rewards_are_equal_and_where_all_parameters_are_trained(project):
    report = json.loads(cli("check", project.config, "rewards[0]=my_rewards:constant", "--json").stdout)
    assert report["one_step"]["made_up"] and report["one_step"]["grad_norm"] > 0
    report = json.loads(cli("check", project.config, "train.lora=null", "dtype=float32", "--json").stdout)
    assert report["one_step"]["version"] == "toy@1" and report["one_step"]["grad_norm"] > 0


def test_check_warns_of_a_reward_that_says_nothing(project):
    report = json.loads(cli("check", project.config, "rewards[0]=my_rewards:constant", "--json").stdout)
    told = [warning for warning in report["warnings"] if "0.5" in warning]
    assert told
    for warning in told:
        wording(warning)
    both = json.loads(cli("check", project.config, "rewards[1]=my_rewards:constant", "--json").stdout)
    wording(next(warning for warning in both["warnings"] if "'constant'" in warning))


def test_check_says_what_junk_is_paid_like_an_answer(project):
    """By the rewards together: where being right counts more than what junk can have, nothing is said."""
    (project.folder / "my_rewards.py").write_text(
        "def mentions(completions, answer, **columns):\n"
        "    return [float(a in c[0]['content']) for c, a in zip(completions, answer)]\n\n\n"
        "def exact(completions, answer, **columns):\n"
        "    return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n\n\n"
        "async def slow(completions, answer, **columns):\n"
        "    return mentions(completions, answer)\n"
    )

    def warnings(rewards: str) -> list[str]:
        checked = cli("check", project.config, f"rewards={rewards}", "eval=null", "--json")
        return json.loads(checked.stdout)["warnings"]

    (paid,) = [warning for warning in warnings("[my_rewards:mentions]") if "'prompt copied' ('What is 0?')" in warning]
    wording(paid)
    fine = ("[my_rewards:exact]", "[my_rewards:exact,{function: my_rewards:mentions, weight: 0.5}]")
    for rewards in (*fine, "[my_rewards:slow]"):  # the last might cost money
        assert not [warning for warning in warnings(rewards) if warning.startswith(paid.partition(":")[0])]


def test_a_run_evaluates_by_rewards_of_its_own(project):
    """The best version is the best by them, and `groupwise eval` counts by them too; names do not clash."""
    (project.folder / "my_rewards.py").write_text(
        "def vowels(completions, **columns):\n"
        "    return [float(len(c[0]['content'])) for c in completions]\n\n\n"
        "def never(completions, needed, **columns):\n"
        "    return [0.25] * len(completions)\n"
    )
    own = "eval.rewards=[{function: my_rewards:never, args: {needed: 1}}, {function: my_rewards:vowels, weight: 0}]"
    ended = cli("run", project.config, own, "eval.best=greedy", "run_dir=out", "train.steps=2")
    assert ended.exit_code == 0, ended.output
    records = read_metrics(Path("out/metrics.jsonl"))
    evaluated = [each for each in records if "eval/greedy/reward" in each]
    assert len(evaluated) == 2 and all(each["eval/greedy/reward"] == 0.25 for each in evaluated)
    assert all(each["eval/greedy/training_reward"] > 0.25 for each in evaluated)
    again = cli("eval", "out/config.yaml", "--mode", "greedy", "--json")
    assert json.loads(again.stdout)["metrics"]["eval/greedy/reward"] == 0.25
    missing = cli("run", project.config, "eval.rewards=[my_rewards:never]")
    assert missing.exit_code == 2
    wording(missing.stderr)


def test_check_says_whether_the_reward_recognises_the_datasets_own_answer(project):
    """Where every trial completion gets the same, that tells a task that is hard from a reward that is wrong."""
    rows = [{"prompt": f"What is {i} + {i}?", "answer": f"twice {i}"} for i in range(4)]
    write_rows(project.folder / "prompts.jsonl", rows)

    def first_warning(reward: str) -> str:
        return json.loads(cli("check", project.config, f"rewards[0]={reward}", "--json").stdout)["warnings"][0]

    hard = first_warning("groupwise.rewards.text:exact_match")
    assert "'twice 0', gets 1 " in hard
    wording(hard)
    wrong = first_warning("my_rewards:constant")
    assert "'twice 0', gets no more than 0.5 " in wrong
    wording(wrong)
    write_rows(project.folder / "prompts.jsonl", [{"prompt": f"What is {i} + {i}?", "answer": 2 * i} for i in range(4)])
    number = first_warning("my_rewards:constant")
    assert "str(answer)" in number
    wording(number)


@pytest.mark.filterwarnings("always:train.attention flex cannot be used")
def test_check_warns_of_attention_that_cannot_be_used(project):
    result = cli("check", project.config, "train.attention=flex", "--json")
    wording(next(warning for warning in json.loads(result.stdout)["warnings"] if "train.attention" in warning))
    said = " ".join(result.stderr.split())
    assert "warning: train.attention flex cannot be used" in said and "training uses merged instead" in said


def test_check_warns_of_prompts_that_are_too_long_or_not_held_out(project):
    long = {"prompt": [{"role": "user", "content": "7 " * 300}], "answer": "7", "kind": "odd"}
    write_rows(project.folder / "prompts.jsonl", [row(0), long])
    write_rows(project.folder / "held_out.jsonl", [row(0), row(1)])
    report = json.loads(cli("check", project.config, "--json").stdout)
    fill, seen = (warning for warning in report["warnings"] if warning.startswith("1 of 2"))
    assert "256" in fill and "evaluation" in seen
    wording(fill)
    wording(seen)


def test_check_counts_prompts_that_are_longer_than_they_may_be(project):
    long = {"prompt": [{"role": "user", "content": "7 " * 40}], "answer": "7", "kind": "odd"}
    write_rows(project.folder / "prompts.jsonl", [row(0), long])
    report = json.loads(cli("check", project.config, "rollout.max_prompt_tokens=40", "--json").stdout)
    (said,) = (warning for warning in report["warnings"] if "rollout.max_prompt_tokens = 40" in warning)
    assert said.startswith("1 of 2 ") and report["longest_prompt"] <= 40
    wording(said)


def test_check_says_how_sampling_and_training_go_together(project):
    on_policy = cli("check", project.config, "train.passes=2", "train.minibatches=2").stdout
    for head in ("a step", "the run", "sampling"):
        wording(parts(on_policy)[head])
    wording(next(each for each in on_policy.split("warning: ")[1:] if "train.minibatches" in each))
    for setting in ("rollout.weight_sync_interval=2", "rollout.max_staleness=2"):
        sampling = parts(cli("check", project.config, setting).stdout)["sampling"]
        assert "2 steps" in sampling
        wording(sampling)


def test_what_the_loss_does_not_account_for_is_said_by_check_and_before_a_run(project):
    cases = {
        ("algo.anchor=old", "rollout.max_staleness=1"): "anchor old ",
        ("algo.anchor=old", "rollout.replay.size=4"): "anchor old ",
        ("algo.policy_loss=importance_sampling", "train.passes=2"): "the surrogate unclipped ",
        ("algo.policy_loss=reinforce", "train.passes=2"): "the surrogate reinforce ",
    }
    warning = ""
    for overrides, of in cases.items():
        warnings = json.loads(cli("check", project.config, *overrides, "--json").stdout)["warnings"]
        (warning,) = (each for each in warnings if each.startswith(of))
        wording(warning)
    plain = ("algo.policy_loss=gspo", "rollout.max_staleness=1")  # corrected by default
    assert not any(
        "anchor" in each for each in json.loads(cli("check", project.config, *plain, "--json").stdout)["warnings"]
    )
    ran = cli("run", project.config, "algo.policy_loss=reinforce", "train.passes=2", "train.steps=1")
    assert f"warning: {warning}" in " ".join((ran.stdout + ran.stderr).split())


def test_check_names_all_problems_at_once(project):
    result = cli("check", project.config, "rewards[0]=my_rewards:vowel", "data.source=promts.jsonl", "algo.clip_low=-1")
    assert result.exit_code == 2
    wording(result.stderr)


# ---- eval ----


def test_eval_of_the_base_model(project):
    result = cli("eval", project.config, "--mode", "greedy", "--json")
    report = json.loads(result.stdout)
    assert report["prompts"] == 4 and "no adapter" in report["policy"]
    rewards = {"eval/greedy/reward", "eval/greedy/odd/reward", "eval/greedy/even/reward"}
    assert set(report["metrics"]) == {*rewards, "eval/greedy/reward_stderr", "eval/greedy/failed"}


def test_eval_of_an_adapter_however_it_is_named(project, store, adapter):
    names = (adapter, "runs/toy-1/toy@2", "runs/toy-1/toy", "runs/toy-1", "toy@2", "toy", store.path(store.active))
    reports = [json.loads(cli("eval", project.config, "--adapter", name, "--json").stdout) for name in names]
    base = json.loads(cli("eval", project.config, "--json").stdout)
    assert all(report["metrics"] == reports[0]["metrics"] for report in reports)  # all are the same adapter
    assert reports[0]["metrics"] != base["metrics"]


def test_eval_prints_a_table(project, store):
    result = cli("eval", project.config, "--adapter", "toy@1")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:3] == ["mean", "reward", "of"] and "toy/v000001" in result.stdout
    assert lines[1] == ["prompts", "greedy", "sampled"]
    assert [line[0] for line in lines[2:]] == ["all", "even", "odd"]


def test_eval_without_eval_data_uses_the_training_prompts_and_says_so(project):
    result = cli("eval", project.config, "eval=null", "--json")
    assert json.loads(result.stdout)["prompts"] == 8
    wording(result.stderr)


def test_eval_samples_k_times_and_counts_what_reaches_success(project):
    """`eval.k` and `eval.success` act here as they do in a run."""
    result = cli("eval", project.config, "eval.k=3", "eval.success=0.01", "--json")
    metrics = json.loads(result.stdout)["metrics"]
    assert {"eval/sampled/avg@3", "eval/sampled/pass@1", "eval/sampled/pass@3"} <= set(metrics)
    assert metrics["eval/sampled/pass@3"] > 0  # the share of vowels never reaches the default of 1
    hard = json.loads(cli("eval", project.config, "eval.k=3", "eval.success=2", "--json").stdout)["metrics"]
    assert hard["eval/sampled/pass@3"] == 0 and hard["eval/sampled/avg@3"] == metrics["eval/sampled/avg@3"]
    table = [line.split() for line in cli("eval", project.config, "eval.k=3").stdout.splitlines()]
    assert [line for line in table if line[0] == "pass@3"] == [["pass@3", "-", "0.000", "±", "0.000"]]
    assert [line[0] for line in table[2:]] == ["all", "even", "odd", "pass@1", "pass@3", "maj@3"]


def test_eval_has_sampling_parameters_of_its_own(project):
    """`eval.max_tokens` holds in both modes, `eval.temperature` in mode sampled: near 0 it decodes greedily."""
    cold = json.loads(cli("eval", project.config, "eval.temperature=0.001", "--json").stdout)["metrics"]
    assert cold["eval/sampled/reward"] == cold["eval/greedy/reward"]
    hot = json.loads(cli("eval", project.config, "eval.temperature=3", "--json").stdout)["metrics"]
    assert hot["eval/sampled/reward"] != hot["eval/greedy/reward"] == cold["eval/greedy/reward"]
    short = json.loads(cli("eval", project.config, "eval.max_tokens=1", "--json").stdout)["metrics"]
    assert short["eval/greedy/reward"] != cold["eval/greedy/reward"]
    refused = cli("eval", project.config, "eval.modes=[greedy]", "eval.top_p=0.9")
    assert refused.exit_code == 2
    wording(refused.stderr)
    refused = cli("eval", project.config, "eval.answer=number")
    assert refused.exit_code == 2
    wording(refused.stderr)
    refused = cli("eval", project.config, "eval.k=2", "eval.answer=nummer")
    assert refused.exit_code == 2
    wording(refused.stderr)


def test_eval_tests_one_version_against_another(project, store):
    """A version against itself is no different on any prompt; against the base model it is what the two means say."""
    result = cli("eval", project.config, "--adapter", "toy@1", "--against", "toy@1", "eval.k=2", "--json")
    same = json.loads(result.stdout)["paired"]
    assert set(same) == {"greedy/reward", *(f"sampled/{each}" for each in ("reward", "pass@1", "pass@2", "maj@2"))}
    assert all(
        (each["difference"], each["p_value"], each["won"], each["lost"]) == (0, 1, 0, 0) for each in same.values()
    )
    shown = json.loads(cli("eval", project.config, "--adapter", "toy@1", "--against", "base", "--json").stdout)
    means = [each["metrics"]["eval/greedy/reward"] for each in (shown, shown["against"])]
    assert shown["paired"]["greedy/reward"]["difference"] == pytest.approx(means[0] - means[1])
    table = cli("eval", project.config, "--adapter", "toy@1", "--against", "base").stdout
    assert "no adapter, prompt by prompt" in table and "difference" in table
    assert cli("eval", project.config, "--against", "toy@99").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        "run.yaml --suite lm_eval --tasks a",
        "run.yaml --suite lm-eval",
        "run.yaml --suite inspect --tasks a --chat",
        "run.yaml --suite inspect --tasks a --against base",
        "run.yaml --tasks a",
        "run.yaml --suite lm-eval --tasks a --python ./bare",
        "run.yaml --suite inspect --tasks a --python ./none",
        "--suite lm-eval --tasks a",
        "",
    ],
)
def test_eval_by_a_suite_refuses_what_does_not_go_with_it(project, words):
    """Before anything is loaded: an unknown suite, no tasks, another suite's options, a Python without the suite."""
    bare = project.folder / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without packages
    bare.chmod(0o755)
    refused = cli("eval", *words.split())
    assert refused.exit_code == 2, refused.stderr
    wording(refused.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "kind"), [("hangs", "did not answer within"), ("ends_the_process", "exit status 7")]
)
def test_eval_survives_a_reward_that_loops_or_exits(project, reward, kind):
    """Rewards run in processes with deadlines, as in a run: what cannot be scored is counted and said."""
    settings = ("scoring.workers=2", "scoring.timeout_s=0.3", "eval.modes=[greedy]", f"rewards=[my_rewards:{reward}]")
    result = cli("eval", project.config, *settings, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["metrics"]["eval/greedy/failed"] == 2 and report["metrics"]["eval/greedy/odd/reward"] is None
    assert report["metrics"]["eval/greedy/even/reward"] is not None
    assert "2 of 4 completions could not be scored" in result.stderr and kind in result.stderr


def test_eval_refuses_an_adapter_of_another_base_model(project, store, make_base, tmp_path):
    other = save_model(make_base("qwen3", dtype=torch.float32, context=256, seed=1), tmp_path / "other")
    result = cli("eval", project.config, f"model={other}", "--adapter", "toy@1")
    assert result.exit_code == 1
    wording(result.stderr)


def test_eval_refuses_an_unknown_mode(project):
    result = cli("eval", project.config, "--mode", "best")
    assert result.exit_code == 2
    wording(result.stderr)


# ---- adapters ----


def test_adapters_list_show_activate_and_roll_back(store):
    listed = json.loads(cli("adapters", "list", "--json").stdout)  # the newest run under runs/
    assert listed["active"] == "toy@2" and [each["version"] for each in listed["versions"]] == ["toy@1", "toy@2"]
    table = cli("adapters", "list", "--run", "runs/toy-1").stdout.splitlines()
    assert table[2].split()[:2] == ["*", "toy@2"] and "0.500" in table[1]
    shown = json.loads(cli("adapters", "show", "toy@1", "--json").stdout)
    assert shown["metrics"] == {"reward/mean": 0.5} and not shown["active"]
    assert "adapter_model.safetensors" in cli("adapters", "show", "toy").stdout
    assert cli("adapters", "activate", "toy@1").stdout == "toy@1\n"
    assert store.active.number == 1
    assert json.loads(cli("adapters", "rollback", "--store", store.root, "--json").stdout)["active"] == "toy@2"
    assert cli("adapters", "activate", "base").stdout == "base\n"


def test_adapters_show_what_suites_measured(store):
    metrics = {"arc/acc": {"value": 0.25, "stderr": 0.05, "samples": 75}, "gsm8k/exact_match": {"value": 0.5}}
    kept = {"suite": "lm-eval", "release": "0.4", "created": "2026-11-23T10:00:00+00:00", "chat": True}
    store.record(store.resolve("toy@1"), {**kept, "limit": None, "arguments": [], "metrics": metrics})
    shown = json.loads(cli("adapters", "show", "toy@1", "--json").stdout)
    assert shown["evaluations"][0]["metrics"] == metrics
    lines = [line.split() for line in cli("adapters", "show", "toy@1").stdout.splitlines()]
    row = ["2026-11-23T10:00:00+00:00", "arc/acc", "0.2500", "±", "0.0500", "75", "lm-eval", "0.4", "chat"]
    assert row in lines and lines[lines.index(row) + 1][1:3] == ["gsm8k/exact_match", "0.5000"]
    assert "evaluated" not in cli("adapters", "show", "toy@2").stdout


def test_adapters_export_is_a_plain_peft_directory(store, tmp_path):
    assert cli("adapters", "export", "toy@1", "plain").stdout == "plain\n"
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    again = cli("adapters", "export", "toy@1", "plain")
    assert again.exit_code == 1
    wording(again.stderr)


def test_adapters_export_finds_what_the_other_formats_find(store, project, base):
    """A version of an older run, by its run or by its directory; a run of all parameters has none, and says so."""
    newer = AdapterStore(project.folder / "runs" / "other-1" / "adapters")
    directory = store.path(store.resolve("toy@1"))
    of = Provenance(base_model="m", base_hash="h")
    newer.publish("other", lambda to: shutil.copytree(directory, to, dirs_exist_ok=True), info=of)
    for number, name in enumerate(["toy@1", "runs/toy-1@1", "toy-1@1", str(directory)]):
        done = cli("adapters", "export", name, f"plain-{number}", "--json")
        assert json.loads(done.stdout) == {"version": "toy@1", "path": f"plain-{number}"}, done.stderr
    plain = cli("adapters", "export", "plain-0", "again")
    assert plain.exit_code != 0 and not Path("again").exists()
    save_model(base, project.folder / "runs" / "full-1" / "model")
    whole = cli("adapters", "export", "full-1", "whole")
    assert whole.exit_code == 2 and not Path("whole").exists()
    wording(whole.stderr)


def test_adapters_of_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing = cli("adapters", "list")
    assert nothing.exit_code == 2
    wording(nothing.stderr)
    assert cli("adapters", "list", "--store", tmp_path / "none").exit_code == 2
    both = cli("adapters", "list", "--store", tmp_path, "--run", tmp_path)
    assert both.exit_code == 2
    wording(both.stderr)
    assert not any(tmp_path.iterdir())  # looking makes nothing
