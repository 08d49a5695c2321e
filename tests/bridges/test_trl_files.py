"""TRL's arguments, from YAML and from Python, against TRL itself: its names and defaults are those of the table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from groupwise.bridges.trl.from_trl import from_trl
from groupwise.config.formats import translation as importers
from groupwise.config.formats.format import format_named
from groupwise.config.load import load_object
from groupwise.config.loss import loss_of
from groupwise.config.run import RunConfig, TrackingConfig
from groupwise.errors import ConfigError, LoadError
from groupwise.run.config_file import LoadedRun, read_run
from groupwise.run.loop import run_loop
from wording import raises, warns

FILE = """\
model_name_or_path: starter
dataset_name: prompts.jsonl
reward_funcs: [my_rewards.exact]
num_generations: 4
per_device_train_batch_size: 8
max_steps: 10
"""


EARLIER = {
    "fp16_backend",
    "fp16_opt_level",
    "gradient_checkpointing_use_reentrant",
    "group_by_length",
    "half_precision_backend",
    "include_inputs_for_metrics",
    "include_tokens_per_second",
    "jit_mode_eval",
    "logging_dir",
    "mp_parameters",
    "overwrite_output_dir",
    "past_index",
    "per_gpu_eval_batch_size",
    "ray_scope",
    "save_safetensors",
    "torchdynamo",
    "tpu_metrics_debug",
    "tpu_num_cores",
    "use_ipex",
    "use_legacy_prediction_loop",
    "use_liger_loss",
    "use_mps_device",
    "vllm_device",
    "vllm_dtype",
    "vllm_enable_prefix_caching",
    "wandb_log_unique_prompts",
    "xpu_backend",
}
"""What TRL 0.14 to 0.27 and transformers 4 had besides, and has no effect here."""
OPEN_R1 = {
    "benchmarks",
    "callbacks",
    "chat_template",
    "code_eval_scoring_mode",
    "code_eval_test_batch_size",
    "code_language",
    "dataset_mixture",
    "dataset_prompt_column",
    "hub_model_revision",
    "overwrite_hub_revision",
    "push_to_hub_revision",
    "system_prompt",
    "wandb_entity",
    "wandb_project",
    "wandb_run_group",
}


def score(completions, **columns):
    return [float(len(each)) for each in completions]


@pytest.fixture
def read(tmp_path):
    def read(text: str = FILE, *overrides: str) -> LoadedRun:
        (tmp_path / "trl.yaml").write_text(text)
        return read_run(tmp_path / "trl.yaml", overrides)

    return read


def fields(*classes: type) -> dict[str, Any]:
    """Name -> default of the fields of TRL's classes."""
    return {each.name: each.default for cls in classes for each in dataclasses.fields(cls)}


def test_every_argument_of_trl_is_in_the_table_and_has_its_default():
    trl = pytest.importorskip("trl")
    script = pytest.importorskip("trl.scripts.grpo")
    theirs = fields(trl.GRPOConfig, trl.ModelConfig, script.GRPOScriptArguments)
    ours = {
        key.name: key for key in format_named("trl").keys if key.fate != "older" and key.name not in EARLIER | OPEN_R1
    }
    assert theirs.keys() - ours.keys() == set()
    assert ours.keys() - theirs.keys() == {
        "trl_version",
        "kind",
        "accelerate_config",
        "num_processes",
        "warmup_ratio",
        "datasets",
        "streaming",
        "test_split_size",
        "max_prompt_length",
    }
    no_default = {"bf16", "output_dir", "save_steps", "save_strategy", "gradient_checkpointing", "warmup_steps"}
    for name, key in ours.items():
        if key.fate in ("plain", "made") and name in theirs and name not in no_default:
            said = theirs[name] if theirs[name] is not dataclasses.MISSING else None
            assert (
                key.default == getattr(said, "value", said)
                or (key.default, said) in [(True, "group"), (None, -1)]
                or (name in ("report_to",) and said == "none")
            ), name
        if key.fate == "absent" and name in theirs:  # the default asks for nothing
            assert theirs[name] in (None, *key.off, dataclasses.MISSING), name


def test_a_file_in_our_words(read):
    config = read().runnable()
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_tokens) == (2, 4, 512)
    assert (config.train.steps, config.train.learning_rate, config.train.schedule) == (10, 1e-6, "linear")
    assert config.train.lora is None and config.dtype == "float32"  # use_peft is false there
    assert config.data.shuffle and config.data.source == "prompts.jsonl" and config.seed == 42
    spec = loss_of(config.algo, max_tokens=512)
    assert (config.algo.policy_loss, spec.clip_low, spec.clip_high, spec.kl) == ("dapo", 0.2, 0.2, "none")


MIXTURE = """
datasets:
  - {path: org/sums, name: main, split: validation}
  - {path: prompts.jsonl, columns: [prompt, answer]}
  - {path: prompts.jsonl}
"""


def mixture(text: str) -> str:
    return FILE.replace("dataset_name: prompts.jsonl", "") + text


def test_a_mixture_of_datasets_is_several_sources(read):
    loaded = read(mixture(MIXTURE))
    first, second, third = loaded.runnable().data.sources
    assert (first.source, first.args, first.split, first.weight) == ("org/sums", {"name": "main"}, "validation", None)
    assert (second.source, second.label, third.label) == ("prompts.jsonl", "prompts.jsonl (1)", "prompts.jsonl (2)")
    assert all(each.raw and each.prompt_key == "prompt" and not each.completion_only for each in (first, second))
    assert any("columns" in note.text for note in loaded.idle)


def test_a_mixture_that_streams_has_equal_shares_and_says_so(read):
    loaded = read(mixture(MIXTURE + "streaming: true\n"))
    data = loaded.runnable().data
    assert data.streaming and data.weights == (1, 1, 1)
    assert any(note.place.startswith("streaming") for note in loaded.differs)
    with pytest.raises(ConfigError) as caught:
        read(mixture(MIXTURE + "streaming: true\n"), "max_steps=-1")
    assert "max_steps" in str(caught.value)


def test_a_dataset_that_streams(read):
    assert read(FILE, "dataset_streaming=true").runnable().data.streaming
    with pytest.raises(ConfigError) as caught:
        read(FILE, "dataset_streaming=true", "max_steps=-1")
    assert "max_steps" in str(caught.value)


def test_what_of_a_mixture_is_held_out_by_chance_is_refused_with_what_to_write(read):
    [note] = read(mixture(MIXTURE + "test_split_size: 0.1\n")).refused
    assert note.place.startswith("test_split_size") and note.instead == "test_split_size=null"


@pytest.mark.parametrize("entry", ["{name: main}", "{path: a, splt: x}", "5"])
def test_a_mixture_that_cannot_be_read(read, entry):
    with pytest.raises(ConfigError) as caught:
        read(mixture(f"datasets: [{entry}]\n"))
    assert "datasets" in str(caught.value)


def test_the_mixture_of_open_r1(read):
    text = "dataset_mixture: {datasets: [{id: org/a, config: main, weight: 0.5}, {id: org/b, weight: 1.0}], seed: 7}\n"
    loaded = read(mixture(text))
    first, second = loaded.runnable().data.sources
    assert (first.source, first.args, first.sample, first.seed) == ("org/a", {"name": "main"}, 0.5, 7)
    assert (second.source, second.sample, second.weight) == ("org/b", None, None)
    assert any("seed 7" in note.text for note in loaded.differs)


def test_names_of_2025(read):
    older = "torch_dtype: bfloat16\nuse_peft: true\nevaluation_strategy: 'no'\nno_cuda: true\n"
    older += "vllm_guided_decoding_regex: a+\n"
    loaded = read(FILE + older + "overwrite_output_dir: true\ngroup_by_length: true\n")
    config = loaded.runnable()
    assert (config.dtype, config.device, config.rollout.structured_outputs_regex) == ("bfloat16", "cpu", "a+")
    assert loaded.document.origin(("dtype",)) == "torch_dtype trl.yaml:7"
    assert [note.place.split()[0] for note in loaded.idle] == ["overwrite_output_dir", "group_by_length"]
    assert read(FILE + older, "dtype=float32").runnable().dtype == "float32"  # what is overridden holds
    assert read(FILE + "use_peft: true\ndtype: float32\n", "torch_dtype=bfloat16").runnable().dtype == "bfloat16"
    for both in ("torch_dtype: bfloat16\ndtype: float32\n", "dtype: float32\ntorch_dtype: bfloat16\n"):
        with pytest.raises(ConfigError):
            read(FILE + both)


def test_conversations_of_open_r1(read):
    said = (
        "dataset_prompt_column: problem\nsystem_prompt: Think.\nreport_to: [wandb]\nwandb_project: p\nwandb_entity: e\n"
    )
    config = read(FILE + said).runnable()
    assert (config.data.prompt_key, config.data.system, config.data.raw) == ("problem", "Think.", False)
    assert (config.tracking.wandb, config.tracking.wandb_entity) == ("p", "e")


def test_the_defaults_of_1_8(read):
    config = read(FILE + "trl_version: 1.8\nbeta: 0.1\n").runnable()
    assert config.rollout.max_tokens == 256 and config.algo.kl == "k3"
    assert read(FILE + "beta: 0.1\n").runnable().algo.kl == "k3_unbiased"


def test_lora_of_the_script(read):
    lora = read(FILE + "use_peft: true\nlora_target_modules: [q_proj]\n").runnable().train.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (16, 32, 0.05, ("q_proj",))
    assert read(FILE + "use_peft: true\ndisable_dropout: true\n").runnable().train.lora.dropout == 0.0  # type: ignore[union-attr]


def test_the_head_in_float32(read):
    assert read(FILE).runnable().cast_lm_head == "auto"
    assert read(FILE + "cast_lm_head_to_fp32: true\n").runnable().cast_lm_head == "float32"


def test_batches(read):
    config = read(FILE + "steps_per_generation: 4\ngradient_accumulation_steps: 2\nnum_iterations: 3\n").runnable()
    assert (config.rollout.prompts_per_step, config.train.minibatches, config.train.passes) == (8, 2, 3)
    assert config.train.steps == 2  # 10 optimizer steps, 6 on each rollout batch
    with raises(ConfigError):
        read(FILE + "steps_per_generation: 4\ngeneration_batch_size: 32\n")
    with raises(ConfigError):
        read(FILE.replace("8", "3") + "gradient_accumulation_steps: 4\nsteps_per_generation: 2\n")
    for none in ("0", "-1", "0.5"):
        with raises(ConfigError):
            read(FILE + f"num_iterations: {none}\n")


def test_a_template_with_half_a_group_is_refused_with_what_fits(read):
    """A well-known template: a batch of 4 with groups of 8."""
    text = FILE.replace("num_generations: 4", "num_generations: 8").replace("size: 8", "size: 1")
    with raises(ConfigError):
        read(text + "gradient_accumulation_steps: 4\n")


def test_short_names_of_rewards(read):
    rewards = read(FILE, "reward_funcs=[accuracy_reward, get_soft_overlong_punishment, owner/model]").runnable().rewards
    assert [each.function for each in rewards] == [
        "trl.rewards:accuracy_reward",
        "groupwise.rewards.length:soft_overlong",
        "groupwise.rewards.classifier:reward_model",
    ]
    with raises(ConfigError):
        read(FILE, "reward_funcs=[accuracy]")


def test_evaluation_and_trackers(read):
    config = read(
        FILE + "eval_strategy: steps\neval_steps: 4\nreport_to: [wandb, tensorboard]\nproject: p\n"
    ).runnable()
    assert config.eval is not None and (config.eval.every, config.eval.k) == (4, 4)
    assert config.tracking.wandb == "p" and config.tracking.tensorboard
    assert config.tracking.completions == 0  # as there, where log_completions asks for them
    shown = read(FILE + "report_to: wandb\nlog_completions: true\n").runnable()
    assert shown.tracking.completions == TrackingConfig().completions > 0
    assert read(FILE).runnable().tracking == TrackingConfig()
    with raises(ConfigError):
        read(FILE + "report_to: true\n")


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("use_vllm=true", "use_vllm=false"),
        ("top_entropy_quantile=0.2", "top_entropy_quantile=null"),
        ("use_adaptive_entropy=true", "use_adaptive_entropy=false"),
        ("vespo_k_pos=1.0", "vespo_k_pos=null"),
        ("push_to_hub=true", "push_to_hub=false"),
        ("model_init_kwargs={revision: x}", "model_init_kwargs=null"),
        ("lora_r=4", "use_peft=true"),
    ],
)
def test_what_is_not_here(read, override, instead):
    with raises(ConfigError):
        read(FILE, override).runnable()
    read(FILE, override, instead).runnable()


def test_an_environment_stands_beside_the_file(read):
    """What the refusal of an argument for tools says is what runs."""
    tools = ("max_tool_calling_iterations=3", "env.environment=my_env:Shop", "env.max_turns=4")
    with raises(ConfigError):
        read(FILE, *tools).runnable()
    config = read(FILE, *tools[1:]).runnable()
    assert config.env is not None and (config.env.environment, config.env.max_turns) == ("my_env:Shop", 4)


def test_a_typo_names_the_key_and_line(read):
    with raises(ConfigError):
        read(FILE + "num_generatons: 4\n")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("accelerate_config: zero2", ("ddp", False)),
        ("accelerate_config: zero3", ("fsdp", False)),
        ("accelerate_config: fsdp2", ("fsdp", False)),
        ("accelerate_config: multi_gpu", ("ddp", False)),
        ("accelerate_config: mine.yaml", ("fsdp", True)),
        ("deepspeed: ds.json", ("fsdp", True)),
        ("fsdp: full_shard offload", ("fsdp", True)),
        ("fsdp: false", ("ddp", False)),
        ("fsdp: true\nfsdp_config: {offload_params: true}", ("fsdp", True)),
    ],
)
def test_how_processes_share_the_model(read, tmp_path, said, expected):
    (tmp_path / "mine.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    train = read(f"{FILE}{said}\n").runnable().train
    assert (train.parallel, train.cpu_offload) == expected


def test_two_ways_to_share_the_model_are_a_problem(read):
    with raises(ConfigError):
        read(f"{FILE}fsdp: full_shard\ndeepspeed: zero3.json\n")
    with raises(ConfigError):
        read(f"{FILE}deepspeed: mine.json\n").runnable()
    with raises(ConfigError):
        read(f"{FILE}fsdp: [sharded]\n")


# ---- from Python ----


def test_a_grpo_config_is_the_same_run_as_its_mapping(tmp_path):
    trl = pytest.importorskip("trl")
    said = {"num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 10, "beta": 0.1, "epsilon_high": 0.3}
    args = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, **said)
    of_object = from_trl(args, model="starter", rewards=score, data="p.jsonl")
    of_mapping = from_trl(said | {"output_dir": str(tmp_path)}, model="starter", rewards=score, data="p.jsonl")
    assert of_object == of_mapping and isinstance(of_object, RunConfig)
    assert of_object.rewards[0].function == "test_trl_files:score"
    assert of_object.folder.name == "bridges"


def test_a_generation_batch_survives_the_object(tmp_path):
    trl = pytest.importorskip("trl")
    sizes = {"num_generations": 4, "per_device_train_batch_size": 8, "generation_batch_size": 32, "max_steps": 8}
    config = from_trl(
        trl.GRPOConfig(output_dir="x", bf16=False, **sizes), model="starter", rewards=score, data="p.jsonl"
    )
    assert (config.rollout.prompts_per_step, config.train.minibatches) == (8, 4)


def test_peft_data_and_overrides():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"])
    config = from_trl(
        {"max_steps": 5},
        model="starter",
        rewards=["my_rewards.exact", score],
        data={"source": "m:rows", "args": {"n": 4}, "limit": 2},
        peft=lora,
        overrides=["num_generations=4", "rollout.batch_rows=8"],
    )
    assert config.train.lora is not None and config.train.lora.targets == ("q_proj", "v_proj")
    assert config.data.args == {"n": 4} and config.data.limit == 2
    assert (config.rollout.group_size, config.rollout.batch_rows) == (4, 8)
    assert [each.function for each in config.rewards] == ["my_rewards:exact", "test_trl_files:score"]


def test_differences_are_warnings():
    with warns():
        from_trl({"max_steps": 5}, model="starter", rewards=score, data="p.jsonl", peft={"r": 4})


def test_what_cannot_be_read_is_refused():
    with raises(ConfigError):
        from_trl(5, model="starter", rewards=score, data="p.jsonl")
    with raises(ConfigError):
        from_trl({"max_steps": 5}, model="starter", rewards=score, data=5)
    with raises(ConfigError):
        from_trl({"max_steps": 5}, model="starter", rewards=score, data={"train": []})
    with raises(ConfigError):
        from_trl({"max_steps": 5}, model="starter", rewards=score, data=[{"prompt": "a"}, "b"])


class Vowels:
    """A reward that is an instance."""

    def __call__(self, completions, **columns):
        return [sum(each.count(vowel) for vowel in "aeiou") / (1 + len(each)) for each in completions]


def test_a_dataset_lambdas_instances_and_a_lora_config_are_trained(tmp_path):
    datasets, peft = pytest.importorskip("datasets"), pytest.importorskip("peft")
    rows = datasets.Dataset.from_list([{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)])
    seen: list[str] = []

    def gold(completions, answer):
        seen.extend(answer)
        return [float(gold in completion) for completion, gold in zip(completions, answer, strict=True)]

    config = from_trl(
        {"num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 1, "output_dir": str(tmp_path)},
        model="starter",
        rewards=[gold, lambda completions: [len(each) / 100 for each in completions], Vowels()],
        data=rows,
        peft=peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        overrides=["max_completion_length=8"],
    )
    assert config.scoring.workers == 0  # no other process has them
    result = run_loop(config)
    assert result.steps == 1 and set(seen) <= {str(i + 1) for i in range(8)} and len(seen) == 8
    again = from_trl({"max_steps": 5}, model="starter", rewards=[gold], data=rows)
    assert again.data is not None and config.data is not None and again.data.source == config.data.source
    assert again.rewards[0].function == config.rewards[0].function  # a script that is run again finds its run


def test_what_was_handed_over_is_missing_in_another_process():
    with raises(LoadError):
        load_object("groupwise.config.held_objects:rows_of_another_process")
    assert not hasattr(importers, "torch"), "torch's compiler asks all modules for it"


def test_what_a_lora_config_says_besides_is_refused():
    peft = pytest.importorskip("peft")
    said = {"model": "starter", "rewards": score, "data": "p.jsonl"}
    for lora in (
        peft.LoraConfig(target_modules=["q_proj"], rank_pattern={"q_proj": 2}),
        peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[0]),
        peft.LoraConfig(target_modules=["q_proj"], lora_bias=True),
    ):
        with raises(ConfigError):
            from_trl({"max_steps": 5}, peft=lora, **said)
    loaded = from_trl({"max_steps": 5}, peft=peft.LoraConfig(target_modules=["q_proj"], use_dora=True), **said)
    assert loaded.train.lora is not None and loaded.train.lora.use_dora
    with raises(ConfigError):
        from_trl({"max_steps": 5}, peft=4, **said)


def test_rank_stabilised_lora_and_moments_of_8_bits():
    said = {
        "model": "starter",
        "rewards": score,
        "data": "p.jsonl",
        "peft": {"r": 8, "use_rslora": True, "target_modules": "all-linear"},
    }
    train = from_trl({"max_steps": 5, "optim": "adamw_8bit"}, **said).train
    assert train.lora is not None and train.lora.use_rslora and not train.lora.use_dora
    assert (train.lora.rank, train.lora.alpha, train.optimizer) == (8, 8, "adamw_8bit")
