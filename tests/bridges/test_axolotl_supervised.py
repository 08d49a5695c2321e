"""Axolotl's files of SFT and DPO: every key is in a table, what they come to, and two of them run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ruamel.yaml

from asking_keys import asking
from groupwise.bridges.axolotl import supervised
from groupwise.bridges.axolotl.dataset_types import NAMED_TEMPLATES, TEMPLATES
from groupwise.config.formats.tables import keys_of
from groupwise.config.run import RunConfig
from groupwise.config.yaml import inline, key_paths
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from groupwise.run.loop import run_loop
from groupwise.tasks.prompts import open_prompts
from wording import raises

SFT = """\
base_model: starter
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: talk.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [gpt]
    train_on_eos: turn
dataset_prepared_path: last_run_prepared
val_set_size: 0.25
output_dir: ./outputs/out
sequence_len: 512
sample_packing: true
pad_to_sequence_len: true
adapter: lora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
"""
DPO = """\
base_model: starter
rl: dpo
datasets:
  - path: pairs.jsonl
    type: chatml.intel
adapter: lora
lora_r: 4
lora_alpha: 8
lora_dropout: 0.05
lora_target_linear: true
micro_batch_size: 4
max_steps: 2
learning_rate: 0.0005
optimizer: adamw_torch
"""


@pytest.fixture
def read(tmp_path: Path):
    """`read(text, *overrides)`: what is made of a file beside twelve rows of conversations, of instructions and of
    pairs."""
    rows: dict[str, list[dict[str, Any]]] = {"talk": [], "alpaca": [], "pairs": []}
    for i in range(12):
        said = [{"from": "human", "value": f"{i} + 1 ="}, {"from": "gpt", "value": str(i + 1)}]
        rows["talk"].append({"conversations": said})
        rows["alpaca"].append({"instruction": "Add 1.", "input": str(i), "output": str(i + 1)})
        rows["pairs"].append({"system": "", "question": f"{i} + 1 =", "chosen": str(i + 1), "rejected": "no"})
    for name, each in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))

    def read(text: str, *overrides: str) -> LoadedRun:
        (tmp_path / "a.yaml").write_text(text)
        return read_run(tmp_path / "a.yaml", overrides)

    return read


def places(notes: Any) -> set[str]:
    return {note.place.partition(" ")[0] for note in notes}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_table_is_consistent(kind: Any):
    keys = keys_of(supervised.KEYS[kind])
    names = {key.name for key in keys}
    assert len(names) == len(keys)
    ours = {".".join(path) for path in key_paths(RunConfig)}
    for key in keys:
        assert key.what or key.fate == "plain", key.name
        assert set(key.here) <= ours, key.name
        assert not key.now or key.now in names, key.name
        for override in key.instead.split() if key.fate == "absent" else ():
            assert override.partition("=")[0] in names | ours, key.name


FILES = {"sft": SFT, "dpo": DPO}


def beside(kind: Any, fate: str) -> dict[str, Any]:
    """Return the keys at the top level that a file of this kind may have and FILES has not, with values that ask."""
    said = ruamel.yaml.YAML(typ="safe").load(FILES[kind])
    keys = [key for key in keys_of(supervised.KEYS[kind]) if key.fate == fate and re.fullmatch(r"\w+", key.name)]
    return {key.name: asking(key) for key in keys if key.name not in {*said, "trl"}}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_idle_is_listed_and_changes_nothing(read, kind: str):
    idle = beside(kind, "idle")
    plain = read(FILES[kind])
    loaded = read(FILES[kind] + "".join(f"{name}: {inline(value)}\n" for name, value in idle.items()))
    assert len(idle) > 150 and places(loaded.idle) >= idle.keys()
    assert loaded.runnable() == plain.runnable()


@pytest.mark.parametrize("kind", FILES)
def test_what_is_absent_is_refused_and_runs_as_advised(read, kind: str):
    absent = beside(kind, "absent")
    keys = {key.name: key for key in keys_of(supervised.KEYS[kind])}
    text = FILES[kind] + "".join(f"{name}: {inline(value)}\n" for name, value in absent.items())
    loaded = read(text)
    assert len(absent) > 70 and places(loaded.refused) == absent.keys()
    instead = [word for name in absent for word in (keys[name].instead or f"{name}=null").split()]
    assert read(text, *instead, "data.streaming=false").runnable()


def test_a_file_of_sft(read):
    loaded = read(SFT)
    config = loaded.runnable()
    assert (loaded.system, config.kind, config.model, config.seed) == ("Axolotl", "sft", "starter", 42)
    lora, train = config.train.lora, config.train
    assert lora is not None and (lora.rank, lora.alpha, lora.dropout, lora.targets) == (8, 16, 0.05, "all-linear")
    assert (config.rollout.prompts_per_step, train.steps, train.learning_rate) == (4, 4, 2e-4)  # of nine of twelve rows
    assert train.schedule == "cosine" and train.gradient_checkpointing is True and config.quantization is None
    assert config.data is not None and config.eval is not None and config.eval.data is not None
    assert not config.data.raw and (config.eval.every, config.eval.best) == (1, None)  # two steps an epoch
    kept, held_out = (
        {json.dumps(prompt.messages) for prompt in open_prompts(data, folder=config.folder, kind="sft").known}
        for data in (config.data, config.eval.data)
    )
    assert (len(kept), len(held_out)) == (9, 3) and not kept & held_out
    assert places(loaded.differs) == {"val_set_size", "sample_packing", "sequence_len"}
    assert {"pad_to_sequence_len", "saves_per_epoch"} <= places(loaded.idle)


def test_held_out_rows_are_evaluated_by_their_loss(read):
    stops = "early_stopping_patience=3", "load_best_model_at_end=true", "evals_per_epoch=null", "eval_steps=3"
    found = read(SFT, *stops).runnable().eval
    assert found is not None and (found.every, found.best, found.patience) == (3, "loss", 3)
    assert read(SFT, "evals_per_epoch=null").runnable().eval == read(SFT, "evals_per_epoch=1").runnable().eval
    assert read(SFT, "eval_strategy=no").runnable().eval is None
    tests = "[{path: alpaca.jsonl, type: alpaca}]"
    given = read(SFT, f"test_datasets={tests}", "val_set_size=0").runnable()
    assert given.eval is not None and given.eval.data is not None and given.eval.data.raw
    held_out = read(SFT, "val_set_size=3").runnable()
    assert held_out.train.steps == 4 and held_out.eval is not None
    for wrong in ("[{path: alpaca.jsonl, type: completion}]",):
        with raises(ConfigError):
            read(SFT, f"test_datasets={wrong}")


def test_a_file_of_dpo(read):
    loaded = read(DPO)
    config = loaded.runnable()
    assert (config.kind, config.dpo.beta, config.dpo.loss) == ("dpo", 0.1, "sigmoid")
    assert config.chat.template == TEMPLATES["chatml"] and config.train.lora is not None
    assert config.train.lora.dropout == 0 and "lora_dropout" in places(loaded.idle)
    assert read(DPO, "rl_beta=0.3").runnable().dpo.beta == 0.3 == read(DPO, "trl.beta=0.3").runnable().dpo.beta
    assert read(DPO, "dpo_beta=0.3").runnable().dpo.beta == 0.3
    assert read(DPO, "rl=ipo").runnable().dpo.loss == read(DPO, "dpo_loss_type=[ipo]").runnable().dpo.loss == "ipo"


def test_several_datasets_are_sources_with_names_of_their_own(read):
    more = "datasets[1].path=alpaca.jsonl", "datasets[1].type=alpaca"
    config = read(SFT, *more, "datasets[2].path=alpaca.jsonl", "datasets[2].type=alpaca:chat").runnable()
    assert config.data is not None
    assert [each.name for each in config.data.sources] == ["talk.jsonl", "alpaca.jsonl (1)", "alpaca.jsonl (2)"]
    assert [each.raw for each in config.data.sources] == [False, True, True]
    assert config.eval is not None and config.eval.data is not None and len(config.eval.data.sources) == 3
    assert config.train.steps == 2 * 27 // 4 - 1  # epochs of whole steps


@pytest.mark.parametrize(
    ("text", "override", "key"),
    [
        (SFT, "train_on_inputs=true", "train_on_inputs"),
        (SFT, "datasets[0].roles_to_train=[human, gpt]", "datasets[0].roles_to_train"),
        (SFT, "datasets[0].train_on_eos=all", "datasets[0].train_on_eos"),
        (SFT, "datasets[0].train_on_eot=none", "datasets[0].train_on_eot"),
        (SFT, "datasets[0].message_field_training=train", "datasets[0].message_field_training"),
        (SFT, "chat_template=cohere", "chat_template"),
        (SFT, "datasets[0].chat_template=cohere", "chat_template"),
        (SFT, "special_tokens.eos_token=</s>", "special_tokens.eos_token"),
        (SFT, "metric_for_best_model=accuracy", "metric_for_best_model"),
        (SFT, "lora_target_modules=.*_proj & lora_target_linear=null", "lora_target_modules"),
        (SFT, "optimizer=adamw_8bit & adapter=null & lora_r=null & lora_alpha=null & fsdp=[full_shard]", "optimizer"),
        (SFT, "adapter=qlora & load_in_4bit=true & fsdp=[full_shard]", "adapter"),
        (DPO, "dpo_label_smoothing=0.1", "dpo_label_smoothing"),
        (DPO, "dpo_loss_type=[sigmoid, sft]", "dpo_loss_type"),
        (DPO, "sample_packing=true", "sample_packing"),
    ],
)
def test_what_is_not_here_is_refused_and_runs_as_advised(read, text: str, override: str, key: str):
    overrides = override.split(" & ")
    loaded = read(text, *overrides)
    assert places(loaded.refused) == {key}
    with pytest.raises(ConfigError):
        loaded.runnable()
    instead = [word for note in loaded.refused for word in note.instead.split()]
    assert instead and read(text, *overrides, *instead).runnable()


@pytest.mark.parametrize("type", ["completion", "input_output", "jeopardy", "my_module.load", "{format: '{x}'}"])
def test_a_type_that_is_not_read_is_refused_before_rows_are(read, type: str):
    loaded = read(SFT, f"datasets[0].type={type}", "datasets[0].path=nowhere.jsonl")
    assert places(loaded.refused) == {"datasets[0].type"}
    assert [note.instead for note in loaded.refused] == [""]


def test_a_template_that_is_written_out_here_takes_the_place_of_the_tokenizers(read):
    assert read(SFT, "chat_template=llama3").runnable().chat.template == NAMED_TEMPLATES["llama3"]
    assert read(SFT, "chat_template=tokenizer_default").runnable().chat.template is None
    assert read(SFT, "datasets[0].chat_template=llama3").runnable().chat.template == NAMED_TEMPLATES["llama3"]
    with pytest.raises(ConfigError, match="several"):
        read(DPO, "datasets[1].path=pairs.jsonl", "datasets[1].type=llama3.intel")
    plain = read(SFT, "chat_template=llama3", "datasets=[{path: alpaca.jsonl, type: alpaca}]")
    assert plain.runnable().chat.template is None and "chat_template" in places(plain.idle)


def test_the_tokenizers_own_tokens_are_nothing_to_speak_of(read):
    from groupwise.bridges.axolotl.data import tokenizer_of

    assert read(SFT, f"special_tokens.eos_token={tokenizer_of('starter').eos_token}").runnable()


def test_the_order_of_the_rows(read):
    assert [read(SFT, *said).runnable().data.shuffle for said in ((), ("curriculum_sampling=true",))] == [True, False]


def test_a_cosine_that_ends_where_it_begins_is_constant(read):
    assert read(SFT, "cosine_min_lr_ratio=1.0").runnable().train.schedule == "constant"


def test_what_is_trained_otherwise_is_said_alone(read):
    with raises(ConfigError):
        read(DPO, "rl=kto", "kto_desirable_weight=1.0")
    with raises(ConfigError):
        read(DPO, "rl=null", "trl.num_generations=4")
    with raises(ConfigError):
        read("base_model: starter\nmicro_batch_size: 1\n")
    with raises(ConfigError):
        read(SFT, "datasets=[{type: alpaca}]")
    with raises(ConfigError):
        read(SFT, "micro_batch_size=16")


@pytest.mark.parametrize("text", [SFT.replace("num_epochs: 2", "max_steps: 2"), DPO], ids=["sft", "dpo"])
def test_what_is_read_runs(read, tmp_path: Path, text: str):
    here = (f"output_dir={tmp_path / 'runs'}", "scoring.workers=0", "device=cpu")
    result = run_loop(read(text, *here).runnable())
    assert result.steps == 2 and result.trained
