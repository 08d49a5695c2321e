"""The report of a run: everything is there, nothing in it acts, and no state of a run keeps it from being written."""

from __future__ import annotations

import base64
import doctest
import hashlib
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cli_project import cli
from groupwise.cli.report import charts as svg
from groupwise.cli.report.build import report
from groupwise.cli.report.charts import charts_of, constants, write_pngs
from groupwise.cli.report.facts import config_differences, headlines
from groupwise.cli.report.page import render
from groupwise.cli.report.samples import MAX_TOKENS, choose_steps, read_change, read_samples
from groupwise.config.run import STARTER_DIR, dump_resolved, parse_config
from groupwise.errors import ConfigError, DataError, StorageError
from groupwise.run.evaluate import Evaluation, save_evaluations
from groupwise.run.record import read_run, read_runs
from groupwise.server import rollout_view as text
from groupwise.store.tracking import Tracking
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn

TOKENIZER = Tokenizer.from_file(str(STARTER_DIR / "tokenizer.json"))
END = TOKENIZER.token_to_id("<|im_end|>")
VOID = {"meta", "input", "link", "br", "img", "hr"}
LIMIT = 2_000_000  # bytes of a page


# ---- runs to report on ----


def config(**changes):
    train = {"steps": 4, "learning_rate": changes.pop("learning_rate", 1e-3), "warmup_steps": 0}
    return parse_config(
        {
            "name": "toy",
            "model": "starter",
            "data": {"source": "p.jsonl"},
            "rewards": ["rewards:exact", "rewards:brief"],
        }
        | {"train": train, "rollout": {"prompts_per_step": 2, "group_size": 2}}
        | changes
    )


def rollout(answer: str, reward: float | None, *, logprob: float = -0.1, rewards=None, error=None) -> Rollout:
    ids = (*TOKENIZER.encode(answer).ids, END)
    completion = Completion(
        token_ids=ids,
        logprobs=tuple(logprob * (index + 1) for index in range(len(ids))),
        text=answer,
        finish_reason=FinishReason.STOP,
        version=PolicyVersion("toy", 3),
    )
    advantage = None if reward is None else reward - 0.5
    return Rollout(
        turns=(Turn((1, 2), completion),),
        rewards={"exact": reward} if rewards is None else rewards,
        reward=reward,
        advantage=advantage,
        error=error,
    )


def group(*rollouts: Rollout, question: str = "2+2?", columns=None) -> RolloutGroup:
    prompt = Prompt(
        id="p:1",
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": question}),
        columns={"answer": "4"} if columns is None else columns,
        token_ids=(1, 2),
    )
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


GROUPS = (group(rollout("It is 4.", 1.0), rollout("It is 5.", 0.0)),)


def step_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.2 + 0.1 * step,
        "reward/std": 0.3,
        "reward/exact/mean": 0.1 * step,
        "reward/brief/mean": 0.5 - 0.01 * step,
        "reward/frac_zero_std": 0.25 / step,
        "rollout/count": 4.0,
        "rollout/tokens": 40.0 + step,
        "rollout/len_mean": 10.0 + step,
        "rollout/truncated_frac": 0.0,
        "loss/policy": 0.01 * step,
        "loss/kl": 0.001 * step,
        "optim/grad_norm": 1.0 / step,
        "optim/lr": 1e-3,
        "time/step_s": 2.0,
        "perf/tok_s": 20.0 + step,
    }


def write_run(
    directory: Path, *, steps=4, evaluated=(0, 4), groups=GROUPS, recorded=None, settings=None, metrics=step_metrics
) -> Path:
    """A run's directory; `groups` are the rollouts of every step, or of those in `recorded`."""
    with Tracking(directory) as tracking:
        for step in range(steps + 1):
            if step:
                tracking.log(step, metrics(step))
                if groups and (recorded is None or step in recorded):
                    tracking.rollouts(step, groups)
            if step in evaluated:
                held_out = {"eval/greedy/reward": 0.5 + 0.1 * step, "eval/greedy/add/reward": 0.6 + 0.1 * step}
                tracking.log(step, held_out)
    (directory / "config.yaml").write_text(dump_resolved(settings or config()), encoding="utf-8")
    return directory


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "toy-1")


# ---- a page to look at ----


class Page(HTMLParser):
    """The page's elements, checked for balance while they are read."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.source, self.open = source, []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # (innermost element, text)
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def tags(self) -> Counter[str]:
        return Counter(tag for tag, _ in self.elements)

    @property
    def text(self) -> str:
        return "".join(data for tag, data in self.texts if tag != "style")

    @property
    def words(self) -> str:
        """The text with one space wherever there is any space or an element begins or ends."""
        return " ".join(" ".join(data for tag, data in self.texts if tag != "style").split())

    @property
    def titles(self) -> list[str]:
        """The headings of the charts."""
        return [data for tag, data in self.texts if tag == "h3"]

    @property
    def labels(self) -> list[str]:
        """What a screen reader says of each chart."""
        return [str(svg["aria-label"]) for svg in self.all("svg") if svg.get("role") == "img"]


def page_of(*directories: Path, steps=()) -> Page:
    return Page(render(read_runs(directories), steps=steps))


def check_inert(page: Page) -> None:
    """Nothing runs, nothing loads, and the policy says so."""
    assert not {"script", "iframe", "object", "embed", "link", "img", "base", "form", "a:href"} & set(page.tags())
    for tag, attributes in page.elements:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset", "action")
        ]
        for name in ("href", "xlink:href"):
            assert str(attributes.get(name, "#")).startswith("#"), (tag, attributes)
    [style] = [data for tag, data in page.texts if tag == "style"]
    assert not re.search(r"url\(|@import|expression|https?:", style)
    [policy] = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = page.source[: page.source.index("<style>")]
    assert head.index("Content-Security-Policy") < head.index("<title>")  # it holds for what follows it


# ---- what is on it ----


def test_the_page_says_what_the_run_was_and_what_came_of_it(run):
    page = page_of(run)
    words = page.words
    for expected in (
        "toy",
        "Held-out reward, greedy 0.500 → 0.900 +0.400",
        "Steps 4",
        "16 completions, 170 tokens",
        "2 prompts × 2 = 4 completions",
        "grpo, advantage group_std",
        "exact, brief",
        "LoRA, rank 16, alpha 32.0",
        "0.001, constant",
    ):
        assert expected in words, expected
    for title in ("Reward", "Each reward", "KL from the reference", "Groups without signal", "Gradient norm"):
        assert title in page.titles
    assert not {"Entropy", "Staleness", "Clipped tokens", "Sampler and trainer apart"} & set(page.titles)  # no data
    assert "rollout/truncated_frac 0," in words and "optim/lr 0.001" in words  # in words: they never change


def test_a_chart_is_described_for_those_who_do_not_see_it(run):
    labels = page_of(run).labels
    [reward] = [label for label in labels if label.startswith("Reward over")]
    assert "training: 0.3 at step 1, 0.6 at step 4, between 0.3 and 0.6" in reward
    assert "held-out, greedy: 0.5 at step 0, 0.9 at step 4" in reward


def test_the_evaluation_is_a_table_by_mode_and_column(run):
    words = page_of(run).words
    assert "greedy 0.500 step 0 0.900 step 4 +0.400 0.900 step 4" in words
    assert "greedy, add 0.600 step 0 1.000 step 4 +0.400 1.000 step 4" in words


def test_the_evaluation_has_its_error_and_its_pass_rate(tmp_path):
    directory = write_run(tmp_path / "r", evaluated=())
    with Tracking(directory) as tracking:
        for step, value in ((0, 0.25), (4, 0.75)):
            prefix = "eval/sampled"
            tracking.log(
                step, {f"{prefix}/reward": value, f"{prefix}/reward_stderr": 0.05, f"{prefix}/pass@8": value + 0.1}
            )
    page = page_of(directory)
    assert "sampled 0.250 step 0 0.750 ± 0.050 step 4" in page.words and "reward_stderr step" not in page.words
    assert "Held-out pass@8, sampled 0.350 → 0.850 +0.500" in page.words
    assert any(label.startswith("Solved in k tries") and "sampled, pass@8: 0.35" in label for label in page.labels)


def test_findings_come_with_what_to_do_and_the_standing_ones_first(tmp_path):
    def metrics(step):
        return step_metrics(step) | {"optim/grad_norm": 1e4 if step < 8 else 1.0, "reward/frac_zero_std": 1.0}

    directory = write_run(tmp_path / "r", steps=40, evaluated=(), groups=(), metrics=metrics)
    health = read_run(directory).health
    assert health.standing and len(health.findings) > len(health.standing)  # something is over
    page = page_of(directory)
    cards = [str(each["class"]).split()[-1] for each in page.all("div") if "finding" in str(each.get("class"))]
    assert cards == sorted(cards, key=["error", "warn", "over"].index) and "over" in cards
    for finding in health.standing:
        assert finding.says in page.words and finding.cause in page.words
        assert all(override in page.words for advice in finding.advice for override in advice.overrides)
    assert "No rule of" not in page.words


def test_the_page_is_accessible_and_inert(run):
    page = page_of(run)
    check_inert(page)
    tags = page.tags()
    assert tags["h1"] == tags["main"] == tags["nav"] == tags["header"] == tags["footer"] == 1
    ids = [str(attributes["id"]) for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(str(a["href"])[1:] in ids for a in page.all("a"))
    for _, attributes in page.elements:
        assert str(attributes.get("aria-labelledby", ids[0])) in ids
    assert all(th.get("scope") in ("row", "col") for th in page.all("th"))
    assert tags["label"] == tags["input"] == 3  # every radio button is inside its label
    assert page.all("html") == [{"lang": "en"}] and page.source.startswith("<!doctype html>")


def test_numbers_in_the_text_are_written_as_their_examples_say():
    assert doctest.testmod(text).failed == doctest.testmod(svg).failed == 0
    assert doctest.testmod(text).attempted


# ---- what was written ----


def test_best_and_worst_stand_side_by_side_with_their_tokens(run):
    [step], notes = read_samples(read_run(run), [2])
    assert notes == [] and (step.step, step.sampled) == (2, 1)
    [shown] = step.groups
    assert shown.worst is not None
    assert (shown.best.reward, shown.worst.reward, shown.rewards) == (1.0, 0.0, (1.0, 0.0))
    assert shown.best.by_token and shown.best.text == "It is 4.<|im_end|>"
    assert [piece.kind for piece in shown.best.pieces][-2:] == ["sampled", "end"]
    assert [piece.logprob for piece in shown.best.pieces] == pytest.approx(
        [-0.1 * (i + 1) for i in range(len(shown.best.pieces))]
    )
    assert (shown.best.version, shown.best.finish_reason) == ("toy@3", "stop")
    words = page_of(run).words
    assert "Best reward 1" in words and "Worst reward 0" in words and "answer : 4" in words and "toy@3" in words


def test_the_groups_that_differ_most_are_shown_first(tmp_path):
    flat = group(rollout("x", 0.3), rollout("y", 0.3), question="flat")
    mild = group(rollout("x", 0.3), rollout("y", 0.4), question="mild")
    sharp = group(rollout("x", 0.0), rollout("y", 1.0), question="sharp")
    unscored = group(rollout("x", None, error="the judge is out"), question="unscored")
    directory = write_run(tmp_path / "r", groups=(flat, mild, unscored, sharp))
    [step], _ = read_samples(read_run(directory), [1], groups=4)
    assert [each.prompt[1][1] for each in step.groups] == ["sharp", "mild", "flat", "unscored"]
    assert step.groups[2].worst is None and step.groups[3].worst is None
    assert step.groups[3].best.error == "the judge is out"
    assert "the judge is out" not in page_of(directory).text  # the three best are shown
    assert [each.prompt[1][1] for each in read_samples(read_run(directory), [1])[0][0].groups][-1] == "flat"


def test_tokens_that_share_a_character_are_one_piece(tmp_path):
    directory = write_run(tmp_path / "r", groups=(group(rollout("好é🎉", 1.0), rollout("b", 0.0)),))
    [shown] = read_samples(read_run(directory), [1])[0][0].groups
    assert [piece.text for piece in shown.best.pieces] == ["好", "é", "🎉", "<|im_end|>"]
    total = sum(piece.logprob or 0.0 for piece in shown.best.pieces)
    assert total == pytest.approx(-0.1 * sum(range(1, shown.best.tokens + 1)))
    assert shown.best.tokens > 4


def test_without_the_runs_tokenizer_a_completion_is_one_piece(tmp_path):
    for name, model in (("gone", "/nowhere/model"), ("uncached", "nobody/nothing"), ("odd", "../x y")):
        directory = write_run(tmp_path / name, settings=config(model=model))
        [shown] = read_samples(read_run(directory), [1])[0][0].groups
        assert not shown.best.by_token and [piece.text for piece in shown.best.pieces] == ["It is 4."]
        assert shown.best.pieces[0].logprob == pytest.approx(shown.best.mean_logprob)
        assert "coloured as a whole" in page_of(directory).text


def test_another_models_tokenizer_is_not_believed(tmp_path):
    wrong = Rollout(
        turns=(Turn((1,), Completion(token_ids=(5, 999_999), logprobs=(-1.0, -1.0), text="It is 4.",
                                     finish_reason=FinishReason.LENGTH)),), reward=1.0)  # fmt: skip
    directory = write_run(tmp_path / "r", groups=(group(wrong),))
    [shown] = read_samples(read_run(directory), [1])[0][0].groups
    assert not shown.best.by_token and shown.best.text == "It is 4."
    assert "cut at the longest" in page_of(directory).text


def test_what_others_said_between_turns_is_shown_as_given(tmp_path):
    first, result = TOKENIZER.encode("call").ids, TOKENIZER.encode("tool says 7").ids
    answers = [
        Completion(token_ids=tuple(ids), logprobs=(-0.5,) * len(ids), text=words, finish_reason=FinishReason.STOP)
        for ids, words in ((first, "call"), (TOKENIZER.encode("7").ids, "7"))
    ]
    both = Rollout(turns=(Turn((1, 2), answers[0]), Turn((1, 2, *first, *result), answers[1])), reward=1.0)
    directory = write_run(tmp_path / "r", groups=(group(both),))
    [shown] = read_samples(read_run(directory), [1])[0][0].groups
    assert shown.best.text == "calltool says 77"
    assert [piece.text for piece in shown.best.pieces if piece.kind == "given"] == ["tool says 7"]
    assert shown.best.tokens == len(first) + 1


def spoken(prompt: tuple[int, ...], text: str, **options) -> Turn:
    ids = (*TOKENIZER.encode(text).ids, END)
    completion = Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), text=text, finish_reason=FinishReason.STOP)
    return Turn(prompt, completion, **options)


def shown_of(directory: Path, *rollouts: Rollout):
    """The best one's completion as the report shows it, and the page."""
    directory = write_run(directory, groups=(group(*rollouts),))
    [step], notes = read_samples(read_run(directory), [1])
    assert notes == []
    page = page_of(directory)
    check_inert(page)
    return step.groups[0].best, page


def episode(*turns: Turn, messages=(), stop="done", **options) -> Rollout:
    return Rollout(turns=turns, messages=tuple(messages), stop=stop, **options)


def test_an_episode_is_a_transcript(tmp_path):
    """Who said what; each turn's reward; a fork; what was not trained is not coloured."""
    first, second = spoken((1, 2), "call", reward=0.25), spoken((1, 2), "It is 4.", reward=-1.0)
    third = spoken(second.prompt_ids + second.completion.token_ids, "Yes.", trained=False)
    messages = [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "name": "look", "content": "7 <b>"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    best, page = shown_of(
        tmp_path / "r", episode(first, second, third, messages=messages, stop="max_turns", reward=1.0)
    )
    assert [(block.role, block.reward, block.fork) for block in best.blocks] == [
        ("assistant", 0.25, False),
        ("tool look", None, False),
        ("assistant", -1.0, True),
        ("user", None, False),
        ("assistant", None, False),
    ]
    assert [{piece.kind for piece in block.pieces} for block in best.blocks] == [
        {"sampled", "end"},
        {"given"},
        {"sampled", "end"},
        {"given"},
        {"seen"},
    ]
    assert (best.turns, best.ended, best.tokens) == (3, "stopped by max_turns after 3 turns", best.tokens)
    for words in ("tool look", "7 <b>", "reward 0.25", "begins a segment of its own", "stopped by max_turns after 3"):
        assert words in page.words, words
    assert 'class="seen"' in page.source and 'class="given">7 &lt;b&gt;' in page.source


def test_what_has_no_messages_for_its_turns_is_shown_by_its_tokens(tmp_path):
    """An agent of several conversations keeps the messages of the last one alone."""
    told = tuple(TOKENIZER.encode("What else?").ids)
    first = spoken((1, 2), "One.")
    turns = first, spoken((1, 2, *first.completion.token_ids, *told), "Two."), spoken((5,), "Three.")
    best, _ = shown_of(
        tmp_path / "r", episode(*turns, messages=[{"role": "assistant", "content": "Three."}], reward=1.0)
    )
    assert [(block.role, block.fork) for block in best.blocks] == [
        ("assistant", False),
        ("told", False),
        ("assistant", False),
        ("assistant", True),
    ]
    assert best.blocks[1].pieces[0].text == "What else?"


def test_an_episode_without_turns_says_why(tmp_path):
    failed = episode(stop="error", error="Env.reset raised KeyError: 'city'")
    best, page = shown_of(tmp_path / "r", failed, failed)
    assert (best.blocks, best.tokens, best.ended) == ((), 0, "failed after 0 turns")
    assert "not scored" in page.words and "Env.reset raised KeyError: 'city'" in page.words


def test_a_long_episode_is_cut_in_the_middle(tmp_path):
    turns, messages, seen = [], [], (1, 2)
    for number in range(40):
        turns.append(spoken(seen, f"turn {number} " + "and so on " * 40))
        seen = turns[-1].prompt_ids + turns[-1].completion.token_ids
        messages += [{"role": "assistant", "content": "..."}, {"role": "user", "content": "x" * 100_000}]
    directory = write_run(tmp_path / "r", groups=(group(episode(*turns, messages=messages, reward=1.0)),))
    [step], _ = read_samples(read_run(directory), [1], tokens=3000)
    pieces = step.groups[0].best.pieces
    assert sum(piece.kind == "cut" for piece in pieces) == 1 and len(pieces) <= 501
    assert pieces[0].text == "tu" and pieces[-1].text.endswith("…") and len(pieces[-1].text) == 600
    assert sum(len(piece.text) for piece in pieces) < 5000
    assert len(page_of(directory).source) < LIMIT


def test_the_tools_of_an_episode_stand_before_its_messages(tmp_path):
    tool = {"type": "function", "function": {"name": "look"}}
    prompt = Prompt(id="p", messages=({"role": "user", "content": "Hm?"},), tools=(tool, tool), token_ids=(1, 2))
    groups = (RolloutGroup(prompt=prompt, rollouts=(episode(spoken((1, 2), "a"), reward=1.0),)),)
    [step], _ = read_samples(read_run(write_run(tmp_path / "r", groups=groups)), [1])
    assert step.groups[0].prompt == (("tools", "look, look"), ("user", "Hm?"))


def test_the_gap_to_the_trainer_is_offered_where_it_was_recorded(run):
    assert not re.search(r'id="by-gap"|class="[^"]*g\d', page_of(run).source)
    path = run / "rollouts" / "step_000004.jsonl"
    raw = json.loads(path.read_text())
    turn = raw["rollouts"][0]["turns"][0]
    turn["trainer_logprobs"] = [value + 0.05 for value in turn["logprobs"]]
    path.write_text(json.dumps(raw) + "\n")
    page = page_of(run)
    assert 'id="by-gap"' in page.source and page.tags()["input"] == 4
    gaps = [
        str(span["title"]) for span in page.all("span") if "g3" in str(span.get("class")).split() and "title" in span
    ]
    assert len(gaps) == len(turn["logprobs"]) and all("gap +5.0e-02" in gap for gap in gaps)


def test_colours_follow_probability_and_advantage(run):
    spans = [span for span in page_of(run).all("span") if "%" in str(span.get("title"))]
    probabilities = {str(s["title"]): str(s["class"]).split()[0] for s in spans}
    assert probabilities["90.5%"] == "l0" and probabilities["81.9%"] == "l1"  # exp(-0.1), exp(-0.2)
    source = page_of(run).source
    assert source.count('class="completion up2"') == source.count('class="completion down2"') == 3  # ±0.5, three steps


@pytest.mark.parametrize(
    ("available", "wanted", "chosen"),
    [
        ([], (), []),
        ([7], (), [7]),
        ([1, 2], (), [1, 2]),
        (range(1, 112), (), [1, 56, 111]),
        ([1, 2, 3], (3, 1, 3), [1, 3]),
    ],
)
def test_the_first_the_middle_and_the_last_step_are_shown(available, wanted, chosen):
    assert choose_steps(list(available), wanted) == chosen


def evaluated_run(directory: Path, before, after, *, mode="greedy", settings=None) -> Path:
    """A run whose evaluations at steps 0 and 4 gave these rewards, prompt by prompt."""
    run_dir = write_run(directory, settings=settings)
    for step, rewards in ((0, before), (4, after)):
        groups = tuple(
            replace(
                group(rollout(f"{step}: {reward}", reward), question=f"q{i}"), prompt=Prompt(id=f"p:{i}", text=f"q{i}")
            )
            for i, reward in enumerate(rewards)
        )
        save_evaluations(run_dir, step, {mode: Evaluation(mode=mode, version=PolicyVersion.base(), groups=groups)})
    return run_dir


def test_held_out_prompts_are_shown_before_and_after(tmp_path):
    directory = evaluated_run(tmp_path / "r", [0.0, 0.2, 0.3, 1.0, 0.5, None, 0.0], [1.0, 1.0, 0.5, 0.0, 0.5, 1.0, 0.1])
    change = read_change(read_run(directory))
    assert change is not None
    assert (change.mode, change.first, change.last, change.prompts) == ("greedy", 0, 4, 7)
    assert (change.better, change.worse) == (4, 1)  # what could not be scored is neither
    assert [pair.prompt for pair in change.pairs] == [(("prompt", f"q{i}"),) for i in (0, 1, 2, 3)]  # 6 is one too many
    assert [(p.before.reward, p.after.reward) for p in change.pairs] == [(0.0, 1.0), (0.2, 1.0), (0.3, 0.5), (1.0, 0.0)]
    page = page_of(directory)
    check_inert(page)
    assert "of 7 prompts 4 got better, 1 worse" in page.words
    assert sum("better" in str(each.get("class")) for each in page.all("div")) == 3
    assert page.text.index("Before") < page.text.index("0: 0.0") < page.text.index("4: 1.0")


def test_the_best_version_is_what_came_of_a_run_that_keeps_it(tmp_path):
    settings = config(eval={"data": {"source": "q.jsonl"}, "best": "greedy"})
    directory = evaluated_run(tmp_path / "r", [0.0], [0.0], settings=settings)
    with Tracking(directory) as tracking:
        tracking.log(2, {"eval/greedy/reward": 0.95})
    [headline] = headlines(read_run(directory))
    assert (headline.before, headline.after, headline.step) == (0.5, 0.95, 2)
    assert "the best version, of step 2" in page_of(directory).words


@pytest.mark.parametrize("damage", ["{torn", '{"prompt": {"id": "p:0"}, "rollouts": [{}]}', "[]", ""])
def test_evaluations_that_do_not_fit_together_are_left_out(tmp_path, damage):
    directory = evaluated_run(tmp_path / "r", [0.0, 1.0], [1.0, 1.0])
    (directory / "evaluations" / "step_000004.greedy.jsonl").write_text(damage + "\n")
    assert read_change(read_run(directory)) is None
    assert "before and after" not in page_of(directory).words


def test_evaluations_of_other_prompts_are_not_compared(tmp_path):
    directory = evaluated_run(tmp_path / "r", [0.0], [1.0])
    path = directory / "evaluations" / "step_000004.greedy.jsonl"
    path.write_text(path.read_text().replace("p:0", "p:other"))
    assert read_change(read_run(directory)) is None
    path.unlink()
    assert read_change(read_run(directory)) is None  # there is one evaluation only


# ---- nothing that was written acts ----

HOSTILE = (
    "</script><script>alert(1)</script>",
    "</style></title></pre></div></details><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}{# x #}",
    "<!-- --> ]]> <![CDATA[",
    "&lt;b&gt; &#60;script&#62;",
    "http://example.org/?q=1",
)


def hostile_run(directory: Path, evil: str) -> Path:
    name = evil.replace("/", "∕")  # a slash would make it several parts of a metric's name
    messages = group(rollout(evil, 1.0, rewards={evil: 1.0}), rollout(f"{evil}!", 0.0, error=evil), question=evil)
    directory = write_run(
        directory,
        groups=(RolloutGroup(prompt=Prompt(**{**vars(messages.prompt), "columns": {evil: evil, "n": [evil]}}),
                             rollouts=messages.rollouts),),
        metrics=lambda step: step_metrics(step) | {f"reward/{name}/mean": step, f"mine/{name}": step, name: 2.0},
    )  # fmt: skip
    (directory / "config.yaml").write_text(
        json.dumps({"name": evil, "model": "starter", "seed": evil}), encoding="utf-8"
    )
    return directory


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_text_stays_text(tmp_path, evil):
    page = page_of(hostile_run(tmp_path / "r", evil))
    check_inert(page)
    harmless = page_of(hostile_run(tmp_path / "harmless", "abc"))
    counted, expected = page.tags(), harmless.tags()
    for tag in ("span",):  # one a token
        del counted[tag], expected[tag]
    assert counted == expected
    assert {name for _, each in page.elements for name in each} == {n for _, each in harmless.elements for n in each}
    assert page.text.count(evil) >= 6  # title, heading, prompt, column and value, reward, configuration ...


@pytest.mark.parametrize(
    ("evil", "seen"),
    [
        ("a\x00b\x1b[31mc\x9bd", "a␀b␛[31mc�d"),
        ("user\u202egnp.exe", "user�gnp.exe"),
        ("\u2066x\u2069\u200fy\u061cz\u200e", "�x��y�z�"),
        ("zero\u200bwidth\ufeff", "zero�width�"),
        ("lone \ud800 surrogate", "lone � surrogate"),
    ],
)
def test_what_hides_or_reorders_text_is_made_visible(tmp_path, evil, seen):
    directory = write_run(tmp_path / "r")
    raw = json.loads((directory / "rollouts" / "step_000004.jsonl").read_text())
    raw["prompt"]["messages"][1]["content"] = evil
    raw["rollouts"][0]["error"] = evil
    raw["rollouts"][1]["turns"][0]["text"] = evil  # which the token ids do not give, so it is shown whole
    (directory / "rollouts" / "step_000004.jsonl").write_text(json.dumps(raw) + "\n")
    page = page_of(directory)
    assert page.text.count(seen) == 3
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069]", page.source)
    written = report(directory).page.read_bytes()
    assert written.decode("utf-8")


def test_right_to_left_text_is_isolated(tmp_path):
    directory = write_run(tmp_path / "r", groups=(group(rollout("שלום", 1.0), question="مرحبا"),))
    page = page_of(directory)
    said = [each for each in page.all("div") if each.get("class") in ("said", "text")]
    assert said and all(each["dir"] == "auto" for each in said)


# ---- whatever state the run is in ----


def test_a_run_that_is_being_written(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')
    (run / "rollouts" / "step_000005.tmp").write_text('{"prompt"')
    (run / "config.yaml").write_text(dump_resolved(config(train={"steps": 9})))
    words = page_of(run).words
    assert "4 of 9: stopped early, or still running" in words and "Step 4" in words


def test_a_run_without_evaluation_or_rollouts(tmp_path):
    page = page_of(write_run(tmp_path / "r", evaluated=(), groups=()))
    words = page.words
    assert "Training reward, steps 1 and 4 0.300 → 0.600 +0.300" in words
    assert not {"#written", "#held-out"} & {str(a["href"]) for a in page.all("a")}
    assert page.tags()["fieldset"] == 0 and "Held-out reward by column" not in page.titles


def test_a_run_of_one_step_is_drawn_as_dots(tmp_path):
    page = page_of(write_run(tmp_path / "r", steps=1, evaluated=()))
    check_inert(page)
    assert "Reward" in page.titles and "Learning rate" in page.titles
    assert len(page.all("circle")) >= len(page.titles)
    assert all(math.isfinite(float(str(dot["cy"]))) for dot in page.all("circle"))


def test_only_the_evaluation_before_the_first_step(tmp_path):
    page = page_of(write_run(tmp_path / "r", steps=0, evaluated=(0,)))
    assert "0.500" in page.text and page.titles[0] == "Reward"


def test_a_run_that_has_recorded_nothing_yet(tmp_path):
    page = page_of(write_run(tmp_path / "r", steps=0, evaluated=()))
    check_inert(page)
    assert "No step has been recorded yet." in page.text and page.titles == []


def test_values_that_are_not_finite_are_gaps_with_a_mark(tmp_path):
    def metrics(step):
        return step_metrics(step) | {"loss/policy": math.nan if step == 3 else 1.0 * step, "loss/kl": math.inf}

    directory = write_run(tmp_path / "r", steps=5, metrics=metrics)
    [loss] = [chart for chart in charts_of([read_run(directory)]) if chart.key == "loss"]
    drawn = svg.draw(loss)
    [line] = re.findall(r'class="line c0 d0"[^>]* d="([^"]+)"', drawn)
    assert re.sub(r"[\d. -]+", "", line) == "MLML"  # 1 to 2, then 4 to 5
    assert drawn.count("×") == 1 and "not finite" in drawn
    page = page_of(directory)
    check_inert(page)
    assert "KL from the reference" not in page.titles  # never finite: nothing to draw
    assert "NaN" not in page.source and "nan" not in " ".join(page.labels)


def test_a_configuration_that_cannot_be_read_is_left_out_and_said(run):
    (run / "config.yaml").write_text("a: [1,\n")
    words = page_of(run).words
    assert "the configuration is left out: malformed YAML" in words and "Held-out reward" in words
    (run / "config.yaml").unlink()
    page = page_of(run)
    assert "the configuration is left out: cannot read" in page.text and page.tags()["pre"] == 0
    assert [data for tag, data in page.texts if tag == "h1"] == ["toy-1"]


def test_a_configuration_of_another_version_is_shown_as_it_is(run):
    (run / "config.yaml").write_text(
        "name: old\nalgo: grpo\nrewards: exact\ntrain: {lora: 8, steps: many}\nextinct: 1\n"
    )
    assert "extinct: 1" in page_of(run).text


@pytest.mark.parametrize(
    "damage", ['{"prompt": {}, "rollouts": [{}]}', "[1]", "{torn", '{"rollouts": [{"turns": []}]}']
)
def test_rollouts_that_cannot_be_read_are_left_out_and_said(run, damage):
    (run / "rollouts" / "step_000004.jsonl").write_text(damage + "\n")
    words = page_of(run).words
    assert "step_000004.jsonl is left out" in words and "Step 1" in words and "Step 4" not in words


def test_damaged_metrics_are_an_error(run):
    (run / "metrics.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(DataError, match="line 1"):
        read_run(run)


def test_a_directory_that_is_no_run_says_what_is_missing(tmp_path, run):
    with pytest.raises(ConfigError, match=r"is no run: it has no metrics\.jsonl") as raised:
        report(tmp_path)
    assert "toy-1" in str(raised.value.hint)  # the run that is inside it
    with pytest.raises(ConfigError, match="there is no directory"):
        report(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no rollouts of step 9") as raised:
        report(run, steps=[1, 9])
    assert raised.value.hint == "steps with rollouts: 1 to 4"


def test_only_the_steps_that_are_shown_are_read(tmp_path):
    directory = write_run(tmp_path / "r", steps=400)
    for path in (directory / "rollouts").iterdir():
        if path.name not in ("step_000001.jsonl", "step_000201.jsonl", "step_000400.jsonl"):
            path.write_text("this would be an error\n")
    page = page_of(directory)
    assert "left out" not in page.text
    assert [data.strip() for tag, data in page.texts if tag == "summary" and "Step" in data] == [
        "Step 1", "Step 201", "Step 400"]  # fmt: skip


def test_a_page_that_cannot_be_written_leaves_what_was_there(run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written"):
        report(run, out=tmp_path / "file" / "page.html")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(StorageError):
        report(run, out=tmp_path / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "page.html", "toy-1"]


# ---- how large ----


def test_a_long_run_with_long_completions_stays_small(tmp_path):
    long = "word " * 2000
    groups = tuple(
        group(rollout(long + str(i), 1.0), rollout(long, 0.0), question=long, columns={"c": long}) for i in range(4)
    )

    def metrics(step):
        return step_metrics(step) | {f"mine/metric_{i}": math.sin(i * step) for i in range(30)}

    directory = write_run(tmp_path / "r", steps=110, evaluated=range(0, 111, 10), groups=groups, metrics=metrics,
                          recorded=(1, 60, 110))  # fmt: skip
    page = report(directory).page
    assert page.stat().st_size < LIMIT
    [first, *_], _ = read_samples(read_run(directory), [1])
    assert any(piece.kind == "cut" for piece in first.groups[0].best.pieces)
    assert len(first.groups[0].best.pieces) <= MAX_TOKENS // 6 + 1


def test_a_very_long_run_is_drawn_as_means_and_stays_small(tmp_path):
    (tmp_path / "r").mkdir()
    with (tmp_path / "r" / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": s} | step_metrics(s)) + "\n" for s in range(1, 2001))
    run = read_run(tmp_path / "r")
    page = Page(render([run]))
    assert len(page.source) < LIMIT and "a point is the mean of 10 steps" in page.text
    charts = {chart.key: chart for chart in charts_of([run])}
    curve = charts["length"].curves[0]
    assert len(curve.points) <= 201 and max(step for step, _ in curve.points) == 2000
    members = [10.0 + s for s in range(30, 40)]
    assert curve.points[3] == (39, pytest.approx(sum(members) / 10))
    assert curve.band[3] == (39, min(members), max(members))


# ---- curves ----


def test_a_point_is_drawn_where_its_value_is(run):
    [chart] = [chart for chart in charts_of([read_run(run)]) if chart.key == "length"]
    drawn = svg.draw(chart, height=100)
    ticks = {
        float(label): float(y) for y, label in re.findall(r'<line [^>]*y1="([\d.]+)"[^>]*/><text[^>]*>([\d.]+)<', drawn)
    }
    (a, pixel_a), (b, pixel_b) = min(ticks.items()), max(ticks.items())
    [line] = re.findall(r'class="line[^>]* d="([^"]+)"', drawn)
    places = [tuple(map(float, pair.split())) for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", line)]
    for (x, y), step in zip(places, (1, 2, 3, 4), strict=True):
        assert x == pytest.approx(1000 * step / 4)
        assert a + (y - pixel_a) / (pixel_b - pixel_a) * (b - a) == pytest.approx(10 + step, abs=0.1)


def test_the_band_is_one_deviation_and_not_beyond_the_extremes(tmp_path):
    def metrics(step):
        return {"reward/mean": 0.5 + 0.1 * step, "reward/std": 0.3, "reward/min": 0.0, "reward/max": 1.0}

    [chart] = charts_of([read_run(write_run(tmp_path / "r", evaluated=(), metrics=metrics))])
    low, high = [[end for _, *ends in chart.curves[0].band for end in ends[i : i + 1]] for i in (0, 1)]
    assert low == pytest.approx([0.3, 0.4, 0.5, 0.6]) and high == pytest.approx([0.9, 1.0, 1.0, 1.0])


def test_a_metric_that_no_chart_names_is_drawn_under_its_own_name(tmp_path):
    directory = write_run(
        tmp_path / "r", metrics=lambda step: step_metrics(step) | {"mine/speed": step, "mine/same": 3.0}
    )
    page = page_of(directory)
    assert "mine/speed" in page.titles and "mine/same" not in page.titles
    assert ("mine/same", 3.0) in constants(read_run(directory))
    assert "Other metrics" in page.text


def test_rounding_is_no_curve(tmp_path):
    directory = write_run(tmp_path / "r", metrics=lambda step: {"reward/mean": step, "loss/ratio_mean": 1 + 1e-7 * step,
                                                                "loss/policy": 1e-8 * step})  # fmt: skip
    run = read_run(directory)
    assert {chart.key for chart in charts_of([run])} == {"reward", "held_out"}
    assert dict(constants(run)) == {"loss/ratio_mean": pytest.approx(1.0), "loss/policy": 0.0}


def test_a_curve_that_is_zero_or_repeats_another_is_left_out_beside_others(tmp_path):
    def metrics(step):
        lengths = {"rollout/len_mean": step, "rollout/len_terminated_mean": step, "rollout/len_max": 2.0 * step}
        return lengths | {"loss/clip_frac_low": 0.0, "loss/clip_frac_high": 0.01 * step}

    plain = read_run(write_run(tmp_path / "r", evaluated=(), metrics=metrics))
    found = {chart.key: [curve.label for curve in chart.curves] for chart in charts_of([plain])}
    assert found == {"length": ["mean", "longest"], "clip": ["above"]}
    other = write_run(tmp_path / "s", evaluated=(), metrics=lambda step: metrics(step) | {"loss/clip_frac_low": 0.02})
    [clip] = [chart for chart in charts_of([plain, read_run(other)]) if chart.key == "clip"]
    assert [curve.label for curve in clip.curves] == ["below", "above"] * 2  # it is not 0 in both


def test_a_wide_range_of_positive_values_has_a_logarithmic_axis(tmp_path):
    def metrics(step):
        return {"mismatch/logprob_diff_mean": 10.0 ** (-step), "mismatch/logprob_diff_max": 1.0}

    [chart] = charts_of([read_run(write_run(tmp_path / "r", evaluated=(), metrics=metrics))])
    assert chart.log and "0.01" in svg.draw(chart)
    ticks = svg.Scale([1e-4, 1.0], height=100, log=True)
    assert ticks(1e-2) == pytest.approx(50.0)


@pytest.mark.parametrize("values", [[0.0, 0.0], [5.0], [-1e-9, 1e-9], [1e300, -1e300], [3.0, 3.0000001], [0.0, 1e-300]])
def test_any_range_gets_an_axis(values):
    scale = svg.Scale(values, height=100, log=False)
    assert scale.ticks and all(-1 <= scale(value) <= 101 for value in values)


# ---- several runs ----


@pytest.fixture
def two(tmp_path):
    other = config(learning_rate=5e-3, seed=7, algo={"policy_loss": "dapo"})
    return write_run(tmp_path / "toy-1"), write_run(tmp_path / "toy-2", steps=6, settings=other)


def test_several_runs_lie_over_each_other(two):
    page = page_of(*two)
    check_inert(page)
    [reward] = [label for label in page.labels if label.startswith("Reward over steps 0 to 6")]
    assert "toy-1, training" in reward and "toy-2, training" in reward
    charts = charts_of(read_runs(two))
    assert all(len({curve.colour for curve in chart.curves}) == 2 for chart in charts)
    assert not any(curve.band for chart in charts for curve in chart.curves)
    lengths = {run.label: headlines(run)[0].after for run in read_runs(two)}
    assert lengths == {"toy-1": pytest.approx(0.9), "toy-2": pytest.approx(0.9)}


def test_only_what_differs_is_compared(two):
    differences = dict(config_differences(read_runs(two)))
    assert differences == {
        "seed": ("0", "7"),
        "algo.policy_loss": ("grpo", "dapo"),
        "train.learning_rate": ("0.001", "0.005"),
    }
    words = page_of(*two).words
    assert "algo.policy_loss grpo dapo" in words
    (two[1] / "config.yaml").write_text((two[0] / "config.yaml").read_text())
    assert "The configurations are equal." in page_of(*two).text


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [write_run(tmp_path / place / "toy") for place in ("here", "there")]
    assert [run.label for run in read_runs(runs)] == ["here/toy", "there/toy"]
    with pytest.raises(ConfigError, match="named twice"):
        read_runs([runs[0], runs[0] / ".." / "toy"])


def test_more_runs_than_colours(tmp_path):
    runs = read_runs([write_run(tmp_path / f"r{i}", groups=()) for i in range(7)])
    [reward] = [chart for chart in charts_of(runs) if chart.key == "reward"]
    looks = {(svg.colour(curve), svg.dash(curve)) for curve in reward.curves}
    assert len(looks) == 7
    Page(render(runs))


# ---- pictures ----


def test_the_curves_as_png(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    directory = write_run(
        tmp_path / "r", metrics=lambda step: {"reward/mean": step, "loss/kl": 1 / step, "mine/x": step}
    )
    written = report(directory, png=tmp_path / "pictures").pictures
    assert [path.name for path in written] == ["reward.png", "held_out.png", "kl.png"]
    from PIL import Image

    for path in written:
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.width >= 600 and len(set(picture.convert("L").tobytes())) > 20


def test_png_of_what_is_hard_to_draw(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    name = "_$x_{$\\frac<\u202e"
    directory = write_run(
        tmp_path / "r",
        metrics=lambda step: {"reward/a/mean": step, f"reward/{name}/mean": math.nan if step < 4 else 1.0},
    )
    assert all(path.stat().st_size > 1000 for path in write_pngs(charts_of([read_run(directory)]), tmp_path / "p"))


def test_without_matplotlib_the_error_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="--png needs matplotlib") as raised:
        report(run, png=tmp_path / "pictures")
    assert "pip install 'groupwise[report]'" in str(raised.value.hint)
    assert not (run / "report.html").exists()
    assert report(run).page == run / "report.html"


# ---- the command ----


def test_the_command_writes_the_page_and_says_where(run, tmp_path):
    result = cli("report", str(run), "--out", str(tmp_path / "page.html"), "--step", "2")
    assert result.exit_code == 0 and str(tmp_path / "page.html") in result.stdout
    page = Page((tmp_path / "page.html").read_text())
    assert [data.strip() for tag, data in page.texts if tag == "summary" and "Step" in data] == ["Step 2"]


def test_the_command_compares_and_prints_json(two, tmp_path):
    result = cli("report", str(two[0]), "--compare", str(two[1]), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"page": str(two[0] / "report.html"), "pictures": [], "notes": []}
    assert "toy-2" in (two[0] / "report.html").read_text()


def test_the_command_names_what_is_missing(tmp_path):
    result = cli("report", str(tmp_path))
    assert result.exit_code == 2 and "no metrics.jsonl in" in result.stderr
