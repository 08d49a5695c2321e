"""Trains a version on a log and answers whether it should replace the model that wrote the log.

    improve    import, choose a reward, hold out, train, compare; then `run.replacement` answers

    DIR/from-logs/               what `groupwise logs import` writes
    DIR/train.jsonl              the prompts to train on, whose answers the log has
    DIR/heldout.jsonl            of those that the import held out, the ones whose answers the log has
    DIR/reserved.jsonl           prompts that would teach, and are kept to see whether the log teaches what is right
    DIR/run.yaml, DIR/run/       the run, which `groupwise run` reads, too
    DIR/looked.jsonl             prompts that taught, of which it is sampled what the version learned
    DIR/verify.jsonl             prompts for a person to answer: half held-out ones, half reserved; and some training
                                 prompts, to find out what the version learned
    DIR/truth.jsonl              the verified prompts of the comparison
    DIR/improve.json             the request and the steps done so far, so that the same command continues

Everything is done once: a second call with verified answers compares the version that the first call trained. Each
further look at the same verified answers has a smaller share of the error; the number of looks is stored with them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.algo.evidence import share_of_error
from groupwise.config.json_lines import json_lines
from groupwise.config.run import STARTER, RunConfig, validated
from groupwise.config.yaml import Document, to_yaml
from groupwise.errors import ConfigError, DataError, Interrupted, StorageError
from groupwise.rewards.member import load_members
from groupwise.run.config_file import read_run
from groupwise.run.eval_adapter import assess
from groupwise.run.evaluate import Evaluation, load_evaluations
from groupwise.run.health_zeros import why_flat
from groupwise.run.loop import run_loop
from groupwise.run.replacement import Answer, Compared, Unsettled, answer, decide, planned
from groupwise.seeds import seed_of
from groupwise.store import files
from groupwise.store.adapters import AdapterStore
from groupwise.store.locate import find_adapter
from groupwise.store.masking import PERSONAL, SECRETS, Masking
from groupwise.store.rundir import ADAPTERS, METRICS
from groupwise.store.tracking import read_metrics
from groupwise.tasks.logs.calibration import calibrate
from groupwise.tasks.logs.importing import ImportConfig, check_free, import_logs, write
from groupwise.tasks.logs.judging import grade, read_scored
from groupwise.tasks.logs.learnable import Row, rule_for
from groupwise.tasks.logs.phrases import ALPHA, FRESH, concentrated, covering, has, moved, moved_most
from groupwise.tasks.logs.truth import (
    COMPARES,
    Audit,
    Truth,
    Verified,
    apart,
    asked_again,
    audit,
    checked,
    comparing,
    key_of,
    read_truth,
    to_verify,
)
from groupwise.types import PolicyVersion

STATE, LOGS, RUN = "improve.json", "from-logs", "run"
OURS = ("name", "kind", "model", "data", "rewards", "env", "stages", "promote", "run_dir", "output_dir", "resume",
        "folder", "eval.data.source", "eval.modes", "eval.best", "eval.rewards")  # fmt: skip
LEAST = 24  # prompts to train on
RESERVED, MOST_RESERVED = 0.15, 60  # of the prompts to train on
ALIKE = 0.8  # as an import takes prompts for the same
SAMPLES = 4  # of each prompt that is compared
LOOKED = 1000  # prompts that taught, at most, of which both models are sampled
SETTLED = 0.5  # of the prompts that the version learned most from must be verified
SHOWN = 3
CHARACTERS = (32, 1024)  # bounds of `rollout.max_tokens`, which is set by the length of the log's answers
STARTER_RATE = 3e-3  # the starter's own, as its demo has it

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The request of `groupwise improve`; an option that is None is as in the first call for this folder.

    Args:
        to: the folder that everything is in.
        sources: logs, or the folder that an import wrote.
        model: the model that is there.
        outcomes: a file of outcomes.
        truth: a file of verified answers.
        reward: `module:function` with its `options`, where no rule of the log's is to teach.
        gain: the difference of mean scores from which on a replacement is worth it.
        overrides: KEY=VALUE of the run.
    """

    to: Path
    sources: Sequence[Path] = ()
    model: str | None = None
    outcomes: Path | None = None
    truth: Path | None = None
    reward: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    gain: float = 0.05
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 0 < self.gain < 1:
            message = f"--gain is {self.gain:g}; it must be a difference of mean scores, above 0 and below 1"
            raise ConfigError(message, field="--gain")
        for text in self.overrides:
            key = text.partition("=")[0]
            if taken := next((each for each in OURS if key == each or key.startswith((f"{each}.", f"{each}["))), None):
                hint = "groupwise run takes a configuration of your own; improve writes one to begin from (run.yaml)"
                raise ConfigError(f"{taken} is decided here, and {text!r} says otherwise", hint=hint, field=taken)


def improve(wanted: Wanted, *, note: Note) -> dict[str, Any]:
    """Return the answer with all that it rests on, as JSON has it; it is in the folder, too.

    Raises ConfigError, DataError, and what a run raises; Interrupted where the training was stopped, which the same
    call continues with.
    """
    masking = Masking(rules=(*SECRETS, *PERSONAL))
    truth = None if wanted.truth is None else read_truth(wanted.truth, masking=masking, alike=ALIKE)
    work = _opened(wanted, truth, masking=masking)
    result = _result(work)
    if truth is not None:
        comparing(truth.verified, work.said["reward"])  # what cannot be compared is said before anything is trained
    if work.said["lacks"]:
        return work.written(result | {"answer": "not known", "why": work.said["lacks"], "needs": work.said["needs"]})
    trained = work.trained()
    if trained["why"] is not None:
        why = [f"nothing was trained, because {trained['why']}"]
        return work.written(result | {"answer": "not known", "why": why, "needs": work.said["report"]["lacks"]})
    logged, by_log = work.logged(wanted.gain)
    verify, differences = work.verify(by_log, gain=wanted.gain, note=note)
    result |= {"version": work.version, "cost": work.said["trained"]["cost"], "verify": verify}
    result["logged"] = None if logged is None else asdict(logged)
    if truth is None:
        said = answer(None, logged, None, gain=wanted.gain)
        needs = [*said.needs, *_to_verify(verify, planned(differences, gain=wanted.gain))]
        shown = _examples(*by_log) if by_log else {}
        return work.written(result | _told(said) | shown | {"needs": needs})
    assert wanted.truth is not None
    return work.written(result | _by_truth(work, wanted.truth, truth, logged, gain=wanted.gain, note=note))


def _told(said: Answer) -> dict[str, Any]:
    return {"answer": said.known, "why": list(said.why), "needs": list(said.needs)}


def _to_verify(verify: Mapping[str, Any], plan: int) -> list[str]:
    if not verify["rows"]:
        return [f"the log has no prompts to verify; give a file of about {plan} prompts of your own as --truth"]
    said = f"fill in `answer` in {verify['file']} ({verify['rows']} prompts), and give the file as --truth"
    if verify["rows"] < plan:
        return [said, f"about {plan} prompts are needed, estimated from the log's own answers; add prompts of your own"]
    return [said]


def _result(work: _Work) -> dict[str, Any]:
    said = work.said
    return {
        "folder": str(work.to),
        "model": said["wanted"]["model"],
        "reward": said["reward"],
        "prompts": said["prompts"],
        "version": None,
        "verified": None,
        "logged": None,
        "audit": None,
        "cost": None,
        "verify": None,
        "better": [],
        "worse": [],
    }


# ---- the folder ----
@dataclass
class _Work:
    """A folder, and what its `improve.json` says."""

    to: Path
    said: dict[str, Any]

    def save(self) -> None:
        self.put(STATE, json.dumps(self.said, indent=1, ensure_ascii=False) + "\n")

    def put(self, name: str, text: str) -> None:
        with files.writing(f"writing {self.to / name}"):
            self.to.mkdir(parents=True, exist_ok=True)
            files.replace(self.to / name, text, mode=0o600)

    def rows(self, name: str) -> list[Row]:
        return _rows(self.to / f"{name}.jsonl")

    def path(self, name: str) -> str:
        return str((self.to / f"{name}.jsonl").absolute())

    def put_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.put(f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def written(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, which is kept."""
        self.put("answer.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        return result

    def config(self) -> RunConfig:
        config = read_run(self.to / "run.yaml", self.said["wanted"]["overrides"]).config
        if config.train.lora is None:
            hint = "leave it out; a version that is compared with the model it came from is an adapter"
            raise ConfigError("train.lora is null, which trains all parameters", hint=hint, field="train.lora")
        if (start := self.said.get("start")) is None:
            return config
        return config.model_copy(update={"adapters": config.adapters.model_copy(update={"start": start})})

    @property
    def samples(self) -> int:
        """Return how many samples of each prompt both models are compared by."""
        config = self.config()
        return SAMPLES if config.eval is None else config.eval.k

    @property
    def again(self) -> set[str]:
        """Return the prompts that are to be verified for a phrase which wrong answers perhaps have in common."""
        return {key for keys in self.said["again"].values() for key in keys}

    @property
    def run_dir(self) -> Path:
        return self.to / RUN

    def trained(self) -> dict[str, Any]:
        """Return the trained policy; train it if it is not there yet."""
        if self.said.get("trained") is not None:
            return self.said["trained"]
        config = self.config()
        result = run_loop(config)
        lines = [each for each in read_metrics(self.run_dir / METRICS) if "rollout/tokens" in each]
        if result.interrupted:
            message = f"stopped after step {result.steps} of {config.train.steps}, as asked; everything is saved"
            raise Interrupted(message, hint="the same command continues")
        self.said["trained"] = {
            "id": secrets.token_hex(8),
            "version": str(result.version) if result.trained else None,
            "why": None if result.trained else why_flat(lines[-1]),
            "steps": result.steps,
            "cost": {
                "trained_tokens": int(sum(each["rollout/tokens"] for each in lines)),
                "train_minutes": sum(each.get("time/step_s") or 0.0 for each in lines) / 60,
                "measured_tokens": 0,
                "measure_minutes": 0.0,
            },
        }
        self.save()
        return self.said["trained"]

    @property
    def version(self) -> str:
        """Return where the version is that was trained."""
        return str(AdapterStore(self.run_dir / ADAPTERS).path(PolicyVersion.parse(self.said["trained"]["version"])))

    def logged(self, gain: float) -> tuple[Compared | None, tuple[Evaluation, Evaluation] | None]:
        """Return both models by the log's own answers to what was held out, and their evaluations; None without."""
        found = [load_evaluations(self.run_dir, step) for step in (self.said["trained"]["steps"], 0)]
        if not all(found):
            return None, None
        new, old = (each["sampled"] for each in found)
        return decide(new.values("reward"), old.values("reward"), gain=gain, alpha=ALPHA), (new, old)

    def verify(
        self, by_log: tuple[Evaluation, Evaluation] | None, *, gain: float, note: Note
    ) -> tuple[dict[str, Any], Sequence[float]]:
        """Return the prompts to be verified, drawn once, and the differences by the log's own answers. There are as
        many as a decision is expected to take, if available: half held-out, half reserved; in addition a few training
        prompts, for what the version learned most."""
        differences: list[float] = []
        if by_log is not None:
            values = (each.values("reward") for each in by_log)
            differences = [new - old for new, old in zip(*values, strict=True) if not math.isnan(new - old)]
        if "to_verify" not in self.said:
            draw, number = random.SystemRandom(), planned(differences, gain=gain)
            pools = [self.rows("reserved"), self.rows("asked")]
            first = min(len(pools[0]), max(math.ceil(number / 2), number - len(pools[1])))
            chosen = [
                pool[place]
                for pool, count in zip(pools, (first, number - first), strict=True)
                for place in covering(_asked(pool), count, draw=draw)
            ]
            learned = _learned_most(self, note)
            chosen += learned
            draw.shuffle(chosen)
            self.put_rows("verify", to_verify(chosen))
            self.said |= {"to_verify": len(chosen), "learned": _asked(learned), "again": {}}
            self.save()
        return self.asked(), differences

    def cost_with(self, spent: Mapping[str, float]) -> dict[str, Any]:
        """Return the cost of training and measuring so far, with further costs."""
        cost = self.said["trained"]["cost"]
        return cost | {name: cost[name] + each for name, each in spent.items()}

    def asked(self) -> dict[str, Any]:
        """Return where the prompts are that are to be verified, and how many."""
        return {"file": str(self.to / "verify.jsonl"), "rows": self.said["to_verify"]}

    def more_with(self, phrase: str, known: Sequence[Verified]) -> list[Row]:
        """Return a few prompts that taught and have a phrase, which are to be verified, too: drawn once, of those that
        are not `known` yet, and written behind the others unless they are among them."""
        taught = {key_of(row["prompt"]): row for row in self.rows("train") if row.get("answer")}
        if phrase not in self.said["again"]:
            others = {*(key_of(each.messages) for each in known), *self.again}
            having = [key for key in taught if key not in others and has(key, phrase)]
            drawn = random.SystemRandom().sample(having, min(FRESH, len(having)))
            rows = to_verify([taught[key] for key in drawn if key not in self.said["learned"]])
            path = self.to / "verify.jsonl"
            lines = [*_lines(path), *(json.dumps(row, ensure_ascii=False) for row in rows)]
            self.put("verify.jsonl", "".join(f"{each}\n" for each in lines))
            self.said["again"][phrase] = drawn
            self.said["to_verify"] += len(rows)
            self.save()
        return [taught[key] for key in self.said["again"][phrase]]


def _learned_most(work: _Work, note: Note) -> list[Row]:
    """Return the prompts that are to be verified by what the version learned of them: samples of it and of what was
    there before, scored by the log's own answers. None where no rule compares with these."""
    rows = [row for row in work.rows("train") if row.get("answer") is not None]
    rules = [rule_for(str(row["answer"])) for row in rows]
    rule = work.said["reward"] if work.said["reward"] in COMPARES else max(COMPARES, key=rules.count)
    rows = [row for row, its in zip(rows, rules, strict=True) if its == rule]
    rows = random.SystemRandom().sample(rows, min(LOOKED, len(rows)))
    if not rows:
        return []
    work.put_rows("looked", [{"prompt": row["prompt"], "answer": row["answer"]} | _tools(row) for row in rows])
    new, old, spent = _measured(work, "looked", rule, note)
    work.said["trained"]["cost"] = work.cost_with(spent)
    both = zip(rows, old.values("reward"), new.values("reward"), strict=True)
    known = [(row, o, n) for row, o, n in both if math.isfinite(o) and math.isfinite(n)]
    samples = work.samples
    places = moved_most(_asked([row for row, *_ in known]), [moved(o, n, samples=samples) for _, o, n in known])
    return [known[place][0] for place in places]


def _tools(row: Row) -> Row:
    return {"tools": row["tools"]} if row.get("tools") else {}


def _asked(rows: Sequence[Row]) -> list[str]:
    return [key_of(row["prompt"]) for row in rows]


def _read(path: Path) -> Any:
    """Return what a file of ours holds. Raises StorageError for one that is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"{path} is damaged: {error}", hint="restore it, or use another folder") from error


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none without a file."""
    return [line for _, line in json_lines(path.read_text(encoding="utf-8"))] if path.is_file() else []


def _opened(wanted: Wanted, truth: Truth | None, *, masking: Masking) -> _Work:
    """Return the folder's work, begun now or before. Raises ConfigError where it is about something else."""
    work = _Work(wanted.to, {})
    now = {
        "sources": [str(each) for each in wanted.sources] or None,
        "model": wanted.model,
        "outcomes": None if wanted.outcomes is None else str(wanted.outcomes),
        "reward": wanted.reward,
        "options": dict(wanted.options) or None,
        "overrides": list(wanted.overrides) or None,
    }
    if (wanted.to / STATE).is_file():
        work.said = {"learned": [], "again": {}} | _read(wanted.to / STATE)  # older folders have neither
        before = work.said["wanted"]
        for name, value in now.items():
            if value is not None and value != before[name]:
                shown = [" ".join(each) if isinstance(each, list) else each for each in (before[name], value)]
                raise ConfigError(
                    f"{wanted.to} was created with {name} {shown[0] or 'left out'}, and this call gives {shown[1]}",
                    hint="leave it out to continue with this folder, or name another folder",
                    field="--to",
                    kind="exists",
                )
    elif not wanted.sources or wanted.model is None:
        what = "--model" if wanted.sources else "LOGS"
        hint = "groupwise improve requests.jsonl --model starter --to improved"
        raise ConfigError(f"{what} is left out, and {wanted.to} has nothing to continue", hint=hint, field=what)
    else:
        check_free(wanted.to)
        work.said = {"wanted": {**now, "overrides": list(wanted.overrides)}}
        try:
            _prepare(work, truth, masking=masking)
        except BaseException:
            shutil.rmtree(wanted.to, ignore_errors=True)  # a corrected call starts over
            raise
    if "prompts" not in work.said:  # it was killed
        _prepare(work, truth, masking=masking)
    return work


def _prepare(work: _Work, truth: Truth | None, *, masking: Masking) -> None:
    """Import the logs, choose the reward, and write what is trained on and what is kept apart."""
    asked = work.said["wanted"]
    sources = [Path(each) for each in asked["sources"]]
    folder = sources[0]
    if len(sources) > 1 or not ((folder / "report.json").is_file() and (folder / "train.jsonl").is_file()):
        config = ImportConfig(outcomes=None if asked["outcomes"] is None else Path(asked["outcomes"]))
        imported = import_logs(sources, config, masking=masking)
        folder = work.to / LOGS
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed
        write(imported, folder)
    elif asked["outcomes"] is not None:
        message = f"{folder} is an import already, and outcomes are joined when logs are imported"
        raise ConfigError(message, hint="leave --outcomes out, or give the logs themselves", field="--outcomes")
    work.said["report"] = _read(folder / "report.json")["says"]
    work.save()
    _choose(work, folder, truth)
    work.save()


def _choose(work: _Work, folder: Path, truth: Truth | None) -> None:
    """Choose what teaches and what is kept apart, and write the run; or say what the log lacks."""
    train, held_out = _rows(folder / "train.jsonl"), _rows(folder / "heldout.jsonl")
    reward, lacks, needs = _reward(folder, work.said["wanted"])
    rule = reward if reward in COMPARES else None
    teaches = [row for row in train if rule is None or _fits(row, rule)]
    if truth is not None:
        teaches, _ = apart(teaches, [each.messages for each in truth.verified], alike=ALIKE)
    draw = random.SystemRandom()  # who writes into a log must not know which of its prompts are looked at
    places = covering(_asked(teaches), min(MOST_RESERVED, int(RESERVED * len(teaches))), draw=draw)
    reserved, teaches = [teaches[each] for each in places], [row for at, row in enumerate(teaches) if at not in places]
    draw.shuffle(teaches)
    if reward is not None and len(teaches) < LEAST:
        lacks = [f"only {len(teaches)} prompts have an answer to learn from; training needs {LEAST}"]
        needs = ["log for longer, or join outcomes: thumbs, edited (--outcomes FILE)"]
    known = [row for row in held_out if rule is None or _fits(row, rule)]
    work.put_rows("train", teaches)
    work.put_rows("reserved", reserved)
    work.put_rows("heldout", known)
    work.put_rows("asked", held_out)
    work.put_rows("log_answers", [{"key": key_of(row["prompt"]), "answer": row.get("answer")} for row in train])
    work.said |= {"reward": reward, "lacks": lacks, "needs": needs}
    if not lacks:
        work.put("run.yaml", _run_file(work, reward, held_out=bool(known), said=[*teaches, *known]))
        start = work.config().adapters.start  # what is wrong with an override is said before anything is trained
        if start is not None:  # the version: later its name may mean another, which the new one did not come from
            work.said["start"] = str(find_adapter(start).directory.absolute())
    work.said["prompts"] = {"trained": len(teaches), "reserved": len(reserved), "heldout": len(held_out)}


def _fits(row: Row, rule: str) -> bool:
    return row.get("answer") is not None and rule_for(str(row["answer"])) == rule


def _reward(folder: Path, wanted: Mapping[str, Any]) -> tuple[str | None, list[str], list[str]]:
    """Return the reward that is to teach, what is lacking where there is none, and what would be needed."""
    report = _read(folder / "report.json")
    lacking = [*report["says"]["lacks"]]
    if (name := wanted["reward"]) is not None:
        options = wanted["options"] or {}
        (function,) = load_members([{"function": name, "args": options}])
        model = options.get("model")
        graded, _ = grade(read_scored(folder), function, model=model if isinstance(model, str) else None)
        found = calibrate(graded)
        if found is not None and found.believed:
            return name, [], []
        return (
            name,
            [f"{name} does not agree with the outcomes: {'too few outcomes' if found is None else found.reason}"],
            lacking,
        )
    rules = [each for each in report["learn"]["rules"] if each["reward"] in COMPARES]
    fair = [each for each in rules if each["good"] is None or each["bad"] is None or each["good"] > each["bad"]]
    if fair:
        return max(fair, key=lambda each: each["prompts"])["reward"], [], []
    if rules:
        why = f"{rules[0]['reward']} rewards the log's bad answers as much as its good ones"
    elif report["learn"]["rules"]:
        why = "the log's answers are long texts, and no ready reward can tell which of them are right"
    else:
        why = "the log does not say what the right answers are"
    hint = "a judge that agrees with the outcomes of the log: --reward groupwise.rewards.judge:judge --args JSON"
    return None, [why], [*lacking, hint]


def _run_file(work: _Work, reward: str | None, *, held_out: bool, said: Sequence[Row]) -> str:
    """Return the run's configuration."""
    model, options = work.said["wanted"]["model"], work.said["wanted"]["options"]
    lengths = sorted(len(str(row.get("logged") or "")) for row in said)
    longest = lengths[int(0.95 * (len(lengths) - 1))]
    train: dict[str, Any] = {"steps": 60, "schedule": "linear"}
    if model == STARTER:
        train |= {"learning_rate": STARTER_RATE, "lora": {"rank": 16, "alpha": 32}}
    written: dict[str, Any] = {
        "name": "improved",
        "model": model,
        "folder": str(Path.cwd()),  # where a module of rewards is
        "data": {"source": work.path("train")},
        "rewards": [{"function": reward, "args": options} if options else reward],
        "rollout": {
            "prompts_per_step": 16,
            "group_size": 8,
            "max_tokens": max(CHARACTERS[0], min(CHARACTERS[1], int(1.5 * longest))),
        },
        "train": train,
        "run_dir": str(work.run_dir.absolute()),
        "resume": "auto",
    }
    if held_out:
        written["eval"] = {"data": {"source": work.path("heldout")}, "every": 0, "modes": ["sampled"], "k": SAMPLES}
    return to_yaml(written)


# ---- by verified answers ----
def _by_truth(
    work: _Work, path: Path, truth: Truth, logged: Compared | None, *, gain: float, note: Note
) -> dict[str, Any]:
    """Return what verified answers say of both models, and of the log."""
    rule = comparing(truth.verified, work.said["reward"])
    rows = [{"prompt": list(each.messages), "at": number} for number, each in enumerate(truth.verified)]
    unseen, seen = apart(rows, [row["prompt"] for row in work.rows("train")], alike=ALIKE)
    verified = [truth.verified[row["at"]] for row in unseen]
    counts = {"rows": truth.rows, "unfilled": truth.unfilled, "twice": truth.twice, "trained_on": len(seen)}
    if not verified:
        raise DataError(
            f"{path}: the version was trained on all {len(seen)} verified prompts, or on nearly the same ones",
            hint=f"verify prompts of {work.to / 'verify.jsonl'}, on which it was not trained",
            field="--truth",
        )
    reserved = work.rows("reserved")
    audited = _audit(work, truth, verified, [truth.verified[row["at"]] for row in seen], rule)
    look, alpha = _look(path, work.said["trained"]["id"], verified)
    work.put_rows("truth", [each.row for each in verified])
    new, old, spent = _measured(work, "truth", rule, note)
    compared = decide(new.values("reward"), old.values("reward"), gain=gain, alpha=alpha)
    assert compared is not None
    gains = [n - o for n, o in zip(new.values("reward"), old.values("reward"), strict=True)]
    worse_where = concentrated([key_of(each.messages) for each in verified], [each <= -0.5 for each in gains])
    learned = _of_learned(work, truth, rule)
    unsettled = list[Unsettled]()
    if compared.says != "not better":  # what is to be verified for that is asked for at once
        unsettled = _not_settled(work, learned)
        audited, more = _again(work, truth, audited, rule)
        unsettled += more
    ours = {*work.said["learned"], *work.again}
    counts["trained_on"] = sum(key_of(truth.verified[row["at"]].messages) not in ours for row in seen)
    said = answer(compared, logged, audited, gain=gain, worse_where=worse_where, unsettled=unsettled)
    return {
        **_told(said),
        **_examples(new, old),
        "verified": {**asdict(compared), **counts, "look": look, "compared_by": rule, "worse_where": worse_where},
        "audit": {
            **{name: getattr(audited, name) for name in ("checked", "wrong", "most", "alike", "perhaps", "passed")},
            "reserved": len(reserved),
            "learned": learned,
        },
        "cost": work.cost_with(spent),
        "verify": work.asked(),
    }


def _audit(work: _Work, truth: Truth, unseen: Sequence[Verified], trained_on: Sequence[Verified], rule: str) -> Audit:
    """Return what verified answers say of the log's. How many of those that teach are wrong is told by what was drawn
    without regard to what was learned of it; what wrong ones have in common by all but those that were asked again."""
    taught = {row["key"]: row["answer"] for row in work.rows("log_answers") if row["answer"] is not None}

    def of_log(verified: Sequence[Verified]) -> list[Row]:
        keys = [(each, key_of(each.messages)) for each in verified]
        return [{"prompt": list(each.messages), "answer": taught[key]} for each, key in keys if key in taught]

    more = of_log([each for each in trained_on if key_of(each.messages) not in work.again])
    return audit(truth.verified, of_log(unseen), [*work.rows("heldout"), *more], reward=rule)


def _of_learned(work: _Work, truth: Truth, rule: str) -> dict[str, int]:
    """Return how many prompts the version learned most from, and what is verified of them."""
    keys = set(work.said["learned"])
    found = checked(truth.verified, [row for row in work.rows("train") if key_of(row["prompt"]) in keys], reward=rule)
    return {"prompts": len(keys), "checked": len(found), "wrong": sum(each.wrong for each in found)}


def _not_settled(work: _Work, learned: Mapping[str, int]) -> list[Unsettled]:
    prompts, known = learned["prompts"], learned["checked"]
    if known >= SETTLED * prompts:
        return []
    why = f"only {known} of the {prompts} prompts from which it learned most are verified"
    return [Unsettled(why, f"fill in all of {work.asked()['file']}; these prompts are in it")]


def _again(work: _Work, truth: Truth, audited: Audit, rule: str) -> tuple[Audit, list[Unsettled]]:
    """Return the audit with what more prompts say of the phrases that wrong answers perhaps have in common, and what of
    these is not verified yet."""
    unsettled = list[Unsettled]()
    for phrase in audited.perhaps:
        rows = work.more_with(phrase, truth.verified)
        found = checked(truth.verified, rows, reward=rule)
        if asked_again(audited, phrase, found):
            return replace(audited, alike=phrase), []
        if lacking := len(rows) - len(found):
            why = f"the log's wrong answers may be those to prompts with {phrase!r}"
            needs = (
                f"fill in the {lacking} more prompts with {phrase!r} in {work.asked()['file']}, and give the file again"
            )
            unsettled.append(Unsettled(why, needs))
    return audited, unsettled


def _look(path: Path, version: str, verified: Sequence[Any]) -> tuple[int, float]:
    """Return which look at this file this is, and its share of the error. The same version and the same answers are the
    same look; other versions, and more answers, are others. Written down before anything is seen."""
    rows = json.dumps([each.row for each in verified], sort_keys=True, ensure_ascii=False)
    this = {"version": version, "rows": hashlib.sha256(rows.encode()).hexdigest()[:16]}
    beside = path.with_name(f"{path.name}.looks.json")
    looks = _read(beside) if beside.is_file() else []
    if this not in looks:
        looks.append(this)
        with files.writing(f"writing {beside}, which counts the looks at {path.name}"):
            files.replace(beside, json.dumps(looks, indent=1) + "\n", mode=0o600)
    number = looks.index(this) + 1
    return number, share_of_error(ALPHA, number)


def _measured(work: _Work, name: str, rule: str, note: Note) -> tuple[Evaluation, Evaluation, dict[str, Any]]:
    """Return the evaluations of the version and of what was there before on the prompts of a file of ours, by other
    seeds than training's, and what it took."""
    config = work.config()
    asked = {"data": {"source": work.path(name)}, "every": 0, "modes": ["sampled"], "k": work.samples}
    kept = {key: value for key, value in config.model_dump(mode="json").items() if key not in ("eval", "rewards")}
    kept |= {"eval": asked, "rewards": [rule], "seed": seed_of("improve", config.seed) >> 20}
    began = time.monotonic()
    before = config.adapters.start or "base"
    new, old = assess(validated(Document(kept)), adapters=[work.version, before], modes=("sampled",), note=note)
    found = [each.evaluations["sampled"] for each in (new, old)]
    tokens = sum(len(turn.completion.token_ids) for each in found for group in each.groups for rollout in group.rollouts
                 for turn in rollout.turns)  # fmt: skip
    return found[0], found[1], {"measured_tokens": tokens, "measure_minutes": (time.monotonic() - began) / 60}


def _examples(new: Evaluation, old: Evaluation) -> dict[str, Any]:
    """Return the prompts on which one of the two is most ahead, with what both said."""
    values = zip(new.values("reward"), old.values("reward"), new.groups, old.groups, strict=True)
    found = [(n - o, number, mine, theirs) for number, (n, o, mine, theirs) in enumerate(values)]

    def shown(sign: int) -> list[dict[str, Any]]:
        ahead = sorted((each for each in found if sign * each[0] > 0), key=lambda each: (-sign * each[0], each[1]))
        return [
            {
                "prompt": key_of(mine.prompt.messages or ()) or mine.prompt.text,
                "right": mine.prompt.columns.get("answer"),
                "before": _said(theirs, best=sign < 0),
                "after": _said(mine, best=sign > 0),
                "difference": gain,
            }
            for gain, _, mine, theirs in ahead[:SHOWN]
        ]

    return {"better": shown(1), "worse": shown(-1)}


def _said(group: Any, *, best: bool) -> str:
    """Return a completion of the group: its best or its worst."""
    scored = [each for each in group.rollouts if each.reward is not None]
    return (max if best else min)(scored, key=lambda each: each.reward).completion.text
