"""What people type, as a table: how it ends, and that the remedy which its message gives works as it is given.

A row is a command line in a folder with a dataset, a reward and a run's file, its exit code, the error's `code` and
`field`, and the remedy: an override that the message itself must contain, and that leads on where it is typed in place
of what was wrong. Nothing is loaded: what is refused is refused before torch is imported, and a remedy leads on when
`check --origins` takes it. What must train is at the end.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_first_mistakes import AWAY

from cli_project import Project, cli, write_rows
from groupwise.config.other_names import OTHER_VALUES
from groupwise.config.run import parse_config
from groupwise.config.yaml import inline
from groupwise.store.dtypes import BY_FORMAT, GGUF, MERGED
from light_commands import Ended, LightCommands, light_commands

USAGE, START, SERVER_AWAY = 2, 3, 75
SERVER = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Row:
    """`groupwise WORDS` ends with `exit`. `remedy` stands in the message, and is typed in place of the last word; ""
    where none can be typed."""

    words: str
    remedy: str = ""
    exit: int = USAGE
    code: str = "invalid_config"
    field: str | None = None


def override(word: str, remedy: str = "", field: str | None = None) -> Row:
    return Row(f"run run.yaml {word}", remedy, field=field or word.partition("=")[0])


OVERRIDES = [
    override("learning_rate=1e-5", "train.learning_rate=1e-5"),
    override("lr=1e-5", "train.learning_rate=1e-5"),
    override("train.lr=1e-5", "train.learning_rate=1e-5"),
    override("max_steps=10", "train.steps=10"),
    override("steps=10", "train.steps=10"),
    override("num_generations=8", "rollout.group_size=8"),
    override("rollout.num_generations=8", "rollout.group_size=8"),
    override("rollout.n=8", "rollout.group_size=8"),
    override("group_size=8", "rollout.group_size=8"),
    override("max_completion_length=8", "rollout.max_tokens=8"),
    override("max_new_tokens=8", "rollout.max_tokens=8"),
    override("max_tokens=8", "rollout.max_tokens=8"),
    override("max_length=8", "rollout.max_tokens=8"),
    override("max_prompt_length=64", "rollout.max_prompt_tokens=64"),
    override("temperature=0.7", "rollout.temperature=0.7"),
    override("top_p=0.9", "rollout.top_p=0.9"),
    override("kl_coef=0.1", "algo.kl_coeff=0.1"),
    override("epsilon=0.2", "algo.clip_low=0.2"),
    override("clip_range=0.2", "algo.clip_low=0.2"),
    override("loss_type=dapo", "algo.policy_loss=dapo"),
    override("num_iterations=2", "train.passes=2"),
    override("warmup_steps=1", "train.warmup_steps=1"),
    override("weight_decay=0.1", "train.weight_decay=0.1"),
    override("max_grad_norm=1", "train.max_grad_norm=1"),
    override("gradient_checkpointing=true", "train.gradient_checkpointing=true"),
    override("optim=adamw", "train.optimizer=adamw"),
    override("lora_r=8", "train.lora.rank=8"),
    override("lora_rank=8", "train.lora.rank=8"),
    override("r=8", "train.lora.rank=8"),
    override("lora_alpha=8", "train.lora.alpha=8"),
    override("full_finetuning=true", "train.lora=null"),
    override("load_in_4bit=true", "quantization=nf4"),
    override("bf16=true", "dtype=bfloat16"),
    override("save_steps=5", "checkpoint.every=5"),
    override("eval_steps=5", "eval.every=5"),
    override("save_total_limit=2", "adapters.keep=2"),
    override("system_prompt=Hello", "data.system=Hello"),
    override("dataset=prompts.jsonl", "data.source=prompts.jsonl"),
    override("train_dataset=prompts.jsonl", "data.source=prompts.jsonl"),
    override("dataset_name=prompts.jsonl", "data.source=prompts.jsonl"),
    override("eval_dataset=held_out.jsonl", "eval.data.source=held_out.jsonl"),
    override("base_model=starter", "model=starter"),
    override("model_name_or_path=starter", "model=starter"),
    override("run_name=mine", "name=mine"),
    override("enable_thinking=false", "chat.template_kwargs.enable_thinking=false"),
    override("resume_from_checkpoint=true", "resume=auto"),
    override("adapter=toy", "adapters.start=toy"),
    override("num_gpus=2", "train.devices=2"),
    override("use_vllm=true", "engine=vllm"),
    override("report_to=wandb", "tracking.wandb=PROJECT"),
    # a section that is none
    override("server.port=9000", field="server"),
    override("rolout.max_tokens=8", "rollout.max_tokens=8", field="rolout"),
    override("run.seed=3", "seed=3", field="run"),
    override("trainer.steps=10", "train.steps=10", field="trainer"),
    override("lora.rank=8", "train.lora.rank=8", field="lora"),
    override("actor_rollout_ref.rollout.n=8", "rollout.group_size=8", field="actor_rollout_ref"),
    # what no single override is
    override("ref_model=x"),
    override("num_train_epochs=3"),
    override("epochs=3"),
    override("max_seq_length=2048"),
    override("train.batch_size=8"),
    override("per_device_train_batch_size=8"),
    override("push_to_hub=true"),
    override("logging_steps=1"),
    override("beta=0.1"),
    override("reward_funcs=x"),
    override("scale_rewards=false"),
    override("peft_config=x"),
    # values
    override("resume=true", "resume=auto"),
    override("train.lora=false", "train.lora=null"),
    override("train.lora=none", "train.lora=null"),
    override("dtype=bf16", "dtype=bfloat16"),
    override("device=gpu", "device=cuda"),
    override("quantization=4bit", "quantization=nf4"),
    override("engine=hf", "engine=local"),
    override("rewards=my_rewards:vowels", "rewards=[my_rewards:vowels]"),
    override("train.steps=ten"),
]
OPTIONS = [
    Row("run run.yaml --seed 3", "seed=3"),
    Row("run run.yaml --train.steps 3", "train.steps=3"),
    Row("run run.yaml --steps 3", "train.steps=3"),
    Row("run run.yaml --resume auto", "resume=auto"),
    Row("run run.yaml --adapter toy", "adapters.start=toy"),
    Row("run run.yaml --wandb mine", "tracking.wandb=mine"),
    Row("check run.yaml --learning-rate 1e-5", "train.learning_rate=1e-5"),
    Row("run run.yaml train.steps 3"),
]
LATE = [
    Row("run run.yaml engine=vllm", "engine=local", field="engine"),
    Row("check run.yaml engine=vllm", "engine=local", field="engine"),
    Row("run run.yaml device=mps", "device=auto", exit=START, code="model_not_found", field="device"),
    Row("eval run.yaml device=mps", "device=auto", exit=START, code="model_not_found", field="device"),
    Row("run run.yaml model=Qwen/Qwen9", "model=starter", exit=START, code="model_not_found"),
    Row("check run.yaml data.source=q.jsonl data.prompt_key=prompt", code="invalid_data"),
]
WORDS = [
    *(Row(word) for word in ("runs", "list", "ls", "status", "compare", "sft", "dpo", "resume", "export")),
    *(Row(word) for word in ("finetune", "generate", "version", "help", "score", "rnu", "run.yaml", "train run.yaml")),
    *(Row(word) for word in ("run", "report", "init", "adapters export", "rewards test", "learn stop")),
]


def typed(row: Row) -> str:
    """The command that the remedy makes of a row: with the override or the option replaced."""
    words = shlex.split(row.words)
    at = next((at for at, word in enumerate(words) if word.startswith("--")), len(words) - 1)
    return shlex.join(["check", *words[1:at], row.remedy, "--origins"])


@pytest.fixture(scope="module")
def groupwise() -> Iterator[LightCommands]:
    with light_commands() as run:
        yield run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("typed")
    Project.make(made, model="starter")
    (made / "q.jsonl").write_text('{"question": "1+1?", "gold": "2"}\n')
    return made


def ended(groupwise: LightCommands, folder: Path, words: str) -> Ended:
    return groupwise(*shlex.split(words), folder=folder, environment={**AWAY, "HF_HOME": str(folder / "hf")})


def shown(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("row", [*OVERRIDES, *OPTIONS, *LATE], ids=lambda row: row.words)
def test_what_is_wrong_is_told_and_its_remedy_works(row: Row, groupwise: LightCommands, folder: Path) -> None:
    told = ended(groupwise, folder, f"{row.words} --json")
    assert told.code == row.exit, told.stderr
    error = json.loads(told.stdout)["error"]
    assert (error["code"], error["field"]) == (row.code, row.field) and not told.torch
    assert not (folder / "runs").exists()
    if row.remedy:
        said = f"{error['message']} {error['hint']}"
        assert row.remedy in said
        followed = ended(groupwise, folder, typed(row))
        assert followed.code == 0, followed.stderr


@pytest.mark.parametrize("row", WORDS, ids=lambda row: row.words)
def test_a_word_that_is_no_command_is_answered(row: Row, groupwise: LightCommands, folder: Path) -> None:
    told = ended(groupwise, folder, row.words)
    assert told.code == USAGE and "Traceback" not in told.stderr and not told.torch


def test_there_are_as_many_as_were_tried() -> None:
    assert len({row.words for row in (*OVERRIDES, *OPTIONS, *LATE, *WORDS)}) >= 98


@pytest.mark.parametrize(("key", "value"), OTHER_VALUES)
def test_a_value_from_elsewhere_is_another_one_here(key: str, value: object) -> None:
    """What is proposed is valid, and what is typed is not."""
    ours = {"data": {"source": "x.jsonl"}, "rewards": ["m:f"]}
    with pytest.raises(Exception, match=r"did you mean"):
        parse_config({**ours, key: value})
    name, _, meant = OTHER_VALUES[key, value].partition("=")
    assert inline(parse_config({**ours, name: meant}).model_dump(mode="json")[name]) == meant


def test_types_of_whole_models_are_those_of_the_libraries_that_write_them() -> None:
    import torch

    kinds = pytest.importorskip("gguf").GGMLQuantizationType
    assert set(BY_FORMAT) == {"merged", "gguf"}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in MERGED)
    assert all(hasattr(kinds, name) for name in GGUF.values())


def test_a_type_that_is_not_written_is_refused_before_a_model_is_read(groupwise: LightCommands, folder: Path) -> None:
    told = ended(groupwise, folder, "adapters export toy x --run toy --format gguf --dtype q4_k_m --json")
    assert told.code == USAGE and json.loads(told.stdout)["error"]["field"] == "--dtype" and not told.torch
    assert "llama-quantize" in told.stderr


def test_a_column_that_is_called_otherwise_is_named_to_lint_too(groupwise: LightCommands, folder: Path) -> None:
    lint = "rewards lint my_rewards:vowels --data q.jsonl"
    told = ended(groupwise, folder, lint)
    assert told.code == USAGE and "data.prompt_key" in told.stderr
    assert ended(groupwise, folder, f"{lint} data.prompt_key=question").code in (0, 1)  # it is judged


@pytest.mark.parametrize("verb", ["status", "pause", "resume", "promote", "reject"])
def test_learning_is_asked_of_a_server(verb: str, groupwise: LightCommands, folder: Path) -> None:
    assert ended(groupwise, folder, f"learn {verb} --url {SERVER}").code == SERVER_AWAY


# ---- what a run leaves ----


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and a newer trial of one of the same name that was finished, too."""
    made = tmp_path_factory.mktemp("two")
    project = Project.make(made, model="starter")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        quick = ("eval=null", "rollout.max_tokens=2")
        for steps in (2, 1):
            trained = cli("run", project.config, f"train.steps={steps}", *quick)
            assert trained.exit_code == 0, trained.stderr
        runs = sorted((made / "runs").iterdir())
        runs[0].rename(made / "runs" / "toy-20260101T120000Z")
        runs[1].rename(made / "runs" / "toy-20260102T120000Z")
    return made


@pytest.mark.filterwarnings("ignore::groupwise.store.locate.SeveralRunsWarning")
def test_a_name_of_two_runs_and_more_steps(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which run a name means is said with the others; more steps are the longer one's, from its last checkpoint."""
    monkeypatch.chdir(two_runs)
    long, trial = sorted(Path("runs").iterdir())
    told = cli("adapters", "export", "toy", "out", "--run", "toy")
    assert told.exit_code == 0, told.stderr
    more = ("rollout.max_tokens=2", "eval=null", "resume=auto", "train.steps=3", "--json")
    went_on = cli("run", "run.yaml", *more)
    assert went_on.exit_code == 0, went_on.stderr
    steps = [json.loads(line)["step"] for line in (long / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3] and sorted(Path("runs").iterdir()) == [long, trial], went_on.stderr
    assert [each.name for each in (long / "checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.slow
def test_eval_of_a_run_is_of_its_policy(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_runs)
    write_rows(Path("held_out.jsonl"), [{"prompt": "What is 1 + 1?"}])
    long = min(Path("runs").iterdir())
    told = cli("eval", long, "--mode", "greedy", "eval.data.source=held_out.jsonl", "--json")
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["policy"] != "base"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("server.port=9000", "port=9000"),
        ("serve.port=9000", "port=9000"),
        ("config.port=9000", "port=9000"),
        ("model.name=x", "model=x"),
        ("train.steps=5", "train.steps=5"),
        ("lr=1e-4", "train.learning_rate=1e-4"),
    ],
)
def test_a_setting_in_a_section_that_a_server_has_not(
    words: str, meant: str, groupwise: LightCommands, folder: Path
) -> None:
    """What is meant is said, not the list of all keys; a key of a run is said to be one."""
    told = ended(groupwise, folder, f"serve {words}")
    assert told.code == USAGE and f" {meant}" in told.stderr and "first_token_timeout_s" not in told.stderr


def test_a_key_of_an_environment_in_its_section(groupwise: LightCommands, folder: Path) -> None:
    told = ended(groupwise, folder, "env check m:E --set env.max_turns=5")
    assert told.code == USAGE and "did you mean max_turns=5?" in told.stderr and not told.torch


@pytest.mark.parametrize("words", ["serve starter port=x", "serve port=x", "serve --set port=x"])
def test_a_setting_of_a_server_is_a_word_or_an_option(words: str, groupwise: LightCommands, folder: Path) -> None:
    told = ended(groupwise, folder, words)
    assert told.code == USAGE and "port=x" in told.stderr and not told.torch
