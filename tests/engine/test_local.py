"""The local engine against the trainer's forward and transformers' generate; batching, seeds, ends, errors, threads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuda_errors import ASSERT, cuda_error
from groupwise.config.lora import LoraSpec
from groupwise.engine import admission, decoder, local, packed
from groupwise.engine.local import LocalEngine
from groupwise.engine.sampling import sample_tokens
from groupwise.errors import (
    AdapterError,
    AdapterNotFoundError,
    ConfigError,
    ContextLengthError,
    DeviceLostError,
    GroupwiseError,
    ModelError,
)
from groupwise.model.chat import decode
from groupwise.model.head import Head
from groupwise.model.load import plain_attention
from groupwise.tasks.reply import Detokenizer
from groupwise.train.learner import Learner
from groupwise.types import (
    Completion,
    FinishReason,
    PolicyVersion,
    Sample,
    SamplingParams,
    SamplingRequest,
    SequenceScores,
)
from slow_cases import crossed
from wording import raises, warns

BASE = PolicyVersion.base()
FIRST, SECOND = PolicyVersion("first", 1), PolicyVersion("second", 3)


@pytest.fixture
def open_engine(make_base) -> Iterator:
    """`open_engine("qwen3", max_rows=4)`; every engine of the test is closed after it."""
    opened: list[LocalEngine] = []

    def make(architecture: str = "qwen3", *, dtype=torch.float64, context: int = 64, **options) -> LocalEngine:
        options = {"lanes": 1} | options
        opened.append(LocalEngine(make_base(architecture, dtype=dtype, context=context), **options))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def request(prompt: int | tuple[int, ...] = (1, 2, 3), *, n: int = 1, version=BASE, **params):
    ids = tuple((7 * i + prompt) % 250 for i in range(3 + prompt % 5)) if isinstance(prompt, int) else prompt
    params = {"max_tokens": 8, "seed": 5, "ignore_eos": True} | params
    return SamplingRequest(prompt_ids=ids, n=n, version=version, params=SamplingParams(**params))


def as_samples(requests: list[SamplingRequest], groups: list[list[Completion]]) -> list[Sample]:
    return [
        Sample(prompt_ids=r.prompt_ids, completion_ids=c.token_ids, mask=(1,) * len(c.token_ids))
        for r, group in zip(requests, groups, strict=True)
        for c in group
    ]


def sampled_logprobs(groups: list[list[Completion]]) -> list[tuple[float, ...]]:
    return [c.logprobs for group in groups for c in group]


def ids_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group] for group in groups]


# ---- what is sampled ----


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_behaviour_logprobs_are_the_trainers(open_engine, make_base, make_adapter, architecture, dtype, exact):
    """Base and adapter, several temperatures, truncated and not: what the engine reports the trainer computes."""
    base = make_base(architecture, dtype=dtype)
    directory = make_adapter(base)
    engine = open_engine(architecture, dtype=dtype)
    engine.load(FIRST, directory)
    adapted = Learner(base, lora=LoraSpec(rank=3, alpha=6.0))
    adapted.load_adapter(directory)
    for temperature, more in ((1.0, {}), (0.7, {"top_k": 20, "min_p": 0.01}), (1.5, {"top_p": 0.9})):
        for version in (BASE, FIRST):
            asked = [
                request(p, n=n, version=version, temperature=temperature, max_tokens=12, **more)
                for p, n in ((1, 3), (8, 2))
            ]
            groups = engine.generate(asked)
            expected = adapted.forward(as_samples(asked, groups), temperature=temperature, reference=version.is_base)
            for mine, theirs in zip(sampled_logprobs(groups), expected, strict=True):
                assert mine == pytest.approx(theirs, abs=exact)


def test_adapters_in_one_batch(open_engine, make_base, make_adapter, architecture: str):
    """Base and two adapters side by side: each as if alone, and the three differ."""
    base = make_base(architecture)
    engine = open_engine(architecture, max_rows=16)
    for version, seed in ((FIRST, 1), (SECOND, 2)):
        engine.load(version, make_adapter(base, seed=seed, rank=1 + seed))
    versions = (FIRST, BASE, SECOND, FIRST)
    asked = [request(4, n=2, version=version, temperature=0.8) for version in versions]
    together = engine.generate(asked)
    alone = [engine.generate([each])[0] for each in asked]
    assert ids_of(together) == ids_of(alone)
    for mine, theirs in zip(sampled_logprobs(together), sampled_logprobs(alone), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
    assert len({str(group) for group in ids_of(together)}) == 3 and ids_of(together)[0] == ids_of(together)[3]
    assert [group[0].version for group in together] == list(versions)
    untouched = open_engine(architecture).generate([asked[1]])
    assert ids_of([together[1]]) == ids_of(untouched)


def test_greedy_equals_generate(open_engine, make_base, architecture: str):
    base, engine = make_base(architecture), open_engine(architecture)
    asked = [request(p, temperature=0.0, max_tokens=20) for p in (1, 7, 13)]
    for each, (completion,) in zip(asked, engine.generate(asked), strict=True):
        ids = torch.tensor([each.prompt_ids])
        out = base.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            use_cache=True,
        )
        assert completion.token_ids == tuple(out[0, ids.shape[1] :].tolist())


def test_full_parameter_training_is_seen_at_once(make_base, make_samples):
    base = make_base(dtype=torch.float32)
    engine, learner = LocalEngine(base), Learner(base, lora=None)
    version = PolicyVersion("whole", 1)
    try:
        with pytest.raises(AdapterNotFoundError):
            engine.generate([request(version=version)])
        from groupwise.algo.loss import resolve_loss

        learner.step(make_samples(((4, (6,)),)), resolve_loss("reinforce"), learning_rate=0.01)
        engine.adopt(version)
        asked = [request(n=2, version=version)]
        groups = engine.generate(asked)
        assert groups[0][0].version == version
        for mine, theirs in zip(sampled_logprobs(groups), learner.forward(as_samples(asked, groups)), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
    finally:
        engine.close()


# ---- batching ----


@pytest.mark.parametrize(
    ("architecture", "max_rows"),
    [("qwen3", 1), ("qwen3", 5), ("llama", 3), ("gemma3", 3), ("gemma2", 3), ("gpt2", 3)],
)
def test_few_rows_and_many_requests(open_engine, make_base, make_adapter, max_rows: int, architecture: str):
    """Requests of different lengths, sizes and adapters through few rows: each exactly as alone on an empty engine."""
    roomy, narrow = open_engine(architecture), open_engine(architecture, max_rows=max_rows)
    directory = make_adapter(make_base(architecture))
    for engine in (roomy, narrow):
        engine.load(FIRST, directory)
    asked = [
        request(p, n=1 + p % 4, max_tokens=1 + (5 * p) % 13, seed=p, version=FIRST if p % 3 else BASE) for p in range(9)
    ]
    assert ids_of(narrow.generate(asked)) == [ids_of(roomy.generate([each]))[0] for each in asked]


def test_seeds(open_engine):
    engine = open_engine()
    (first,), (again,) = (engine.generate([request(n=4)]) for _ in range(2))
    assert first == again
    assert len({c.token_ids for c in first}) == 4
    fewer, other = ids_of(engine.generate([request(n=2), request(n=2, seed=6)]))
    assert fewer == [c.token_ids for c in first[:2]] and other != fewer
    unseeded = [engine.generate([request(seed=None)])[0][0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_the_prompt_is_prefilled_once_for_its_group(open_engine, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine(max_rows=8)
    embedding, seen = engine._model.get_input_embeddings(), []
    embedding.register_forward_hook(lambda module, args, output: seen.append(args[0].numel()))
    engine.generate([request(tuple(range(20)), n=8, max_tokens=4)])
    assert seen == [20, 8, 8, 8]
    seen.clear()
    monkeypatch.setattr(packed, "PREFILL_TOKENS", 40)  # with padding: a prompt of 20 and one of 3 are 40
    engine.generate(
        [request(tuple(range(20)), max_tokens=1), request((1, 2, 3), max_tokens=1), request((4,), max_tokens=1)]
    )
    assert seen == [23, 1]


def test_requests_with_the_same_prompt_share_it(open_engine, make_base, make_adapter):
    """Together or while another is being sampled, under the same weights only; each gets what it gets alone."""
    engine, seen = open_engine(max_rows=2), []
    engine.load(FIRST, make_adapter(make_base()))
    prompt, lengths = tuple(range(20)), (9, 3, 3, 3)
    asked = [request(prompt, max_tokens=n, seed=n + i, temperature=1.0) for i, n in enumerate(lengths)]
    asked.append(replace(asked[1], version=FIRST))
    alone = [engine.generate([each])[0][0] for each in asked]
    engine._model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(args[0].numel())
    )
    together = [completions[0] for completions in engine.generate(asked)]
    assert seen.count(20) == 2 and max(seen) == 20  # once for four requests in two rows, once for the adapter
    for mine, other in zip(together, alone, strict=True):
        assert mine.token_ids == other.token_ids and mine.logprobs == pytest.approx(other.logprobs, abs=1e-9)
    assert together[1].logprobs != together[4].logprobs


def test_weights_that_changed_share_no_prompt(open_engine):
    """A request after `adopt` runs its prompt again, although a row from before still has it."""
    engine, reached, proceed = open_engine(max_rows=2), threading.Event(), threading.Event()

    def sampled(*_: object) -> None:
        reached.set()
        assert proceed.wait(120)

    (long,) = engine.submit([request(max_tokens=40)], on_token=sampled)
    assert reached.wait(120)
    with torch.no_grad():
        engine._model.get_input_embeddings().weight.mul_(1.5)
    engine.adopt(PolicyVersion("full", 1))
    (short,) = engine.submit([request(max_tokens=2, version=PolicyVersion("full", 1))])
    proceed.set()
    ((changed,), _) = short.result(timeout=120), long.result(timeout=120)
    assert changed.logprobs == pytest.approx(engine.generate([request(max_tokens=2)])[0][0].logprobs, abs=1e-9)


def test_a_request_waits_for_enough_rows(open_engine):
    """Its prompt is not prefilled again for every row that falls free."""
    engine, seen = open_engine(max_rows=16), []
    engine._model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(args[0].numel())
    )
    shorter = [request((i, 1, 2), max_tokens=2 + i) for i in range(15)]
    engine.generate([*shorter, request((9,) * 30, n=4, max_tokens=2)])
    assert seen[0] == 15 * 3 and seen.count(30) == 2


# ---- ends ----


def test_max_tokens_and_a_full_context(open_engine):
    engine = open_engine(context=16)
    (short,), (long,), (last,) = engine.generate(
        [request(max_tokens=3), request(max_tokens=999), request(tuple(range(15)), max_tokens=9)]
    )
    assert [len(c.token_ids) for c in (short, long, last)] == [3, 13, 1]
    assert {c.finish_reason for c in (short, long, last)} == {FinishReason.LENGTH}
    assert all(len(c.logprobs) == len(c.token_ids) for c in (short, long, last))


def test_eos_stop_ids_and_ignore_eos(open_engine, make_base):
    """Any of them is the last token and not in the text; the tokens before it are those of the free run."""
    engine = open_engine()
    (free,) = engine.generate([request(max_tokens=12)])[0]
    base, end = make_base(), free.token_ids[6]
    first = free.token_ids.index(end)
    text = decode(free.token_ids[:first], base.tokenizer)
    (stopped,) = engine.generate([request(max_tokens=12, stop_ids=(end,))])[0]
    engine._shared.eos = torch.tensor([end])
    (ended,) = engine.generate([request(max_tokens=12, ignore_eos=False)])[0]
    (ignored,) = engine.generate([request(max_tokens=12)])[0]
    assert ignored == free and free.finish_reason is FinishReason.LENGTH
    for completion in (stopped, ended):
        assert completion.token_ids == free.token_ids[: first + 1]
        assert completion.logprobs == free.logprobs[: first + 1]
        assert completion.finish_reason is FinishReason.STOP
    assert stopped.text == text


def test_the_models_eos(open_engine, make_base):
    """The end-of-turn token ends a completion and is dropped from its text."""
    eos = make_base().eos_ids
    completions = open_engine().generate([request(n=64, max_tokens=40, temperature=1.5, ignore_eos=False)])[0]
    ended = [c for c in completions if c.finish_reason is FinishReason.STOP]
    assert ended and len(ended) < 64
    for completion in completions:
        ends = [i for i, token in enumerate(completion.token_ids) if token in eos]
        assert ends == ([len(completion.token_ids) - 1] if completion in ended else [])
        assert "<|im_end|>" not in completion.text


def test_each_of_several_ends_is_dropped_from_the_text(make_base):
    """As Llama 3's and GLM's generation configs have them; what streams makes of the ids is the same text."""
    base = make_base("qwen3", dtype=torch.float64, context=64)
    ends = [*base.eos_ids, *(i for i in range(30, 60) if i not in base.eos_ids)]
    base.model.generation_config.eos_token_id = ends
    base = replace(base)
    assert set(base.eos_ids) == set(ends)
    with closing(LocalEngine(base, lanes=1)) as engine:
        asked = request(n=32, max_tokens=40, temperature=1.5, ignore_eos=False)
        completions = engine.generate([asked])[0]
    seen = set()
    for completion in completions:
        if completion.finish_reason is FinishReason.STOP:
            *said, end = completion.token_ids
            seen.add(end)
            assert not set(said) & set(ends)
            assert completion.text == base.tokenizer.decode(said, skip_special_tokens=False)
            stream = Detokenizer(base.tokenizer)
            assert completion.text.startswith("".join(stream.push(token) for token in completion.token_ids))
    assert len(seen - {base.tokenizer.eos_token_id}) > 3


def test_stop_strings(open_engine, make_base):
    """Cut from the text; `token_ids` keep all of it, also where it spans tokens."""
    engine, tokenizer = open_engine(), make_base().tokenizer
    run = engine.generate([request(n=64, max_tokens=16)])[0]
    place, free = next((j, c) for j, c in enumerate(run) if c.text[:8].isascii())
    stop = free.text[3:6]
    stopped, plain = engine.generate([request(n=64, max_tokens=16, stop=("never there", stop)), request(max_tokens=16)])
    completion = stopped[place]
    assert completion.finish_reason is FinishReason.STOP and completion.text == free.text[: free.text.index(stop)]
    length = len(completion.token_ids)
    assert completion.token_ids == free.token_ids[:length] and plain[0].token_ids == run[0].token_ids
    assert stop in decode(completion.token_ids, tokenizer) and stop not in decode(completion.token_ids[:-1], tokenizer)


def test_what_stopped_it_may_stay_in_the_text(open_engine, make_base):
    engine = open_engine()
    run = engine.generate([request(n=64, max_tokens=16)])[0]
    place, free = next((j, c) for j, c in enumerate(run) if c.text[:8].isascii())
    stop, end = free.text[3:6], free.token_ids[7]
    asked = [
        request(n=64, max_tokens=16, stop=(stop, free.text[4:6]), include_stop=True),
        request(n=64, max_tokens=16, stop_ids=(end,), include_stop=True),
    ]
    by_text, by_id = (group[place] for group in engine.generate(asked))
    assert by_text.finish_reason is FinishReason.STOP
    assert by_text.text == free.text[: free.text.index(stop) + len(stop)]
    first = free.token_ids.index(end) + 1
    assert by_id.text == decode(free.token_ids[:first], make_base().tokenizer, ends=())


# ---- changed logits ----

CHANGES = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 3.0},
    "frequency": {"frequency_penalty": 1.5},
    "bias": {"logit_bias": ((7, 6.0), (9, -100.0))},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 1.0, "presence_penalty": -0.5, "logit_bias": ((7, 3.0),)},
}


def replayed(base, asked: SamplingRequest) -> tuple[int, ...]:
    """The greedy completion by transformers' own forward and the definitions, token by token."""
    params, ids = asked.params, list(asked.prompt_ids)
    while len(ids) < len(asked.prompt_ids) + params.max_tokens:
        logits = base.model(input_ids=torch.tensor([ids])).logits[0, -1].detach().clone()
        said = ids[len(asked.prompt_ids) :]
        for token, bias in params.logit_bias:
            logits[token] += bias
        for token in set(ids):
            logits[token] = (
                logits[token] / params.repetition_penalty
                if logits[token] > 0
                else (logits[token] * params.repetition_penalty)
            )
        for token in set(said):
            logits[token] -= params.frequency_penalty * said.count(token) + params.presence_penalty
        ids.append(int(logits.argmax()))
    return tuple(ids[len(asked.prompt_ids) :])


def test_penalties_and_biases_draw_otherwise_and_report_the_policys_logprobs(open_engine, make_base):
    """Rows with different ones, and with none, in one batch."""
    base, engine = make_base(), open_engine()
    plain = request((5, 9, 2, 7) * 3, temperature=0.0, max_tokens=12)
    asked = {name: replace(plain, params=replace(plain.params, **change)) for name, change in CHANGES.items()}
    said = dict(zip(["plain", *asked], engine.generate([plain, *asked.values()]), strict=True))
    for name, each in {"plain": plain, **asked}.items():
        (completion,) = said[name]
        assert completion.token_ids == replayed(base, each), name
        scored = engine.score(each.prompt_ids, completion.token_ids, BASE)
        assert completion.logprobs == pytest.approx(scored, abs=1e-9)
    assert len({group[0].token_ids for group in said.values()}) >= 4  # they did something


def test_nothing_ends_a_completion_before_min_tokens(open_engine, make_base):
    engine, base = open_engine(), make_base()
    free = engine.generate([request(n=64, max_tokens=40, temperature=1.5, ignore_eos=False)])[0]
    assert any(len(each.token_ids) <= 8 for each in free)
    asked = request(n=64, max_tokens=40, min_tokens=8, temperature=1.5, ignore_eos=False, stop_ids=(7,))
    late = engine.generate([asked])[0]
    ends = {*base.eos_ids, 7}
    for completion in late:
        assert len(completion.token_ids) > 8 and not ends & set(completion.token_ids[:8])
    assert any(completion.finish_reason is FinishReason.STOP for completion in late)


def test_stop_ids_that_the_model_does_not_have_ban_nothing_before_min_tokens(open_engine):
    """A client may give any: the rows that are decoded with its own are not to fail for it."""
    engine = open_engine()
    alone, usual = request(), request((4, 5), min_tokens=3, ignore_eos=False, stop_ids=(7,))
    odd = replace(usual, params=replace(usual.params, stop_ids=(7, 1 << 20, -1)))
    assert engine.generate([alone, odd]) == engine.generate([alone, usual])


def test_a_stop_string_before_min_tokens_stops_nothing(open_engine, make_base):
    engine, tokenizer = open_engine(), make_base().tokenizer
    run = engine.generate([request(n=64, max_tokens=24)])[0]
    place, free = next((j, c) for j, c in enumerate(run) if c.text[:8].isascii())
    stop = free.text[1:3]
    for min_tokens in (0, 6, 20):
        completion = engine.generate([request(n=64, max_tokens=24, min_tokens=min_tokens, stop=(stop,))])[0][place]
        early = len(decode(free.token_ids[:min_tokens], tokenizer, ends=()))
        at = free.text.find(stop, max(0, early - 1))
        assert completion.text == (free.text if at < 0 else free.text[:at]), min_tokens


def test_what_of_a_prompt_was_known_is_counted(open_engine):
    """From the turn before, and from requests for the same prompt that are answered now."""
    engine = open_engine("qwen3", context=256)
    prompt = tuple(range(1, 60))
    first = replace(request(prompt, max_tokens=9), cache=True)
    (done,) = engine.generate([first])[0]
    assert done.cached_tokens == 0
    again = replace(request((*prompt, *done.token_ids, 3, 4, 5), max_tokens=4), cache=True)
    assert engine.generate([again])[0][0].cached_tokens == len(prompt) + 8  # the token sampled last was never run
    one, other, third = engine.generate([request(prompt, n=2), request(prompt), request((9, 9, 9))])
    assert [each.cached_tokens for each in (*one, *other, *third)] == [0, 0, len(prompt), 0]


# ---- errors ----


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (request(()), ContextLengthError),
        (request(tuple(range(64))), ContextLengthError),
        (request((1, 280)), ModelError),
        (request((1, -1)), ModelError),
        (request(n=0), ConfigError),
        (request(version=FIRST), AdapterNotFoundError),
        (request(logit_bias=((280, 1.0),)), ConfigError),
        (request(logit_bias=((-1, 1.0),)), ConfigError),
        (request(top_logprobs=1000), ConfigError),
    ],
)
def test_requests_that_cannot_be_served(open_engine, asked, error):
    """Refused before anything is queued, with the others that were given together with it."""
    engine = open_engine()
    with raises(error):
        engine.generate([request(), asked])
    assert not engine.stats()["waiting"] and len(engine.generate([request()])[0]) == 1


def configure(directory, **options):
    """Change an adapter's configuration."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: (d / "adapter_config.json").unlink(),
        lambda d: configure(d, use_dora=True),
        lambda d: configure(d, lora_alpha=None),
        lambda d: (d / "adapter_config.json").write_text("{}"),
        lambda d: (d / "adapter_model.safetensors").write_bytes(b"?"),
    ],
)
def test_adapters_that_cannot_be_served(open_engine, make_base, make_adapter, spoil):
    directory, engine = make_adapter(make_base()), open_engine()
    spoil(directory)
    with raises(AdapterError):
        engine.load(FIRST, directory)
    with pytest.raises(AdapterNotFoundError):
        engine.generate([request(version=FIRST)])


@pytest.mark.parametrize("rename", ["lora_A.weight>lora_embedding_A", "self_attn.q_proj>self_attn.nothing"])
def test_adapters_with_other_tensors(open_engine, make_base, make_adapter, rename: str):
    """What would be silently ignored is refused."""
    from safetensors.torch import load_file, save_file

    directory, (old, new) = make_adapter(make_base()), rename.split(">")
    tensors = load_file(directory / "adapter_model.safetensors")
    renamed = {name.replace(old, new) if "layers.0.self_attn.q" in name else name: x for name, x in tensors.items()}
    save_file(renamed, directory / "adapter_model.safetensors")
    with pytest.raises(AdapterError):
        open_engine().load(FIRST, directory)


def test_adapter_of_another_model(open_engine, make_base, make_adapter):
    with raises(AdapterError):
        open_engine("gpt2").load(FIRST, make_adapter(make_base("qwen3")))


def test_peft_scales(open_engine, make_base, make_adapter):
    """rslora, alpha_pattern and rank_pattern mean what they mean in PEFT."""
    import peft

    directory = make_adapter(make_base())
    configure(directory, use_rslora=True, alpha_pattern={"q_proj": 1.0, "layers.1.*.up_proj": 20.0})
    theirs = peft.PeftModel.from_pretrained(make_base().model, str(directory), autocast_adapter_dtype=False)
    engine = open_engine()
    engine.load(FIRST, directory)
    asked = request(version=FIRST, max_tokens=10)
    (completion,) = engine.generate([asked])[0]
    ids = torch.tensor([(*asked.prompt_ids, *completion.token_ids)])
    with torch.no_grad():
        logp = theirs(input_ids=ids).logits[0].log_softmax(-1)
    own = [float(logp[t - 1, ids[0, t]]) for t in range(len(asked.prompt_ids), ids.shape[1])]
    assert completion.logprobs == pytest.approx(own, abs=1e-9)


def test_an_error_inside_reaches_the_caller_and_the_engine_goes_on(open_engine, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine(max_rows=2)
    expected = engine.generate([request(n=3)])
    steps = iter(range(100))

    def breaks(*args, **options):
        if next(steps) == 3:
            raise ArithmeticError("step 3")
        return sample_tokens(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("groupwise.engine.decoder.sample_tokens", breaks)
        futures = engine.submit([request(n=3), request()])
        for future in futures:
            with raises(ArithmeticError):
                future.result(timeout=120)
    assert engine.generate([request(n=3)]) == expected


@pytest.mark.parametrize("where", ["a step", "a score"])
def test_after_an_error_that_loses_the_device_nothing_is_sampled_any_more(open_engine, monkeypatch, where: str):
    """What waits is failed with an error to try again by, and so is what comes later: the process must be replaced."""
    engine = open_engine(max_rows=2)
    assert engine.lost is None and engine.unavailable_reason is None

    def breaks(*args, **options):
        raise cuda_error(ASSERT)

    with monkeypatch.context() as patch:
        if where == "a step":
            patch.setattr("groupwise.engine.decoder.sample_tokens", breaks)
            for future in engine.submit([request(n=2), request()]):
                with pytest.raises(DeviceLostError):
                    future.result(timeout=120)
        else:
            patch.setattr(packed.PackedDecoder, "hidden", breaks)
            with pytest.raises(DeviceLostError):
                engine.score((1, 2), (3,), BASE)
    assert isinstance(engine.lost, DeviceLostError) and engine.unavailable_reason == engine.lost.message
    for later in (lambda: engine.generate([request()]), lambda: engine.score((1, 2), (3,), BASE)):
        with pytest.raises(DeviceLostError) as raised:
            later()
        assert (raised.value.status, raised.value.exit_code) == (503, 75)


# ---- threads ----


@pytest.fixture
def many_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are used even where the work does not pay for them."""
    monkeypatch.setattr("groupwise.engine.local.LANE_FLOPS", 1)
    monkeypatch.setattr("groupwise.engine.local.LANE_ROWS", 1)


def test_lanes_are_used_as_far_as_the_work_pays(make_base, monkeypatch: pytest.MonkeyPatch):
    """By the rows that are asked for and what a token costs, never more rows together than there are."""
    base = make_base()
    monkeypatch.setattr("groupwise.engine.local.LANE_ROWS", 2)
    with closing(LocalEngine(base, max_rows=8, lanes=3)) as engine:
        used, most = [], []
        monkeypatch.setattr("groupwise.engine.local.LANE_FLOPS", 2 * engine._shared.flops)
        engine._model.get_input_embeddings().register_forward_hook(lambda *_: most.append(8 - engine._budget.free))
        for asked in ([request()], [request(n=4)], [request(n=4), request(n=2)], [request(p, n=3) for p in range(9)]):
            engine.generate(asked)
            used.append(engine._batches.used)
        assert used == [1, 2, 3, 3] and max(most) == 8 and engine._budget.free == 8


@pytest.mark.usefixtures("many_lanes")
def test_a_lane_that_is_refused_gets_rows_when_others_are_done(open_engine):
    one, two = open_engine(max_rows=4), open_engine(max_rows=4, lanes=2)
    asked = [request(p, n=4, seed=p, max_tokens=3 + p) for p in range(6)]
    assert ids_of(two.generate(asked)) == ids_of(one.generate(asked))
    short = [request(p, n=4, seed=p, max_tokens=1) for p in range(60)]  # whose rows come back where they were taken
    futures = two.submit(short)
    assert [len(future.result(timeout=60)) for future in futures] == [4] * 60
    assert two._budget.free == 4


@pytest.mark.usefixtures("many_lanes")
def test_lanes_side_by_side(open_engine, make_base, make_adapter):
    """What two lanes make together is what one makes, and the same again; a lane that fails fails alone."""
    one, two = open_engine(max_rows=12), open_engine(max_rows=12, lanes=2)
    for engine in (one, two):
        engine.load(FIRST, make_adapter(make_base(), seed=1))
    versions = (BASE, FIRST)
    asked = [request(p, n=1 + p % 4, seed=p, version=versions[p % 2], max_tokens=4 + p) for p in range(10)]
    together = two.generate(asked)
    assert ids_of(together) == ids_of(one.generate(asked)) == ids_of(two.generate(asked))
    assert sum(sampled_logprobs(together), ()) == pytest.approx(
        sum(sampled_logprobs(one.generate(asked)), ()), abs=1e-9
    )
    assert two._batches.used == 2 and [lane.load for lane in two._lanes] == [0, 0, 0, 0]
    scored = two.score((1, 2, 3), (4, 5), FIRST)
    assert scored == pytest.approx(one.score((1, 2, 3), (4, 5), FIRST), abs=1e-9)
    decoder = two._lanes[1].decoder
    kept, decoder.decode = decoder.decode, lambda: 1 / 0
    fine, failed = two.submit([request(n=2), request(n=2)])
    with pytest.raises(ZeroDivisionError):
        failed.result(timeout=60)
    assert ids_of([fine.result(timeout=60)]) == ids_of(one.generate([request(n=2)]))
    decoder.decode = kept
    assert ids_of(two.generate(asked)) == ids_of(together)


@pytest.mark.usefixtures("many_lanes")
def test_conversations_go_on_in_any_lane(open_engine):
    """Each turn may come to another lane; what is kept of the last is found there."""
    one, two = open_engine(max_rows=8), open_engine(max_rows=8, lanes=2)
    prompt = tuple(range(20))
    for turn in range(3):
        asked = [replace(request(prompt, seed=turn + s, max_tokens=5), cache=True) for s in range(3 if turn else 1)]
        ours, theirs = two.generate(asked), one.generate(asked)
        assert ids_of(ours) == ids_of(theirs)
        assert sum(sampled_logprobs(ours), ()) == pytest.approx(sum(sampled_logprobs(theirs), ()), abs=1e-9)
        assert turn == 0 or all(group[0].cached_tokens >= 16 for group in ours)  # in blocks
        prompt = (*prompt, *ours[0][0].token_ids, 7, 8, 9)


@pytest.mark.parametrize("options", [{"lanes": 0}, {"lanes": 5, "max_rows": 4}])
def test_lanes_that_cannot_be(make_base, options):
    with raises(ConfigError):
        LocalEngine(make_base(), **options)


def test_async_sampling_from_several_tasks(open_engine):
    engine = open_engine(max_rows=4)
    asked = [request(p, n=2, seed=p) for p in range(6)]
    expected = [ids_of(engine.generate([each])) for each in asked]

    async def several():
        return await asyncio.gather(*(engine.sample([each]) for each in asked))

    assert [ids_of(groups) for groups in asyncio.run(several())] == expected


def held(engine: LocalEngine) -> tuple[threading.Event, threading.Event]:
    """(reached, go on): the engine's thread stops before its next forward until told to go on."""
    reached, proceed = threading.Event(), threading.Event()

    def wait(module, args):
        reached.set()
        assert proceed.wait(120)

    engine._model.get_input_embeddings().register_forward_pre_hook(wait)
    return reached, proceed


def test_a_closed_engine_keeps_nobody_waiting(open_engine):
    """Whoever wants a lane to do something is told, as those are who submit."""
    engine, told = open_engine(), list[str]()
    engine.generate([request()])
    engine.close()

    def ask() -> None:
        try:
            engine.replace(BASE, BASE, recompute=False)
        except GroupwiseError as error:
            told.append(error.code)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    assert len(told) == 1


def test_closing_fails_who_waits(open_engine):
    engine = open_engine(max_rows=1)
    reached, proceed = held(engine)
    futures = engine.submit([request(max_tokens=40), request(max_tokens=40)])
    assert reached.wait(120)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closing:
        pass
    proceed.set()
    closing.join(30)
    for future in futures:
        with raises(GroupwiseError):
            future.result(timeout=120)
    with raises(GroupwiseError):
        engine.submit([request()])
    engine.close()


def test_unload_while_in_flight(open_engine, make_base, make_adapter):
    """What was admitted ends with the version it began with; new requests for it are refused."""
    engine, directory = open_engine(max_rows=2), make_adapter(make_base())
    engine.load(FIRST, directory)
    asked = request(version=FIRST, n=3)
    expected = engine.generate([asked])
    reached, proceed = held(engine)
    (future,) = engine.submit([asked])
    assert reached.wait(120)
    engine.unload(FIRST)
    with pytest.raises(AdapterNotFoundError):
        engine.submit([asked])
    proceed.set()
    assert [future.result(timeout=120)] == expected
    engine.unload(FIRST)  # again is no error


def test_loading_again_is_a_no_op(open_engine, make_base, make_adapter):
    engine = open_engine()
    engine.load(FIRST, make_adapter(make_base(), seed=1))
    before = engine.generate([request(version=FIRST)])
    engine.load(FIRST, Path("/nowhere"))
    assert engine.generate([request(version=FIRST)]) == before


@pytest.mark.parametrize("when", ["in flight", "waiting"])
def test_cancelling_frees_the_rows(open_engine, when: str):
    """A caller who goes away disturbs nobody, and his rows serve others."""
    engine = open_engine(max_rows=2)
    expected = engine.generate([request(9, n=2)])
    reached, proceed = held(engine)
    first, second, third = engine.submit([request(n=2, max_tokens=60), request(n=2, max_tokens=60), request(9, n=2)])
    assert reached.wait(120)
    cancelled, other = (first, second) if when == "in flight" else (second, first)
    assert cancelled.cancel()
    proceed.set()
    assert third.result(timeout=120) == expected[0]
    assert len(other.result(timeout=120)) == 2
    engine.score((1, 2), (3,), BASE)  # in the lane's thread: after the step in which the last rows ended
    assert engine.stats()["running"] == 0 and not engine._lanes[0].decoder.cache.lengths


def test_a_timeout_in_a_task_cancels_its_request(open_engine):
    engine = open_engine(max_rows=2)
    reached, proceed = held(engine)

    async def impatient():
        task = asyncio.create_task(engine.sample([request(max_tokens=60)]))
        await asyncio.to_thread(reached.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        proceed.set()
        return await engine.sample([request(max_tokens=5)])

    assert len(asyncio.run(impatient())[0][0].token_ids) == 5


def test_a_model_that_cannot_be_packed(make_base, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("groupwise.model.packed_check._WHY", {})  # the code is another from here on
    monkeypatch.setattr("groupwise.model.attention._hidden", lambda gap, *of: gap < -1)
    with warns():
        engine = LocalEngine(make_base(), compile=True)
    assert not engine.packed


# ---- what a server needs besides ----


def test_a_stream_hears_every_token(open_engine):
    """Each completion's tokens and logprobs in order, with the likeliest tokens where asked for."""
    engine = open_engine()
    asked = request(n=3, max_tokens=6, temperature=0.8, top_logprobs=4)
    heard: dict[int, list] = {0: [], 1: [], 2: []}
    [future] = engine.submit([asked], on_token=lambda index, *token: heard[index].append(token))
    group = future.result(timeout=120)
    for index, completion in enumerate(group):
        expected = list(zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True))
        assert heard[index] == expected and len(expected) == 6
        for token, logprob, top in expected:
            values = [value for _, value in top]
            assert len({i for i, _ in top}) == 4 and values == sorted(values, reverse=True) and values[0] >= logprob
            assert all(value == pytest.approx(logprob, abs=1e-12) for i, value in top if i == token)
    assert engine.generate([request(n=3, max_tokens=6, temperature=0.8)])[0][0].top_logprobs == ()


def test_score_is_what_sampling_reported(open_engine, make_base, make_adapter):
    base = make_base("qwen3")
    engine = open_engine()
    engine.load(FIRST, make_adapter(base))
    for version in (BASE, FIRST):
        asked = request(3, version=version, temperature=0.7)
        [[completion]] = engine.generate([asked])
        scored = engine.score(asked.prompt_ids, completion.token_ids, version, temperature=0.7)
        assert scored == pytest.approx(completion.logprobs, abs=1e-9)
    assert engine.score((1, 2), (), BASE) == engine.score_top((1, 2), (), BASE, top=2) == ()
    with pytest.raises(AdapterNotFoundError):
        engine.score((1, 2), (3,), SECOND)
    with pytest.raises(ContextLengthError):
        engine.score((1,) * 60, (2,) * 60, BASE)


@pytest.mark.parametrize("at_once", [512, 2])
def test_score_top_is_what_sampling_reported(open_engine, monkeypatch, at_once):
    monkeypatch.setattr("groupwise.engine.local.SCORED_AT_ONCE", at_once)
    engine = open_engine()
    asked = request(2, max_tokens=5, temperature=0.7, top_logprobs=3, ignore_eos=True)
    [[completion]] = engine.generate([asked])
    scored = engine.score_top(asked.prompt_ids, completion.token_ids, BASE, temperature=0.7, top=3)
    assert [logprob for logprob, _ in scored] == pytest.approx(completion.logprobs, abs=1e-9)
    for (_, mine), theirs in zip(scored, completion.top_logprobs, strict=True):
        assert [i for i, _ in mine] == [i for i, _ in theirs]
        assert [value for _, value in mine] == pytest.approx([value for _, value in theirs], abs=1e-9)


@pytest.mark.parametrize("at_once", [512, 2])
@pytest.mark.parametrize("first", [1, 4, 9])
def test_score_sequence_is_the_models_own_forward(open_engine, make_base, make_adapter, monkeypatch, at_once, first):
    """Own tokens, the likeliest, and cells in any order: also before `first`, several of one place, none of others."""
    monkeypatch.setattr("groupwise.engine.local.SCORED_AT_ONCE", at_once)
    base = make_base("qwen3")
    engine = open_engine()
    engine.load(FIRST, make_adapter(base))
    ids = (5, 6, 7, 8, 9, 3, 2, 11, 17)
    places, tokens = [8, 2, 5, 2, 1], [0, 279, 40, 6, 5]
    with plain_attention(base.model), torch.no_grad():
        logprobs_SV = base.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    scores = engine.score_sequence(ids, BASE, first=first, top=3, cells=(places, tokens))
    own = [logprobs_SV[i - 1, ids[i]].item() for i in range(first, 9)]
    assert scores.logprobs == pytest.approx(own, abs=1e-9)
    assert scores.cells == pytest.approx(logprobs_SV[torch.tensor(places) - 1, tokens].tolist(), abs=1e-9)
    assert [[t for t, _ in each] for each in scores.top] == logprobs_SV[first - 1 : 8].topk(3).indices.tolist()
    adapted = engine.score_sequence(ids, FIRST, first=9, cells=(places, [ids[place] for place in places]))
    whole = engine.score(ids[:1], ids[1:], FIRST)
    assert adapted.cells == pytest.approx([whole[place - 1] for place in places], abs=1e-9)
    assert adapted.logprobs == adapted.top == () and adapted.cells != pytest.approx(scores.cells, abs=1e-3)


@pytest.mark.parametrize("most", [8192, 12])
def test_a_group_is_scored_as_each_of_its_completions_alone(
    open_engine, make_base, make_adapter, monkeypatch, architecture: str, most: int
):
    """Also in several forwards, and completions of one token and of none."""
    monkeypatch.setattr(local, "PREFILL_TOKENS", most)
    engine, prompt = open_engine(architecture), (3, 9, 4, 1)
    engine.load(FIRST, make_adapter(make_base(architecture)))
    rows = [(5, 6, 7, 8), (2,), (), (9, 9, 1, 4, 4, 2)]
    for version in (BASE, FIRST):
        scored = engine.score_group(prompt, rows, version, top=3, temperature=0.8)
        for ids, scores in zip(rows, scored, strict=True):
            alone = engine.score_sequence((*prompt, *ids), version, first=len(prompt), top=3, temperature=0.8)
            assert scores.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            assert [[id for id, _ in top] for top in scores.top] == [[id for id, _ in top] for top in alone.top]
    with raises(ContextLengthError):
        engine.score_group(prompt, [(1,) * 10_000], BASE)
    with raises(ConfigError):
        engine.score_group(prompt, rows, BASE, top=10**6)


def test_score_sequence_runs_the_head_only_where_asked(open_engine, monkeypatch):
    """A cell near the end of a long prompt costs the logits of one place, and a prompt may fill the context."""
    engine, rows, logits = open_engine(), [], Head.logits

    def counted(head, hidden_TH):
        rows.append(len(hidden_TH))
        return logits(head, hidden_TH)

    monkeypatch.setattr(Head, "logits", counted)
    ids = tuple(i % 250 for i in range(engine.context_length))
    assert len(engine.score_sequence(ids, BASE, first=len(ids), cells=([60, 60], [7, 8])).cells) == 2 and rows == [1]
    assert engine.score_sequence(ids[:9], BASE, first=9) == SequenceScores(logprobs=(), top=()) and rows == [1]
    monkeypatch.setattr("groupwise.engine.local.SCORED_AT_ONCE", 24)
    rows.clear()
    engine.score_sequence(ids, BASE, first=4, cells=([2, 60], [7, 8]))
    assert rows == [24, 24, 13]  # 60 places of its own and one more
    for place in (0, len(ids)):
        with raises(ValueError):
            engine.score_sequence(ids, BASE, first=len(ids), cells=([place], [7]))
    with raises(ModelError):
        engine.score_sequence(ids, BASE, first=len(ids), cells=([3], [280]))


def test_every_id_that_is_scored_is_checked_also_the_last_which_is_not_read(open_engine):
    engine = open_engine()
    for ids in ((1, 280), (1, -1)):
        with raises(ModelError):
            engine.score(ids[:1], ids[1:], BASE)


def test_a_composed_adapter_is_the_weighted_sum(open_engine, make_base, make_adapter):
    """Against one adapter at its own scale, and one adapter added to itself in two halves."""
    base = make_base("qwen3")
    paths = {version: make_adapter(base, seed=version.number, rank=2) for version in (FIRST, SECOND)}
    engine = open_engine()
    for version, path in paths.items():
        engine.load(version, path)
    halves, both = PolicyVersion("halves", 1), PolicyVersion("both", 1)
    engine.load_composed(halves, [(paths[FIRST], 0.25), (paths[FIRST], 0.75)])
    engine.load_composed(both, [(paths[FIRST], 1.0), (paths[SECOND], 1.0)])

    def score(version: PolicyVersion) -> tuple[float, ...]:
        return engine.score((1, 2, 3), (4, 5, 6), version)

    assert score(halves) == pytest.approx(score(FIRST), abs=1e-9)
    assert score(both) != pytest.approx(score(FIRST), abs=1e-3)


def test_interactive_requests_go_first(open_engine):
    """A batch fills the rows that it may have; who waits in person is served from those kept back, and before it."""
    engine = open_engine(max_rows=4, reserved_rows=1)
    reached, proceed = held(engine)
    batch = engine.submit([request(i, n=3, max_tokens=12) for i in range(4)])
    assert reached.wait(120)
    person = engine.submit([SamplingRequest(prompt_ids=(1, 2), params=SamplingParams(max_tokens=3), interactive=True)])
    assert engine.stats() == {"running": 3, "waiting": 10, "adapters": 0}
    order: list[str] = []
    for name, future in (("batch", batch[1]), ("person", person[0])):
        future.add_done_callback(lambda _, name=name: order.append(name))
    proceed.set()
    assert len(batch[-1].result(timeout=120)) == 3 and order[0] == "person"
    with raises(ConfigError):
        open_engine(max_rows=4, reserved_rows=4)


def test_batches_pause_while_interactive_requests_run(open_engine, monkeypatch):
    """They go on when the answer is there, or once they have stood still for some times as long as a step took; what
    both say is what they say alone."""
    engine, said, asked = open_engine(max_rows=8), list[str](), threading.Event()
    batch = request(3, n=2, max_tokens=40, seed=1)
    person = replace(request(5, max_tokens=25, seed=2), interactive=True)
    alone = ids_of(engine.generate([batch])), ids_of(engine.generate([person]))

    def together() -> list[str]:
        """Whose tokens came from the second of the person's to their last, and then."""
        said.clear()
        asked.clear()

        def token(*_: object) -> None:
            said.append("batch")
            asked.wait(timeout=60)  # the batch has begun

        (of_batch,) = engine.submit([batch], on_token=token)
        (of_person,) = engine.submit([person], on_token=lambda *_: said.append("person"))
        asked.set()
        got = ids_of([of_batch.result(timeout=60)]), ids_of([of_person.result(timeout=60)])
        assert got == alone
        places = [i for i, who in enumerate(said) if who == "person"]
        return said[places[1] : places[-1]]

    monkeypatch.setattr("groupwise.engine.local.BATCH_PAUSE_FACTOR", 1e6)
    assert len(alone[1][0][0]) > 10 and together().count("batch") <= 2 * batch.n  # a step that had begun
    assert said[-1] == "batch" and engine._budget.free == 8


def test_batches_go_on_while_somebody_waits_for_their_rows(open_engine, monkeypatch):
    monkeypatch.setattr("groupwise.engine.local.BATCH_PAUSE_FACTOR", 1e6)
    engine, asked = open_engine(max_rows=4), threading.Event()
    (batch,) = engine.submit([request(3, n=4, max_tokens=30)], on_token=lambda *_: asked.wait(timeout=60) and None)
    (person,) = engine.submit([replace(request(5, max_tokens=5), interactive=True)])
    asked.set()
    assert len(person.result(timeout=60)) == 1 and len(batch.result(timeout=60)) == 4


def test_batches_are_paced_while_somebody_waits(open_engine, monkeypatch):
    """Then, and for some time after, a batch has few rows at once; nothing is lost, and alone it has all it may."""
    engine = open_engine(max_rows=16, paced_rows=2)
    took, widest = engine._budget.take, list[int]()

    def take(job):
        n = took(job)
        widest.append(engine._budget._batch)
        return n

    monkeypatch.setattr(engine._budget, "take", take)
    alone = engine.generate([request(i, n=3, max_tokens=4) for i in range(6)])
    assert max(widest) > 2
    person = SamplingRequest(prompt_ids=(1, 2), params=SamplingParams(max_tokens=3), interactive=True)
    engine.generate([person])
    widest.clear()
    beside = engine.generate([request(i, n=3, max_tokens=4) for i in range(6)])
    assert max(widest) == 2
    assert [[c.token_ids for c in group] for group in beside] == [[c.token_ids for c in group] for group in alone]
    widest.clear()
    monkeypatch.setattr(decoder, "PACED_S", 0.0)
    engine.generate([request(i, n=3, max_tokens=4) for i in range(6)])
    assert max(widest) > 2 and engine._budget.free == 16 and engine._budget._batch == engine._budget._interactive == 0
    with raises(ConfigError):
        open_engine(paced_rows=0)


# ---- conversations ----


def converse(
    engine: LocalEngine, *, cache: bool, version=BASE, turns: int = 4, count: int = 5
) -> list[list[Completion]]:
    """Conversations side by side, of uneven lengths; each turn's prompt is all that was said and something new."""
    prompts = [tuple((7 * i + p) % 250 for i in range(18 + 5 * (p % 5))) for p in range(count)]
    said = []
    for turn in range(turns):
        asked = [
            request(prompt, version=version, seed=11 * p + turn, max_tokens=6 + p % 7, temperature=0.9)
            for p, prompt in enumerate(prompts)
        ]
        answers = [group[0] for group in engine.generate([replace(each, cache=cache) for each in asked])]
        said.append(answers)
        prompts = [
            prompt + answer.token_ids + tuple((3 * i + p + turn) % 250 for i in range(1 + 3 * (p % 5)))
            for p, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
    return said


def test_the_next_turn_computes_only_what_is_new(open_engine, make_base, make_adapter, architecture, monkeypatch):
    """The same tokens and log-probabilities as without, from a fraction of the tokens; base and adapter apart."""
    directory = make_adapter(make_base(architecture, context=256))
    computed: dict[bool, int] = {}
    heard: dict[bool, list] = {}
    for cache in (False, True):
        engine = open_engine(architecture, context=256)
        engine.load(FIRST, directory)
        decoder = engine._lanes[0].decoder
        forward, sizes = decoder._forward, []
        monkeypatch.setattr(
            decoder, "_forward", lambda ids, *rest, f=forward, n=sizes: (n.append(len(ids)), f(ids, *rest))[1]
        )
        heard[cache] = [*converse(engine, cache=cache), *converse(engine, cache=cache, version=FIRST)]
        computed[cache] = sum(sizes)
    assert ids_of(heard[True]) == ids_of(heard[False])
    for mine, theirs in zip(sampled_logprobs(heard[True]), sampled_logprobs(heard[False]), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
    assert ids_of(heard[True][:4]) != ids_of(heard[True][4:])  # the adapter's turns are its own
    assert computed[True] < 0.6 * computed[False]


@pytest.mark.parametrize(
    ("architecture", "bounds"),
    crossed(
        ("qwen3", "gemma3", "gemma2", "gpt2"),
        ((7, admission.MOST_HELD), (admission.EXTEND_TOKENS, 10)),
        quick=lambda architecture, bounds: bounds[0] == 7 or architecture == "gemma3",
    ),
)
def test_many_rows_of_uneven_lengths(open_engine, monkeypatch, architecture: str, bounds: tuple[int, int]):
    """Read in parts, put in order between, run in pieces of a few tokens, folded into openings: nothing of it shows."""
    sorted_rows, (new_at_once, most_held) = [], bounds
    monkeypatch.setattr(packed, "SORT_EVERY", 1)
    monkeypatch.setattr(packed, "MOST_BEYOND", 1.0)
    monkeypatch.setattr(packed, "EXTEND_TOKENS", new_at_once)
    monkeypatch.setattr(admission, "MOST_HELD", most_held)
    engine = open_engine(architecture, context=256, max_rows=48)
    cache = engine._lanes[0].decoder.cache
    sort = cache.sort
    monkeypatch.setattr(cache, "sort", lambda order, length: (sorted_rows.append(len(order)), sort(order, length)))
    mine = converse(engine, cache=True, count=48, turns=3)
    plain = converse(open_engine(architecture, context=256), cache=False, count=48, turns=3)
    assert ids_of(mine) == ids_of(plain)
    for one, other in zip(sampled_logprobs(mine), sampled_logprobs(plain), strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert sorted_rows and max(sorted_rows) > 32


def test_what_was_kept_goes_with_its_weights(open_engine, make_base, make_adapter):
    """Unloading an adapter, and full-parameter training, which changes the base in place, forget what they made."""
    base = make_base("qwen3", context=256)
    engine = open_engine("qwen3", context=256)
    engine.load(FIRST, make_adapter(base))
    converse(engine, cache=True)
    converse(engine, cache=True, version=FIRST)
    assert len(engine._past) == 10
    engine.unload(FIRST)
    engine.generate([request()])
    assert len(engine._past) == 5
    engine.adopt(SECOND)
    engine.generate([request()])
    assert len(engine._past) == 0 and engine._past.bytes == 0


def test_an_error_between_new_prompts_and_conversations_reaches_both(open_engine, monkeypatch):
    engine = open_engine("qwen3", context=256)
    opening = replace(request(tuple(range(1, 40))), cache=True)
    said = engine.generate([opening])[0][0].token_ids
    again = replace(request((*opening.prompt_ids, *said, 7)), cache=True)
    decoder = engine._lanes[0].decoder
    prefill = decoder._prefill

    def broken(*admitted):
        raise MemoryError("no room")

    monkeypatch.setattr(decoder, "_prefill", broken)
    futures = engine.submit([again, request(5)])
    for future in futures:
        with pytest.raises(MemoryError):
            future.result(timeout=120)
    monkeypatch.setattr(decoder, "_prefill", prefill)
    assert len(engine.generate([again, request(5)])) == 2


def test_what_is_kept_has_a_limit(open_engine):
    engine = open_engine("qwen3", context=256, prefix_cache_mb=0)
    without = ids_of(converse(open_engine("qwen3", context=256), cache=False))
    assert ids_of(converse(engine, cache=True)) == without
    assert len(engine._past) == 0


def test_a_prompt_that_was_kept_whole_and_one_that_forks(open_engine):
    """Asked again word for word, and with another end: both go on from what they share."""
    engine, plain = open_engine("qwen3", context=256), open_engine("qwen3", context=256)
    prompt = tuple(range(1, 60))
    first = replace(request(prompt, max_tokens=9), cache=True)
    engine.generate([first])
    for ids in (prompt, (*prompt[:40], 3, 1, 4, 1, 5), prompt[:17], prompt + (9,) * 30, prompt + (5,) * 150):
        asked = replace(request(ids, max_tokens=9, temperature=0.7), cache=True)
        mine, theirs = engine.generate([asked]), plain.generate([asked])
        assert ids_of(mine) == ids_of(theirs)
        for one, other in zip(sampled_logprobs(mine), sampled_logprobs(theirs), strict=True):
            assert one == pytest.approx(other, abs=1e-9)
