"""Everything that only a GPU can answer, in about half an hour on one: part by part, each leaves a JSON.

    python benchmarks/gpu                              all parts, in order; what is there already is not run again
    python benchmarks/gpu --part tests --part learner  these
    python benchmarks/gpu --limit 280                  a part is stopped after so many seconds; call again to go on
    python benchmarks/gpu --table                      what is there, as markdown
    python benchmarks/gpu --smoke --device cpu         does it run? tiny sizes

    tests      tests/gpu: attention kernels, CUDA graphs, shared weights, adapters in a batch, rounding, 4 bits
    learner    tokens a second, share of the GPU's products, memory; FlexAttention beside sdpa
    profile    kernels, waiting and the device's share of a training step and of a decode step
    rollouts   beside transformers' `generate` and vLLM, with and without CUDA graphs; what publishing takes
    curve      the starter and a model of 150M parameters learn arithmetic
    memory     the estimate of a micro-batch's memory beside what it took
    step       a whole step beside TRL's trainer
    sharded    two processes on this card, each with a half of the weights (FSDP2), beside one
    job        shipped configurations, end to end, on a card as small as the one that they name; vLLM beside the learner

Nothing is downloaded: weights are drawn on the spot. The project need not be installed: `PYTHONPATH=src` will do.
Every part is a process of its own and is made of cases (`cases.py`). `--out` has a file a part; one is valid for the
code, the device and the versions that it names. Exit code 1: some case has no result, and is named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("tests", "learner", "profile", "rollouts", "curve", "memory", "step", "sharded", "job")
GO_ON = 3  # exit code of a part whose process cannot go on, but another one could: after an error of CUDA


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.work:
        return work(options)
    if options.table:
        print(table_of(options.out))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part's processes end too
    for part in options.part or PARTS:
        run_part(part, options)
    missing = [
        f"{part}: {case}: {why}" for part in options.part or PARTS for case, why in without_result(part, options)
    ]
    print(table_of(options.out))
    if missing:
        print("\nwithout a result:", *missing, sep="\n  ")
    return bool(missing)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python benchmarks/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="run this one (can be repeated); default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="FOLDER", help="where the results are: gpu/")
    parser.add_argument("--limit", type=float, default=480.0, metavar="SECONDS", help="of a part: 480")
    parser.add_argument("--device", default="cuda", help="cuda; cpu with --smoke")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--table", action="store_true", help="print what is there")
    parser.add_argument("--work", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--call", default=f"{time.time():.3f}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu" and not options.smoke:
        parser.error("--device cpu goes with --smoke: the sizes of this proof are a GPU's")
    return options


# -- the process of a part ---------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
    """Run a part's cases in this process."""
    own = [str(HERE.parent), str(HERE.parents[1] / "tools")]
    sys.path[:] = [*own, *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]
    from gpu.cases import Setting, run_cases

    return run_cases(options.work, Setting(options.device, options.smoke, options.out.resolve(), options.call))


# -- all parts ---------------------------------------------------------------------------------------------------------


def run_part(part: str, options: argparse.Namespace) -> None:
    """Run one in a process of its own, in several where one breaks, until its time is up."""
    print(f"-- {part}", flush=True)
    command = [sys.executable, str(HERE), "--work", part, "--out", str(options.out), "--device", options.device]
    command += ["--call", options.call]
    command += ["--smoke"] if options.smoke else []
    forget_running(part, options)
    ends, environment = time.monotonic() + options.limit, environment_of(options)
    while True:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            return interrupted(part, options, f"stopped at the part's limit of {options.limit:g} s", stopped=True)
        finally:
            end_all(process)
        if code in (0, 1):
            return None
        if not interrupted(part, options, f"its process ended with {code}") and code != GO_ON:
            print(f"{part} does not run: its process ended with {code}", file=sys.stderr)
            return None


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """The project on the path, also where it is not installed, and no network."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a part's process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def forget_running(part: str, options: argparse.Namespace) -> None:
    """What ran when an earlier call was ended from outside is like what was not tried."""
    found = read(part, options.out)
    if found.pop("running", None) is not None:
        write(found, options.out)


def interrupted(part: str, options: argparse.Namespace, why: str, *, stopped: bool = False) -> bool:
    """Note why the case that ran has no result; whether there was one."""
    found = read(part, options.out)
    case = found.pop("running", None)
    if case is None:
        return False
    stops = found["cases"].get(case, {}).get("stops", 0) + stopped
    found["cases"][case] = {"stops": stops} if stopped else {"error": why}
    found["cases"][case] |= {"why": why, "call": options.call}
    write(found, options.out)
    return True


# -- what is there -----------------------------------------------------------------------------------------------------


def read(part: str, out: Path) -> dict:
    path = out / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {"part": part, "about": {}, "listed": [], "cases": {}}


def write(found: dict, out: Path) -> None:
    (out / f"{found['part']}.json").write_text(json.dumps(found, indent=1) + "\n")


def without_result(part: str, options: argparse.Namespace) -> list[tuple[str, str]]:
    """The cases that have none, and why."""
    found = read(part, options.out)
    if not found["listed"]:
        return [("all", "it did not run")]
    reasons = {case: found["cases"].get(case, {"why": "not reached"}) for case in found["listed"]}
    return [(case, last_line(each["why"])) for case, each in reasons.items() if "result" not in each]


def table_of(out: Path) -> str:
    """Markdown: a table for each part that is there, with a column for whatever a case of it tells."""
    parts = []
    for part in PARTS:
        found = read(part, out)
        if not found["cases"]:
            continue
        named = found["about"]
        head = ", ".join(f"{key} {value}" for key, value in named.items() if key in ("device", "torch", "commit"))
        rows = [row for case in found["listed"] for row in rows_of(case, found["cases"].get(case, {"why": "not yet"}))]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines = [columns, ["---"] * len(columns), *([shown(row.get(c, "")) for c in columns] for row in rows)]
        parts.append(
            f"### {part}\n\n{head}{', smoke sizes' if named.get('smoke') else ''}\n\n" + "\n".join(map(line, lines))
        )
    return "\n\n".join(parts) or f"nothing is there yet in {out}"


def rows_of(case: str, entry: dict) -> list[dict]:
    if "result" not in entry:
        return [{"case": case, "note": last_line(entry["why"])}]
    result = entry["result"]
    return [{"case": case, **row} for row in result.get("rows") or [result.get("row", {})]]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def shown(value: object) -> str:
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return text if value == value else "-"
    return str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
