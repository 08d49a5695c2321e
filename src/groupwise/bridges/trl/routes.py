"""Routes that trainers call of the vLLM servers they know: TRL's (`trl vllm-serve`, to 1.8) and Axolotl's.

    GET  /health/  /get_world_size/         is it up, and how many ranks are there: one
    POST /generate/  /chat/                 prompts or conversations -> token ids and their log-probabilities
    POST /set_lora_adapter/                 an adapter from a directory answers from now on
    POST /clear_lora_adapter/               the base model does
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     vLLM's own, for more than one adapter at once
    POST /reset_prefix_cache/               nothing to do: no version ever sees what another computed

`groupwise serve --trainer-routes`, so that only who may name directories of this machine has them. An adapter comes as
the next version of its name, whatever was loaded under that name before; it answers once it is verified, and the one
before it goes when no request uses it. Weights themselves, over NCCL or HTTP, are refused: adapters are exchanged as
adapters (`vllm_lora_sync: true` in Axolotl).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Request, Response

from groupwise.bridges.trl.schema import (
    ChatsRequest,
    Done,
    Drawings,
    Drawn,
    GenerateRequest,
    LoraName,
    LoraPath,
    WorldSize,
)
from groupwise.config.serve import ServeConfig
from groupwise.errors import AdapterError, AdapterNotFoundError, ConflictError, RequestError, StorageError
from groupwise.server.bodies import parse_body, read_body
from groupwise.server.completions import encode_raw
from groupwise.server.event_stream import while_connected
from groupwise.server.generate import sendable
from groupwise.server.policies import AdapterInUseError, check_free_name
from groupwise.server.rollouts import encode_conversations
from groupwise.server.sampling import SAMPLING_ERRORS, Admissions
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.store import files
from groupwise.store.files import Provenance
from groupwise.tasks.structured import answer_grammars
from groupwise.types import Completion, Grammar, PolicyVersion

if TYPE_CHECKING:
    from groupwise.model.load import LoadedModel
    from groupwise.sampler import LiveEngine
    from groupwise.server.policies import Policies
    from groupwise.server.reader import Reader, TextModel
    from groupwise.store.adapters import AdapterStore

_LOADING = (AdapterError, AdapterNotFoundError, ConflictError, StorageError)

router = APIRouter(tags=["trainers"])


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """The parts of a server that these routes use."""

    config: ServeConfig
    base: LoadedModel
    engine: LiveEngine
    store: AdapterStore
    policies: Policies
    reader: Reader
    admissions: Admissions


Trainers = Annotated[TrainerParts, given(TrainerParts)]


@router.get("/health/", **documented(answer=Done))
async def health() -> Done:
    """Answer that the server is up."""
    return Done()


@router.get("/get_world_size/", **documented(answer=WorldSize))
async def world_size() -> WorldSize:
    """Answer 1: there is one engine."""
    return WorldSize()


# ---- sampling ----
@router.post("/generate/", **documented(GenerateRequest, Drawings, errors=SAMPLING_ERRORS, codes=["batch_too_large"]))
async def generate(http: Request, parts: Trainers) -> Response:
    """Sample `n` completions of each prompt, by the active policy."""
    body, prompts = await parts.reader.read_json(http, read_generate, context=parts.engine.context_length)
    return await _drawn(http, parts, body, prompts, [body.answer_grammar] * len(prompts))


@router.post("/chat/", **documented(ChatsRequest, Drawings, errors=SAMPLING_ERRORS, codes=["batch_too_large"]))
async def chat(http: Request, parts: Trainers) -> Response:
    """Sample `n` completions of each conversation, by the active policy."""
    body, prompts = await parts.reader.read_json(http, read_chats, context=parts.engine.context_length)
    grammars = answer_grammars(body.answer_grammar, prompts, parts.base.tokenizer)
    return await _drawn(http, parts, body, prompts, grammars)


def read_generate(
    raw: bytes, base: TextModel, config: ServeConfig, *, context: int
) -> tuple[GenerateRequest, list[tuple[int, ...]]]:
    """Return a body of /generate/ and its prompts. Raises RequestError, ContextLengthError."""
    body = parse_body(raw, GenerateRequest, config).whole()
    return body, encode_raw(body.prompts, base, context=context)


def read_chats(
    raw: bytes, base: TextModel, config: ServeConfig, *, context: int
) -> tuple[ChatsRequest, list[tuple[int, ...]]]:
    """Return a body of /chat/ and its prompts. Raises RequestError."""
    body = parse_body(raw, ChatsRequest, config).whole()
    options = {"tools": body.tools, "options": body.chat_template_kwargs, "context": context}
    return body, encode_conversations(body.messages, base.tokenizer, **options, field="messages")


async def _drawn(
    http: Request,
    parts: TrainerParts,
    body: Drawn,
    prompts: Sequence[tuple[int, ...]],
    grammars: Sequence[Grammar | None],
) -> Response:
    most = parts.config.max_batch_completions
    if len(prompts) * (body.n or 1) > most:
        raise RequestError(
            f"{len(prompts)} prompts x n {body.n or 1} are more completions than this server takes at once, {most}",
            hint="send several requests, or raise max_batch_completions",
            code="batch_too_large",
        )
    async with AsyncExitStack() as resources:
        asked = await parts.admissions.admit(
            http,
            body,
            prompts,
            resources=resources,
            kind="draw",
            preview=f"{len(prompts)} prompts of a trainer",
            top_logprobs=body.logprobs or 0,
            interactive=False,
            grammars=grammars,
        )
        groups = await while_connected(http, asked.generation.completions())
        asked.finished(groups, keep=False)  # a trainer's, which knows what it was sent
        completions = [completion for group in groups for completion in group]
        return await asyncio.to_thread(lambda: asked.answer(_drawings(prompts, completions, body)))


def _drawings(prompts: Sequence[tuple[int, ...]], completions: Sequence[Completion], body: Drawn) -> Drawings:
    scored = [[_alternatives(completion, t) for t in range(len(completion.token_ids))] for completion in completions]
    wanted = body.logprobs is not None
    return Drawings(
        prompt_ids=[list(ids) for ids in prompts],
        completion_ids=[list(completion.token_ids) for completion in completions],
        logprobs=[[[sendable(value) for _, value in each] for each in row] for row in scored] if wanted else None,
        logprob_token_ids=[[[token for token, _ in each] for each in row] for row in scored] if wanted else None,
    )


def _alternatives(completion: Completion, t: int) -> list[tuple[int, float]]:
    """Return the sampled token and the likeliest ones with their log-probabilities, likeliest first."""
    others = completion.top_logprobs[t] if completion.top_logprobs else ()
    every = {completion.token_ids[t]: completion.logprobs[t], **dict(others)}
    return sorted(every.items(), key=lambda each: -each[1])


# ---- adapters ----
@router.post("/set_lora_adapter/", **documented(LoraPath, Done, errors=_LOADING))
async def set_adapter(http: Request, parts: Trainers) -> Done:
    """Let the adapter in a directory answer from now on. If it cannot be verified what answered before still does."""
    return await _answering(parts, await read_body(http, LoraPath))


@router.post("/clear_lora_adapter/", **documented(answer=Done, errors=[StorageError]))
async def clear_adapter(parts: Trainers) -> Done:
    """Let the base model answer from now on."""
    await parts.policies.swap(PolicyVersion.base())
    return Done(message="the base model answers")


@router.post("/v1/load_lora_adapter", **documented(LoraPath, Done, errors=_LOADING))
async def load_adapter(http: Request, parts: Trainers) -> Done:
    """Add the adapter in a directory, which requests name as their `model`; `load_inplace`: as /set_lora_adapter/."""
    body = await read_body(http, LoraPath)
    if body.load_inplace:
        return await _answering(parts, body)
    if parts.store.versions(_name_of(parts, body.lora_name)):
        raise ConflictError(
            f"there is an adapter {body.lora_name!r} already", hint="unload it first, or send load_inplace: true"
        )
    version = await asyncio.to_thread(_import, parts, body)
    return Done(message=f"Success: LoRA adapter {version.name!r} added successfully.")


@router.post("/v1/unload_lora_adapter", **documented(LoraName, Done, errors=[AdapterNotFoundError, AdapterInUseError]))
async def unload_adapter(http: Request, parts: Trainers) -> Done:
    """Remove an adapter. Refused while it is active or answers a request."""
    body = await read_body(http, LoraName)
    name = _name_of(parts, body.lora_name)
    versions = parts.store.versions(name)
    if not versions:
        raise AdapterNotFoundError(f"there is no adapter {body.lora_name!r}")
    await parts.policies.delete(versions)
    return Done(message=f"Success: LoRA adapter {name!r} removed successfully.")


async def _answering(parts: TrainerParts, body: LoraPath) -> Done:
    version = await asyncio.to_thread(_import, parts, body)
    await parts.policies.swap(version)
    await _forget(parts, version.name, but=version)
    return Done(message=f"{version} answers")


def _import(parts: TrainerParts, body: LoraPath) -> PolicyVersion:
    """Return the directory's adapter as the next version of its name. Raises AdapterError if it does not fit."""
    name, directory = _name_of(parts, body.lora_name), Path(body.lora_path)
    check_free_name(name, served_name=parts.config.served_name)
    if directory.is_dir():
        parts.policies.verify_files(directory)
    info = Provenance(base_model=parts.base.name, base_hash=parts.base.hash, quantization=parts.base.quantization)
    return parts.store.import_(directory, name, info=info)


def _name_of(parts: TrainerParts, name: str) -> str:
    """Return what an adapter is called here: trainers give the model's name or a path, too."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:60] or "adapter"
    taken = plain == parts.config.served_name or not files.is_name(plain)
    return f"{plain}-lora" if taken else plain


async def _forget(parts: TrainerParts, name: str, *, but: PolicyVersion) -> None:
    """Remove the versions that no request can name any more. A version that still answers is removed by the next
    call."""
    for version in parts.store.versions(name):
        if version != but:
            with suppress(AdapterInUseError, AdapterNotFoundError):
                await parts.policies.delete([version])


@router.post("/reset_prefix_cache/", **documented(answer=Done))
@router.post("/reset_prefix_cache", include_in_schema=False)
async def reset_prefix_cache() -> Done:
    """Keys and values are of one version and gone with it."""
    return Done(message="no version sees what another has computed")


# ---- weights ----
@router.post("/init_communicator/", **documented(answer=Done, errors=[RequestError]))
@router.post("/update_named_param/", include_in_schema=False)
@router.post("/batch_update_named_params/", include_in_schema=False)
@router.post("/http_update_weights/", include_in_schema=False)
async def update_weights(http: Request) -> Done:
    """Refused: adapters are exchanged as adapters."""
    raise RequestError(
        f"{http.url.path} hands over weights; this server takes adapters, from a directory that it can read",
        hint="train an adapter and exchange it as one: vllm_lora_sync: true in Axolotl, POST /set_lora_adapter/",
    )


@router.post("/close_communicator/", **documented(answer=Done))
async def close_communicator() -> Done:
    """There is none."""
    return Done(message="there was no communicator")
