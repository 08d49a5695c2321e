"""The configuration of a teacher: `teacher`, a policy whose log-probabilities a run is trained on besides rewards, or
instead of them. Equations: `algo/distillation.py`; explained in docs/distillation.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from groupwise.config.section import Section, Text, conflict
from groupwise.types import NARROWING

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig

BEST_COMPLETION = "best_completion"  # a `context` that is no column
TEMPLATE = (
    "{prompt}\n\nThis is known about the right answer:\n\n{context}\n\nNow answer the question above in your own words."
)
_DIVERGENCES = Literal["reverse", "forward", "jsd"]


class TeacherConfig(Section):
    """A teacher, whose log-probabilities of what the policy sampled train it (on-policy distillation), or whose own
    completions do (`loss: sft`). Name one: `model`, `adapter`, `self` or `base_url`.

    With `self` and `loss: sft` the policy learns the best of what it samples itself (rejection sampling)."""

    model: Text | None = None
    """A model with the policy's tokenizer, as the run's `model`; with `base_url` the model's name there."""
    adapter: Text | None = None
    """An adapter of the run's model, as `adapters.start` names it."""
    self: bool = False
    """The policy itself, as it was when it sampled, with `context` added to its prompt; with sft without a context:
    completions are chosen from the group."""
    base_url: Text | None = None
    """A server with POST /completions and `prompt_logprobs` (vLLM, `groupwise serve`), such as http://host:8000/v1."""
    api_key_env: Text | None = "OPENAI_API_KEY"
    """The environment variable with the key for `base_url`; null sends none."""
    loss: Literal["opd", "sdpo", "sft"] = "opd"
    """opd: on-policy distillation from another policy; sdpo: self-distillation, from the policy with `context`; sft:
    the teacher samples completions, and the policy learns them by cross-entropy."""
    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of the teacher's term."""
    reward_weight: float = Field(default=1.0, ge=0, le=1e6)
    """The weight of the rewards' advantages; 0 trains only from the teacher, and rewards are only measured."""
    top_k: int = Field(default=0, ge=0, le=1024)
    """0: the reverse KL at the sampled tokens, as an advantage of each token. K: the divergence over the teacher's K
    likeliest tokens and all others as one, as a term of the loss."""
    divergence: _DIVERGENCES = "reverse"
    """With top_k: reverse, KL(policy || teacher); forward, KL(teacher || policy); jsd, Jensen-Shannon."""
    context: Text | None = None
    """Further content of the teacher's prompt: the text of this column; or `best_completion`, the group's best
    completion if it is better than the scored one. Rows without it have no teacher."""
    template: Text = TEMPLATE
    """The last user message of the teacher's prompt, with {prompt} (the policy's) and {context}."""
    completions: int | None = Field(default=None, ge=1, le=4096)
    """With sft and rewards, the number of the teacher's completions of each prompt; null is `rollout.group_size`."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """With sft, the temperature of the teacher; null is `rollout.temperature`."""
    least_reward: float | None = None
    """With sft, the least reward of the teacher's completions that are learned; null learns all."""
    best: int | None = Field(default=None, ge=1, le=4096)
    """With sft, the most completions of each prompt that are learned, those with the highest rewards, equal ones once;
    null learns all. Without `least_reward` no completion of a group of equal rewards is best."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type of `model`'s weights; auto as the run's."""
    concurrency: int = Field(default=8, ge=1, le=1024)
    """Requests to `base_url` at once."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one of them may take."""

    @field_validator("template")
    @classmethod
    def _has_places(cls, template: str) -> str:
        for place in ("{prompt}", "{context}"):
            if template.count(place) != 1:
                raise ValueError(f"{template!r} is not valid; it must have {place} once")
        return template

    @property
    def chooses(self) -> bool:
        """Return whether it samples and scores nothing, but chooses from what the policy samples."""
        return self.self and self.loss == "sft"

    @property
    def sources(self) -> list[str]:
        """Return which of the four are named."""
        given = {"adapter": self.adapter is not None, "self": self.self, "base_url": self.base_url is not None}
        named = [name for name, there in given.items() if there]
        return ["model", *named] if self.model is not None and self.base_url is None else named

    @model_validator(mode="after")
    def _fits_together(self) -> TeacherConfig:
        sources = self.sources
        if len(sources) != 1:
            none = "there is none of model, adapter, self and base_url"
            there = f"there are {' and '.join(sources)}" if sources else none
            raise conflict(sources[1] if sources else "model", f"{there}; name one teacher")
        if self.base_url is not None and self.model is None:
            raise conflict("model", "required with base_url: the model's name there")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise conflict("base_url", f"{self.base_url!r} must be a URL, such as http://127.0.0.1:8000/v1")
        if self.chooses:
            for key, ours in (("context", None), ("completions", "group_size"), ("temperature", "temperature")):
                if (value := getattr(self, key)) is not None:
                    instead = "leave it out" if ours is None else f"set rollout.{ours}"
                    message = f"{value!r} is of another sampling, and with self the group is chosen from"
                    raise conflict(key, f"{message}; {instead}")
            if self.least_reward is None and self.best is None:
                message = "required with self and sft: all that the policy samples would teach it nothing"
                raise conflict("least_reward", f"{message}; set it, or best")
        elif self.self and self.context is None:
            message = "required with self: with the same prompt the policy would be its own teacher and learn nothing"
            raise conflict("context", f"{message}; name a column with a hint, feedback or a solution")
        if self.loss == "sft" and self.base_url is not None:
            message = "does not go with loss sft, whose completions are sampled in this process"
            raise conflict("base_url", f"{message}; name model or adapter, or another loss")
        if self.loss == "sft" and self.context == BEST_COMPLETION:
            raise conflict("context", f"{BEST_COMPLETION} is of the policy's completions; with loss sft name a column")
        if self.loss != "sft" and (self.loss == "sdpo") != self.self:
            message = "sdpo is distillation from the policy itself" if self.loss == "sdpo" else "opd is from another"
            raise conflict("loss", f"{message}; set {'self: true' if self.loss == 'sdpo' else 'loss: sdpo'}")
        for key, acts, with_what in (
            ("top_k", self.loss != "sft", "loss opd or sdpo"),
            ("completions", self.loss == "sft", "loss sft"),
            ("temperature", self.loss == "sft", "loss sft"),
            ("least_reward", self.loss == "sft", "loss sft"),
            ("best", self.loss == "sft", "loss sft"),
            ("divergence", self.top_k > 0, "top_k"),
            ("template", self.context is not None, "context"),
            ("dtype", sources == ["model"], "model, when it is loaded in this process"),
            ("api_key_env", sources == ["base_url"], "base_url"),
            ("concurrency", sources == ["base_url"], "base_url"),
            ("timeout_s", sources == ["base_url"], "base_url"),
        ):
            if not acts and (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise conflict(key, f"{value!r} acts with {with_what} only")
        return self


def check_teacher(config: RunConfig, teacher: TeacherConfig) -> None:
    """Refuse what cannot go with a teacher."""
    rollout, scored = config.rollout, bool(config.rewards) or config.env is not None
    if teacher.loss == "sft":
        _check_demonstrations(config, teacher)
    narrowed = [key for key, off in NARROWING.items() if getattr(rollout, key) != off]
    narrowed += ["structured_outputs"] if rollout.grammar is not None else []
    narrowed += ["thinking_budget"] if rollout.thinking_budget is not None else []
    if narrowed and teacher.loss != "sft":
        message = "draws from a part of the vocabulary, and a teacher's log-probabilities are of all of it"
        raise conflict("rollout", narrowed[0], f"{message}; leave it out, or the teacher")
    if teacher.base_url is not None and rollout.temperature != 1:
        message = f"{rollout.temperature:g} does not go with teacher.base_url, which tells log-probabilities at 1"
        raise conflict("rollout", "temperature", f"{message}; set 1")
    if teacher.top_k and rollout.replay.size:
        message = "does not go with rollout.replay: of each token of a kept group so many numbers would be kept"
        raise conflict("teacher", "top_k", f"{teacher.top_k} {message}; set top_k 0, or replay.size 0")
    if teacher.context is not None and config.env is not None:
        message = "puts a text into the prompt of a single turn, and an environment asks in several"
        raise conflict("teacher", "context", f"{message}; leave context out, or env")
    if teacher.context == BEST_COMPLETION and not scored:
        raise conflict("teacher", "context", f"{BEST_COMPLETION} is told by rewards, and there are none")
    if teacher.reward_weight != 1 and not scored:
        raise conflict("teacher", "reward_weight", f"{teacher.reward_weight:g} acts with rewards, and there are none")
    if config.eval is not None and not scored and not config.eval.rewards:
        raise conflict("eval", "evaluation is by rewards, and there are none; name some (eval.rewards)")
    if config.train.lora is None and (teacher.adapter is not None):
        message = "is of the run's model, whose own weights are trained (train.lora: null)"
        raise conflict("teacher", "adapter", f"{message}; export it as a model (teacher.model), or train an adapter")
    if teacher.self and not teacher.chooses and config.engine != "local":
        raise conflict(
            "teacher", "self", f"is scored by the engine that samples; set engine: local, not {config.engine}"
        )
    if teacher.self and not teacher.chooses and rollout.in_flight_updates:
        message = "has no one version that sampled a completion, with in_flight_updates; leave one of the two out"
        raise conflict("teacher", "self", message)
    if config.algo.credit != "episode" and not scored:
        raise conflict("algo", "credit", f"{config.algo.credit!r} is of rewards, and there are none")


def _check_demonstrations(config: RunConfig, teacher: TeacherConfig) -> None:
    """Refuse what cannot go with a teacher's completions."""
    if config.env is not None and not teacher.chooses:
        message = "sft has the teacher answer a prompt in one turn, and an environment is played in several"
        raise conflict("teacher", "loss", f"{message}; use opd, or leave env out")
    for key, given in (("stream_groups", config.rollout.stream_groups), ("replay", config.rollout.replay.size)):
        if given:
            raise conflict("rollout", key, "does not go with teacher.loss sft; leave one of the two out")
    for key, value in (("least_reward", teacher.least_reward), ("best", teacher.best)):
        if value is not None and not config.rewards and config.env is None:
            raise conflict("teacher", key, f"{value:g} is of rewards, and there are none; name some")
    if not config.learns_no_rewards:
        return
    if teacher.completions is not None:
        message = f"{teacher.completions} acts beside rewards; where the teacher samples all, set"
        raise conflict("teacher", "completions", f"{message} rollout.group_size")
    if config.algo.kl is not None:
        message = f"{config.algo.kl!r} is a term beside rewards, and here they have no gradient"
        raise conflict("algo", "kl", f"{message}; leave it out")
