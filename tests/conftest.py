"""Tiny random models in which attention matters, as fixtures for everything that runs a model. One torch thread, or
TEST_THREADS."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers
from _pytest.nodeid import coerce_node_id
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
)
from xdist.remote import Producer
from xdist.scheduler.loadgroup import LoadGroupScheduling

import wording
from cli_project import Project, save_model
from command_tree import build_once
from exact_norms import with_exact_norms
from groupwise import platform
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel, load_model, wrap_model
from groupwise.types import Sample
from model_families import family_config
from seed_page import Live, serving
from slow_cases import slow_but
from threads import THREADS
from tiny_tokenizer import starter_tokenizer

gc.disable()  # until all tests are collected
torch.set_num_threads(int(THREADS))
build_once()

# The suite draws the same examples each time and does not time them; `--hypothesis-profile=random --hypothesis-seed=N`
# draws others, and twice as many.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("quick")

ARCHITECTURES = ("qwen3", "llama", "gemma3", "gemma2", "gpt2")
SLOW = Path(__file__).parent / "slow"
MOST_GROWN = 256 << 20  # bytes by which a process of the suite grows until all of it is looked through
PACKED_FROM = {"gemma2": "5.23"}  # the first transformers with which a family runs packed, where older ones are taken
MakeBase = Callable[..., LoadedModel]


def pytest_configure(config: pytest.Config) -> None:
    """HTTP clients of tests that are not slow, and of what they start, trust one authority, which has signed nothing:
    to read the system's certificates takes 25 ms, and a thousand clients are made that only talk to this machine."""
    if wording.WRITES:  # a room's words are of its long tests too
        config.option.markexpr = config.option.markexpr.replace(" and not long", "")
    if not _asks_for_slow(config):
        os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is in tests/slow is slow: where no slow test is asked for it is not read, which would import what it needs
    in each process of the suite."""
    return True if collection_path == SLOW and not _asks_for_slow(config) else None


def _asks_for_slow(config: pytest.Config) -> bool:
    return "not slow" not in config.option.markexpr


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one `xdist_group` run in one process: the group is the end of their names. pytest-xdist 3.8 writes it to
    where pytest 9.2 does not read it. They are first, as the last of the groups would keep one process busy when the
    others have nothing left to do. Cases of a family that needs a newer transformers to run packed are skipped."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    for item in items:
        if named := getattr(item, "_nodeid", None):
            item._id = coerce_node_id(named)
        for case in getattr(getattr(item, "callspec", None), "params", {}).values():
            first = PACKED_FROM.get(case) if isinstance(case, str) else None
            if first is not None and Version(transformers.__version__) < Version(first):
                item.add_marker(pytest.mark.skip(reason=f"{case} runs packed from transformers {first} on"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer | None) -> LoadGroupScheduling:
    """Give the tests of a file to one process, as `ByFile` does."""
    return ByFile(config, log)


class ByFile(LoadGroupScheduling):
    """Runs the tests of a file, where they are of no group, in one process: what a module's fixtures start and what
    its tests import is started and imported once, and not by each process of the suite."""

    def _split_scope(self, nodeid: str) -> str:
        group = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if group == nodeid else group


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The words of refusals are kept by test."""
    wording.begin(item)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """`make wording` writes them, once all processes are done."""
    wording.begin(None)
    if wording.WRITES and not hasattr(session.config, "workerinput"):
        asked = session.config.option
        some = asked.keyword or any("::" in str(each) for each in asked.file_or_dir)
        wording.gather(of="some" if some else "files" if asked.file_or_dir else "all")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and thousands of tests stay until the end: no collection of garbage looks through them while they are
    made, nor again later, which would take half a second, as each job makes one. What imports leave behind, 130,000
    objects, stays too, as finding it takes a second of each process."""
    gc.freeze()
    gc.enable()


_had = [0]  # bytes that this process had when all of it was looked through last


@pytest.fixture(scope="module", autouse=True)
def _settled() -> Iterator[None]:
    """Garbage is looked for among what the tests of one file have made, and not among what all files before it have
    left: that took a second each time, and a third of the suite's. Of that, too, once the process has grown by much:
    what was in use then may be garbage now."""
    yield
    if (has := platform.resident_bytes(os.getpid())) > _had[0] + MOST_GROWN:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if has > _had[0] + MOST_GROWN:
        _had[0] = platform.resident_bytes(os.getpid())


def tiny_config(architecture: str, context: int, **options):
    vocab, eos = len(starter_tokenizer()), starter_tokenizer().eos_token_id
    return family_config(architecture, vocab=vocab, eos=eos, context=context, **options)


def tiny_weights(architecture: str, context: int, seed: int, **options):
    """A random model in float64; `options` are of the configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(architecture, context, **options)).double()
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # large enough that who attends to whom changes every logit
                parameter.data.normal_(0.0, 2.0 * min(parameter.shape[-2:]) ** -0.5)
            else:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        if "gemma" in architecture:  # which scales its embeddings up: without this a token predicts itself
            model.get_input_embeddings().weight.data.mul_(0.4)
    return with_exact_norms(model)


_weights = functools.lru_cache(tiny_weights)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return starter_tokenizer()


@pytest.fixture(params=slow_but(set(ARCHITECTURES) - {"llama"}, of=ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_base() -> MakeBase:
    """`make_base("qwen3", dtype=torch.float32, context=64)`: a fresh copy of the same random model each time. The
    families of `model_families` also take options of their configuration."""

    def make(
        architecture: str = "qwen3",
        *,
        dtype: torch.dtype = torch.float64,
        context: int = 64,
        seed: int = 0,
        **options,
    ) -> LoadedModel:
        model = (
            tiny_weights(architecture, context, seed, **options) if options else _weights(architecture, context, seed)
        )
        model = copy.deepcopy(model).to(dtype)
        return wrap_model(model, starter_tokenizer(), name=f"tiny-{architecture}")

    return make


@pytest.fixture(scope="session")
def tiny(make_base: MakeBase) -> LoadedModel:
    """A tiny Qwen3 of 192 tokens of context; only to be read."""
    return make_base("qwen3", dtype=torch.float32, context=192)


@pytest.fixture(scope="session")
def tiny_engine(tiny: LoadedModel) -> Iterator[LocalEngine]:
    with closing(LocalEngine(tiny, max_rows=64)) as engine:
        yield engine


@pytest.fixture(scope="session")
def starter() -> LoadedModel:
    """The starter, which can say something; only to be read."""
    return load_model("starter", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def starter_engine(starter: LoadedModel) -> Iterator[LocalEngine]:
    with closing(LocalEngine(starter, max_rows=64)) as engine:
        yield engine


@pytest.fixture(scope="session")
def make_samples() -> Callable[..., list[Sample]]:
    """Samples of groups given as (prompt length, completion lengths), with all fields filled at random."""

    def make(
        groups: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0, holes: bool = True, vocab: int = 280
    ) -> list[Sample]:
        g = torch.Generator().manual_seed(seed)

        def ids(n: int) -> tuple[int, ...]:
            return tuple(torch.randint(0, vocab, (n,), generator=g).tolist())

        samples = []
        for prompt_length, lengths in groups:
            prompt = ids(prompt_length)
            for n in lengths:
                mask = [int(bool(prompt) or t > 0) for t in range(n)]
                if holes and n > 2:
                    mask[1] = 0
                behaviour = tuple((-3 * torch.rand(n, generator=g) - 2).tolist())
                advantage = float(torch.randn((), generator=g))
                samples.append(
                    Sample(
                        prompt_ids=prompt,
                        completion_ids=ids(n),
                        mask=tuple(mask),
                        advantage=advantage,
                        behaviour_logprobs=behaviour,
                    )
                )
        return samples

    return make


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_adapter(base, seed=1)`: a saved adapter both of whose halves are random, so that it changes every logit."""
    from groupwise.config.lora import LoraSpec
    from groupwise.train.learner import Learner

    def make(base: LoadedModel, *, seed: int = 0, rank: int = 3, dora: bool = False) -> Path:
        learner = Learner(base, lora=LoraSpec(rank=rank, alpha=6.0, use_dora=dora), seed=seed)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in learner.parameters:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
        directory = tmp_path_factory.mktemp("adapter")
        learner.save_adapter(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def model_dir(make_base: MakeBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with its tokenizer, saved as a user would have it; only to be read."""
    return save_model(make_base("qwen3", dtype=torch.float32, context=256), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`groupwise serve` with the starter, in a process of its own. It takes ten seconds to be ready, so tests share
    it: they are marked `xdist_group("live server")`, and each has adapters of its own names."""
    with serving(tmp_path_factory.mktemp("live")) as server:
        yield server


@pytest.fixture
def project(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A folder with a configuration, prompts and a reward, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return Project.make(tmp_path, model=model_dir)
