"""GRPO by hand: the whole algorithm with four verbs, `sample`, `forward_backward`, `optim_step` and `save_state`.

    python examples/loop_by_hand.py               # the starter learns sums in half a minute; downloads nothing
    python examples/loop_by_hand.py --steps 5 --log-path runs/mine

The same command again continues from the last saved state. Put your own model, questions and verifier into the first
three definitions, and your own algorithm into `step`; the rest stays as it is. docs/sdk.md explains the verbs.
"""

import argparse
import asyncio
import random
import re

from groupwise import (
    AdamParams,
    DeployConfig,
    Infra,
    LoopConfig,
    WeightSyncConfig,
    build_grpo_datums,
    compute_advantages,
    grpo_loss,
    setup_infra,
)

PROMPTS, GROUP = 24, 8  # questions a step, completions of each
DIVIDED_BY = "NUM_LOSS_TOKENS"  # the sum of the token losses; None leaves it a sum
ADAM = AdamParams(learning_rate=3e-3, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)


def config(log_path: str) -> LoopConfig:
    return LoopConfig(
        log_path=log_path,
        base_model="starter",  # or "Qwen/Qwen3-0.6B", or a directory
        deployment=DeployConfig(tokenizer_model="starter"),
        weight_sync=WeightSyncConfig(weight_sync_interval=1, dcp_save_interval=10),
    )


def problem(rng: random.Random) -> tuple[str, int]:
    """A question and its answer."""
    a, b = rng.randint(10, 999), rng.randint(10, 99)
    return f"What is {a} + {b}? Think step by step.", a + b


def score(text: str, answer: int) -> float:
    """1 if the last number in the reply is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


async def step(infra: Infra, number: int) -> float:
    """Sample, score, compare, train, sync -> the mean reward."""
    rng = random.Random(number)
    asked = [problem(rng) for _ in range(PROMPTS)]
    sampling = [
        infra.sampler.sample_with_tokens(
            [{"role": "user", "content": question}], n=GROUP, max_tokens=40, seed=PROMPTS * number + i
        )
        for i, (question, _) in enumerate(asked)
    ]
    trained, advantages, rewards = [], [], []
    for completions, (_, answer) in zip(await asyncio.gather(*sampling), asked, strict=True):
        sampled = [completion for completion in completions if completion.sampled]  # n entries, each with a status
        given = [score(completion.text, answer) for completion in sampled]
        rewards += given
        if len(set(given)) > 1:  # equal rewards teach nothing
            trained += sampled
            advantages += compute_advantages(given)

    if trained:
        datums = build_grpo_datums(
            [completion.datum() for completion in trained],
            advantages,
            inf_logprobs=[completion.inference_logprobs for completion in trained],
            prompt_lens=[completion.prompt_len for completion in trained],
        )
        backward = infra.policy.forward_backward(datums, grpo_loss(kl_beta=0))
        stepped = infra.policy.optim_step(ADAM, grad_accumulation_normalization=DIVIDED_BY)
        await backward, await stepped  # both were under way
    await infra.weights.after_step(number)  # the next step samples from what this one trained
    return sum(rewards) / len(rewards)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--log-path", default="runs/by-hand")
    options = parser.parse_args()

    with setup_infra(config(options.log_path), needs_reference=False, needs_inference=True) as infra:
        resumed = infra.weights.resume()
        for number in range(resumed.step + 1 if resumed else 1, options.steps + 1):
            print(f"step {number:2d}  mean reward {await step(infra, number):.3f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
