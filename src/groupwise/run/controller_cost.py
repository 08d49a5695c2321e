"""Estimates rank 0's processor seconds by part, for the tokens of a step, besides sampling and training.

Microseconds a completion token, as `benchmarks/controller.py` measured them on a core that it shared with other work:
completions of about 800 tokens, groups of 16, a reward that costs next to nothing. All of it is Python in one process,
so that it takes one core, whatever else rank 0's machine has: what the parts come to is how many tokens a second a run
can have at most. What an environment or a reward function does is not in it.
"""

from __future__ import annotations

import math

TAKEN_IN = {"answers": 0.34, "texts": 0.12}  # of vLLM's servers: HTTP and JSON, and the text of each completion
STREAMED = 2.4  # answers, where completions continue under newer versions
ALWAYS = {"rewards": 0.03, "samples": 0.03, "metrics": 0.07}
WRITTEN, WRITTEN_AS_READ = 0.37, 0.10  # rollouts: their numbers printed, or written as vLLM's servers wrote them
SENT, EACH_HOP = 0.05, 0.015  # an order that other ranks get: made, and sent on once for every doubling of the ranks
SHARED_OUT, PACKED = 0.06, 0.27  # which rank has what; all of it packed, of which rank 0 packs its share


def controller_seconds(tokens: float, *, ranks: int, servers: bool, streamed: bool = False) -> dict[str, float]:
    """Return processor seconds of rank 0 by part, for a step of this many completion tokens that `ranks` train.
    `servers`: vLLM's sample them, and not an engine in this process; `streamed`: and tell them as they come.

    >>> round(sum(controller_seconds(1e6, ranks=64, servers=True).values()), 2)
    0.89
    """
    parts = (TAKEN_IN if servers else {}) | ALWAYS | {"rollouts": WRITTEN_AS_READ if servers else WRITTEN}
    if servers and streamed:
        parts |= {"answers": STREAMED, "rollouts": WRITTEN}
    if ranks > 1:
        parts |= {"orders": SENT + EACH_HOP * math.ceil(math.log2(ranks))}
    parts |= {"packing": (SHARED_OUT if ranks > 1 else 0.0) + PACKED / ranks}
    return {name: tokens * each / 1e6 for name, each in parts.items()}
