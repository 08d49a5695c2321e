"""Verifies that a vLLM server serves the run's model, by comparing log-probabilities, not by its name.

    tokens     a conversation through its /tokenize is what our tokenizer and chat template make of it
    weights    log-probabilities of what it samples as its own model are the trainer's (another checkpoint, another
               config, a half-updated model, untempered log-probabilities: all of them differ)
    mixing     ... and stay so while requests for adapters are in its batch
    images     of a model that sees: an image has the trainer's tokens, and what follows it the trainer's
               log-probabilities; a server on which that does not hold is given texts alone

For mixing every slot is filled with a probe, an adapter that changes much; all probes sample, and meanwhile the
base does. On CPUs vLLM 0.32 gives rows without an adapter the one in its last slot, and it shows. So the base is always
addressed as an adapter too, one whose B is zero: y = W x + 0; a server on which that does not hold is refused. It also
tells a server that was restarted, which does not know that name any more. Where versions are whole models there are no
adapters to mix, and the name of the weights tells it. What is asked while probes sample fits in
less than a block of vLLM's prefix cache, so that no wrong keys and values stay behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import nn

from groupwise.engine.vllm.client import ServerFacts, ServerLost, VllmServer, sampling_body
from groupwise.engine.vllm.gaps import CANARY, Gaps
from groupwise.engine.vllm.publish import FILES, Published, Shelf
from groupwise.errors import EngineError, FieldError, GroupwiseError
from groupwise.model.adaptable import adapted_modules, is_linear
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel
from groupwise.model.vision import eyes_of, sample_picture
from groupwise.types import Message, PolicyVersion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASKED: tuple[Message, ...] = ({"role": "user", "content": "27 + 15? In {3} wörds."},)

PLAIN = "27 + 15, in wörds, is"  # where there is no chat template

PROBE_TOKENS = (32, 128, 512)  # of each probe, until they outlast the base

SHORT = replace(CANARY, max_tokens=8)

SHORT_PROMPT = 6  # with that less than the 16 tokens of vLLM's smallest block

PROBE, ZERO = PolicyVersion("groupwise-probe", 1), PolicyVersion("groupwise-base", 0)


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Describes a server that passed the handshake. `base` is the model name of requests for the base model; `mixes`:
    requests for the model's own name would get others' adapters; `blind`: the reason why the server gets no images."""

    facts: ServerFacts
    base: str
    mixes: bool
    blind: str | None = None


class Handshake:
    """Checks that a server samples from the run's model, before the run uses it.

    Args:
        base: the trainer's model.
        gaps: compares with its weights.
        shelf: the directory for probe adapters.
        targets: modules that adapters change; the probes change the last of them. None: it serves none.
        slots: adapters that a server holds at once.
    """

    def __init__(
        self,
        base: LoadedModel,
        gaps: Gaps,
        shelf: Shelf,
        *,
        targets: Sequence[str] | None,
        slots: int,
        timeout: float,
    ):
        self._base, self._gaps, self._timeout = base, gaps, timeout
        self._templated = base.tokenizer.chat_template is not None
        asked = Prompt(id="handshake", messages=ASKED) if self._templated else Prompt(id="handshake", text=PLAIN)
        self.prompt = encode_prompt(asked, base.tokenizer).token_ids
        self._looking = asyncio.Lock()  # at the image that is tried, which is forgotten
        self._probes: list[Published] = []
        self.zero: Published | None = None
        if targets is not None:
            self._probes = _lay(base.model, shelf, PROBE, targets, strength=1.0, count=slots)
            self.zero = _lay(base.model, shelf, ZERO, targets, strength=0.0, count=1)[0]

    async def __call__(self, server: VllmServer, version: PolicyVersion) -> Accepted:
        """`version` is what the server's own weights are. Raises ServerLost, EngineError if it is another or a stale
        server."""
        facts = await server.facts()
        await self._check_tokens(server, facts)
        await self._check_weights(server, facts.name, version)
        blind = await self._why_blind(server, facts.name, version)
        if self.zero is None:
            return Accepted(facts=facts, base=facts.name, mixes=False, blind=blind)
        for probe in (*self._probes, self.zero):
            await server.load(probe.name, str(probe.path), timeout=self._timeout)
        try:
            mixes = not await self._holds(server, facts.name, self._probes)
            if not await self._holds(server, self.zero.name, self._probes[1:]):  # it takes a slot itself
                raise EngineError(f"{server.url} mixes up the adapters of requests that are in flight together")
        finally:
            for probe in self._probes:
                await server.unload(probe.name)
        return Accepted(facts=facts, base=self.zero.name, mixes=mixes, blind=blind)

    async def _check_tokens(self, server: VllmServer, facts: ServerFacts) -> None:
        theirs = await server.tokenize(facts.name, ASKED if self._templated else PLAIN)
        if theirs != self.prompt:
            raise EngineError(
                f"{server.url} ({facts.name}) has another tokenizer or chat template than {self._base.name}: a "
                f"question is {list(theirs)[:12]}... there and {list(self.prompt)[:12]}... here",
                hint="serve the model that is trained, as `groupwise vllm-serve` does",
                kind="tokenizer",
            )

    async def _check_weights(self, server: VllmServer, name: str, version: PolicyVersion) -> None:
        off = await self._gaps.too_far(server, name, version, self.prompt)
        if off is not None:
            raise EngineError(
                f"{server.url} ({name}) is not {self._base.name} as it is trained here: its log-probabilities are off "
                f"by {off:.3g} nats in the mean (at most {self._gaps.limit:.3g})",
                hint="serve the same model and dtype, with --logprobs-mode processed_logprobs, as "
                "`groupwise vllm-serve` does; a looser vllm.tolerance accepts more",
                kind="weights",
            )

    async def _why_blind(self, server: VllmServer, name: str, version: PolicyVersion) -> str | None:
        """Return why a server of a model that sees is given no images; None where it is, or the model reads text
        alone. Raises ServerLost."""
        vision = vision_of(self._base.model)
        if vision is None or vision.blind is not None:
            return None
        picture = sample_picture()
        content = [{"type": "image", "image": picture}, {"type": "text", "text": PLAIN}]
        async with self._looking:
            try:
                asked = Prompt(id="handshake", messages=({"role": "user", "content": content},))
                off = await self._gaps.too_far(
                    server, name, version, encode_prompt(asked, self._base.tokenizer).token_ids
                )
            except ServerLost:
                raise
            except GroupwiseError as error:
                return error.message if error.hint is None else f"{error.message} ({error.hint})"
            finally:
                vision.forget(picture)
        if off is None:
            return None
        return (
            f"after an image log-probabilities of {server.url} are off by {off:.3g} nats in the mean (at most "
            f"{self._gaps.limit:.3g}); it may prepare images by torchvision where the trainer has none, or the reverse"
        )

    async def _holds(self, server: VllmServer, name: str, probes: Sequence[Published]) -> bool:
        """Return whether `name` samples as the base while the probes sample too; False if that could not be found
        out."""
        for tokens in PROBE_TOKENS:
            params = replace(CANARY, max_tokens=min(tokens, self._base.context_length // 2))
            body = sampling_body(self.prompt, params, n=1, max_tokens=params.max_tokens, seed=0, eos_ids=())
            probing = [asyncio.create_task(server.complete(probe.name, body)) for probe in probes]
            try:
                await asyncio.sleep(0)  # they are sent first
                short = self.prompt[:SHORT_PROMPT]
                off = await self._gaps.too_far(server, name, PolicyVersion.base(), short, params=SHORT, n=4)
                together = not any(task.done() for task in probing)
            finally:
                await asyncio.gather(*probing, return_exceptions=True)
            if off is not None:
                return False
            if together:
                return True
        return False


def _lay(
    model: PreTrainedModel, shelf: Shelf, version: PolicyVersion, targets: Sequence[str], *, strength: float, count: int
) -> list[Published]:
    """Lay copies of an adapter of rank 1 that changes the last of the modules `targets`, much or (0) not at all."""
    source = shelf.path / f"{version.name}-source"
    source.mkdir()
    name, module = last_linear(model, targets)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, module.in_features, generator=generator) / module.in_features**0.5
    b = strength * torch.randn(module.out_features, 1, generator=generator)
    prefix = f"base_model.model.{name}"
    tensors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    config, weights = FILES
    save_file(tensors, source / weights, metadata={"format": "pt"})
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1.0, "bias": "none"}
    described |= {"target_modules": [name.rpartition(".")[2]], "base_model_name_or_path": None}
    (source / config).write_text(json.dumps(described))
    return [shelf.put(PolicyVersion(version.name, number), Path(source)) for number in range(count)]


def last_linear(model: PreTrainedModel, targets: Iterable[str]) -> tuple[str, nn.Linear]:
    """Return the last linear module of the text decoder whose name ends with one of `targets`. Raises EngineError if
    there is none."""
    eyes = eyes_of(model)
    named = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) and name not in eyes]
    fitting = [each for each in named if each[0].rpartition(".")[2] in set(targets)]
    if not fitting:
        raise EngineError(f"vLLM takes adapters of linear modules; {type(model).__name__} has none among {targets}")
    return fitting[-1]


def linear_names(model: PreTrainedModel, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return the modules that `train.lora.targets` means, by the last part of their names, as vLLM wants them. Raises
    FieldError for experts and routers."""
    modules, names = dict(model.named_modules()), adapted_modules(model, targets)
    if odd := next((name for name in names if name not in modules or not is_linear(modules[name])), None):
        kind = "a router" if odd in modules else "a parameter of experts"
        raise FieldError(
            f"{{field}}: {odd} is {kind}; engine vllm samples with adapters of linear layers only, as vLLM reads the "
            "tensors of experts in other layouts than PEFT writes them",
            hint="set vllm.push=merged or engine=local, or leave experts and routers out of the targets",
            field="train.lora.targets",
            kind="target",
        )
    return tuple(sorted({name.rpartition(".")[2] for name in names}))
