"""Aligns log-probabilities to tokens, whichever convention they come in; nothing else of the SDK knows the conventions.

    tokens             t_0   t_1  ...  t_{P-1}  t_P  ...  t_{N-1}      N of them, the first P are the prompt
    trainer                  l_1  ...  l_{P-1}  l_P  ...  l_{N-1}      N - 1: entry j is of token j + 1
    inference          None  l_1  ...  l_{P-1}  l_P  ...  l_{N-1}      N: nothing predicts the first token
    completion alone                            l_P  ...  l_{N-1}      N - P

Every per-token value of a datum has the trainer's order. Any other length is refused, and no value is invented: a value
that was not computed is NaN, and a NaN where a token is trained is refused too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from groupwise.errors import DataError

UNKNOWN = math.nan


def aligned(
    logprobs: Sequence[float | None], *, tokens: int, prompt_len: int, what: str = "logprobs"
) -> tuple[float, ...]:
    """Align log-probabilities (nats), given in any of the orders above, to the N - 1 targets. `what` names them in
    errors.

    >>> aligned([None, -0.5, -0.1], tokens=3, prompt_len=1)
    (-0.5, -0.1)

    Raises:
        DataError: the length is not that of these tokens, or the first of N is not None.
    """
    if not 1 <= prompt_len <= tokens:
        raise DataError(f"prompt_len is {prompt_len}; of {tokens} tokens the first 1 to {tokens} are the prompt")
    given, completion = len(logprobs), tokens - prompt_len
    if given == tokens:
        if logprobs[0] is not None:
            raise DataError(
                f"{what} has {given} entries for {tokens} tokens, and the first is {logprobs[0]!r}, not None",
                hint="nothing predicts the first token: give N entries with None first, or the trainer's N - 1",
            )
        values = logprobs[1:]
    elif given == tokens - 1:
        values = logprobs
    elif given == completion:
        values = [None] * (prompt_len - 1) + list(logprobs)
    else:
        raise DataError(
            f"{what} has {given} entries; {tokens} tokens, {prompt_len} of them the prompt, have {tokens} with None "
            f"first, {tokens - 1}, or {completion} of the completion alone",
            hint="score the very tokens that were sampled; do not decode and encode them again",
        )
    return tuple(UNKNOWN if value is None else float(value) for value in values)


def check_known(values: Sequence[float], mask: Sequence[int], *, what: str) -> None:
    """Raise DataError if a trained token's value is not a finite number."""
    for position, (value, trained) in enumerate(zip(values, mask, strict=True)):
        if trained and not math.isfinite(value):
            raise DataError(
                f"{what}[{position}] is {value}, and the token after it is trained",
                hint="every trained token needs a finite value (what was sampled with top_p or top_k by an "
                "engine that does not record what they left has none); leave the token out with a mask of 0",
            )
