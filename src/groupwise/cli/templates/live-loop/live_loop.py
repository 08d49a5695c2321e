"""The live loop against a running server: sample, score, train, wait; the next round samples from the improved policy.

    groupwise serve                      # in another terminal; downloads nothing
    python live_loop.py                  # sums, which the starter half knows
    python live_loop.py --text-only      # posts only texts and rewards, as with curl

To change the task, put your own verifier into `score` and your own questions into `problems`.
"""

import argparse
import random
import re

from groupwise import Client


def problems(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """Fresh questions and their answers."""
    pairs = [(rng.randint(10, 999), rng.randint(10, 99)) for _ in range(count)]
    return [(f"What is {a} + {b}? Think step by step.", a + b) for a, b in pairs]


def score(text: str, answer: int) -> float:
    """1 if the last number in the reply is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="default: GROUPWISE_URL, or http://127.0.0.1:8420")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=48, help="questions a round")
    parser.add_argument("--n", type=int, default=8, help="completions of each")
    parser.add_argument("--output-name", default="sums", help="the adapter; each round makes its next version")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="for the starter; 2e-5 from 0.5B on")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument("--text-only", action="store_true", help="post texts instead of rollout ids")
    options = parser.parse_args()

    rng = random.Random(options.seed)
    with Client(options.url) as client:
        for number in range(1, options.rounds + 1):
            asked = problems(rng, options.prompts)
            groups = client.sample([question for question, _ in asked], n=options.n, max_tokens=48)
            answers = [answer for _, answer in asked]
            rewards = [
                [score(text, answer) for text in group.texts] for group, answer in zip(groups, answers, strict=True)
            ]
            mean = sum(map(sum, rewards)) / (options.prompts * options.n)
            print(f"round {number:2d}  mean reward {mean:.3f}  by {groups[0].completions[0].adapter}", flush=True)

            if any(len(set(given)) > 1 for given in rewards):  # otherwise there is nothing to learn from
                scored = [
                    group.scored(given, text_only=options.text_only)
                    for group, given in zip(groups, rewards, strict=True)
                ]
                job = client.train_grpo(
                    scored,  # every group: the server leaves out what teaches nothing, and counts it in the mean reward
                    output_name=options.output_name,
                    learning_rate=options.learning_rate,
                    kl_coeff=0,
                    minibatches=4,
                )
                for warning in client.wait(job.job_id, timeout=600).warnings:
                    print(f"          {warning}", flush=True)


if __name__ == "__main__":
    main()
