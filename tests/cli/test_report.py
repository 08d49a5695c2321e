"""The report of a run: one file with all that the interface shows, in which nothing acts but the interface itself, and
which no state of a run keeps from being written."""

from __future__ import annotations

import base64
import doctest
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cli_project import cli
from groupwise.cli.report import data, page
from groupwise.cli.report.build import report
from groupwise.config.run import STARTER_DIR, dump_resolved, parse_config
from groupwise.errors import ConfigError, DataError, StorageError
from groupwise.model.image_tokens import FIRST, PLACES, key_of
from groupwise.pictures import Picture, read_picture
from groupwise.run.evaluate import Evaluation, save_evaluations
from groupwise.run.health_report import examine
from groupwise.run.record import read_run, read_runs
from groupwise.server import ui
from groupwise.store.tracking import Tracking
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn
from seeing_models import drawn
from wording import raises, wording

TOKENIZER = Tokenizer.from_file(str(STARTER_DIR / "tokenizer.json"))
END = TOKENIZER.token_to_id("<|im_end|>")
LIMIT = 16_000_000  # bytes of a page


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
    """A written page, read as a browser reads it: what is in a script or a style sheet is text up to its end."""

    def __init__(self, path: Path):
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, dict[str, str | None]], str]] = []  # (innermost element, text)
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open:
            self.texts.append((self.open[-1], data))

    def inside(self, tag: str, **attributes: str) -> str:
        """The text of the element of this kind."""
        is_it = [attributes.items() <= each.items() for (name, each), _ in self.texts if name == tag]
        assert any(is_it), (tag, attributes)
        return "".join(text for (name, each), text in self.texts if name == tag and attributes.items() <= each.items())

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.inside("script", id=page.DATA_ID))

    @property
    def run(self) -> dict[str, Any]:
        [run] = self.data["runs"]
        return run

    def steps(self) -> dict[int, int]:
        """How many groups are in it of each step."""
        found: dict[int, int] = {}
        for group in self.run["groups"]:
            step = int(group["group"].split(".")[0])
            found[step] = found.get(step, 0) + 1
        return found


def page_of(*directories: Path, **options: Any) -> Page:
    first, *others = directories
    return Page(report(first, compare=others, **options).page)


def check_inert(page: Page) -> None:
    """Nothing runs but the interface, nothing loads, and the policy says so."""
    tags = [tag for tag, _ in page.elements]
    once = ["html", "head", "title", "link", "style", "body", "noscript", "div"]
    assert sorted(tags) == sorted([*once, *["meta"] * 4, "script", "script"])
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")], tag
        assert str(attributes.get("href", "data:image/svg+xml;base64,")).startswith("data:image/svg+xml;base64,")
    [policy] = [str(a["content"]) for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    code, looks = page.inside("script", type="module"), page.inside("style")
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (code, looks)]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert page.source.index("Content-Security-Policy") < page.source.index("<title>")  # it holds for what follows it
    assert not re.search(r"url\((?!data:)|@import", looks)


# ---- what is in it ----
def test_the_page_is_the_built_interface_with_the_run_in_it(run):
    page = page_of(run)
    check_inert(page)
    code = next(file.content.decode() for name, file in ui.built_files().items() if name.endswith(".js"))
    assert re.sub(r"\\x3C", "<", page.inside("script", type="module")) == re.sub(r"\\x3C", "<", code)
    assert page.inside("title") == "toy · Groupwise"
    assert set(page.run) == {"detail", "steps", "health", "evaluations", "groups", "images", "left_out"}
    assert page.run["detail"]["config"]["train.learning_rate"] == 1e-3 and page.run["left_out"] == []
    assert [line["step"] for line in page.run["steps"]] == [0, 1, 2, 3, 4]
    recorded = {"eval/greedy/reward": 0.9, "eval/greedy/add/reward": 1.0, **step_metrics(4)}
    assert {key: value for key, value in page.run["steps"][4].items() if key != "time"} == pytest.approx(
        {"step": 4, **recorded}
    )


def test_completions_are_there_token_by_token(run):
    page = page_of(run)
    assert page.steps() == {4: 1, 3: 1, 2: 1, 1: 1} and list(page.steps()) == [4, 3, 2, 1]
    [group] = [group for group in page.run["groups"] if group["group"] == "2.0"]
    best, worst = group["rollouts"]
    assert "".join(best["tokens"]) == "It is 4.<|im_end|>" and (best["reward"], worst["reward"]) == (1.0, 0.0)
    assert best["logprobs"] == pytest.approx([-0.1 * (i + 1) for i in range(len(best["tokens"]))])
    assert (best["version"], best["finish_reason"], best["id"]) == ("toy@3", "stop", "2.0.0")
    assert group["columns"] == {"answer": "4"} and best["token_ids"] == [] and best["prompt_tokens"] == 2


def test_findings_come_with_what_to_do(tmp_path):
    def metrics(step):
        return step_metrics(step) | {"optim/grad_norm": 1e4 if step < 8 else 1.0, "reward/frac_zero_std": 1.0}

    directory = write_run(tmp_path / "r", steps=40, evaluated=(), groups=(), metrics=metrics)
    health = examine(read_run(directory).lines, config=config())
    assert health.standing and len(health.findings) > len(health.standing)  # something is over
    found = page_of(directory).run["health"]
    assert found["status"] == health.status and len(found["findings"]) == len(health.findings)
    told = json.dumps(found, ensure_ascii=False)
    for finding in health.standing:
        assert finding.says in told and all(
            override in told for advice in finding.advice for override in advice.overrides
        )


def test_several_runs_are_in_one_page(two):
    page = page_of(*two)
    check_inert(page)
    assert [run["detail"]["run"] for run in page.data["runs"]] == ["toy-1", "toy-2"]
    assert [run["detail"]["config"]["algo.policy_loss"] for run in page.data["runs"]] == ["grpo", "dapo"]


@pytest.fixture
def two(tmp_path):
    other = config(algo={"policy_loss": "dapo"}, learning_rate=5e-3, seed=7)
    return write_run(tmp_path / "toy-1"), write_run(tmp_path / "toy-2", steps=6, settings=other)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [write_run(tmp_path / place / "toy") for place in ("here", "there")]
    assert [run.label for run in read_runs(runs)] == ["here/toy", "there/toy"]
    assert [run["detail"]["run"] for run in page_of(*runs).data["runs"]] == ["here~toy", "there~toy"]
    with raises(ConfigError):
        report(runs[0], compare=[runs[0] / ".." / "toy"])


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
def test_hostile_text_stays_data(tmp_path, evil):
    page = page_of(hostile_run(tmp_path / "r", evil))
    check_inert(page)
    assert page.inside("title") == f"{evil} · Groupwise" and page.run["detail"]["name"] == evil
    assert "<" not in page.inside("script", id="groupwise-report")
    group = page.run["groups"][0]
    assert evil in group["columns"] and evil in group["rollouts"][0]["rewards"]
    assert "".join(group["rollouts"][0]["tokens"]).startswith(evil) and group["rollouts"][1]["error"] == evil


def test_code_cannot_end_its_own_script(monkeypatch, run):
    """Svelte's templates have comments in them; a string in a script may have anything."""
    code = """const a = "</script><script>", b = `<!-- <SCRIPT `, c = 1<2;"""
    for name, file in ui.built_files().items():
        if name.endswith(".js"):
            monkeypatch.setitem(ui.built_files(), name, ui.WebFile(**{**vars(file), "content": code.encode()}))
    page = page_of(run)
    check_inert(page)
    assert page.inside("script", type="module") == (
        """const a = "\\x3C/script>\\x3Cscript>", b = `\\x3C!-- \\x3CSCRIPT `, c = 1<2;"""
    )


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
    path = directory / "rollouts" / "step_000004.jsonl"
    raw = json.loads(path.read_text())
    raw["prompt"] = {**raw["prompt"], "messages": [{"role": "user", "content": evil}], "token_ids": []}
    raw["rollouts"][0]["error"] = evil
    raw["rollouts"][1]["turns"][0]["text"] = evil  # which the token ids do not give, so it is shown whole
    path.write_text(json.dumps(raw) + "\n")
    page = page_of(directory)
    group = page.run["groups"][0]
    assert group["prompt"] == f"user: {seen}" and group["rollouts"][0]["error"] == seen
    assert group["rollouts"][1]["tokens"] == [seen] and group["rollouts"][1]["text"] == seen
    shown = page.inside("script", id="groupwise-report")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069]", shown)


# ---- whatever state the run is in ----
def test_a_run_that_is_being_written(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')
    (run / "rollouts" / "step_000005.tmp").write_text('{"prompt"')
    (run / "config.yaml").write_text(dump_resolved(config(train={"steps": 9})))
    page = page_of(run)
    assert (page.run["detail"]["state"], page.run["detail"]["step"], page.run["detail"]["steps"]) == ("running", 4, 9)
    assert max(page.steps()) == 4


def test_a_run_without_evaluation_or_rollouts(tmp_path):
    page = page_of(write_run(tmp_path / "r", evaluated=(), groups=()))
    assert page.run["evaluations"]["mode"] is None and page.run["groups"] == [] and page.run["left_out"] == []


def test_a_run_that_has_recorded_nothing_yet(tmp_path):
    page = page_of(write_run(tmp_path / "r", steps=0, evaluated=()))
    check_inert(page)
    assert page.run["steps"] == []


def test_values_that_are_not_finite_are_null(tmp_path):
    def metrics(step):
        return step_metrics(step) | {"loss/policy": math.nan if step == 3 else 1.0 * step, "loss/kl": math.inf}

    page = page_of(write_run(tmp_path / "r", steps=5, metrics=metrics))
    assert [line["loss/policy"] for line in page.run["steps"] if line["step"]] == [1.0, 2.0, None, 4.0, 5.0]
    assert {line["loss/kl"] for line in page.run["steps"] if line["step"]} == {None}


def test_a_configuration_that_cannot_be_read_is_left_out_and_said(run):
    (run / "config.yaml").write_text("a: [1,\n")
    written = report(run)
    wording(next(note for note in written.notes if "config.yaml" in note))
    assert Page(written.page).run["detail"]["config"] == {}
    (run / "config.yaml").unlink()
    wording(page_of(run).run["detail"]["notes"][0])


def test_a_configuration_of_another_version_is_shown_as_it_is(run):
    (run / "config.yaml").write_text("name: old\nalgo: grpo\nrewards: exact\nextinct: 1\n")
    assert page_of(run).run["detail"]["config"]["extinct"] == 1


@pytest.mark.parametrize(
    "damage", ['{"prompt": {}, "rollouts": [{}]}', "[1]", "{torn", '{"rollouts": [{"turns": []}]}']
)
def test_rollouts_that_cannot_be_read_are_left_out_and_said(run, damage):
    path = run / "rollouts" / "step_000004.jsonl"
    path.write_text(path.read_text() + damage + "\n")
    written = report(run)
    page = Page(written.page)
    assert page.steps() == {1: 1, 2: 1, 3: 1, 4: 1}
    (note,) = (note for note in page.run["left_out"] if "step_000004.jsonl, line 2" in note)
    wording(note)
    assert any("line 2" in note for note in written.notes)


def test_damaged_metrics_are_an_error(run):
    (run / "metrics.jsonl").write_text("nonsense\n{}\n")
    with raises(DataError):
        read_run(run)


def test_a_directory_that_is_no_run_says_what_is_missing(tmp_path, run):
    with raises(ConfigError):
        report(tmp_path)
    with raises(ConfigError):
        report(tmp_path / "nothing")
    with raises(ConfigError):
        report(run, steps=[1, 9])


def test_a_page_that_cannot_be_written_leaves_what_was_there(run, tmp_path):
    (tmp_path / "file").write_text("x")
    with raises(StorageError):
        report(run, out=tmp_path / "file" / "page.html")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(StorageError):
        report(run, out=tmp_path / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "page.html", "toy-1"]


def test_without_the_built_interface_the_error_says_so(run, monkeypatch):
    monkeypatch.delitem(ui.built_files(), "index.html")
    with raises(StorageError):
        report(run)


# ---- how large ----
def test_only_the_steps_that_are_asked_for(run):
    assert page_of(run, steps=[3, 1]).steps() == {3: 1, 1: 1}
    wording(page_of(run, steps=[3, 1]).run["left_out"][0])


@pytest.mark.parametrize(
    ("steps", "order"), [([], []), ([7], [7]), ([1, 2], [2, 1]), (range(1, 8), [7, 1, 4, 2, 5, 3, 6])]
)
def test_steps_are_spread_over_the_run(steps, order):
    assert data.outermost_first(list(steps)) == order
    assert doctest.testmod(data).failed == 0 and doctest.testmod(data).attempted


@pytest.mark.slow
def test_a_large_run_is_bounded_and_says_what_is_left_out(tmp_path, monkeypatch):
    long = "word " * 4000
    mild, sharp = (rollout(f"{i} {long}", reward) for i, reward in enumerate((0.3, 0.4))), (0.0, 1.0)
    groups = (group(*mild, question=long), group(*(rollout(long, reward) for reward in sharp), columns={"c": long}))
    directory = write_run(tmp_path / "r", steps=60, evaluated=(), groups=groups, recorded=range(1, 61, 6))
    one = len(json.dumps(page_of(directory, steps=[1]).run["groups"][1]))
    monkeypatch.setattr(data, "MOST_COMPLETION_BYTES", int(4.5 * one))  # a third of it holds one of the two groups
    page = page_of(directory)
    assert page.steps() == {55: 1, 25: 1, 1: 1, 13: 1}
    assert all([r["reward"] for r in group["rollouts"]] == [1.0, 0.0] for group in page.run["groups"])  # taught most
    assert "4 of 10 steps are here (1, 13, 25, 55)" in page.run["left_out"][0]
    assert "step 1: 1 of 2" in page.run["left_out"][1]
    shown = page.run["groups"][0]["rollouts"][0]
    assert len(shown["tokens"]) <= data.MOST_TOKENS + 1 and any(
        "tokens are left out here" in t for t in shown["tokens"]
    )
    assert "characters are left out here" in page_of(directory, steps=[1]).run["groups"][0]["prompt"] + shown["text"]


def test_a_group_that_is_too_large_by_itself_keeps_its_best_and_its_worst(tmp_path, monkeypatch):
    rewards = [i / 8 for i in range(8)]
    directory = write_run(tmp_path / "r", steps=2, groups=(group(*(rollout("word " * 300, r) for r in rewards)),))
    one = len(json.dumps(page_of(directory).run["groups"][0]["rollouts"][0]))
    monkeypatch.setattr(data, "MOST_COMPLETION_BYTES", 9 * one)  # of which a step may have half
    page = page_of(directory)
    assert [each["reward"] for each in page.run["groups"][0]["rollouts"]] == [0.875, 0.75, 0.125, 0.0]
    for note in page.run["left_out"]:
        wording(note)
    monkeypatch.setattr(data, "MOST_COMPLETION_BYTES", one)
    page = page_of(directory)
    assert page.run["groups"] == []
    wording(page.run["left_out"][0])


def test_held_out_completions_count_too(tmp_path, monkeypatch):
    directory = write_run(tmp_path / "r", groups=(), evaluated=())
    for step, value in ((0, 0.0), (4, 1.0)):
        groups = tuple(group(rollout(f"word {i} " * 100, value), question=f"q{i}") for i in range(3))
        held_out = Evaluation(mode="greedy", version=PolicyVersion.base(), groups=groups)
        save_evaluations(directory, step, {"greedy": held_out})
    whole = page_of(directory).run["evaluations"]
    assert len(whole["changed"]) == 3 and whole["changed"][0]["before"]["token_ids"] == []
    monkeypatch.setattr(data, "MOST_COMPLETION_BYTES", len(json.dumps(whole)))
    fewer = page_of(directory).run["evaluations"]
    assert len(fewer["changed"]) == 1 and (fewer["better"], fewer["prompts"]) == (3, 3)


@pytest.mark.long
def test_a_very_long_run_has_every_so_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MOST_VALUES", data.MOST_VALUES // 10)
    (tmp_path / "r").mkdir()
    with (tmp_path / "r" / "metrics.jsonl").open("w") as file:
        for step in range(1, 2_001):
            held_out = {"eval/greedy/reward": 0.5} if step == 777 else {}
            file.write(json.dumps({"step": step, "time": "t"} | step_metrics(step) | held_out) + "\n")
    page = page_of(tmp_path / "r")
    steps = [line["step"] for line in page.run["steps"]]
    assert len(steps) < 1_000 and steps[0] == 1 and steps[-1] == 2_000 and 777 in steps
    assert page.run["left_out"] == ["Metrics are of every 3 steps, of each evaluation and of the last step."]
    assert len(page.source) < LIMIT


def test_the_most_that_a_page_can_hold(tmp_path):
    """What the budgets come to, with the interface itself."""
    interface = sum(len(file.content) for file in ui.built_files().values())
    assert data.MOST_COMPLETION_BYTES + 40 * data.MOST_VALUES + interface < LIMIT


# ---- the command ----
def test_the_command_writes_the_page_and_says_where(run, tmp_path):
    result = cli("report", str(run), "--out", str(tmp_path / "page.html"), "--step", "2")
    assert result.exit_code == 0 and str(tmp_path / "page.html") in result.stdout
    wording(result.stderr)
    assert Page(tmp_path / "page.html").steps() == {2: 1}


def test_the_command_compares_and_prints_json(two, tmp_path):
    result = cli("report", str(two[0]), "--compare", str(two[1]), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"page": str(two[0] / "report.html"), "notes": []}
    assert "toy-2" in (two[0] / "report.html").read_text()


def test_the_command_names_what_is_missing(tmp_path):
    result = cli("report", str(tmp_path))
    assert result.exit_code == 2
    wording(result.stderr)


# ---- pictures ----
def asked_of(*images: Picture) -> RolloutGroup:
    ids = tuple(FIRST + key_of(each.digest) * PLACES for each in images)
    whole = group(rollout("4", 1.0), rollout("5", 0.0))
    return replace(whole, prompt=replace(whole.prompt, token_ids=(*ids, 1, 2)))


def test_pictures_are_in_it_small_and_each_once(tmp_path: Path) -> None:
    folder = tmp_path / "toy-1"
    small, large = (read_picture(drawn(*size)).keep(folder / "images") for size in ((24, 16), (1200, 600)))
    shown = page_of(write_run(folder, groups=(asked_of(small, large), asked_of(small))))
    first = shown.run["groups"][0]["images"]
    assert [where.rpartition("/")[2] for where in first] == [small.digest, large.digest]
    urls = [shown.run["images"][where] for where in first]
    assert len(shown.run["images"]) == 2 and urls[0] == f"data:image/png;base64,{base64.b64encode(small.data).decode()}"
    assert urls[1].startswith("data:image/webp") and read_picture(urls[1]).pixels().size == (320, 160)
    assert shown.run["left_out"] == []
    check_inert(shown)


def test_what_does_not_fit_of_pictures_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "toy-1"
    kept = [read_picture(drawn(24, 16, seed=seed)).keep(folder / "images") for seed in range(4)]
    (folder / "images" / f"{kept[0].digest}.png").write_bytes(b"x" * 9_000)
    monkeypatch.setattr(data, "MOST_BYTES", 4_000)
    shown = page_of(write_run(folder, groups=tuple(map(asked_of, kept))))
    assert len(shown.run["images"]) == 2 and "of 4 pictures 2" in shown.run["left_out"][-1].lower()
    assert all(url.startswith("data:image/png") for url in shown.run["images"].values())
