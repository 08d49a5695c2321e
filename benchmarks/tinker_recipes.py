"""Every recipe of tinker-cookbook, unmodified, against a server of the starter: which run to their end?

    python benchmarks/tinker_recipes.py --python /tmp/cookbook/bin/python           # those that need no network
    python benchmarks/tinker_recipes.py --python ... rl_loop sdft                   # those whose names begin so
    python benchmarks/tinker_recipes.py --python ... --json recipes.json --write    # and the table in docs/tinker.md

`--python` is an interpreter that has `tinker-cookbook` (docs/tinker.md); the server runs with the one that runs this.
It serves the starter, with positions for long prompts, as Qwen/Qwen3.5-4B, which most recipes train by default, and a
second model in the same server by the names of their teachers, opponents and graders; `stable_reinforce`, the default
loss of several, is trained as `cispo`. Recipes get tokenizers and data from the hub by name: in the folder where they
run, directories of these names stand in for them, with sums in the shape of each data set. Batches are small and runs a
few steps long: this shows the wire, not learning.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from live_server import free_port, process
from rich.console import Console

from groupwise.config.run import STARTER_DIR

SERVED, BASE = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base"
SECOND = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-397B-A17B")
CONTEXT = 16384
PAGE, BEGIN, END = Path(__file__).parents[1] / "docs" / "tinker.md", "<!-- recipes -->", "<!-- /recipes -->"
UNIFORM = "; the starter's rewards were alike in every group, so that gradients were 0"
NONE = "no result yet"
NETWORK = "needs the network: "
console = Console(stderr=True)


@dataclass(frozen=True)
class Recipe:
    """A program of tinker_cookbook.recipes. `why` is the reason for which it is not run; `by` what its options are made
    of besides `options`: the log and, of those that have another default, the model."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    shown: str = ""
    why: str = ""
    model: bool = False  # to be told
    log: str = "log_path"
    stdin: str = ""
    steps: bool = True  # it writes metrics.jsonl


@dataclass(frozen=True)
class Result:
    """What became of one."""

    name: str
    shown: str
    passed: bool | None  # None: not run
    text: str
    seconds: float = 0.0


RL: Mapping[str, object] = {"max_steps": 1, "eval_every": 0, "save_every": 0, "learning_rate": 1e-4}
GROUPS: Mapping[str, object] = {**RL, "groups_per_batch": 4, "group_size": 4, "max_tokens": 12}
ARITHMETIC: Mapping[str, object] = {
    **GROUPS,
    "max_steps": 2,
    "env": "arithmetic",
    "renderer_name": "qwen3",
    "groups_per_batch": 8,
    "group_size": 8,
    "max_tokens": 24,
}
BATCH: Mapping[str, object] = {**RL, "batch_size": 2, "group_size": 2, "max_tokens": 8}
SL: Mapping[str, object] = {"max_steps": 1, "batch_size": 8, "learning_rate": 1e-4, "save_every": 0, "eval_every": 0}
RECIPES = (
    Recipe("math_rl.train", ARITHMETIC, "`arithmetic`, its default loss", model=True),
    Recipe("math_rl.train", {**ARITHMETIC, "max_steps_off_policy": 1}, "asynchronous", model=True),
    Recipe(
        "math_rl.train",
        {**ARITHMETIC, "stream_minibatch_config.groups_per_batch": 8} | {"stream_minibatch_config.num_minibatches": 2},
        "streamed minibatches",
        model=True,
    ),
    Recipe(
        "math_rl.train",
        {**GROUPS, "env": "arithmetic", "num_substeps": 2, "compute_post_kl": True, "save_every": 1, "eval_every": 1}
        | {"loss_fn": "ppo"},
        "`ppo`, 2 substeps, KL after them, evaluation, states",
        model=True,
    ),
    *(Recipe("math_rl.train", {**GROUPS, "env": env}, f"`{env}`", model=True) for env in ("gsm8k", "deepmath")),
    Recipe("math_rl.train", {**GROUPS, "env": "polaris"}, "`polaris`", model=True),
    Recipe("math_rl.train", {**GROUPS, "env": "math"}, "`math`", model=True),
    Recipe(
        "rl_basic",
        {"max_steps": 1, "max_tokens": 8},
        model=True,
    ),
    Recipe(
        "rl_loop", {"batch_size": 4, "group_size": 4, "max_tokens": 8, "max_steps": 2}, "its default loss", model=True
    ),
    Recipe(
        "rl_loop",
        {"batch_size": 4, "group_size": 4, "max_tokens": 8, "max_steps": 2, "loss_fn": "gspo"},
        "`gspo`",
        model=True,
    ),
    Recipe("sl_basic", {"max_steps": 1}, model=True),
    Recipe("sl_loop", {"batch_size": 8, "max_steps": 2}, model=True),
    Recipe("chat_sl.train", {**SL, "dataset": "no_robots"}, "`no_robots`", model=True),
    Recipe("chat_sl.train", {**SL, "dataset": "tulu3"}, "`tulu3`", model=True),
    Recipe("chat_sl.train", {**SL, "dataset": "talk.jsonl"}, "a file of conversations", model=True),
    Recipe(
        "chat_sl.sweep",
        {"recipe": "sft", "base.model_name": SERVED, "base.dataset": "talk.jsonl", "base.batch_size": 8}
        | {"base.max_steps": 1, "learning_rates": "[1e-4,3e-4]", "lora_ranks": "[4]"},
        "two runs",
        log="sweep_dir",
        steps=False,
    ),
    Recipe("preference.dpo.train", {"max_steps": 2, "batch_size": 8, "dataset": "hhh"}, "`hhh`", model=True),
    Recipe(
        "preference.shorter.train", {"max_steps": 2, "eval_every": 0, "batch_size": 4, "group_size": 4, "max_tokens": 8}
    ),
    Recipe(
        "preference.rlhf.rlhf_pipeline",
        {"base_model": SERVED, "batch_size": 8, "max_steps": 1, "rl_max_tokens": 8, "save_every": 0, "eval_every": 0}
        | {"lora_rank": 8},
        "all three stages",
        log="",
        steps=False,
    ),
    Recipe("multiplayer_rl.guess_number.train", BATCH),
    Recipe("multiplayer_rl.twenty_questions.train", BATCH, "the answerer is the second model"),
    Recipe(
        "multiplayer_rl.text_arena.train",
        {**RL, "batch_size": 4, "num_train_datapoints": 4, "num_test_datapoints": 4, "max_tokens": 8},
    ),
    Recipe(
        "distillation.on_policy_distillation",
        {**GROUPS, "dataset": "deepmath", "lora_rank": 8},
        "the teacher is the second model",
        model=True,
    ),
    Recipe(
        "distillation.on_policy_multi_teacher",
        {**RL, "deepmath_groups_per_batch": 4, "tulu3_groups_per_batch": 4, "group_size": 2, "max_tokens": 12}
        | {"lora_rank": 8},
        "two teachers",
        model=True,
    ),
    Recipe(
        "distillation.off_policy_reasoning", {**SL, "max_prompts": 64, "buffer_size": 64, "lora_rank": 8}, model=True
    ),
    Recipe(
        "distillation.on_policy_distillation_harbor_multi_turn",
        why="a sandbox of Modal's, " + NETWORK + "harbor's tasks",
    ),
    Recipe(
        "sdft.train",
        {**GROUPS, "dataset": "toolalpaca", "max_tokens": 16, "lora_rank": 8},
        "`toolalpaca`, `topk=20`",
        model=True,
    ),
    Recipe(
        "sdft.train",
        {**GROUPS, "dataset": "toolalpaca", "max_tokens": 16, "lora_rank": 8, "topk": 5, "reverse": True},
        "`topk=5`, `reverse`",
        model=True,
    ),
    Recipe("sdft.train", {**GROUPS, "max_tokens": 16, "lora_rank": 8}, "`sciknoweval`", model=True),
    Recipe(
        "prompt_distillation.create_data",
        {"output_file": "lang.jsonl"},
        "16 sentences, by the second model",
        log="",
        steps=False,
    ),
    Recipe("prompt_distillation.train", {**SL, "file_path": "talk.jsonl"}, model=True),
    Recipe(
        "rubric.train",
        {
            **RL,
            "groups_per_batch": 4,
            "train_group_size": 4,
            "train_jsonl_path": "rubric.jsonl",
            "test_jsonl_path": "rubric.jsonl",
        },
        "the grader is the second model",
        model=True,
    ),
    Recipe(
        "rl_numerics_check.train",
        {**GROUPS, "task.num_pages_min": 2, "task.num_pages_max": 3, "task.page_chars": 200, "max_tokens": 24},
        "short documents",
        model=True,
    ),
    Recipe("decisions.demo", {}, "one question", model=True, log="", steps=False, stdin="Where is my invoice?\n\n"),
    Recipe(
        "decisions.forecasting",
        {"max_steps": 2, "batch_size": 8, "data_path": "arena.csv", "split_date": "2025-10-01"},
        "a file of forecasts",
        model=True,
    ),
    Recipe(
        "forecasting.train",
        {**GROUPS, "data_path": "arena.csv", "split_date": "2025-10-01", "renderer_name": "qwen3_5_disable_thinking"},
        "a file of forecasts",
        model=True,
    ),
    Recipe("true_thinking_score.run_small_experiment", {}, log="", steps=False),
    Recipe(
        "true_thinking_score.analyze",
        {"dataset": "gsm8k", "n_problems": 2, "max_tokens": 32},
        "`gsm8k`",
        steps=False,
    ),
    Recipe(
        "verifiers_rl.train",
        {**GROUPS, "vf_env_id": "reverse-text"},
        "an environment `reverse-text` of verifiers 0.1.9",
    ),
    Recipe("code_rl.train", why="a sandbox for code (Sandbox Fusion or Modal), " + NETWORK + "DeepCoder"),
    Recipe("search_tool.train", why="embeddings of Gemini's API and an index of Wikipedia, " + NETWORK + "both"),
    Recipe("harbor_rl.train", why="a sandbox of Modal's, " + NETWORK + "harbor's tasks"),
    Recipe("audio.asr, audio.emotion, audio.medical_asr", why="audio: the server's models read text"),
    Recipe("vlm_classifier.train", why="needs the network: pictures of the hub"),
)


# -- what stands in for the hub ----------------------------------------------------------------------------------------


def sums(count: int, seed: int = 0) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    return [(f"What is {a} + {b}?", a + b) for a, b in pairs]


def lines(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def configured(directory: Path, name: str, **files: str) -> None:
    """A data set's card, which names its configuration and the file of each split."""
    splits = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in files.items())
    (directory / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{splits}---\n")


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


SCORED = {  # how a rubric's grader answers
    "extraction_regex": "<score>(.*)</score>",
    "grader_output_format_instruction": "Write a score from 0 to 1 between <score> and </score>.",
}


def stand_ins(folder: Path, cookbook: Path, model: Path) -> None:
    """Models and data of the hub, by their names, in the folder where recipes run."""
    asked = sums(256)
    for name in (SERVED, BASE, *SECOND):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    talks = [talk(q, f"It is {a}.") for q, a in asked]
    lines(folder / "talk.jsonl", talks)
    for split in ("train", "test"):
        lines(folder / "HuggingFaceH4/no_robots" / f"{split}.jsonl", talks)
        dialogues = [(f"\n\nHuman: {q}\n\nAssistant: {a}", f"\n\nHuman: {q}\n\nAssistant: no idea") for q, a in asked]
        pairs = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in dialogues]
        lines(folder / "Anthropic/hh-rlhf" / f"{split}.jsonl", pairs)
        lines(
            folder / "openai/gsm8k/main" / f"{split}.jsonl", [{"question": q, "answer": f"#### {a}"} for q, a in asked]
        )
    configured(folder / "openai/gsm8k", "main", train="main/train.jsonl", test="main/test.jsonl")
    lines(
        folder / "allenai/tulu-3-sft-mixture/train.jsonl", [{**each, "id": str(i)} for i, each in enumerate(talks * 8)]
    )
    deepmath = [{"question": q, "final_answer": str(a)} for q, a in asked]
    lines(folder / "zwhe99/DeepMath-103K/train.jsonl", deepmath)
    polaris = [{"problem": q, "answer": str(a)} for q, a in asked]
    lines(folder / "POLARIS-Project/Polaris-Dataset-53K/train.jsonl", polaris)
    boxed = [{"problem": q, "solution": f"\\boxed{{{a}}}"} for q, a in asked]
    math = folder / "HuggingFaceH4/MATH-500"
    lines(math / "test.jsonl", boxed[:16])
    configured(math, "default", test="test.jsonl")
    hendrycks = folder / "EleutherAI/hendrycks_math"
    lines(hendrycks / "algebra/train.jsonl", boxed[16:128])
    lines(hendrycks / "algebra/test.jsonl", boxed[128:])
    configured(hendrycks, "algebra", train="algebra/train.jsonl", test="algebra/test.jsonl")
    tools = [{"instruction": q, "output": f"It is {a}."} for q, a in asked]
    lines(folder / "tangqiaoyu/ToolAlpaca/train.jsonl", tools)
    choices = {"text": ["1", "2", "3", "4"], "label": ["A", "B", "C", "D"]}
    exams = [
        {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices", "question": q, "choices": choices}
        | {"answerKey": "A", "answer": "A", "prompt": {"default": "Choose one."}}
        for q, _ in asked
    ]
    lines(folder / "hicai-zju/SciKnowEval/test.jsonl", exams)
    thoughts = [[{"from": "human", "value": q}, {"from": "gpt", "value": f"It is {a}."}] for q, a in asked]
    lines(folder / "open-thoughts/OpenThoughts3-1.2M/train.jsonl", [{"conversations": each} for each in thoughts])
    words = [{"text": " ".join(f"{q} {a}" for q, a in asked)} for _ in range(64)]
    lines(folder / "Salesforce/wikitext/raw/train.jsonl", words)
    configured(folder / "Salesforce/wikitext", "wikitext-103-raw-v1", train="raw/train.jsonl")
    graded = [
        {
            "convo": talk(q, "")["messages"][:1],
            "rubric_items": [{"rubric_str": f"Says {a}.", **SCORED}],
        }
        for q, a in asked
    ]
    lines(folder / "rubric.jsonl", graded)
    forecasts(folder / "arena.csv")
    examples = folder / "tinker_cookbook" / "example_data"
    shutil.copytree(cookbook / "example_data", examples)
    sentences = examples / "multilingual.txt"  # 2,100, of each of which up to 1,000 tokens are sampled
    sentences.write_text(
        "".join(sentences.read_text(encoding="utf-8").splitlines(keepends=True)[:16]), encoding="utf-8"
    )
    (folder / "reverse_text.py").write_text(REVERSE)


REVERSE = """
import verifiers as vf
from datasets import Dataset


def load_environment(**options):
    rows = [{"question": f"Reverse {n}.", "answer": str(n)[::-1]} for n in range(100, 300)]

    def right(completion, answer, **kwargs):
        return float(answer in completion[-1]["content"])

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""


def forecasts(path: Path) -> None:
    """Markets in the columns of Prophet Arena, half of them before the date that splits them."""
    names = [
        "submission_id",
        "event_ticker",
        "title",
        "snapshot_time",
        "close_time",
        "market_outcome",
        "category",
        "markets",
        "sources",
    ]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(names)
        for i in range(64):
            month = 8 if i % 2 else 11
            times = [f"2025-{month:02d}-{day:02d}T00:00:00Z" for day in (1, 9)]
            sources = json.dumps([{"title": "a source", "summary": "it is likely", "ranking": 1}])
            outcome = json.dumps({"yes": i % 3 % 2})
            rows.writerow([f"s{i}", f"E{i}", f"event {i}", *times, outcome, "Sports", json.dumps(["yes"]), sources])


# -- a server and the recipes ------------------------------------------------------------------------------------------


def long_starter(directory: Path) -> Path:
    """The starter with room for long prompts: what it says there is nonsense, as no position so far was trained."""
    shutil.copytree(STARTER_DIR, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    tokenizer = directory / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": CONTEXT}))
    return directory


def run(recipe: Recipe, python: Path, folder: Path, url: str, *, seconds: float) -> Result:
    """One recipe to its end."""
    if recipe.why:
        return Result(recipe.name, recipe.shown, None, recipe.why)
    log = folder / "logs" / f"{recipe.name}-{time.monotonic_ns()}"
    options = dict(recipe.options)
    if recipe.model:
        options["model_name"] = SERVED
    if recipe.log:
        options[recipe.log] = str(log)
    env = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    env |= {"TINKER_COOKBOOK_RUNS_DIR": str(log), "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", f"tinker_cookbook.recipes.{recipe.name}", *(f"{k}={v}" for k, v in options.items())]
    began = time.monotonic()
    try:
        ran = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | env,
            input=recipe.stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        words, ended = ran.stdout + ran.stderr, ran.returncode == 0
    except subprocess.TimeoutExpired as late:
        words, ended = f"{late.stderr!r}\nno end within {seconds:.0f} s", False
    log.parent.mkdir(exist_ok=True)
    Path(f"{log}.txt").write_text(" ".join(command) + "\n" + words)
    rows = metrics_of(log)
    passed = ended and bool(rows or not recipe.steps)
    last = next((line for line in reversed(words.splitlines()) if line.strip()), "")
    text = "to its end" + is_uniform(rows) * UNIFORM if passed else last[:200]
    return Result(recipe.name, recipe.shown, passed, text, time.monotonic() - began)


def metrics_of(log: Path) -> list[dict[str, Any]]:
    """What a recipe wrote of its steps."""
    files = sorted(log.rglob("metrics.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def is_uniform(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing had a gradient, as where all rewards of each group are alike."""
    norms = [row["grad_norm:mean"] for row in rows if "grad_norm:mean" in row]
    return any("env/all/reward/total" in row or "reward/total" in row for row in rows) and not any(norms)


def run_all(recipes: Sequence[Recipe], python: Path, place: Path, *, seconds: float, jobs: int) -> Iterator[Result]:
    found = "import tinker_cookbook; print(tinker_cookbook.__path__[0])"
    cookbook = Path(subprocess.run([python, "-c", found], capture_output=True, text=True, check=True).stdout.strip())
    folder, port = place / "folder", free_port()
    folder.mkdir()
    served, second = long_starter(place / "served"), long_starter(place / "second")
    stand_ins(folder, cookbook, served)
    command = [sys.executable, "-m", "groupwise", "serve", str(served), "--tinker", "--port", str(port)]
    command += ["--served-model-name", SERVED, "--dtype", "float32", "--state-dir", str(place / "state")]
    for setting in (
        "tinker_stable_reinforce=cispo",
        f"tinker_other_models={json.dumps(dict.fromkeys(SECOND, str(second)))}",
        "min_free_bytes=0",
        "tinker_idle_s=60",
    ):
        command += ["--set", setting]
    with process(command, f"http://127.0.0.1:{port}", ready="/api/v1/healthz", log=place / "server.log"):
        one = partial(run, python=python, folder=folder, url=f"http://127.0.0.1:{port}", seconds=seconds)
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, recipes)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result], versions: str) -> str:
    words = {True: "runs", False: "**fails**", None: "not run"}
    rows = [
        f"| `{each.name}` | {each.shown} | {words[each.passed]}: {each.text} |"
        if each.passed is not True
        else f"| `{each.name}` | {each.shown} | {each.text} |"
        for each in results
    ]
    return "\n".join([f"With {versions}:", "", "| recipe | what was run | |", "|---|---|---|", *rows])


def write(results: Sequence[Result], versions: str) -> None:
    """The table into the page, between its marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(results, versions)}\n{END}{after}", encoding="utf-8")


def versions_of(python: Path) -> str:
    code = (
        "import platform; from importlib.metadata import version as v; print('tinker-cookbook', "
        "v('tinker-cookbook') + ',', 'tinker', v('tinker'), 'and Python', platform.python_version())"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes whose names begin so; default: all")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="has tinker-cookbook")
    parser.add_argument("--seconds", type=float, default=300, help="longest that one may take")
    parser.add_argument("--jobs", type=int, default=1, help="recipes at once, on the one server")
    parser.add_argument("--place", type=Path, help="a new directory to keep, with logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the results as JSON")
    parser.add_argument("--of", type=Path, nargs="+", help="run nothing: read these results of earlier calls")
    parser.add_argument("--write", action="store_true", help="put the table into docs/tinker.md")
    args = parser.parse_args()
    if args.of:
        results = in_order([Result(**each) for file in args.of for each in json.loads(file.read_text())])
    else:
        results = measure(args)
    if args.write:
        write(results, versions_of(args.python))
    print(table(results, versions_of(args.python)))
    sys.exit(any(each.passed is False for each in results))


def in_order(results: Sequence[Result]) -> list[Result]:
    """Those of several calls, the last of each, as `RECIPES` has them, and what there is no result of."""
    last = {(each.name, each.shown): each for each in results}
    return [
        last.get((each.name, each.shown)) or Result(each.name, each.shown, None, each.why or NONE) for each in RECIPES
    ]


def measure(args: argparse.Namespace) -> list[Result]:
    chosen = [each for each in RECIPES if not args.names or each.name.startswith(tuple(args.names))]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        place = args.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        for result in run_all(chosen, args.python, place, seconds=args.seconds, jobs=args.jobs):
            console.print(f"{result.name} ({result.shown}): {result.passed} {result.text}, {result.seconds:.0f} s")
            results.append(result)
            if args.json:
                args.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    return results


if __name__ == "__main__":
    main()
