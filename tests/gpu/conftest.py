"""What only a CUDA GPU can show. Without one all of it is skipped; `make gpu` runs it where there is one.

These tests need nothing of the other tests' fixtures, so that they run where few packages are installed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from groupwise.types import Sample

HERE = f"{Path(__file__).parent}/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA GPU"))


@pytest.fixture
def batch():
    """Makes groups of samples: (prompt tokens, (tokens of each completion, ...)) each."""

    def make(*groups: tuple[int, tuple[int, ...]]) -> list[Sample]:
        draw, samples = random.Random(0), []
        for prompt, completions in groups:
            start = tuple(draw.choices(range(1000), k=prompt))
            for i, length in enumerate(completions):
                said = tuple(draw.choices(range(1000), k=length))
                mask = tuple(int(bool(prompt) or t > 0) for t in range(length))
                logprobs = tuple(-6.9 + 0.1 * draw.random() for _ in said)
                samples.append(
                    Sample(
                        prompt_ids=start,
                        completion_ids=said,
                        mask=mask,
                        behaviour_logprobs=logprobs,
                        advantage=1.0 - i,
                    )
                )
        return samples

    return make
