"""Which requests count in a trial: those of clients that name no version, and failures that no client caused."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from groupwise.errors import EngineError
from groupwise.server import chat
from groupwise.server.policies import Trial
from groupwise.types import PolicyVersion
from serving import Served, served

LONG = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 900, "ignore_eos": True, "n": 8}


@pytest.fixture
def api(tmp_path: Path):
    with served(tmp_path, [chat.router], request_timeout_s=0.3) as server:
        base = PolicyVersion.base()
        server.server.policies.trial = Trial(version=PolicyVersion("sums", 1), against=base, share=0.0, since=0.0)
        yield server


def counts(api: Served) -> tuple[int, int]:
    trial = api.server.policies.trial
    assert trial is not None
    return sum(trial.requests.values()), sum(trial.errors.values())


def post(api: Served, **body: object) -> int:
    return httpx.post(f"{api.url}/v1/chat/completions", json={**LONG, **body}, timeout=60).status_code


def test_a_deadline_counts_but_for_grammars_and_named_versions(api: Served) -> None:
    assert post(api) == 504 and counts(api) == (1, 1)
    assert post(api, adapter="base") == 504 and counts(api) == (1, 1)
    assert post(api, guided_regex="[a-z]{800,900}") in (400, 504) and counts(api)[1] == 1


def test_what_is_refused_does_not_count(api: Served) -> None:
    for body in ({"max_tokens": 10**9}, {"adapter": "nobody"}, {"guided_regex": "("}, {"logit_bias": {"999999": 1}}):
        assert 400 <= post(api, **body) < 500
    assert counts(api)[1] == 0


def test_what_the_engine_fails_at_counts(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise EngineError("its weights are gone")

    monkeypatch.setattr("groupwise.server.generate.Generation.completions", fails)
    assert post(api, max_tokens=3) == 502 and counts(api) == (1, 1)
    assert post(api, max_tokens=3, adapter="base") == 502 and counts(api) == (1, 1)
