"""Verifies that a vLLM server serves the run's model, by comparing log-probabilities, not by its name.

    tokens     a conversation through its /tokenize is what our tokenizer and chat template make of it
    weights    log-probabilities of what it samples as its own model are the trainer's (another checkpoint, another
               config, a half-updated model, untempered log-probabilities: all of them differ)
    mixing     ... and stay so while requests for adapters are in its batch

For the last one every slot is filled with a probe, an adapter that changes much; all probes sample, and meanwhile the
base does. On CPUs vLLM 0.32 gives rows without an adapter the one in its last slot, and it shows. So the base is always
addressed as an adapter too, one whose B is zero: y = W x + 0; a server on which that does not hold is refused. It also
tells a server that was restarted, which does not know that name any more. Where versions are whole models there are no
adapters to mix, and the name of the weights tells it. What is asked while probes sample fits in
less than a block of vLLM's prefix cache, so that no wrong keys and values stay behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from groupwise.engine.vllm.client import ServerFacts, VllmServer, sampling_body
from groupwise.errors import AdapterError, EngineError, FieldError, StorageError
from groupwise.model.chat import encode_prompt
from groupwise.model.load import LoadedModel, adapted_modules, is_linear
from groupwise.types import Message, PolicyVersion, Prompt, SamplingParams, Scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ----------------------------------------------------------------------------------------------------------------------
# From the trainer's disk to vLLM: a version's own copy, its own name, a canary, a lease.
#
#     publish   the files are laid in a directory of their own, under a name that never was before (`name-v12-1f3a`):
#               vLLM keeps prompts it has computed by an adapter's name and path, so one that is used again serves the
#     old
#     canary    some tokens are sampled under that name; their log-probabilities must be those of the same files here
#     weights   where all parameters are trained, or adapters are merged (vllm.push), a version is a whole checkpoint,
#               which every server reads in place of what it has; prompts that it knows are forgotten, and the canary
#               follows. Nothing samples meanwhile
#     lease     a version is unloaded, and its copy removed, when the last request that samples from it is done: an
#               adapter that vLLM has pushed out of its memory is read again, and a missing directory ends its engine
#
# The canary is sampled at a temperature that is not 1, so that a server which reports untempered log-probabilities
# (`raw_logprobs`, vLLM's default) does not pass.
# ----------------------------------------------------------------------------------------------------------------------

CANARY = SamplingParams(temperature=0.5, max_tokens=12, ignore_eos=True)
CANARY_N = 2
FILES = ("adapter_config.json", "adapter_model.safetensors")
LONGEST_NAME = 64  # of what a version is called there, without its number; a sum of adapters has a long name

_PLAIN = re.compile(r"[^\w.-]")  # what vLLM's names and directories are not to have


class TrainerScores(Scores, Protocol):
    """What the trainer thinks of a completion: the local engine over the same base weights."""

    def load(self, version: PolicyVersion, directory: Path) -> None: ...

    def adopt(self, version: PolicyVersion) -> None: ...

    def unload(self, version: PolicyVersion) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version as vLLM knows it."""

    version: PolicyVersion
    name: str
    path: Path


class Shelf:
    """The directory in which versions lie for vLLM, until `close`. `place` None is a temporary one."""

    def __init__(self, place: Path | None):
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix="groupwise-vllm-", dir=place)).absolute()
        self.path.chmod(0o755)  # the server may be another user's

    def put(self, version: PolicyVersion, directory: Path) -> Published:
        """A copy of an adapter, hard links where they can be, under a new name. Raises AdapterError."""
        published = self._named(version)
        try:
            published.path.mkdir()
            for file in FILES:
                _link(directory / file, published.path / file)
        except OSError as error:
            raise AdapterError(f"the adapter in {directory} cannot be laid out for vLLM: {error}") from error
        return published

    def put_model(self, version: PolicyVersion, model: PreTrainedModel) -> Published:
        """A checkpoint of all weights as they are now. Raises StorageError."""
        published = self._named(version)
        try:
            model.save_pretrained(published.path)
        except OSError as error:
            self.remove(published)
            raise StorageError.of(error, f"the weights of {version} cannot be written for vLLM: {error}") from error
        return published

    def _named(self, version: PolicyVersion) -> Published:
        called = _PLAIN.sub("-", version.name)[:LONGEST_NAME]
        name = f"{called}-v{version.number}-{secrets.token_hex(4)}"
        return Published(version=version, name=name, path=self.path / name)

    def remove(self, published: Published) -> None:
        shutil.rmtree(published.path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


@dataclass(eq=False)
class LoadedAdapter:
    """A loaded version: how many requests sample from it, and whether it is to go after the last."""

    published: Published
    holders: int = 0
    retired: bool = False


class Leases:
    """The versions that requests may name. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[PolicyVersion, LoadedAdapter] = {}
        self._leaving: set[LoadedAdapter] = set()

    def add(self, published: Published) -> None:
        with self._lock:
            self._of[published.version] = LoadedAdapter(published)

    def __contains__(self, version: PolicyVersion) -> bool:
        return version in self._of

    @property
    def versions(self) -> list[PolicyVersion]:
        """Those that requests may name."""
        return sorted(self._of)

    @property
    def alive(self) -> list[Published]:
        """What every server must have: all that requests name, or still sample from."""
        with self._lock:
            return [lease.published for lease in (*self._of.values(), *self._leaving)]

    def take(self, version: PolicyVersion) -> LoadedAdapter | None:
        """Hold a version for one request; None if it is not there."""
        with self._lock:
            lease = self._of.get(version)
            if lease is not None:
                lease.holders += 1
            return lease

    def give_back(self, lease: LoadedAdapter) -> bool:
        """The request is done. Whether it was the last of a version that is to go."""
        with self._lock:
            lease.holders -= 1
            return self._gone(lease)

    def retire(self, version: PolicyVersion) -> LoadedAdapter | None:
        """No request may name it any more. The lease if nobody holds it."""
        with self._lock:
            lease = self._of.pop(version, None)
            if lease is None:
                return None
            lease.retired = True
            self._leaving.add(lease)
            return lease if self._gone(lease) else None

    def _gone(self, lease: LoadedAdapter) -> bool:
        if not lease.retired or lease.holders:
            return False
        self._leaving.discard(lease)
        return True


async def gap(
    server: VllmServer,
    name: str,
    reference: TrainerScores,
    version: PolicyVersion,
    prompt_ids: Sequence[int],
    *,
    params: SamplingParams = CANARY,
    n: int = CANARY_N,
) -> float:
    """The mean difference (nats) between what a server says of tokens it samples as `name`, and the trainer of them as
    `version`. Raises ServerLost, EngineError."""
    body = sampling_body(prompt_ids, params, n=n, max_tokens=params.max_tokens, seed=0, eos_ids=())
    differences: list[float] = []
    for each in await server.complete(name, body):
        score = asyncio.to_thread(reference.score, prompt_ids, each.token_ids, version, temperature=params.temperature)
        differences += [abs(a - b) for a, b in zip(each.logprobs, await score, strict=True)]
    return sum(differences) / len(differences)


async def publish(
    server: VllmServer,
    published: Published,
    reference: TrainerScores,
    prompt_ids: Sequence[int],
    *,
    tolerance: float,
    timeout: float,
) -> None:
    """Load a version on a server and let it prove it. Raises ServerLost, EngineError."""
    await server.load(published.name, str(published.path), timeout=timeout)
    off = await gap(server, published.name, reference, published.version, prompt_ids)
    if not off <= tolerance:
        raise EngineError(
            f"{server.url} serves {published.name} with log-probabilities that are off by {off:.3g} nats in the mean "
            f"(tolerance {tolerance:g}): it is not the version that was trained",
            hint="are its vLLM, dtype and --logprobs-mode processed_logprobs as `groupwise vllm-serve` sets them?",
        )


async def reload(
    server: VllmServer,
    published: Published,
    reference: TrainerScores,
    prompt_ids: Sequence[int],
    *,
    tolerance: float,
    timeout: float,
) -> None:
    """Let a server read all weights of a version and prove it, under the model's name. Raises ServerLost,
    EngineError."""
    await server.reload(str(published.path), timeout=timeout)
    off = await gap(server, (await server.facts()).name, reference, published.version, prompt_ids)
    if not off <= tolerance:
        raise EngineError(
            f"{server.url} has read the weights of {published.name}, and its log-probabilities are off by {off:.3g} "
            f"nats in the mean (tolerance {tolerance:g})",
            hint="on a CPU vLLM 0.32 does not read everything anew: it keeps the old output layer of a model whose "
            "embeddings are tied, and lays experts out wrongly; sample such a model with engine: local there",
        )


ASKED: tuple[Message, ...] = ({"role": "user", "content": "27 + 15? In {3} wörds."},)
PLAIN = "27 + 15, in wörds, is"  # where there is no chat template
PROBE_TOKENS = (32, 128, 512)  # of each probe, until they outlast the base
SHORT = replace(CANARY, max_tokens=8)
SHORT_PROMPT = 6  # with that less than the 16 tokens of vLLM's smallest block
PROBE, ZERO = PolicyVersion("groupwise-probe", 1), PolicyVersion("groupwise-base", 0)


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A server that passed. `base` is what requests for the base model are addressed to; `mixes`: the model's own name
    would get adapters of others."""

    facts: ServerFacts
    base: str
    mixes: bool


class Handshake:
    """What a run expects of its servers.

    Args:
        base: the trainer's model.
        reference: scores with its weights.
        shelf: where probes are laid.
        targets: modules that adapters change; the probes change the last of them. None: it serves none.
        slots: adapters that a server holds at once.
    """

    def __init__(
        self,
        base: LoadedModel,
        reference: TrainerScores,
        shelf: Shelf,
        *,
        targets: Sequence[str] | None,
        slots: int,
        tolerance: float,
        timeout: float,
    ):
        self._base, self._reference = base, reference
        self._tolerance, self._timeout = tolerance, timeout
        self._templated = base.tokenizer.chat_template is not None
        asked = Prompt(id="handshake", messages=ASKED) if self._templated else Prompt(id="handshake", text=PLAIN)
        self.prompt = encode_prompt(asked, base.tokenizer).token_ids
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
        if self.zero is None:
            return Accepted(facts=facts, base=facts.name, mixes=False)
        for probe in (*self._probes, self.zero):
            await server.load(probe.name, str(probe.path), timeout=self._timeout)
        try:
            mixes = not await self._holds(server, facts.name, self._probes)
            if not await self._holds(server, self.zero.name, self._probes[1:]):  # it takes a slot itself
                raise EngineError(f"{server.url} mixes up the adapters of requests that are in flight together")
        finally:
            for probe in self._probes:
                await server.unload(probe.name)
        return Accepted(facts=facts, base=self.zero.name, mixes=mixes)

    async def _check_tokens(self, server: VllmServer, facts: ServerFacts) -> None:
        theirs = await server.tokenize(facts.name, ASKED if self._templated else PLAIN)
        if theirs != self.prompt:
            raise EngineError(
                f"{server.url} ({facts.name}) has another tokenizer or chat template than {self._base.name}: a "
                f"question is {list(theirs)[:12]}... there and {list(self.prompt)[:12]}... here",
                hint="serve the model that is trained, as `groupwise vllm-serve` does",
            )

    async def _check_weights(self, server: VllmServer, name: str, version: PolicyVersion) -> None:
        off = await gap(server, name, self._reference, version, self.prompt)
        if not off <= self._tolerance:
            raise EngineError(
                f"{server.url} ({name}) is not {self._base.name} as it is trained here: its log-probabilities are off "
                f"by {off:.3g} nats in the mean (tolerance {self._tolerance:g})",
                hint="serve the same model and dtype, with --logprobs-mode processed_logprobs, as "
                "`groupwise vllm-serve` does; a looser vllm.tolerance accepts more",
            )

    async def _holds(self, server: VllmServer, name: str, probes: Sequence[Published]) -> bool:
        """Whether `name` samples as the base while the probes sample too; False if that could not be found out."""
        for tokens in PROBE_TOKENS:
            params = replace(CANARY, max_tokens=min(tokens, self._base.context_length // 2))
            body = sampling_body(self.prompt, params, n=1, max_tokens=params.max_tokens, seed=0, eos_ids=())
            probing = [asyncio.create_task(server.complete(probe.name, body)) for probe in probes]
            try:
                await asyncio.sleep(0)  # they are sent first
                short = self.prompt[:SHORT_PROMPT]
                off = await gap(server, name, self._reference, PolicyVersion.base(), short, params=SHORT, n=4)
                together = not any(task.done() for task in probing)
            finally:
                await asyncio.gather(*probing, return_exceptions=True)
            if not off <= self._tolerance:
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
    """The last linear module whose name ends with one of `targets`. Raises EngineError if there is none."""
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    fitting = [each for each in named if each[0].rpartition(".")[2] in set(targets)]
    if not fitting:
        raise EngineError(f"vLLM takes adapters of linear modules; {type(model).__name__} has none among {targets}")
    return fitting[-1]


def linear_names(model: PreTrainedModel, targets: str | Sequence[str]) -> tuple[str, ...]:
    """The modules that `train.lora.targets` means, by the last part of their names, as vLLM wants them. Raises
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
