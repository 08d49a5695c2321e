"""Server and worker over the same weights on a GPU: CUDA IPC between two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from groupwise.model.load import load_model, weights_hash
from groupwise.store.cuda_ipc import offer_weights
from groupwise.train.learner import Learner
from groupwise.types import Sample

PEER = Path(__file__).parents[1] / "ipc_peer.py"


def test_a_worker_computes_with_the_servers_weights(tmp_path):
    """It trains an adapter over them, writes none of them, and sees what becomes of them here."""
    base = load_model("starter", device="cuda", dtype="float32")
    offer = tmp_path / "weights.json"
    assert offer_weights(base, offer)
    assert offer.stat().st_mode & 0o777 == 0o600
    sample = Sample(prompt_ids=(3, 1, 4), completion_ids=(1, 5), mask=(1, 1))
    (expected,) = Learner(base).forward([sample])
    command = [sys.executable, str(PEER), "starter", str(offer), str(os.getpid()), "cuda"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        try:
            seen = json.loads(peer.stdout.readline())
            assert seen.get("refused") is None and seen["hash"] == base.hash and seen["trained"] and seen["tied"]
            assert max(abs(a - b) for a, b in zip(seen["logprobs"], expected, strict=True)) < 1e-4
            assert weights_hash(base.model) == base.hash, "the worker's training wrote nothing here"
            embedding = base.model.get_input_embeddings().weight
            with torch.no_grad():
                embedding.view(-1)[0] += 1.0
            torch.cuda.synchronize()
            (tmp_path / "again").touch()
            seen = json.loads(peer.stdout.readline())
            assert seen["first"] == float(embedding.view(-1)[0]) and seen["hash"] != base.hash
        finally:
            peer.kill()


def test_an_offer_of_another_process_is_refused(tmp_path):
    base = load_model("starter", device="cuda", dtype="float32")
    offer = tmp_path / "weights.json"
    assert offer_weights(base, offer)
    command = [sys.executable, str(PEER), "starter", str(offer), str(os.getpid() + 1), "cuda"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "has pid" in json.loads(told)["refused"]
