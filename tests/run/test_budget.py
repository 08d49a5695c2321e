"""`train.memory_gb` in a run: what its longest prompt is, and the micro-batches that its learner gets."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from groupwise.config.run import RunConfig, load_config
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.model.memory import GIB, fitting_tokens, memory
from groupwise.run import assemble
from groupwise.run.assemble import open_components
from groupwise.run.memory_budget import device_memory, load_of, longest_prompt, within_context
from groupwise.run.plan import make_plan
from groupwise.tasks.rollout_sources import SingleTurnRollouts
from groupwise.train.learner import Learner
from groupwise.types import Prompt, SamplingParams, SamplingRequest
from wording import raises, warns

DEMO = Path(__file__).parents[2] / "configs" / "arithmetic.yaml"


def demo(*overrides: str) -> RunConfig:
    return load_config(DEMO, ["scoring.workers=0", "eval=null", *overrides])


def test_the_longest_prompt_is_the_longest_that_is_not_passed_over(tiny, tiny_engine):
    play = SingleTurnRollouts(tiny_engine, tiny.tokenizer)
    texts = ["one", "one two three", "six " * 5, "seven " * 40]
    lengths = [len(play.prepare(Prompt(id=text, text=text)).token_ids) for text in texts]
    prompts = [Prompt(id=text, text=text) for text in texts]
    assert longest_prompt(demo(), prompts, play, context=1000) == max(lengths)
    assert longest_prompt(demo(f"rollout.max_prompt_tokens={lengths[2]}"), prompts, play, context=1000) == lengths[2]
    assert longest_prompt(demo(), prompts, play, context=lengths[3]) == lengths[2]  # no room for a completion
    streamed = demo("data.streaming=true")  # of which these are the first
    assert longest_prompt(streamed, prompts, play, context=1000) == 1000 - streamed.rollout.max_tokens


def test_vllm_in_this_process_takes_its_share_of_the_device(make_base, monkeypatch):
    base = make_base()
    learner = Learner(base)

    def colocated(*overrides: str) -> int:
        run = demo("engine=vllm", *overrides)
        return load_of(run, base, learner, longest_prompt=8, reads_reference=False).colocated

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    there = device_memory(base.device)
    assert there > GIB and colocated() == 0  # a server has memory of its own
    assert colocated("vllm.mode=colocate", "vllm.gpu_memory_utilization=0.25") == int(0.25 * there)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    weights = sum(parameter.numel() * parameter.element_size() for parameter in base.model.parameters())
    assert colocated("vllm.mode=colocate") == 2 * GIB + weights


def test_a_run_gets_micro_batches_that_fit():
    budget = 0.8
    plan = make_plan(demo(f"train.memory_gb={budget}"))
    with open_components(plan) as parts:
        assert parts.load is not None and parts.load.model.lean
        tokens = parts.learner.micro_tokens
        assert tokens == fitting_tokens(plan.config, parts.load) < 8192
        assert memory(plan.config, parts.load, micro_tokens=tokens).total <= budget * GIB
    with open_components(make_plan(demo())) as parts:
        assert (parts.load, parts.learner.micro_tokens) == (None, 8192)


def test_what_an_earlier_run_held_is_gone_when_the_next_begins():
    """Modules refer to each other: without a look for garbage each run of a notebook would leave its model."""

    def opened() -> weakref.ref[PreTrainedModel]:
        with open_components(make_plan(demo())) as parts:
            return weakref.ref(parts.base.model)

    gc.disable()
    try:
        held = [opened() for _ in range(2)]
        assert held[0]() is None
    finally:
        gc.enable()


def test_flex_attention_takes_no_scores_where_it_is_used():
    run = demo("train.attention=flex", "train.memory_gb=2")
    with warns():
        parts = open_components(make_plan(run))
    with parts:
        assert parts.load is not None and not parts.load.flex
        merged, flex = (memory(run, replace(parts.load, flex=flex)).activations for flex in (False, True))
        assert flex < merged


def test_a_budget_that_is_too_small_ends_the_run_before_it_begins(monkeypatch):
    """And closes what had been opened: the engine, which vLLM would keep a server or a device's memory for."""
    engines, threads, open_engine = [], torch.get_num_threads(), assemble.open_engine

    def opened(*args, **options):
        engines.append(open_engine(*args, **options))
        return engines[0]

    monkeypatch.setattr(assemble, "open_engine", opened)
    with raises(ConfigError):
        open_components(make_plan(demo("train.memory_gb=0.1")))
    assert torch.get_num_threads() == threads
    with raises(GroupwiseError):
        engines[0].generate([SamplingRequest(prompt_ids=(1,), params=SamplingParams(max_tokens=1))])


def test_a_completion_is_estimated_to_end_with_the_context():
    assert within_context(demo("rollout.max_tokens=100000"), context=1024).rollout.max_tokens == 1023
    evaluated = load_config(DEMO, ["eval.max_tokens=5000"]).eval
    within = within_context(load_config(DEMO, ["eval.max_tokens=5000"]), context=1024).eval
    assert evaluated is not None and within == evaluated.model_copy(update={"max_tokens": 1023})
    assert within_context(demo(), context=1024) == demo()
