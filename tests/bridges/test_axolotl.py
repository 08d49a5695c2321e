"""An Axolotl file as a run: the reference files load as they stand, and every key is mapped, listed or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import ruamel.yaml

from groupwise.bridges.axolotl.importer import ASYNC_ONLY
from groupwise.config.algo import AlgoConfig
from groupwise.config.formats.format import format_named
from groupwise.config.loss import loss_of
from groupwise.config.run import RunConfig
from groupwise.config.yaml import key_paths
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from reference_files import CPU, DORA, FULL_ASYNC, QUICK_START, write_project
from wording import raises

LOCAL = ("trl.use_vllm=false",)


@pytest.fixture
def read(tmp_path):
    """`read(text, override, ...)`: the file in a folder with its reward module and data."""
    write_project(tmp_path)

    def read(text: str = QUICK_START, *overrides: str) -> LoadedRun:
        (tmp_path / "a.yaml").write_text(text)
        return read_run(tmp_path / "a.yaml", overrides)

    return read


def without(text: str, *keys: str) -> str:
    """A file without some of its keys at the top level."""
    yaml = ruamel.yaml.YAML(typ="safe")
    data = {key: value for key, value in yaml.load(text).items() if key not in keys}
    import io

    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def refusal(loaded: LoadedRun) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded.runnable()
    return str(caught.value)


# ---- the reference files ----


@pytest.mark.parametrize("text", [QUICK_START, FULL_ASYNC, DORA, CPU], ids=["quick start", "async", "dora", "cpu"])
def test_the_reference_files_load_and_their_loss_resolves(read, text):
    config = read(text).config
    loss_of(config.algo, max_tokens=config.rollout.max_tokens)


def test_the_quick_start_in_our_words(read):
    loaded = read(QUICK_START, *LOCAL)
    config = loaded.runnable()
    assert (config.name, config.model, config.seed, config.output_dir) == (
        "a",
        "Qwen/Qwen2.5-1.5B-Instruct",
        42,
        "./grpo-output",
    )
    rollout, train = config.rollout, config.train
    assert (rollout.prompts_per_step, rollout.group_size, rollout.max_tokens, rollout.temperature) == (1, 8, 512, 0.7)
    assert rollout.refill == 1.0 and rollout.on_policy
    assert (train.steps, train.learning_rate, train.schedule, train.warmup_steps) == (200, 5e-6, "cosine", 10)
    assert train.lora is not None and (train.lora.rank, train.lora.alpha, train.lora.targets) == (32, 64, "all-linear")
    assert train.gradient_checkpointing
    assert [(each.function, each.weight) for each in config.rewards] == [
        ("rewards:accuracy_reward", 1.0),
        ("rewards:format_reward", 0.5),
    ]
    loss = loss_of(config.algo, max_tokens=512)  # TRL 1.8's defaults, which are not DAPO's
    assert (config.algo.policy_loss, loss.clip_low, loss.clip_high, loss.reduction) == ("dapo", 0.2, 0.2, "token_mean")
    assert (loss.kl, loss.correction) == ("none", "none")
    assert not loaded.differs
    assert {"bf16", "attn_implementation", "logging_steps"} & {n.place.split()[0] for n in loaded.idle} == {
        "attn_implementation",
        "logging_steps",
    }


def test_vllm_is_the_engine_at_the_address_that_the_file_names(read):
    config = read(QUICK_START).runnable()
    vllm = config.vllm
    assert (config.engine, vllm.mode, vllm.urls) == ("vllm", "server", ("http://127.0.0.1:8000",))
    assert (vllm.host, vllm.port, vllm.gpu_memory_utilization, vllm.max_model_len) == ("0.0.0.0", 8000, 0.85, 2048)
    assert (vllm.start_timeout_s, vllm.tensor_parallel_size, vllm.dtype) == (300.0, 1, "auto")
    ours = read(QUICK_START, "vllm.python=/opt/vllm/bin/python", "vllm.environment={A: b}").runnable().vllm
    assert (ours.python, ours.environment) == ("/opt/vllm/bin/python", {"A": "b"})
    message = refusal(read(QUICK_START, "adapter=null", "lora_r=null", "lora_alpha=null", "lora_target_linear=null"))
    assert "trl.use_vllm (a.yaml:10): vLLM is handed adapters" in message and "trl.use_vllm=false" in message
    assert read(QUICK_START, "trl.use_vllm=false").runnable().model == "Qwen/Qwen2.5-1.5B-Instruct"


def test_the_full_async_file_in_our_words(read):
    config = read(FULL_ASYNC, *LOCAL).runnable()
    rollout = config.rollout
    assert (rollout.weight_sync_interval, rollout.max_staleness, rollout.stream_groups) == (2, 2, 1)
    assert (rollout.replay.size, rollout.replay.share, rollout.replay.max_age) == (100, 1.0, 500)
    assert (rollout.reroll.max_groups, rollout.reroll.start) == (1, 0.5)
    assert config.scoring.workers == 4
    loss = loss_of(config.algo, max_tokens=512)
    assert (loss.correction, loss.correction_cap, loss.anchor) == ("tis_token", 3.0, "old")
    assert loss.opsm_threshold == 0.5


def test_a_tokens_correction_of_a_sequence_ratio_is_said_to_differ(read):
    token, sequence = (
        [str(note) for note in read(FULL_ASYNC, *LOCAL, f"trl.importance_sampling_level={level}").differs]
        for level in ("token", "sequence")
    )
    assert any("each token has its own correction" in note for note in sequence)
    assert not any("its own correction" in note for note in token)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: Layer}", ("fsdp", False)),
        ("fsdp_version: 2\nfsdp_config: {offload_params: true, reshard_after_forward: true}", ("fsdp", True)),
        ("deepspeed: deepspeed_configs/zero3_bf16.json", ("fsdp", False)),
        ("deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json", ("fsdp", True)),
        ("deepspeed: deepspeed_configs/zero1.json", ("ddp", False)),
        ("deepspeed: {zero_optimization: {stage: 3}}", ("fsdp", False)),
        ("dp_shard_size: 4", ("fsdp", False)),
        ("dp_shard_size: 1", ("ddp", False)),
    ],
)
def test_how_processes_share_the_model(read, said, expected):
    train = read(f"{QUICK_START}{said}\n", *LOCAL).runnable().train
    assert (train.parallel, train.cpu_offload) == expected


TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
    "+ m.content + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ m.content + '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_the_tokenizer_has_anyway_is_accepted_by_its_name(read, tmp_path, tokenizer, name):
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATES[name]
    own.save_pretrained(tmp_path / "model")
    text = QUICK_START.replace("chat_template: tokenizer_default", f"chat_template: {name}")
    model = f"base_model={tmp_path / 'model'}"
    assert not read(text, model).refused
    read(text, model, *LOCAL).runnable()
    other = "llama3" if name == "chatml" else "chatml"
    message = refusal(read(text, model, f"chat_template={other}"))
    assert "the tokenizer's own template renders '" in message and f"where {other} renders '" in message
    assert "it runs with: chat_template=tokenizer_default" in message


def test_a_template_that_cannot_be_compared_is_refused(read, tmp_path):
    text = QUICK_START.replace("chat_template: tokenizer_default", "chat_template: alpaca")
    assert "only chatml, " in refusal(read(text, "base_model=starter"))
    assert "the tokenizer cannot be read: " in refusal(read(text, f"base_model={tmp_path / 'nowhere'}"))


def test_dora_beside_vllm_is_refused_at_run_and_runs_without_vllm(read):
    loaded = read(DORA)
    message = refusal(loaded)
    assert "peft_use_dora (a.yaml:12): vLLM serves no DoRA" in message
    instead = message.rpartition("it runs with: ")[2].split()
    assert set(instead) == {"chat_template=tokenizer_default", "trl.use_vllm=false"}
    config = read(DORA, *instead).runnable()
    assert config.train.lora is not None and config.train.lora.dropout == 0.05 and config.train.lora.use_dora
    loss = loss_of(config.algo, max_tokens=256)
    assert (loss.kl, loss.kl_coeff) == ("k3", 0.001)


def test_a_warm_up_longer_than_the_run_rises_as_far_as_there(read):
    loaded = read(DORA)
    assert (loaded.config.train.warmup_steps, loaded.config.train.steps) == (3, 3)
    assert loaded.config.train.learning_rate == pytest.approx(1e-4 * 3 / 10)
    assert not loaded.differs  # the rates are the same, step by step


# ---- overrides ----


def test_overrides_are_in_axolotls_words_and_ours_act_on_what_came_of_it(read):
    config = read(
        QUICK_START, *LOCAL, "base_model=starter", "max_steps=3", "rollout.batch_rows=16", "name=x"
    ).runnable()
    assert (config.model, config.train.steps, config.rollout.batch_rows, config.name) == ("starter", 3, 16, "x")


def test_an_override_may_reach_into_a_list(read):
    config = read(QUICK_START, *LOCAL, "trl.reward_weights[1]=0.25").runnable()
    assert config.rewards[1].weight == 0.25


# ---- what is wrong is named with its line ----


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trl.num_generation=4", "unknown; did you mean trl.num_generations?"),
        ("num_generations=4", "unknown; did you mean trl.num_generations?"),
        ("trl.learning_rate=1", "unknown; did you mean learning_rate?"),
        ("lora_alphas=4", "unknown; did you mean lora_alpha?"),
        ("vllm.max_model_length=4", "unknown; did you mean"),
        ("datasets[0].spilt=x", "unknown; did you mean datasets[].split?"),
        ("micro_batch_size=many", "'many' is not valid; it must be a whole number"),
        ("adapter=[lora]", "['lora'] is not valid; it must be a string"),
        ("trl=5", "5 is not valid; it must be a mapping"),
        ("trl.loss_type=ppo", "'ppo' is not valid; it must be one of grpo, bnpo"),
        ("trl.reward_weights=[1.0]", "1 weights for 2 functions; give one for each"),
        ("trl.reward_funcs=[accuracy]", "'accuracy' is neither a dotted path (module.function) nor a reward model"),
        ("learning_rate=null", "learning_rate: required and missing"),
        ("datasets=null", "datasets: required and missing"),
        ("lora_r=0", "train.lora.rank (lora_r given as 'lora_r=0'): 0 is not valid"),
        ("trl.importance_sampling_level=seq", "it must be one of token, sequence"),
        ("load_best_model_at_end=true", "it needs held-out rows: test_datasets, or val_set_size above 0"),
    ],
)
def test_what_cannot_be_read(read, override, message):
    with pytest.raises(ConfigError) as caught:
        read(QUICK_START, override)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["evals_per_epoch=4", "eval_steps=0.1"])
def test_evaluations_of_nothing_are_without_effect(read, key):
    """As most of Axolotl's example files have them: val_set_size is 0 there, and nothing is evaluated."""
    found = read(QUICK_START, "val_set_size=0.0", key)
    assert found.config.eval is None
    assert any(key.split("=")[0] in note.place for note in found.idle)


def test_unknown_keys_have_their_line_and_come_all_at_once(read):
    text = QUICK_START + "flash_attn: true\n" + "lora_alhpa: 3\n"
    with pytest.raises(ConfigError) as caught:
        read(text)
    message = str(caught.value)
    assert "a.yaml has 2 problems" in message
    assert "flash_attn (a.yaml:39): unknown" in message
    assert "lora_alhpa (a.yaml:40): unknown; did you mean lora_alpha?" in message


def test_a_number_that_pyyaml_reads_as_text_is_a_number(read):
    assert read(QUICK_START.replace("5.0e-6", "1e-5")).config.train.learning_rate == 1e-5
    assert read(QUICK_START.replace("5.0e-6", "'1e-5'")).config.train.learning_rate == 1e-5


def test_yes_and_no_are_what_yaml_1_1_takes_them_for(read):
    text = QUICK_START.replace("gradient_checkpointing: true", "gradient_checkpointing: no")
    assert not read(text.replace("use_vllm: true", "use_vllm: off")).runnable().train.gradient_checkpointing


@pytest.mark.parametrize("override", ["flex_attention=true", "attn_implementation=flex_attention"])
def test_flex_attention_is_ours(read, override: str):
    loaded = read(QUICK_START, *LOCAL, override)
    assert loaded.runnable().train.attention == "flex"
    assert not any("flex" in note.place for note in loaded.idle)
    assert read(QUICK_START, *LOCAL, "flex_attention=false").runnable().train.attention == "auto"


# ---- what is refused ----


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("trl.use_vllm=true; load_in_4bit=true", "trl.use_vllm=false"),
        ("trl.use_vllm=true; adapter=qlora", "trl.use_vllm=false"),
        ("adapter=qlora; fsdp=full_shard", "adapter=lora"),
        ("load_in_8bit=true; fsdp=full_shard", "load_in_8bit=false"),
        ("adapter=qlora; peft_use_dora=true", "peft_use_dora=false"),
        ("deepspeed=mine.json", "train.parallel=fsdp"),
        ("sequence_parallel_degree=2", "context_parallel_size=2"),
        ("optimizer=muon", "optimizer=adamw_torch"),
        ("lr_scheduler=polynomial", "lr_scheduler=cosine"),
        ("trl.repetition_penalty=1.1", "trl.repetition_penalty=null"),
        ("trl.rollout_func=m.f", "trl.rollout_func=null"),
        ("trl.skip_zero_advantage_batches=false", "trl.skip_zero_advantage_batches=true"),
        ("trl.generation_kwargs={suppress_tokens: [3]}", "trl.generation_kwargs=null"),
        ("chat_template=llama3", "chat_template=tokenizer_default"),
        ("special_tokens.eos_token=x", "special_tokens.eos_token=null"),
        ("plugins=[axolotl.integrations.spectrum.X]", "plugins=null"),
        ("resume_from_checkpoint=x", "auto_resume_from_checkpoints=true"),
        ("datasets[0].trust_remote_code=true", "datasets[0].trust_remote_code=null"),
        ("adapter=null", "adapter=lora"),
    ],
)
def test_what_is_not_here_is_refused_with_what_runs(read, override, instead):
    message = refusal(read(QUICK_START, *LOCAL, *override.split("; ")))
    assert any(f"given as {each!r}" in message for each in override.split("; ")) or "lora_r (a.yaml:6)" in message
    advice = message.rpartition("it runs with: ")[2].split()
    assert instead in advice
    read(QUICK_START, *LOCAL, *override.split("; "), *advice).runnable()


@pytest.mark.parametrize(
    "override",
    [
        "trl.skip_zero_advantage_batches=true",
        "context_parallel_size=1",
        "context_parallel_size=2",
        "load_in_4bit=false",
        "optimizer=adamw_bnb_8bit",
        "plugins=[axolotl.integrations.liger.LigerPlugin]",
        "trl.use_liger_loss=true",
        "batch_flattening=true",
        "sample_packing=false",
        "tf32=true",
        "wandb_mode=offline",
    ],
)
def test_what_asks_for_what_is_here_anyway_is_accepted(read, override):
    read(QUICK_START, *LOCAL, override).runnable()


# ---- the algorithm ----


def algo(loaded: LoadedRun) -> dict[str, Any]:
    return loaded.config.algo.loss_overrides()


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_losses_are_our_presets_with_trls_epsilon(read, loss):
    loaded = read(QUICK_START, f"trl.loss_type={loss}", "trl.epsilon_high=0.28", "trl.use_vllm=false")
    assert loaded.config.algo.policy_loss == loss
    assert algo(loaded) == {"clip_low": 0.2, "clip_high": 0.28}
    spec = loss_of(loaded.config.algo, max_tokens=512)
    assert spec.reduction_length == (512 if loss == "dr_grpo" else None)
    assert loaded.config.algo.advantage == "group_std"  # there scale_rewards decides, whatever the loss


def test_epsilon_high_is_the_largest_ratio_with_cispo(read):
    loaded = read(QUICK_START, *LOCAL, "trl.loss_type=cispo", "trl.epsilon_high=5.0")
    assert algo(loaded) == {"clip_high": 4.0}
    with raises(ConfigError):
        read(QUICK_START, *LOCAL, "trl.loss_type=cispo")


def test_sequence_level_ratios(read):
    assert algo(read(QUICK_START, *LOCAL, "trl.importance_sampling_level=sequence"))["ratio"] == "sequence"
    with raises(ConfigError):
        read(QUICK_START, *LOCAL, "trl.loss_type=luspo")
    read(QUICK_START, *LOCAL, "trl.loss_type=luspo", "trl.importance_sampling_level=sequence").runnable()


@pytest.mark.parametrize("loss", ["sapo", "vespo"])
def test_what_a_loss_does_not_read_is_listed(read, loss):
    loaded = read(QUICK_START, *LOCAL, f"trl.loss_type={loss}", "trl.epsilon=0.3")
    assert any(note.place.startswith("trl.epsilon") for note in loaded.idle)
    loss_of(loaded.config.algo, max_tokens=512)


def test_the_kl(read):
    assert algo(read(QUICK_START, *LOCAL, "trl.beta=0.04"))["kl"] == "k3"
    assert algo(read(QUICK_START, *LOCAL, "trl.beta=0.04", "trl.use_bias_correction_kl=true"))["kl"] == "k3_unbiased"
    assert algo(read(QUICK_START, *LOCAL, "rl_beta=0.1"))["kl_coeff"] == 0.1
    assert algo(read(QUICK_START, *LOCAL, "rl_beta=0.1", "trl.beta=0.2"))["kl_coeff"] == 0.2
    other = read(QUICK_START + "rl_beta: 0.1\n", *LOCAL)
    assert other.document.origin(("algo", "kl_coeff")) == "rl_beta a.yaml:39"


@pytest.mark.parametrize(
    ("alpha", "every", "reference"),
    [(1.0, 64, ("refresh", 0.99, 64)), (0.1, 1, ("ema", 0.9, 64))],
)
def test_a_reference_that_follows_the_policy(read, alpha, every, reference):
    sync = ("trl.beta=0.1", "trl.sync_ref_model=true")
    given = (f"trl.ref_model_mixup_alpha={alpha}", f"trl.ref_model_sync_steps={every}")
    config = read(QUICK_START, *LOCAL, *sync, *given).runnable().algo
    assert (config.reference, pytest.approx(config.reference_decay), config.reference_every) == reference


def test_a_mixture_every_few_steps_is_not_here(read):
    message = refusal(read(QUICK_START, *LOCAL, "trl.beta=0.1", "trl.sync_ref_model=true"))
    assert "a mixture (0.9) every 64 steps is not here" in message and "trl.ref_model_mixup_alpha=1" in message


@pytest.mark.parametrize(
    ("mode", "correction"),
    [
        ("token_truncate", "tis_token"),
        ("token_mask", "mask_token"),
        ("sequence_truncate", "tis_sequence"),
        ("sequence_mask", "mask_sequence"),
    ],
)
def test_importance_sampling_modes(read, mode, correction):
    loaded = read(FULL_ASYNC, *LOCAL, f"trl.vllm_importance_sampling_mode={mode}", "trl.vllm_importance_sampling_cap=2")
    spec = loss_of(loaded.config.algo, max_tokens=512)
    assert (spec.correction, spec.correction_cap, spec.correction_floor) == (correction, 2, None)


def test_without_correction_the_ratio_of_old_samples_starts_at_one(read):
    loaded = read(FULL_ASYNC, *LOCAL, "trl.vllm_importance_sampling_correction=false")
    assert algo(loaded)["anchor"] == "old" and "correction" not in algo(loaded)


def test_the_correction_is_listed_where_samples_are_never_old(read):
    loaded = read(QUICK_START, *LOCAL, "trl.vllm_importance_sampling_cap=2.0")
    assert any("samples are never old" in note.text for note in loaded.idle)
    with_vllm = read(QUICK_START)
    assert algo(with_vllm)["correction"] == "tis_token"  # use_data_producer: the asynchronous trainer's default
    plain = read(QUICK_START, "trl.use_data_producer=false")
    assert algo(plain)["correction"] == "mask_sequence"


@pytest.mark.parametrize(
    ("scale", "advantage"),
    [("true", "group_std"), ("group", "group_std"), ("batch", "batch_std"), ("none", "mean"), ("false", "mean")],
)
def test_scales_of_rewards(read, scale, advantage):
    assert read(QUICK_START, *LOCAL, f"trl.scale_rewards={scale}").config.algo.advantage == advantage


def test_gdpo_normalises_each_reward_and_refuses_the_other_order(read):
    assert read(QUICK_START, *LOCAL, "rl=gdpo").config.algo.aggregation == "normalize_then_sum"
    with raises(ConfigError):
        read(QUICK_START, "rl=gdpo", "trl.multi_objective_aggregation=sum_then_normalize")


def test_arguments_of_trl_that_axolotl_does_not_know_act(read):
    """There they vanish."""
    given = ("trl.delta=1.5", "trl.entropy_coef=0.01", "trl.max_prompt_length=300", "trl.scale_rewards=batch")
    config = read(QUICK_START, *LOCAL, *given).runnable()
    spec = loss_of(config.algo, max_tokens=512)
    assert (spec.dual_clip, spec.entropy_coeff, config.rollout.max_prompt_tokens) == (1.5, 0.01, 300)
    assert config.algo.advantage == "batch_std"


def test_what_stopped_a_completion_is_seen_by_rewards_as_there(read):
    kept = read(QUICK_START, *LOCAL, "trl.generation_kwargs={stop: END}").runnable().rollout
    assert (kept.stop, kept.include_stop, kept.sampling().include_stop) == (("END",), True, True)
    assert not read(QUICK_START, *LOCAL).runnable().rollout.include_stop


def test_generation_kwargs_act(read):
    kwargs = "trl.generation_kwargs={stop: END, top_k: -1, max_new_tokens: 64, temperature: 0.5}"
    rollout = read(QUICK_START, *LOCAL, kwargs).runnable().rollout
    assert (rollout.stop, rollout.top_k, rollout.max_tokens, rollout.temperature) == (("END",), 0, 64, 0.5)
    with raises(ConfigError):
        read(QUICK_START, *LOCAL, "trl.generation_kwargs={typical_p: 0.9}").runnable()


def test_a_part_of_the_vocabulary_arrives_but_with_vllm(read):
    given = ("trl.top_p=0.9", "trl.top_k=-1", "trl.generation_kwargs={min_p: 0.1}")
    loaded = read(QUICK_START, *LOCAL, *given)
    rollout = loaded.runnable().rollout
    assert (rollout.top_p, rollout.top_k, rollout.min_p) == (0.9, 0, 0.1)
    assert {note.place.split()[0] for note in loaded.differs} >= {"trl.top_p", "trl.generation_kwargs"}
    off = read(QUICK_START, *LOCAL, "trl.top_p=0.9", "trl.generation_kwargs={top_p: 1.0}").runnable().rollout
    assert off.top_p == 1
    with raises(ConfigError):
        read(QUICK_START, "trl.use_vllm=true", "trl.top_p=0.9").runnable()


@pytest.mark.parametrize("name", ["vllm_structured_outputs_regex", "vllm_guided_decoding_regex"])
def test_what_completions_must_match_arrives_but_with_vllm(read, name):
    loaded = read(QUICK_START, *LOCAL, f"trl.{name}=x+")
    assert loaded.runnable().rollout.structured_outputs_regex == "x+"
    assert f"trl.{name}" in {note.place.split()[0] for note in loaded.differs}
    with raises(ConfigError):
        read(QUICK_START, "trl.use_vllm=true", f"trl.{name}=x+").runnable()


def test_without_a_longest_completion_there_is_one_and_it_is_said(read):
    loaded = read(QUICK_START, *LOCAL, "trl.max_completion_length=null")
    assert loaded.config.rollout.max_tokens == 256
    assert any(note.place == "trl.max_completion_length" for note in loaded.differs)


# ---- what Axolotl drops without a word ----


def test_keys_of_the_asynchronous_trainer_act_without_it_and_that_is_said(read):
    text = QUICK_START.replace("  use_data_producer: true\n", "")
    loaded = read(text, *LOCAL, "trl.vllm_sync_interval=5", "trl.reward_num_workers=4", "trl.replay_buffer_size=10")
    assert loaded.config.rollout.weight_sync_interval == 5
    assert loaded.config.scoring.workers == 4 and loaded.config.rollout.replay.size == 10
    said = {note.place.split()[0] for note in loaded.differs if "Axolotl drops it" in note.text}
    assert said == {"trl.vllm_sync_interval", "trl.reward_num_workers", "trl.replay_buffer_size"}
    assert not read(QUICK_START, *LOCAL, "trl.vllm_sync_interval=5").differs


def test_every_async_key_is_known():
    assert set(ASYNC_ONLY) <= {key.name for key in format_named("axolotl").keys}


# ---- optimizer, schedule, length ----


def test_the_default_warm_up_is_three_per_cent(read):
    loaded = read(without(QUICK_START, "warmup_steps"), *LOCAL, "max_steps=1000")
    assert loaded.config.train.warmup_steps == 30
    assert read(without(QUICK_START, "warmup_steps"), *LOCAL, "max_steps=40").config.train.warmup_steps == 2
    assert read(without(QUICK_START, "warmup_steps"), *LOCAL, "warmup_ratio=0.5").config.train.warmup_steps == 100


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("lr_scheduler=linear",), ("linear", 0.0, None)),
        (("lr_scheduler=constant_with_warmup",), ("constant", 0.0, None)),
        (("cosine_min_lr_ratio=0.1",), ("cosine", 0.1, None)),
        (
            ("lr_scheduler=warmup_stable_decay", "lr_scheduler_kwargs={num_decay_steps: 50, min_lr_ratio: 0.2}"),
            ("wsd", 0.2, 50),
        ),
    ],
)
def test_schedules(read, overrides, expected):
    train = read(QUICK_START, *LOCAL, *overrides).runnable().train
    assert (train.schedule, train.final_rate, train.decay_steps) == expected


def test_steps_are_counted_in_rollout_batches(read):
    several = ("trl.generation_batch_size=32", "trl.num_iterations=2", "warmup_steps=16", "save_steps=16")
    config = read(QUICK_START, *LOCAL, *several).runnable()  # 4 minibatches x 2 passes = 8 optimizer steps
    assert (config.rollout.prompts_per_step, config.train.minibatches, config.train.passes) == (4, 4, 2)
    assert (config.train.steps, config.train.warmup_steps, config.checkpoint.every) == (25, 2, 2)
    loaded = read(QUICK_START, *LOCAL, *several, "max_steps=201")
    assert loaded.config.train.steps == 26
    assert "201 optimizer steps become 26 rollout batches of 8 optimizer steps" in loaded.differs[0].text


def test_epochs_are_steps_of_whole_batches(read):
    local = without(QUICK_START, "max_steps", "warmup_steps")
    data = ("datasets[0].path=gsm8k.jsonl", "datasets[0].name=null", "base_model=starter")
    loaded = read(local, *LOCAL, *data, "micro_batch_size=10", "num_epochs=3")  # 12 prompts, 5 a step
    assert loaded.config.train.steps == 3 * 2
    assert loaded.document.origin(("train", "steps")) == "num_epochs given as 'num_epochs=3'"
    assert read(local, *LOCAL, *data, "micro_batch_size=10", "data.limit=5").config.train.steps == 1
    with raises(ConfigError):
        read(local, *LOCAL, *data, "micro_batch_size=100")


def test_full_parameter_training_is_in_float32(read):
    config = read(without(QUICK_START, "adapter", "lora_r", "lora_alpha", "lora_target_linear"), *LOCAL).runnable()
    assert config.train.lora is None and config.dtype == "float32"


def test_kinds_of_lora(read):
    lora = read(QUICK_START, *LOCAL, "peft_use_rslora=true", "lora_r=16").runnable().train.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.use_rslora, lora.use_dora) == (16, 64, True, False)
    lora = read(QUICK_START, *LOCAL, "peft_use_dora=true").runnable().train.lora
    assert lora is not None and lora.use_dora and not lora.use_rslora


@pytest.mark.parametrize(
    ("override", "kind"),
    [("adapter=qlora", "nf4"), ("load_in_4bit=true", "nf4"), ("load_in_8bit=true", "int8"), ("lora_r=8", None)],
)
def test_quantised_bases(read, override, kind):
    config = read(QUICK_START, *LOCAL, override).runnable()
    assert config.quantization == kind and config.train.lora is not None


def test_optimizers_of_8_bits_and_offloaded_activations(read):
    names = {
        "paged_adamw_8bit": "paged_adamw_8bit",
        "adamw_8bit": "adamw_8bit",
        "adamw_bnb_8bit": "adamw_8bit",
        "ao_adamw_8bit": "adamw",
        "adamw_torch_fused": "adamw",
    }
    for theirs, ours in names.items():
        assert read(QUICK_START, *LOCAL, f"optimizer={theirs}").runnable().train.optimizer == ours
    for theirs, ours in (("offload", "offload"), ("offload_disk", "offload"), ("true", True), ("false", False)):
        config = read(QUICK_START, *LOCAL, f"gradient_checkpointing={theirs}").runnable()
        assert config.train.gradient_checkpointing == ours


# ---- evaluation, saving, tracking, the reward model ----


def test_evaluation_of_held_out_rows(read):
    extra = ("val_set_size=0.25", "eval_steps=20", "load_best_model_at_end=true", "early_stopping_patience=3")
    config = read(QUICK_START, *LOCAL, *extra).runnable()
    assert config.eval is not None
    assert (config.eval.every, config.eval.modes, config.eval.k) == (20, ("sampled",), 8)
    assert (config.eval.best, config.eval.patience) == ("sampled", 3)
    assert config.data.args["part"] == "train" and config.eval.data.args["part"] == "test"
    assert read(QUICK_START, *LOCAL, "val_set_size=0.25", "eval_strategy=no").config.eval is None


def test_a_test_dataset(read):
    config = read(QUICK_START, *LOCAL, "test_datasets=[{path: openai/gsm8k, name: main, split: test}]").runnable()
    assert config.eval is not None and (config.eval.data.source, config.eval.data.split) == ("openai/gsm8k", "test")


def test_a_dataset_without_a_transform_is_read_as_it_is(read):
    data = read(QUICK_START, *LOCAL, "datasets=[{path: owner/prompts, name: main, split: x}]").runnable().data
    assert (data.source, data.args, data.split, data.prompt_key) == ("owner/prompts", {"name": "main"}, "x", "prompt")
    assert read(QUICK_START, *LOCAL, "datasets=[{path: gsm8k.jsonl}]").config.data.kind == "file"
    sliced = read(QUICK_START, *LOCAL, "datasets=[{path: gsm8k.jsonl, split: 'train[:3]'}]").config.data
    assert sliced.kind == "function" and sliced.args["datasets"][0]["split"] == "train[:3]"  # and not left out


def test_several_datasets_without_a_transform_are_several_sources(read):
    listed = (
        "[{path: owner/prompts, name: main, split: x}, {path: gsm8k.jsonl, split: 'train[:3]'}, {path: gsm8k.jsonl}]"
    )
    first, second, third = read(QUICK_START, *LOCAL, f"datasets={listed}").runnable().data.sources
    assert (first.source, first.args, first.split) == ("owner/prompts", {"name": "main"}, "x")
    assert (second.source, second.split, second.label) == ("gsm8k.jsonl", "train[:3]", "gsm8k.jsonl (1)")
    assert (third.label, third.weight, third.prompt_key, third.raw) == ("gsm8k.jsonl (2)", None, "prompt", True)
    held_out = read(QUICK_START, *LOCAL, f"datasets={listed}", "val_set_size=2").config
    assert held_out.data.kind == "function"  # rows that are held out by chance are made there


def test_saving_and_tracking(read):
    extra = ("save_steps=0.1", "save_total_limit=7", "auto_resume_from_checkpoints=true", "wandb_project=p")
    config = read(QUICK_START, *LOCAL, *extra, "use_tensorboard=true").runnable()
    assert (config.checkpoint.every, config.adapters.keep, config.resume) == (20, 7, "auto")
    assert config.tracking.wandb == "p" and config.tracking.tensorboard
    assert read(QUICK_START, *LOCAL, "wandb_project=p", "use_wandb=false").config.tracking.wandb is None
    tracking = read(QUICK_START, *LOCAL, "wandb_project=p", "wandb_entity=team", "wandb_name=n").config.tracking
    assert (tracking.wandb, tracking.wandb_entity, tracking.wandb_name) == ("p", "team", "n")
    assert read(QUICK_START, *LOCAL, "wandb_entity=team").config.tracking.wandb_entity is None  # without a project


def test_a_reward_model_is_a_reward(read):
    config = read(QUICK_START, *LOCAL, "trl.reward_funcs[1]=owner/reward-model-1.5B").runnable()
    assert config.rewards[1].function == "groupwise.rewards.classifier:reward_model"
    assert config.rewards[1].args == {"model": "owner/reward-model-1.5B"}
    from groupwise.config.load import load_object

    assert callable(load_object(config.rewards[1].function))


# ---- the table ----


def test_every_key_has_one_row_and_names_keys_that_exist():
    names = [key.name for key in format_named("axolotl").keys]
    assert len(set(names)) == len(names)
    ours = {".".join(path) for path in key_paths(RunConfig)} | {f"algo.{name}" for name in AlgoConfig.model_fields}
    for key in format_named("axolotl").keys:
        assert {each for each in key.here if not key.name.startswith(("datasets", "test_datasets"))} <= ours, key.name
        assert key.what or key.fate == "plain", key.name


def test_the_python_of_the_folder_is_left_alone(read, tmp_path: Path):
    """Reading a file imports no module of the user's."""
    (tmp_path / "rewards.py").write_text("raise RuntimeError('imported')")
    read(QUICK_START, *LOCAL).runnable()


def test_the_order_of_the_rows_is_kept_where_it_is_asked_for(read):
    said = {None: True, "false": True, "true": False}
    for value, shuffled in said.items():
        config = read(QUICK_START, *LOCAL, *([] if value is None else [f"curriculum_sampling={value}"])).config
        assert config.data is not None and config.data.shuffle is shuffled
