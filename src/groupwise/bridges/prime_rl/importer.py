"""prime-rl's `rl.toml` as a run of ours: the one file that `uv run rl @ rl.toml` is given.

    max_steps = 20
    [model]
    name = "Qwen/Qwen3-0.6B"
    [orchestrator]
    batch_size = 128
    group_size = 16
    [[orchestrator.train.source]]
    env.taskset = { id = "reverse-text" }
    [trainer.optim]
    lr = 3e-6

The names are those of August 2026 (0.8.1), and most of 0.5 to 0.8.0; the defaults are the newer ones.

An environment of `verifiers` is played by one of two agents of ours: a taskset by `TasksetAgent` (verifiers 0.4), an
`id` with `args`, which older versions had, by `VerifiersAgent` (verifiers before 0.4). The environment `reasoning-gym`
becomes `data.source: reasoning-gym`, and needs no verifiers.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.bridges.trainer_args.grpo_args import NARROWING_OFF, put_narrowing
from groupwise.config.data import REASONING_GYM
from groupwise.config.formats.format import ConfigFormat, Count
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Translation, run_name
from groupwise.config.yaml import Document, dotted
from groupwise.errors import ConfigError

SYSTEM = "prime-rl"
KEYS = Path(__file__).with_name("keys.yaml")
TASKSET_AGENT = "groupwise.bridges.verifiers.tasksets:TasksetAgent"
VERIFIERS_AGENT = "groupwise.bridges.verifiers.before_0_4:VerifiersAgent"
MAX_TURNS = 4096
EPISODE_S = 3600.0
EVAL_PROBLEMS = 100  # of verifiers' reasoning-gym environment, unless it is told otherwise
MOST_REFILL = 64.0  # there it has no end
SOURCES, EVAL_SOURCES = "orchestrator.train.source", "orchestrator.eval.source"
SAMPLING = "orchestrator.train.sampling"
TEMPLATE_KWARGS = "chat_template_kwargs"  # of `extra_body`
SOURCE = ("name", "env", "ratio", "serve", "sampling", "group_size", "algo", "curriculum")
OLDER = ("id", "args", "legacy", "taskset", "harness", "address", "num_workers", "max_retries", "extra_env_kwargs")
OF_EVAL = ("num_examples", "interval", "rollouts_per_example", "skip_first")
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
NONE = "None"  # how a TOML file of prime-rl writes null

OTHER_NAMES = {
    "max_steps": ("trainer.max_steps", "orchestrator.max_steps"),
    "model.name": ("trainer.model.name",),
    "ckpt.interval": ("trainer.ckpt.interval",),
    "ckpt.keep_last": ("trainer.ckpt.keep_last",),
    "monitors.wandb": ("wandb",),
    "monitors.wandb.project": ("wandb.project",),
    "monitors.wandb.name": ("wandb.name",),
    "monitors.wandb.entity": ("wandb.entity",),
    "orchestrator.group_size": ("orchestrator.rollouts_per_example",),
    "orchestrator.max_async_level": ("max_async_level", "trainer.max_async_level"),
    "orchestrator.concurrency.max_inflight": (
        "orchestrator.max_inflight_episodes",
        "orchestrator.max_inflight_rollouts",
        "orchestrator.max_concurrent",
    ),
    f"{SAMPLING}.max_completion_tokens": (
        f"{SAMPLING}.max_tokens",
        "orchestrator.sampling.max_completion_tokens",
        "orchestrator.sampling.max_tokens",
    ),
    f"{SAMPLING}.temperature": ("orchestrator.sampling.temperature",),
    f"{SAMPLING}.extra_body": ("orchestrator.sampling.extra_body",),
    SOURCES: ("orchestrator.train.env", "orchestrator.env"),
    EVAL_SOURCES: ("orchestrator.eval.env",),
    "orchestrator.eval.group_size": ("orchestrator.eval.rollouts_per_example",),
    "trainer.model.lora": ("trainer.model.experimental.lora",),
    "trainer.model.lora.rank": ("trainer.model.experimental.lora.rank",),
    "trainer.model.lora.alpha": ("trainer.model.experimental.lora.alpha",),
    "trainer.model.lora.dropout": ("trainer.model.experimental.lora.dropout",),
    "trainer.model.lora.target_modules": ("trainer.model.experimental.lora.target_modules",),
}
"""A key, and the others that say the same: the shared one's copies in trainer and orchestrator, and older names."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An environment of the file. `place` is its key, such as `orchestrator.train.source[0]`.

    `id` is the taskset of verifiers 0.4 with `config`, its [env] without the taskset's id; or, if `legacy`, what
    `load_environment` takes with `config` as arguments.
    """

    place: str
    id: str
    legacy: bool
    config: dict[str, Any]
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """Return the last part of the id, without owner and version."""
        return self.id.rpartition("/")[2].partition("@")[0]


def translate(document: Document, *, folder: Path, count: Count) -> Translation:
    """Return the translation of a document. Raises ConfigError for a file of the trainer or the orchestrator alone."""
    part = part_of(document.data)
    if part:
        hint = "put the files into one, each under its table: [trainer], [orchestrator], [inference]"
        raise ConfigError(f"{document.name or 'the configuration'} is prime-rl's {part} alone", hint=hint)
    _read_none(document.data)
    t = Translation(document, system=SYSTEM, keys=keys_of(KEYS))
    for name, others in OTHER_NAMES.items():
        _same(t, name, others)
    sources = _sources(t, SOURCES)
    t.raise_problems()
    _put_name(t, sources)
    _put_steps(t)
    _put_batch(t, sources)
    _put_sampling(t, sources)
    _put_algorithm(t, sources)
    _put_optimizer(t)
    _put_model(t)
    _put_staleness(t)
    _put_run(t)
    if sources:
        _put_environment(t, sources)
    return t


def is_whole(data: Mapping[str, Any]) -> bool:
    """Return whether these are the words of an rl.toml: `trainer` and `orchestrator` are tables in it."""
    return any(isinstance(data.get(key), Mapping) for key in ("trainer", "orchestrator"))


def part_of(data: Mapping[str, Any]) -> str | None:
    """Return the part of prime-rl whose file this is, by its keys at the top level; None for a file of all parts."""
    if is_whole(data):
        return None
    if any(isinstance(data.get(key), Mapping) for key in ("optim", "scheduler", "loss")):
        return "trainer"
    if isinstance(data.get("model"), Mapping) and not data.keys() & {"batch_size", "train", "env"}:
        return "inference server"
    groups = not data.keys().isdisjoint({"group_size", "rollouts_per_example"})
    return "orchestrator" if groups and "batch_size" in data else None


def _read_none(section: dict[str, Any], path: str = "") -> None:
    """Read the string "None" as null, or as the value that turns a key off where its default does not."""
    off = {"trainer.optim.max_norm": 0.0, "trainer.model.ac": False}
    for key, value in section.items():
        if isinstance(value, dict):
            _read_none(value, f"{path}{key}.")
        elif value == NONE:
            section[key] = off.get(f"{path}{key}")


def _same(t: Translation, name: str, others: tuple[str, ...]) -> None:
    """Take the value of whichever of these names is given."""
    for other in others:
        if t.given(name) and t.given(other) and t[name] != t[other] and not isinstance(t[name], dict):
            t.problem(other, f"{t[other]!r} is not what {name} says, {t[name]!r}; write one of them")
        t.stand_in(name, other)


def _table(t: Translation, name: str) -> dict[str, Any]:
    """Return the values of a table, without those that were set to null."""
    return {key: value for key, value in (t[name] or {}).items() if value is not None}


# ---- the run ----


def _put_name(t: Translation, sources: list[Source]) -> None:
    for name in ("run.name", "monitors.wandb.name"):
        if t.given(name):
            return t.put("name", run_name(t[name]), name)
    if sources:
        return t.put("name", run_name(sources[0].said.get("name") or sources[0].package), SOURCES)
    return t.put("name", run_name(Path(t.document.name).stem), origin="the file's name")


def _put_steps(t: Translation) -> None:
    t.put("train.steps", t["max_steps"], "max_steps")
    if t["max_steps"] is None:
        t.refuse("max_steps", "not said, so the run would have no end there; here it has", instead="max_steps=100")


def _put_batch(t: Translation, sources: list[Source]) -> None:
    """Set the prompts and completions of a step."""
    size, group, name = t["orchestrator.batch_size"], t["orchestrator.group_size"], "orchestrator.group_size"
    own = {source.said.get("group_size", group) for source in sources} or {group}
    if len(own) > 1:
        t.problem(SOURCES, f"group sizes {sorted(own)} differ, and a run has one; write {name}")
        t.raise_problems()
    [group] = own
    if not isinstance(group, int) or group < 2:
        said = f"{group} is not valid" if group != t.keys[name].default or t.given(name) else "not said, and 1 there"
        t.problem(name, f"{said}; the completions of a prompt are compared: write 2 or more")
    elif size < group or size % group:
        near = sorted({max(group, size // group * group), (size // group + 1) * group})
        valid = " or ".join(map(str, near))
        t.problem("orchestrator.batch_size", f"{size} completions are not whole groups of {group}; write {valid}")
    t.raise_problems()
    t.put("rollout.group_size", group, name)
    t.put("rollout.prompts_per_step", size // group, "orchestrator.batch_size", name)
    _put_refill(t, sources)


def _put_refill(t: Translation, sources: list[Source]) -> None:
    """Put whether groups that teach nothing are replaced: by a gate of the source, and in older versions by a
    filter."""
    replaces = [name for source in sources for name in _gates(t, source)]
    buffer, name = _table(t, "orchestrator.buffer"), "orchestrator.buffer"
    if buffer.pop("online_difficulty_filtering", False):
        replaces.append(name)
    if others := sorted(buffer.keys() - {"seed", "env_ratios", "hash_keys"}):
        why = f"{', '.join(others)}: prompts by their pass rate are data.curriculum here"
        t.refuse(name, why, instead=" ".join(f"{name}.{other}=null" for other in others))
    for name in ("orchestrator.pre_batch_filters", "orchestrator.filters", "orchestrator.post_batch_filters"):
        for index, each in enumerate(t[name] or []):
            zero = each.get("type") == "zero_advantage"
            if zero and each.get("enforce", True) and "post" not in name:
                replaces.append(name)
            elif not zero and each.get("enforce"):
                what = f"the filter {each.get('type')} is not here"
                t.refuse(name, what, instead=f"{name}[{index}].enforce=false")
    if replaces:
        t.put("rollout.refill", MOST_REFILL, *dict.fromkeys(replaces))
    else:
        t.put("rollout.refill", 1.0, origin="groups without a learning signal are not replaced there")


def _gates(t: Translation, source: Source) -> list[str]:
    """Return the list's name, if the source's curriculum passes over groups without an advantage; any other is
    refused."""
    curriculum = {key: value for key, value in dict(source.said.get("curriculum") or {}).items() if value}
    if not curriculum:
        return []
    gates = [dict(gate) for gate in dict(curriculum.pop("gates", {})).values()]
    if not curriculum and all(gate.pop("type", None) == "advantage_range" and not any(gate.values()) for gate in gates):
        return [SOURCES]
    what = f"{source.place}.curriculum is not here but for the gate advantage_range at 0; data.curriculum is"
    t.refuse(SOURCES, what, instead=f"{source.place}.curriculum=null")
    return []


def _put_sampling(t: Translation, sources: list[Source]) -> None:
    own: dict[str, Any] = dict(sources[0].said.get("sampling") or {}) if sources else {}
    for source in sources[1:]:
        if source.said.get("sampling", own) != own:
            t.problem(SOURCES, f"{source.place}.sampling differs from the first's, and a run samples in one way")
    for key in own.keys() - {"temperature", "max_completion_tokens", "extra_body"}:
        t.problem(SOURCES, f"sampling.{key}: unknown; its keys are temperature, max_completion_tokens, extra_body")
    t.put("rollout.temperature", own.get("temperature", t[f"{SAMPLING}.temperature"]), f"{SAMPLING}.temperature")
    _put_max_tokens(t, own)
    name = f"{SAMPLING}.extra_body"
    for key, value in {**_table(t, name), **own.get("extra_body", {})}.items():
        if key in NARROWING_OFF:
            put_narrowing(t, name, f"rollout.{key}", value, vllm=False)
        elif key == TEMPLATE_KWARGS:
            t.put("chat.template_kwargs", value, name)
        elif key != "return_token_ids":
            t.refuse(name, f"{key!r} is not here; it knows {', '.join((*NARROWING_OFF, TEMPLATE_KWARGS))}")


def _put_max_tokens(t: Translation, own: Mapping[str, Any]) -> None:
    name, length = f"{SAMPLING}.max_completion_tokens", "orchestrator.seq_len"
    said = own.get("max_completion_tokens", t[name])
    if said is not None:
        t.put("rollout.max_tokens", said, name)
        return
    length = length if t.given(length) else "seq_len"
    t.put("rollout.max_tokens", t[length], length)
    t.note_difference(name, f"not said: completions have at most {length} = {t[length]} tokens; there the context")


def _put_staleness(t: Translation) -> None:
    """Set how many steps sampling may run ahead of training, with newer weights continuing completions."""
    level, oldest = "orchestrator.max_async_level", "orchestrator.max_off_policy_steps"
    steps = min(t[level], t[oldest])
    if steps and not t.given("trainer.model.lora"):
        t.note_difference(oldest, "0: all parameters are trained, and nothing is sampled meanwhile; there a step ahead")
        steps = 0
    if steps:
        t.put("rollout.max_staleness", steps, level, oldest)
        t.put("rollout.in_flight_updates", True, origin="completions go on under newer weights there")


def _put_run(t: Translation) -> None:
    """Set checkpoints, tracking, and the resumption of an earlier run."""
    if t.given("ckpt", "ckpt.interval"):
        t.put("checkpoint.every", t["ckpt.interval"] or 0, "ckpt.interval" if t.given("ckpt.interval") else "ckpt")
    t.put("adapters.keep", t["ckpt.keep_last"], "ckpt.keep_last")
    if t.given("monitors.wandb"):
        t.put("tracking.wandb", t["monitors.wandb.project"], "monitors.wandb.project")
        t.put("tracking.wandb_name", t["monitors.wandb.name"], "monitors.wandb.name")
        t.put("tracking.wandb_entity", t["monitors.wandb.entity"], "monitors.wandb.entity")
    resume = t["resume"]
    if isinstance(resume, Mapping) and resume:
        t.refuse("resume", "a run goes on from its newest checkpoint", instead="resume=auto")
    elif isinstance(resume, Mapping) or resume is True:
        t.put("resume", "auto", "resume")
    else:
        t.put("resume", resume, "resume")


# ---- the algorithm, the optimizer and the model ----


def _put_algorithm(t: Translation, sources: list[Source]) -> None:
    for source in sources:
        kind = dict(source.said.get("algo") or {}).get("type", "grpo")
        if kind != "grpo":
            t.refuse(SOURCES, f"algo {kind} of {source.place} is not here", instead=f"{source.place}.algo=null")
    if (kind := t["orchestrator.algo.type"]) != "grpo":
        t.refuse("orchestrator.algo.type", f"{kind} is not here; grpo is", instead="orchestrator.algo.type=grpo")
    t.put("algo.advantage", "mean", "orchestrator.algo.type")
    if (loss := t["trainer.loss.type"]) != "default":
        instead = "; a function of your own is algo.policy_loss=module:function" if loss == "custom" else ""
        t.refuse("trainer.loss.type", f"{loss} is not here{instead}", instead="trainer.loss.type=default")
    t.put("algo.policy_loss", "dppo", "trainer.loss.type")
    t.put("algo.clip_low", t["trainer.loss.dppo_mask_low"], "trainer.loss.dppo_mask_low")
    t.put("algo.clip_high", t["trainer.loss.dppo_mask_high"], "trainer.loss.dppo_mask_high")
    t.put("algo.dro_beta", 2 * t["trainer.loss.kl_tau"] or None, "trainer.loss.kl_tau")  # half of it is the weight


def _put_optimizer(t: Translation) -> None:
    if (kind := t["trainer.optim.type"]) != "adamw":
        t.refuse("trainer.optim.type", f"{kind} is not here; adamw is", instead="trainer.optim.type=adamw")
    betas = [t["trainer.optim.betas1"], t["trainer.optim.betas2"]]
    t.put("train.betas", betas, "trainer.optim.betas1", "trainer.optim.betas2")
    norm = "trainer.optim.max_norm"
    if t[norm]:
        t.put("train.max_grad_norm", t[norm], norm)
    else:
        t.refuse(norm, "the gradient is always clipped here", instead=f"{norm}=1e9")
    _put_schedule(t)


def _put_schedule(t: Translation) -> None:
    """constant; linear: up, constant, and down in the last steps, which is wsd; cosine."""
    warmup, decay, least = (f"trainer.scheduler.{name}" for name in ("warmup_steps", "decay_steps", "min_lr"))
    kind = t["trainer.scheduler.type"]
    if kind == "constant":
        t.put("train.warmup_steps", 0, "trainer.scheduler.type")
    else:
        t.put("train.warmup_steps", t[warmup], warmup)
    falls = kind == "cosine" or (kind == "linear" and t[decay] > 0)
    t.put("train.schedule", {"linear": "wsd"}.get(kind, kind) if falls else "constant", "trainer.scheduler.type")
    if falls and kind == "linear":
        t.put("train.decay_steps", t[decay], decay)
    if falls and t[least]:
        t.put("train.final_rate", t[least] / (t["trainer.optim.lr"] or 1.0), least, "trainer.optim.lr")
    read = {"constant": (), "linear": (warmup, decay, least), "cosine": (warmup, least)}[kind]
    for name in (warmup, decay, least):
        if t.given(name) and name not in read:
            t.note_idle(name, f"the scheduler {kind} does not read it")


def _put_model(t: Translation) -> None:
    sampled = "orchestrator.model.name"
    t.stand_in("model.name", sampled)
    t.put("model", t["model.name"], "model.name")
    if t.given(sampled) and t[sampled] != t["model.name"]:
        t.refuse(sampled, f"what samples is what is trained, {t['model.name']}")
    renderer, name = _table(t, "orchestrator.renderer"), "orchestrator.renderer"
    if others := sorted(renderer.keys() - {"name", "tool_parser", "reasoning_parser"}):
        why = f"{', '.join(others)}: earlier messages are what the tokenizer's own template makes of them"
        t.refuse(name, why, instead=" ".join(f"{name}.{other}=null" for other in others))
    elif renderer:
        t.note_idle(name, "prompts are rendered with the tokenizer's own template")
    if t.given("trainer.model.ac"):
        t.put("train.gradient_checkpointing", t["trainer.model.ac"] is not False, "trainer.model.ac")
    t.put("train.router_replay", t["trainer.enable_router_replay"] or None, "trainer.enable_router_replay")
    lora = "trainer.model.lora"
    if not t.given(lora):
        t.clear("train.lora", lora, origin=f"there is no [{lora}], so all parameters are trained")
        t.put("dtype", "float32", origin="all parameters are trained")
        return
    for key in ("rank", "alpha", "dropout"):
        t.put(f"train.lora.{key}", t[f"{lora}.{key}"], f"{lora}.{key}")
    modules = t[f"{lora}.target_modules"]
    every = modules is None or set(modules) >= PROJECTIONS
    t.put("train.lora.targets", "all-linear" if every else modules, f"{lora}.target_modules")


# ---- environments ----


def _sources(t: Translation, name: str) -> list[Source]:
    """Return the environments of a list; what is wrong with them are problems of the translation."""
    entries = t[name] or []
    made = [_source(t, (*t.written_at(name), index), entry, name) for index, entry in enumerate(entries)]
    return [source for source in made if source is not None]


def _source(t: Translation, keys: tuple[str | int, ...], entry: dict[str, Any], name: str) -> Source | None:
    """Return one entry of the list; None for one that is null, or wrong."""
    place = dotted(keys)
    if not (entry := {key: value for key, value in entry.items() if value is not None}):
        return None
    known = (*SOURCE, *OLDER, *(OF_EVAL if name == EVAL_SOURCES else ()))

    def wrong(key: str, message: str) -> None:
        t.problems.append(f"{place}.{key}{t.document.where((*keys, key))}: {message}")

    for key in entry.keys() - set(known):
        near = difflib.get_close_matches(key, known, n=1)
        wrong(key, f"unknown; did you mean {near[0]}?" if near else f"unknown; the keys are {', '.join(known)}")
    for key in ("env", "args", "legacy", "taskset", "harness", "sampling", "algo"):
        if not isinstance(entry.get(key, {}), Mapping):
            wrong(key, f"{entry[key]!r} is not valid; it must be a table")
            return None
    if entry.get("extra_env_kwargs"):
        what = f"{place}.extra_env_kwargs are not handed on"
        t.refuse(name, what, instead=f"{place}.extra_env_kwargs=null")
    legacy = dict(entry.get("legacy") or {})
    if "id" in entry or "id" in legacy:
        arguments = dict(entry.get("args") or legacy.get("args") or {})
        return Source(place=place, id=str(entry.get("id") or legacy["id"]), legacy=True, config=arguments, said=entry)
    config = _env_config(entry)
    taskset = dict(config.get("taskset") or {})
    identity = taskset.pop("id", None)
    if not isinstance(identity, str) or not identity:
        wrong("env", 'names no environment; write env.taskset = { id = "..." }')
        return None
    config = {key: value for key, value in config.items() if key != "taskset"}
    return Source(
        place=place, id=identity, legacy=False, config=({"taskset": taskset} if taskset else {}) | config, said=entry
    )


def _env_config(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what verifiers 0.4 reads as [env]: `taskset` and `harness` of a source were in no `env` before July 2026,
    and the runtime was in the harness."""
    config = dict(entry.get("env") or {})
    if "taskset" in entry:
        config["taskset"] = entry["taskset"]
    if "harness" in entry:
        config["agent"] = {**dict(config.get("agent") or {}), "harness": entry["harness"]}
    for seat, value in config.items():
        harness = value.get("harness") if isinstance(value, Mapping) else None
        if isinstance(harness, Mapping) and "runtime" in harness:
            inner = {key: each for key, each in harness.items() if key != "runtime"}
            config[seat] = {**value, "harness": inner, "runtime": harness["runtime"]}
    return config


def _put_environment(t: Translation, sources: list[Source]) -> None:
    if _is_gym(sources):
        _put_problems(t, sources)
        return
    first = sources[0]
    if sources[1:]:
        instead = " ".join(f"{source.place}=null" for source in sources[1:])
        t.refuse(SOURCES, f"{len(sources)} environments; one is played here", instead=instead)
    if first.legacy:
        args: dict[str, Any] = {"environment": first.id.partition("@")[0]}
        args |= {"args": first.config} if first.config else {}
    else:
        args = {"taskset": first.id} | ({"config": first.config} if first.config else {})
    evaluated = _put_eval(t, first)
    if evaluated is not None and not first.legacy:
        args["eval_config"] = evaluated.config
    t.put("env.agent", VERIFIERS_AGENT if first.legacy else TASKSET_AGENT, SOURCES)
    t.put("env.args", args, SOURCES)
    t.put("env.max_turns", MAX_TURNS, origin="turns have no limit there")
    t.put("env.timeout_s", _longest(first.config), origin="an episode has the time that its agent has there")
    t.put("env.concurrency", t["orchestrator.concurrency.max_inflight"], "orchestrator.concurrency.max_inflight")


def _longest(config: Mapping[str, Any]) -> float:
    """Return seconds that the agents of a configuration give an episode."""
    limits = [value.get("timeout") for value in config.values() if isinstance(value, Mapping)]
    said = [limit.get("rollout") for limit in limits if isinstance(limit, Mapping)]
    return max([float(limit) for limit in said if isinstance(limit, int | float)], default=EPISODE_S)


def _put_eval(t: Translation, trained: Source) -> Source | None:
    """[orchestrator.eval] of an environment; the source that it names, if it is the one that is trained on."""
    if not t.given("orchestrator.eval"):
        return None
    sources = _sources(t, EVAL_SOURCES)
    t.raise_problems()
    same = [source for source in sources if (source.package, source.legacy) == (trained.package, trained.legacy)]
    fits = same and (not trained.legacy or same[0].config == trained.config)
    if len(sources) != 1 or not fits:
        what = f"only the environment that is trained on is evaluated, {trained.id}, in one way"
        t.refuse("orchestrator.eval", what, instead="orchestrator.eval=null")
        return None
    [evaluated] = sources
    kept = {} if trained.legacy else _only_in(trained.config, evaluated.config)
    if kept:
        t.note_difference(EVAL_SOURCES, f"{', '.join(kept)} of the trained environment hold in evaluation too")
    _put_eval_of(t, evaluated)
    examples = evaluated.said.get("num_examples", t["orchestrator.eval.num_examples"])
    t.put("eval.limit", None if examples == -1 else examples, "orchestrator.eval.num_examples")
    return evaluated


def _only_in(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the keys of `one` that `other` does not have, dotted."""
    keys: list[str] = []
    for key, value in one.items():
        if key not in other:
            keys.append(f"{path}{key}")
        elif isinstance(value, Mapping) and isinstance(other[key], Mapping):
            keys += _only_in(value, other[key], f"{path}{key}.")
    return keys


def _put_eval_of(t: Translation, source: Source) -> None:
    """Put when and how often is evaluated, and whether greedily."""
    said = source.said
    t.put("eval.every", said.get("interval", t["orchestrator.eval.interval"]), "orchestrator.eval.interval")
    key = "orchestrator.eval.sampling"
    sampling = {**_table(t, key), **dict(said.get("sampling") or {})}
    temperature, top_p = (sampling.pop(name, None) for name in ("temperature", "top_p"))
    greedy = temperature == 0
    t.put("eval.modes", ["greedy" if greedy else "sampled"], key)
    group = said.get("group_size", said.get("rollouts_per_example", t["orchestrator.eval.group_size"]))
    t.put("eval.k", None if greedy else group, "orchestrator.eval.group_size")
    if not greedy:
        t.put("eval.temperature", temperature, key)
        t.put("eval.top_p", top_p, key)
    longest = [sampling.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    t.put("eval.max_tokens", next((each for each in longest if each is not None), None), key)
    if sampling:
        t.note_difference(key, f"evaluation samples as training does, but for {', '.join(sampling)}")


def _is_gym(sources: list[Source]) -> bool:
    return all(source.legacy and source.package.replace("_", "-") == REASONING_GYM for source in sources)


def _put_problems(t: Translation, sources: list[Source]) -> None:
    """Put the `reasoning-gym` environments of verifiers, one with several tasks or several, as generated problems."""
    for key, value in _problems(t, sources).items():
        t.put(f"data.{key}", value, SOURCES)
    t.put("data.size", sources[0].config.get("num_train_examples"), SOURCES)
    t.put("data.shuffle", False, origin="tasks are drawn in their order there")
    strict = {"function": REASONING_GYM, "args": {"strict": True}}  # a reply without <answer> has no score there
    t.put("rewards", [strict], SOURCES)
    t.note_difference(SOURCES, "the problems are of the same generators, and drawn with other seeds")
    if not t.given("orchestrator.eval"):
        return
    evaluated = _sources(t, EVAL_SOURCES) or sources
    t.raise_problems()
    if not _is_gym(evaluated):
        t.refuse("orchestrator.eval", "only reasoning-gym is evaluated here", instead="orchestrator.eval=null")
        return
    for key, value in _problems(t, evaluated).items():
        t.put(f"eval.data.{key}", value, EVAL_SOURCES)
    examples = evaluated[0].said.get("num_examples", t["orchestrator.eval.num_examples"])
    size = evaluated[0].config.get("num_eval_examples", EVAL_PROBLEMS) if examples == -1 else examples
    t.put("eval.data.size", size, "orchestrator.eval.num_examples")
    _put_eval_of(t, evaluated[0])


def _problems(t: Translation, sources: list[Source]) -> dict[str, Any]:
    """Return what `data` says of generated problems: the generators with their shares, and the system message."""
    tasks: dict[str, dict[str, Any]] = {}
    for source in sources:
        for name, parameters in _tasks(t, source).items():
            share = source.said.get("ratio", 1.0) * parameters.get("weight", 1.0)
            tasks[name] = parameters | ({"weight": share} if share != 1.0 else {})
    prompt = sources[0].config.get("system_prompt") or _default_prompt()
    return {"source": REASONING_GYM, "tasks": tasks, "system": prompt}


def _tasks(t: Translation, source: Source) -> dict[str, dict[str, Any]]:
    """Return the generators that `gym` names: one, or a list of names and of {name, weight, config}."""
    named = source.config.get("gym", [])
    tasks: dict[str, dict[str, Any]] = {}
    for each in [named] if isinstance(named, str) else named:
        entry: dict[str, Any] = {"name": each} if isinstance(each, str) else {**each}
        weight = {"weight": entry["weight"]} if "weight" in entry else {}
        tasks[str(entry.get("name"))] = {**(entry.get("config") or {}), **weight}
    if not tasks:
        t.problem(SOURCES, f'{source.place}.args names no generator; write gym = "chain_sum"')
    return tasks


def _default_prompt() -> str | None:
    """Return the system message that the environment gives its problems: reasoning-gym's own, where that is
    installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return None
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return SYSTEM_PROMPTS["default"]


FORMAT = ConfigFormat(
    name=SYSTEM,
    order=10,
    recognises=lambda data: is_whole(data) or part_of(data) is not None,
    table=KEYS,
    translate=translate,
)
