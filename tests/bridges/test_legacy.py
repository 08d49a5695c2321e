"""Three-method environments: their dataset, their tools, their scorer, and the tokenizer that they are given."""

from __future__ import annotations

import threading

import pytest

from groupwise.bridges.aitraining.generate_options import generate_options_of
from groupwise.bridges.aitraining.three_method import LegacyEnv, for_user_code
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, DataError, EnvError
from groupwise.tasks.env_loading import EnvFactory
from groupwise.tasks.prompts import to_prompt
from groupwise.types import SamplingParams
from wording import raises, warns

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "user", "content": "A room in Paris?"}]


class Hotel:
    """As a user would write it: the dataset stays on the instance that made it."""

    def __init__(self, rows=None, tools=()):
        self.given, self.offered, self.asked = rows, list(tools), 0

    def build_dataset(self, tokenizer):
        assert tokenizer.padding_side == "left" and tokenizer.pad_token is not None
        self.cities = ["Paris", "Rome"]
        default = [{"prompt": f"A room in {city}?", "case_idx": i} for i, city in enumerate(self.cities)]
        return default if self.given is None else self.given

    def score_episode(self, model, tokenizer, completion, case_idx):
        self.asked += 1
        return self.cities[case_idx] in completion

    def get_tools(self):
        return self.offered


def legacy(tokenizer, kind=Hotel, *, note=None, **given) -> LegacyEnv:
    args = given.pop("args", {})
    config = EnvConfig(environment="m:Hotel", args=args, **given)
    factory = EnvFactory(name="Hotel", make_one=kind, args=args)
    return LegacyEnv(factory, config, tokenizer, note=note)


def test_a_dataset_of_either_kind_becomes_prompts(tokenizer):
    import datasets

    rows = [{"prompt": f"City {i}?", "case_idx": 10 + i, "budget": 5 * i} for i in range(3)]
    for given in (rows, datasets.Dataset.from_list(rows)):
        prompts = legacy(tokenizer, args={"rows": given}).cases()
        assert [prompt.text for prompt in prompts] == ["City 0?", "City 1?", "City 2?"]
        assert [prompt.columns for prompt in prompts] == [{"case_idx": 10 + i, "budget": 5 * i} for i in range(3)]
        assert len({prompt.id for prompt in prompts}) == 3


def test_without_case_idx_the_row_is_the_case_and_that_is_said_once(tokenizer):
    notes: list[str] = []
    prompts = legacy(tokenizer, args={"rows": [{"prompt": "a"}, {"prompt": "b"}]}, note=notes.append).cases()
    assert [prompt.columns["case_idx"] for prompt in prompts] == [0, 1]
    assert notes == ["Hotel.build_dataset: no column 'case_idx'; the number of its row is a prompt's case"]
    with warns():
        legacy(tokenizer, args={"rows": [{"prompt": "a"}]}).cases()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        "rows",
        7,
        {"train": []},
        ["a"],
        [{"prompt": "a", "case_idx": 0}, {"question": "b", "case_idx": 1}],
        [{"prompt": "a", "case_idx": 0}, {"prompt": "b"}],
        [{"prompt": "a", "case_idx": 0}, {"prompt": "b", "case_idx": None}],
        [{"prompt": ""}],
        [{"prompt": [{"role": "robot", "content": "x"}], "case_idx": 0}],
    ],
)
def test_a_dataset_that_cannot_be_used(tokenizer, rows):
    env = legacy(tokenizer, args={"rows": rows}, note=lambda text: None)
    with raises(DataError):
        env.cases()


def test_tools_are_asked_for_once_and_go_into_prompts_of_messages(tokenizer):
    asked: list[int] = []

    class Counted(Hotel):
        def get_tools(self):
            asked.append(1)
            return self.offered

    notes: list[str] = []
    rows = [{"prompt": MESSAGES, "case_idx": 0}, {"prompt": "text", "case_idx": 1}]
    first, second = legacy(tokenizer, Counted, args={"rows": rows, "tools": [TOOL]}, note=notes.append).cases()
    assert first.tools == (TOOL,) and second.tools == () and asked == [1]
    assert "its tools do not go into prompts that are texts" in notes[0] and len(notes) == 1


def test_an_environment_needs_no_tools_and_odd_ones_are_refused(tokenizer):
    class Bare:
        def build_dataset(self, tokenizer):
            return [{"prompt": "a", "case_idx": 0}]

        def score_episode(self, **given):
            return len(given)

    assert legacy(tokenizer, Bare).cases()[0].tools == ()
    with raises(EnvError, field="Hotel.get_tools"):
        legacy(tokenizer, args={"tools": ["search"]})


def test_a_scorer_that_cannot_be_called_by_these_names_is_refused_at_once(tokenizer):
    class NoCase(Hotel):
        def score_episode(self, model, tokenizer, completion):
            return 1.0

    with raises(ConfigError):
        legacy(tokenizer, NoCase)


@pytest.mark.parametrize("option", [{"max_tool_calls": 3}, {"step_timeout_s": 2.0}, {"stop_at_cut": False}])
def test_options_that_would_do_nothing_are_refused(tokenizer, option):
    with raises(ConfigError):
        legacy(tokenizer, **option)


def test_what_the_dataset_raises_names_the_method(tokenizer):
    class Broken(Hotel):
        def build_dataset(self, tokenizer):
            raise RuntimeError("no network")

    with raises(EnvError, field="Hotel.build_dataset", kind="exception"):
        legacy(tokenizer, Broken).cases()


def test_an_episode_has_the_instance_that_made_the_dataset_or_a_copy_of_it(tokenizer):
    env = legacy(tokenizer)
    env.cases()
    one, other = env.instance(), env.instance()
    given = {"model": None, "completion": "Rome it is", "case": 1}
    assert env.score(one, **given) == 1.0 and env.score(one, **given) == 1.0
    assert (one.asked, other.asked) == (2, 0) and one.cities is other.cities
    alone = legacy(tokenizer, concurrency=1)
    assert alone.instance() is alone.instance()


def test_an_async_scorer_is_waited_for(tokenizer):
    class Async(Hotel):
        async def score_episode(self, model, tokenizer, completion, case_idx):
            return 0.25

    env = legacy(tokenizer, Async)
    assert env.score(env.instance(), model=None, completion="", case=0) == 0.25


def test_held_out_rows_must_name_their_case(tokenizer):
    class WithEval(Hotel):
        def build_eval_dataset(self, tokenizer):
            return [{"prompt": "c"}]

    assert legacy(tokenizer).cases(held_out=True) is None
    with raises(DataError):
        legacy(tokenizer, WithEval).cases(held_out=True)
    chosen = legacy(tokenizer, args={"tools": [TOOL]})
    row = {"prompt": MESSAGES, "case_idx": 1}
    assert chosen.check([to_prompt(row, id="r:1")], "eval.jsonl")[0].tools == (TOOL,)
    with raises(DataError):
        chosen.check([to_prompt({"prompt": "a"}, id="r:1")], "eval.jsonl")


def test_the_tokenizer_is_a_copy_that_threads_may_pad_with(tokenizer):
    own = for_user_code(tokenizer)
    assert own is not tokenizer and tokenizer.padding_side == "right" and isinstance(own, type(tokenizer))
    assert own("What is 7?")["input_ids"] == tokenizer("What is 7?")["input_ids"]
    wrong: list[object] = []

    def encode(padded: bool) -> None:
        for _ in range(100):
            lengths = {len(row) for row in own(["What is 7?", "7"], padding=padded)["input_ids"]}
            if (len(lengths) == 1) is not padded:
                wrong.append(lengths)

    threads = [threading.Thread(target=encode, args=(padded,)) for padded in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- what `generate` is asked for ----

RUN = SamplingParams(max_tokens=16, temperature=1.0, top_k=50, stop=("###",))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 1, "top_k": 50, "top_p": None},
        {"use_cache": True, "pad_token_id": 0, "num_beams": 1, "repetition_penalty": 1.0, "logits_processor": []},
    ],
)
def test_the_runs_own_sampling_however_it_is_said(options):
    asked = generate_options_of(None, options, given=RUN, run=RUN)
    assert asked.params == RUN and asked.otherwise == ""


def test_other_sampling_is_done_as_asked_and_named():
    asked = generate_options_of(None, {"temperature": 0.5, "top_k": 50}, given=RUN, run=RUN)
    assert (asked.params.temperature, asked.params.top_k, asked.otherwise) == (0.5, 50, "temperature=0.5")
    greedy = generate_options_of(None, {"do_sample": False, "temperature": 1.0}, given=RUN, run=RUN)
    assert (greedy.params.temperature, greedy.otherwise) == (0.0, "do_sample=False")


def test_in_a_greedy_evaluation_the_runs_own_is_greedy_too():
    given = SamplingParams(max_tokens=16, temperature=0.0)
    assert generate_options_of(None, {"do_sample": True, "temperature": 1.0}, given=given, run=RUN).params == given
    other = generate_options_of(None, {"temperature": 0.5}, given=given, run=RUN)
    assert (other.params.temperature, other.params.top_k) == (0.5, 50)


def test_a_generation_config_counts_and_options_win_over_it():
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.5, eos_token_id=[3, 4])
    asked = generate_options_of(
        config, {"temperature": 1.0, "stop_strings": "end", "num_return_sequences": 2}, given=RUN, run=RUN
    )
    assert (asked.params.max_tokens, asked.params.stop_ids, asked.params.stop) == (5, (3, 4), ("end",))
    assert asked.n == 2 and asked.otherwise == ""


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"repetition_penalty": 1.2},
        {"temprature": 0.5},
        {"temperature": -1},
        {"max_new_tokens": 0},
        {"num_return_sequences": 0},
    ],
)
def test_what_the_engine_cannot_do_is_refused(options):
    with raises(EnvError):
        generate_options_of(None, options, given=RUN, run=RUN)
