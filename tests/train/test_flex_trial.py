"""FlexAttention in training: tried first, refused loudly, and the gradients of merged attention where it is used.

What is compiled on a GPU (tests/gpu/test_attention.py) runs uncompiled here, densely (as in tests/model/test_flex.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from learner_cases import GROUPS, SPECS, assert_same, gradients, on_policy
from torch.nn.attention import flex_attention as torch_flex

from groupwise.model import flex_trial
from groupwise.model.flex import Forest
from groupwise.model.flex_trial import trouble, why_not_flex
from groupwise.model.layouts import FLEX, MERGED
from groupwise.model.load import share_weights
from groupwise.types import Sample
from slow_cases import slow_but
from wording import warns

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients without kernels, and rows that are short enough for that."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *inputs: None)
    monkeypatch.setattr(flex_trial, "PROMPTS", (70, 40))
    monkeypatch.setattr(flex_trial, "COMPLETIONS", (50, 0, 30, 60))


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("architecture", slow_but({"gemma2"}, of=("gemma2", "gpt2")))
def test_there_is_no_trouble(make_base, architecture: str):
    """With windows, softcaps and fewer keys, and without."""
    assert trouble(share_weights(make_base(architecture).model), checkpointing=False) is None


@pytest.mark.usefixtures("dense")
@pytest.mark.slow
def test_there_is_no_trouble_in_16_bits(make_base):
    assert trouble(share_weights(make_base("qwen3", dtype=torch.bfloat16).model), checkpointing=False) is None


@pytest.mark.slow
@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("leave", [1, -1])
def test_a_wrong_mask_is_found(make_base, monkeypatch, leave: int):
    """A token of another row too many, and one of its own too few."""
    right = Forest.__init__

    def wrong(self, enter, leaves, *others, **options):
        right(
            self, enter, [max(at + leave, own + 1) for at, own in zip(leaves, enter, strict=True)], *others, **options
        )

    monkeypatch.setattr(Forest, "__init__", wrong)
    found = trouble(share_weights(make_base().model), checkpointing=False)
    assert found is not None and found.startswith("ArithmeticError: its output differs from merged's by ")


@pytest.mark.usefixtures("dense")
def test_wrong_gradients_are_found(make_base, monkeypatch):
    right = Forest.attend

    def wrong(self, layer, query, key, value, scoring):
        return right(self, layer, query, key.detach(), value, scoring) + 0 * key.sum()

    monkeypatch.setattr(Forest, "attend", wrong)
    found = trouble(share_weights(make_base().model), checkpointing=False)
    assert found is not None and found.startswith("ArithmeticError: its gradient of k differs from merged's by ")


@pytest.mark.usefixtures("dense")
@pytest.mark.slow
def test_a_model_whose_forward_differs_is_found(make_base, monkeypatch):
    monkeypatch.setattr(flex_trial, "packed_tolerance", lambda model: 0.0)
    found = trouble(share_weights(make_base(dtype=torch.float32).model), checkpointing=False)
    assert found is not None and found.startswith("its forward differs from the model's own by ")


@pytest.mark.usefixtures("dense")
@pytest.mark.slow
def test_a_checkpoint_is_part_of_the_trial(make_base):
    """Uncompiled, torch traces a softcap together with the hooks of a checkpoint."""
    gemma, qwen = (share_weights(make_base(architecture).model) for architecture in ("gemma2", "qwen3"))
    assert trouble(qwen, checkpointing=True) is None
    assert trouble(gemma, checkpointing=True) is not None


def test_it_needs_a_gpu_and_a_torch_that_has_it(make_base, monkeypatch):
    assert why_not_flex(make_base().model, checkpointing=False) == "it needs a CUDA GPU, and the model is on 'cpu'"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    elsewhere: object = SimpleNamespace(device=torch.device("cuda"))
    assert why_not_flex(elsewhere, checkpointing=False) == f"torch {torch.__version__} does not have it"  # pyright: ignore


def test_without_a_gpu_a_learner_falls_back(make_learner, make_samples):
    """Loudly, and to the same gradients."""
    with warns():
        fallen = make_learner(attention="flex")
    right = make_learner()
    assert fallen.layouts is MERGED and fallen.packed and "CUDA" in fallen.why_not_flex
    assert right.layouts is MERGED and right.why_not_flex is None
    samples = on_policy(right, make_samples(GROUPS))
    for learner in (right, fallen):
        learner.forward_backward(samples, SPECS["grpo"])
    assert_same(gradients(fallen), gradients(right), atol=0)


def test_whatever_is_raised_a_learner_falls_back(make_learner, monkeypatch):
    class OutOfResources(Exception):
        """As Triton's, which is nothing but an Exception."""

    def raises(*args, **options):
        raise OutOfResources("shared memory, Required: 240000\nHint: reduce block sizes")

    monkeypatch.setattr(Forest, "attend", raises)
    monkeypatch.setattr("groupwise.train.learner.why_not_flex", trouble)
    with warns():
        assert make_learner(attention="flex").layouts is MERGED


def test_a_model_that_cannot_be_packed_has_neither(make_learner, monkeypatch):
    monkeypatch.setattr("groupwise.model.packed_check._WHY", {})  # the code is another from here on
    monkeypatch.setattr("groupwise.model.attention._hidden", lambda gap, *of: gap < -1)
    with warns() as said:
        assert not make_learner(attention="flex").packed
    assert len(said) == 1


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize(
    ("architecture", "checkpointing"),
    [
        pytest.param("gemma2", False, marks=pytest.mark.slow),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("qwen3", True, marks=pytest.mark.slow),
    ],
)
def test_a_learner_that_uses_it_has_the_same_gradients(
    make_learner, make_samples, monkeypatch, architecture: str, checkpointing: bool
):
    """On groups and on trees, with the reference's log-probabilities besides."""
    monkeypatch.setattr("groupwise.train.learner.why_not_flex", trouble)
    merged, flex = (
        make_learner(architecture, attention=kind, gradient_checkpointing=checkpointing) for kind in ("merged", "flex")
    )
    assert flex.layouts is FLEX
    history = tuple(range(40))
    forked = [
        Sample(prompt_ids=(*history, *range(at)), completion_ids=(7, at, 3), mask=(1, 0, 1), advantage=1.0 - at / 10)
        for at in (0, 12, 24)
    ]
    samples = on_policy(merged, [*make_samples(GROUPS), *forked])
    for learner in (merged, flex):
        learner.forward_backward(samples, SPECS["grpo with k3"])
    assert_same(gradients(flex), gradients(merged), atol=1e-6 if architecture == "gemma2" else 1e-9)
