"""All vLLM servers of a run: which are up, which gets the next request, what happens when one dies.

    away   ->  started if it is ours  ->  healthy  ->  handshake  ->  has every version in use  ->  up
    up     ->  its process ended, was restarted by others, /health is refused or silent  ->  away

A server is given twice the completions that it samples at once (`rows`), so that it never waits for the next. The
others wait here, in order, for the first server that has room, and no clock runs for them. Of several the one with the
least to do gets a request, but the turns of a conversation go to the server that had the one before, whose prefix cache
has what they begin with (`_Homes`), unless they would wait there for rows and not elsewhere.

What was in flight on a server that is lost is sent again, to another or to the same one when it is back, with the same
seed and the same version. A server that comes back as something else fails the run, and so does one that does not come
back, or that was started `STARTS` times in a row without answering a request: nothing waits for ever. Behind a live
server (`patient`) only what is asked fails, and a server is looked for again and again.

Servers on the learners' GPUs (`vllm.sleep`) sleep while those train: from `rest`, which waits for what is in flight, to
the next request or version. One that dies meanwhile is started again when the others wake.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from groupwise.config.engine import VllmConfig
from groupwise.engine.vllm.client import ServerLost, VllmServer
from groupwise.engine.vllm.handshake import Accepted
from groupwise.engine.vllm.publish import Published
from groupwise.engine.vllm.server import RunningServer, StartServer
from groupwise.errors import EngineError, GroupwiseError
from groupwise.types import group_of_conversation

SILENT, UNREACHABLE = 3, 2  # looks in a row after which a server is given up
AGAIN_S = 0.2  # before the next look at one that is in doubt, or away
REFUSED_S = 10.0  # ... or that came back as something else, where that does not end everything
STARTS = 3  # of a server of ours that ends before it is up, or has answered a request
HOMES = 65_536  # conversations of which it is known where they are
FIRST_SAID_S, LATER_SAID_S = 2.0, 30.0  # when it is said that servers are waited for, and how rarely at most
AHEAD = 2  # times what a server samples at once is given to it
SENDS = 4  # of one request that servers are lost with

log = logging.getLogger(__name__)

T = TypeVar("T")
Prepare = Callable[[VllmServer], Awaitable[Accepted]]
Ask = Callable[[VllmServer, str], Coroutine[Any, Any, T]]
"""Asks a server for something under the name of a model or an adapter. It may be called again, for another server."""


class FleetMember:
    """Holds the state of server number `number`. If there is a `start`, this process starts the server, which then
    reports its own address."""

    def __init__(self, number: int, server: VllmServer | None, start: StartServer | None = None):
        self.number, self.start, self._server = number, start, server
        self.process: RunningServer | None = None
        self.starts = 0  # in a row, without an answer to a request
        self.accepted: Accepted | None = None  # None: it is away
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of its present life
        self.doubted = asyncio.Event()
        self.given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # in this life, and why
        self.running = self.given = 0  # completions: now, and ever
        self.why = "it has not answered yet"

    @property
    def server(self) -> VllmServer:
        """Return the one that listens where this member is; there is one wherever it is up."""
        assert self._server is not None
        return self._server

    @property
    def name(self) -> str:
        """Return the server's name in messages: its address, or its number while the address is not known."""
        return f"server {self.number}" if self._server is None else self._server.url

    @property
    def base(self) -> str:
        """Return the model name of requests for the base model."""
        assert self.accepted is not None
        return self.accepted.base

    async def moved(self, url: str, *, request_timeout_s: float) -> None:
        """Ask at this address from now on, if it is another one."""
        if self._server is None or self._server.url != url:
            await self.close()
            self._server = VllmServer(url, request_timeout_s=request_timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        if self._server is not None:
            await self._server.close()


class _Homes:
    """Knows which server had the last turn of a conversation (`SamplingRequest.conversation`), of the newest ones."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, FleetMember] = OrderedDict()

    def of(self, conversation: str) -> FleetMember | None:
        """Return the server that had it, or, of one that has just begun, its group's beginning."""
        return self._of.get(conversation) or self._of.get(group_of_conversation(conversation))

    def put(self, conversation: str, member: FleetMember) -> None:
        """Note where it is."""
        if conversation:
            self._of[conversation] = member
            self._of.move_to_end(conversation)
            if len(self._of) > HOMES:
                self._of.popitem(last=False)


class Fleet:
    """All servers. `prepare` accepts one and loads the versions that it must have; `rows` is how many completions each
    samples at once, None if the fleet does not limit them; `before_waking` is called, in a thread, when those that
    slept are to take the GPUs' memory again. Use it in one event loop."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        prepare: Prepare,
        starts: Sequence[StartServer],
        colocated: VllmServer | None = None,
        patient: bool = False,
        rows: int | None = None,
        before_waking: Callable[[], None] = lambda: None,
    ):
        self._config, self._prepare, self._patient = config, prepare, patient
        self._rests, self._before_waking = config.sleep and colocated is None, before_waking
        self._asleep, self._turn, self._awake = False, asyncio.Lock(), asyncio.Event()
        self._awake.set()
        self._at_once = math.inf if rows is None else rows
        if colocated is not None:
            self.members = [FleetMember(0, colocated)]
        elif config.urls:
            found = [VllmServer(url, request_timeout_s=config.request_timeout_s) for url in config.urls]
            self.members = [FleetMember(number, server) for number, server in enumerate(found)]
        else:
            self.members = [FleetMember(number, None, start) for number, start in enumerate(starts)]
        self._homes = _Homes()
        self._opened = False
        self._changed = asyncio.Condition()
        self._fatal: GroupwiseError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, *, say: Callable[[str], None] = lambda text: None) -> None:
        """Return when every server is up; `say` is told now and then what is waited for. Raises EngineError."""
        self._tasks = [asyncio.create_task(self._keep(member)) for member in self.members]
        telling = asyncio.create_task(self._tell_who_is_away(say))
        try:
            for member in self.members:
                await self._until_up([member], self._config.start_timeout_s)
        finally:
            telling.cancel()
        self._opened = True

    async def _tell_who_is_away(self, say: Callable[[str], None]) -> None:
        """Tell who is away, for ever, in intervals that grow."""
        started, pause = time.monotonic(), FIRST_SAID_S
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LATER_SAID_S)
            away = [member for member in self.members if member.accepted is None]
            waited, most = time.monotonic() - started, self._config.start_timeout_s
            if away:
                first, count = away[0], len(away)
                who = f"vLLM at {first.name}" if count == 1 else f"{count} of {len(self.members)} vLLM servers"
                what = "started" if first.start is not None else "asked"
                why = first.why if count == 1 else f"{first.name}: {first.why}"
                say(f"waiting for {who}, {what} {waited:.0f} s ago: {why} (vllm.start_timeout_s: {most:g})")

    async def close(self, forgotten: Iterable[Published] = ()) -> None:
        """Leave servers that are not ours, without these versions, and end those that are."""
        for task in self._tasks:  # first: who forgets would be taken for one that was restarted
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for published in forgotten if not self._asleep else ():
            await self.forget(published)
        for member in self.members:
            await member.close()
            if member.process is not None:
                await asyncio.to_thread(member.process.stop)

    @property
    def samples(self) -> bool:
        """Return whether anything is in flight."""
        return any(member.running for member in self.members)

    @property
    def up(self) -> list[FleetMember]:
        return [member for member in self.members if member.accepted is not None]

    # -- requests ------------------------------------------------------------------------------------------------------

    async def send(self, name: str | None, ask: Ask[T], *, rows: int = 1, conversation: str = "") -> T:
        """Return what a server answers who asks for `rows` completions by the adapter `name`, or the base. Raises
        EngineError."""
        attempt = 0
        while True:
            member = await self._with_room(rows, conversation)
            try:
                answer = await self._send_to(member, name, ask)
                member.starts = 0
                return answer
            except ServerLost as error:
                attempt += 1
                if attempt == SENDS:
                    raise EngineError(f"a request was lost {SENDS} times, the last time so: {error.message}") from error
                log.warning("a request is sent again (%d): %s", attempt, error.message)
                member.doubted.set()
                await asyncio.sleep(AGAIN_S * (UNREACHABLE + attempt))  # time to see whether the server is away
            finally:
                member.running -= rows
                await self._tell()

    async def _with_room(self, rows: int, conversation: str) -> FleetMember:
        """Return the server that has the conversation, or else the one with the least to do, which has been given these
        rows, once one is up that has room. Raises EngineError when none is up for too long."""

        def best() -> FleetMember | None:
            free = [each for each in self.up if not each.running or each.running + rows <= AHEAD * self._at_once]
            home = self._homes.of(conversation) if conversation else None
            if home in free and (not home.running or home.running + rows <= self._at_once):
                return home
            return min(free, key=lambda each: (each.running, each.given), default=None)

        while True:
            await self._wake()
            await self._until_up(self.members, self._config.recovery_timeout_s)
            async with self._changed:
                await self._changed.wait_for(lambda: self._fatal or not self.up or best())
                if (member := best()) is not None and self._fatal is None and not self._asleep:
                    member.running += rows
                    member.given += rows
                    self._homes.put(conversation, member)
                    return member

    async def _send_to(self, member: FleetMember, name: str | None, ask: Ask[T]) -> T:
        asking = asyncio.create_task(ask(member.server, name or member.base))
        try:
            await asyncio.wait({asking, member.lost}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise ServerLost(f"{member.name}: {member.why}")
        finally:
            asking.cancel()

    # -- versions ------------------------------------------------------------------------------------------------------

    async def everywhere(self, do: Callable[[VllmServer], Awaitable[None]]) -> None:
        """Do it on every server, on one that is away when it is back. Raises ServerLost, EngineError."""
        await self._wake()
        await asyncio.gather(*(self._on(member, do) for member in self.members))

    async def where_up(self, do: Callable[[VllmServer], Awaitable[None]]) -> None:
        """Call `do` on every server that is up, once at least one is. Servers that come up later get the same from
        `prepare`, without a wait. Raises ServerLost, EngineError."""
        await self._wake()
        await self._until_up(self.members, self._config.recovery_timeout_s)
        await asyncio.gather(*(self._on(member, do) for member in self.up))

    async def _on(self, member: FleetMember, do: Callable[[VllmServer], Awaitable[None]]) -> None:
        await self._until_up([member], self._config.recovery_timeout_s)
        try:
            async with asyncio.timeout(self._config.sync_timeout_s):
                await do(member.server)
        except TimeoutError:
            within = f"within {self._config.sync_timeout_s:g} s (vllm.sync_timeout_s)"
            raise ServerLost(f"{member.name} did not take a version {within}", silent=True) from None
        except ServerLost:
            member.doubted.set()
            raise

    async def awake(self) -> list[VllmServer]:
        """Return the servers that are up, which have the memory that they need. Raises EngineError."""
        await self._wake()
        return [member.server for member in self.up]

    def give_up(self, server: VllmServer, why: str) -> None:
        """Take a server for lost, whatever it answers to /health; one of ours is replaced."""
        for member in self.up:
            if member.server is server and not member.given_up.done():
                member.accepted = None
                member.given_up.set_result(why)

    async def forget(self, published: Published) -> None:
        """Unload a version wherever it is, when servers that sleep are awake; one that is away has forgotten it."""
        await self._awake.wait()
        for member in self.up:
            with suppress(EngineError):
                await member.server.unload(published.name)

    # -- turns with the learners ---------------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Have the servers sleep that may, when they are all up and have nothing in flight. Raises EngineError."""
        if not self._rests:
            return
        async with self._turn:
            for member in self.members:
                await self._until_up([member], self._config.recovery_timeout_s)
            async with self._changed:
                await self._changed.wait_for(lambda: not self.samples)
                self._asleep = True
                self._awake.clear()
            await self._all_up(lambda server: server.sleep())

    async def _wake(self) -> None:
        """Have them take the memory again that they gave back."""
        if not self._asleep:
            return
        async with self._turn:
            if self._asleep:
                await asyncio.to_thread(self._before_waking)
                await self._all_up(lambda server: server.wake())
                self._asleep = False
                self._awake.set()

    async def _all_up(self, do: Callable[[VllmServer], Awaitable[None]]) -> None:
        """Do it on every server that is up; one that is lost by then has no memory."""

        async def on(member: FleetMember) -> None:
            try:
                await do(member.server)
            except ServerLost:
                member.doubted.set()

        await asyncio.gather(*(on(member) for member in self.up))

    # -- up and down ---------------------------------------------------------------------------------------------------

    async def _until_up(self, members: Sequence[FleetMember], timeout: float) -> None:
        """Return when one of `members` is up. Raises EngineError."""

        def ready() -> bool:
            return self._fatal is not None or any(member.accepted for member in members)

        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError:
            away = "; ".join(f"{member.name}: {member.why}" for member in members)
            raise EngineError(
                f"no vLLM server was up within {timeout:g} s: {away}",
                hint="look at its log; vllm.start_timeout_s and vllm.recovery_timeout_s are how long a run waits",
            ) from None
        if self._fatal is not None:
            raise self._fatal

    async def _keep(self, member: FleetMember) -> None:
        """Bring a server up, watch it, and again."""
        while self._fatal is None:
            try:
                await self._live(member)
            except Exception as error:  # the callers that wait must get the error
                known = error if isinstance(error, GroupwiseError) else EngineError(f"{member.name}: {error!r}")
                if self._patient and self._opened:
                    member.why = known.message
                    log.error("vLLM at %s is not accepted: %s", member.name, member.why)
                    await asyncio.sleep(REFUSED_S)
                else:
                    self._fatal = known
                    await self._tell()

    async def _live(self, member: FleetMember) -> None:
        """Live one life of a server. Raises as `_bring_up`."""
        accepted = await self._bring_up(member)
        loop = asyncio.get_running_loop()
        member.lost, member.given_up, member.accepted = loop.create_future(), loop.create_future(), accepted
        if self._opened:
            log.warning("vLLM at %s is up again", member.name)
        await self._tell()
        member.why = await self._watched(member)
        log.warning("vLLM at %s is lost: %s", member.name, member.why)
        member.accepted = None
        member.lost.set_result(None)
        if member.process is not None:
            await asyncio.to_thread(member.process.stop)
            member.process = None

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _bring_up(self, member: FleetMember) -> Accepted:
        """Raise EngineError if it is not what the run needs, or if ours does not start."""
        deadline = 0.0
        while True:
            if member.start is not None and member.process is None:
                if member.starts == STARTS:
                    member.starts = 0  # behind a live server it is tried again later
                    raise EngineError(
                        f"vLLM {member.name} was started {STARTS} times and has answered nothing; it ended, the last "
                        f"time so: {member.why}",
                        hint="look at its log (vllm.log); a run goes on from its last checkpoint with resume=auto",
                        kind="restarts",
                    )
                await self._awake.wait()
                member.starts, deadline = member.starts + 1, time.monotonic() + self._config.start_timeout_s
                member.process = member.start()
            try:
                if member.process is not None:
                    if member.process.url is None:
                        raise ServerLost("its machine has not said yet where it listens")
                    await member.moved(member.process.url, request_timeout_s=self._config.request_timeout_s)
                await member.server.health()
                return await self._prepare(member.server)
            except ServerLost as error:
                member.why = error.message
            if member.process is not None and (member.process.ended or time.monotonic() > deadline):
                member.why = member.process.ended or member.why
                await asyncio.to_thread(member.process.stop)
                member.process = None
            await asyncio.sleep(AGAIN_S)

    async def _watched(self, member: FleetMember) -> str:
        """Return why a server is lost, or was given up."""
        watching = asyncio.create_task(self._watch(member))
        try:
            await asyncio.wait({watching, member.given_up}, return_when=asyncio.FIRST_COMPLETED)
            return member.given_up.result() if member.given_up.done() else watching.result()
        finally:
            watching.cancel()

    async def _watch(self, member: FleetMember) -> str:
        """Return why a server is lost, when it is."""
        missed = 0
        while True:
            member.doubted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if missed else self._config.health_interval_s):
                    await member.doubted.wait()
            if member.process is not None and member.process.ended:
                return member.process.ended
            try:
                await member.server.health()
                if not await member.server.remembers(member.base):
                    return "it was restarted, and has forgotten what it was given"
                missed = 0
            except EngineError as error:
                missed += 1
                if missed >= (SILENT if isinstance(error, ServerLost) and error.silent else UNREACHABLE):
                    return error.message
