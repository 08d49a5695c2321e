"""The policy in the shape of a transformers model, whose `generate` and `chat` are recorded for training.

    out = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=64)     ids [rows, prompt + new]
    text = model.chat([{"role": "user", "content": "Which hotel?"}])

Every call is sampled by the engine, in one batch with all other episodes, at the policy version of the episode, and is
a turn: ids that go on from an earlier turn's are trained in one segment with it, others begin a segment (`segments`).

What is not said is the run's own: temperature, top_p, top_k, min_p, stop strings, `rollout.max_tokens`. A turn with
another top_p, top_k or min_p is trained under what these left, which the local engine records. One that is sampled at
another temperature, or greedily (`do_sample=False`), or narrowed by an engine that does not record it, is answered as
asked and not trained: the loss compares probabilities at the run's temperature, and what is drawn from another
distribution would bias it. Saying the run's own values changes nothing; in a greedy evaluation such calls are greedy
too.

Stopping criteria are applied to what was sampled, which is cut where they would have stopped it. What the engine cannot
do (beams, penalties, logits processors, scores) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from groupwise.bridges.aitraining.generate_options import GenerateOptions, generate_options_of
from groupwise.config.run import EnvConfig
from groupwise.errors import AdapterNotFoundError, EnvError
from groupwise.model.chat import decode, encode_bridge, encode_prompt
from groupwise.sampler import Submits
from groupwise.seeds import seed_of
from groupwise.tasks.blocking_policy import BlockingPolicy
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    SamplingParams,
    SamplingRequest,
    Turn,
    conversation_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.load import LoadedModel

OFFERED = "generate, chat, device, dtype, config, generation_config, name_or_path, eval, train, to, parameters"


class LimitReached(EnvError):
    """The policy may say no more in this episode; `stop` is which limit it was."""

    def __init__(self, message: str, *, stop: str):
        super().__init__(message)
        self.stop = stop


class PolicyClosedError(EnvError):
    """The episode is over: a caller that still samples was given up before."""


def _over() -> PolicyClosedError:
    return PolicyClosedError("the episode is over; the policy answers no more")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The engine, model and options that the policies of all episodes share."""

    sampler: Submits
    base: LoadedModel
    tokenizer: PreTrainedTokenizerBase
    config: EnvConfig
    run: SamplingParams  # as the run samples
    note: Callable[[str], None]
    model_config: Any = field(init=False)
    generation_config: Any = field(init=False)

    def __post_init__(self) -> None:  # copies: code that sets use_cache or pad_token_id must not set the model's
        object.__setattr__(self, "model_config", deepcopy(self.base.model.config))
        object.__setattr__(self, "generation_config", deepcopy(self.base.model.generation_config))


class RecordingPolicy:
    """Plays one episode's policy for code that calls `generate`, and records every prompt and its completion in
    `turns`. The first turn is given, not sampled.

    Args:
        asked: the episode's prompt, with its ids.
        first: the completion of this prompt.
        params: how the mode samples (greedy in a greedy evaluation).
        seed: the group's seed.
        number: the episode's number in the group.
    """

    def __init__(
        self,
        origin: Origin,
        asked: Prompt,
        first: Completion,
        *,
        params: SamplingParams,
        version: PolicyVersion,
        seed: int,
        number: int,
    ):
        self._origin, self._params, self._version = origin, params, version
        self._seed, self._number = seed, number
        self._asking = BlockingPolicy(origin.sampler)
        self._lock = self._asking.lock
        self._calls = 0
        self._lines: list[list[Turn]] = [[Turn(asked.token_ids, first)]]
        self._said: list[tuple[list[Message], tuple[dict[str, Any], ...], Turn]] = []
        self._tools = asked.tools
        if asked.messages is not None:
            reply: Message = {"role": "assistant", "content": first.text}
            self._said.append(([*asked.messages, reply], asked.tools, self._lines[0][0]))
        self.limit: str | None = None  # the limit that was reached
        self.failure: Exception | None = None  # of the engine: the environment is not to blame

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *, attention_mask: Any = None, **options: Any
    ) -> Any:
        """Generate as transformers' `generate` does: ids [rows, prompt] -> ids [rows, prompt + new], padded on the
        right.

        Raises EnvError for what the engine cannot do and for ids that are not a prompt, LimitReached, and what the
        engine raises.
        """
        ids = options.pop("input_ids", None) if inputs is None else inputs
        if isinstance(ids, Mapping):  # the tokenizer's whole answer
            attention_mask = ids.get("attention_mask") if attention_mask is None else attention_mask
            ids = ids["input_ids"]
        ids_BT = _matrix(ids)
        tokenizer: Any = self._origin.tokenizer
        pad = tokenizer.pad_token_id if options.get("pad_token_id") is None else options["pad_token_id"]
        prompts = _unpadded(ids_BT, attention_mask, pad=pad, eos=tokenizer.eos_token_id)
        asked = generate_options_of(generation_config, options, given=self._params, run=self._origin.run)
        answers = self._ask(prompts, asked)
        prompts = [prompt for prompt in prompts for _ in range(asked.n)]
        said = [completion for each in answers for completion in each]
        rows = [self._cut(prompt, completion, asked) for prompt, completion in zip(prompts, said, strict=True)]
        self._record(prompts, rows, asked)
        longest = max(len(row.token_ids) for row in rows)
        import torch  # here and below: this module is imported to read a configuration, which is not to wait for torch

        new_BT = torch.full((len(rows), longest), pad or 0, dtype=torch.long)
        for line, row in zip(new_BT, rows, strict=True):
            line[: len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.long)
        before_BT = ids_BT.repeat_interleave(asked.n, dim=0)
        sequences = torch.cat([before_BT, new_BT.to(before_BT.device)], dim=1)
        return _as_output(sequences) if asked.as_output else sequences

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> str:
        """Return the answer to `messages`, as text. `tools` are the environment's own if none are given; [] is without.

        Where the messages go on from an answer of before, its ids are kept and only what is new is encoded. Options are
        those of `generate`. Raises as it does, and ChatError for messages that the template refuses.
        """
        asked = generate_options_of(
            None, options | {"max_new_tokens": max_new_tokens}, given=self._params, run=self._origin.run
        )
        if asked.n != 1:
            raise EnvError(f"chat was asked for {asked.n} answers; it gives one")
        listed: list[Message] = [dict(message) for message in messages]  # type: ignore[misc]
        chosen = self._tools if tools is None else tuple(dict(tool) for tool in tools)
        prompt_ids = self._encode(listed, chosen)
        (completions,) = self._ask([prompt_ids], asked)
        completion = self._cut(prompt_ids, completions[0], asked)
        (turn,) = self._record([prompt_ids], [completion], asked)
        with self._lock:
            self._said.append(([*listed, {"role": "assistant", "content": completion.text}], chosen, turn))
        return completion.text

    # -- what the episode is afterwards --------------------------------------------------------------------------------

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return each conversation's turns in order; the conversation of the first turn comes first."""
        with self._lock:
            return tuple(turn for line in self._lines for turn in line)

    @property
    def forks(self) -> int:
        """Turns that did not continue from an earlier one."""
        with self._lock:
            return len(self._lines) - 1

    @property
    def asking(self) -> bool:
        """Return whether an answer is waited for."""
        return self._asking.waiting

    def close(self) -> None:
        """Stop answering and recording, and give up requests under way."""
        self._asking.close()

    # -- what model code looks at --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._origin.base.device

    @property
    def dtype(self) -> torch.dtype:
        return self._origin.base.model.dtype

    @property
    def config(self) -> Any:
        return self._origin.model_config

    @property
    def generation_config(self) -> Any:
        return self._origin.generation_config

    @property
    def name_or_path(self) -> str:
        return self._origin.base.name

    @property
    def training(self) -> bool:
        return False

    def eval(self) -> RecordingPolicy:
        """Do nothing: dropout is off."""
        return self

    def train(self, mode: bool = True) -> RecordingPolicy:
        """Do nothing: dropout stays off."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> RecordingPolicy:
        """Do nothing: the model stays on its device."""
        return self

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield one empty tensor, with the weights' device and type; the weights are the trainer's."""
        import torch

        yield torch.empty(0, device=self.device, dtype=self.dtype)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the policy that score_episode gets has no {name!r}; it has {OFFERED}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise EnvError(f"the policy cannot be called for its logits; it has {OFFERED}")

    # -- sampling ------------------------------------------------------------------------------------------------------

    def _ask(self, prompts: Sequence[tuple[int, ...]], asked: GenerateOptions) -> list[list[Completion]]:
        """Sample all rows together and wait. Raises LimitReached, PolicyClosedError, and what the engine raises."""
        with self._lock:
            self._check_open()
            first, self._calls = self._calls, self._calls + len(prompts)
        requests = [
            self._request(prompt, asked, seed=seed_of(self._seed, self._number, first + number + 1))
            for number, prompt in enumerate(prompts)
        ]
        with self._lock:
            self._check_open()
            try:
                futures = self._asking.submit(requests)
            except AdapterNotFoundError as error:
                self.failure = error
                raise
        try:
            return self._asking.wait(futures)
        except CancelledError:
            raise _over() from None
        except Exception as error:
            self.failure = error
            raise

    def _request(self, prompt_ids: tuple[int, ...], asked: GenerateOptions, *, seed: int) -> SamplingRequest:
        context = self._origin.sampler.context_length
        if not prompt_ids:
            raise EnvError("the policy was asked with no token ids", hint="give a prompt of at least one token")
        room = context - len(prompt_ids)
        if room <= 0:
            raise self._stopped("context", f"the prompt has {len(prompt_ids)} tokens; the model's context is {context}")
        most = asked.max_length - len(prompt_ids) if asked.max_length is not None else asked.params.max_tokens
        if most < 1:
            raise EnvError(f"max_length is {asked.max_length}, and the prompt has {len(prompt_ids)} tokens already")
        most = min(most, room, self._left(asked))
        return SamplingRequest(
            prompt_ids=prompt_ids,
            params=replace(asked.params, max_tokens=most, seed=seed),
            n=asked.n,
            version=self._version,
            cache=True,
            conversation=conversation_of(self._seed, self._number),
        )

    def _left(self, asked: GenerateOptions) -> int:
        """Return tokens that the policy may still say in this episode."""
        config, turns = self._origin.config, self.turns
        if len(turns) + asked.n > config.max_turns:
            raise self._stopped("max_turns", f"the episode has had env.max_turns = {config.max_turns} turns")
        if config.max_tokens is None:
            return asked.params.max_tokens if asked.max_length is None else asked.max_length
        left = config.max_tokens - sum(len(turn.completion.token_ids) for turn in turns)
        if left <= 0:
            raise self._stopped("max_tokens", f"the policy has said env.max_tokens = {config.max_tokens} tokens")
        return left

    def _stopped(self, stop: str, message: str) -> LimitReached:
        self.limit = stop
        return LimitReached(message, stop=stop)

    def _check_open(self) -> None:
        if self._asking.closed:
            raise _over()

    # -- recording -----------------------------------------------------------------------------------------------------

    def _record(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[Completion], asked: GenerateOptions
    ) -> list[Turn]:
        if not all(asked.trains(said) for said in completions):
            self._origin.note(f"what is generated with {asked.otherwise} is not trained: the run samples otherwise")
        every = self._origin.config.train_turns == "all"
        turns = [
            Turn(prompt, said, trained=every and asked.trains(said))
            for prompt, said in zip(prompts, completions, strict=True)
        ]
        with self._lock:
            self._check_open()
            for turn in turns:
                self._line_of(turn.prompt_ids).append(turn)
        if any(said.finish_reason is FinishReason.ABORT for said in completions):
            raise EnvError("the completion was aborted")
        return turns

    def _line_of(self, prompt_ids: tuple[int, ...]) -> list[Turn]:
        """Return the conversation that the prompt continues from: that with the most in common; else a new one."""
        best, most = None, 0
        for line in self._lines:
            seen = line[-1].prompt_ids + line[-1].completion.token_ids
            if most < len(seen) and prompt_ids[: len(seen)] == seen:
                best, most = line, len(seen)
        if best is None:
            best = []
            self._lines.append(best)
        return best

    def _encode(self, messages: list[Message], tools: tuple[dict[str, Any], ...]) -> tuple[int, ...]:
        """Return the prompt's ids: the ids of the longest conversation that the prompt continues, and a bridge. Without
        such a conversation, encode the whole prompt."""
        tokenizer = self._origin.tokenizer
        with self._lock:
            said = sorted(self._said, key=lambda each: -len(each[0]))
        for before, with_tools, turn in said:
            ended = turn.completion.token_ids[-1:] and turn.completion.token_ids[-1] in self._origin.base.eos_ids
            new = messages[len(before) :]
            if ended and new and with_tools == tools and messages[: len(before)] == before:
                bridge = encode_bridge(before, new, tokenizer, tools=tools)
                if bridge is not None:
                    return turn.prompt_ids + turn.completion.token_ids + bridge
        return encode_prompt(Prompt(id="chat", messages=tuple(messages), tools=tools), tokenizer).token_ids

    def _cut(self, prompt_ids: tuple[int, ...], completion: Completion, asked: GenerateOptions) -> Completion:
        """Return the completion up to where the stopping criteria would have ended it."""
        if not asked.criteria:
            return completion
        import torch

        for count in range(1, len(completion.token_ids) + 1):
            ids = torch.tensor([[*prompt_ids, *completion.token_ids[:count]]], device=self.device)
            if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in asked.criteria):
                return completion.first(count, text=decode(completion.token_ids[:count], self._origin.tokenizer))
        return completion


def _matrix(ids: Any) -> Tensor:
    """Return token ids [rows, tokens]. Raises EnvError."""
    import torch

    try:
        ids_BT = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        ids_BT = None
    if ids_BT is None or ids_BT.ndim != 2 or not ids_BT.numel() or ids_BT.is_floating_point():
        was = "nothing" if ids is None else type(ids).__name__ if ids_BT is None else f"the shape {tuple(ids_BT.shape)}"
        raise EnvError(
            f"generate was given {was}; input_ids are token ids of the shape [rows, tokens]",
            hint='tokenizer(text, return_tensors="pt") makes them',
        )
    return ids_BT.long()


def _unpadded(ids_BT: Tensor, mask: Any, *, pad: int | None, eos: int | None) -> list[tuple[int, ...]]:
    """Return the rows without padding: what the mask leaves out; without a mask, padding tokens at the beginning."""
    import torch

    if mask is not None:
        kept_BT = torch.as_tensor(mask).to(ids_BT.device).bool()
        if kept_BT.shape != ids_BT.shape:
            raise EnvError(f"attention_mask has the shape {tuple(kept_BT.shape)}; input_ids {tuple(ids_BT.shape)}")
    else:
        padding_BT = torch.zeros_like(ids_BT, dtype=torch.bool) if pad is None or pad == eos else ids_BT == pad
        kept_BT = (~padding_BT).cumsum(dim=1) > 0
    return [tuple(row[kept].tolist()) for row, kept in zip(ids_BT, kept_BT, strict=True)]


def _as_output(sequences: Tensor) -> Any:
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
