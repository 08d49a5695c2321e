"""The `trainer` that a rollout function gets: what such functions read of TRL's GRPOTrainer, and the policy.

    trainer.generate(prompts, max_tokens=32)            ours: a dict a prompt, as `generate_rollout_completions`
    returns
    generate_rollout_completions(trainer, prompts)      of trl.experimental.openenv (TRL 0.29 to 1.8), unchanged
    trainer.vllm_generation.generate(...)               as TRL 1.16
    trainer.vllm_generation.vllm_client.generate, .chat, trainer.vllm_client

All of them go to the engine. There is no `model`: the weights are the learner's, and may be another version's. A name
that is not there raises an AttributeError that lists those that are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from groupwise.errors import EnvError
from groupwise.model.chat import encode_prompt, told_always
from groupwise.tasks.policy_calls import PolicyCalls
from groupwise.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Logprob(float):
    """A log-probability that is also its own first entry: vLLM's client gave one number a token first, lists later."""

    def __getitem__(self, index: int) -> float:
        return (float(self),)[index]

    def __len__(self) -> int:
        return 1


class Offered(SimpleNamespace):
    """Names and values; a name that is not there says which are."""

    def __getattr__(self, name: str) -> Any:
        listed = ", ".join(each for each in dir(self) if not each.startswith("_"))
        raise AttributeError(f"the {type(self).__name__} of a rollout function has no {name!r}; it has {listed}")


class Args(Offered):
    """Stands for `trainer.args`: fields of a GRPOConfig, with the run's values."""


class Accelerator(Offered):
    """Stands for `trainer.accelerator`, of one process."""


class State(Offered):
    """Stands for `trainer.state`."""


class Trainer(Offered):
    """See the head of this file."""

    def __init__(
        self,
        calls: PolicyCalls,
        *,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        num_generations: int,
        step: int,
        device: Any,
        seed: int,
    ):
        self._calls, self._tokenizer = calls, tokenizer
        self.processing_class = tokenizer
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "max_completion_length": params.max_tokens,
            "num_generations": num_generations,
            "num_generations_eval": num_generations,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_tensor_parallel_size": 1,
            "chat_template_kwargs": told_always(tokenizer),
        }
        super().__init__(**sampling)
        self.args = Args(
            **sampling,
            generation_kwargs=None,
            vllm_enable_sleep_mode=False,
            report_to=[],
            seed=seed,
            max_prompt_length=None,
        )
        self.accelerator = Accelerator(
            device=device, is_main_process=True, is_local_main_process=True, process_index=0, num_processes=1
        )
        self.state = State(global_step=step)
        self.tools, self.chat_template = None, None
        self.vllm_client = TrlClient(self)
        self.vllm_generation = TrlGeneration(self)

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        generation_overrides: Mapping[str, Any] | None = None,
        as_chat: bool | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Return one completion of each prompt: a text, a list of messages, or token ids, which are taken as they are.

        Each is {"prompt_ids", "completion_ids", "logprobs", "text"}; the ids end with the end-of-turn token, where it
        was sampled, and the text is without special tokens. Options are `max_tokens`, `stop`, ... (`rollout_calls`).

        Raises EnvError, ChatError and ContextLengthError for what cannot be done.
        """
        asked = {**(generation_overrides or {}), **options}
        if asked.get("n", 1) != 1:
            raise EnvError(
                f"generate was asked for {asked['n']} completions of a prompt; it gives one", hint="repeat it"
            )
        encoded = [self.encode(prompt) for prompt in prompts]
        said = self._calls.sample(encoded, asked)
        return [
            {
                "prompt_ids": list(ids),
                "completion_ids": list(each.token_ids),
                "logprobs": list(each.logprobs),
                "text": self._tokenizer.decode(list(each.token_ids), skip_special_tokens=True),
            }
            for ids, each in zip(encoded, said, strict=True)
        ]

    def encode(
        self, prompt: Any, *, tools: Sequence[dict[str, Any]] | None = None, template_kwargs: Any = None
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises EnvError for what is none, ChatError where the template refuses
        it."""
        if isinstance(prompt, str):
            return encode_prompt(Prompt(id="generate", text=prompt), self._tokenizer).token_ids
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(prompt, Sequence) and prompt and all(isinstance(each, int) for each in prompt):
            return tuple(prompt)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
            messages: Any = tuple(dict(message) for message in prompt)
            asked = Prompt(id="generate", messages=messages, tools=tuple(tools or ()))
            return encode_prompt(asked, self._tokenizer, template_kwargs=template_kwargs).token_ids
        raise EnvError(f"{str(prompt)[:80]!r} is no prompt; it is a text, a list of messages or a list of token ids")

    def answers(self, encoded: Sequence[tuple[int, ...]], options: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return completions in the form of TRL's client of a vLLM server."""
        said: list[Completion] = self._calls.sample(encoded, options)
        return {
            "prompt_ids": [list(ids) for ids in encoded],
            "completion_ids": [list(each.token_ids) for each in said],
            "logprobs": [[Logprob(logprob) for logprob in each.logprobs] for each in said],
            "logprob_token_ids": [[[token] for token in each.token_ids] for each in said],
        }


class TrlClient:
    """Stands for `trainer.vllm_client`, TRL's client of a vLLM server. Options that are not given are the run's."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def generate(self, prompts: Sequence[Any], **options: Any) -> dict[str, list[Any]]:
        """Sample `n` completions of each prompt, a text or token ids."""
        return self._trainer.answers([self._trainer.encode(prompt) for prompt in prompts], options)

    def chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, list[Any]]:
        """Sample `n` completions of each list of messages."""
        if chat_template is not None:
            raise EnvError("chat was given a chat_template; the tokenizer's is used", hint="generate takes a text")
        encode = self._trainer.encode
        encoded = [encode(each, tools=tools, template_kwargs=chat_template_kwargs) for each in messages]
        return self._trainer.answers(encoded, options)


class TrlGeneration:
    """Stands for `trainer.vllm_generation`."""

    structured_outputs_regex = None

    def __init__(self, trainer: Trainer):
        self._trainer, self.vllm_client = trainer, trainer.vllm_client

    def generate(
        self, prompts: Sequence[Any], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Return a completion of each prompt (they repeat `num_generations` times): prompt ids, ids, logprobs and their
        ids, these two [.., token, 1]."""
        if images is not None and any(images):
            raise EnvError("generate was given images; this model reads text only")
        said = self._trainer.answers([self._trainer.encode(prompt) for prompt in prompts], {})
        return said["prompt_ids"], said["completion_ids"], said["logprobs"], said["logprob_token_ids"]

    def sync_weights(self) -> None:
        """Do nothing: the engine has the version that the call needs."""
