"""`groupwise doctor`: is everything here that a run needs?

Each check gives a finding: `ok`, `warn` (it works, but), `fail` (runs will not work), or `absent` (optional, not
installed); the last three say what to do. Several processes (`groupwise launch CONFIG --doctor`) also compare what they
are and see.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from groupwise.cli.untested import places
from groupwise.config.launch import World, world
from groupwise.errors import ConfigError, GroupwiseError, RankLostError
from groupwise.platform import cores
from groupwise.train.ranks import Ranks, join

# ----------------------------------------------------------------------------------------------------------------------
# What one check of `groupwise doctor` found.
# ----------------------------------------------------------------------------------------------------------------------

Status = Literal["ok", "warn", "fail", "absent"]


@dataclass(frozen=True)
class DoctorCheck:
    """`remedy` is empty where there is nothing to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


REQUIRED = ("transformers", "peft", "datasets", "math_verify")
OPTIONAL = {
    "tensorboard": "for tracking.tensorboard",
    "wandb": "for tracking.wandb",
    "trackio": "for tracking.trackio",
    "mlflow": "for tracking.mlflow",
    "vllm": "for engine: vllm in mode colocate; a server has an environment of its own",
}
REMEDIES = {  # of a check that raised; of a package's: install it
    "torch build": "pip install torch",
    "gpu": "pip install torch",
    "starter": "install the groupwise wheel again: the model is in it",
    "chat template": "install the groupwise wheel again: tokenizer and template are in it",
    "disk": "start from a folder that can be read and written",
}
INSTALL = "pip install --force-reinstall torch --index-url"
CPU_TORCH, CUDA_TORCH = "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/cu130"
DISK_WARN_GIB, DISK_FAIL_GIB = 5.0, 0.5


def examine(*, directory: Path = Path(".")) -> Iterator[DoctorCheck]:
    """Every finding, in the order of the checks; `directory` is where runs would be written. One that raises failed.

    Of several processes each calls this; what rank 0 is given is about all.
    """
    from groupwise.cli.doctor import cluster_findings, host_findings

    found = []
    for finding in chain(_examine_machine(directory=directory), host_findings()):
        found.append(finding)
        yield finding
    if world().size > 1:
        yield from cluster_findings(found, directory=directory)


def _examine_machine(*, directory: Path) -> Iterator[DoctorCheck]:
    checks: list[tuple[str, Callable[[], DoctorCheck]]] = [
        ("python", check_python),
        ("torch", check_torch),
        ("torch build", check_torch_build),
        ("gpu", check_gpu),
        ("gpu code", check_gpu_code),
        *((name, lambda name=name: check_package(name)) for name in REQUIRED),
        ("disk", lambda: check_disk(directory)),
        ("starter", check_starter),
        ("chat template", check_template),
        ("sandbox", check_sandbox),
        *((name, lambda name=name, use=use: check_optional(name, use)) for name, use in OPTIONAL.items()),
    ]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # a doctor does not die of what the patient has
            detail = error.message if isinstance(error, GroupwiseError) else f"{type(error).__name__}: {error}"
            yield DoctorCheck(name, "fail", detail, REMEDIES.get(name, f"pip install {name.replace('_', '-')}"))


def check_python() -> DoctorCheck:
    """Nothing older than the package's `requires-python` gets this far."""
    return DoctorCheck("python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_torch() -> DoctorCheck:
    import torch

    threads, usable = torch.get_num_threads(), cores()
    detail = f"{torch.__version__}, threads: {threads}, cores: {usable}"
    if threads > usable:
        return DoctorCheck("torch", "warn", detail, f"more threads than cores is slow: set OMP_NUM_THREADS={usable}")
    return DoctorCheck("torch", "ok", detail)


def check_torch_build() -> DoctorCheck:
    """Whether the torch that was installed, for CUDA or for CPUs, fits the machine."""
    import torch

    size = f"{installed_bytes(Path(torch.__file__).parent.parent) / 1e9:.1f} GB on disk"
    has_driver = shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None:
        detail = f"{torch.__version__}, for CPUs, {size}"
        if has_driver:
            return DoctorCheck("torch build", "warn", f"{detail}; there is an NVIDIA driver", f"{INSTALL} {CUDA_TORCH}")
        return DoctorCheck("torch build", "ok", detail)
    detail = f"{torch.__version__}, for CUDA {torch.version.cuda}, {size}"
    if not torch.cuda.is_available() and not has_driver:
        return DoctorCheck(
            "torch build",
            "warn",
            f"{detail}; there is no GPU for it, and one for CPUs takes 0.8 GB",
            f"{INSTALL} {CPU_TORCH}",
        )
    return DoctorCheck("torch build", "ok", detail)


def installed_bytes(packages: Path) -> int:
    """Bytes on disk of torch and of what only its CUDA build brings, in a directory of installed packages."""
    folders = [packages / name for name in ("torch", "nvidia", "triton")]
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def check_gpu() -> DoctorCheck:
    import torch

    if torch.cuda.is_available():  # gpu-only: names GPUs and their free memory
        free, total = torch.cuda.mem_get_info()
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return DoctorCheck("gpu", "ok", f"{names}; {free / 2**30:.0f} of {total / 2**30:.0f} GiB free on the first")
    if shutil.which("nvidia-smi"):
        detail = f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU"
        return DoctorCheck("gpu", "warn", detail, "install a torch built for CUDA: https://pytorch.org/get-started")
    return DoctorCheck("gpu", "ok", "none; models run on the CPU, which suits the starter and little else")


def check_gpu_code() -> DoctorCheck:
    """How much of this package only a GPU executes: none of it has ever run."""
    import torch

    found = places()
    detail = (
        f"{sum(place.lines for place in found)} lines in {len(found)} places have never run: nothing here has run on a "
        "GPU; groupwise doctor --untested names them"
    )
    if torch.cuda.is_available() or torch.backends.mps.is_available():  # gpu-only: what to do about it
        return DoctorCheck("gpu code", "warn", detail, "make gpu, in a clone, tries them; please report what it says")
    return DoctorCheck("gpu code", "ok", detail)


def check_package(name: str) -> DoctorCheck:
    importlib.import_module(name)
    return DoctorCheck(name, "ok", _version(name))


def check_optional(name: str, use: str) -> DoctorCheck:
    if importlib.util.find_spec(name) is None:
        extra = name if name == "vllm" else f"'groupwise[{name}]'"
        return DoctorCheck(name, "absent", f"not installed; only needed {use}", f"pip install {extra}")
    return DoctorCheck(name, "ok", _version(name))


def check_disk(directory: Path) -> DoctorCheck:
    free = shutil.disk_usage(directory).free / 2**30
    detail = f"{free:.1f} GiB free in {directory.resolve()}"
    if not os.access(directory, os.W_OK):
        return DoctorCheck("disk", "fail", f"{directory.resolve()} cannot be written", "start from another folder")
    if free < DISK_FAIL_GIB:
        return DoctorCheck("disk", "fail", detail, "free some space: a run writes adapters and rollouts")
    if free < DISK_WARN_GIB:
        return DoctorCheck("disk", "warn", detail, "a long run with a large model may need more")
    return DoctorCheck("disk", "ok", detail)


def check_starter() -> DoctorCheck:
    """The embedded model is there, and the packed forward agrees with its own."""
    from groupwise.config.run import STARTER
    from groupwise.model.load import load_model, share_weights
    from groupwise.model.packed_check import packed_forward_gap, packed_tolerance

    model = share_weights(load_model(STARTER).model)
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    try:
        gap, tolerance = packed_forward_gap(model), packed_tolerance(model)
    except Exception as error:  # of another torch or transformers
        fails = f"{parameters}; packed forward fails: {type(error).__name__}: {error}"
        return DoctorCheck("starter", "fail", fails, "try another torch or transformers")
    detail = f"{parameters}; packed forward within {gap:.1g} nats"
    if not gap <= tolerance:
        return DoctorCheck(
            "starter", "fail", detail, f"the tolerance is {tolerance:g}: try another torch or transformers"
        )
    return DoctorCheck("starter", "ok", detail)


def check_template() -> DoctorCheck:
    """The starter's chat template: a reply goes to ids and back, and training marks exactly the reply."""
    from transformers import AutoTokenizer

    from groupwise.config.run import STARTER_DIR
    from groupwise.model.chat import decode, encode_completion, encode_prompt, encode_supervised
    from groupwise.types import Message, Prompt

    reply = "185 <think> caf\u00e9"
    tokenizer = AutoTokenizer.from_pretrained(STARTER_DIR)
    asked = Message(role="user", content="What is 47 + 138?")
    prompt = encode_prompt(Prompt(id="doctor", messages=(asked,)), tokenizer)
    ids = encode_completion(prompt, reply, tokenizer)
    sample = encode_supervised([asked, Message(role="assistant", content=reply)], tokenizer)
    trained = [token for token, said in zip(sample.completion_ids, sample.mask, strict=True) if said]
    for what, back in (("a completion", decode(ids, tokenizer)), ("training data", decode(trained, tokenizer))):
        if back != reply:
            detail = f"{reply!r} as {what} came back as {back!r}"
            return DoctorCheck("chat template", "fail", detail, "try another version of transformers or tokenizers")
    return DoctorCheck("chat template", "ok", f"a reply of {len(ids)} tokens goes there and back")


def check_sandbox() -> DoctorCheck:
    """What untrusted code (rewards that run programs) is kept apart by."""
    from groupwise.rewards.sandbox import isolation

    level = isolation()
    if not level.namespaces:
        advice = "allow user namespaces, or run code rewards with require_isolation: false"
    elif not level.filtered:
        advice = "use a kernel with seccomp filters, on x86_64 or aarch64, or run nothing that may be malicious"
    else:
        advice = ""
    return DoctorCheck("sandbox", "warn" if advice else "ok", str(level), advice)


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


# ----------------------------------------------------------------------------------------------------------------------
# Can these processes train together? What `groupwise doctor` looks at besides one machine.
#
#     one process       host_findings: what several would need of this machine
#     under torchrun    cluster_findings: they meet, and compare what each of them is and sees
#
# `groupwise launch CONFIG --doctor` starts the processes of a run, which do this instead of training.
# ----------------------------------------------------------------------------------------------------------------------

PORT = 29500  # of torchrun and of `launcher.port`, unless they say another
PACKAGES = ("groupwise", "torch", "transformers", "peft", "safetensors")
CLOCK_S = 1.0  # by which clocks may differ
PROBE_S = 5.0  # after which a file of another machine is to be seen
PROBE_BYTES = 16 << 20  # that are added up to see how fast that goes
DEADLINE_S = 60.0


def host_findings() -> Iterator[DoctorCheck]:
    """What other machines would meet here: torch.distributed, the name, the port."""
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
    """Every process calls this, with what it found on its own machine; what rank 0 is given is about all of them."""
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
    """What one process is and has."""

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
    """Whether a file that rank 0 writes is seen by the others."""
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
