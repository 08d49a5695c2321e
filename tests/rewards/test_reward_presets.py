import asyncio

import pytest

from groupwise.config.run import RewardConfig
from groupwise.rewards import presets
from groupwise.rewards.base import load_rewards, score
from groupwise.rewards.presets import MATH_REASONING, QUESTION_ANSWERING, SUMMARIZATION
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn

PRESETS = {name: value for name, value in vars(presets).items() if name.isupper() and not name.startswith("_")}


def rewarded(preset, *texts: str, question: str = "Why?", answer: str) -> list[float | None]:
    """The rewards of completions, through the configuration and the loader."""
    functions = load_rewards([RewardConfig.model_validate(entry) for entry in preset])
    rollouts = []
    for text in texts:
        completion = Completion(token_ids=(1,), logprobs=(-1.0,), text=text, finish_reason=FinishReason.STOP)
        rollouts.append(Rollout(turns=(Turn((1,), completion),)))
    prompt = Prompt(id="p/1", messages=({"role": "user", "content": question},), columns={"answer": answer})
    (group,) = asyncio.run(score([RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))], functions))
    assert not [rollout.error for rollout in group.rollouts if rollout.error]
    return [rollout.reward for rollout in group.rollouts]


def tagged(answer: str, reasoning: str = "Six times seven.") -> str:
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_described_and_loads(name):
    functions = load_rewards([RewardConfig.model_validate(entry) for entry in PRESETS[name]])
    assert len(functions) >= 2
    assert all(reward.missing(["answer", "test_cases"]) == [] for reward in functions)


def test_mathematics():
    texts = [tagged(r"\frac{84}{2}"), "<answer>42</answer>", tagged("41"), "<reasoning>so", "42", "", "la " * 50]
    right, untagged, wrong, begun, bare, nothing, loop = rewarded(MATH_REASONING, *texts, answer="42")
    assert (right, wrong, bare, nothing) == (2.5, 0.5, 0.0, 0.0)
    assert right > untagged > wrong > begun > bare > loop == -0.3


def test_questions():
    question = "Source [1]: Paris is the capital of France. What is the capital of France?"
    reasons = " ".join(f"word{i}" for i in range(30))
    texts = [
        tagged("Paris", f"{reasons} [1]"),
        tagged("paris", reasons),
        tagged("Paris", "so"),
        tagged("London", f"{reasons} [1]"),
        tagged("London", reasons),
        tagged("Paris or London", f"{reasons} [7]"),
        reasons,
        "",
    ]
    rewards = rewarded(QUESTION_ANSWERING, *texts, question=question, answer="Paris")
    assert rewards == pytest.approx([2.4, 2.2, 2 + 0.2 / 3, 0.2, 0, 0, 0, 0])


def test_summaries():
    article = "The council met on Monday. " + " ".join(f"detail{i}" for i in range(200)) + " They will build a bridge."
    summary = "On Monday the council decided to build a bridge over the river."
    texts = [summary, article, " ".join(f"padding{i}" for i in range(100)), "", f"{summary} " * 30]
    good, copied, padded, nothing, looped = rewarded(SUMMARIZATION, *texts, question=article, answer=summary)
    assert good > 1.0 > max(copied, padded, nothing, looped)
    assert (padded, nothing) == (0.0, 0.0) and copied == pytest.approx(0.0) and looped < 0.1
