"""n entries whatever happens, tokens that are the engine's own, and a window that fits the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_project import save_model
from groupwise.bridges.cookbook.config import DeployConfig
from groupwise.engine.local import LocalEngine
from groupwise.engine.rows import Row
from groupwise.errors import ConfigError, DataError, GrammarError
from groupwise.model.chat import encode_prompt
from groupwise.model.load import LoadedModel
from groupwise.recorded import RoutedExperts, SamplingMask
from groupwise.sdk.concurrency import AdaptiveConcurrency
from groupwise.sdk.config import LoopConfig
from groupwise.sdk.datums import Datum, build_grpo_datums
from groupwise.sdk.deployment import Deployment
from groupwise.sdk.infra import setup_infra
from groupwise.sdk.sampler import DeploymentSampler, SampledCompletion, Status
from groupwise.sdk.trainer import TrainingService
from groupwise.store.adapters import AdapterStore
from groupwise.types import Completion, Grammar, Message, PolicyVersion, Prompt, SamplingRequest
from wording import raises

QUESTION: list[Message] = [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}]


class Faulty(Deployment):
    """A deployment of which some requests fail or never answer; the others are the engine's."""

    fails: tuple[int, ...] = ()
    hangs: tuple[int, ...] = ()
    asked = 0

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        futures = super().submit(requests)
        for number, future in enumerate(futures, start=self.asked):
            if number in self.fails:
                future.cancel()
                futures[number - self.asked] = failed = Future()
                failed.set_exception(OSError("the cable"))
            if number in self.hangs:
                future.cancel()
                futures[number - self.asked] = Future()
        self.asked += len(futures)
        return futures


@pytest.fixture
def deployment(starter: LoadedModel, starter_engine: LocalEngine, tmp_path: Path) -> Faulty:
    return Faulty("tests", base=starter, engine=starter_engine, store=AdapterStore(tmp_path))


@pytest.fixture
def sampler(deployment: Faulty) -> DeploymentSampler:
    return DeploymentSampler(deployment, tokenizer_model="starter", seed=3)


def sample(sampler: DeploymentSampler, **options) -> list[SampledCompletion]:
    return asyncio.run(sampler.sample_with_tokens(QUESTION, **({"n": 4, "max_tokens": 64} | options)))


def test_tokens_are_those_of_the_template_and_of_the_engine(sampler: DeploymentSampler, starter: LoadedModel) -> None:
    prompt = encode_prompt(Prompt(id="q", messages=tuple(QUESTION)), starter.tokenizer).token_ids
    for completion in sample(sampler):
        assert completion.status is Status.OK and completion.sampled and completion.error is None
        assert completion.full_tokens[: completion.prompt_len] == prompt
        assert completion.text in starter.tokenizer.decode(completion.full_tokens)
        assert completion.datum().tokens == completion.full_tokens
        assert completion.datum().loss_tokens == completion.completion_len


def test_inference_gives_n_logprobs_the_first_none(sampler: DeploymentSampler, starter_engine: LocalEngine) -> None:
    plain, echoed = sample(sampler, n=1, seed=1)[0], sample(sampler, n=1, seed=1, echo=True)[0]
    assert plain.full_tokens == echoed.full_tokens
    for completion in (plain, echoed):
        assert len(completion.inference_logprobs) == len(completion.full_tokens)
        assert completion.inference_logprobs[0] is None
        assert completion.inference_logprobs[completion.prompt_len :] == plain.inference_logprobs[plain.prompt_len :]
    assert set(plain.inference_logprobs[: plain.prompt_len]) == {None}
    ids = echoed.full_tokens
    scored = starter_engine.score(ids[:1], ids[1:], PolicyVersion.base())
    assert echoed.inference_logprobs[1:] == pytest.approx(scored, abs=1e-4)


def test_what_is_drawn_from_a_part_of_the_vocabulary_carries_that_part(sampler: DeploymentSampler) -> None:
    """Into its datum and the learner's sample; changed to a token that it could not be, it is refused."""
    (entry,) = sample(sampler, n=1, top_p=0.9, temperature=2.0)
    (datum,) = build_grpo_datums([entry.datum()], [1.0], [entry.inference_logprobs], entry.prompt_len)
    trained = datum.sample("advantages")
    assert entry.kept is not None and trained.kept == entry.kept and all(entry.kept.has(trained.completion_ids))
    assert trained.behaviour_logprobs == entry.inference_logprobs[entry.prompt_len :]
    assert datum.whole().kept.cut(entry.prompt_len - 1) == entry.kept
    assert entry.datum().sample("weights").kept is None  # cross-entropy is of the whole vocabulary
    another = [int(not inside) for inside in entry.kept.array()[0]].index(1)
    targets = [*datum.targets]
    targets[entry.prompt_len - 1] = another
    with raises(DataError):
        datum.having(target_tokens=targets)
    with raises(DataError):
        replace(datum, kept=SamplingMask.whole(9, 1))


def other_experts(routed: RoutedExperts | None, *, of: int) -> RoutedExperts:
    """The next expert in place of each."""
    assert routed is not None
    return RoutedExperts.of((routed.array() + 1) % of)


def test_a_datum_of_a_mixture_is_trained_with_the_experts_that_it_was_sampled_with(make_base, tmp_path: Path) -> None:
    """Which the sampler of `setup_infra` records; and with others, where the datum says others."""
    base = make_base("qwen3_moe", dtype=torch.float32, context=256, num_experts=16, num_experts_per_tok=4)
    model = str(save_model(base, tmp_path / "model"))
    deployment = DeployConfig(tokenizer_model=model)
    config = LoopConfig(log_path=str(tmp_path / "log"), base_model=model, deployment=deployment)
    with setup_infra(config, needs_reference=True, needs_inference=True) as infra:
        assert infra.sampler is not None and infra.reference is not None
        entries = sample(infra.sampler, max_tokens=24, seed=1)
        values = [entry.inference_logprobs for entry in entries]
        plain, policy = [entry.datum() for entry in entries], infra.policy
        data = build_grpo_datums(plain, [1.0, -1.0, 0.5, -0.5], values, entries[0].prompt_len)
        for entry, datum in zip(entries, data, strict=True):
            assert entry.routed_experts is not None and datum.routed_experts == entry.routed_experts
            assert entry.routed_experts.shape == (len(datum.model_input), 2, 4)
            assert entry.datum().sample("weights").routed_experts is None
        others = [replace(datum, routed_experts=other_experts(datum.routed_experts, of=16)) for datum in data]
        replayed, otherwise, anew = (
            policy.forward_backward(each, "ppo").result().metrics
            for each in (data, others, [replace(datum, routed_experts=None) for datum in data])
        )
        for metrics, recorded in ((replayed, 1), (otherwise, 1), (anew, 0)):
            assert metrics["router/recorded_frac"] == pytest.approx(recorded)
        assert replayed["router/mismatch_frac"] < 0.02 and otherwise["router/mismatch_frac"] > 0.9
        assert replayed["mismatch/kl"] < 1e-6 < otherwise["mismatch/kl"]
        for client in (policy, infra.reference):
            mine, theirs = (client.forward(each).result().logprobs for each in (data, others))
            assert all(list(a) != pytest.approx(list(b), abs=1e-3) for a, b in zip(mine, theirs, strict=True))
    with raises(DataError):
        Datum(model_input=[1, 2], loss_fn_inputs={"target_tokens": [2, 3]}, routed_experts=data[0].routed_experts)
    dense = TrainingService(make_base("qwen3", dtype=torch.float32, context=256))
    with closing(dense), raises(DataError):
        dense.create_training_client().forward(data)


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}])
def test_what_is_drawn_from_a_part_that_nobody_recorded_is_not_for_policy_losses(
    sampler: DeploymentSampler, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of vLLM. Its log-probabilities would be of the whole distribution, and the ratio 1 although it was drawn
    otherwise."""
    monkeypatch.setattr(Row, "sampling_mask", lambda self, vocabulary: None)
    (entry,) = sample(sampler, n=1, **options)
    assert entry.sampled and entry.text and set(entry.inference_logprobs) == {None}
    assert entry.datum().loss_tokens == entry.completion_len  # cross-entropy needs none
    with raises(DataError):
        build_grpo_datums([entry.datum()], [1.0], [entry.inference_logprobs], entry.prompt_len)


def test_the_same_seed_draws_the_same_and_each_of_n_its_own(sampler: DeploymentSampler) -> None:
    one, again, other = sample(sampler, seed=5), sample(sampler, seed=5), sample(sampler, seed=6)
    assert [c.full_tokens for c in one] == [c.full_tokens for c in again] != [c.full_tokens for c in other]
    assert len({c.full_tokens for c in sample(sampler, n=8, seed=5, temperature=2.0)}) > 1
    fresh = DeploymentSampler(sampler.deployment, tokenizer_model="starter", seed=3)
    first = DeploymentSampler(sampler.deployment, tokenizer_model="starter", seed=3)
    assert [c.full_tokens for _ in range(2) for c in sample(first)] == [
        c.full_tokens for _ in range(2) for c in sample(fresh)
    ]


def test_some_fail_and_n_come_back(deployment: Faulty, sampler: DeploymentSampler) -> None:
    deployment.fails, deployment.hangs, sampler.timeout_s = (1,), (3,), 1.5
    found = sample(sampler, n=5)
    assert [c.status for c in found] == [Status.OK, Status.FAILED, Status.OK, Status.FAILED, Status.OK]
    assert found[1].error == "OSError: the cable" and found[3].error == "no answer in 1.5 s"
    assert not found[1].sampled and not found[1].inference_logprobs
    with raises(DataError):
        found[1].datum()
    assert sampler.concurrency.in_flight == 0


def test_one_that_the_engine_refuses_does_not_cost_the_others(sampler: DeploymentSampler) -> None:
    async def both() -> list[list[SampledCompletion]]:
        known = sampler.sample_with_tokens(QUESTION, 2, max_tokens=64)
        unknown = sampler.sample([10**6], 2, max_tokens=4)  # no such token
        return list(await asyncio.gather(known, unknown))

    known, unknown = asyncio.run(both())
    assert all(c.sampled for c in known)
    assert [c.status for c in unknown] == [Status.FAILED] * 2 and "ModelError" in str(unknown[0].error)


def test_gathered_calls_are_admitted_together(deployment: Faulty, sampler: DeploymentSampler) -> None:
    sizes: list[int] = []
    submit = deployment.submit
    deployment.submit = lambda requests: sizes.append(len(requests)) or submit(requests)  # type: ignore[method-assign]

    async def several() -> None:
        await asyncio.gather(*(sampler.sample_with_tokens(QUESTION, 3, max_tokens=2) for _ in range(4)))

    asyncio.run(several())
    assert sizes == [12]


def test_what_is_cut_or_does_not_fit_says_so(sampler: DeploymentSampler) -> None:
    assert {c.status for c in sample(sampler, max_tokens=1)} == {Status.TRUNCATED}
    prompt = sample(sampler, n=1)[0].prompt_len
    sampler.max_seq_len = prompt + 2
    assert all(c.status is Status.TRUNCATED and c.completion_len == 2 for c in sample(sampler, temperature=2.0, n=2))
    sampler.max_seq_len = prompt
    found = sample(sampler, n=3)
    assert [c.status for c in found] == [Status.OVERLONG] * 3 and f"has {prompt} tokens" in str(found[0].error)


def test_an_error_of_the_callers_is_raised(sampler: DeploymentSampler) -> None:
    with raises(ConfigError):
        sample(sampler, n=0)
    with raises(ValueError):
        sample(sampler, top_p=2.0)
    with raises(ConfigError):
        sample(sampler, grammar="[0-9]+")
    for messages in ("What is 2 + 2?", {"role": "user", "content": "2 + 2?"}, ["2 + 2?"]):
        with raises(DataError):
            asyncio.run(sampler.sample_with_tokens(messages))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("unset", [None, ""])
def test_a_tokenizer_must_be_named(deployment: Faulty, unset: str | None) -> None:
    with raises(ValueError):
        DeploymentSampler(deployment, tokenizer_model=unset)


def test_another_models_tokenizer_is_refused(deployment: Faulty, model_dir: Path) -> None:
    with raises(ConfigError):
        DeploymentSampler(deployment, tokenizer_model=str(model_dir))


def test_a_version_is_held_while_it_samples(deployment: Faulty, starter: LoadedModel, make_adapter) -> None:
    """A sync in the middle of a call: what waits for its slot is still sampled by the version of the call."""
    first, second = PolicyVersion("held", 1), PolicyVersion("held", 2)
    for seed, version in enumerate((first, second)):
        deployment.load(version, make_adapter(starter, seed=seed))
    deployment.serve(first)
    narrow = DeploymentSampler(deployment, tokenizer_model="starter", concurrency=AdaptiveConcurrency(initial=1))

    async def syncing() -> list[SampledCompletion]:
        call = asyncio.create_task(narrow.sample_with_tokens(QUESTION, 4, max_tokens=4))
        await asyncio.sleep(0.01)
        deployment.serve(second)
        return [*await call, *await narrow.sample_with_tokens(QUESTION, 1, max_tokens=4, version=second)]

    found = asyncio.run(syncing())
    assert [c.version for c in found] == [first] * 4 + [second] and not any(c.error for c in found)
    assert deployment.engine.stats()["adapters"] == 1  # the first was let go of after the last that held it
    deployment.serve(PolicyVersion.base())
    assert deployment.engine.stats()["adapters"] == 0


# ---- the window ----


def run_window(window: AdaptiveConcurrency, count: int, backlog: float) -> int:
    """So many short requests -> the most that were under way at once."""
    most = 0

    async def one() -> None:
        nonlocal most
        async with window.slot():
            most = max(most, window.in_flight)
            await asyncio.sleep(0)
            window.observe(backlog)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(all_of_them())
    assert window.in_flight == 0
    return most


def test_the_window_is_kept_grows_when_full_and_halves_when_behind() -> None:
    window = AdaptiveConcurrency(initial=8, maximum=16, every=8)
    assert run_window(window, 8, backlog=0.0) == 8 and window.window == 12.0
    assert run_window(window, 40, backlog=0.0) >= 12 and window.window == 16.0  # not beyond the maximum
    run_window(window, 8, backlog=50.0)
    assert window.window == 8.0
    run_window(window, 80, backlog=50.0)
    assert window.window == 1.0  # nor below the minimum
    assert run_window(window, 5, backlog=50.0) == 1


def test_a_window_that_is_not_filled_does_not_grow() -> None:
    window = AdaptiveConcurrency(initial=8, every=4)
    for _ in range(10):
        run_window(window, 2, backlog=0.0)
    assert window.window == 8.0


def test_who_gives_up_waiting_leaves_the_turn_to_the_next() -> None:
    window = AdaptiveConcurrency(initial=1)

    async def scene() -> str:
        async with window.slot():
            impatient = asyncio.create_task(window.slot().__aenter__())
            patient = asyncio.create_task(window.slot().__aenter__())
            await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait_for(patient, 5)
        return "had its turn"

    assert asyncio.run(scene()) == "had its turn"


def test_the_engines_backlog_narrows_the_window(starter: LoadedModel, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    engine = LocalEngine(starter, max_rows=2)
    deployment = Deployment("narrow", base=starter, engine=engine, store=AdapterStore(tmp_path))
    window = AdaptiveConcurrency(initial=32, maximum=64, every=8)
    sampler = DeploymentSampler(deployment, tokenizer_model="starter", concurrency=window)
    assert {c.status for c in sample(sampler, n=32, max_tokens=3)} <= {Status.OK, Status.TRUNCATED}
    assert window.window < 32 and window.backlog > 0
    deployment.close()
    deployment.close()
    assert not [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("bounds", [{"initial": 0}, {"initial": 300}, {"minimum": 65}, {"target": 0.0}, {"every": 0}])
def test_a_window_has_bounds(bounds: dict) -> None:
    with pytest.raises(ConfigError):
        AdaptiveConcurrency(**bounds)


def test_a_stop_text_is_one_and_what_is_no_token_is_told_so(sampler: DeploymentSampler) -> None:
    several = sample(sampler, seed=1, max_tokens=24, n=1, stop=("47", "never"))
    assert sample(sampler, seed=1, max_tokens=24, n=1, stop="47")[0].full_tokens == several[0].full_tokens
    for n in ("2", 0, True, 1.5):
        with raises(ConfigError):
            sample(sampler, n=n)
    tokens = [5, 6, 7]
    kinds = [np.array(tokens), torch.tensor(tokens), [np.int64(token) for token in tokens]]
    for given in (tokens, *kinds):
        (entry,) = asyncio.run(sampler.sample(given, max_tokens=1))  # pyright: ignore[reportArgumentType]
        assert entry.full_tokens[:3] == (5, 6, 7) and entry.sampled
    for ids in ("abc", [1, "x"], [True], [1.0]):
        with raises(DataError):
            asyncio.run(sampler.sample(ids))  # pyright: ignore[reportArgumentType]


def test_completions_are_text_of_a_grammar_which_their_log_probabilities_are_under(sampler: DeploymentSampler) -> None:
    for each in sample(sampler, grammar=Grammar.choice(["apples", "pears"]), n=6):
        assert each.status is Status.OK and each.text.rpartition("</think>")[2].strip() in ("apples", "pears")
        assert each.kept is not None and each.datum().kept is not None
        assert None not in each.inference_logprobs[each.prompt_len :]
    with raises(GrammarError, field="grammar"):
        sample(sampler, grammar=Grammar.regex("("))
    assert all(each.sampled for each in sample(sampler))
