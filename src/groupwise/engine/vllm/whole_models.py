"""The newest whole model, which every server samples from, and how it gets there.

sent      servers that take weights over the network get it from the learner's memory (`vllm.transfer`)
read      every other one, one that it could not be sent to, and one that comes back reads a checkpoint, which is
          written when the first of them needs it
proved    some tokens are sampled; their log-probabilities must be the trainer's. What was sent and is not the
          version is read again from a file
standing  a server that comes back while the learner trains waits until it has: what there is then is no version
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from groupwise.engine.vllm.client import ServerLost, VllmServer
from groupwise.engine.vllm.gaps import Gaps
from groupwise.engine.vllm.publish import Published, Shelf
from groupwise.engine.vllm.transfer import Transfers, in_words
from groupwise.errors import EngineError
from groupwise.model.checkpoint_tensors import TakeTensor
from groupwise.types import PolicyVersion


@dataclass(frozen=True)
class WholeModel:
    """The weights of a version, available as long as it is the newest: `write` writes its checkpoint into a directory,
    `stream` gives every tensor of it."""

    write: Callable[[Path], None]
    stream: Callable[[TakeTensor], None]


class WholeModels:
    """Hands whole models to servers. Coroutines are for the servers' event loop, all else for other threads.

    Args:
        first: the base, as servers may have another: that of an earlier run.
        trains: models are the very weights that train, which change when training continues.
        prompt: is sampled from to prove a version.
        timeout: seconds for a server to read one.
    """

    def __init__(
        self,
        transfers: Transfers,
        shelf: Shelf,
        gaps: Gaps,
        *,
        first: WholeModel,
        trains: bool,
        prompt: Sequence[int],
        timeout: float,
    ):
        self._transfers, self._shelf, self._gaps = transfers, shelf, gaps
        self._prompt, self._timeout, self._trains = prompt, timeout, trains
        self._model, self.newest = first, shelf.named(PolicyVersion.base())
        self._file = threading.Lock()
        self._stands, self._unused, self._users = asyncio.Event(), asyncio.Event(), 0
        self._stands.set()
        self._unused.set()

    # -- a version -----------------------------------------------------------------------------------------------------

    def replace(self, version: PolicyVersion, model: WholeModel) -> Published:
        """Make a model the newest one; return the one before, whose file is there until it is removed."""
        with self._file:
            before, self.newest, self._model = self.newest, self._shelf.named(version), model
        return before

    def send(self, servers: Sequence[VllmServer]) -> None:
        """Send the newest to the servers that take it so, and write the file where one has not got it then. Raises
        StorageError."""
        self._transfers.send(servers, self.newest.label, self._model.stream)
        if any(server.weights != self.newest.label for server in servers):
            self.write()

    def write(self) -> None:
        """Write the newest into its file, if it is not there. Raises StorageError."""
        with self._file:
            if not self.newest.path.exists():
                self._shelf.write(self.newest, self._model.write)

    async def give(self, server: VllmServer) -> None:
        """Have a server read the newest, if it has not got it, and prove it. Raises ServerLost, EngineError,
        StorageError."""
        newest, sent = self.newest, server.weights == self.newest.label
        if not sent:
            await self._read(server, newest)
        name = (await server.facts()).name
        off = await self._gaps.too_far(server, name, newest.version, self._prompt)
        if off is not None and sent:
            self._transfers.by_file(server, f"what was sent is off by {off:.3g} nats in the mean")
            await self._read(server, newest)
            off = await self._gaps.too_far(server, name, newest.version, self._prompt)
        if off is not None:
            server.weights = None  # another attempt reads them again
            raise EngineError(
                f"{server.url} has read the weights of {newest.name}, and its log-probabilities are off by {off:.3g} "
                f"nats in the mean (at most {self._gaps.limit:.3g})",
                hint="on a CPU vLLM 0.32 does not read everything anew: it keeps the old output layer of a model whose "
                "embeddings are tied, and lays experts out wrongly; sample such a model with engine: local there",
            )

    async def _read(self, server: VllmServer, newest: Published) -> None:
        await asyncio.to_thread(self.write)
        if newest is not self.newest:
            raise ServerLost(f"{server.url} was given {newest.version}, and there is another version meanwhile")
        await server.reload(newest.label, timeout=self._timeout)

    # -- servers that come and go --------------------------------------------------------------------------------------

    async def begin(self, server: VllmServer) -> None:
        """Give the newest to a server whose life begins. Raises ServerLost, EngineError, StorageError."""
        server.weights = None
        await self._transfers.begin(server)
        if await server.holds(self.newest.label):  # it was away, and nothing else
            server.weights = self.newest.label
        await self.give(server)

    def ways(self) -> list[str]:
        """Return how the servers get whole models, in words."""
        found = Counter(in_words(way) for way in self._transfers.ways.values())
        return [f"weights go to {count} vLLM server{'s' * (count > 1)} by {how}" for how, count in found.items()]

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """Keep the newest version from being trained further inside the block."""
        while not self._stands.is_set():  # training may have begun again before this continued
            await self._stands.wait()
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def begin_training(self) -> None:
        """Say that the weights are those of no version until `stand`; return when no server is given them any more."""
        if self._trains:
            self._stands.clear()
            await self._unused.wait()

    def stand(self) -> None:
        """Say that the weights are the newest version's again. For the servers' event loop, too."""
        self._stands.set()

    @property
    def stands(self) -> bool:
        """Return whether the weights are the newest version's."""
        return self._stands.is_set()
