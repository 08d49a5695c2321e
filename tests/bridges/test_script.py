"""GRPO scripts of Unsloth and TRL, read without being run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli_project import cli
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from groupwise.run.importing import import_run
from wording import raises

UNSLOTH = """\
raise SystemExit("this script must never run")
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams
import torch

max_seq_length = 1024  # longer for longer reasoning
lora_rank = 32
max_prompt_length = 256

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "starter",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    fast_inference = False,
    max_lora_rank = lora_rank,
    gpu_memory_utilization = 0.6,
    dtype = torch.bfloat16,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"],
    lora_alpha = lora_rank * 2,
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
)

dataset = load_dataset("openai/gsm8k", "main", split = "train")
dataset = dataset.map(lambda row: {"prompt": row["question"], "answer": row["answer"].split("####")[1]})

def exact(completions, answer, **kwargs):
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

training_args = GRPOConfig(
    vllm_sampling_params = SamplingParams(min_p = 0.1, seed = 3407, stop = [tokenizer.eos_token],
                                          include_stop_str_in_output = True),
    learning_rate = 5e-6,
    warmup_ratio = 0.1,
    lr_scheduler_type = "cosine",
    optim = "adamw_8bit",
    logging_steps = 1,
    per_device_train_batch_size = 1,
    gradient_accumulation_steps = 1,
    num_generations = 6,
    max_prompt_length = max_prompt_length,
    max_completion_length = max_seq_length - max_prompt_length,
    max_steps = 250,
    save_steps = 250,
    report_to = "none",
    output_dir = "outputs",
)
trainer = GRPOTrainer(
    model = model,
    processing_class = tokenizer,
    reward_funcs = [exact],
    args = training_args,
    train_dataset = dataset,
)
trainer.train()

if False:
    model, tokenizer = FastLanguageModel.from_pretrained(model_name = "lora_model", load_in_4bit = True)
"""
OURS = ("data.source=prompts.jsonl", "rewards=[my_rewards:exact]")
TRL = """\
import rewards
from datasets import load_dataset
from my_rewards import exact as is_exact
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

def main():
    model = AutoModelForCausalLM.from_pretrained("starter")
    settings = {"num_generations": 4, "beta": 0.02}
    trainer = GRPOTrainer(
        model,
        [is_exact, rewards.short, "owner/reward-model"],
        GRPOConfig("outputs", per_device_train_batch_size=8, max_steps=10, **settings),
        load_dataset("json", data_files="prompts.jsonl", split="train"),
        peft_config=LoraConfig(r=4, target_modules="all-linear", bias="none"),
    )

main()
"""


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str, *overrides: str, name: str = "train.py") -> LoadedRun:
        (tmp_path / name).write_text(text)
        return read_run(tmp_path / name, overrides)

    return read


def at(said: str) -> str:
    """Where the script of Unsloth's says this."""
    return f"train.py:{UNSLOTH[: UNSLOTH.index(said)].count(chr(10)) + 1}"


def origin(loaded: LoadedRun, *keys: str) -> str:
    return loaded.document.origin(keys)


def test_a_script_of_unsloths_is_read_and_never_run(read):
    loaded = read(UNSLOTH, *OURS)
    config = loaded.runnable()
    lora = config.train.lora
    assert loaded.system == "Unsloth" and config.model == "starter" and lora is not None
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (
        32,
        64,
        0.0,
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    )
    assert (config.rollout.max_tokens, config.rollout.max_prompt_tokens, config.rollout.min_p) == (768, 256, 0.1)
    assert (config.rollout.group_size, config.rollout.prompts_per_step) == (
        6,
        1,
    )  # Unsloth makes a batch of one a group
    assert (config.train.steps, config.train.warmup_steps, config.train.learning_rate) == (250, 25, 5e-6)
    assert (config.train.optimizer, config.train.weight_decay, config.train.schedule) == ("adamw_8bit", 0.001, "cosine")
    assert (config.train.gradient_checkpointing, config.dtype, config.quantization) == (True, "bfloat16", None)
    assert (config.algo.policy_loss, config.algo.kl_coeff, config.seed) == ("bnpo", 0.001, 3407)
    assert config.engine == "local" and config.output_dir == "outputs" and config.checkpoint.every == 250
    assert origin(loaded, "train", "lora", "rank") == f"get_peft_model.r {at('r = lora_rank')}"
    assert origin(loaded, "rollout", "max_tokens") == f"max_completion_length {at('max_completion_length =')}"


def test_data_and_functions_of_the_script_are_named_with_what_to_write(read):
    loaded = read(UNSLOTH)
    with pytest.raises(ConfigError) as raised:
        loaded.runnable()
    said = str(raised.value)
    assert f"dataset_name ({at('train_dataset =')}): train_dataset, `dataset`, is known only when the script" in said
    copied = f"copy exact (line {at('def exact')[9:]}) into a module"
    assert f"reward_funcs ({at('reward_funcs =')}): the script is not run, so {copied}" in said
    assert raised.value.hint == "it runs with: rewards=[my_rewards:exact] data.source=prompts.jsonl"
    assert (
        read(UNSLOTH, OURS[0], "reward_funcs=[my_rewards.exact]").runnable().rewards[0].function == "my_rewards:exact"
    )


def test_what_the_script_computes_is_asked_for(read):
    text = UNSLOTH.replace("max_prompt_length = 256", "max_prompt_length = max(map(len, dataset)) + 1")
    loaded = read(text, *OURS)
    assert [note.instead for note in loaded.refused] == ["max_prompt_length=VALUE", "max_completion_length=VALUE"]
    assert loaded.refused[0].place == f"max_prompt_length ({at('max_prompt_length = max_')})"
    assert "`max_prompt_length` is known only when the script runs" in loaded.refused[0].text
    config = read(text, *OURS, "max_prompt_length=200", "rollout.max_tokens=300").runnable()
    assert (config.rollout.max_prompt_tokens, config.rollout.max_tokens) == (200, 300)
    with raises(ConfigError):
        read(UNSLOTH.replace("num_generations = 6", "num_generations = args.g"), *OURS)
    assert read(UNSLOTH.replace("logging_steps = 1", "logging_steps = args.n"), *OURS).runnable()  # it has no effect


def test_a_name_that_is_bound_twice_is_not_read(read):
    text = UNSLOTH.replace("lora_rank = 32\n", "lora_rank = 32\nlora_rank = 64\n")
    assert [note.instead for note in read(text, *OURS).refused] == [
        "get_peft_model.r=VALUE",
        "get_peft_model.lora_alpha=VALUE",
    ]


def test_four_bits_are_unsloths_default_and_are_not_for_vllm(read):
    text = UNSLOTH.replace("    load_in_4bit = False,\n", "")
    assert read(text, *OURS).runnable().quantization == "nf4"
    assert read(text, *OURS, "from_pretrained.load_in_8bit=true").runnable().quantization == "int8"
    loaded = read(text, *OURS, "from_pretrained.fast_inference=true")
    with raises(ConfigError):
        loaded.runnable()
    fast = read(UNSLOTH, *OURS, "from_pretrained.fast_inference=true", "vllm_sampling_params=null").runnable()
    assert (fast.engine, fast.vllm.mode, fast.vllm.gpu_memory_utilization) == ("vllm", "colocate", 0.6)
    assert fast.vllm.max_model_len == 1024
    refused = read(UNSLOTH, *OURS, "from_pretrained.fast_inference=true").refused
    assert "min_p 0.1: vLLM does not report" in refused[0].text and refused[0].instead == "vllm_sampling_params=null"


def test_all_parameters(read):
    config = read(UNSLOTH, *OURS, "from_pretrained.full_finetuning=true").runnable()
    assert config.train.lora is None and config.quantization is None and config.dtype == "float32"
    start, end = UNSLOTH.index("model = FastLanguageModel.get_peft"), UNSLOTH.index("dataset = load")
    loaded = read(UNSLOTH[:start] + UNSLOTH[end:], *OURS)
    with raises(ConfigError) as raised:
        loaded.runnable()
    assert raised.value.hint == "it runs with: get_peft_model.r=16"
    assert read(UNSLOTH[:start] + UNSLOTH[end:], *OURS, "get_peft_model.r=16").runnable().train.lora is not None


def test_the_batch_is_unsloths(read):
    """Its rule: where micro batch x accumulation holds no whole groups, the micro batch is a group."""
    for micro, accumulate, group, prompts in ((1, 1, 6, 1), (1, 4, 6, 4), (1, 12, 6, 2), (6, 2, 6, 2), (4, 2, 6, 2)):
        changed = (f"per_device_train_batch_size={micro}", f"gradient_accumulation_steps={accumulate}")
        config = read(UNSLOTH, *OURS, *changed, f"num_generations={group}").runnable()
        assert (config.rollout.prompts_per_step, config.rollout.group_size) == (prompts, group), (micro, accumulate)


def test_losses_that_unsloth_completes(read):
    dapo = read(UNSLOTH, *OURS, "loss_type=dapo", "beta=0").runnable().algo
    assert (dapo.policy_loss, dapo.clip_high, dapo.mask_truncated) == ("dapo", 0.28, True)
    assert read(UNSLOTH, *OURS, "loss_type=dr_grpo", "scale_rewards=true").runnable().algo.advantage == "mean"


def test_unknown_arguments_have_their_line_and_the_nearest(read):
    with raises(ConfigError):
        read(UNSLOTH.replace("lora_alpha =", "lora_alhpa ="), *OURS)
    with raises(ConfigError):
        read(UNSLOTH.replace("num_generations =", "num_generation ="), *OURS)


def test_a_script_of_trls_runs_as_it_is(read):
    loaded = read(TRL)
    config = loaded.runnable()
    assert loaded.system == "TRL" and config.model == "starter" and config.data.source == "prompts.jsonl"
    assert [each.function for each in config.rewards] == [
        "my_rewards:exact",
        "rewards:short",
        "groupwise.rewards.classifier:reward_model",
    ]
    lora = config.train.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.targets) == (4, 8, "all-linear")
    assert (config.rollout.group_size, config.rollout.prompts_per_step, config.algo.kl_coeff) == (4, 2, 0.02)
    assert config.output_dir == "outputs" and config.train.steps == 10


def test_what_a_trainer_has_besides_is_refused(read):
    loaded = read(TRL.replace("peft_config=", "callbacks=[Stop()], peft_config="))
    assert [note.instead for note in loaded.refused] == ["GRPOTrainer.callbacks=null"]
    assert read(TRL.replace('bias="none"', 'bias="all"'), "LoraConfig.bias=none").runnable()
    assert [note.instead for note in read(TRL.replace('bias="none"', 'bias="all"')).refused] == ["LoraConfig.bias=null"]


def test_data_that_are_held_out(read):
    text = TRL.replace("        load_dataset(", "        eval_dataset=held_out, train_dataset=load_dataset(")
    assert read(text).runnable().eval is None  # eval_strategy is "no" there, so nothing is evaluated
    on = text.replace("max_steps=10", 'max_steps=10, eval_strategy="steps", eval_steps=5')
    assert [note.instead for note in read(on).refused] == ["eval.data.source=held_out.jsonl"]
    config = read(on, "eval.data.source=held_out.jsonl").runnable()
    assert config.eval is not None and (config.eval.data.source, config.eval.every) == ("held_out.jsonl", 5)
    name = on.replace(
        'load_dataset("json", data_files="prompts.jsonl", split="train")', 'load_dataset("o/p", split="a")'
    )
    both = read(name.replace("held_out", 'load_dataset("o/p", split="b")')).runnable()
    assert both.eval is not None and (both.data.split, both.eval.data.split) == ("a", "b")


def test_notebooks(read):
    lines = UNSLOTH.splitlines(keepends=True)
    cells = [
        {"cell_type": "markdown", "source": ["# Train"]},
        {"cell_type": "code", "source": ["%%capture\n", "!pip install unsloth vllm\n"]},
        {"cell_type": "code", "source": ["!nvidia-smi\n", "%load_ext autoreload\n", *lines[:30]]},
        {"cell_type": "code", "source": "".join(lines[30:])},
    ]
    loaded = read(json.dumps({"cells": cells}), *OURS, name="nb.ipynb")
    assert loaded.runnable().model_dump(exclude={"name"}) == read(UNSLOTH, *OURS).runnable().model_dump(
        exclude={"name"}
    )
    with raises(ConfigError):
        read("{}", name="nb.ipynb")


def test_what_cannot_be_read_at_all(read):
    with raises(ConfigError):
        read("x = 1\nx = (")
    with raises(ConfigError):
        read("from trl import RewardTrainer\nRewardTrainer(model='m')\n")
    with raises(ConfigError):
        read(TRL.replace("**settings", "**vars(args)"))


PARSED = TRL.replace("main():\n", "main():\n    script, training_args, model_args = parser.parse_args_and_config()\n")


@pytest.mark.parametrize(
    ("args", "lora", "lines"),
    [
        ("training_args", "LoraConfig(r=4)", (15,)),
        ("parser.parse_args()", "get_peft_config(model_args)", (15, 17)),
        ("GRPOConfig(max_steps=3)", "model_args", (17,)),
    ],
)
def test_what_a_parser_makes_is_refused_with_its_lines(read, args, lora, lines):
    start, end = PARSED.index('GRPOConfig("outputs'), PARSED.index("        load_dataset(")
    text = PARSED[:start] + f"{args},\n" + PARSED[end:]
    text = text.replace('LoraConfig(r=4, target_modules="all-linear", bias="none")', lora)
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert [int(line) for line in re.findall(r"line (\d+)", str(raised.value))] == [*lines]


@pytest.mark.parametrize("said", ["args=settings", "args=config or None"])
def test_arguments_that_a_function_is_given(read, said):
    """A name that is a function's argument stands for the one GRPOConfig of the script, wherever that is."""
    data = "load_dataset('json', data_files='p.jsonl')"
    text = f"def train(settings):\n    GRPOTrainer('starter', ['m.f'], train_dataset={data}, {said})\n"
    text += "train(GRPOConfig(num_generations=4, max_steps=3))\n"
    if said == "args=settings":
        assert read(text).runnable().train.steps == 3
    else:
        with pytest.raises(ConfigError):
            read(text)


def test_check_says_what_run_says_where_nothing_can_be_tried(read, tmp_path):
    read(UNSLOTH)
    tried, run = (cli(command, tmp_path / "train.py") for command in ("check", "run"))
    assert tried.exit_code == run.exit_code == 2
    assert tried.stderr == run.stderr and "data.source=prompts.jsonl" in run.stderr


@pytest.mark.parametrize(
    "value", ["steps + steps", "1 / 0", "9 ** 9 ** 9", "[x for x in y]", "__import__('os')", "-'a'"]
)
def test_expressions_that_are_not_read(read, value):
    text = UNSLOTH.replace("max_steps = 250,", f"max_steps = {value},").replace(
        "lora_rank = 32", "lora_rank=32;steps = steps"
    )
    assert [note.instead for note in read(text, *OURS, "warmup_ratio=0", "save_steps=10").refused] == [
        "max_steps=VALUE"
    ]


def test_import_writes_a_file_that_loads_as_the_same_run(read, tmp_path):
    read(UNSLOTH)
    result = cli("import", tmp_path / "train.py", *OURS, "-o", tmp_path / "native.yaml")
    assert result.exit_code == 0, result.stderr
    text = (tmp_path / "native.yaml").read_text()
    assert (
        "# From train.py, which is in Unsloth's words." in text
        and f"rank: 32  # get_peft_model.r {at('r = lora_rank')}" in text
    )
    ours = read_run(tmp_path / "native.yaml").runnable()
    assert ours == import_run([str(tmp_path / "train.py"), *OURS], system="unsloth").runnable()


def test_a_script_is_trained(read, tmp_path):
    read(UNSLOTH)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is 2 + 3?", "answer": "5"}\n' * 4)
    (tmp_path / "my_rewards.py").write_text(UNSLOTH[UNSLOTH.index("def exact") : UNSLOTH.index("training_args")])
    machine = ("from_pretrained.dtype=float32", "optim=adamw_torch", "max_steps=2", f"output_dir={tmp_path}/outputs")
    short = ("max_completion_length=4", "num_generations=4", "device=cpu", "scoring.workers=0")
    result = cli("run", tmp_path / "train.py", *OURS, *machine, *short, "--json")
    assert result.exit_code == 0, result.stderr
    left = json.loads(result.stdout)
    assert left["steps"] == 2 and Path(left["run_dir"]).parent == tmp_path / "outputs"
    assert "not as in Unsloth: vllm_sampling_params (train.py:" in result.stderr
