"""Requests that are apart: equal prompts of two tenants are computed twice, and neither is told of the other's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.engine.local import LocalEngine
from groupwise.types import SamplingParams, SamplingRequest

PROMPT = tuple(range(5, 45))


def asked(apart: str, **options) -> SamplingRequest:
    params = SamplingParams(max_tokens=options.pop("max_tokens", 4), temperature=0.0, ignore_eos=True)
    return SamplingRequest(prompt_ids=PROMPT, params=params, apart=apart, **options)


def test_a_prompt_that_is_being_answered_is_known_to_those_it_is_shared_with_only(tiny_engine: LocalEngine) -> None:
    requests = [asked("acme", max_tokens=16), asked("acme"), asked("globex"), asked("")]
    found = [future.result(timeout=60)[0] for future in tiny_engine.submit(requests)]
    assert [each.cached_tokens for each in found] == [0, len(PROMPT), 0, 0]
    assert len({each.token_ids[:4] for each in found}) == 1  # and they are answered alike


@pytest.mark.parametrize(("asker", "known"), [("acme", True), ("globex", False), ("", False)])
def test_so_is_the_conversation_that_was_kept(starter_engine: LocalEngine, asker: str, known: bool) -> None:
    opening = (*PROMPT, 7 + len(asker))  # of each case its own: the engine keeps those of the others
    first = replace(asked("acme", cache=True), prompt_ids=opening)
    (said,) = starter_engine.submit([first])[0].result(timeout=60)
    turn = replace(asked(asker, cache=True), prompt_ids=(*opening, *said.token_ids, 9, 10, 11))
    (again,) = starter_engine.submit([turn])[0].result(timeout=60)
    assert again.cached_tokens is not None and (again.cached_tokens >= len(opening)) is known
