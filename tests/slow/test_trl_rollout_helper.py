"""Rollout functions that use `generate_rollout_completions` of trl.experimental.openenv play here unchanged.

TRL had that from 0.29 to 1.8. Install one of them (`trl==1.8.0`) into a virtual environment with this package, and run
`pytest tests/slow/test_trl_rollout_helper.py -m slow` with its Python.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("trl.experimental.openenv", exc_type=ImportError)

from groupwise.algo.samples import segments_of
from groupwise.bridges.trl.rollout_func import RolloutFunc
from groupwise.bridges.trl.rollout_func_rollouts import RolloutFuncRollouts
from groupwise.config.run import EnvConfig
from groupwise.tasks.rollout_sources import play_all
from groupwise.types import PolicyVersion, Prompt, RolloutGroup, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CODE = '''
from trl.experimental.openenv import generate_rollout_completions


def single(prompts, trainer):
    said = generate_rollout_completions(trainer, prompts)
    return {
        "prompt_ids": [each["prompt_ids"] for each in said],
        "completion_ids": [each["completion_ids"] for each in said],
        "logprobs": [[float(number) for number in each["logprobs"]] for each in said],
        "length": [float(len(each["text"])) for each in said],
    }


def several(prompts, trainer):
    """Two turns for each prompt by itself, the environment's tokens masked."""
    tokenizer = trainer.processing_class
    rows = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for messages in prompts:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        first = generate_rollout_completions(trainer, [text], generation_overrides={"max_tokens": 6})[0]
        said = tokenizer.decode(first["completion_ids"])
        told = "<|im_end|>\\n<|im_start|>user\\nSure?<|im_end|>\\n<|im_start|>assistant\\n"
        second = generate_rollout_completions(trainer, [text + said + told])[0]
        ids = second["prompt_ids"][len(first["prompt_ids"]) + len(first["completion_ids"]):]
        rows["prompt_ids"].append(first["prompt_ids"])
        rows["completion_ids"].append(first["completion_ids"] + ids + second["completion_ids"])
        rows["logprobs"].append(first["logprobs"] + [0.0] * len(ids) + second["logprobs"])
        mask = [1] * len(first["completion_ids"]) + [0] * len(ids) + [1] * len(second["completion_ids"])
        rows["env_mask"].append(mask)
    return rows
'''


@pytest.mark.parametrize(("name", "turns"), [("single", 1), ("several", 2)])
def test_the_helper_of_trl_asks_the_engine(tmp_path: Path, starter, starter_engine, name, turns):
    (tmp_path / "helped.py").write_text(CODE, encoding="utf-8")
    function, params = RolloutFunc(f"helped:{name}", str(tmp_path)), SamplingParams(max_tokens=16)
    config = EnvConfig(agent="tests:helped")
    play = RolloutFuncRollouts(starter_engine, starter, function, config, run=params, scored=True)
    prompts = [Prompt(id=str(n), messages=({"role": "user", "content": f"What is {n} + 138?"},)) for n in range(40, 44)]

    async def played() -> list[RolloutGroup]:
        return await play_all(play, prompts, seeds=range(4), n=2, params=params, version=PolicyVersion.base())

    for group in asyncio.run(played()):
        for rollout in group.rollouts:
            assert rollout.error is None and len(rollout.turns) == turns
            (segment,) = segments_of(rollout.turns)
            exact = starter_engine.score(segment.prompt_ids, segment.completion_ids, PolicyVersion.base())
            masked = [logprob * spoke for logprob, spoke in zip(exact, segment.mask, strict=True)]
            assert list(segment.logprobs) == pytest.approx(masked, abs=1e-4)
