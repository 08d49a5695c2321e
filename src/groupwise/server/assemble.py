"""Assembles the parts of a server from its configuration: the model, the engine, the policies, the worker's
supervisor."""

from __future__ import annotations

from dataclasses import replace

from transformers.utils.logging import disable_progress_bar

from groupwise.config.serve import ServeConfig
from groupwise.engine.local import LocalEngine
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel, load_configured
from groupwise.sampler import LiveEngine
from groupwise.server.admin import HealthParts, gauges
from groupwise.server.errors import private_paths
from groupwise.server.feedback import AnswerLog
from groupwise.server.gate import Gatekeeper
from groupwise.server.learn import FeedbackTrainer
from groupwise.server.metrics import Recorder
from groupwise.server.more_routes import more_routes
from groupwise.server.policies import RecordedPolicies, check_free_name
from groupwise.server.quotas import Quotas
from groupwise.server.raters import Raters
from groupwise.server.reader import Reader, TextModel
from groupwise.server.sampling import Admissions
from groupwise.server.state import Parts, Server, select
from groupwise.server.storage import StorageProbe
from groupwise.server.supervisor import Supervisor, worker_command
from groupwise.server.tenants import Tenants
from groupwise.server.usage import FILE as USAGE
from groupwise.server.usage import KeyUsage
from groupwise.server.webhooks import Webhooks
from groupwise.store import files
from groupwise.store.adapters import AdapterStore
from groupwise.store.cuda_ipc import FILE, offer_weights
from groupwise.store.feedback import FeedbackLog
from groupwise.store.files import Provenance
from groupwise.store.keys import KeyFile
from groupwise.store.ledger import Ledger
from groupwise.store.locate import Located
from groupwise.store.mapped_weights import map_weights
from groupwise.store.rundir import IMAGES
from groupwise.store.tenants import OWNER
from groupwise.tasks.dialects.responses import ResponseStore
from groupwise.types import PolicyVersion

RESERVED = 8  # one row in so many is kept back for interactive requests
PACED_ROWS = 16  # of batches, on a CPU, while interactive requests run


def assemble(config: ServeConfig, ledger: Ledger, store: AdapterStore, recorder: Recorder) -> Server:
    """Load the model and put the parts together; nothing runs yet. For a thread: this takes its time. `ledger` is of
    everything: the worker and its supervisor see all jobs, and the owner's parts what is the owner's.

    Raises ModelError if the model cannot be loaded or the engine cannot run it, ConfigError for a wrong webhook,
    EngineError if vLLM does not come up or is not of this model.
    """
    state_dir, owners = config.state_dir.absolute(), ledger.of(OWNER)
    webhooks = None
    if config.webhook_url is not None:
        record = state_dir / "webhooks.json"
        webhooks = Webhooks(owners, store, url=config.webhook_url, record=record, secret=config.webhook_secret)
    disable_progress_bar()  # of loading the weights; the server says itself what it does
    base = load_configured(config)
    map_weights(base, state_dir)  # the worker maps the same file
    weights = state_dir / FILE  # or, on a GPU, opens the same memory
    engine = open_engine(config, base)
    if (vision := vision_of(base.model)) is not None:
        vision.keep_in(state_dir / IMAGES)
    policies = RecordedPolicies(config, store, engine, base=base, recorder=recorder)
    command = worker_command(
        state_dir=state_dir,
        model=config.model,
        dtype=config.dtype,
        quantization=config.quantization,
        cast_lm_head=config.cast_lm_head,
        device=config.device,
        threads=config.worker_threads,
        weights=weights if offer_weights(base, weights) else None,
    )
    supervisor = Supervisor(
        ledger=ledger,
        policies=policies,
        command=command,
        log_path=state_dir / "logs" / "worker.log",
        webhooks=webhooks,
    )
    parts = Parts(
        config=config,
        base=base,
        engine=engine,
        store=store,
        ledger=owners,
        policies=policies,
        recorder=recorder,
        feedback=FeedbackLog(owners),
        quotas=Quotas(KeyFile(state_dir), OWNER, state_dir),
    )
    server = server_over(parts, reader=Reader(TextModel.of(base), config), supervisor=supervisor)
    tenants = Tenants(server, ledger, more=more_routes(config))
    supervisor.tenants = tenants
    server = replace(server, tenants=tenants)
    health = replace(select(HealthParts, server), ledger=ledger)
    recorder.watch(lambda: gauges(health))
    recorder.watch(server.usage.samples)
    supervisor.gate = server.gate
    return server


def server_over(parts: Parts, *, reader: Reader, supervisor: Supervisor) -> Server:
    """Return the server over its parts, with what makes jobs of feedback and judges versions where the configuration
    has them.

    Raises ConfigError, LoadError, DataError, ChatError or ContextLengthError: rewards cannot be loaded, or held-out
    prompts not be used.
    """
    config, answers = parts.config, AnswerLog(parts.ledger)
    state_dir = config.state_dir.absolute()
    usage = KeyUsage(state_dir / USAGE)
    gate = None if config.gate is None else Gatekeeper(parts, config.gate)
    held_out = frozenset[tuple[int, ...]]() if gate is None else gate.held_out
    return Server(
        **vars(parts),
        reader=reader,
        supervisor=supervisor,
        usage=usage,
        storage=StorageProbe(config.state_dir),
        admissions=Admissions(
            config=config,
            base=parts.base,
            engine=parts.engine,
            policies=parts.policies,
            recorder=parts.recorder,
            answers=answers,
            usage=usage,
            gate=gate,
        ),
        responses=ResponseStore(),
        answers=answers,
        paths=private_paths(config.state_dir, config.model),
        trainer=None if config.learn is None else FeedbackTrainer(parts, config.learn, held_out=held_out),
        gate=gate,
        raters=None if config.raters is None else Raters(parts, config.raters),
    )


def begin_with(server: Server, adapter: Located, *, always: bool) -> PolicyVersion:
    """Copy an adapter into the server's store and make it active, before the policies start. Returns its version here.

    One that the store has already is made active only if `always`: else what was active when the server ended, such as
    a version that a job made of it, stays so.

    Raises AdapterError if it is of another base model, cannot be used, or has the name of the served model.
    """
    base, version = server.base, adapter.version
    adapter.check_base(base.hash)
    check_free_name(version.name, served_name=server.config.served_name)
    with adapter.held():
        info = Provenance(base_model=base.name, base_hash=base.hash, quantization=base.quantization)
        if (adapter.directory / files.SIDECAR).exists():
            info = files.read_info(adapter.directory, version=version)
        here, new = server.store.adopt(adapter.directory, version, info=info)
    if new or always:
        server.store.activate(here)
    return here


def open_engine(config: ServeConfig, base: LoadedModel) -> LiveEngine:
    """Return the engine that samples. Raises EngineError, ConfigError."""
    if config.engine == "vllm":
        from groupwise.engine.vllm.live import open_live

        log = config.vllm.log or str(config.state_dir.absolute() / "logs" / "vllm.log")
        vllm = config.vllm.model_copy(update={"log": log})
        return open_live(
            vllm,
            base,
            model=config.model,
            device=config.device,
            rows=config.batch_rows,
            cast_lm_head=config.cast_lm_head,
        )
    return LocalEngine(
        base,
        max_rows=config.batch_rows,
        reserved_rows=config.batch_rows // RESERVED,
        paced_rows=config.paced_rows or (PACED_ROWS if base.device.type == "cpu" else None),  # gpu-aware
        prefix_cache_mb=config.prefix_cache_mb,
        draft_tokens=config.draft_tokens,
        record_routing=True,
        cache_bytes=None if config.cache_gb is None else int(config.cache_gb * (1 << 30)),
    )
