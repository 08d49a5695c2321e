"""Decoding with drafts against decoding without: the same tokens and log-probabilities, whatever is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import pytest
import torch

from groupwise.config.run import RolloutConfig
from groupwise.config.serve import ServeConfig
from groupwise.engine import lookup, ngrams
from groupwise.engine.local import LocalEngine
from groupwise.engine.lookup import standing
from groupwise.engine.ngrams import History
from groupwise.errors import ConfigError
from groupwise.model.chat import decode
from groupwise.types import Completion, FinishReason, PolicyVersion, SamplingParams, SamplingRequest
from slow_cases import slow_but
from wording import raises

BASE, FIRST, SECOND = PolicyVersion.base(), PolicyVersion("first", 1), PolicyVersion("second", 3)
LOOP = (5, 9, 2, 7) * 4
OpenPair = Callable[..., tuple[LocalEngine, LocalEngine]]


@pytest.fixture
def open_pair(make_base) -> Iterator[OpenPair]:
    """`open_pair("qwen3", draft_tokens=4)`: engines over one model, without drafts and with."""
    opened: list[LocalEngine] = []

    def make(architecture: str = "qwen3", *, draft_tokens: int = 4, context: int = 128, **options):
        base = make_base(architecture, context=context)
        opened.extend(LocalEngine(base, draft_tokens=most, lanes=1, **options) for most in (0, draft_tokens))
        return opened[-2], opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is checked."""
    monkeypatch.setattr(lookup, "LEAST_DRAFTED", 0.0)
    monkeypatch.setattr(ngrams, "LONGEST_WAIT", 0)


@pytest.fixture
def foresee(monkeypatch: pytest.MonkeyPatch, eager: None):
    """`foresee(asked, answers, wrong=0.5)`: drafts are what will be said; this share of them goes wrong somewhere."""

    def install(asked: list[SamplingRequest], answers: list[list[Completion]], *, wrong: float) -> None:
        rng = random.Random(0)
        texts = [each.prompt_ids + done.token_ids for each, group in zip(asked, answers, strict=True) for done in group]

        def draft(self: History, most: int) -> list[int]:
            here = len(self.ids)
            drafted = next((list(text[here : here + most]) for text in texts if text[:here] == tuple(self.ids)), [])
            if most > 0 and drafted and rng.random() < wrong:
                at = rng.randrange(len(drafted))
                drafted[at] = (drafted[at] + 1) % 250
            return drafted if most > 0 else []

        monkeypatch.setattr(History, "draft", draft)

    return install


def request(prompt: tuple[int, ...] = LOOP, *, n: int = 1, version=BASE, cache: bool = False, **params):
    params = {"max_tokens": 24, "seed": 5, "ignore_eos": True} | params
    return SamplingRequest(prompt_ids=prompt, n=n, version=version, cache=cache, params=SamplingParams(**params))


def counts(engine: LocalEngine) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    stats = engine.stats()
    return stats["drafted"], stats["accepted"]


def assert_same(one: list[list[Completion]], other: list[list[Completion]]) -> None:
    """All that completions say, log-probabilities up to rounding."""
    for mine, theirs in zip(chain(*one), chain(*other), strict=True):
        assert _exact(mine) == _exact(theirs)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-9)
        assert mine.kept_logprobs == pytest.approx(theirs.kept_logprobs, abs=1e-9)
        for pairs, others in zip(mine.top_logprobs, theirs.top_logprobs, strict=True):
            assert [i for i, _ in pairs] == [i for i, _ in others]
            assert [value for _, value in pairs] == pytest.approx([value for _, value in others], abs=1e-9)


def _exact(said: Completion) -> Completion:
    return replace(said, logprobs=(), top_logprobs=(), kept_logprobs=(0.0,) * len(said.kept_logprobs))


# ---- the same tokens ----


def test_the_draws_of_plain_decoding(open_pair: OpenPair, architecture: str, eager: None):
    """Rows of several prompts, temperatures and truncations in one batch; drafts stood and failed."""
    plain, drafting = open_pair(architecture, max_rows=12)
    asked = [
        request(temperature=0.0, max_tokens=40),
        request((1, 2, 3), n=2, temperature=0.0, max_tokens=33),
        request(n=3, temperature=0.4, top_k=4),
        request((4, 4, 4, 4, 8) * 3, n=2, temperature=0.5, top_p=0.8, seed=11),
        request((3, 1) * 6, n=2, temperature=0.6, min_p=0.05, max_tokens=30),
        request((6,), temperature=0.3, seed=2),
    ]
    assert_same(drafting.generate(asked), plain.generate(asked))
    drafted, accepted = counts(drafting)
    assert 0 < accepted < drafted
    assert plain.stats().keys().isdisjoint({"drafted", "accepted"})


def test_the_draws_of_plain_decoding_with_changed_logits(open_pair: OpenPair, eager: None):
    """Completions with penalties are not drafted; those with a bias, or a least length, are."""
    plain, drafting = open_pair(max_rows=12)
    asked = [
        request(temperature=0.0, max_tokens=40),
        request(temperature=0.4, logit_bias=((5, 2.0), (11, -3.0)), max_tokens=30),
        request((1, 2, 3), n=2, temperature=0.5, min_tokens=20, max_tokens=30, ignore_eos=False, stop_ids=(2, 9)),
        request(temperature=0.4, repetition_penalty=1.3),
        request(temperature=0.4, frequency_penalty=0.5, presence_penalty=0.5, seed=7),
    ]
    assert_same(drafting.generate(asked), plain.generate(asked))
    drafted, accepted = counts(drafting)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("draft_tokens", slow_but({3}, of=(1, 3, 9)))
def test_whatever_is_drafted_the_draws_are_the_same(open_pair: OpenPair, architecture: str, foresee, draft_tokens: int):
    """Drafts that are right for a while and then, one time in two, wrong; at temperature 1, in uneven rows."""
    plain, drafting = open_pair(architecture, draft_tokens=draft_tokens, max_rows=4)
    asked = [request((1 + i, 2, 3)[: 1 + i % 3], n=1 + i % 3, seed=i, max_tokens=9 + 7 * i) for i in range(5)]
    expected = plain.generate(asked)
    foresee(asked, expected, wrong=0.5)
    assert_same(drafting.generate(asked), expected)
    drafted, accepted = counts(drafting)
    assert 0.2 * drafted < accepted < 0.9 * drafted


@pytest.mark.slow
def test_lookups_stand_and_fail_at_every_temperature(open_pair: OpenPair):
    """With waits, and with the least that is checked; colder is more predictable."""
    plain, drafting = open_pair()
    shares = []
    for temperature in (0.0, 0.5, 1.0):
        before = counts(drafting)
        prompts = [(*LOOP[:7], seed, *LOOP[: 9 - seed]) for seed in range(8)]
        asked = [request(p, temperature=temperature, seed=seed, max_tokens=60) for seed, p in enumerate(prompts)]
        for each in asked:
            assert_same(drafting.generate([each]), plain.generate([each]))
        drafted, accepted = (now - then for now, then in zip(counts(drafting), before, strict=True))
        assert 0 < accepted < drafted
        shares.append(accepted / drafted)
    assert shares[0] > shares[-1]


def test_many_rows_of_uneven_lengths(open_pair: OpenPair, foresee, monkeypatch: pytest.MonkeyPatch):
    """More rows than are read at once; they are sorted on the way."""
    monkeypatch.setattr(lookup, "MOST_RUN_CPU", 10**6)
    plain, drafting = open_pair(max_rows=40)
    asked = [request((2 + i, 3), n=4, seed=i, max_tokens=3 + 5 * i) for i in range(13)]
    expected = plain.generate(asked)
    foresee(asked, expected, wrong=0.3)
    assert_same(drafting.generate(asked), expected)
    drafted, accepted = counts(drafting)
    assert 100 < accepted < drafted


def test_adapters_in_one_batch(open_pair: OpenPair, make_base, make_adapter, foresee):
    plain, drafting = open_pair()
    for version, seed in ((FIRST, 1), (SECOND, 2)):
        directory = make_adapter(make_base(context=128), seed=seed, rank=1 + seed)
        for engine in (plain, drafting):
            engine.load(version, directory)
    asked = [request((1, 2), n=2, version=version, seed=3) for version in (FIRST, BASE, SECOND, FIRST)]
    expected = plain.generate(asked)
    foresee(asked, expected, wrong=0.4)
    assert_same(drafting.generate(asked), expected)
    assert len({tuple(each.token_ids for each in group) for group in expected}) == 3 and counts(drafting)[1] > 0


# ---- ends among accepted drafts ----


@pytest.mark.parametrize("which", range(1, 6))
def test_ends_within_a_draft(open_pair: OpenPair, foresee, which: int):
    """By max_tokens, stop id, end of turn and stop string; nothing that was drawn beyond it is there."""
    plain, drafting = open_pair(draft_tokens=8)
    [[whole]] = plain.generate([request((1, 2, 3))])
    spoken = [decode((token,), plain._base.tokenizer) for token in whole.token_ids]
    length = [i + 1 for i, text in enumerate(spoken) if text.isascii() and text and text not in "".join(spoken[:i])][
        which
    ]
    token, cut = whole.token_ids[length - 1], spoken[length - 1]
    for engine in (plain, drafting):
        engine._shared.eos, engine._shared.eos_ids = torch.tensor([token]), (token,)
    asked = [
        request((1, 2, 3), max_tokens=length),
        request((1, 2, 3), stop_ids=(token,)),
        request((1, 2, 3), ignore_eos=False),
        request((1, 2, 3), stop=(cut,)),
        request((1, 2, 3), max_tokens=length, ignore_eos=False),
    ]
    expected = plain.generate(asked)
    ends = [group[0].finish_reason for group in expected]
    assert ends == [FinishReason.LENGTH, *[FinishReason.STOP] * 4]
    assert [len(group[0].token_ids) for group in expected[:3]] == [length] * 3
    foresee(asked, [[whole]] * len(asked), wrong=0.0)
    for each, group in zip(asked, expected, strict=True):
        assert_same(drafting.generate([each]), [group])
    assert_same(drafting.generate(asked), expected)
    assert counts(drafting)[1] > 0 and drafting._lanes[0].decoder.cache.lengths == []


def test_a_full_context(open_pair: OpenPair):
    plain, drafting = open_pair(context=40)
    asked = [request(temperature=0.0, max_tokens=100)]
    assert_same(drafting.generate(asked), plain.generate(asked))
    assert len(drafting.generate(asked)[0][0].token_ids) == 40 - len(LOOP) and counts(drafting)[1] > 0


def test_a_stream_hears_every_token_in_order(open_pair: OpenPair, foresee):
    asked = request((1, 2, 3), n=3, max_tokens=20, temperature=0.8, top_logprobs=4)
    plain, drafting = open_pair()
    expected = plain.generate([asked])
    foresee([asked], expected, wrong=0.4)
    heard: dict[int, list] = {0: [], 1: [], 2: []}
    [future] = drafting.submit([asked], on_token=lambda index, *token: heard[index].append(token))
    group = future.result(timeout=120)
    assert_same([group], expected)
    for index, completion in enumerate(group):
        said = zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True)
        assert heard[index] == list(said) and len(heard[index]) == 20
    assert counts(drafting)[1] > 0


# ---- what is in the cache ----


def test_conversations_go_on_from_what_stood(open_pair: OpenPair, make_base, architecture: str, foresee):
    """Three turns, each computing only what is new: keys and values of drafts that failed are not kept."""
    plain, drafting = open_pair(architecture, draft_tokens=6, context=256)
    prompts = [tuple((7 * i + p) % 250 for i in range(18 + p)) for p in range(3)]
    for turn in range(3):
        asked = [request(p, seed=turn, max_tokens=7 + i, cache=True) for i, p in enumerate(prompts)]
        expected = plain.generate([replace(each, cache=False) for each in asked])
        foresee(asked, expected, wrong=0.5)
        answers = drafting.generate(asked)
        assert_same(answers, expected)
        prompts = [
            (*each.prompt_ids, *group[0].token_ids, 9, 8, turn) for each, group in zip(asked, answers, strict=True)
        ]
    drafted, accepted = counts(drafting)
    assert 0 < accepted < drafted and len(drafting._past) == 3


def test_cancelled_among_drafts(open_pair: OpenPair, foresee):
    """Who goes away in the middle of a step leaves the others as they were."""
    plain, drafting = open_pair()
    asked = [request((1, 2), n=2, max_tokens=60), request((4, 5), n=2, max_tokens=30)]
    expected = plain.generate(asked)
    foresee(asked, expected, wrong=0.3)
    futures: list = []

    def heard(index: int, token: int, logprob: float, top: tuple) -> None:
        if len(futures) == 2 and drafting._lanes[0].decoder.rows.owners[0].history.said > 10:
            futures[0].cancel()

    futures += drafting.submit(asked, on_token=heard)
    assert_same([futures[1].result(timeout=120)], expected[1:])
    assert futures[0].cancelled() and counts(drafting)[1] > 0
    assert_same(drafting.generate(asked), expected)


# ---- where it pays ----


def test_a_step_has_a_limit(open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch, eager: None):
    monkeypatch.setattr(lookup, "MOST_RUN_CPU", 12)
    _, drafting = open_pair(draft_tokens=8)
    sizes: list[int] = []
    decoder = drafting._lanes[0].decoder
    forward = decoder._forward
    monkeypatch.setattr(decoder, "_forward", lambda ids, *rest: (sizes.append(len(ids)), forward(ids, *rest))[1])
    for rows, most in ((1, 9), (3, 12), (4, 12), (6, 12), (7, 7), (12, 12)):
        sizes.clear()
        drafting.generate([request(n=rows, temperature=0.0, max_tokens=30)])
        assert max(sizes[1:]) == most, rows


def test_few_drafts_among_many_rows_are_not_checked(open_pair: OpenPair):
    """A looping row by itself and one among rows that never repeat themselves."""
    _, drafting = open_pair(draft_tokens=4)
    drafting.generate([request(temperature=0.0)])
    alone, _ = counts(drafting)
    assert alone > 0
    drafting.generate([request(temperature=0.0), *(request((i, 9), temperature=50.0) for i in range(12))])
    assert counts(drafting)[0] - alone < alone


def test_what_stands():
    assert standing((4, 5, 6), (4, 5), ()) == 3
    assert standing((4, 7, 6), (4, 5), ()) == 2
    assert standing((4, 5, 6), (4, 5), (4, 5)) == 1
    assert standing((4,), (), (4,)) == 1


@pytest.mark.parametrize("most", [-1, lookup.MOST_DRAFTED + 1])
def test_too_many(make_base, most: int):
    """For the engine, a run's config and a server's, which take the rest."""
    for settings in (RolloutConfig, ServeConfig):
        with raises(ValueError):
            settings(draft_tokens=most)
        assert settings(draft_tokens=lookup.MOST_DRAFTED).draft_tokens == lookup.MOST_DRAFTED
    with raises(ConfigError):
        LocalEngine(make_base(), draft_tokens=most)
