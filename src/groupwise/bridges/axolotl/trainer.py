"""Translates what an Axolotl file says of the model, the optimizer, the machine and the run, whatever it trains."""

from __future__ import annotations

from collections.abc import Mapping

from groupwise.bridges.axolotl.chat_templates import why_not
from groupwise.bridges.axolotl.data import tokenizer_of
from groupwise.bridges.trainer_args.optimizer_args import Length, OptimizerNames, put_optimizer, put_quantization
from groupwise.config.formats.translation import Translation

NAMES = OptimizerNames(
    learning_rate="learning_rate",
    optimizer="optimizer",
    schedule="lr_scheduler",
    schedule_kwargs="lr_scheduler_kwargs",
    max_steps="max_steps",
    epochs="num_epochs",
    warmup_steps="warmup_steps",
    warmup_ratio="warmup_ratio",
)

ATTENTION = "attention is chosen by the model and the device"

BITS = ("adapter", "load_in_4bit", "load_in_8bit")  # what asks for a quantised base

PLUGINS = ("liger", "cut_cross_entropy", "kernels")  # in whose names they are: kernels, which change no result

TOKENS = ("bos_token", "eos_token", "unk_token")  # of the section special_tokens


def check_template(
    t: Translation,
    name: str | None,
    *,
    written: Mapping[str, str] | None = None,
    instead: str = "chat_template=tokenizer_default",
) -> None:
    """Put the chat template that a name stands for, if it is among those that are `written` out here, by name. Another
    that is not the tokenizer's own is refused: prompts are rendered with that, or with `chat_template_jinja`. `instead`
    takes it away."""
    written = written or {}
    if name is None or name.startswith("tokenizer_default") or (name == "jinja" and t.given("chat_template_jinja")):
        return
    try:
        why = why_not(name, tokenizer_of(t["base_model"])) if t.given("base_model") else None
    except Exception as error:  # no such model, no network, a damaged file: transformers raises many
        why = f"it cannot be compared, for {_unreadable(error)}"
    if why is not None and name in written:
        t.put("chat.template", written[name], "chat_template")
    elif why is not None:
        t.refuse("chat_template", f"prompts are rendered with the tokenizer's own template; {why}", instead=instead)


def check_tokens(t: Translation) -> None:
    """Refuse special tokens that are not the tokenizer's own."""
    given = [name for name in TOKENS if t.given(f"special_tokens.{name}")]
    if not given or not t.given("base_model"):
        return
    try:
        tokenizer, why = tokenizer_of(t["base_model"]), ""
    except Exception as error:  # as above
        tokenizer, why = None, _unreadable(error)
    for name in given:
        said, own = t[f"special_tokens.{name}"], getattr(tokenizer, name, None)
        if own != said:
            why_not_own = f"whether {said!r} is one of them is unknown, for {why}" if why else f"which is {own!r} there"
            t.refuse(f"special_tokens.{name}", f"the tokenizer's own tokens are used; {why_not_own}")


def _unreadable(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"the tokenizer cannot be read: {type(error).__name__}: {first}"


def check_plugins(t: Translation) -> None:
    """Refuse plugins that are more than kernels."""
    if [each for each in t["plugins"] or [] if not any(name in each.lower() for name in PLUGINS)]:
        t.refuse("plugins", "there are no plugins; those for kernels change no result")


def put_order(t: Translation) -> None:
    """Put the order in which rows are drawn."""
    if t.given("curriculum_sampling"):
        t.put("data.shuffle", not t["curriculum_sampling"], "curriculum_sampling")


def put_optimizer_and_floor(t: Translation, length: Length) -> None:
    """Put the optimizer, and the learning rate that a cosine ends at. Axolotl warms up for 3% of the run, 100 steps at
    most, unless told otherwise."""
    warmup = None if length.there is None else min(int(0.03 * length.there), 100)
    put_optimizer(t, NAMES, length, warmup=2 if warmup == 1 else warmup)
    ratio = "cosine_min_lr_ratio"
    if t.given(ratio) and t[NAMES.schedule] == "cosine":
        falls = t[ratio] < 1
        t.put(*(("train.final_rate", t[ratio]) if falls else ("train.schedule", "constant")), ratio)
    elif t.given(ratio):
        t.note_idle(ratio, "it acts with the schedule cosine only")


def put_adapter(t: Translation) -> None:
    """Put the adapter that is trained, or that there is none."""
    adapter, rank = t["adapter"], t["lora_r"]
    if adapter is None:
        t.clear("train.lora", "adapter", origin="no adapter is named")
        t.put("dtype", "float32", origin="all parameters are trained")
        if name := next((each for each in ("lora_r", "lora_alpha", "lora_target_modules") if t.given(each)), None):
            t.refuse(name, "it acts with an adapter; as it is, all parameters are trained", instead="adapter=lora")
        return
    if adapter not in ("lora", "qlora"):
        t.refuse("adapter", f"{adapter} is not here; lora and qlora are", instead="adapter=lora")
    put_quantization(t, four="load_in_4bit", eight="load_in_8bit", asked="adapter" if adapter == "qlora" else None)
    t.put("train.lora.rank", rank, "lora_r")
    t.put("train.lora.alpha", t["lora_alpha"], "lora_alpha")
    t.put("train.lora.use_rslora", t["peft_use_rslora"], "peft_use_rslora")
    t.put("train.lora.use_dora", t["peft_use_dora"], "peft_use_dora")
    t.put("train.lora.dropout", t["lora_dropout"], "lora_dropout")
    modules = t["lora_target_modules"]
    if t["lora_target_linear"] or modules == "all-linear":
        t.put("train.lora.targets", "all-linear", "lora_target_linear", "lora_target_modules")
    elif isinstance(modules, str):
        what = f"{modules!r} is a pattern; write a list of names of modules, or all-linear"
        t.refuse("lora_target_modules", what, instead="lora_target_modules=all-linear")
    elif modules:
        t.put("train.lora.targets", modules, "lora_target_modules")
    else:
        t.note_difference("lora_target_linear", "not set: all-linear is adapted; there PEFT chooses")
    t.put("adapters.start", t["lora_model_dir"], "lora_model_dir")


def put_machine(t: Translation) -> None:
    """Put the precision, how activations are kept, and the attention."""
    if t["adapter"] is not None:
        t.put("dtype", "float32" if t["bf16"] is False else "auto", "bf16")
    checkpointing = t["gradient_checkpointing"]
    if checkpointing is not None:
        offload = isinstance(checkpointing, str) and checkpointing.startswith("offload")
        t.put("train.gradient_checkpointing", "offload" if offload else bool(checkpointing), "gradient_checkpointing")
    if t["flex_attention"] or t["attn_implementation"] == "flex_attention":
        t.put("train.attention", "flex", "flex_attention", "attn_implementation")
    elif t.given("attn_implementation"):
        t.note_idle("attn_implementation", ATTENTION)


def put_run(t: Translation, length: Length) -> None:
    """Put checkpoints, what is kept, and where metrics go."""
    steps, strategy = t["save_steps"], t["save_strategy"]
    if strategy == "no":
        t.put("checkpoint.every", 0, "save_strategy")
    elif steps:
        t.put("checkpoint.every", length.interval(steps), "save_steps")
    t.put("adapters.keep", t["save_total_limit"], "save_total_limit")
    if t["auto_resume_from_checkpoints"]:
        t.put("resume", "auto", "auto_resume_from_checkpoints")
    if t["use_wandb"] is not False and t["wandb_mode"] != "disabled":
        t.put("tracking.wandb", t["wandb_project"], "wandb_project")
        if t.given("wandb_project"):
            t.put("tracking.wandb_entity", t["wandb_entity"], "wandb_entity")
            t.put("tracking.wandb_name", t["wandb_name"], "wandb_name")
    if t["wandb_mode"] not in (None, "disabled", "online"):
        t.note_idle("wandb_mode", "W&B reads WANDB_MODE")


def put_evaluation(t: Translation, length: Length, *, best: str, by_epoch: bool) -> bool:
    """Put when what is held out is evaluated, and by what (`best`) the best model is kept. Returns False where nothing
    is evaluated. With `by_epoch` it is once an epoch where nothing is said."""
    if "eval" not in t.draft.data:
        for name in ("eval_steps", "evals_per_epoch"):
            if t[name]:
                t.note_idle(name, "nothing is held out (test_datasets, val_set_size), so that nothing is evaluated")
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if t[name]:
                t.problem(name, "it needs held-out rows: test_datasets, or val_set_size above 0")
        return False
    if t["eval_strategy"] == "no":
        t.drop("eval")
        return False
    every = 0
    if t["eval_steps"]:
        every = length.interval(t["eval_steps"]) or 0
    elif length.per_epoch and (by_epoch or t["evals_per_epoch"] or t["eval_strategy"] == "epoch"):
        every = max(1, length.per_epoch // (t["evals_per_epoch"] or 1))
    t.put("eval.every", every, "eval_steps", "evals_per_epoch", "eval_strategy")
    if t["load_best_model_at_end"] or t["early_stopping_patience"]:
        t.put("eval.best", best, "load_best_model_at_end", "early_stopping_patience")
    if t["early_stopping_patience"] and not every:
        what = "nothing says how often to evaluate during the run"
        t.refuse("early_stopping_patience", what, instead="eval_steps=50")
    else:
        t.put("eval.patience", t["early_stopping_patience"], "early_stopping_patience")
    return True
