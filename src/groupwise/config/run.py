"""The configuration of a training run: every key with its bounds, its default and what it does.

    load_config     a YAML file and dotted overrides  -> RunConfig
    parse_config    a mapping from Python             -> RunConfig
    dump_resolved   RunConfig                         -> YAML with every effective value; it loads as the same run

Only `data` and `rewards` have no default; with `env`, the environment may bring both. A key that does not exist, a
value out of bounds and options that exclude each other are refused with the key, the file's line, the value and what
would be valid. Numbers are not read from strings and true/false is not a number. There is one name per knob, and no
secrets: tokens come from the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from groupwise.config.algo import ReferenceKind, RunAlgoConfig
from groupwise.config.chat import ChatConfig
from groupwise.config.data import REASONING_GYM, DataConfig, RunKind
from groupwise.config.engine import SERVED_BY, Engine, VllmConfig
from groupwise.config.evaluation import EVAL_SAMPLING, EvalConfig
from groupwise.config.formats.known_elsewhere import known_elsewhere
from groupwise.config.harness import HarnessConfig
from groupwise.config.launch import Launcher, LauncherConfig
from groupwise.config.lora import LoraSpec
from groupwise.config.other_names import OTHER_NAMES, OTHER_VALUES
from groupwise.config.preference import PreferenceConfig
from groupwise.config.promote import PromoteConfig
from groupwise.config.rewards import Rewards, ScoringConfig
from groupwise.config.section import AdapterName, Folder, Name, Place, Section, Temperature, Text, Texts, conflict
from groupwise.config.stages import check_stages
from groupwise.config.structured import StructuredOutputsConfig
from groupwise.config.supervised import check_supervised
from groupwise.config.teacher import TeacherConfig, check_teacher
from groupwise.config.trained import TEXT, Parts, check_eyes
from groupwise.config.yaml import Document, to_yaml, validate
from groupwise.errors import ConfigError
from groupwise.types import NARROWING, Grammar, SamplingParams


def _betas(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{list(betas)} is not valid; both must be in [0, 1)")
    return betas


Betas = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_betas)]


LearningRate = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[int, Field(ge=0)]


Attention = Literal["auto", "merged", "flex"]


class OptimizerConfig(Section):
    """AdamW (arXiv 1711.05101) and what goes through the model at once, of a run and of a job."""

    learning_rate: LearningRate = 1e-4
    """Peak learning rate; 0 changes nothing, as a control."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Tokens in one forward and backward pass, at most."""
    gradient_checkpointing: bool | Literal["offload"] = False
    """Recompute activations in the backward pass: less memory, more time; offload also keeps the inputs of layers in
    the CPU's memory until then (with a CUDA GPU)."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """AdamW, moments in float32, or by bitsandbytes in 8 bits, paged: moved from a CUDA GPU to the host or back."""


class TrainConfig(OptimizerConfig):
    """The optimizer (AdamW) and how the batch goes through the model."""

    steps: int = Field(default=100, ge=1)
    """Rollout batches to train on."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The learning rate after warm-up: constant, falling, or (wsd) constant and falling in the last `decay_steps`. What
    it falls to it would reach just after the last step."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of wsd's fall; null is a fifth of the run."""
    final_rate: float = Field(default=0.0, ge=0, lt=1)
    """The share of its peak to which the learning rate falls."""
    warmup_steps: Steps = Field(default_factory=lambda values: min(5, values.get("steps", 6) - 1))
    """Steps in which the learning rate rises from 0, which the first has; the default is 5, or fewer than `steps`."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of each rollout batch, each with an optimizer step."""
    passes: int = Field(default=1, ge=1, le=64)
    """Times that each rollout batch is gone over."""
    memory_gb: float | None = Field(default=None, gt=0)
    """GiB that the whole run may take: passes get as few tokens as that needs, by an estimate of the worst batch. null:
    what a GPU has free; on a CPU passes have `micro_tokens`."""
    attention: Attention = "auto"
    """How training computes attention over packed rows: merged, by matrix products over padded grids, on any device;
    flex, by FlexAttention's compiled kernels, on a CUDA GPU. auto is flex on a GPU, for models of more than 256 MiB.
    Where flex cannot be used, a warning says why, and merged is: the results are the same."""
    lora: LoraSpec | None = LoraSpec()
    """null trains all parameters, of a model that sees those of `parameters`."""
    parameters: Parts = (TEXT,)
    """Which parameters train with `lora: null`: a list of `text` (the text decoder and the LM head), `vision` (the
    tower, its embeddings included) and `projector`; or `all`."""
    mixed_precision: bool = False
    """Multiply in bfloat16 over weights, gradients and moments in float32 (autocast), which is how all parameters are
    trained on a GPU: bfloat16 alone has no digits for small steps. Needs `dtype: float32`, which then samples."""
    router_replay: bool | None = None
    """In a mixture of experts, train each token with the experts with which it was sampled (R3, docs/mixtures.md).
    null: if the engine records them; true: always, or the run is refused; false: never."""
    devices: int | None = Field(default=None, ge=1, le=65536)
    """Processes that train together, each with a GPU where there are any (docs/scale.md); null is as many as were
    started, which is one without `groupwise launch`."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Whether each of several processes has all weights, or a share of them; each trains on a share of the batch."""
    cpu_offload: bool = False
    """With fsdp on GPUs: weights are in the CPU's memory and visit the GPU layer by layer."""
    shard_size: int | None = Field(default=None, ge=2, le=65536)
    """With fsdp, the number of consecutive processes that share one copy of the weights, with the same copy in each
    such group (HSDP). null: those of one machine if there are several, so that weights stay inside it; else all."""
    context_parallel_size: int = Field(default=1, ge=1, le=65536)
    """The number of consecutive processes that compute each sequence together: they divide its tokens, and in attention
    its heads (Ulysses). For episodes whose activations do not fit on one GPU (docs/scale.md)."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds that processes wait for one another before the run ends with an error that says for whom."""

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.warmup_steps > self.steps:
            message = f"{self.warmup_steps} warm-up steps do not fit into train.steps = {self.steps}"
            raise conflict("warmup_steps", message)
        if self.schedule == "constant" and self.final_rate:
            raise conflict("final_rate", f"{self.final_rate} does not act with schedule constant, which does not fall")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise conflict("decay_steps", f"{self.decay_steps} acts with schedule wsd only, not {self.schedule}")
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > self.steps:
            message = f"{self.warmup_steps} warm-up and {self.decay_steps} decay steps do not fit into {self.steps}"
            raise conflict("decay_steps", message)
        if self.optimizer != "adamw" and self.parallel == "fsdp" and self.lora is None:
            raise conflict("optimizer", f"{self.optimizer} cannot keep moments of cut parameters; set adamw")
        if self.cpu_offload and self.parallel != "fsdp":
            raise conflict("cpu_offload", f"acts with parallel fsdp only, not {self.parallel}")
        if self.shard_size is not None and self.parallel != "fsdp":
            raise conflict("shard_size", f"acts with parallel fsdp only, not {self.parallel}")
        if self.devices is not None and self.devices % self.context_parallel_size:
            message = f"{self.context_parallel_size} processes compute a sequence together, and train.devices"
            raise conflict("context_parallel_size", f"{message} is {self.devices}, no multiple of that")
        return self


NOT_OF_AGENTS = ("workers", "lockstep", "step_timeout_s", "stop_at_cut")  # they rule over an environment's `step`


class EnvConfig(Section):
    """Configures episodes of several turns: the environment or agent, and the limits of an episode. An environment
    plays the other side of an episode; an agent or a harness all of it, and asks the policy through an API."""

    environment: Text | None = None
    """`module:Class`, perhaps of a module in the configuration's folder. Give this, `agent` or `harness`."""
    agent: Text | None = None
    """`module:function` (or a class): a function that plays an episode by itself, with an OpenAI client."""
    harness: HarnessConfig | None = None
    """A command: a program that is started for each episode, in a workspace that is scored."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""
    workers: int = Field(default=2, ge=0, le=1024)
    """Processes that run environments, many episodes in each, replaced when lost; 0: the run's own, unprotected."""
    max_turns: int = Field(default=8, ge=1, le=4096)
    """Most turns of the policy in an episode."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that the policy may sample in an episode; null: `rollout.max_tokens` in each turn."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Most tool calls in an episode; null sets no limit."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that an episode may take, sampling included."""
    step_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that one method of the environment may take."""
    concurrency: int = Field(default=256, ge=1, le=65536)
    """Episodes played at once."""
    lockstep: bool = False
    """Sample the turns of all episodes in rounds: equal seeds give equal bytes, at the pace of the slowest episode."""
    train_turns: Literal["all", "first"] = "all"
    """`all` trains every turn, `first` only the first one of each episode."""
    on_error: Literal["exclude", "zero", "stop"] = "exclude"
    """If the environment fails: leave the episode out of its group, give it the reward 0, or end the run."""
    max_characters: int = Field(default=200_000, ge=1)
    """Longest message that an environment may send at once."""
    stop_at_cut: bool = True
    """A turn that is cut at `rollout.max_tokens` ends the episode; false passes the cut message to the environment."""

    @model_validator(mode="after")
    def _one_player(self) -> EnvConfig:
        players = ("environment", "agent", "harness")
        given = [name for name in players if getattr(self, name) is not None]
        if len(given) != 1:
            there = f"there are {' and '.join(given)}" if given else "there is none of environment, agent and harness"
            raise conflict("environment", f"{there}; name one of them")
        if self.environment is not None:
            return self
        for key in (*self.differing(NOT_OF_AGENTS), *(["args"] if self.harness and self.args else [])):
            raise conflict(key, f"does nothing for env.{given[0]}, which decides that itself; leave it out")
        return self

    def differing(self, keys: Sequence[str]) -> list[str]:
        """Return those of the keys that ask for something else than the default; `workers: 0` asks for nothing."""
        fields = type(self).model_fields
        nothing = {"workers": 0}
        return [
            key for key in keys if (value := getattr(self, key)) != fields[key].default and value != nothing.get(key)
        ]


STARTER, STARTER_VL = "starter", "starter-vl"
_STARTERS = Path(__file__).parent.parent / "tasks" / "starter"
PACKAGED = {STARTER: _STARTERS / "model", STARTER_VL: _STARTERS / "model_vl"}  # the models in the package
STARTER_DIR = PACKAGED[STARTER]

_WHERE = ("run_dir", "output_dir", "resume", "launcher")
_ON_WHAT = (  # of `train`
    "devices", "parallel", "shard_size", "context_parallel_size", "cpu_offload", "deadline_s", "attention"
)  # fmt: skip


class ReplayConfig(Section):
    """The replay buffer: groups with a strong signal are trained again in place of groups without one."""

    size: int = Field(default=0, ge=0)
    """Groups kept; 0 is off."""
    share: float = Field(default=0.25, gt=0, le=1)
    """The largest share of a batch that is replayed."""
    max_age: int = Field(default=16, ge=1)
    """Steps after which a group is too old."""


class RerollConfig(Section):
    """Prompts on which every completion failed, tried again later."""

    max_groups: int = Field(default=0, ge=0)
    """The most groups that are tried again in a step; 0 is off."""
    start: float = Field(default=0.0, ge=0, lt=1)
    """The share of the run from which on prompts are tried again."""
    attempts: int = Field(default=2, ge=1)
    """How often a prompt is tried again."""
    reward: Name | None = None
    """The reward function that tells failure, where others would hide it (format, length); null is the weighted sum."""


class RolloutConfig(Section):
    """Sampling of completions, and how far it may run ahead of training."""

    prompts_per_step: int = Field(default=32, ge=1, le=65536)
    """Prompts, and so groups, in one step's batch."""
    group_size: int = Field(default=8, le=4096)
    """Completions of each prompt."""
    max_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Longest completion, in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature. Not 0, at which the completions of a group would all be the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: draw among the likeliest tokens that make up this probability; 1 is off. Training is of the
    distribution that was sampled (docs/losses.md). Below 1 with the local engine only: which tokens vLLM
    left is not read (docs/vllm.md)."""
    top_k: int = Field(default=0, ge=0)
    """Sample among this many likeliest tokens; 0 is off. As top_p, with the local engine only."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens less likely than this fraction of the likeliest; 0 is off. As top_p, with the local engine only."""
    stop: Texts = ()
    """Strings that end a completion; they are cut from its text, unless `include_stop` keeps them."""
    include_stop: bool = False
    """Keep what ended a completion in the text that rewards and environments read, as TRL does, which decodes all that
    was sampled. The tokens are trained either way."""
    structured_outputs: StructuredOutputsConfig | None = None
    """The form of completions, in vLLM's terms: only tokens that can lead to it are sampled, and training uses that
    distribution. Thoughts are free, and tool calls have their own form (docs/recipe.md)."""
    structured_outputs_regex: Text | None = None
    """`structured_outputs.regex`, as TRL calls it."""
    thinking_budget: int | None = Field(default=None, ge=1)
    """Tokens after which a <think> block is ended: then nothing is left to draw but its end, which is not learned. null
    bounds it by `max_tokens` alone."""
    refill: float = Field(default=2.0, ge=1, le=64)
    """Groups with nothing to learn from are replaced by sampling at most `refill` times `prompts_per_step` prompts a
    step; 1 never replaces."""
    batch_rows: int = Field(default=256, ge=1, le=65536)
    """Completions that the engine decodes at once."""
    cache_gb: float | None = Field(default=None, gt=0)
    """GiB that the local engine's keys and values may take. Where completions in flight could need more before they
    end, others wait; one alone never does. null: on a GPU half of the memory that is free once the model is there, on a
    CPU what `batch_rows` completions need."""
    prefix_cache_mb: int = Field(default=1024, ge=0)
    """MiB of keys and values that the local engine keeps of conversations, so that their next turn computes only what
    is new; 0 keeps none."""
    draft_tokens: int = Field(default=0, ge=0, le=32)
    """Most tokens of a completion that the local engine guesses from earlier text and checks in one step, while few
    completions are decoded (prompt-lookup decoding). What is sampled stays the same; it takes less time where
    completions repeat their prompts or themselves. 0 guesses none."""
    compile: bool | None = None
    """Compile what the local engine computes in a step between attentions (torch.compile), on a GPU with CUDA graphs.
    The first steps wait for the compiler. Where it cannot be done a warning says why, and sampling continues without.
    null: on a CUDA GPU, for models that can be compiled (docs/performance.md); on a CPU it brings nothing."""
    dtype: Literal["bfloat16", "int8"] | None = None
    """Sample with the base's linear layers rounded to this type, which a CPU multiplies with in less time
    (docs/performance.md), and train in float32 all the same; adapters are not rounded. Sampler and trainer differ then,
    which `algo.correction` (tis_token, say) or the anchor `behaviour` accounts for; evaluations in the run sample so,
    too. With the local engine, for the Llama family on a CPU with AVX512-BF16 (`bfloat16`) or AVX512-VNNI (`int8`).
    null: as they are."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are passed over and counted; null is what the model's context holds."""
    weight_sync_interval: int = Field(default=1, ge=0)
    """Steps between syncs of the sampling policy. 1 is on-policy: sample, train, sync, repeat. N is a window: the
    prompts of N steps are sampled by one version and trained as they arrive. 0 never syncs (for ablations)."""
    max_staleness: int = Field(default=0, ge=0)
    """Sampling continues during training; a group may train at most this many steps after the version that sampled
    it, and a step waits for groups that would be too old for the next. 0 waits for each sync."""
    in_flight_updates: bool = False
    """A new version takes over the completions that are being sampled, between two tokens, instead of only those that
    begin after it. Each token is recorded with the version and the probability that drew it. Needs `max_staleness`,
    which still counts from the version that a group began with: that of its oldest token."""
    in_flight_cache: Literal["keep", "recompute"] = "keep"
    """The keys and values of the text so far: `keep` continues with those of older versions; `recompute` reads the text
    again with the new one, which takes time but leaves sampler and trainer with one policy. vLLM can only recompute."""
    concurrency: int | None = Field(default=None, ge=1)
    """Groups sampled or scored at once; null is all that may be."""
    stream_groups: int = Field(default=0, ge=0)
    """Run forward and backward whenever this many groups of a step are scored; 0 waits for the whole step."""
    replay: ReplayConfig = ReplayConfig()
    """Groups that are trained again."""
    reroll: RerollConfig = RerollConfig()
    """Prompts that are tried again."""

    @field_validator("group_size")
    @classmethod
    def _is_a_group(cls, group_size: int) -> int:
        if group_size < 2:
            raise ValueError(f"{group_size} is not valid; a group needs at least 2 completions to be compared")
        return group_size

    @model_validator(mode="after")
    def _acts(self) -> RolloutConfig:
        interval, staleness = self.weight_sync_interval, self.max_staleness
        if staleness and not interval:
            raise conflict("max_staleness", f"{staleness} has no effect with weight_sync_interval 0, which never syncs")
        if staleness and staleness < interval:
            message = f"{staleness} is less than weight_sync_interval = {interval}: groups would be stale before a sync"
            raise conflict("max_staleness", f"{message}; raise it to {interval} or lower the interval")
        if self.in_flight_updates and not staleness:
            message = "true has no effect while max_staleness is 0: nothing is being sampled when a version comes"
            raise conflict("in_flight_updates", f"{message}; set max_staleness 1 or more")
        if self.in_flight_cache != "keep" and not self.in_flight_updates:
            raise conflict("in_flight_cache", f"{self.in_flight_cache} has no effect without in_flight_updates: true")
        if self.dtype is not None and self.compile:
            raise conflict("dtype", f"{self.dtype} does not go with compile: true, which compiles products in float32")
        if self.thinking_budget is not None and self.thinking_budget >= self.max_tokens:
            message = f"{self.thinking_budget} leaves no token of max_tokens = {self.max_tokens} for the answer"
            raise conflict("thinking_budget", f"{message}; lower it, or raise max_tokens")
        if self.structured_outputs is not None and self.structured_outputs_regex is not None:
            message = "structured_outputs says already what completions must be; leave one of the two out"
            raise conflict("structured_outputs_regex", message)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar of completions; None if they are not constrained."""
        if self.structured_outputs_regex is not None:
            return Grammar.regex(self.structured_outputs_regex, field="rollout.structured_outputs_regex")
        asked = self.structured_outputs
        return None if asked is None else asked.as_grammar("rollout.structured_outputs")

    @property
    def on_policy(self) -> bool:
        """Return whether every group that is sampled is trained by the version that sampled it."""
        return self.weight_sync_interval == 1 and self.max_staleness == 0

    @property
    def may_be_stale(self) -> bool:
        """Return whether a group may be trained that another policy sampled: an older one (ahead of training, or to be
        replayed), or one of rounded weights."""
        return not self.on_policy or self.replay.size > 0 or self.dtype is not None

    def sampling(self) -> SamplingParams:
        """Return the training rollouts' sampling parameters (without a seed)."""
        narrowing = {name: getattr(self, name) for name in NARROWING}
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.stop,
            include_stop=self.include_stop,
            grammar=self.grammar,
            thinking_budget=self.thinking_budget,
            **narrowing,
        )


class AdaptersConfig(Section):
    """The number of published adapter versions that are kept, and the one that training starts from."""

    keep: int = Field(default=3, ge=1)
    """Newest versions kept on disk, in addition to the evaluated, the active and the final ones."""
    start: Text | None = None
    """The adapter that training starts from, as `--adapter` of `groupwise eval` names it: a run's, a directory, or
    `hf://OWNER/NAME`; null is a fresh one."""


class CheckpointConfig(Section):
    """The interval of a run's checkpoints, from which `resume: auto` continues."""

    every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0 writes one at the end and when stopped only."""


class TrackingConfig(Section):
    """Configures trackers that get the metrics in addition to `metrics.jsonl`, which is always written."""

    trl_names: bool = True
    """Give these trackers the metrics under TRL's names too."""
    completions: int = Field(default=16, ge=0)
    """Completions of each step that they get in a table, with their rewards; 0 is none."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run directory."""
    wandb: Text | None = None
    """Weights & Biases project. Without a key there the run is recorded offline, with a warning."""
    wandb_entity: Text | None = None
    """The W&B user or team that the project belongs to; null is the key's own."""
    wandb_name: Text | None = None
    """The run's name in W&B; null is the run directory's."""
    trackio: Text | None = None
    """Trackio project."""
    mlflow: Text | None = None
    """MLflow experiment, at MLFLOW_TRACKING_URI or in the database `mlflow.db` where you are."""

    @model_validator(mode="after")
    def _acts(self) -> TrackingConfig:
        for key in ("wandb_entity", "wandb_name"):
            if (value := getattr(self, key)) is not None and self.wandb is None:
                raise conflict(key, f"{value!r} acts with a W&B project only: set tracking.wandb")
        return self


class RunConfig(Section):
    """Holds the configuration of a training run, with each key as an attribute. Instances are immutable; `load_config`
    and `parse_config` make them, and raise ConfigError for a key or value that is wrong."""

    name: AdapterName = "run"
    """The run's name, and the adapter's: letters, digits, `.`, `_` and `-`; not "base"."""
    kind: RunKind = "grpo"
    """grpo: learn from the rewards of what the policy samples. sft: learn the dataset's own answers by cross-entropy
    (`data.answer_key`). dpo: learn its preference pairs (`chosen`, `rejected`; docs/preferences.md). With the last two
    `rollout.prompts_per_step` are the examples or pairs of a step, and rewards only evaluate."""
    model: Text = "starter"
    """`starter` or `starter-vl`, which sees (both are in the package), a Hugging Face name, or a directory (relative to
    where you are)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 on a CUDA GPU and float32 elsewhere."""
    quantization: Literal["nf4", "int8"] | None = None
    """The base model's weights in 4 bits (`nf4`, QLoRA) or 8 (`int8`), quantised by bitsandbytes while loading;
    adapters and everything else stay in `dtype`. Needs `pip install 'groupwise[quantized]'`. null: in `dtype`."""
    cast_lm_head: Literal["auto", "float32", "none"] = "auto"
    """`float32` keeps the logits of a 16-bit model in float32, in training and in what samples: its own type rounds
    them, by up to 0.06 nats. `auto` does so on a CUDA GPU, where it takes no longer; `none` does not."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")] = "auto"
    """`auto` (a CUDA GPU, else Apple's, else the CPU), `cpu`, `mps`, `cuda` or `cuda:N`."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Fixes initialisation, the order of prompts and every draw."""
    output_dir: Place = "runs"
    """The run directory is `output_dir/name-<UTC time>` (relative to where you are) ..."""
    run_dir: Place | None = None
    """... unless it is named here."""
    resume: Literal["never", "auto"] = "never"
    """`auto` continues the unfinished run of this name and configuration, if there is one. A finished run continues,
    too, if `train.steps` asks for more steps than it made; one that `run_dir` names and that made all of them only
    shows its result again."""
    folder: Folder = Path(".")
    """The folder where `data.source` and functions' modules are looked up first; by default the config file's."""
    stages: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    """Runs that come first, each from the adapter of the one before: a `name`, and the keys in which it differs from
    this file (docs/tutorials/examples_to_rewards.md)."""
    chat: ChatConfig = ChatConfig()
    """How conversations become tokens: the chat template and its variables."""
    data: DataConfig | None = None
    """The prompts to train on; an environment with a method `cases` needs none."""
    eval: EvalConfig | None = None
    """null does not evaluate."""
    promote: PromoteConfig | None = None
    """The tests that a version must pass to become active; null makes the newest active (docs/evaluation.md)."""
    rewards: Rewards = ()
    """The reward functions; a completion's reward is their weighted sum, plus what its environment gave."""
    scoring: ScoringConfig = ScoringConfig()
    """Worker processes and time limits of reward functions."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    engine: Engine = "local"
    """The engine that samples: `local`, in this process over the trainer's own weights, or `vllm`."""
    vllm: VllmConfig = VllmConfig()
    """How vLLM is reached or run."""
    env: EnvConfig | None = None
    """An environment that plays episodes of several turns; null asks each prompt once."""
    algo: RunAlgoConfig = RunAlgoConfig()
    """Advantages and the policy loss."""
    dpo: PreferenceConfig = PreferenceConfig()
    """How preference pairs are learned; with `kind: dpo` only."""
    teacher: TeacherConfig | None = None
    """A teacher to learn from, in addition to rewards or instead of them; null: none (docs/distillation.md)."""
    train: TrainConfig = TrainConfig()
    """The optimizer."""
    adapters: AdaptersConfig = AdaptersConfig()
    """The versions that training publishes."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoints from which a killed run continues."""
    tracking: TrackingConfig = TrackingConfig()
    """Where metrics go."""
    launcher: Launcher = LauncherConfig()
    """How `groupwise launch` starts several processes."""

    @model_validator(mode="before")
    @classmethod
    def _scored_by_its_source(cls, values: Any) -> Any:
        """Set the reward of reasoning-gym's tasks if no other is named."""
        data = values.get("data") if isinstance(values, dict) else None
        source = data.get("source") if isinstance(data, dict) else getattr(data, "source", None)
        if source == REASONING_GYM and not values.get("rewards") and values.get("env") is None:
            return {**values, "rewards": [REASONING_GYM]}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        self._check_sources()
        prompts, minibatches = self.rollout.prompts_per_step, self.train.minibatches
        if prompts % minibatches:
            message = f"{minibatches} minibatches cannot share rollout.prompts_per_step = {prompts} prompts evenly"
            raise conflict("train", "minibatches", message)
        if self.rollout.stream_groups:
            self._check_streaming()
        if self.data is not None and self.data.streaming and self.rollout.reroll.max_groups:
            message = "tries prompts again, and with data.streaming none is held; leave one of the two out"
            raise conflict("rollout", "reroll", "max_groups", message)
        if self.kind != "dpo" and self.algo.kl in (None, "none") and self.algo.reference != "base":
            message = f"{self.algo.reference!r} acts with a KL term or kind dpo only: set kl (to k3, say) and kl_coeff"
            raise conflict("algo", "reference", message)
        if self.train.lora is None and not self.rollout.on_policy:
            message = "training all parameters changes the weights that sample: nothing can be sampled meanwhile"
            raise conflict("rollout", f"{message}; set weight_sync_interval 1 and max_staleness 0, or train.lora")
        self._check_engine()
        self._check_precision()
        check_stages(self)
        if self.promote is not None:
            modes = None if self.eval is None else self.eval.modes
            self.promote.check(modes, adapter=self.train.lora is not None, engine=self.engine)
        if self.teacher is not None:
            check_teacher(self, self.teacher)
        elif self.env is None and self.kind == "grpo" and not any(reward.weight for reward in self.rewards):
            raise conflict("rewards", "every weight is 0, so there is nothing to train for; give one a weight")
        return self

    @property
    def may_be_stale(self) -> bool:
        """Return whether a group may be trained that another policy sampled: `rollout.may_be_stale`, or one of vLLM's
        rounded weights, or one in float32 where training rounds products."""
        rounds = self.train.mixed_precision or (self.engine == "vllm" and self.vllm.rounds(self.dtype))
        return self.rollout.may_be_stale or rounds

    def _check_precision(self) -> None:
        """Refuse a mixture of precisions without float32, what cannot go with a base in few bits, with DoRA, or
        with an adapter of what the model sees."""
        if self.train.mixed_precision and self.dtype != "float32":
            message = f"is over weights in float32, and dtype is {self.dtype}; set dtype: float32, or leave it out"
            raise conflict("train", "mixed_precision", message)
        kind, lora = self.quantization, self.train.lora
        by_vllm = self.engine == "vllm" and self.vllm.push == "adapter"
        if lora is not None and lora.use_dora and (by_vllm or kind):
            why = "engine vllm, which serves no DoRA; set vllm.push: merged, or engine: local"
            why = why if by_vllm else f"quantization {kind}: it needs norms of the weights; leave one of the two out"
            raise conflict("train", "lora", f"use_dora does not go with {why}")
        check_eyes(self)
        if kind and lora is None:
            raise conflict("quantization", f"{kind} weights cannot be trained; set train.lora")
        if kind and self.rollout.dtype is not None:
            message = f"{self.rollout.dtype} rounds float32 weights, and quantization is {kind}; leave one of them out"
            raise conflict("rollout", "dtype", message)
        if kind and by_vllm:
            message = "vLLM would sample from other weights than train; set vllm.push: merged, or engine: local"
            raise conflict("quantization", message)
        if kind and self.train.parallel == "fsdp":
            raise conflict("quantization", f"{kind} weights are not cut by fsdp; set train.parallel: ddp")

    @property
    def reference(self) -> ReferenceKind:
        """The policy that the divergence is taken from, and that preferences are relative to: `algo.reference`; unless
        the file names one, with `stages` the policy that they leave, and with kind dpo the adapter that it starts
        from."""
        named, goes_on = "reference" in self.algo.model_fields_set, self.adapters.start is not None
        return "start" if (self.stages or (self.kind == "dpo" and goes_on)) and not named else self.algo.reference

    @property
    def group_size(self) -> int:
        """Return the completions of a prompt: `rollout.group_size`; for a dataset one answer, or the two of a pair."""
        return {"grpo": self.rollout.group_size, "sft": 1, "dpo": 2}[self.kind]

    @property
    def supervised(self) -> bool:
        """Return whether it learns what its dataset says: answers, or preference pairs."""
        return self.kind != "grpo"

    @property
    def imitates(self) -> bool:
        """Return whether something is learned by cross-entropy: the dataset's answers, or a teacher's completions."""
        return self.kind == "sft" or (self.teacher is not None and self.teacher.loss == "sft")

    @property
    def reads_reference(self) -> bool:
        """Return whether a term of the loss or of the reward, or a loss of pairs, reads the reference's
        log-probabilities."""
        return self.kind == "dpo" or self.algo.kl not in (None, "none")

    @property
    def learns_no_rewards(self) -> bool:
        """Return whether no reward has a gradient: with kind sft and dpo, and with `teacher.loss: sft` without rewards
        or with reward_weight 0."""
        weighs = self.teacher is not None and self.teacher.reward_weight > 0
        scored = bool(self.rewards) or self.env is not None
        return self.supervised or (self.imitates and not (scored and weighs))

    @property
    def samples_evaluations(self) -> bool:
        """Return whether evaluations sample completions, to count their rewards. Without rewards kind sft and dpo
        compute the loss of held-out rows alone."""
        return self.eval is not None and bool(self.rewards or self.eval.rewards or not self.supervised)

    @property
    def never_samples(self) -> bool:
        """Return whether the policy samples nothing at all: with kind sft and dpo, where no completion is evaluated."""
        return self.supervised and not self.samples_evaluations

    @property
    def keeps_base(self) -> bool:
        """Return whether rank 0 computes with the whole base in addition to its learner: for its own engine's samples;
        for episodes, whose tools and agents may ask for more than log-probabilities of sampled tokens; for grammars,
        which are checked with whole distributions; or for a teacher that is another version of the base."""
        if self.never_samples:
            return False
        rollout, teacher = self.rollout, self.teacher
        shaped = rollout.grammar is not None or rollout.thinking_budget is not None or self.env is not None
        taught = teacher is not None and teacher.base_url is None and teacher.model is None
        return self.engine == "local" or shaped or taught

    def _check_engine(self) -> None:
        """Refuse a knob of the engine that does not sample."""
        if self.engine == "local":
            if self.vllm != VllmConfig():
                raise conflict("vllm", "does nothing with engine local; set engine: vllm, or remove the section")
            return
        fields = RolloutConfig.model_fields
        for key in ("cache_gb", "draft_tokens", "prefix_cache_mb", "compile", "dtype"):
            if getattr(self.rollout, key) != fields[key].default:
                raise conflict("rollout", key, "is the local engine's, and engine is vllm; leave it out")
        for key, off in NARROWING.items():
            if (value := getattr(self.rollout, key)) != off:
                message = f"{value:g} draws from a part of the vocabulary, and vLLM does not tell which part that was"
                hint = f"trained as drawn from all of it, what is learned would be biased. Set it to {off:g} (off), or"
                raise conflict("rollout", key, f"{message}: {hint} engine: local")
        if self.vllm.push == "merged" and self.train.lora is None:
            message = "merged has no effect with train.lora null: every version is a whole model then; leave it out"
            raise conflict("vllm", "push", message)
        if self.vllm.push == "merged" and not self.rollout.on_policy:
            message = "vllm.push merged changes the weights that sample: nothing can be sampled meanwhile"
            raise conflict("rollout", f"{message}; set weight_sync_interval 1 and max_staleness 0, or push: adapter")
        self.vllm.check_turns(meanwhile=not self.rollout.on_policy or self.rollout.stream_groups > 0)
        if self.rollout.in_flight_updates and self.vllm.mode == "colocate":
            message = "has no effect with vllm.mode colocate, which hands completions out when they are whole"
            raise conflict("rollout", "in_flight_updates", f"{message}; leave it out, or let vLLM be a server")
        if self.rollout.in_flight_updates and self.rollout.in_flight_cache == "keep":
            message = "vLLM ties keys and values to the adapter that made them, so that keep cannot be had"
            raise conflict("rollout", "in_flight_cache", f"{message}; set it to recompute")

    def _check_sources(self) -> None:
        """Refuse a run without an environment that has no prompts or no rewards."""
        keys = [] if self.data is None else [each.answer_key for each in (self.data, *self.data.sources)]
        if self.kind != "sft" and (key := next(filter(None, keys), None)):
            raise conflict("data", "answer_key", f"{key!r} acts with kind sft only; leave it out")
        if self.kind != "dpo" and self.dpo != PreferenceConfig():
            raise conflict("dpo", f"acts with kind dpo only, not {self.kind}; leave it out")
        if self.supervised:
            return check_supervised(self)
        if self.env is not None:
            return
        if self.data is None:
            raise conflict("data", "required and missing: name the prompts (data.source), or an environment (env)")
        if not self.rewards and self.teacher is None:
            message = "required and missing: name a reward function, an environment (env) or a teacher"
            raise conflict("rewards", message)
        if self.algo.credit != "episode":
            message = (
                f"{self.algo.credit!r} needs episodes of several turns; name an environment (env), or leave it out"
            )
            raise conflict("algo", "credit", message)
        if self.eval is not None and self.eval.best == "loss" and not self.supervised:
            message = "loss is of held-out rows of kind sft or dpo; name a mode: greedy or sampled"
            raise conflict("eval", "best", message)
        if self.eval is not None and self.eval.data is None:
            raise conflict("eval", "data", "required and missing: name the held-out prompts")

    def _check_streaming(self) -> None:
        """Refuse what needs the whole step: a part of it knows neither the statistics of the whole nor what a second
        pass would start from."""
        for key, value, fine in (
            ("train.minibatches", self.train.minibatches, 1),
            ("train.passes", self.train.passes, 1),
            ("algo.aggregation", self.algo.aggregation, "sum_then_normalize"),
        ):
            if value != fine:
                raise conflict("rollout", "stream_groups", f"does not go with {key} = {value}; set one of them back")
        if self.algo.advantage == "batch_std":
            message = "does not go with algo.advantage batch_std, which needs the whole batch; use group_std"
            raise conflict("rollout", "stream_groups", message)

    def eval_sampling(self) -> SamplingParams:
        """Return the sampling parameters of evaluations in mode sampled: the training rollouts', with what `eval`
        changes."""
        changes = {} if self.eval is None else {key: getattr(self.eval, key) for key in EVAL_SAMPLING}
        return replace(self.rollout.sampling(), **{key: v for key, v in changes.items() if v is not None})

    def run_path(self, *, now: datetime) -> Path:
        """Return the run directory: `run_dir`, or `output_dir/name-20250131T120000Z` for the UTC time `now`."""
        return Path(self.run_dir or f"{self.output_dir}/{self.name}-{now:%Y%m%dT%H%M%SZ}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply overrides such as `train.steps=10` or `rewards[0].weight=0.5`, and check everything.

    Raises ConfigError with every problem: key, file and line, value, what is valid.
    """
    document = Document.read(path)
    for text in overrides:
        document.override(text, shorthand={"rewards": "function"})
    document.resolve_folder(Path(path).parent)
    return validated(document)


def parse_config(data: Mapping[str, Any]) -> RunConfig:
    """Return the run that a mapping of a run's keys describes, as a file of them would.

    >>> parse_config({"env": {"environment": "groupwise.tasks.word_games:Wordle"}, "train": {"steps": 5}}).train.steps
    5

    Raises:
        ConfigError: a key that is not there, is missing, or has a value that is not valid; `field` names it.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"the configuration is a {type(data).__name__}; it must be a mapping")
    return validated(Document(dict(data)))


def validated(document: Document) -> RunConfig:
    """Return a document as a run. Raises ConfigError with every problem, and what was probably meant."""
    return validate(document, RunConfig, other_names=OTHER_NAMES, other_values=OTHER_VALUES, elsewhere=known_elsewhere)


def check_processes(config: RunConfig, count: int) -> None:
    """Raise ConfigError for what `count` processes cannot do together: vLLM makes groups of processes when it starts,
    and would wait for ever for those of other ranks, which have none."""
    if count > 1 and config.engine == "vllm" and config.vllm.mode == "colocate":
        raise ConfigError(
            f"vllm.mode is colocate, and {count} processes train: vLLM would be in the first one's alone, and wait for "
            "the others for ever when it starts",
            hint="set vllm.mode=server, which takes GPUs that no learner uses or what training leaves; or train in one "
            "process",
            field="vllm.mode",
        )


def identity(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `resolved` values that must be equal for a run to be resumed: all but where it is kept, on how many
    devices it is trained, and which vLLM servers sample."""
    kept = {key: value for key, value in values.items() if key not in _WHERE}
    for section, free in (("train", _ON_WHAT), ("vllm", SERVED_BY)):
        kept[section] = {key: value for key, value in (kept.get(section) or {}).items() if key not in free}
    return kept


def dump_resolved(config: RunConfig) -> str:
    """Return a run as YAML with every effective value, headed by the sizes that follow from them."""
    rollout = config.rollout
    completions = rollout.prompts_per_step * rollout.group_size
    sizes = f"{rollout.prompts_per_step} prompts x {rollout.group_size} = {completions} completions a step"
    head = f"# {sizes}, at most {completions * rollout.max_tokens} completion tokens\n"
    return head + to_yaml(resolved(config))


def resolved(config: RunConfig) -> dict[str, Any]:
    """Return every effective value."""
    return config.model_dump(mode="json") | {"folder": str(config.folder.resolve())}
