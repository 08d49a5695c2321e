"""The configuration's `launcher` section: how `groupwise launch` starts the processes that train together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from groupwise.config.section import Section, Text, Texts, conflict

OF_SLURM = ("partition", "account", "time", "options", "setup")

OF_RAY = ("engines", "cpus", "gpus", "reward_cpus", "env_workers", "env_cpus", "restarts", "start_timeout_s")


class LauncherConfig(Section):
    """torchrun on the machines themselves, a Slurm job that runs it, or actors of Ray. In YAML a plain string is
    `{kind: <string>}`."""

    kind: Literal["torchrun", "slurm", "ray"] = "torchrun"
    """`torchrun` starts processes here (and, with several nodes, on each of them by hand), `slurm` asks for machines,
    `ray` makes learners, engines, reward and environment workers actors of a cluster and replaces those that die."""
    nodes: int = Field(default=1, ge=1, le=4096)
    """Machines; each runs `train.devices` / `nodes` processes."""
    address: Text | None = None
    """The name of the first machine, where the others find it; Slurm knows it. Of Ray: its cluster's; null is
    RAY_ADDRESS or the one that runs here, and `local` starts one that ends with the run."""
    port: int = Field(default=29500, ge=1, le=65535)
    """The port there."""
    partition: Text | None = None
    """Slurm's partition; null is its default."""
    account: Text | None = None
    """The account that pays for the job."""
    time: Annotated[Text, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None
    """The longest that the job may take, as Slurm writes it: `12:00:00`."""
    options: Texts = ()
    """Further options of sbatch, such as `--exclusive`."""
    setup: Texts = ()
    """Lines of shell that come first on every machine, such as `module load cuda`."""

    engines: int = Field(default=1, ge=1, le=1024)
    """Engines, each an actor with the whole model, which share a step's groups."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each learner and each engine, and as many threads of torch."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs for each of them; null is one, or none with device cpu or where the cluster has none. 0.5 shares one."""
    reward_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for each of the `scoring.workers`."""
    env_workers: int = Field(default=1, ge=0, le=1024)
    """Actors that hold environments (`env.environment` with reset and step); 0 leaves them in the learner."""
    env_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for each of them."""
    restarts: int = Field(default=3, ge=0)
    """How often learners that died are started again, and an engine or a worker that has not answered once."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for the cluster to have room, and for an engine to load the model or a version."""

    @model_validator(mode="after")
    def _acts(self) -> LauncherConfig:
        if self.kind == "slurm" and self.address is not None:
            raise conflict("address", f"{self.address!r} does nothing with kind slurm, which finds the first machine")
        for kind, keys in (("slurm", OF_SLURM), ("ray", OF_RAY)):
            for key in keys:
                if self.kind != kind and getattr(self, key) != type(self).model_fields[key].default:
                    raise conflict(key, f"acts with kind {kind} only")
        if self.kind == "ray":
            for key in ("nodes", "port"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise conflict(key, "does nothing with kind ray, which knows its machines")
        if self.kind == "torchrun" and (self.nodes > 1) != (self.address is not None):
            raise conflict("address", f"{self.address!r} does not go with nodes = {self.nodes}: several need it")
        if wrong := next((option for option in self.options if not option.startswith("-")), None):
            raise conflict("options", f"{wrong!r} is no option of sbatch; they begin with -")
        return self


def _launcher(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Launcher = Annotated[LauncherConfig, BeforeValidator(_launcher)]
