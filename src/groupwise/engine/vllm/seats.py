"""Plans which GPUs of which machines vLLM's servers get; runs, Slurm, Ray and `check --gpus` read the same plan.

    machine 0   learner learner learner learner | server 0 (TP 2) | server 2 (TP 2)
    machine 1   learner learner learner learner | server 1 (TP 2) | server 3 (TP 2)

A server is on one machine, on GPUs that no learner uses. `vllm.servers` is how many there are; unset, as many as those
GPUs hold. Servers are distributed to the machines by turns. Where no GPU is free a single server, of one GPU, shares
that of the first learner. With `vllm.sleep` servers are on the learners' GPUs, and take turns with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.config.engine import VllmConfig
from groupwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The place of one server: its number among all, the number of its machine, and the names of its GPUs there, as
    CUDA_VISIBLE_DEVICES has them; none where there are none, or all that its process sees. `beside_rank_0`: rank 0
    trains on one of them."""

    number: int
    node: int = 0
    gpus: tuple[str, ...] = ()
    beside_rank_0: bool = False


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Holds the places of all servers of a run. `shared`: they are on learners' GPUs."""

    servers: tuple[Seat, ...]
    shared: bool = False

    @property
    def gpus(self) -> int:
        """Return how many GPUs the servers have to themselves."""
        return 0 if self.shared else sum(len(seat.gpus) for seat in self.servers)

    def on(self, node: int) -> tuple[Seat, ...]:
        """Return those of one machine."""
        return tuple(seat for seat in self.servers if seat.node == node)


def seats_of(vllm: VllmConfig, *, learners: int, visible: Sequence[str], first: int = 0, nodes: int = 1) -> Seats:
    """Return the places of the servers that a run starts.

    Args:
        learners: processes that train on each of the `nodes` machines, each on a GPU.
        visible: the names of the GPUs of a machine; learners use those from number `first` on. All machines are alike.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if vllm.gpus is None and not visible:
        if vllm.sleep:
            raise ConfigError(
                "vllm.sleep is true, and there is no GPU: on a CPU vLLM does not give memory back",
                hint="leave vllm.sleep out",
                field="vllm.sleep",
            )
        count = vllm.servers or 1
        return Seats(servers=tuple(Seat(number=number, node=number % nodes) for number in range(count)))
    taken = list(visible[first : first + learners])
    free = taken if vllm.sleep else [gpu for gpu in visible if gpu not in taken]
    named = [each.strip() for each in vllm.gpus.split(",") if each.strip()] if vllm.gpus is not None else free
    each = vllm.tensor_parallel_size
    if vllm.gpus is None and not free and each == 1 and (vllm.servers or 1) == 1:
        return Seats(servers=(Seat(number=0, gpus=(visible[first],), beside_rank_0=True),), shared=True)
    room = nodes * (len(named) // each)
    count = vllm.servers or max(1, room)
    if count > room:
        raise ConfigError(
            f"vLLM's servers need {count} x {each} GPUs, and learners {'have' if vllm.sleep else 'leave'} "
            f"{nodes * len(named)}: room for {room}",
            hint="lower vllm.servers, vllm.tensor_parallel_size or train.devices, or add GPUs",
            field="vllm.servers",
        )

    def seat(number: int) -> Seat:
        node, gpus = number % nodes, tuple(named[number // nodes * each : (number // nodes + 1) * each])
        return Seat(number=number, node=node, gpus=gpus, beside_rank_0=node == 0 and bool({*taken[:1]} & {*gpus}))

    return Seats(servers=tuple(map(seat, range(count))), shared=vllm.sleep)


def seated(vllm: VllmConfig, seat: Seat, *, alone: bool) -> VllmConfig:
    """Return the configuration of the server in this place: its GPUs, and of several (`alone` is false) a port and a
    log of its own."""
    changed: dict[str, object] = {"servers": None}
    if seat.gpus:
        changed["gpus"] = ",".join(seat.gpus)
    if not alone and vllm.port is not None:
        changed["port"] = vllm.port + seat.number
    if not alone and vllm.log is not None:
        stem, dot, end = vllm.log.rpartition(".")
        changed["log"] = f"{stem}-{seat.number}.{end}" if dot and "/" not in end else f"{vllm.log}-{seat.number}"
    return vllm.model_copy(update=changed)
