"""The policy that an environment gets as `model`, on a real engine: what it answers, and what is recorded of it."""

from __future__ import annotations

import threading

import pytest
import torch

from groupwise.algo.samples import segments_of
from groupwise.bridges.aitraining.recording import LimitReached, Origin, PolicyClosedError, RecordingPolicy
from groupwise.bridges.aitraining.three_method import for_user_code
from groupwise.config.run import EnvConfig
from groupwise.engine.rows import Row
from groupwise.errors import EnvError
from groupwise.model.chat import encode_prompt
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, SamplingParams, SamplingRequest
from wording import raises

RUN = SamplingParams(max_tokens=6, temperature=1.0)
HELLO = [{"role": "user", "content": "What is 7?"}]
AGAIN = {"role": "user", "content": "And 8?"}


@pytest.fixture
def policy_of(tiny, tiny_engine):
    def make(*, said: Completion | None = None, tools=(), notes=None, **env) -> RecordingPolicy:
        note = (lambda text: None) if notes is None else notes.append
        tokenizer = for_user_code(tiny.tokenizer)
        config = EnvConfig(environment="m:E", **env)
        origin = Origin(sampler=tiny_engine, base=tiny, tokenizer=tokenizer, config=config, run=RUN, note=note)
        prompt = encode_prompt(Prompt(id="p", messages=tuple(HELLO), tools=tools), tokenizer)
        if said is None:
            request = SamplingRequest(prompt_ids=prompt.token_ids, params=SamplingParams(max_tokens=6, seed=5))
            ((said,),) = tiny_engine.generate([request])
        return RecordingPolicy(origin, prompt, said, params=RUN, version=PolicyVersion.base(), seed=3, number=1)

    return make


def seen(policy: RecordingPolicy) -> torch.Tensor:
    """What was said so far, as a model's input."""
    last = policy.turns[-1]
    return torch.tensor([last.prompt_ids + last.completion.token_ids])


def ended(tiny, text: str = "7") -> Completion:
    """An answer that ends itself."""
    ids = (*tiny.tokenizer.encode(text, add_special_tokens=False), tiny.tokenizer.eos_token_id)
    return Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), text=text, finish_reason=FinishReason.STOP)


def test_generate_gives_back_the_prompt_with_what_was_sampled_and_records_it(policy_of, tiny_engine):
    policy = policy_of()
    ids = torch.cat([seen(policy), torch.tensor([[9, 9]])], dim=1)
    out = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, use_cache=True)
    assert out.dtype == torch.long and out.shape[0] == 1 and ids.shape[1] < out.shape[1] <= ids.shape[1] + 5
    assert torch.equal(out[:, : ids.shape[1]], ids)
    first, second = policy.turns
    assert second.prompt_ids == tuple(ids[0].tolist())
    assert second.completion.token_ids == tuple(out[0, ids.shape[1] :].tolist()) and second.trained
    (segment,) = segments_of(policy.turns)
    said = len(first.completion.token_ids)
    assert segment.mask == (1,) * said + (0, 0) + (1,) * len(second.completion.token_ids)
    for turn in policy.turns:  # what is recorded is what the policy gives to these tokens in this place
        scored = tiny_engine.score(turn.prompt_ids, turn.completion.token_ids, PolicyVersion.base())
        assert turn.completion.logprobs == pytest.approx(scored, abs=1e-4)


def test_rows_are_sampled_together_and_padding_is_no_prompt(policy_of, tiny):
    policy = policy_of()
    tokenizer = for_user_code(tiny.tokenizer)
    batch = tokenizer(["What is 7?", "And this, is it 8?"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0
    out = policy.generate(**batch, num_return_sequences=2, max_new_tokens=4)
    width = batch["input_ids"].shape[1]
    assert out.shape[0] == 4 and torch.equal(out[:, :width], batch["input_ids"].repeat_interleave(2, dim=0))
    turns = policy.turns[1:]
    assert [turn.prompt_ids for turn in turns[:2]] == [tuple(tokenizer.encode("What is 7?"))] * 2
    assert policy.forks == 4 and all(turn.trained for turn in turns)
    for row, turn in zip(out, turns, strict=True):
        said = turn.completion.token_ids
        assert tuple(row[width : width + len(said)].tolist()) == said
        assert set(row[width + len(said) :].tolist()) <= {tokenizer.pad_token_id}
    assert torch.equal(policy.generate(batch, max_new_tokens=2)[:, :width], batch["input_ids"])  # as one argument
    without_mask = policy.generate(batch["input_ids"], max_new_tokens=2, return_dict_in_generate=True)
    assert without_mask.sequences.shape[0] == 2 and policy.turns[-2].prompt_ids == turns[0].prompt_ids


def test_other_sampling_is_recorded_and_not_trained(policy_of):
    notes: list[str] = []
    policy = policy_of(notes=notes)
    greedy = [policy.generate(seen(policy_of()), do_sample=False, max_new_tokens=4).tolist() for _ in range(2)]
    policy.generate(seen(policy_of()), temperature=0.5)
    policy.generate(seen(policy_of()), temperature=1.0, do_sample=True)
    assert greedy[0] == greedy[1]
    assert sorted(turn.trained for turn in policy.turns) == [False, False, False, True, True]
    assert any("do_sample=False is not trained" in note for note in notes)
    assert any("temperature=0.5 is not trained" in note for note in notes)


def test_what_leaves_tokens_out_is_trained_where_it_is_recorded(policy_of, monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    policy = policy_of(notes=notes)
    policy.generate(seen(policy_of()), top_p=0.6, do_sample=True)
    assert all(turn.trained and turn.completion.kept is not None for turn in policy.turns[1:]) and not notes
    (segment,) = segments_of(policy.turns)
    first = len(policy.turns[0].completion.token_ids)
    assert segment.kept is not None and segment.kept.cut(0, first).is_whole and not segment.kept.cut(first).is_whole
    monkeypatch.setattr(Row, "sampling_mask", lambda self, vocabulary: None)  # as of an engine that does not tell
    policy = policy_of(notes=notes)
    policy.generate(seen(policy_of()), top_p=0.6)
    assert not any(turn.trained for turn in policy.turns[1:]) and "top_p=0.6 is not trained" in notes[0]


def test_stopping_criteria_cut_what_is_recorded_too(policy_of):
    policy = policy_of()
    policy.generate(seen(policy_of()), top_k=4, stopping_criteria=[lambda ids, scores: ids.shape[1] % 3 == 0])
    for turn in policy.turns[1:]:
        said = turn.completion
        assert said.kept is not None and len(said.kept) == len(said.token_ids) == len(said.kept_logprobs)


def test_train_turns_first(policy_of):
    policy = policy_of(train_turns="first")
    policy.generate(seen(policy))
    assert [turn.trained for turn in policy.turns] == [True, False]
    (segment,) = segments_of(policy.turns)
    assert set(segment.mask) == {1} and segment.completion_ids == policy.turns[0].completion.token_ids


def test_chat_goes_on_from_the_sampled_ids(policy_of, tiny):
    policy = policy_of(said=ended(tiny))
    talk = [*HELLO, {"role": "assistant", "content": "7"}, AGAIN]
    text = policy.chat(talk, max_new_tokens=5)
    first, second = policy.turns
    assert text == second.completion.text
    before = first.prompt_ids + first.completion.token_ids
    assert second.prompt_ids[: len(before)] == before and len(second.prompt_ids) > len(before)
    asked = Prompt(id="x", messages=tuple(talk))
    assert second.prompt_ids == encode_prompt(asked, tiny.tokenizer).token_ids  # "7" is encoded as it was sampled here
    policy.chat([*talk[:1], {"role": "assistant", "content": "something else"}, AGAIN])
    assert policy.forks == 1


def test_chat_has_the_environments_tools_unless_others_are_said(policy_of, tiny):
    function = {"name": "search_hotels", "parameters": {"type": "object", "properties": {}}}
    policy = policy_of(said=ended(tiny), tools=({"type": "function", "function": function},))
    policy.chat(HELLO, max_new_tokens=1)
    policy.chat(HELLO, tools=[], max_new_tokens=1)
    shown = ["search_hotels" in tiny.tokenizer.decode(list(turn.prompt_ids)) for turn in policy.turns]
    assert shown == [True, True, False]


def test_stopping_criteria_cut_where_they_would_have_stopped(policy_of):
    policy = policy_of()
    ids = seen(policy)
    out = policy.generate(
        ids, max_new_tokens=6, stopping_criteria=[lambda ids_BT, scores: ids_BT.shape[1] >= ids.shape[1] + 2]
    )
    assert out.shape[1] <= ids.shape[1] + 2
    said = policy.turns[-1].completion
    assert len(said.logprobs) == len(said.token_ids) <= 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "generate was given nothing"),
        (torch.zeros(3), "the shape (3,)"),
        (torch.zeros(1, 3), "the shape (1, 3)"),
        (torch.zeros(1, 0, dtype=torch.long), "the shape (1, 0)"),
        ("text", "generate was given str"),
    ],
)
def test_ids_that_are_no_prompt(policy_of, ids, message):
    with pytest.raises(EnvError) as caught:
        policy_of().generate(ids)
    assert message in str(caught.value)


def test_limits_are_raised_where_the_policy_is_asked(policy_of):
    policy = policy_of(max_turns=2)
    policy.generate(seen(policy))
    with raises(LimitReached):
        policy.generate(seen(policy))
    assert policy.limit == "max_turns" and len(policy.turns) == 2
    spent = policy_of(max_tokens=8)
    left = 8 - len(spent.turns[0].completion.token_ids)
    spent.generate(seen(spent), max_new_tokens=50)
    assert len(spent.turns[1].completion.token_ids) <= left
    full = policy_of()
    with raises(LimitReached):
        full.generate(torch.ones(1, 192, dtype=torch.long))
    assert full.limit == "context"
    long = full.generate(torch.ones(1, 190, dtype=torch.long), max_new_tokens=50)
    assert long.shape[1] <= 192


def test_max_length_counts_the_prompt(policy_of):
    policy = policy_of()
    ids = seen(policy)
    assert policy.generate(ids, max_length=ids.shape[1] + 3).shape[1] <= ids.shape[1] + 3
    with raises(EnvError):
        policy.generate(ids, max_length=2)


def test_once_closed_it_answers_and_records_no_more(policy_of):
    policy = policy_of(max_turns=4096)
    raised: list[BaseException] = []

    begun = threading.Event()

    def ask() -> None:
        try:
            while True:
                policy.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=4)
                begun.set()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(timeout=120)
    policy.close()
    thread.join(timeout=120)
    recorded = policy.turns
    assert isinstance(raised[0], PolicyClosedError) and policy.failure is None
    with pytest.raises(PolicyClosedError):
        policy.chat(HELLO)
    assert policy.turns == recorded


def test_what_model_code_looks_at(policy_of, tiny):
    policy = policy_of()
    assert policy.device == tiny.device and policy.dtype == torch.float32
    assert policy.eval() is policy and policy.train() is policy and policy.to("cpu") is policy and not policy.training
    assert next(policy.parameters()).device == tiny.device and next(policy.parameters()).numel() == 0
    assert policy.config.vocab_size == tiny.vocabulary
    policy.config.use_cache = True
    policy.generation_config.pad_token_id = 1
    assert tiny.model.config.use_cache is False and tiny.model.generation_config.pad_token_id != 1
    assert not hasattr(policy, "module")
    with raises(AttributeError):
        policy.lm_head  # noqa: B018
    with raises(EnvError):
        policy(torch.ones(1, 1))
