"""aitraining's flags: environments and what is around them, with its defaults; as commands, files and in Python."""

import json

import pytest

from cli_project import cli
from groupwise.bridges.aitraining.importer import flags
from groupwise.bridges.aitraining.train import LLMTrainingParams, train
from groupwise.config.formats.format import format_named
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from groupwise.run.importing import import_run
from groupwise.store.tracking import read_metrics
from wording import raises, warns, wording

HOTEL = [
    "--model",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "--rl-env-module",
    "my_envs.hotel_env",
    "--rl-env-class",
    "HotelEnv",
    "--rl-num-generations",
    "4",
    "--rl-max-new-tokens=256",
    "--peft",
]


def imported(*arguments: str) -> LoadedRun:
    return import_run([*arguments], system="aitraining")


def test_the_documented_command_with_its_defaults():
    loaded = imported("aitraining", "llm", "--train", "--trainer", "grpo", "--project-name", "my/hotel", *HOTEL)
    config = loaded.config
    assert (config.name, config.model) == ("hotel", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    assert (config.rollout.group_size, config.rollout.prompts_per_step, config.rollout.max_tokens) == (4, 2, 256)
    assert (config.rollout.top_k, config.algo.kl, config.algo.kl_coeff) == (0, "k3", 0.1)
    assert (config.algo.policy_loss, config.algo.clip_low, config.algo.clip_high) == ("grpo", 0.2, 0.2)
    assert (config.train.learning_rate, config.train.schedule) == (3e-5, "linear")
    assert config.train.lora is not None and (config.train.lora.rank, config.train.lora.dropout) == (16, 0.05)


def test_an_environment_is_a_run_with_its_arguments():
    config = imported(*HOTEL, "--rl-env-config", '{"difficulty": "hard", "rule": "a=b"}').runnable()
    assert config.env is not None and config.env.environment == "my_envs.hotel_env:HotelEnv"
    assert config.env.args == {"difficulty": "hard", "rule": "a=b"} and config.env.max_turns == 4096
    assert config.data is None and config.rewards == ()


def test_a_part_of_the_vocabulary_arrives():
    loaded = imported(*HOTEL, "--rl-top-p", "0.9", "--rl-top-k", "20", "--max-steps", "3")
    assert (loaded.config.rollout.top_p, loaded.config.rollout.top_k) == (0.9, 20)
    assert not any("50 likeliest" in str(note) for note in loaded.differs)


def test_which_turns_are_trained_is_said_unless_it_was_chosen():
    loaded = imported(*HOTEL, "--max-steps", "3")
    assert loaded.config.env is not None and loaded.config.env.train_turns == "all"
    assert [str(note) for note in loaded.differs] == [
        "rl_env_module: every turn that the environment generates is trained; train_turns=first is as there",
        "rl_top_k: completions are drawn from all tokens, as the loss there has it; there from the 50 likeliest",
    ]
    chosen = imported(*HOTEL, "--max-steps", "3", "--train-turns", "first", "--rl-top-k", "0")
    assert chosen.config.env is not None and chosen.config.env.train_turns == "first" and not chosen.differs


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rl-env-module", "m"],
        ["--rl-env-class", "C"],
        ["--rl-env-config", "{}"],
        [*HOTEL, "--rl-env-config", "{bad"],
        [*HOTEL, "--rl-env-config", "[1]"],
        [*HOTEL, "--train-turns", "last"],
    ],
)
def test_an_environment_that_is_not_said_right(arguments):
    with raises(ConfigError):
        imported(*arguments)


def test_the_rows_that_an_environment_makes_are_an_epoch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counted_env.py").write_text(
        "class Env:\n"
        "    def build_dataset(self, tokenizer): return [{'prompt': 'a'}] * 12\n"
        "    def score_episode(self, model, tokenizer, completion, case_idx): return 1.0\n"
        "class Broken(Env):\n"
        "    def build_dataset(self, tokenizer): raise RuntimeError\n"
    )
    named = ["--model", "starter", "--rl-env-module", "counted_env", "--rl-env-class"]
    assert imported(*named, "Env", "--epochs", "2").config.train.steps == 12  # 2 prompts a step
    unknown = imported(*named, "Broken")
    assert any(note.place == "epochs" for note in unknown.differs)


def test_with_prompts_and_rewards_it_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(10)))
    without_environment = [each for each in HOTEL if "env" not in each and each != "HotelEnv"]
    config = imported(*without_environment, "--epochs", "3", "data.source=p.jsonl", "rewards=[m:f]").runnable()
    assert config.train.steps == 15 and config.train.warmup_steps == 2  # 10% of 15
    missing = imported(*without_environment)
    with raises(ConfigError):
        missing.runnable()
    rewards_only = imported(*without_environment, "rewards=[m:f]")
    with raises(ConfigError):
        rewards_only.runnable()


def test_the_saved_parameters_of_all_its_trainers_are_known(tmp_path):
    saved = {key.name: None for key in format_named("aitraining").keys} | {
        "trainer": "grpo",
        "rl_num_generations": 8,
        "peft": True,
        "lr": "1e-5",
    }
    (tmp_path / "training_params.json").write_text(json.dumps(saved | {"dpo_beta": 0.1, "project_name": "p"}))
    config = read_run(tmp_path / "training_params.json").config
    assert (config.rollout.group_size, config.train.learning_rate) == (8, 1e-5)


def test_a_configuration_file_with_params(tmp_path):
    (tmp_path / "c.yaml").write_text("task: llm\nparams:\n  trainer: grpo\n  project_name: p\n  rl_kl_coef: 0\n")
    assert read_run(tmp_path / "c.yaml").config.algo.kl is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rl-num-generation", "4"],
        ["--trainer", "ppo"],
        ["--batch-size", "3", "--gradient-accumulation", "1"],
        ["--peft", "true", "stray"],
        ["-x"],
        ["--rl-loss-type", "gspo"],
        ["--rl-loss-type", "cispo"],
    ],
)
def test_what_cannot_be_read(arguments):
    with raises(ConfigError):
        imported(*arguments)


def test_flags_as_a_document():
    document, overrides = flags(
        ["llm", "--a-b", "1", "--c=x=y", "--d", "train.steps=3", "--e", '{"x": "a=b"}', "f[0]=1"]
    )
    assert document.data == {"a_b": "1", "c": "x=y", "d": "true", "e": '{"x": "a=b"}'}
    assert overrides == ["train.steps=3", "f[0]=1"]


def test_losses_with_their_bounds():
    algo = imported(*HOTEL, "--rl-loss-type", "cispo", "--rl-clip-range", "5").runnable().algo
    assert (algo.policy_loss, algo.clip_low, algo.clip_high) == ("cispo", None, 4.0)
    sapo = imported(*HOTEL, "--rl-loss-type", "sapo").runnable().algo
    assert (sapo.policy_loss, sapo.clip_low, sapo.sapo_tau_negative) == ("sapo", None, 1.05)


def test_vllm_is_the_engine():
    said = ["--use-vllm", "--vllm-mode", "server", "--vllm-server-gpus", "2", "--vllm-server-url", "http://gpu:8000/v1"]
    with raises(ConfigError):  # all parameters
        imported(*HOTEL, "--peft=false", *said).runnable()
    loaded = imported(*HOTEL, *said)
    config = loaded.runnable()
    assert (config.engine, config.vllm.mode, config.vllm.urls) == ("vllm", "server", ("http://gpu:8000/v1",))
    assert not config.rollout.sampling().reshaped
    colocated = imported(*HOTEL, "--use-vllm", "--vllm-gpu-memory-utilization", "0.25").runnable()
    assert (colocated.vllm.mode, colocated.vllm.gpu_memory_utilization) == ("colocate", 0.25)
    loaded = imported(*HOTEL, "--vllm-gpu-memory-utilization", "0.3", "--vllm-tensor-parallel-size", "1")
    loaded.runnable()
    assert [note.place for note in loaded.idle] == ["vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"]


# ---- the commands, and Python ----

ENV = """
class Vowels:
    def __init__(self, letters="aeiou"):
        self.letters = letters

    def build_dataset(self, tokenizer):
        return [{"prompt": [{"role": "user", "content": f"What is {i}?"}], "case_idx": i} for i in range(4)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        text = completion[0]["content"]
        return sum(text.count(letter) for letter in self.letters) / (1 + len(text))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, model_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vowel_env.py").write_text(ENV)
    return tmp_path


def words(model, *more: str) -> list[str]:
    return [
        *("--model", str(model), "--rl-env-module", "vowel_env", "--rl-env-class", "Vowels", "--peft"),
        *("--rl-max-new-tokens", "6", "--max-steps", "1", *more),
    ]


def test_run_check_eval_and_import_take_the_flags(folder, model_dir):
    given = words(model_dir, "--rl-env-config", '{"letters": "ae"}')
    result = cli("run", *given, "run_dir=out", "--json")
    assert result.exit_code == 0, result.stderr
    assert "not as in aitraining: rl_env_module" in result.stderr
    assert json.loads(result.stdout)["steps"] == 1
    checked = cli("check", "aitraining", "llm", "--train", "--trainer", "grpo", *given)
    assert checked.exit_code == 0, checked.stderr
    assert cli("eval", *given, "--mode", "greedy").exit_code == 0
    assert cli("import", "--from", "aitraining", *given, "-o", "native.yaml").exit_code == 0
    again = json.loads(cli("run", "native.yaml", "run_dir=again", "--json").stdout)
    steps = [read_metrics(folder / name / "metrics.jsonl")[-1]["reward/mean"] for name in ("out", "again")]
    assert again["steps"] == 1 and steps[0] == steps[1]


def test_what_is_wrong_with_the_names_is_said(folder, model_dir):
    missing = cli("run", *words(model_dir), "--rl-env-class", "Vowel")
    assert missing.exit_code == 2
    wording(missing.stderr)
    module = cli("run", *words(model_dir), "--rl-env-module", "vowels_env")
    assert module.exit_code == 2
    wording(module.stderr)
    config = cli("run", *words(model_dir), "--rl-env-config", '{"letter": "a"}')
    assert config.exit_code == 2
    wording(config.stderr)


@pytest.mark.parametrize("given", [["run.yaml", "--jsn"], ["--jsn", "run.yaml"], ["run.yaml", "--epochs", "3"]])
def test_an_option_that_does_not_exist_is_named(folder, given):
    result = cli("run", *given)
    option = next(word for word in given if word.startswith("--"))
    assert result.exit_code == 2 and f"there is no option {option}" in result.stderr


def test_python_takes_the_parameters(folder, model_dir, monkeypatch):
    params = LLMTrainingParams(
        model=str(model_dir),
        trainer="grpo",
        project_name="vowels",
        rl_env_module="vowel_env",
        rl_env_class="Vowels",
        rl_env_config='{"letters": "ae"}',
        rl_num_generations=4,
        rl_max_new_tokens=6,
        rl_top_k=0,
        peft=True,
        lr=1e-5,
        max_steps=1,
        token=None,
    )
    with warns():
        result = train(params)
    assert result.steps == 1 and result.run_dir.name.startswith("vowels-")
    with raises(ConfigError):
        LLMTrainingParams(rl_env_clas="x").run_config()


def test_the_class_may_have_the_methods_of_ours(folder, model_dir):
    (folder / "own_env.py").write_text(
        "class Own:\n"
        "    def cases(self): return [{'number': i} for i in range(4)]\n"
        "    def reset(self, case, seed): return f\"What is {case['number']}?\"\n"
        "    def step(self, message): return [], len(message['content']) / 10, True\n"
    )
    named = ("--model", str(model_dir), "--rl-env-module", "own_env", "--rl-env-class", "Own", "--peft")
    result = cli("run", *named, "--rl-max-new-tokens", "6", "run_dir=out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 2  # an epoch of 4 cases, 2 a step


def test_how_processes_share_the_model():
    assert imported(*HOTEL, "--distributed-backend", "deepspeed").runnable().train.parallel == "fsdp"  # ZeRO 3 there
    assert imported(*HOTEL, "--distributed-backend", "ddp").runnable().train.parallel == "ddp"
