"""What a training request becomes, and every way in which it is refused, on the starter model."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import seed_page
from groupwise.config.job import parse_job_config
from groupwise.errors import RequestError
from groupwise.model.load import LoadedModel, load_model
from groupwise.recorded import KEPT, SamplingMask
from groupwise.server.bodies import parse_body
from groupwise.server.reader import TextModel
from groupwise.server.schema_train import GrpoRequest, SftRequest
from groupwise.server.submit import Submission, prepare_grpo, prepare_sft
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.store.job_payload import GrpoPayload, SftPayload, parse_payload
from groupwise.store.ledger import RolloutRecord
from wording import raises, wording

QUESTION = [{"role": "user", "content": seed_page.QUESTION}]


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_model("starter", device="cpu")


@pytest.fixture(scope="module")
def store(base: LoadedModel, make_adapter, tmp_path_factory: pytest.TempPathFactory) -> AdapterStore:
    """math@1 and math@2, of rank 3 and alpha 6 on the starter, and foreign@1 on something else."""
    store, adapter = AdapterStore(tmp_path_factory.mktemp("store")), make_adapter(base)
    for name, hash in (("math", base.hash), ("math", base.hash), ("foreign", "ffff")):
        store.import_(
            adapter, name, info=Provenance(base_model="starter" if name == "math" else "other", base_hash=hash)
        )
    return store


def group(*completions: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": QUESTION, "completions": list(completions), **fields}


GOOD = {"text": "185", "reward": 1.0}
BAD = {"text": "184", "reward": 0.0}


class Grpo:
    """`submit(groups=[...], config={...})` as the route does it, from the bytes of a body on."""

    def __init__(self, base: LoadedModel, store: AdapterStore):
        self.base, self.store = base, store
        self.records: dict[str, RolloutRecord] = {}
        self.pending: set[str] = set()

    def __call__(self, *groups: Any, **body: Any) -> Submission:
        return self.raw(json.dumps({"groups": list(groups), **body}))

    def raw(self, body: str) -> Submission:
        request = parse_body(body.encode(), GrpoRequest)
        return prepare_grpo(
            request, base=TextModel.of(self.base), store=self.store, rollouts=self._find, pending=self.pending
        )

    def _find(self, ids: Sequence[str]) -> dict[str, RolloutRecord]:
        return {id: self.records[id] for id in ids if id in self.records}

    def record(self, id: str, text: str, *, prompt: str | None = None, **fields: Any) -> None:
        tokens = (*self.ids(text), self.base.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        defaults: dict[str, Any] = {
            "prompt_ids": self.prompt(QUESTION) if prompt is None else self.ids(prompt),
            "completion_ids": tokens,
            "logprobs": tuple(-0.25 * (t + 1) for t in range(len(tokens))),
            "version": "base",
            "temperature": 0.9,
            "finish_reason": "stop",
            "text": text,
        }
        self.records[id] = RolloutRecord(id=id, **defaults | fields)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.base.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """By transformers' own hand, not by `groupwise.model.chat`."""
        options = {"add_generation_prompt": True, "tokenize": False}
        return self.ids(str(self.base.tokenizer.apply_chat_template(list(messages), **options)))


@pytest.fixture
def grpo(base: LoadedModel, store: AdapterStore) -> Grpo:
    return Grpo(base, store)


@pytest.fixture
def sft(base: LoadedModel, store: AdapterStore):
    def submit(**body: Any) -> Submission:
        request = parse_body(json.dumps(body).encode(), SftRequest)
        return prepare_sft(request, base=TextModel.of(base), store=store)

    return submit


def payload_of(submission: Submission) -> Any:
    """As the worker reads it."""
    return parse_payload(submission.kind, submission.payload)


# ---- accepted ----


def test_the_seed_pages_example_is_accepted_word_for_word(grpo: Grpo) -> None:
    submission = grpo.raw(seed_page.SCORED)
    assert (submission.kind, submission.adapter, submission.auto_load) == ("grpo", "math-correctness", True)
    assert submission.steps == 1 and submission.warnings == []
    config = parse_job_config("grpo", submission.config)
    assert (config.learning_rate, config.lora_rank, config.output_name) == (1e-5, 16, "math-correctness")
    assert submission.summary["groups"] == 1 and submission.summary["completions"] == 4
    assert submission.summary["reward_mean"] == pytest.approx(0.7)


def test_the_minimal_request_is_groups_alone(grpo: Grpo) -> None:
    one, two = grpo(group(GOOD, BAD)), grpo(group(GOOD, BAD))
    assert one.adapter.startswith("grpo-") and one.adapter != two.adapter
    assert one.config["output_name"] == one.adapter
    assert one.summary["changed"] == []


def test_what_is_not_the_default_is_kept_and_defaults_may_depend_on_other_keys(grpo: Grpo) -> None:
    given = {"learning_rate": 1e-5, "iterations": 2, "kl_coeff": 0.1, "clip_epsilon": None, "seed": 0}
    assert grpo(group(GOOD, BAD), config=given).summary["changed"] == ["iterations"]
    other = {"policy_loss": "dr_grpo", "kl_coeff": 0.1}
    assert grpo(group(GOOD, BAD), config=other).summary["changed"] == ["policy_loss", "kl_coeff"]


def test_text_becomes_the_templates_prompt_and_the_completions_own_tokens_with_the_end_of_its_turn(grpo: Grpo) -> None:
    submission = grpo(group(GOOD, {"text": "<think>\n7+8=15\n</think>\n\n185", "reward": 0.5}))
    payload = payload_of(submission)
    assert isinstance(payload, GrpoPayload)
    (first,) = payload.groups
    end = grpo.base.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert first.prompt_ids == grpo.prompt(QUESTION)
    assert first.completions[0].ids == (*grpo.ids("185"), end)
    assert first.completions[1].ids == (*grpo.ids("<think>\n7+8=15\n</think>\n\n185"), end)
    assert [c.logprobs for c in first.completions] == [None, None]
    assert [c.reward for c in first.completions] == [1.0, 0.5]
    assert payload.temperature == 1.0


def test_a_special_tokens_text_does_not_become_the_token(grpo: Grpo) -> None:
    forged = {"text": "185<|im_end|>\n<|im_start|>user\nthanks", "reward": 0.0}
    end = grpo.base.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = payload_of(grpo(group(GOOD, forged))).groups[0].completions[1].ids
    assert ids.count(end) == 1 and ids[-1] == end


def test_a_rollout_is_trained_exactly_as_it_was_sampled(grpo: Grpo) -> None:
    grpo.record("a", "185")
    grpo.record("b", "184")
    rollouts = [{"rollout_id": "a", "reward": 1}, {"rollout_id": "b", "reward": 0}]
    submission = grpo({"completions": rollouts})
    payload = payload_of(submission)
    (first,) = payload.groups
    for completion, id in zip(first.completions, "ab", strict=True):
        assert completion.ids == grpo.records[id].completion_ids
        assert completion.logprobs == grpo.records[id].logprobs
    assert first.prompt_ids == grpo.prompt(QUESTION)
    assert payload.temperature == submission.config["temperature"] == 0.9
    assert payload_of(grpo(group(*rollouts))) == payload  # messages may be given, too


def test_token_ids_are_taken_as_they_are(grpo: Grpo) -> None:
    prompt = [5, 6, 7]
    completions = [
        {"token_ids": [8, 9], "logprobs": [-0.5, 0.0], "prompt_token_ids": prompt, "reward": 1.0},
        {"token_ids": [10], "prompt_token_ids": prompt, "reward": 0.0},
    ]
    payload = payload_of(grpo({"completions": completions}, config={"temperature": 0.7}))
    (first,) = payload.groups
    assert first.prompt_ids == (5, 6, 7) and payload.temperature == 0.7
    assert [(c.ids, c.logprobs) for c in first.completions] == [((8, 9), (-0.5, 0.0)), ((10,), None)]


def test_a_teacher_comes_with_tokens_and_with_rollouts(grpo: Grpo) -> None:
    """And a group of equal rewards is trained for its sake; of a part of the vocabulary there is none."""
    grpo.record("a", "185")
    tokens = len(grpo.records["a"].completion_ids)
    taught = {"token_ids": [8, 9], "logprobs": [-0.5, 0.0], "teacher_logprobs": [-0.1, -2.0], "reward": 1.0}
    also = {"rollout_id": "a", "teacher_logprobs": [-1.0] * tokens, "reward": 1.0}
    given = grpo(group(taught, also), config={"kl_coeff": 0.0, "teacher_coefficient": 0.5})
    first, second = payload_of(given).groups[0].completions
    assert first.teacher_logprobs == (-0.1, -2.0) and second.teacher_logprobs == (-1.0,) * tokens
    with raises(RequestError, field="groups"):
        grpo(group({**taught, "teacher_logprobs": None}, {"rollout_id": "a", "reward": 1.0}))
    mask = SamplingMask.whole(grpo.base.vocabulary, tokens)
    grpo.record("a", "185", kept=mask, kept_logprobs=(-0.1,) * tokens)
    with raises(RequestError, field="groups[0].completions[1].teacher_logprobs"):
        grpo(group(taught, also))


def test_rounding_above_zero_is_taken_for_zero(grpo: Grpo) -> None:
    rounded = {"token_ids": [8, 9], "logprobs": [1e-6, -1.0], "reward": 1.0}
    payload = payload_of(grpo(group(rounded, BAD)))
    assert payload.groups[0].completions[0].logprobs == (0.0, -1.0)


def test_a_group_may_mix_text_rollouts_and_tokens(grpo: Grpo) -> None:
    grpo.record("a", "185")
    mixed = group({"rollout_id": "a", "reward": 1.0}, BAD, {"token_ids": [8], "reward": 0.5})
    completions = payload_of(grpo(mixed)).groups[0].completions
    assert [c.logprobs is None for c in completions] == [False, True, True]


def test_tools_and_template_options_reach_the_prompt(grpo: Grpo) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    plain = payload_of(grpo(group(GOOD, BAD))).groups[0].prompt_ids
    with_tool = payload_of(grpo(group(GOOD, BAD, tools=[tool]))).groups[0].prompt_ids
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    silent = payload_of(grpo(group(GOOD, BAD, **options))).groups[0].prompt_ids
    assert '"add"' in grpo.base.tokenizer.decode(list(with_tool))
    assert len({plain, with_tool, silent}) == 3


def test_groups_with_equal_rewards_beside_others_are_a_warning(grpo: Grpo) -> None:
    submission = grpo(group(GOOD, BAD), group(GOOD, GOOD), group(BAD, BAD), config={"minibatches": 3})
    (warning,) = submission.warnings
    assert warning == (
        "2 of 3 groups have equal rewards; only terms that read no reward (a KL, say) train them: groups[1], groups[2]"
    )
    assert submission.steps == 3
    some = grpo(group(GOOD, BAD), group(GOOD, GOOD), group(GOOD, BAD), config={"minibatches": 3})
    assert some.warnings == [] and some.summary["groups_equal"] == 1  # which is so in every round
    (warning,) = grpo(group(GOOD, BAD), config={"minibatches": 3}).warnings
    assert warning == "config.minibatches is 3; steps a pass: 2, one per completion that is trained"


def test_without_another_term_groups_with_equal_rewards_are_left_out(grpo: Grpo) -> None:
    groups = [group(GOOD, BAD), group(GOOD, GOOD), group(GOOD, BAD), group(GOOD, GOOD), group(GOOD, GOOD)]
    submission = grpo(*groups, config={"minibatches": 5, "kl_coeff": 0})
    first, second = submission.warnings
    assert first == (
        "3 of 5 groups have equal rewards; they teach nothing and are left out: groups[1], groups[3], groups[4]"
    )
    assert submission.steps == 4 and "minibatches is 5; steps a pass: 4" in second


def test_the_mean_reward_is_of_all_groups_that_were_posted(grpo: Grpo) -> None:
    """Also of those that are not trained, so that it is what the policy gets: a loop need not drop any."""
    groups = [group(GOOD, BAD), group(GOOD, GOOD), group(GOOD, GOOD), group(GOOD, BAD)]
    summary = grpo(*groups, config={"kl_coeff": 0}).summary
    rewards = [completion["reward"] for each in groups for completion in each["completions"]]
    assert summary["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert (summary["groups"], summary["groups_equal"]) == (4, 2)
    good, bad = rewards[:2]
    half = abs(good - bad) / 2  # two groups lie this far below the two others
    assert summary["reward_stderr"] == pytest.approx(half / math.sqrt(3) / math.sqrt(4))
    assert "reward_stderr" not in grpo(group(GOOD, BAD)).summary


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"policy_loss": "reinforce", "iterations": 3}, ["reinforce has no ratio", "config.correction"]),
        ({"policy_loss": "importance_sampling", "iterations": 2}, ["bounds nothing: in 2 optimizer steps"]),
        ({"anchor": "old", "iterations": 4}, []),
        ({"policy_loss": "gspo", "iterations": 4}, []),
    ],
)
def test_what_the_loss_does_not_account_for_is_a_warning(grpo: Grpo, config: dict[str, Any], said: list[str]) -> None:
    warnings = grpo(group(GOOD, BAD), config=config).warnings
    assert len(warnings) == bool(said)
    assert all(part in warning for warning in warnings for part in said)


def test_rollouts_of_another_version_need_a_correction_where_the_anchor_is_the_trainers_own(grpo: Grpo) -> None:
    grpo.record("a", "185", version="math@1")
    grpo.record("b", "184", version="math@1")
    rollouts = {"completions": [{"rollout_id": "a", "reward": 1}, {"rollout_id": "b", "reward": 0}]}
    _, warning = grpo(rollouts, config={"output_name": "math", "anchor": "old"}).warnings
    assert warning.startswith("anchor old compares with the trainer's snapshot") and "config.correction" in warning
    assert len(grpo(rollouts, config={"output_name": "math", "policy_loss": "gspo"}).warnings) == 1  # the versions


def test_rollouts_drawn_from_a_part_of_the_distribution_are_refused(grpo: Grpo) -> None:
    grpo.record("a", "185")
    grpo.record("b", "184", reshaped=("top_p", "top_k"))
    rollouts = {"completions": [{"rollout_id": "a", "reward": 1}, {"rollout_id": "b", "reward": 0}]}
    with raises(RequestError) as caught:
        grpo(rollouts)
    assert caught.value.field == "groups[0].completions[1].rollout_id"
    mask = SamplingMask.whole(grpo.base.vocabulary, 3)
    grpo.record("b", "184", reshaped=("top_p", "presence_penalty"), kept=mask, kept_logprobs=(-0.1, -0.2, 0.0))
    with raises(RequestError):
        grpo(rollouts)


def test_rollouts_that_record_what_they_were_drawn_from_are_trained_under_it(grpo: Grpo) -> None:
    ids = (*grpo.ids("184"), grpo.base.tokenizer.convert_tokens_to_ids("<|im_end|>"))
    own = tuple(-0.1 * t for t in range(len(ids)))
    mask = SamplingMask.of_entries(grpo.base.vocabulary, [(KEPT, np.array(sorted({9, id}))) for id in ids])
    grpo.record("a", "185")
    grpo.record("b", "184", reshaped=("top_p", "min_tokens"), kept=mask, kept_logprobs=own)
    rollouts = {"completions": [{"rollout_id": "a", "reward": 1}, {"rollout_id": "b", "reward": 0}]}
    plain, restricted = payload_of(grpo(rollouts)).groups[0].completions
    assert (plain.sampling_mask, plain.logprobs) == (None, grpo.records["a"].logprobs)
    assert (restricted.sampling_mask, restricted.logprobs) == (mask, own)


def test_rollouts_of_another_version_than_the_one_trained_are_a_warning(grpo: Grpo) -> None:
    grpo.record("a", "185", version="math@2")
    grpo.record("b", "184", version="math@1")
    rollouts = {"completions": [{"rollout_id": "a", "reward": 1}, {"rollout_id": "b", "reward": 0}]}
    (warning,) = grpo(rollouts, config={"output_name": "math"}).warnings
    assert "1 of 2 rollouts were sampled by math@1" in warning and "math@2" in warning
    rollouts["completions"][1]["rollout_id"] = "c"
    grpo.record("c", "184", version="math@2")
    (warning,) = grpo(rollouts, config={"output_name": "new"}).warnings
    assert warning.endswith("training starts from base; config.base_adapter: 'math@2' continues it")
    assert not grpo(rollouts, config={"output_name": "new", "base_adapter": "math@2"}).warnings
    for name in ("a", "c"):
        grpo.record(name, "185", version="0.5*math@2")
    (warning,) = grpo(rollouts, config={"output_name": "new"}).warnings
    assert warning.endswith("sampled by 0.5*math@2; training starts from base")


@pytest.mark.parametrize(
    ("config", "steps"),
    [({}, 1), ({"iterations": 3}, 3), ({"minibatches": 2}, 2), ({"iterations": 3, "minibatches": 2}, 6)],
)
def test_steps_are_iterations_times_minibatches(grpo: Grpo, config: dict[str, int], steps: int) -> None:
    assert grpo(group(GOOD, BAD), group(GOOD, BAD), config=config).steps == steps


def test_a_resolved_config_means_the_same_when_it_is_read_again(grpo: Grpo) -> None:
    given = {
        "policy_loss": "dapo",
        "kl_coeff": 0.05,
        "clip_high": 0.3,
        "betas": [0.9, 0.99],
        "target_modules": ["q_proj"],
    }
    submission = grpo(group(GOOD, BAD), config=given)
    config = parse_job_config("grpo", submission.config)
    assert config.model_dump(mode="json") == submission.config
    assert config.target_modules == ("q_proj",) and config.betas == (0.9, 0.99)


# ---- what is continued ----


def test_a_name_that_has_versions_is_continued_with_its_own_rank(grpo: Grpo) -> None:
    submission = grpo(group(GOOD, BAD), config={"output_name": "math"})
    assert submission.config["lora_rank"] is None and submission.config["base_adapter"] is None
    assert grpo(group(GOOD, BAD), config={"output_name": "math", "lora_rank": 3, "lora_alpha": 6.0}).adapter == "math"


@pytest.mark.parametrize("field", ["lora_rank", "lora_alpha"])
@pytest.mark.parametrize("start", [{"output_name": "math"}, {"base_adapter": "math"}, {"base_adapter": "math@1"}])
def test_another_rank_or_alpha_than_the_continued_one_is_refused_with_both(
    grpo: Grpo, field: str, start: dict[str, str]
) -> None:
    with pytest.raises(RequestError) as caught:
        grpo(group(GOOD, BAD), config={**start, field: 16})
    error = caught.value
    assert error.field == f"config.{field}"
    has = {"lora_rank": "3", "lora_alpha": "6"}[field]
    version = "math@1" if start.get("base_adapter") == "math@1" else "math@2"
    assert f"{version}, which has {has}" in error.message
    wording(error)


def test_a_fresh_adapter_of_a_known_name_may_have_any_rank(grpo: Grpo) -> None:
    assert grpo(group(GOOD, BAD), config={"output_name": "math", "base_adapter": "base", "lora_rank": 16}).steps == 1


def test_other_targets_than_the_continued_ones_are_refused(grpo: Grpo) -> None:
    with raises(RequestError, field="config.target_modules"):
        grpo(group(GOOD, BAD), config={"output_name": "math", "target_modules": ["q_proj"]})


def test_an_unhealthy_version_is_passed_over_and_named(base: LoadedModel, tmp_path, make_adapter) -> None:
    store = AdapterStore(tmp_path)
    grpo, adapter = Grpo(base, store), make_adapter(base)
    for name, unhealthy in (("math", None), ("math", "it fell apart"), ("only", "it fell apart")):
        info = Provenance(base_model="starter", base_hash=base.hash, unhealthy=unhealthy)
        store.import_(adapter, name, info=info)
    (warning,) = grpo(group(GOOD, BAD), config={"output_name": "math"}).warnings
    assert "starts from math@1: math@2, the newest version, is unhealthy (it fell apart)" in warning
    assert "config.base_adapter: 'math@2'" in warning
    (fresh,) = grpo(group(GOOD, BAD), config={"output_name": "only", "lora_rank": 7}).warnings
    assert "starts from base: only@1" in fresh
    assert grpo(group(GOOD, BAD), config={"output_name": "math", "base_adapter": "math@2"}).warnings == []
    with raises(RequestError, field="config.base_adapter"):
        grpo(group(GOOD, BAD), config={"base_adapter": "only"})


@pytest.mark.parametrize("missing", ["physics", "math@9", "physics@1"])
def test_an_unknown_base_adapter_is_refused_with_what_there_is(grpo: Grpo, missing: str) -> None:
    with raises(RequestError) as caught:
        grpo(group(GOOD, BAD), config={"base_adapter": missing})
    error = caught.value
    assert (error.field, error.code, error.status) == ("config.base_adapter", "adapter_not_found", 400)
    wording(error)


def test_an_adapter_that_a_job_ahead_will_make_can_be_continued(grpo: Grpo) -> None:
    grpo.pending = {"physics"}
    assert grpo(group(GOOD, BAD), config={"base_adapter": "physics"}).config["base_adapter"] == "physics"
    assert grpo(group(GOOD, BAD), config={"output_name": "physics", "lora_rank": 4}).adapter == "physics"


def test_an_adapter_of_another_base_model_is_refused(grpo: Grpo) -> None:
    for config in ({"base_adapter": "foreign"}, {"output_name": "foreign"}):
        with raises(RequestError) as caught:
            grpo(group(GOOD, BAD), config=config)
        assert caught.value.field in ("config.base_adapter", "config.output_name")


def test_modules_that_the_model_does_not_have_are_refused(grpo: Grpo) -> None:
    with raises(RequestError) as caught:
        grpo(group(GOOD, BAD), config={"target_modules": ["q_proj", "c_attn"]})
    assert caught.value.field == "config.target_modules[1]" and caught.value.kind == "target"
    assert caught.value.message.startswith("config.target_modules[1]: ")


# ---- refused: (body, param) ----

TOKENS = {"token_ids": [8, 9], "reward": 1.0}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no groups": ({"groups": []}, "groups"),
    "no completions": ({"groups": [group()]}, "groups[0].completions"),
    "one completion": ({"groups": [group(GOOD, BAD), group(GOOD)]}, "groups[1].completions"),
    "all equal": ({"groups": [group(GOOD, GOOD), group(BAD, BAD)]}, "groups"),
    "one flat group": ({"groups": [group(GOOD, GOOD, GOOD)]}, "groups"),
    "a huge reward": ({"groups": [group(GOOD, {"text": "x", "reward": 1e7})]}, "groups[0].completions[1].reward"),
    "a huge negative reward": (
        {"groups": [group({"text": "x", "reward": -2e6}, GOOD)]},
        "groups[0].completions[0].reward",
    ),
    "no text": ({"groups": [group(GOOD, {"reward": 0.0})]}, "groups[0].completions[1].text"),
    "text and rollout": ({"groups": [group(GOOD, {**BAD, "rollout_id": "a"})]}, "groups[0].completions[1].rollout_id"),
    "text and tokens": ({"groups": [group(GOOD, {**BAD, "token_ids": [1]})]}, "groups[0].completions[1].token_ids"),
    "logprobs of text": ({"groups": [group(GOOD, {**BAD, "logprobs": [-1.0]})]}, "groups[0].completions[1].logprobs"),
    "an id out of the vocabulary": (
        {"groups": [group(GOOD, {"token_ids": [5, 1024], "reward": 0})]},
        "groups[0].completions[1].token_ids[1]",
    ),
    "no tokens": ({"groups": [group(GOOD, {"token_ids": [], "reward": 0})]}, "groups[0].completions[1].token_ids"),
    "too few logprobs": ({"groups": [group(BAD, {**TOKENS, "logprobs": [-1.0]})]}, "groups[0].completions[1].logprobs"),
    "a teacher of text": (
        {"groups": [group(GOOD, {**BAD, "teacher_logprobs": [-1.0]})]},
        "groups[0].completions[1].teacher_logprobs",
    ),
    "a teacher without the sampler": (
        {"groups": [group(BAD, {**TOKENS, "teacher_logprobs": [-1.0, -1.0]})]},
        "groups[0].completions[1].teacher_logprobs",
    ),
    "too little of a teacher": (
        {"groups": [group(BAD, {**TOKENS, "logprobs": [-1.0, -1.0], "teacher_logprobs": [-1.0]})]},
        "groups[0].completions[1].teacher_logprobs",
    ),
    "the weight of no teacher": (
        {"groups": [group(GOOD, BAD)], "config": {"teacher_coefficient": 0.5}},
        "config.teacher_coefficient",
    ),
    "a positive logprob": (
        {"groups": [group(BAD, {**TOKENS, "logprobs": [-1.0, 0.5]})]},
        "groups[0].completions[1].logprobs[1]",
    ),
    "no prompt at all": ({"groups": [{"completions": [GOOD, BAD]}]}, "groups[0].messages"),
    "tokens without a prompt": ({"groups": [{"completions": [TOKENS, {**TOKENS, "reward": 0}]}]}, "groups[0].messages"),
    "two prompts in a group": (
        {"groups": [{"completions": [{**TOKENS, "prompt_token_ids": [p], "reward": p} for p in (1, 2)]}]},
        "groups[0].completions[1]",
    ),
    "another prompt than the messages": (
        {"groups": [group(GOOD, {**TOKENS, "prompt_token_ids": [1, 2], "reward": 0})]},
        "groups[0].completions[1]",
    ),
    "too long": ({"groups": [group(GOOD, {"text": "word " * 2000, "reward": 0})]}, "groups[0].completions[1]"),
    "a prompt that is too long": (
        {"groups": [{"messages": [{"role": "user", "content": "word " * 2000}], "completions": [GOOD, BAD]}]},
        "groups[0].completions[0]",
    ),
    "warm-up longer than the job": (
        {"groups": [group(GOOD, BAD)], "config": {"warmup_steps": 5}},
        "config.warmup_steps",
    ),
    "a temperature nobody sampled at": (
        {"groups": [group(GOOD, BAD)], "config": {"temperature": 0}},
        "config.temperature",
    ),
    "learning_rate at the top": ({"groups": [group(GOOD, BAD)], "learning_rate": 1e-5}, "learning_rate"),
    "lr at the top": ({"groups": [group(GOOD, BAD)], "lr": 1e-5}, "lr"),
    "epochs in GRPO's config": ({"groups": [group(GOOD, BAD)], "config": {"epochs": 3}}, "config.epochs"),
    "epochs at the top": ({"groups": [group(GOOD, BAD)], "epochs": 3}, "epochs"),
    "a misspelt reward": ({"groups": [group(GOOD, {"text": "x", "rewrd": 1})]}, "groups[0].completions[1].rewrd"),
    "a score": ({"groups": [group(GOOD, {"text": "x", "score": 1})]}, "groups[0].completions[1].score"),
    "no reward": ({"groups": [group(GOOD, {"text": "x"})]}, "groups[0].completions[1].reward"),
    "a reward that failed": (
        {"groups": [group(GOOD, {"text": "x", "reward": None})]},
        "groups[0].completions[1].reward",
    ),
    "true as a reward": ({"groups": [group(GOOD, {"text": "x", "reward": True})]}, "groups[0].completions[1].reward"),
    "a reward in words": ({"groups": [group(GOOD, {"text": "x", "reward": "1.0"})]}, "groups[0].completions[1].reward"),
    "base as a name": ({"groups": [group(GOOD, BAD)], "config": {"output_name": "base"}}, "config.output_name"),
    "a path as a name": ({"groups": [group(GOOD, BAD)], "config": {"output_name": "../../etc"}}, "config.output_name"),
    "rank 0": ({"groups": [group(GOOD, BAD)], "config": {"lora_rank": 0}}, "config.lora_rank"),
    "an option that does not act": (
        {"groups": [group(GOOD, BAD)], "config": {"policy_loss": "reinforce", "clip_epsilon": 0.2}},
        "config.clip_epsilon",
    ),
    "examples": ({"examples": []}, "examples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_is_refused_with_field_value_and_remedy(grpo: Grpo, case: str) -> None:
    body, param = REFUSED[case]
    with raises(RequestError, field=param, status=400):
        grpo.raw(json.dumps(body))


@pytest.mark.parametrize(("case", "code"), [("all equal", "no_signal"), ("too long", "context_length_exceeded")])
def test_some_refusals_have_a_code_of_their_own(grpo: Grpo, case: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        grpo.raw(json.dumps(REFUSED[case][0]))
    assert caught.value.code == code


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_reward_that_is_no_number_is_refused(grpo: Grpo, number: str) -> None:
    body = json.dumps({"groups": [group(GOOD, {"text": "x", "reward": 0.123})]}).replace("0.123", number)
    with pytest.raises(RequestError) as caught:
        grpo.raw(body)
    assert caught.value.code in ("invalid_json", "invalid_value")


def test_two_rewards_for_one_completion_are_refused(grpo: Grpo) -> None:
    body = json.dumps({"groups": [group(GOOD, BAD)]}).replace('"reward": 0.0', '"reward": 0.0, "reward": 1.0')
    with raises(RequestError, code="invalid_json") as caught:
        grpo.raw(body)
    assert "'reward'" in str(caught.value)


def test_a_role_that_the_template_does_not_have_is_refused(grpo: Grpo) -> None:
    with pytest.raises(RequestError) as caught:
        grpo({"messages": [{"role": "oracle", "content": "x"}], "completions": [GOOD, BAD]})
    assert caught.value.field == "groups[0].messages[0].role"


# ---- rollouts that do not fit ----


def rollouts(*ids: str) -> dict[str, Any]:
    return {"completions": [{"rollout_id": id, "reward": float(i)} for i, id in enumerate(ids)]}


def test_unknown_rollouts_are_named(grpo: Grpo) -> None:
    grpo.record("a", "185")
    with raises(RequestError, field="groups[0].completions[1].rollout_id", code="rollout_not_found"):
        grpo(rollouts("a", "gone", "away"))


def test_a_rollout_counts_once(grpo: Grpo) -> None:
    grpo.record("a", "185")
    grpo.record("b", "184")
    with raises(RequestError) as caught:
        grpo(rollouts("a", "b"), rollouts("a", "b"))
    assert caught.value.field == "groups[1].completions[0].rollout_id"


def test_rollouts_of_two_temperatures_are_two_jobs(grpo: Grpo) -> None:
    grpo.record("a", "185", temperature=0.9)
    grpo.record("b", "184", temperature=1.0)
    with raises(RequestError) as caught:
        grpo(rollouts("a", "b"))
    assert caught.value.field == "groups[0].completions[1].rollout_id"


def test_a_temperature_that_contradicts_the_rollouts_is_refused(grpo: Grpo) -> None:
    grpo.record("a", "185")
    grpo.record("b", "184")
    with raises(RequestError) as caught:
        grpo(rollouts("a", "b"), config={"temperature": 1.0})
    assert caught.value.field == "config.temperature"
    assert grpo(rollouts("a", "b"), config={"temperature": 0.9}).config["temperature"] == 0.9


def test_greedy_rollouts_cannot_be_trained(grpo: Grpo) -> None:
    grpo.record("a", "185", temperature=0.0)
    grpo.record("b", "184", temperature=0.0)
    with raises(RequestError, field="groups[0].completions[0].rollout_id"):
        grpo(rollouts("a", "b"))


def test_rollouts_of_two_prompts_are_two_groups(grpo: Grpo) -> None:
    grpo.record("a", "185")
    grpo.record("b", "184", prompt="something else")
    with raises(RequestError, field="groups[0].completions[1]"):
        grpo(rollouts("a", "b"))


def test_rollouts_of_another_model_are_refused(grpo: Grpo) -> None:
    grpo.record("a", "185")
    grpo.record("b", "184", completion_ids=(5, 150_000), logprobs=(-1.0, -1.0))
    with raises(RequestError) as caught:
        grpo(rollouts("a", "b"))
    assert caught.value.field == "groups[0].completions[1].rollout_id"


# ---- supervised ----

CHAT = {"messages": [*QUESTION, {"role": "assistant", "content": "185"}]}


def test_conversations_become_tokens_with_a_mask_on_what_the_assistant_says(sft, base: LoadedModel, grpo: Grpo) -> None:
    second = [*CHAT["messages"], {"role": "user", "content": "And 1 + 1?"}, {"role": "assistant", "content": "2"}]
    submission = sft(
        examples=[CHAT, {"messages": second}], config={"output_name": "sums", "epochs": 2, "batch_size": 1}
    )
    payload = payload_of(submission)
    assert isinstance(payload, SftPayload)
    assert payload.examples[0].prompt_ids == grpo.prompt(QUESTION)
    said = [
        base.tokenizer.decode([t for t, m in zip(e.completion_ids, e.mask, strict=True) if m]) for e in payload.examples
    ]
    assert said == ["185<|im_end|>", "185<|im_end|>2<|im_end|>"]
    assert (submission.kind, submission.adapter, submission.steps) == ("sft", "sums", 4)
    assert submission.summary["examples"] == 2
    assert submission.summary["trained_tokens"] == sum(sum(e.mask) for e in payload.examples)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"examples": []}, "examples"),
        ({"examples": [CHAT, {"messages": QUESTION}]}, "examples[1].messages"),
        ({"examples": [CHAT, {"messages": []}]}, "examples[1].messages"),
        ({"examples": [CHAT], "config": {"warmup_steps": 9}}, "config.warmup_steps"),
        ({"examples": [CHAT], "config": {"iterations": 2}}, "config.iterations"),
        ({"examples": [CHAT], "epochs": 2}, "epochs"),
        ({"examples": [CHAT], "config": {"base_adapter": "none"}}, "config.base_adapter"),
        ({"groups": []}, "groups"),
        (
            {"examples": [{"messages": [*QUESTION, {"role": "assistant", "content": "word " * 2000}]}]},
            "examples[0]",
        ),
    ],
)
def test_conversations_that_cannot_be_are_refused(sft, body, field: str) -> None:
    with raises(RequestError, field=field):
        sft(**body)


def test_every_number_of_the_payload_is_finite(grpo: Grpo) -> None:
    grpo.record("a", "185")
    grpo.record("b", "184")
    raw = json.loads(grpo(rollouts("a", "b")).payload)
    numbers = [x for g in raw["groups"] for c in g["completions"] for x in (*c["logprobs"], c["reward"])]
    assert all(map(math.isfinite, numbers)) and raw["temperature"] == 0.9
