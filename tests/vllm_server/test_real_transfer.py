"""Weights that are sent to vLLM itself, on a CPU by our plugin for gloo; and vLLM's own code for GPUs, that reads what
we pack for it.

    pytest -m slow tests/vllm_server/test_real_transfer.py      one server, about two minutes on two cores
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from groupwise.config.run import load_config
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm import links
from groupwise.engine.vllm.engine import VllmEngine
from groupwise.engine.vllm.open import open_vllm
from groupwise.model.checkpoint_tensors import checkpoint_tensors
from groupwise.model.load import LoadedModel, load_model
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))}
CLOSE = 1e-4  # nats
PROMPT = (1, 2, 3, 4, 5, 6)
CONSUME = """
import json, sys
from contextlib import nullcontext
import torch
from safetensors.torch import load_file, save_file
import vllm.distributed.weight_transfer.packed_tensor as packed_tensor

directory, told = sys.argv[1], json.loads(sys.argv[2])

class Stream:
    def synchronize(self): pass

class Group:
    def broadcast(self, tensor, src):
        received.append(tensor.numel())
        tensor.copy_(chunk)

packed_tensor._get_streams = lambda device, count: [Stream()] * count  # of a GPU
torch.accelerator.current_device_index, torch.cuda.stream = (lambda: 0), (lambda stream: nullcontext())
found, received = {}, []
for number, (described, limit) in enumerate(told):
    chunk = load_file(f"{directory}/{number}.safetensors")["packed"]
    dtypes = [getattr(torch, name) for name in described["dtype_names"]]
    meta = zip(described["names"], zip(described["shapes"], dtypes))
    load = lambda weights: found.update({name: each.clone() for name, each in weights})
    packed_tensor.packed_nccl_broadcast_consumer(meta, Group(), 0, load, limit, 2, "cpu")
save_file(found, f"{directory}/found.safetensors")
print(len(received))
"""

TAKE = """
import json, sys
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

nccl, ipc, nccl_update, ipc_update = json.load(sys.stdin)
assert NCCLWeightTransferInitInfo(**nccl).nccl_unique_id_bytes == bytes(range(128))
NCCLWeightTransferUpdateInfo(**nccl_update)
assert IPCWeightTransferInitInfo(**ipc).packed
assert list(IPCWeightTransferUpdateInfo(**ipc_update).ipc_handles) == ["gpu-7"]
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm: `make vllm` installs it"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model of which everything can be read anew on a CPU: its embeddings are not tied."""
    directory, starter = tmp_path_factory.mktemp("model"), load_model("starter", device="cpu", dtype="float32")
    torch.manual_seed(0)
    config = starter.model.config.to_dict() | {"tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(type(starter.model.config)(**config)).save_pretrained(directory)
    starter.tokenizer.save_pretrained(directory)
    return load_model(str(directory), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def engine(base: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine over a server of its own, started for what is sent."""
    what = ["engine=vllm", "train.lora=null", f"model={base.name}", "dtype=float32", "device=cpu", "eval=null"]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    how = [f"vllm.python={PYTHON}", f"vllm.environment={ENVIRONMENT}", f"vllm.log={log}"]
    config = load_config(ROOT / "configs" / "arithmetic.yaml", [*what, *how])
    said: list[str] = []
    engine = open_vllm(config, base, LocalEngine(base, max_rows=1, prefix_cache_mb=0), say=said.append)
    assert [line for line in said if "by gloo (" in line]
    yield engine
    engine.close()


def train(base: LoadedModel) -> None:
    with torch.no_grad():
        for parameter in base.model.parameters():
            parameter.mul_(1.03).add_(0.002 * torch.randn_like(parameter))


def off(engine: VllmEngine, base: LoadedModel, version: PolicyVersion) -> float:
    """The largest difference of a sampled token's log-probability from the learner's, in nats."""
    params = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
    (group,) = engine.generate([SamplingRequest(prompt_ids=PROMPT, n=4, version=version, params=params)])
    local, own = LocalEngine(base, max_rows=1), PolicyVersion.base()
    rows = [(each.logprobs, local.score(PROMPT, each.token_ids, own)) for each in group]
    return max(abs(a - b) for theirs, ours in rows for a, b in zip(theirs, ours, strict=True))


def test_every_version_is_sent_and_is_the_learners(engine: VllmEngine, base: LoadedModel, monkeypatch) -> None:
    for number, packed in ((1, links.PACKED_BYTES), (2, 1 << 20), (3, 1 << 16)):
        monkeypatch.setattr(links, "PACKED_BYTES", packed)
        train(base)
        version, began = PolicyVersion("math", number), time.monotonic()
        engine.adopt(version)
        print(f"sent in chunks of {packed} bytes: {time.monotonic() - began:.2f} s, off {off(engine, base, version)}")
        assert off(engine, base, version) < CLOSE
        assert not list(engine._shelf.path.glob("*/*.safetensors"))


def test_an_update_that_breaks_in_the_middle_leaves_a_server_that_reads_files(
    engine: VllmEngine, base: LoadedModel, monkeypatch
) -> None:
    """The same server, which has begun to load layers."""
    send, sent, (url, accepted) = links.GlooLink.send, [], next(iter(engine.servers.items()))

    def breaks(link: links.GlooLink, chunk: links.Chunk) -> None:
        sent.append(chunk)
        if len(sent) == 3:
            raise RuntimeError("broken on purpose")
        send(link, chunk)

    monkeypatch.setattr(links, "PACKED_BYTES", 1 << 18)
    monkeypatch.setattr(links.GlooLink, "send", breaks)
    train(base)
    for version in (PolicyVersion("math", 4), PolicyVersion("math", 5)):
        began = time.monotonic()
        engine.adopt(version)
        print(f"read: {time.monotonic() - began:.2f} s, off {off(engine, base, version)}")
        assert off(engine, base, version) < CLOSE and len(sent) == 3
        assert engine.servers[url] is accepted  # nobody has replaced it
        train(base)


def test_vllms_own_consumer_reads_what_is_packed_for_its_nccl(base: LoadedModel, tmp_path: Path) -> None:
    """`packed_nccl_broadcast_consumer` on a CPU, its streams and its group replaced: a request is one broadcast."""
    limit, told, tensors, number = 1 << 18, [], [], 0
    every = dict(checkpoint_tensors(base.model)) | {"half": torch.randn(5, 3).to(torch.bfloat16)}
    for name, tensor in every.items():
        tensors.append((name, tensor))
        if sum(each.nbytes for _, each in tensors) > limit or name == "half":
            parts = [each for _, each in tensors]
            packed = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in parts])
            shapes, sizes = [each.shape for each in parts], [each.nbytes for each in parts]
            chunk = links.Chunk(packed, [name for name, _ in tensors], [each.dtype for each in parts], shapes, sizes)
            save_file({"packed": chunk.packed}, tmp_path / f"{number}.safetensors")
            told.append((chunk.described, limit))
            tensors, number = [], number + 1
    words = [str(PYTHON), "-c", CONSUME, str(tmp_path), json.dumps(told)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = load_file(tmp_path / "found.safetensors")
    assert int(done.stdout.split()[-1]) == number > 3
    assert found.keys() == every.keys() and all(torch.equal(found[name], each) for name, each in every.items())


def test_vllm_takes_what_it_is_told_of_nccl_and_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own classes; the GPU is replaced."""
    monkeypatch.setattr(links, "PACKED_BYTES", 64)
    monkeypatch.setattr(links, "nccl", SimpleNamespace(unique_id=lambda: bytes(range(128))))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu-7"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    cpu, packed = torch.device("cpu"), torch.arange(8, dtype=torch.uint8)
    nccl = links.NcclLink("http://127.0.0.1:8000", 1, device=cpu, timeout_s=5.0)
    ipc = links.IpcLink("http://127.0.0.1:8000", 1, device=cpu, timeout_s=5.0)
    chunk = links.Chunk(packed, ["a"], [torch.bfloat16], [torch.Size([2, 2])], [8])
    told = json.dumps([nccl.meeting(), ipc.meeting(), nccl.described(chunk), ipc.described(chunk)])
    unpickles = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    done = subprocess.run(
        [str(PYTHON), "-c", TAKE], input=told, env=unpickles, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
