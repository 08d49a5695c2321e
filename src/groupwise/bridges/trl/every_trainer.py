"""Translates the options that all of TRL's trainers have: the model and its adapter, checkpoints, and where metrics go.

`importer.py` reads what GRPOTrainer is told besides, `supervised.py` what SFTTrainer and DPOTrainer are.
"""

from __future__ import annotations

from pathlib import Path

from groupwise.bridges.trainer_args.optimizer_args import Length, put_quantization
from groupwise.config.formats.translation import Translation

SCRIPT = Path(__file__).with_name("script.yaml")  # the arguments of GRPOTrainer and LoraConfig in a script


def put_model(t: Translation) -> None:
    """Put the model, its precision and the adapter."""
    if not t.given("model_name_or_path") and "model_name_or_path" not in t.unread:
        t.problem("model_name_or_path", "required and missing")
    t.put("model", t["model_name_or_path"], "model_name_or_path")
    if "cast_lm_head_to_fp32" in t.keys and t["cast_lm_head_to_fp32"]:
        t.put("cast_lm_head", "float32", "cast_lm_head_to_fp32")
    if not t["use_peft"]:
        t.clear("train.lora", "use_peft")
        t.put("dtype", "float32", "dtype", origin="all parameters are trained, in float32 as there")
        for name in ("lora_r", "lora_alpha", "lora_target_modules", "use_dora", "load_in_4bit", "load_in_8bit"):
            if t.given(name) and t[name]:
                t.refuse(name, "it acts with use_peft; as it is, all parameters are trained", instead="use_peft=true")
        return
    if t.given("dtype"):
        t.put("dtype", {"float32": "float32", "bfloat16": "bfloat16"}.get(t["dtype"], "auto"), "dtype")
    t.put("train.lora.rank", t["lora_r"], "lora_r")
    t.put("train.lora.alpha", t["lora_alpha"], "lora_alpha")
    t.put("train.lora.use_rslora", t["use_rslora"] or None, "use_rslora")
    t.put("train.lora.use_dora", t["use_dora"] or None, "use_dora")
    put_quantization(t, four="load_in_4bit", eight="load_in_8bit")
    if t["load_in_4bit"] and t["bnb_4bit_quant_type"] != "nf4":
        t.refuse("bnb_4bit_quant_type", "nf4 is here", instead="bnb_4bit_quant_type=nf4")
    t.put("train.lora.dropout", 0.0 if t["disable_dropout"] else t["lora_dropout"], "lora_dropout", "disable_dropout")
    modules = t["lora_target_modules"]
    if modules is None:
        t.note_difference(
            "lora_target_modules",
            "not set: all-linear is adapted; there PEFT chooses",
        )
    every = modules is None or modules in ("all-linear", ["all-linear"])
    t.put("train.lora.targets", "all-linear" if every else modules, "lora_target_modules")


def put_run(t: Translation, length: Length) -> None:
    """Put the device, checkpoints, what is kept, and where metrics go."""
    t.put("device", "cpu" if t["use_cpu"] else None, "use_cpu")
    if t.given("gradient_checkpointing"):
        t.put("train.gradient_checkpointing", t["gradient_checkpointing"], "gradient_checkpointing")
    if t["save_strategy"] == "no":
        t.put("checkpoint.every", 0, "save_strategy")
    elif t.given("save_steps"):
        t.put("checkpoint.every", length.interval(t["save_steps"]), "save_steps")
    t.put("adapters.keep", t["save_total_limit"], "save_total_limit")
    for tracker in t["report_to"] or []:
        if tracker == "wandb" and t.given("wandb_project"):
            t.put("tracking.wandb", t["wandb_project"], "report_to", "wandb_project")
            t.put("tracking.wandb_entity", t["wandb_entity"], "wandb_entity")
        elif tracker in ("wandb", "trackio", "mlflow"):
            t.put(f"tracking.{tracker}", t["project"], "report_to", "project")
        elif tracker == "tensorboard":
            t.put("tracking.tensorboard", True, "report_to")
        elif tracker != "none":
            t.refuse("report_to", f"{tracker} is not here; wandb, trackio, mlflow and tensorboard are")
