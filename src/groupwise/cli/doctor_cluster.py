"""Can these processes train together? What `groupwise doctor` looks at besides one machine.

    one process       host_findings: what several would need of this machine
    under torchrun    cluster_findings: they meet, and compare what each of them is and sees

`groupwise launch CONFIG --doctor` starts the processes of a run, which do this instead of training.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from groupwise.cli.doctor_check import DoctorCheck
from groupwise.config.world import World, world
from groupwise.errors import ConfigError, RankLostError
from groupwise.train.ranks import Ranks, join

PORT = 29500  # of torchrun and of `launcher.port`, unless they say another

PACKAGES = ("groupwise", "torch", "transformers", "peft", "safetensors")

CLOCK_S = 1.0  # by which clocks may differ

PROBE_S = 5.0  # after which a file of another machine is to be seen

PROBE_BYTES = 16 << 20  # that are added up to see how fast that goes

DEADLINE_S = 60.0


def host_findings() -> Iterator[DoctorCheck]:
    """Yield findings about the meeting with other machines: torch.distributed, the name, the port."""
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    yield DoctorCheck(
        "distributed", "ok", f"backends: {', '.join(name for name, is_there in there.items() if is_there)}"
    )
    yield _host_name()
    if world().size == 1:  # else torchrun has it
        yield _port(PORT)


def _host_name() -> DoctorCheck:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return DoctorCheck("host name", "warn", f"{name} cannot be resolved: {error}", f"write {name} into /etc/hosts")
    alone = "; of several machines the others need another: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    return DoctorCheck("host name", "ok", f"{name} is {address}{alone if address.startswith('127.') else ''}")


def _port(port: int) -> DoctorCheck:
    with socket.socket() as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
        except OSError as error:
            remedy = "set launcher.port to another, or end what has it"
            return DoctorCheck("port", "warn", f"{port}, where processes meet, is taken: {error.strerror}", remedy)
    return DoctorCheck("port", "ok", f"{port}, where processes meet, is free")


def cluster_findings(
    local: Sequence[DoctorCheck], *, directory: Path, deadline_s: float = DEADLINE_S
) -> Iterator[DoctorCheck]:
    """Yield what is found. Every process calls this, with what it found on its own machine; what rank 0 is given is
    about all of them."""
    here = world()
    try:
        ranks = join(here, device=_device(here), deadline_s=deadline_s)
    except (RankLostError, ConfigError) as error:
        yield DoctorCheck("meeting", "fail", error.message, error.hint or "")
        return
    try:
        yield from _compared(ranks, here, local, directory)
    except RankLostError as error:
        yield DoctorCheck("meeting", "fail", error.message, error.hint or "")
    finally:
        ranks.close()


def _compared(ranks: Ranks, here: World, local: Sequence[DoctorCheck], directory: Path) -> Iterator[DoctorCheck]:
    facts = ranks.gather(ProcessFacts.here(here, local), phase="comparing facts")
    machines = list(dict.fromkeys(each.host for each in facts))
    yield DoctorCheck("meeting", "ok", f"{ranks.size} processes on {', '.join(machines)}")
    for rank, each in enumerate(facts):
        for finding in each.failed if rank else ():
            yield DoctorCheck(
                f"{finding.name} of rank {rank} ({each.host})", finding.status, finding.detail, finding.remedy
            )
    yield _versions(facts)
    yield _gpus(facts)
    ranks.gather(None, phase="comparing clocks")  # so that all look at theirs at once
    yield _clocks(ranks.gather(time.time(), phase="comparing clocks"))
    yield _storage(ranks, directory)
    yield _network(ranks)


@dataclass(frozen=True)
class ProcessFacts:
    """The host, versions and GPUs of one process, and the checks that failed there."""

    host: str
    local_rank: int
    versions: dict[str, str]
    gpus: tuple[str, ...]
    failed: tuple[DoctorCheck, ...]

    @classmethod
    def here(cls, world: World, local: Sequence[DoctorCheck]) -> ProcessFacts:
        versions = {"python": platform.python_version()}
        for name in PACKAGES:
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))  # gpu-aware
        failed = tuple(finding for finding in local if finding.status == "fail")
        return cls(socket.gethostname(), world.local_rank, versions, names, failed)


def _versions(facts: Sequence[ProcessFacts]) -> DoctorCheck:
    names = dict.fromkeys(name for each in facts for name in each.versions)
    found = {name: {each.versions.get(name, "not there"): each.host for each in facts} for name in names}
    unequal = [
        f"{name} is " + ", ".join(f"{v} on {host}" for v, host in of.items())
        for name, of in found.items()
        if len(of) > 1
    ]
    if unequal:
        return DoctorCheck("versions", "fail", "; ".join(unequal), "install the same packages on every machine")
    return DoctorCheck("versions", "ok", ", ".join(f"{name} {version}" for name, version in facts[0].versions.items()))


def _gpus(facts: Sequence[ProcessFacts]) -> DoctorCheck:
    without = [rank for rank, each in enumerate(facts) if each.gpus and each.local_rank >= len(each.gpus)]
    kinds = {each.gpus[each.local_rank] if each.local_rank < len(each.gpus) else "none" for each in facts}
    if without:
        detail = f"ranks {', '.join(map(str, without))} have no GPU of their own"
        return DoctorCheck("gpus", "fail", detail, "start as many processes on each machine as it has GPUs")
    if len(kinds) > 1:
        detail = f"they differ: {', '.join(sorted(kinds))}"
        return DoctorCheck("gpus", "warn", detail, "the slowest sets the pace, and 'none' cannot train with the others")
    return DoctorCheck("gpus", "ok", f"one {kinds.pop()} each" if kinds != {"none"} else "none; gloo on the CPUs")


def _clocks(times: Sequence[float]) -> DoctorCheck:
    apart = max(times) - min(times)
    if apart > CLOCK_S:
        return DoctorCheck(
            "clock", "warn", f"they are {apart:.1f} s apart", "synchronise them (chrony, ntpd): logs mislead"
        )
    return DoctorCheck("clock", "ok", f"they agree within {apart:.2g} s")


def _storage(ranks: Ranks, directory: Path) -> DoctorCheck:
    """Return whether a file that rank 0 writes is seen by the others."""
    token = ranks.spread(secrets.token_hex(8), phase="comparing storage")
    probe, error = directory / f".groupwise-doctor-{token}", ""
    try:
        if ranks.leads:
            try:
                probe.write_text(token)
            except OSError as refused:
                error = str(refused)
        ranks.gather(None, phase="comparing storage")
        deadline = time.monotonic() + (0 if ranks.leads else PROBE_S)
        while not (seen := probe.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        blind = [rank for rank, sees in enumerate(ranks.gather(seen, phase="comparing storage")) if not sees]
    finally:
        if ranks.leads:
            probe.unlink(missing_ok=True)
    if not blind:
        return DoctorCheck("shared storage", "ok", f"{directory.resolve()} is the same everywhere")
    detail = error or f"ranks {', '.join(map(str, blind))} do not see what rank 0 writes to {directory.resolve()}"
    remedy = "start from a shared directory: models, configurations and FSDP's checkpoints of whole models need one"
    return DoctorCheck("shared storage", "fail" if error else "warn", detail, remedy)


def _network(ranks: Ranks) -> DoctorCheck:
    """Numbers are added up as in training."""
    numbers = torch.ones(PROBE_BYTES // 4, device=ranks.device)
    ranks.sum(numbers, phase="adding up")
    started = time.monotonic()
    ranks.sum(numbers, phase="adding up")
    wrong = bool((numbers != ranks.size**2).any())
    took = time.monotonic() - started
    detail = f"{PROBE_BYTES >> 20} MiB added up over {ranks.size} ranks in {1000 * took:.0f} ms"
    if wrong:
        return DoctorCheck(
            "network", "fail", f"{detail}, and the sum is wrong", "run NCCL's tests (nccl-tests) on these machines"
        )
    return DoctorCheck("network", "ok", detail)


def _device(here: World) -> torch.device:
    if not torch.cuda.is_available() or here.local_rank >= torch.cuda.device_count():  # gpu-only below: its GPU
        return torch.device("cpu")
    torch.cuda.set_device(here.local_rank)
    return torch.device("cuda", here.local_rank)
