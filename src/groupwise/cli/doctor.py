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
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from groupwise.cli.doctor_check import DoctorCheck
from groupwise.cli.untested import places
from groupwise.config.world import world
from groupwise.errors import GroupwiseError
from groupwise.platform import cores

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
    """Yield every finding, in the order of the checks; `directory` is where runs would be written. One that raises
    failed.

    Of several processes each calls this; what rank 0 is given is about all.
    """
    from groupwise.cli.doctor_cluster import cluster_findings, host_findings

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
    """Return whether the torch that was installed, for CUDA or for CPUs, fits the machine."""
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
    """Return bytes on disk of torch and of what only its CUDA build brings, in a directory of installed packages."""
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
    """Return how much of this package only a GPU executes: none of it has ever run."""
    import torch

    found = places()
    detail = (
        f"{sum(place.lines for place in found)} lines in {len(found)} places that only a GPU executes have never run; "
        "groupwise doctor --untested names them"
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
    """Check that the embedded model is there, and that the packed forward agrees with its own."""
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
    """Return the starter's chat template: a reply goes to ids and back, and training marks exactly the reply."""
    from transformers import AutoTokenizer

    from groupwise.config.run import PACKAGED, STARTER
    from groupwise.model.chat import decode, encode_completion, encode_prompt
    from groupwise.model.supervised import encode_supervised
    from groupwise.types import Message, Prompt

    reply = "185 <think> caf\u00e9"
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED[STARTER])
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
    """Return the findings about the isolation of untrusted code (rewards that run programs)."""
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
