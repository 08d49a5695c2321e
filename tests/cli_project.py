"""A little project as a user would have it: a config, a reward module, prompts, and a tiny model; and how to run the
command line on it, in this process."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from typer import testing
from typer.testing import CliRunner, Result

from groupwise.cli.main import app
from groupwise.model.load import LoadedModel
from threads import THREADS

testing._get_command = functools.cache(testing._get_command)  # it takes a tenth of a second to build

REWARDS = '''
def vowels(completions, **columns):
    """The share of vowels, which differs between the completions of a random model."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(text.count(vowel) for vowel in "aeiou") / (1 + len(text)) for text in texts]


def constant(completions, **columns):
    return [0.5] * len(completions)


def short_list(completions, **columns):
    return [0.0]


def not_a_number(completions, **columns):
    return [float("nan")] * len(completions)


def words(completions, **columns):
    return ["good"] * len(completions)


def raises(completions, **columns):
    raise RuntimeError("the judge is out")


def needs_gold(completions, gold):
    return [1.0] * len(completions)


def hangs(completions, kind):
    """Answers for even prompts, never for odd ones."""
    while kind[0] == "odd":
        pass
    return vowels(completions)


def ends_the_process(completions, kind):
    """Answers for even prompts; for odd ones the process is gone."""
    import os

    if kind[0] == "odd":
        os._exit(7)
    return vowels(completions)


def wait(completions, flag, **columns):
    """Touch `flag` and take a while, so that a test can interrupt the step it is in."""
    import pathlib, time

    pathlib.Path(flag[0]).touch()
    time.sleep(0.2)
    return vowels(completions)
'''

CONFIG = """
name: toy
model: {model}
data: {{source: prompts.jsonl}}
eval:
  data: {{source: held_out.jsonl}}
  every: 2
  by: kind
  show: 2
rewards: [my_rewards:vowels]
scoring: {{workers: 0}}  # two processes take a second to start; whole stories have them
rollout: {{prompts_per_step: 2, group_size: 3, max_tokens: 6}}
train: {{steps: 3, learning_rate: 0.01, lora: {{rank: 2, alpha: 4}}}}
"""


def row(index: int) -> dict:
    question = {"role": "user", "content": f"What is {index}?"}
    return {"prompt": [question], "answer": str(index), "kind": "odd" if index % 2 else "even"}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


def save_model(base: LoadedModel, directory: Path) -> Path:
    base.model.save_pretrained(directory)
    base.tokenizer.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Project:
    """The folder; `config` is its run.yaml."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @classmethod
    def make(cls, folder: Path, *, model: Path | str) -> Project:
        write_rows(folder / "prompts.jsonl", [row(i) for i in range(8)])
        write_rows(folder / "held_out.jsonl", [row(i) for i in range(20, 24)])
        (folder / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
        (folder / "run.yaml").write_text(CONFIG.format(model=model), encoding="utf-8")
        return cls(folder)


def cli(*arguments: str | Path) -> Result:
    """`groupwise ARGUMENTS...`, in this process and folder."""
    torch.set_num_threads(int(THREADS))
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a bug of ours, which must not pass for exit code 1
    return result
