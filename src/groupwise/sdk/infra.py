"""`setup_infra`: opens trainer, reference and sampler for a loop of your own, from one configuration.

    with setup_infra(config, needs_reference=True, needs_inference=True) as infra:
        infra.policy        TrainingClient: forward, forward_backward, optim_step, save_state
        infra.reference     ReferenceClient, or None
        infra.sampler       DeploymentSampler, or None
        infra.weights       WeightSyncer: from the policy to the sampler, and to the disk

Parts are opened at the same time, but for what the process has one of (the default type, the random generator, both set
while a model is loaded). What is wrong with several is said of all. What runs under the name that is asked for is
attached to; closing closes what was opened, and not what was attached to, nor a deployment that is to live on.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.model.load import LoadedModel, load_model
from groupwise.sdk.concurrency import AdaptiveConcurrency
from groupwise.sdk.config import LikeLoopConfig, LoopConfig, WeightSyncScope, loop_config
from groupwise.sdk.deployment import Deployment, attach_deployment, find_deployment
from groupwise.sdk.opened_once import OpenedOnce
from groupwise.sdk.profiles import HardwareProfile, Machine, choose_profile, find_profile
from groupwise.sdk.sampler import DeploymentSampler
from groupwise.sdk.sections import SERVICE, SERVICE_ONLY, idle_notes, require_tokenizer
from groupwise.sdk.trainer import ReferenceClient, TrainingClient, TrainingService, what_trains
from groupwise.sdk.weight_sync import WeightSyncer
from groupwise.store.adapters import AdapterStore
from groupwise.store.rundir import owned
from groupwise.train.together import BUILDING

T = TypeVar("T")
Client = TypeVar("Client", TrainingClient, ReferenceClient)

IDLE = {
    name: reason
    for name, reason in SERVICE_ONLY.items()
    if name.partition(".")[2]
    not in (
        "training_shape_id",
        "ref_training_shape_id",
        "weight_sync_scope",
        "deployment_id",
        "store",
        "sample_timeout",
        "weight_sync_before_training",
    )
}
"""Fields of the service's that change nothing here, and why."""
FULL = 4  # requests under way at most, for each row of the engine; fewer while more than half of them wait


class InfraError(GroupwiseError):
    """Several parts could not be opened; `errors` are theirs. What had been opened is closed again."""

    exit_code = 3

    def __init__(self, errors: Mapping[str, BaseException]):
        self.errors = dict(errors)
        said = "".join(f"\n  {part}: {type(e).__name__}: {e}" for part, e in errors.items())
        super().__init__(f"{len(errors)} parts could not be opened:{said}")


@dataclass(frozen=True, kw_only=True)
class Infra:
    """The clients and servers that a training loop uses. `boot_metrics` are seconds. Use it in a `with`, or close
    it."""

    policy: TrainingClient
    reference: ReferenceClient | None
    deployment: Deployment | None
    sampler: DeploymentSampler | None
    weights: WeightSyncer
    profile: HardwareProfile
    ref_profile: HardwareProfile | None
    max_seq_len: int
    boot_metrics: Mapping[str, float]
    closeables: tuple[Callable[[], None], ...] = field(repr=False)

    @property
    def service(self) -> TrainingService:
        """Makes more policies over the same base."""
        return self.policy.service

    @property
    def policy_job_id(self) -> str:
        return self.policy.name

    @property
    def training_shape_id(self) -> str:
        return self.profile.name

    @property
    def ref_training_shape_id(self) -> str | None:
        return None if self.ref_profile is None else self.ref_profile.name

    @property
    def deployment_id(self) -> str | None:
        return None if self.deployment is None else self.deployment.name

    def close(self) -> None:
        """Close what was opened, the last first. Closing again does nothing."""
        for close in reversed(self.closeables):
            close()

    def __enter__(self) -> Infra:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _LogPaths:
    """Keeps the log_paths in use. Another process must not train in one of them: it would wind versions back and
    replace states. In this process, clients that attach to a trainer share its log_path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Path, tuple[ExitStack, int]] = {}  # the lock, and how many hold it

    def hold(self, path: Path) -> Callable[[], None]:
        """Make the directory and keep other processes out until what is returned is called. Raises StorageError."""
        key = path.resolve()
        with self._lock:
            lock, count = self._held.get(key, (ExitStack(), 0))
            if not count:
                lock.enter_context(owned(key))
            self._held[key] = (lock, count + 1)
        once = ExitStack()
        once.callback(self._let_go, key)
        return once.close

    def _let_go(self, key: Path) -> None:
        with self._lock:
            lock, count = self._held.pop(key)
            if count > 1:
                self._held[key] = (lock, count - 1)
            else:
                lock.close()


_LOG_PATHS = _LogPaths()
_POLICIES: OpenedOnce[TrainingClient] = OpenedOnce()
_REFERENCES: OpenedOnce[ReferenceClient] = OpenedOnce()


def setup_infra(config: LoopConfig | LikeLoopConfig, *, needs_reference: bool, needs_inference: bool) -> Infra:
    """Open, or attach to, everything a loop needs; `config` is only read.

    `needs_reference`: with an adapter the reference is the policy with its adapter off, unless `ref_training_shape_id`
    or `reference_job_id` asks for one of its own. Without an adapter there is none without these, and a warning says
    so.

    Raises:
        StorageError: another process trains in `log_path`, or it cannot be written.
        ConfigError: `deployment.tokenizer_model` is not set (a ValueError), a profile that does not exist or fit, or
            what is attached to is another.
        ModelError: the model cannot be loaded.
        InfraError: several parts failed.
    """
    opening = _Opening(loop_config(config), needs_reference=needs_reference, needs_inference=needs_inference)
    return opening.open()


class _Opening:
    """The state of one call of `setup_infra`."""

    def __init__(self, config: LoopConfig, *, needs_reference: bool, needs_inference: bool):
        self.config, self.needs_reference, self.needs_inference = config, needs_reference, needs_inference
        if needs_inference:
            require_tokenizer(config.deployment.tokenizer_model)
        for note in idle_notes(config, IDLE):
            warnings.warn(note, stacklevel=3)
        machine, infra, lora = Machine.here(), config.infra, config.lora_rank > 0
        name, reference = infra.training_shape_id, infra.ref_training_shape_id
        own = choose_profile(lora=lora, machine=machine)
        self.profile = own if name is None or _is_shape(name, own) else find_profile(name, machine=machine)
        if not self.profile.trains_with(lora=lora):
            what = "an adapter" if lora else "all parameters (lora_rank 0)"
            hint = f"this machine: {choose_profile(lora=lora, machine=machine).name}"
            raise ConfigError(f"profile {self.profile.name} is not for training {what}", hint=hint)
        self.ref_profile = None
        if needs_reference and (reference or config.reference_job_id):
            option = "ref_training_shape_id"
            self.ref_profile = self.profile
            if reference and not _is_shape(reference, self.profile, option=option):
                self.ref_profile = find_profile(reference, machine=machine, option=option)
        self._seconds: dict[str, float] = {}
        self._closeables: list[Callable[[], None]] = []
        self._lives_on: list[Callable[[], None]] = []  # closed only if something else cannot be opened
        self._base = self._running_base()
        self._failed: Exception | None = None
        self._lock = threading.Lock()

    def open(self) -> Infra:
        started = time.monotonic()
        self._closeables.append(_LOG_PATHS.hold(Path(self.config.log_path)))
        parts: dict[str, Callable[[], Any]] = {"policy": self._policy}
        if self.needs_inference:
            parts["deployment"] = self._deployment
        if self.ref_profile is not None:
            parts["reference"] = self._reference
        try:
            opened = self._all(parts)
            return self._wired(**opened, seconds=time.monotonic() - started)
        except BaseException:
            for close in reversed([*self._closeables, *self._lives_on]):
                close()
            raise

    def _all(self, parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Return all parts, opened at the same time. Raises once all are done: one error as it is, several as one; the
        same one, met by several, is one."""
        threads = torch.get_num_threads()  # which a new thread would not have by itself
        with ThreadPoolExecutor(len(parts), "groupwise-setup", torch.set_num_threads, (threads,)) as pool:
            opening = {part: pool.submit(self._timed, part, open_it) for part, open_it in parts.items()}
        errors = {part: error for part, each in opening.items() if (error := each.exception()) is not None}
        distinct = {id(error): part for part, error in errors.items()}
        if len(distinct) > 1:
            raise InfraError({part: errors[part] for part in distinct.values()})
        return {part: each.result() for part, each in opening.items()}

    def _timed(self, part: str, open_it: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            return open_it()
        finally:
            self._seconds[part] = time.monotonic() - started

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _policy(self) -> TrainingClient:
        config, profile, lora = self.config, self.profile, None
        if config.lora_rank:
            lora = LoraSpec.model_validate(
                {"rank": config.lora_rank, "alpha": config.lora_alpha, "targets": config.lora_targets}
            )

        def open_it() -> TrainingClient:
            service = TrainingService(
                self._model(),
                micro_tokens=profile.micro_tokens,
                gradient_checkpointing=profile.gradient_checkpointing,
                autocast=torch.bfloat16 if profile.mixed_precision else None,
            )
            return _client(
                service,
                name=config.policy_job_id or "policy",
                lora=lora,
                parameters=config.parameters,
                seed=config.seed,
                temperature=config.temperature,
            )

        policy = self._attached(_POLICIES, config.policy_job_id, open_it)
        runs = _described(policy.service.base.name, policy.trains, policy.temperature)
        asked = _described(config.base_model, what_trains(lora, config.parameters), config.temperature)
        _check_alike("policy_job_id", config.policy_job_id, runs=runs, asked=asked)
        return policy

    def _reference(self) -> ReferenceClient:
        config, profile = self.config, self.ref_profile
        assert profile is not None

        def open_it() -> ReferenceClient:
            service = TrainingService(_load(config.base_model, profile), micro_tokens=profile.micro_tokens)
            # the base of a policy that is never trained
            policy = _client(service, lora=LoraSpec(rank=1), temperature=config.temperature)
            return policy.create_base_reference()

        reference = self._attached(_REFERENCES, config.reference_job_id, open_it)
        runs = _described(reference.service.base.name, "no adapter", reference.temperature)
        asked = _described(config.base_model, "no adapter", config.temperature)
        _check_alike("reference_job_id", config.reference_job_id, runs=runs, asked=asked)
        return reference

    def _deployment(self) -> Deployment:
        deploy, config = self.config.deployment, self.config
        name, store = deploy.deployment_id or "policy", Path(config.log_path) / "adapters"
        lives_on = deploy.weight_sync_scope == WeightSyncScope.PER_DEPLOYMENT
        if lives_on:
            store = Path(deploy.store or f"deployments/{name}")

        def open_it() -> Deployment:
            engine = LocalEngine(self._model(), max_rows=self.profile.batch_rows, record_routing=True)
            try:
                return Deployment(name, base=self._model(), engine=engine, store=AdapterStore(store))
            except BaseException:
                engine.close()
                raise

        if lives_on:
            deployment, is_new = attach_deployment(name, open_it, model=config.base_model)
            if is_new:
                self._lives_on.append(deployment.close)
            return deployment
        opened = open_it()
        self._closeables.append(opened.close)
        return opened

    def _model(self) -> LoadedModel:
        """Return the base model of trainer and engine, loaded once, or failed once."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self._base is None:
                try:
                    self._base = _load(self.config.base_model, self.profile)
                except Exception as error:
                    self._failed = error
                    raise
            return self._base

    def _running_base(self) -> LoadedModel | None:
        """Return the base of what will be attached to, if it is the one to load otherwise."""
        policy = _POLICIES.find(self.config.policy_job_id or "")
        deploy = self.config.deployment
        lives_on = deploy.weight_sync_scope == WeightSyncScope.PER_DEPLOYMENT  # another's engine keeps its base
        engine = find_deployment(deploy.deployment_id or "") if lives_on else None
        for base in [each.base for each in (policy and policy.service, engine) if each]:
            right = base.name == self.config.base_model and base.device.type == self.profile.device
            if right and base.model.dtype == getattr(torch, self.profile.dtype):
                return base
        return None

    def _attached(self, running: OpenedOnce[Client], name: str | None, open_it: Callable[[], Client]) -> Client:
        """Return what runs under `name`; without a name, or if nothing does, it is opened, and closed with the rest."""
        client, is_new = (open_it(), True) if name is None else running.attach(name, open_it)
        if is_new:
            self._closeables.append(client.service.close)
        if is_new and name is not None:
            self._closeables.append(lambda: running.forget(name, client))
        return client

    # -- putting them together -----------------------------------------------------------------------------------------

    def _wired(
        self,
        *,
        policy: TrainingClient,
        deployment: Deployment | None = None,
        reference: ReferenceClient | None = None,
        seconds: float,
    ) -> Infra:
        config = self.config
        longest = min(config.max_seq_len or self.profile.max_seq_len, policy.service.base.context_length)
        return Infra(
            policy=policy,
            reference=reference or self._shared_reference(policy),
            deployment=deployment,
            sampler=None if deployment is None else self._sampler(deployment, longest),
            weights=WeightSyncer(
                policy,
                deployment,
                config.weight_sync,
                log_path=config.log_path,
                rewinds=config.deployment.weight_sync_scope == WeightSyncScope.PER_TRAINER,
            ),
            profile=self.profile,
            ref_profile=self.ref_profile,
            max_seq_len=longest,
            boot_metrics={**{f"{part}_s": taken for part, taken in self._seconds.items()}, "total_s": seconds},
            closeables=tuple(self._closeables),
        )

    def _sampler(self, deployment: Deployment, longest: int) -> DeploymentSampler:
        most = FULL * self.profile.batch_rows
        return DeploymentSampler(
            deployment,
            tokenizer_model=self.config.deployment.tokenizer_model,
            tokenizer_revision=self.config.deployment.tokenizer_revision,
            max_seq_len=longest,
            temperature=self.config.temperature,
            timeout_s=self.config.deployment.sample_timeout,
            seed=self.config.seed,
            concurrency=AdaptiveConcurrency(initial=most, maximum=most, target=FULL - 2),
        )

    def _shared_reference(self, policy: TrainingClient) -> ReferenceClient | None:
        if not self.needs_reference:
            return None
        if policy.learner.lora is not None:
            return policy.create_base_reference()
        warnings.warn(
            "all parameters are trained, and neither infra.ref_training_shape_id nor reference_job_id is set: no "
            "reference is provisioned",
            stacklevel=4,
        )
        return None


def _is_shape(name: str, profile: HardwareProfile, *, option: str = "training_shape_id") -> bool:
    """Return whether this is the name of a training shape of the service's, for which `profile` is taken; says so."""
    if name.startswith(SERVICE):
        what = f"infra.{option}={name!r} is a shape of the service's; here it is the profile {profile.name}"
        warnings.warn(what, stacklevel=4)
    return name.startswith(SERVICE)


def _described(base: str, trains: str, temperature: float) -> str:
    return f"over {base} with {trains}, at temperature {float(temperature)}"


def _check_alike(option: str, name: str | None, *, runs: str, asked: str) -> None:
    """Raise ConfigError where what is attached to is another than is asked for."""
    if runs != asked:
        raise ConfigError(
            f"{option} {name!r} runs {runs}; asked for is one {asked}",
            hint=f"choose another {option}, or close what runs under it",
        )


def _client(service: TrainingService, **options: Any) -> TrainingClient:
    """Return a client of a service that is closed if there is none."""
    try:
        return service.create_training_client(**options)
    except BaseException:
        service.close()
        raise


def _load(name: str, profile: HardwareProfile) -> LoadedModel:
    with BUILDING:
        return load_model(name, device=profile.device, dtype=profile.dtype)
