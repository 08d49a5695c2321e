"""Turns the prompts and completions of a training request into the token ids that are trained.

    encode_group     the prompt that the completions of a group share, and each completion
    encode_example   a conversation, with a mask of what the assistant says
    template_options what a request tells the chat template besides

Prompts, and completions known only by their text, go through the chat template, once. A completion known by its
rollout or its token ids is taken as it was sampled. Every refusal is a RequestError with the field's JSON path.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from groupwise.errors import ChatError, ContextLengthError, GroupwiseError, RequestError
from groupwise.model import chat
from groupwise.model.chat_length import check_text
from groupwise.model.image_tokens import is_of_image
from groupwise.model.supervised import encode_supervised
from groupwise.server.images import seeing
from groupwise.server.schema_openai import TemplateOptions
from groupwise.server.schema_train import ScoredCompletion, ScoredGroup, SftExample
from groupwise.store import job_payload
from groupwise.store.ledger import RolloutRecord
from groupwise.tasks.dialects.chat_form import Tool, as_messages
from groupwise.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.server.reader import TextModel

Ids = tuple[int, ...]

ROUNDING = 1e-4  # nats that a log-probability may be above 0


def template_options(
    options: TemplateOptions | None, tokenizer: PreTrainedTokenizerBase, at: str = "chat_template_kwargs"
) -> dict[str, Any]:
    """Return the chat template's variables in addition to the messages. Raises RequestError for one that it does not
    read."""
    given = {} if options is None else options.model_dump(exclude_none=True)
    for name, value in given.items():
        where = f"{at}.{name}"
        if name in tokenizer.special_tokens_map:
            message = f"{where} is one of the tokenizer's special tokens; a request cannot set it"
            raise RequestError(message, hint="leave it out", field=where)
        if chat.changes_nothing(name, value, tokenizer):
            message = f"{where} changes nothing: this model's chat template does not read {name!r}"
            raise RequestError(message, hint="leave it out, or look its name up in that template", field=where)
    return given


def encode_group(
    group: ScoredGroup, at: str, records: Mapping[str, RolloutRecord], base: TextModel
) -> job_payload.EncodedGroup:
    """Return the prompt that all completions of a group share, and the completions, as they are trained."""
    texts = _Texts(group, at, base)
    shared, source = (None, "") if texts.prompt is None else (texts.prompt.token_ids, f"{at}.messages")
    completions = []
    for j, completion in enumerate(group.completions):
        where = f"{at}.completions[{j}]"
        own, sampled = _encode_completion(completion, where, texts, records, base)
        if shared is None:
            shared, source = own, where
        elif own is not None and own != shared:
            raise RequestError(
                f"{where} was sampled for another prompt than {source} says",
                hint="put the completions of each prompt into a group of their own; with rollout_id, messages can be "
                "left out",
                field=where,
            )
        _check_length(len(shared or ()), len(sampled.ids), where, base)
        completions.append(sampled)
    return job_payload.EncodedGroup(prompt_ids=shared or (), completions=tuple(completions))


def encode_example(example: SftExample, at: str, base: TextModel) -> job_payload.EncodedExample:
    """Return a conversation, with a mask of what is trained."""
    try:
        sample = encode_supervised(
            as_messages(example.messages),
            base.tokenizer,
            tools=_dicts(example.tools) or None,
            template_kwargs=template_options(
                example.chat_template_kwargs, base.tokenizer, f"{at}.chat_template_kwargs"
            ),
            context=base.context_length,
        )
    except (ChatError, ContextLengthError) as error:
        raise at_field(error, f"{at}.messages") from error
    except ValueError as error:  # nothing stands before the assistant's first word
        message = f"{at}.messages begins with what is to be trained, and nothing predicts its first token"
        raise RequestError(message, hint="begin with a user message", field=f"{at}.messages") from error
    _check_length(len(sample.prompt_ids), len(sample.completion_ids), at, base)
    return job_payload.EncodedExample(
        prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids, mask=sample.mask
    )


class _Texts:
    """Holds a group's prompt, if it has messages, and the completions that are posted as text."""

    def __init__(self, group: ScoredGroup, at: str, base: TextModel):
        self._options = template_options(group.chat_template_kwargs, base.tokenizer, f"{at}.chat_template_kwargs")
        self._base = base
        self.prompt = None if group.messages is None else self._prompt(group, at)

    def _prompt(self, group: ScoredGroup, at: str) -> Prompt:
        tokenizer, context = self._base.tokenizer, self._base.context_length
        try:
            asked = as_messages(group.messages or ())
            prompt = Prompt(id=at, messages=asked, tools=tuple(_dicts(group.tools)))
            with seeing(asked, tokenizer, f"{at}.messages"):
                return chat.encode_prompt(prompt, tokenizer, template_kwargs=self._options, context=context)
        except (ChatError, ContextLengthError) as error:
            raise at_field(error, f"{at}.messages") from error

    @cached_property
    def _encoder(self) -> chat.CompletionEncoder:
        assert self.prompt is not None  # _check_completion
        return chat.CompletionEncoder(self.prompt, self._base.tokenizer, template_kwargs=self._options)

    def encode(self, text: str, at: str) -> Ids:
        """Return the ids of a completion."""
        try:
            check_text(text, self._base.tokenizer, self._base.context_length)
        except ContextLengthError as error:
            raise at_field(error, f"{at}.text") from error
        return self._encoder.encode(text)


def _encode_completion(
    completion: ScoredCompletion,
    at: str,
    texts: _Texts,
    records: Mapping[str, RolloutRecord],
    base: TextModel,
) -> tuple[Ids | None, job_payload.EncodedCompletion]:
    """Return the prompt's ids as this completion knows them, if it does, and the completion."""
    if completion.rollout_id is not None:
        record = records[completion.rollout_id]
        known = base.has(record.prompt_ids) and max(record.completion_ids, default=0) < base.vocabulary
        if not (known and _routes(record, base)):
            message = f"{at} was sampled from another model than {base.name}"
            raise RequestError(message, hint="sample it again", field=f"{at}.rollout_id")
        return record.prompt_ids, _taught(_sampled(record, completion.reward), completion, at)
    if completion.token_ids is not None:
        ids = _checked_ids(completion.token_ids, f"{at}.token_ids", base)
        logprobs = _checked_logprobs(completion.logprobs, len(ids), f"{at}.logprobs")
        own = completion.prompt_token_ids
        prompt_ids = None if own is None else _checked_prompt(own, f"{at}.prompt_token_ids", base)
        return prompt_ids, _taught(_scored(ids, logprobs, completion.reward), completion, at)
    if completion.teacher_logprobs is not None:
        raise RequestError(
            f"{at}.teacher_logprobs are of tokens, and {at} is a text",
            hint="give token_ids and logprobs, or a rollout_id",
            field=f"{at}.teacher_logprobs",
        )
    assert completion.text is not None  # _check_completion
    return None, _scored(texts.encode(completion.text, at), None, completion.reward)


def _routes(record: RolloutRecord, base: TextModel) -> bool:
    """Return whether the experts that are recorded, if any are, can be those of this model."""
    return record.routed_experts is None or (base.routing is not None and base.routing.has(record.routed_experts))


def _sampled(record: RolloutRecord, reward: float) -> job_payload.EncodedCompletion:
    kept, routed = record.kept, record.routed_experts
    return job_payload.EncodedCompletion(
        ids=record.completion_ids,
        logprobs=record.logprobs if kept is None else record.kept_logprobs,
        reward=reward,
        kept=None if kept is None else b64encode(kept.to_bytes()),
        routed_experts=None if routed is None else b64encode(routed.to_bytes()),
    )


def _scored(ids: Ids, logprobs: tuple[float, ...] | None, reward: float) -> job_payload.EncodedCompletion:
    return job_payload.EncodedCompletion(ids=ids, logprobs=logprobs, reward=reward)


def _taught(
    encoded: job_payload.EncodedCompletion, completion: ScoredCompletion, at: str
) -> job_payload.EncodedCompletion:
    """Return the completion with the log-probabilities of a teacher that came with it, if any did."""
    field = f"{at}.teacher_logprobs"
    teacher = _checked_logprobs(completion.teacher_logprobs, len(encoded.ids), field)
    if teacher is None:
        return encoded
    if encoded.logprobs is None:
        hint = "give logprobs, those of what sampled the tokens, too"
        raise RequestError(f"{field} are compared with the sampler's, and {at} has none", hint=hint, field=field)
    if encoded.kept is not None:
        message = f"{field} are of the whole vocabulary, and {at} was drawn from a part of it"
        raise RequestError(message, hint="sample with top_p 1, top_k 0, min_p 0 and no grammar", field=field)
    return encoded.model_copy(update={"teacher_logprobs": teacher})


def _checked_ids(ids: Sequence[int], at: str, base: TextModel, *, images: bool = False) -> Ids:
    if not ids:
        raise RequestError(f"{at} is empty", hint="give at least one token", field=at)
    for t, token in enumerate(ids):
        if not (0 <= token < base.vocabulary or (images and is_of_image(token))):
            raise RequestError(
                f"{at}[{t}] is {token}; the vocabulary of {base.name} is 0 to {base.vocabulary - 1}",
                hint="post the token_ids that this server sampled; other tokenizers have other ids",
                field=f"{at}[{t}]",
            )
    return tuple(ids)


def _checked_prompt(ids: Sequence[int], at: str, base: TextModel) -> Ids:
    _checked_ids(ids, at, base, images=True)
    if not base.has(ids):
        message = f"{at} has token ids of images that this server does not have, or parts of some"
        raise RequestError(message, hint="post the ids as this server gave them", field=at)
    return tuple(ids)


def _checked_logprobs(logprobs: Sequence[float] | None, length: int, at: str) -> tuple[float, ...] | None:
    if logprobs is None:
        return None
    if len(logprobs) != length:
        message = f"{at} has {len(logprobs)} entries for {length} token_ids"
        raise RequestError(message, hint="give one for each token, or leave logprobs out", field=at)
    for t, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob > ROUNDING:
            raise RequestError(
                f"{at}[{t}] is {logprob}; a log-probability is a finite number that is not above 0",
                hint="give natural logarithms, as this server reports them, or leave logprobs out",
                field=f"{at}[{t}]",
            )
    return tuple(min(0.0, logprob) for logprob in logprobs)


def _check_length(prompt: int, completion: int, at: str, base: TextModel) -> None:
    if prompt + completion > base.context_length:
        raise RequestError(
            f"{at} is too long: the prompt has {prompt} tokens and what follows it {completion}; "
            f"the maximum context length is {base.context_length} tokens",
            hint="leave it out or shorten it",
            field=at,
            code="context_length_exceeded",
        )


def _dicts(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    return [tool.as_dict() for tool in tools or ()]


def at_field(error: GroupwiseError, field: str) -> RequestError:
    """Return an error of the parts below as one of this field."""
    return RequestError(f"{field}: {error.message}", hint=error.hint, field=field, kind=error.kind, code=error.code)
