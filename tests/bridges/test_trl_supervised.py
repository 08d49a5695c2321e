"""Scripts and files of TRL's SFT and DPO: every argument is in a table with TRL's default, and what they come
to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from groupwise.bridges.trl import supervised
from groupwise.config.formats.tables import keys_of
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics
from peers import peer
from wording import raises

trl = peer("trl")

DPO = """\
from datasets import load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

args = DPOConfig(output_dir="out", beta=0.2, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2)
data = load_dataset("json", data_files="pairs.jsonl", split="train")
trainer = DPOTrainer(model="starter", args=args, train_dataset=data, peft_config=LoraConfig(r=4, lora_alpha=8))
trainer.train()
"""
SFT = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

SFTTrainer(
    "starter",
    SFTConfig(num_train_epochs=2, per_device_train_batch_size=2, learning_rate=1e-4, max_length=512),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
).train()
"""
UNSLOTH = """\
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("starter", max_seq_length=2048, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
trainer = DPOTrainer(
    model=model,
    ref_model=None,
    args=DPOConfig(max_steps=3, per_device_train_batch_size=4, optim="adamw_8bit"),
    beta=0.3,
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    tokenizer=tokenizer,
)
"""


@pytest.fixture
def read(tmp_path: Path):
    """`read(script, *overrides)`: what is made of a script beside six rows, each a pair and an example."""
    rows = [
        {"prompt": f"{i} + 1 =", "completion": f" {i + 1}", "chosen": f" {i + 1}", "rejected": " no"} for i in range(6)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(script: str, *overrides: str) -> LoadedRun:
        (tmp_path / "train.py").write_text(script)
        return read_run(tmp_path / "train.py", overrides)

    return read


@pytest.mark.parametrize(("kind", "config"), [("sft", "SFTConfig"), ("dpo", "DPOConfig")])
def test_every_argument_is_in_the_table_and_has_its_default(kind: str, config: str):
    theirs = {each.name: each for each in dataclasses.fields(getattr(trl, config))}
    ours = {key.name: key for key in keys_of(supervised.KEYS[kind])}
    assert theirs.keys() - ours.keys() == set()
    unsaid = {"output_dir", "save_steps", "save_strategy", "gradient_checkpointing", "warmup_steps", "report_to"}
    for name, key in ours.items():
        if name not in theirs or name in unsaid:
            continue
        made = theirs[name].default_factory
        said = theirs[name].default if made is dataclasses.MISSING else made()
        said = getattr(said, "value", said)
        if key.fate in ("plain", "made"):
            assert key.default == said or (key.default, said) == (None, -1), name
        if key.fate == "absent":  # the default asks for nothing
            assert said in (None, *key.off), name


def test_a_script_of_dpo(read):
    loaded = read(DPO)
    config = loaded.runnable()
    assert (loaded.system, config.kind, config.dpo.beta, config.dpo.loss) == ("TRL", "dpo", 0.2, "sigmoid")
    assert config.rollout.prompts_per_step == 4 and config.train.steps == 2 and config.train.learning_rate == 1e-6
    assert config.data is not None and config.data.source == "pairs.jsonl" and config.data.raw and not config.rewards
    lora = config.train.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.dropout) == (4, 8, 0)
    assert {note.place.partition(" ")[0] for note in loaded.differs} >= {"max_length"}


def test_a_script_of_sft_without_an_adapter(read):
    config = read(SFT).runnable()
    assert config.kind == "sft" and config.train.lora is None and config.dtype == "float32"
    assert (config.train.steps, config.train.learning_rate, config.rollout.prompts_per_step) == (6, 1e-4, 2)


def test_a_script_of_unsloths(read):
    loaded = read(UNSLOTH)
    config = loaded.runnable()
    assert (loaded.system, config.kind, config.dpo.beta, config.quantization) == ("Unsloth", "dpo", 0.3, None)
    assert config.train.lora is not None and config.train.lora.rank == 16 and config.train.optimizer == "adamw_8bit"
    assert config.seed == 3407  # what is not said is Unsloth's, as in its GRPO scripts
    assert any("2048" in note.text for note in loaded.differs)


@pytest.mark.parametrize(
    ("script", "old", "new", "key"),
    [
        (DPO, "beta=0.2", "loss_type='hinge'", "loss_type"),
        (DPO, "beta=0.2", "loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.5]", "loss_type"),
        (DPO, "beta=0.2", "use_weighting=True", "use_weighting"),
        (DPO, "beta=0.2", "eval_strategy='steps'", "eval_strategy"),
        (DPO, "args=args", "args=args, ref_model=other", "DPOTrainer.ref_model"),
        (SFT, "max_length=512", "loss_type='dft'", "loss_type"),
        (SFT, "max_length=512", "completion_only_loss=False", "completion_only_loss"),
        (SFT, ").train()", "formatting_func=rows).train()", "SFTTrainer.formatting_func"),
        (SFT, "max_length=512", "neftune_noise_alpha=5", "neftune_noise_alpha"),
    ],
)
def test_what_is_not_here_is_refused(read, script: str, old: str, new: str, key: str):
    loaded = read(script.replace(old, new))
    assert key in [note.place.partition(" ")[0] for note in loaded.refused]
    with pytest.raises(ConfigError):
        loaded.runnable()


def test_an_argument_that_there_is_not_is_an_error(read):
    with raises(ConfigError) as refused:
        read(DPO.replace("beta=0.2", "num_generations=4"))
    assert "num_generations" in str(refused.value)


def test_two_trainers_are_an_error(read):
    with raises(ConfigError):
        read(DPO + SFT)


def test_what_is_read_runs(read, tmp_path: Path):
    here = (f"output_dir={tmp_path / 'runs'}", "scoring.workers=0", "device=cpu")
    config = read(DPO, *here).runnable()
    result = run_loop(config)
    assert result.steps == 2 and result.trained


def test_what_overrides_say_of_the_data_is_read(read):
    for script, kind in ((SFT.replace("num_train_epochs=2", "max_steps=2"), "sft"), (DPO, "dpo")):
        streamed = read(script, "dataset_streaming=true").runnable()
        assert streamed.kind == kind and streamed.data is not None and streamed.data.streaming
        unread = script.replace('load_dataset("json", data_files="pairs.jsonl", split="train")', "mine()")
        mixed = read(unread, "datasets=[{path: pairs.jsonl}, {path: more.jsonl}]").runnable()
        assert mixed.data is not None and [each.source for each in mixed.data.sources] == ["pairs.jsonl", "more.jsonl"]
        assert all(each.raw and each.prompt_key is None for each in mixed.data.sources)
        sources = "data.sources=[{source: pairs.jsonl}, {source: more.jsonl}]"
        ours = read(unread, sources).runnable()
        assert ours.data is not None and len(ours.data.sources) == 2 and not ours.rewards
    with pytest.raises(ConfigError, match="max_steps"):
        read(SFT, "dataset_streaming=true")


# ---- the YAML of `trl sft --config` and `trl dpo --config` ----

FILE = """\
model_name_or_path: starter
dataset_name: pairs.jsonl
per_device_train_batch_size: 2
learning_rate: 1.0e-4
max_steps: 2
use_peft: true
lora_target_modules: all-linear
"""


@pytest.fixture
def read_yaml(read, tmp_path: Path):
    """`read_yaml(text, *overrides)`: what is made of a YAML file beside the rows of `read`."""

    def read_yaml(text: str, *overrides: str) -> LoadedRun:
        (tmp_path / "config.yaml").write_text(text)
        return read_run(tmp_path / "config.yaml", overrides)

    return read_yaml


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("packing=true", "sft"),
        ("completion_only_loss=true", "sft"),
        ("max_seq_length=512", "sft"),
        ("precompute_ref_log_probs=true", "dpo"),
        ("label_smoothing=0.0", "dpo"),
        ("kind=sft", "sft"),
        ("kind=dpo", "dpo"),
    ],
)
def test_a_file_says_by_its_keys_which_it_is_for(read_yaml, override: str, kind: str):
    loaded = read_yaml(FILE, override)
    config = loaded.runnable()
    assert (loaded.system, config.kind, config.rollout.prompts_per_step, config.train.steps) == ("TRL", kind, 2, 2)
    assert config.data is not None and config.data.source == "pairs.jsonl" and not config.rewards


def test_keys_of_two_of_them_decide_together_or_kind_does(read_yaml):
    assert read_yaml(FILE, "max_length=512", "beta=0.2").runnable().dpo.beta == 0.2
    with raises(ConfigError, field="max_length"):
        read_yaml(FILE, "max_length=512")
    assert read_yaml(FILE, "max_length=512", "kind=dpo").runnable().kind == "dpo"
    assert read_yaml(f"{FILE}kind: sft\n").runnable().kind == "sft"


def test_a_file_of_grpo_stays_one(read_yaml):
    assert read_yaml(FILE, "num_generations=2", "rewards=[m:f]").runnable().kind == "grpo"
    assert read_yaml(FILE, "reward_funcs=[m.f]", "num_generations=2").runnable().kind == "grpo"
    with raises(ConfigError):
        read_yaml(FILE, "num_generations=2", "packing=true")


@pytest.mark.parametrize("batch", [2, 8])  # the first is no whole group
def test_a_file_that_says_nothing_is_told_how_it_is_read(read_yaml, batch: int):
    with raises(ConfigError) as caught:
        read_yaml(FILE, f"per_device_train_batch_size={batch}").runnable()
    assert "kind=sft" in str(caught.value) and "kind=dpo" in str(caught.value)
    with pytest.raises(ConfigError) as other:
        read_yaml(FILE, "num_generations=2").runnable()
    assert "kind=sft" not in str(other.value)


def test_a_kind_beside_a_script_is_the_scripts_own(read):
    assert read(DPO, "kind=dpo").runnable().kind == "dpo"
    for script in (DPO, UNSLOTH):
        with raises(ConfigError):
            read(script, "kind=sft")


def test_what_a_yaml_says_runs(read_yaml, tmp_path: Path):
    here = (f"output_dir={tmp_path / 'runs'}", "scoring.workers=0", "device=cpu")
    result = run_loop(read_yaml(FILE, "packing=true", *here).runnable())
    assert result.steps == 2 and result.trained


SLICED = """\
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

train = load_dataset("json", data_files="pairs.jsonl", split="train[:4]")
held_out = load_dataset("json", data_files="pairs.jsonl", split="train[4:]")
args = DPOConfig(
    max_steps=4, per_device_train_batch_size=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
)
DPOTrainer("starter", args=args, train_dataset=train, eval_dataset=held_out).train()
"""


def test_held_out_rows_are_those_of_the_script_and_their_loss_chooses(read, tmp_path: Path):
    config = read(SLICED).runnable()
    assert config.data is not None and config.eval is not None and config.eval.data is not None
    assert (config.data.split, config.eval.data.split) == ("train[:4]", "train[4:]")
    assert (config.eval.every, config.eval.best) == (2, "loss")
    by_epoch = SLICED.replace('eval_strategy="steps", eval_steps=2', 'eval_strategy="epoch"')
    assert (found := read(by_epoch).runnable().eval) is not None and found.every == 2
    result = run_loop(read(SLICED, f"output_dir={tmp_path / 'runs'}", "device=cpu", "scoring.workers=0").runnable())
    told = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "eval/loss" in row]
    assert [row["step"] for row in told] == [0, 2, 4] and all("eval/accuracy" in row for row in told)
    for said, instead in ((", eval_dataset=held_out", ""), ("eval_steps=2", "eval_steps=2, metric_for_best_model='x'")):
        with raises(ConfigError):
            read(SLICED.replace(said, instead)).runnable()
