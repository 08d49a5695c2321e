"""Sends a version's weights from the learner's memory to the servers that take them so, by vLLM's own routes.

way       how a server takes weights is what it was started for (`--weight-transfer-config`): see `vllm.links`
rounding  what all servers keep in 16 bits comes rounded to these from the learner: half the bytes (`as_kept`)
chunk     tensors as they come from the learner, until they are `PACKED_BYTES`; a request and a broadcast for each,
          to all servers at once, while the next is packed
failure   a server that refuses, dies or takes no chunk for `vllm.sync_timeout_s` is given no more; the others continue.
          It is brought out of the update that it is in, or given up where it does not answer, and reads a file

/init_weight_transfer_engine  (once in its life)  /start_weight_update  /update_weights ...  /finish_weight_update
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from groupwise.engine.vllm import links
from groupwise.engine.vllm.client import SAID, ServerLost, VllmServer
from groupwise.engine.vllm.links import KINDS, Chunk, Link, in_thread
from groupwise.errors import EngineError
from groupwise.model.checkpoint_tensors import TakeTensor

MEND_S = 10.0  # for a server to come out of an update that broke

_KEPT = re.compile(r"(?:.*\.)?(?:(?:[qkvo]|gate|up|down)_proj|embed_tokens|lm_head)\.weight")

log = logging.getLogger(__name__)

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], "Future[T]"]


@dataclass
class Way:
    """The way in which a server gets whole models: over a link of this kind, or (None) as files, and `why`; and the
    type in which it keeps them, if it is of one."""

    kind: str | None
    why: str = ""
    link: Link | None = None
    failed: bool = False  # since a transfer did
    dtype: torch.dtype | None = None


async def way_of(server: VllmServer, asked: Literal["auto", "file"], device: torch.device) -> Way:
    """Return how a server gets whole models from a learner on `device`. Raises ServerLost."""
    if asked == "file":
        return Way(None, "vllm.transfer is file")
    try:
        taking = await server.taking()
    except ServerLost:
        raise
    except EngineError as error:
        return Way(None, f"it does not say how it was started: {error.message}")
    backend = taking.backend
    if backend is None:
        return Way(None, "it was started without --weight-transfer-config")
    if backend not in KINDS:
        return Way(None, f"it was started for {backend}, which this version does not speak")
    if backend != links.GlooLink.name and device.type != "cuda":  # gpu-aware
        return Way(None, f"it was started for {backend}, and the learner is on no GPU")
    dtype = getattr(torch, taking.dtype or "", None)
    return Way(backend, dtype=dtype if isinstance(dtype, torch.dtype) else None)


def as_kept(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor of a checkpoint as a server whose weights are of this type keeps it, where that is fewer bytes.

    vLLM rounds what it loads to the nearest, ties to even, as is done here: to send it rounded changes no bit. That it
    keeps a tensor in its own type is known of the projections, embeddings and heads of all its models (0.32), nearly
    all of a model's bytes. Routers, what corrects them, and the decays of recurrent layers are in float32 in some, and
    are sent as they are.
    """
    rounds = dtype is not None and tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize
    return tensor.to(dtype) if rounds and _KEPT.fullmatch(name) else tensor


def in_words(way: Way) -> str:
    """Return how a server gets whole models, and why so."""
    return f"files ({way.why})" if way.kind is None else KINDS[way.kind].said


class Transfers:
    """Sends whole models to all servers, to each in its own way.

    Args:
        run: runs a coroutine in the servers' event loop, from another thread.
        give_up: is told of a server that does not answer any more.
    """

    def __init__(
        self,
        asked: Literal["auto", "file"],
        *,
        device: torch.device,
        timeout_s: float,
        run: Run[Any],
        give_up: Callable[[VllmServer, str], None],
    ):
        self._asked: Literal["auto", "file"] = asked
        self._device, self._timeout_s = device, timeout_s
        self._run, self._give_up = run, give_up
        self._ways: dict[VllmServer, Way] = {}

    @property
    def ways(self) -> Mapping[VllmServer, Way]:
        """Return how each server that was seen gets whole models."""
        return self._ways

    async def begin(self, server: VllmServer) -> None:
        """Find out how a server takes weights whose life begins: what there was with an earlier one is over, but one
        that a transfer failed with still reads files. Raises ServerLost."""
        before = self._ways.get(server)
        if before is not None and before.link is not None:
            before.link.abort()
            before.link = None
        if server.updating:  # it was lost amid an update, and may be the same still
            with suppress(EngineError):
                await server.leave_update(timeout=MEND_S)
            server.updating = False
        if before is None or not before.failed:
            self._ways[server] = await way_of(server, self._asked, self._device)

    def by_file(self, server: VllmServer, why: str) -> None:
        """Give a server files from now on."""
        if self._ways[server].kind is not None:
            log.warning("vLLM at %s reads files from now on in place of what is sent to it: %s", server.url, why)
        self._ways[server] = Way(None, why, failed=True)

    def send(self, servers: Sequence[VllmServer], label: str, stream: Callable[[TakeTensor], None]) -> None:
        """Have the servers take what `stream` gives, as `label`, if they can. Whichever has not got all of it says so
        (`VllmServer.weights`). Raises what `stream` raises; the servers are then brought out of the update, and read
        files. Not for the servers' own thread."""
        taking = [server for server in servers if (way := self._ways.get(server)) is not None and way.kind is not None]
        if not taking:
            return
        sending = _Sending(self, taking, label)
        self._run(sending.open()).result()
        try:
            if sending.servers:
                stream(sending.take)
                sending.flush()
                sending.settle()
        except BaseException as error:
            sending.settle()
            self._run(sending.abandon(error)).result()
            raise
        self._run(sending.close()).result()

    def dtype(self, servers: Sequence[VllmServer]) -> torch.dtype | None:
        """Return the type in which all of these servers keep weights, if it is one."""
        kept = {self._ways[server].dtype for server in servers}
        return kept.pop() if len(kept) == 1 else None

    async def link(self, server: VllmServer) -> Link:
        """Return the link to a server, which it may have to meet first. Raises EngineError, ServerLost."""
        way = self._ways[server]
        assert way.kind is not None
        if way.link is not None:
            return way.link
        make = partial(KINDS[way.kind], server.url, device=self._device, timeout_s=self._timeout_s)
        made = in_thread(partial(make, await server.workers()))
        link = way.link = await self._within(asyncio.wrap_future(made), server)  # given up, whatever comes of it
        await self.both(server, server.meet(link.meeting(), timeout=self._timeout_s), link.join)
        return link

    async def both(self, server: VllmServer, asked: Coroutine[Any, Any, object], do: Callable[[], None]) -> None:
        """Return when a server has answered and what happens here meanwhile, which blocks, has, too. Raises ServerLost,
        EngineError."""
        asking, doing = asyncio.ensure_future(asked), asyncio.wrap_future(in_thread(do))
        try:
            waited = asyncio.wait({asking, doing}, return_when=asyncio.FIRST_EXCEPTION)
            done, _ = await self._within(waited, server)
            for each in (asking, doing):
                if each in done:
                    each.result()
        finally:
            asking.cancel()
            doing.cancel()

    async def _within(self, waited: Any, server: VllmServer) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await waited
        except TimeoutError:
            within = f"{self._timeout_s:g} s (vllm.sync_timeout_s)"
            raise ServerLost(f"{server.url} took no weights within {within}", silent=True) from None

    async def failed(self, server: VllmServer, error: EngineError) -> None:
        """Give up the way to a server, which is to come out of the update that it may be in. One that did not answer at
        all may have died, and takes what is sent in its next life."""
        way, lost = self._ways[server], isinstance(error, ServerLost)
        silent = isinstance(error, ServerLost) and error.silent
        if way.link is not None:
            way.link.abort()
            way.link = None
        if lost and not silent:
            log.warning("vLLM at %s was lost while weights were sent to it: %s", server.url, error.message)
        else:
            self.by_file(server, error.message)
        try:
            if server.updating or silent:
                await server.leave_update(timeout=MEND_S)
            elif lost:
                await server.health()
        except EngineError as worse:
            self._give_up(server, f"it does not come out of an update of its weights: {worse.message}")

    def run(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Run it in the servers' loop."""
        return self._run(coroutine)

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the bytes of tensors, one after another, where they are sent from."""
        flat = [each.contiguous().view(-1).view(torch.uint8).to(self._device) for each in tensors]
        packed = torch.cat(flat)
        if packed.is_cuda:  # gpu-only: others read it in their own streams
            torch.cuda.current_stream(packed.device).synchronize()
        return packed

    @property
    def timeout_s(self) -> float:
        """Return for how long a server may take nothing."""
        return self._timeout_s


class _Sending:
    """Sends one version's weights to the servers: `open`, `take` every tensor, `flush`, `settle`, `close`."""

    def __init__(self, transfers: Transfers, servers: Sequence[VllmServer], label: str):
        self._transfers, self._label = transfers, label
        self.servers = list(servers)  # that still take it
        self._names, self._tensors, self._bytes = list[str](), list[Tensor](), 0
        self._dtype = transfers.dtype(servers)
        self._under_way: Future[None] | None = None

    async def open(self) -> None:
        """Begin an update of every server."""
        await self._on_all(self._begin)

    async def _begin(self, server: VllmServer) -> None:
        await self._transfers.link(server)
        await server.start_update(timeout=self._transfers.timeout_s)

    def take(self, name: str, tensor: Tensor) -> None:
        """Collect a tensor, and send the collected ones when they fill a chunk. Never raises: the caller continues
        with other ranks."""
        if not self.servers:
            return
        tensor = as_kept(name, tensor, self._dtype)
        self._names.append(name)
        self._tensors.append(tensor)
        self._bytes += tensor.nbytes
        if self._bytes > links.PACKED_BYTES:  # vLLM ends a chunk where it is more, too
            self.flush()

    def flush(self) -> None:
        """Send what there is, once what was sent before is there."""
        if not self._tensors:
            return
        every = self._tensors
        chunk = Chunk(
            packed=self._transfers.packed(every),
            names=self._names,
            dtypes=[each.dtype for each in every],
            shapes=[each.shape for each in every],
            sizes=[each.nbytes for each in every],
        )
        self._names, self._tensors, self._bytes = [], [], 0
        self.settle()
        self._under_way = self._transfers.run(self._on_all(partial(self._give, chunk)))

    def settle(self) -> None:
        """Wait until what was sent is there, or is known not to be."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    async def _give(self, chunk: Chunk, server: VllmServer) -> None:
        link = await self._transfers.link(server)
        told = server.update(link.described(chunk), timeout=self._transfers.timeout_s)
        await self._transfers.both(server, told, partial(link.send, chunk))

    async def close(self) -> None:
        """End the update of every server that has all."""
        await self._on_all(self._end)

    async def abandon(self, error: BaseException) -> None:
        """Give up the rest: what ends it is the learner's, and a server that waited for more would take nothing else
        until it is restarted."""

        async def fail(server: VllmServer) -> None:
            raise EngineError(f"the weights broke off: {type(error).__name__}")

        await self._on_all(fail)

    async def _end(self, server: VllmServer) -> None:
        await server.finish_update(self._label, timeout=self._transfers.timeout_s)
        (await self._transfers.link(server)).rest()

    async def _on_all(self, do: Callable[[VllmServer], Coroutine[Any, Any, None]]) -> None:
        """Do it with every server that still takes weights; one that it fails with takes none any more."""

        async def on(server: VllmServer) -> None:
            try:
                await do(server)
            except Exception as error:  # also torch's, of many kinds
                why = f"weights cannot be sent to {server.url}: {' '.join(str(error).split()):.{SAID}}"
                self.servers.remove(server)
                failure = error if isinstance(error, EngineError) else EngineError(why)
                await self._transfers.failed(server, failure)

        await asyncio.gather(*(on(server) for server in list(self.servers)))
