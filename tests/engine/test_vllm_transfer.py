"""Weights that are sent to vLLM servers from the learner's memory, over gloo to servers that speak vLLM's routes, and
faults of each step. What vLLM itself makes of it is in tests/vllm_server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from groupwise.config.engine import VllmConfig
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm import links
from groupwise.engine.vllm.engine import VllmEngine
from groupwise.engine.vllm.gaps import Gaps
from groupwise.engine.vllm.handshake import linear_names
from groupwise.engine.vllm.publish import Shelf
from groupwise.engine.vllm.server import RunningServer
from groupwise.engine.vllm.transfer import Transfers, as_kept
from groupwise.engine.vllm.whole_models import WholeModel, WholeModels
from groupwise.errors import EngineError
from groupwise.model.checkpoint_tensors import checkpoint_tensors
from groupwise.model.load import LoadedModel
from groupwise.store.export import AdapterMerge
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from processes import becomes
from slow_cases import long_case
from vllm_peer import Faults, Peer, serving
from wording import raises

PROMPT = (1, 2, 3, 4)
FIRST, SECOND, THIRD = (PolicyVersion("math", number) for number in (1, 2, 3))
QUICK = {"health_interval_s": 0.1, "start_timeout_s": 20.0, "recovery_timeout_s": 20.0, "sync_timeout_s": 20.0}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PACKED_BYTES", 20_000)
    monkeypatch.setattr("groupwise.engine.vllm.transfer.MEND_S", 1.0)


@pytest.fixture
def model(make_base) -> Callable[[], LoadedModel]:
    """A model of one's own, as another process has it; of mean log-probabilities that a change of its weights moves."""
    return partial(make_base, "qwen3", dtype=torch.float32, context=192)


@pytest.fixture
def attach() -> Iterator[Callable[..., VllmEngine]]:
    """`attach(base, peer, ..., merge=None)`: an engine over these servers; closed after the test."""
    with ExitStack() as opened:

        def make(base: LoadedModel, *peers: Peer, merge: AdapterMerge | None = None, starts=(), said=None, **options):
            config = VllmConfig(urls=tuple(peer.url for peer in peers), **{**QUICK, "sync_retries": 0, **options})
            engine = VllmEngine(
                config,
                base,
                LocalEngine(base, max_rows=1, prefix_cache_mb=0),
                targets=linear_names(base.model, "all-linear"),
                reloads=merge is None,
                merge=merge,
                starts=starts,
                say=[].append if said is None else said.append,
            )
            opened.callback(engine.close)
            return engine

        yield make


def train(base: LoadedModel, by: float = 1.05) -> None:
    with torch.no_grad():
        for parameter in base.model.parameters():
            parameter.mul_(by)


def holds(peer: Peer, base: LoadedModel) -> bool:
    """Return whether a server's weights are these, to the bit."""
    theirs = peer.base.model.state_dict()
    return all(torch.equal(each, theirs[name]) for name, each in base.model.state_dict().items())


def samples(engine: VllmEngine, base: LoadedModel, version: PolicyVersion) -> bool:
    """Return whether what is sampled has the learner's log-probabilities."""
    params = SamplingParams(max_tokens=6, seed=5, ignore_eos=True)
    (group,) = engine.generate([SamplingRequest(prompt_ids=PROMPT, n=2, version=version, params=params)])
    local = LocalEngine(base, max_rows=1)
    scored = [local.score(PROMPT, each.token_ids, PolicyVersion.base()) for each in group]
    return all(
        abs(a - b) < 1e-4
        for each, row in zip(group, scored, strict=True)
        for a, b in zip(each.logprobs, row, strict=True)
    )


def files(engine: VllmEngine) -> list[Path]:
    """Checkpoints that lie there for servers."""
    return list(engine._shelf.path.glob("*/model.safetensors"))


def test_versions_are_sent_and_no_file_is_written(attach, model):
    base, said = model(), list[str]()
    with serving(model()) as peer:
        engine = attach(base, peer, said=said)
        assert len(peer.checkpoints) == 1  # what was there first
        for version in (FIRST, SECOND):
            train(base)
            engine.adopt(version)
            assert holds(peer, base) and samples(engine, base, version) and files(engine) == []
        assert len(peer.checkpoints) == 1 and len(peer.sent) == 2
        expected = dict(checkpoint_tensors(base.model))
        assert list(peer.sent[1]) == list(expected)
        assert all(torch.equal(peer.sent[1][name], each) for name, each in expected.items())
    assert [line for line in said if "by gloo (" in line]


def test_chunks_end_where_vllm_ends_them(attach, model):
    """With the tensor by which they are more than the buffer; so each is one broadcast there."""
    base = model()
    with serving(model()) as peer:
        engine = attach(base, peer)
        engine.adopt(FIRST)
        ends, size = list[int](), 0
        for _, tensor in checkpoint_tensors(base.model):
            size += tensor.nbytes
            if size > links.PACKED_BYTES:
                ends.append(size)
                size = 0
        assert peer.chunks == [*ends, *[size] * (size > 0)] and len(ends) > 2


@pytest.fixture
def rounded(make_base) -> Callable[[], LoadedModel]:
    """The same model in a server that keeps 16 bits."""
    return partial(make_base, "qwen3", dtype=torch.bfloat16, context=192)


@pytest.mark.parametrize("other", [Faults(silent=True), Faults(quantization="fp8")], ids=["silent", "fp8"])
def test_what_a_server_keeps_in_16_bits_is_sent_in_16_bits(attach, model, rounded, other: Faults):
    """And it has the same weights, to the bit, as one that rounds what it is sent."""
    base, peers = model(), []
    for faults in (Faults(), other):
        with serving(rounded(), faults=faults) as peer:
            attach(base, peer, dtype="bfloat16").adopt(FIRST)
        peers.append(peer)
    one, two = (peer.base.model.state_dict() for peer in peers)
    assert all(torch.equal(each, two[name]) for name, each in one.items())
    told, whole = ({name: each.dtype for name, each in peer.sent[0].items()} for peer in peers)
    assert set(whole.values()) == {torch.float32}
    assert {name for name, dtype in told.items() if dtype == torch.float32} == {name for name in told if "norm" in name}
    assert 0.5 < sum(peers[0].chunks) / sum(peers[1].chunks) < 0.52


def test_servers_of_several_types_are_sent_the_trainers(attach, model, rounded):
    base = model()
    with serving(rounded()) as one, serving(model()) as other:
        attach(base, one, other, dtype="bfloat16").adopt(FIRST)
        assert holds(other, base) and {each.dtype for each in one.sent[0].values()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("model.layers.0.self_attn.q_proj.weight", torch.bfloat16),
        ("model.layers.0.mlp.experts.3.down_proj.weight", torch.bfloat16),
        ("model.language_model.embed_tokens.weight", torch.bfloat16),
        ("lm_head.weight", torch.bfloat16),
        ("model.layers.0.self_attn.q_proj.bias", torch.float32),
        ("model.layers.0.mlp.gate.weight", torch.float32),  # a router, in float32 in some of vLLM's models
        ("model.layers.0.mlp.gate.e_score_correction_bias", torch.float32),
        ("model.layers.0.linear_attn.A_log", torch.float32),
    ],
)
def test_a_tensor_is_rounded_as_vllm_does_where_it_surely_does(name: str, sent: torch.dtype):
    ties = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8, 3.4e38, 1e-40, float("nan"), float("inf"), 0.1])
    kept, there = as_kept(name, ties, torch.bfloat16), torch.empty(8, dtype=torch.bfloat16)
    there.copy_(ties)  # as vLLM loads a weight
    assert kept.dtype == sent and torch.equal(kept.to(torch.bfloat16).view(torch.int16), there.view(torch.int16))
    for other in (None, torch.float32, torch.float64):
        assert as_kept(name, ties, other) is ties
    assert as_kept(name, there, torch.float16) is there  # as many bytes


def test_two_servers_are_sent_each_chunk_at_once(attach, model):
    base = model()
    with serving(model()) as one, serving(model()) as other:
        engine = attach(base, one, other)
        train(base)
        engine.adopt(FIRST)
        assert holds(one, base) and holds(other, base) and one.chunks == other.chunks and len(one.chunks) > 3
        assert len(one.checkpoints) == len(other.checkpoints) == 1


def test_merged_adapters_are_sent(attach, model, make_adapter):
    base = model()
    adapters = [make_adapter(model(), seed=seed) for seed in (1, 2)]
    with serving(model()) as peer:
        engine = attach(base, peer, merge=AdapterMerge(model()))
        for version, adapter in zip((FIRST, SECOND), adapters, strict=True):
            engine.load(version, adapter)
            merged = AdapterMerge(model())(adapter).state_dict()
            assert all(torch.equal(peer.sent[-1][name], merged[name]) for name in peer.sent[-1])
        assert len(peer.checkpoints) == 1 and len(peer.sent) == 2 and files(engine) == []


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        (Faults(old=True), {}),
        (Faults(transfer=None), {}),
        (Faults(transfer="sharded_rdt"), {}),
        (Faults(transfer="nccl"), {}),  # the learner is on no GPU
        (Faults(), {"transfer": "file"}),
    ],
    ids=["older vLLM", "not started for it", "for another way", "for GPUs", "file is asked for"],
)
def test_whoever_takes_none_reads_files(attach, model, faults: Faults, options, caplog: pytest.LogCaptureFixture):
    base, said = model(), list[str]()
    with serving(model(), faults=faults) as peer:
        engine = attach(base, peer, said=said, **options)
        train(base)
        engine.adopt(FIRST)
        assert holds(peer, base) and len(peer.checkpoints) == 2 and peer.sent == [] and len(files(engine)) == 1
    assert [line for line in said if "by files (" in line] and not caplog.records


@pytest.mark.parametrize("route", ["init_weight_transfer_engine", "start_weight_update", "update_weights"])
def test_a_server_that_refuses_reads_files_from_then_on(attach, model, route: str, caplog: pytest.LogCaptureFixture):
    base = model()
    with serving(model()) as peer:
        engine = attach(base, peer, sync_timeout_s=3.0)
        peer.faults.refuses = route
        for version in (FIRST, SECOND):
            train(base)
            engine.adopt(version)
            assert holds(peer, base) and samples(engine, base, version)
            peer.faults.refuses = None
        assert len(peer.checkpoints) == 3 and peer.sent == []
    warned = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 1


def test_an_update_that_broke_in_the_middle_is_left_before_the_file_is_read(attach, model, monkeypatch):
    """vLLM keeps what has come of a layer, and would mix it with what it reads."""
    base, sent = model(), []
    send = links.GlooLink.send

    def breaks(link: links.GlooLink, chunk: links.Chunk) -> None:
        sent.append(chunk)
        if len(sent) == 3:
            raise RuntimeError("Connection closed by peer")
        send(link, chunk)

    with serving(model()) as peer:
        engine = attach(base, peer)
        monkeypatch.setattr(links.GlooLink, "send", breaks)
        train(base)
        engine.adopt(FIRST)
        assert len(sent) == 3 and len(peer.chunks) == 2 and not peer._arrived
        assert holds(peer, base) and len(peer.checkpoints) == 2 and peer.sent == []
        assert engine.servers[peer.url] is not None


def test_an_error_of_the_learner_amid_a_version_leaves_no_server_in_an_update(attach, model, monkeypatch):
    """It would take nothing of the next run either, until it is restarted."""
    base = model()

    def breaks(model: object) -> Iterator[tuple[str, Tensor]]:
        for number, each in enumerate(checkpoint_tensors(base.model)):
            if number == 5:
                raise RuntimeError("out of memory")
            yield each

    with serving(model()) as peer:
        engine = attach(base, peer)
        with monkeypatch.context() as patched:
            patched.setattr("groupwise.engine.vllm.engine.checkpoint_tensors", breaks)
            with pytest.raises(RuntimeError):
                engine.adopt(FIRST)
        assert not peer._updates and not peer._arrived and peer.sent == []
        engine.close()
        again = attach(base, peer)
        train(base)
        again.adopt(SECOND)
        assert holds(peer, base) and len(peer.sent) == 1


def test_a_server_does_not_take_weights_that_train_again_before_it_went_on():
    """It waited for a version, and when it goes on the learner has begun the next step."""
    transfers = Transfers("auto", device=torch.device("cpu"), timeout_s=1, run=asyncio.run, give_up=lambda *_: None)
    first, shelf = WholeModel(lambda _: None, lambda _: None), Shelf(None)
    whole = WholeModels(transfers, shelf, Gaps.__new__(Gaps), first=first, trains=True, prompt=PROMPT, timeout=1)
    entered = list[bool]()

    async def comes_back() -> None:
        async with whole.standing():
            entered.append(whole.stands)

    async def steps() -> None:
        await whole.begin_training()
        back = asyncio.create_task(comes_back())
        await asyncio.sleep(0)
        whole.stand()
        await whole.begin_training()
        for _ in range(5):
            await asyncio.sleep(0)
        assert entered == []
        whole.stand()
        await back

    asyncio.run(steps())
    shelf.close()
    assert entered == [True]


def test_what_was_sent_and_is_not_the_version_is_read_from_a_file(attach, model):
    base = model()
    with serving(model()) as peer:
        engine = attach(base, peer)
        peer.faults.bends = 0.1
        train(base)
        engine.adopt(FIRST)
        assert len(peer.sent) == 1 and len(peer.checkpoints) == 2 and holds(peer, base)


@pytest.mark.parametrize(
    "route", [long_case("init_weight_transfer_engine"), "update_weights", long_case("finish_weight_update")]
)
def test_of_two_servers_one_dies_and_reads_a_file_when_it_is_back(attach, model, route: str):
    base = model()
    with serving(model()) as one, serving(model()) as other:
        engine = attach(base, one, other, sync_timeout_s=5.0)
        other.faults.dies_in = route
        train(base)
        brought_back = _in_thread(lambda: becomes(lambda: engine.servers[other.url] is None) and _restart(other, model))
        engine.adopt(FIRST)
        brought_back.join()
        assert holds(one, base) and len(one.sent) == 1 and len(one.checkpoints) == 1
        assert holds(other, base) and len(other.checkpoints) == 2
        train(base)
        engine.adopt(SECOND)  # its next life takes what is sent
        assert holds(other, base) and len(other.sent) == 1 and len(one.sent) == 2 and files(engine) == []


def trained_once(attach, peer: Peer, model: Callable[[], LoadedModel]) -> tuple[VllmEngine, LoadedModel]:
    """An engine whose first version was sent to a server, and what it was sent from."""
    base = model()
    engine = attach(base, peer)
    train(base)
    engine.adopt(FIRST)
    return engine, base


def _restart(peer: Peer, model: Callable[[], LoadedModel]) -> None:
    peer.base = model()
    peer.start()


def _in_thread(do: Callable[[], object]):
    import threading

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


class StartedPeer(RunningServer):
    """A peer as a server that a run has started and may replace."""

    def __init__(self, made: list[StartedPeer], model: Callable[[], LoadedModel], faults: Faults):
        self.peer = Peer(model(), faults=faults)
        made.append(self)

    @property
    def url(self) -> str:
        return self.peer.url

    @property
    def ended(self) -> str | None:
        return None

    def stop(self) -> None:
        self.peer.faults = Faults()
        self.peer.die()


@pytest.mark.parametrize("route", ["init_weight_transfer_engine", "update_weights"])
def test_a_server_of_ours_that_hangs_is_replaced_and_reads_files(attach, model, route: str):
    base, made, faults = model(), list[StartedPeer](), [Faults(), Faults()]
    start = lambda: StartedPeer(made, model, faults[len(made)])  # noqa: E731
    engine = attach(base, starts=[start], sync_timeout_s=1.5)
    made[0].peer.faults.hangs_in = route
    train(base)
    engine.adopt(FIRST)
    (hung, new) = made
    assert hung.peer.sent == [] and new.peer.sent == [] and len(new.peer.checkpoints) == 1 and holds(new.peer, base)
    assert samples(engine, base, FIRST)


def test_a_server_that_was_away_for_a_moment_keeps_what_it_has(attach, model):
    with serving(model()) as peer:
        engine, base = trained_once(attach, peer, model)
        peer.faults.hangs = True
        engine._loop.call_soon_threadsafe(engine._fleet.members[0].doubted.set)
        engine._fleet.give_up(engine._fleet.members[0].server, "it is tried")
        assert becomes(lambda: engine.servers[peer.url] is None)
        peer.faults.hangs = False
        assert samples(engine, base, FIRST) and len(peer.checkpoints) == 1 and files(engine) == []


def test_a_server_that_comes_back_while_the_learner_trains_waits_for_the_next_version(attach, model):
    with serving(model()) as peer:
        engine, base = trained_once(attach, peer, model)
        asyncio.run(engine.rest())  # training begins
        peer.die()
        assert becomes(lambda: engine.servers[peer.url] is None)
        _restart(peer, model)
        train(base)  # amid which there is no version that it could have
        assert not becomes(lambda: engine.servers[peer.url] is not None, within_s=0.6)
        assert peer.checkpoints == peer.checkpoints[:1] and files(engine) == []
        engine.adopt(SECOND)
        assert holds(peer, base) and len(peer.checkpoints) == 2 and samples(engine, base, SECOND)


def test_a_chunk_says_what_its_bytes_are():
    tensors: list[Tensor] = [torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.bfloat16)]
    packed = torch.cat([each.view(-1).view(torch.uint8) for each in tensors])
    chunk = links.Chunk(packed, ["a", "b"], [each.dtype for each in tensors], [each.shape for each in tensors], [24, 6])
    assert chunk.described == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [3]]}


def test_a_file_that_a_server_does_not_take_either_ends_the_run(attach, model):
    base = model()
    with serving(model()) as peer:
        engine = attach(base, peer)
        peer.faults.refuses, peer.faults.keeps_weights = "update_weights", True
        train(base)
        with raises(EngineError):
            engine.adopt(FIRST)
