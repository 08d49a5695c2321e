"""The completions of a run: token by token, turn by turn, and held-out prompts before training and after it."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import RequestError
from groupwise.run.evaluate import Evaluation, save_evaluations
from groupwise.server import run_rollouts
from groupwise.server.run_files import RunFiles
from groupwise.server.run_pairs import against
from groupwise.server.run_rollouts import (
    SampleQuery,
    change_of,
    facets,
    group,
    groups_of,
    page,
    prompt_id,
    sorted_page,
    steps_of,
)
from groupwise.server.schema_rollouts import RolloutNotFoundError, Sort
from groupwise.server.schema_runs import RunRollout
from groupwise.types import Completion, FinishReason, Message, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn
from run_place import ASKED, END, TOKENIZER, make_run, scored, turn, write_line
from run_place import group as group_of
from wording import raises


def run_of(directory: Path, *rollouts: Rollout, **options: Any) -> RunFiles:
    """A run whose one step had one group of these."""
    return RunFiles(make_run(directory, rollouts={1: [group_of(*rollouts)]}, **options), id="r")


def shown(run: RunFiles, **options: Any) -> RunRollout:
    """The best completion of its one group."""
    [found] = groups_of(run, 1, **options)
    return found.rollouts[0]


def episode(*turns: Turn, messages: list[Message] | None = None, stop: str = "done", **options: Any) -> Rollout:
    return Rollout(turns=turns, messages=tuple(messages or ()), stop=stop, **options)


def after(before: Turn, *told: int, text: str, **options: Any) -> Turn:
    """A turn that goes on from another."""
    return replace(turn(text, prompt=[*before.prompt_ids, *before.completion.token_ids, *told]), **options)


# ---- lists ----
def test_completions_are_found_by_prompt_tag_and_likeness_and_sorted(tmp_path: Path) -> None:
    def tagged(skill: str, *rollouts: Rollout) -> RolloutGroup:
        made = group_of(*rollouts, id=f"p:{skill}")
        return replace(made, prompt=replace(made.prompt, columns={"skill": skill}))

    two = {
        step: [
            tagged("add", scored("Four", 1.0), scored("five!", step / 4)),
            tagged("sub", scored("9", 0.5), scored("8", 0.25)),
        ]
        for step in (1, 2)
    }
    run = RunFiles(make_run(tmp_path / "r", rollouts=two), id="r")

    def ids(sort: Sort = "newest", **query: Any) -> list[str]:
        wanted = SampleQuery(**query)
        if sort == "newest":
            return [row.id for row in page(run, wanted, after=None, limit=99).rows]
        first = sorted_page(run, wanted, sort, after=None, limit=3)
        rest = [] if first.next is None else sorted_page(run, wanted, sort, after=first.next, limit=99).rows
        return [row.id for row in (*first.rows, *rest)]

    assert ids(contains="FOUR") == ["2.0.0", "1.0.0"] and len(ids(contains="USER")) == 8
    assert ids(prompt_id=prompt_id(run, "1.1.0")) == ["2.1.0", "2.1.1", "1.1.0", "1.1.1"]
    assert ids("best") == ["2.0.0", "1.0.0", "2.0.1", "2.1.0", "1.1.0", "2.1.1", "1.0.1", "1.1.1"]
    assert ids("worst", step=1) == ["1.0.1", "1.1.1", "1.1.0", "1.0.0"] and ids("oldest")[:2] == ["1.0.0", "1.0.1"]
    lengths = {row.id: row.completion_tokens for row in page(run, SampleQuery(), after=None, limit=99).rows}
    assert [lengths[id] for id in ids("longest")] == sorted(lengths.values(), reverse=True)
    found = facets(run)
    assert found.counted == 8 and found.steps == [2, 1]
    assert [(each.value, each.count) for each in found.tags["skill"]] == [("add", 4), ("sub", 4)]
    assert ids(tag=("skill", "sub")) == ["2.1.0", "2.1.1", "1.1.0", "1.1.1"]
    with pytest.raises(RolloutNotFoundError):
        prompt_id(run, "9.9.9")


def test_sorting_more_than_a_page_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFiles(make_run(tmp_path / "r", rollouts={step: [group_of(scored("a", 1.0))] for step in (1, 2)}), id="r")
    monkeypatch.setattr(run_rollouts, "READ_BYTES", 10)
    with raises(RequestError, field="sort"):
        sorted_page(run, SampleQuery(), "best", after=None, limit=9)
    assert len(sorted_page(run, SampleQuery(step=1), "best", after=None, limit=9).rows) == 1


# ---- tokens ----
def test_tokens_that_share_a_character_are_one_piece(tmp_path: Path) -> None:
    best = shown(run_of(tmp_path / "r", scored("好é🎉", 1.0), scored("b", 0.0)))
    assert best.tokens == ["好", "é", "🎉", "<|im_end|>"] and best.logprobs is not None
    assert best.completion_tokens > 4 and sum(filter(None, best.logprobs)) == pytest.approx(
        -0.5 * best.completion_tokens
    )


@pytest.mark.parametrize("model", ["/nowhere/model", "nobody/nothing", "../x y"])
def test_without_the_runs_tokenizer_a_completion_is_one_piece(tmp_path: Path, model: str) -> None:
    best = shown(run_of(tmp_path / "r", scored("It is 4.", 1.0), model=model))
    assert best.tokens == ["It is 4."] and best.logprobs == [pytest.approx(-0.5)]


def test_another_models_tokenizer_is_not_believed(tmp_path: Path) -> None:
    other = Completion(
        token_ids=(5, 999_999), logprobs=(-1.0, -1.0), text="It is 4.", finish_reason=FinishReason.LENGTH
    )
    best = shown(run_of(tmp_path / "r", Rollout(turns=(Turn((1,), other),), reward=1.0)))
    assert best.tokens == ["It is 4."] and best.finish_reason == "length"


def test_the_gap_to_the_trainer_is_there_where_it_was_recorded(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", scored("It is 4.", 1.0))
    assert shown(run).gaps is None
    path = run.directory / "rollouts" / "step_000001.jsonl"
    raw = json.loads(path.read_text())
    said = raw["rollouts"][0]["turns"][0]
    said["trainer_logprobs"] = [value + 0.05 for value in said["logprobs"]]
    path.write_text(json.dumps(raw) + "\n")
    best = shown(run)
    assert best.gaps == [pytest.approx(0.05)] * len(best.tokens)


# ---- episodes ----
def test_an_episode_is_a_transcript(tmp_path: Path) -> None:
    """Who said which tokens; each turn's reward; where a segment begins; what was not trained."""
    first = replace(turn("call"), reward=0.25)
    second = replace(turn("It is 4."), reward=-1.0)  # which does not go on from the first
    third = after(second, text="Yes.", trained=False)
    messages: list[Message] = [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "name": "look", "content": "7 <b>"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    best = shown(run_of(tmp_path / "r", episode(first, second, third, messages=messages, stop="max_turns", reward=1.0)))
    assert [(part.role, part.reward, part.begins_segment, part.trained) for part in best.parts] == [
        ("assistant", 0.25, False, True),
        ("tool look", None, False, False),
        ("assistant", -1.0, True, True),
        ("user", None, False, False),
        ("assistant", None, False, False),
    ]
    texts, place = [], 0
    for part in best.parts:
        texts.append("".join(best.tokens[place : place + part.tokens]))
        place += part.tokens
    assert texts == ["call<|im_end|>", "7 <b>", "It is 4.<|im_end|>", "Sure?", "Yes.<|im_end|>"]
    assert place == len(best.tokens) and best.ended == "stopped by max_turns after 3 turns"


def test_what_has_no_messages_for_its_turns_is_shown_by_its_tokens(tmp_path: Path) -> None:
    """An agent of several conversations keeps the messages of the last one alone."""
    first = turn("One.")
    turns = first, after(first, *TOKENIZER.encode("What else?").ids, text="Two."), turn("Three.", prompt=[END])
    last: list[Message] = [{"role": "assistant", "content": "Three."}]
    best = shown(run_of(tmp_path / "r", episode(*turns, messages=last, reward=1.0)))
    assert [part.role for part in best.parts] == ["assistant", "told", "assistant", "assistant"]
    assert best.tokens[best.parts[0].tokens] == "What else?" and best.parts[3].begins_segment


def test_what_is_no_episode_has_no_parts(tmp_path: Path) -> None:
    best = shown(run_of(tmp_path / "r", scored("4", 1.0)))
    assert best.parts == [] and best.ended is None


def test_an_episode_without_turns_says_why(tmp_path: Path) -> None:
    failed = episode(stop="error", error="Env.reset raised KeyError: 'city'")
    prompt = Prompt(id="p:1", columns={"case": 2})  # it failed before there was one
    run = RunFiles(make_run(tmp_path / "r", rollouts={1: [RolloutGroup(prompt=prompt, rollouts=(failed,))]}), id="r")
    best = shown(run)
    assert best.prompt == "" and page(run, SampleQuery(), after=None, limit=9).rows[0].id == best.id
    assert (best.parts, best.tokens, best.ended) == ([], [], "failed after 0 turns")
    assert best.error == "Env.reset raised KeyError: 'city'"


def test_a_long_episode_is_cut_in_the_middle(tmp_path: Path) -> None:
    turns = [turn("turn 0 " + "and so on " * 40)]
    for number in range(1, 40):
        turns.append(after(turns[-1], text=f"turn {number} " + "and so on " * 40))
    messages: list[Message] = []
    for _ in turns:
        messages += [{"role": "assistant", "content": "..."}, {"role": "user", "content": "x" * 100_000}]
    best = shown(run_of(tmp_path / "r", episode(*turns, messages=messages, reward=1.0)), tokens=500)
    assert sum("tokens are left out here" in text for text in best.tokens) == 1 and len(best.tokens) <= 501
    assert best.tokens[0] == "tu" and len(best.tokens[-1]) == 600 and sum(map(len, best.tokens)) < 5000
    assert sum(part.tokens for part in best.parts) == len(best.tokens)


def test_damage_is_told_and_costs_the_line_that_it_is_in(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", scored("4", 1.0))
    path = run.directory / "rollouts" / "step_000001.jsonl"
    path.write_text('{torn\n[1]\n{"rollouts": [{"turns": []}]}\n' + path.read_text())
    damage: list[str] = []
    assert [each.group for each in groups_of(run, 1, left_out=damage.append)] == ["1.3"] and steps_of(run) == [1]
    assert [line.split(", ")[1].split(":")[0] for line in damage] == [f"line {n} is left out" for n in (1, 2, 3)]
    assert group(run, "1.3.0").columns == {}


# ---- held-out prompts ----
def evaluated(directory: Path, before: list[float | None], later: list[float | None], **config: Any) -> RunFiles:
    """A run whose evaluations at steps 0 and 3 gave these rewards, prompt by prompt."""
    run = make_run(directory, **config)
    for step, rewards in ((0, before), (3, later)):
        groups = tuple(
            replace(
                group_of(scored(f"{step}: {reward}", reward)),
                prompt=Prompt(id=f"p:{i}", text=f"q{i}", token_ids=tuple(ASKED), columns={"answer": i}),
            )
            for i, reward in enumerate(rewards)
        )
        save_evaluations(run, step, {"greedy": Evaluation(mode="greedy", version=PolicyVersion.base(), groups=groups)})
    return RunFiles(run, id="r")


def test_held_out_prompts_before_and_after(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "r", [0.0, 0.2, 0.3, 1.0, 0.5, None, 0.0], [1.0, 1.0, 0.5, 0.0, 0.5, 1.0, 0.1])
    change = change_of(run)
    assert (change.mode, change.first, change.last, change.prompts) == ("greedy", 0, 3, 7)
    assert (change.better, change.worse) == (4, 1)  # what could not be scored is neither
    pairs = [(pair.columns["answer"], pair.before.reward, pair.after.reward) for pair in change.changed]
    assert pairs == [("0", 0.0, 1.0), ("1", 0.2, 1.0), ("2", 0.3, 0.5), ("3", 1.0, 0.0)]  # 6 is one too many
    assert change.changed[0].before.text == "0: 0.0" and change.changed[0].after.text == "3: 1.0"
    (paired,) = [each for each in change.paired if each.measure == "greedy/reward"]
    differences = [1.0, 0.8, 0.2, -1.0, 0.0, 0.1]  # of prompts that were scored on both sides
    assert paired.prompts == 6 and paired.difference == pytest.approx(statistics.fmean(differences))
    assert paired.error == pytest.approx(statistics.stdev(differences) / math.sqrt(6)) and 0 < paired.p <= 1


def test_runs_are_compared_with_the_first_prompt_by_prompt(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "a", [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0])
    other = replace_id(evaluated(tmp_path / "b", [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]), "b")
    strange = replace_id(evaluated(tmp_path / "c", [0.0], [1.0]), "c")  # of other prompts
    (beside,) = against([first, other, strange])
    assert (beside.run, beside.against) == ("b", "r")
    (paired,) = [each for each in beside.changes if each.measure == "greedy/reward"]
    assert (paired.prompts, paired.difference, paired.p) == (4, 0.5, 0.5)
    assert paired.error == pytest.approx(math.sqrt(1 / 3) / 2)


def replace_id(run: RunFiles, id: str) -> RunFiles:
    return RunFiles(run.directory, id=id)


def test_the_best_version_is_what_came_of_a_run_that_keeps_it(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "r", [0.0], [0.0], eval={"data": {"source": "q.jsonl"}, "best": "greedy"})
    for step, value in ((0, 0.1), (2, 0.9), (3, 0.5)):
        write_line(run.directory, step, {"eval/greedy/reward": value})
    assert run.kept_step() == 2 and change_of(run).last == 3  # of step 2 there are no completions
    first = run.directory / "evaluations" / "step_000000.greedy.jsonl"
    first.with_name("step_000002.greedy.jsonl").write_text(first.read_text())
    assert change_of(run).last == 2


@pytest.mark.parametrize("damage", ["{torn", '{"prompt": {"id": "p:0"}, "rollouts": [{}]}', "[]", ""])
def test_evaluations_that_do_not_fit_together_are_left_out(tmp_path: Path, damage: str) -> None:
    run = evaluated(tmp_path / "r", [0.0, 1.0], [1.0, 1.0])
    (run.directory / "evaluations" / "step_000003.greedy.jsonl").write_text(damage + "\n")
    assert change_of(run).mode is None and change_of(run).changed == []


def test_evaluations_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "r", [0.0], [1.0])
    path = run.directory / "evaluations" / "step_000003.greedy.jsonl"
    path.write_text(path.read_text().replace("p:0", "p:other"))
    assert change_of(run).mode is None
    path.unlink()
    assert change_of(run).mode is None  # there is one evaluation only
