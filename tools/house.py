"""How the package is built: sizes, layers, names, and how many modules a prompt and a posted job pass.

    python tools/house.py                 # from the sources alone, in a second
    python tools/house.py --walks         # also runs one step and one job on the starter (about two minutes)

With `--why` it lists what it has counted, so that each number can be looked up: second heads, imports of bridges by the
core, kinds of environments that `run` asks for by `isinstance`, optimizer steps and learner states that are made
outside `train`, circles of imports that count those inside functions, options that nothing in the repository sets,
docstrings of functions that begin with no verb, and of classes and modules that begin with a question word.

A *layer* is a place in the longest chain of imports made at import time, cycles counted as one. A *walk* is counted by
running it: the modules of the package in which any function was called, in every process that took part,

    prompt   from the loop's first line to the end of a run of one step, rewards in their own process
    job      from POST /v1/train/grpo until the answer comes from the new version: the server and its worker

which says more than reading does, and counts more: what records, reports and checks is in it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "groupwise"

RECORDER = """
import os, signal, sys, threading

seen = {}
start = os.environ.get("WALK_FROM")
started = not start


def profile(frame, event, arg):
    global started
    if event != "call":
        return
    code = frame.f_code
    at = code.co_filename.find("/src/groupwise/")
    if at < 0:
        return
    name = code.co_filename[at + len("/src/groupwise/"):]
    if not started:
        if f"{name}:{code.co_name}" != start:
            return
        started = True
    seen.setdefault(name, None)


def write():
    with open(os.path.join(os.environ["WALK_TO"], f"{os.getpid()}"), "w") as file:
        file.write("\\n".join(seen))


def again(*_):
    seen.clear()


def save(*_):
    write()


if "WALK_TO" in os.environ and "groupwise" in " ".join(sys.orig_argv):
    import atexit
    atexit.register(write)
    signal.signal(signal.SIGUSR1, again)
    signal.signal(signal.SIGUSR2, save)
    threading.setprofile(profile)
    sys.setprofile(profile)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", action="store_true", help="also run one step and one job, and count")
    parser.add_argument("--names", action="store_true", help="list what is defined more than once")
    parser.add_argument("--why", action="store_true", help="list what the counts below the line are of")
    options = parser.parse_args()
    trees = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    sizes = {module_of(path): path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    edges = {module: imports_of(module, tree, set(trees)) for module, tree in trees.items()}

    importers = Counter(target for targets in edges.values() for target in targets)
    small_single = [m for m in trees if importers[m] == 1 and sizes[m] < 150 and not m.endswith("__init__")]
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    twice = {name: count for name, count in classes.items() if count > 1}
    entries = [p for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.rglob("*.py")))]
    cycles = [c for c in components(edges) if len(c) > 1]

    print(f"modules               {len(trees)}")
    print(f"lines                 {sum(sizes.values()):,}")
    print(f"entries at the top    {len(entries)}")
    print(f"import layers         {layers(edges)}")
    print(f"import cycles         {len(cycles)}  {[sorted(cycle) for cycle in cycles] if cycles else ''}")
    print(f"one importer, < 150   {len(small_single)}")
    print(f"class names twice     {len(twice)}")
    if options.names:
        print("  " + ", ".join(f"{name} x{count}" for name, count in sorted(twice.items())))
        print("  single importer: " + ", ".join(sorted(small_single)))
    print("---")
    bridges = sum(size for module, size in sizes.items() if module.startswith("bridges"))
    print(f"lines of the core     {sum(sizes.values()) - bridges:,}; of the bridges {bridges:,}")
    for name, found in counted(trees).items():
        print(f"{name:<22}{len(found)}")
        if options.why:
            print("".join(f"    {each}\n" for each in sorted(found)), end="")
    if options.walks:
        print(f"walk of a prompt      {len(walk_of_a_prompt())} modules")
        server, worker = walk_of_a_job()
        print(f"walk of a job         {len(server | worker)} modules: {len(server)} server, {len(worker)} worker")


KINDS = {"EnvFactory", "Agent", "Harness", "LegacyEnv", "ThreeMethods", "RolloutFunc"}
FRAGMENTS = set(  # first words of docstrings that are no verbs
    "The What A An Whether How Which Where Why One Those Every Each All Of As For Within From With In".split()  # noqa: SIM905
)
QUESTIONS = set(  # first words of docstrings of classes and modules that name neither a thing nor what it does
    "What How Which Who Whose Where Why Whether Of Something Some".split()  # noqa: SIM905
)
SETTERS = (
    "configs",
    "docs",
    "examples",
    "benchmarks",
    "src/groupwise/cli/templates",
    "README.md",
    "tests/gpu",
    "tools",
)


def counted(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return what the house is measured by, by name: each a set of places."""
    core = {module: tree for module, tree in trees.items() if not module.startswith("bridges")}
    late = {module: late_imports(module, tree, set(trees)) for module, tree in trees.items()}
    found = {
        "second heads": {m for m in trees if re.search(r"(?m)^# -{60,}\n# \S", source_of(m))},
        "core imports bridges": {m for m in core if any(target.startswith("bridges") for target in late[m])},
        "isinstance on kinds": {
            f"{module}:{node.lineno}"
            for module, tree in core.items()
            if module.startswith("run.")
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == "isinstance"
            and KINDS & set(re.findall(r"\w+", ast.unparse(node.args[1])))
        },
        "trained elsewhere": {
            f"{module}:{node.lineno}"
            for module, tree in trees.items()
            if not module.startswith("train.")
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("optim_step", "save_state", "restore")
            and "learner" in ast.unparse(node)
        },
        "options nothing sets": unset_options(),
        "docstring fragments": {each for module, tree in trees.items() for each in fragments(module, tree)},
    }
    for room in ("server", "train"):
        inside = {m: {t for t in late[m] if t.startswith(f"{room}.")} for m in late if m.startswith(f"{room}.")}
        circles = [circle for circle in components(inside) if len(circle) > 1]
        found[f"in circles of {room}"] = {module for circle in circles for module in circle}
    return found


def fragments(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield line and name of each docstring in a module that begins with one of `FRAGMENTS` or `QUESTIONS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words, told = FRAGMENTS, not module.startswith("cli.templates")
            told = told and not any("property" in ast.unparse(each) for each in node.decorator_list)
        elif isinstance(node, ast.ClassDef | ast.Module):
            words, told = QUESTIONS, True
        else:
            continue
        if told and (ast.get_docstring(node) or "Say").split()[0] in words:
            yield f"{module}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '(the module)')}"


def unset_options() -> set[str]:
    """Return the keys of a run and of a server that no configuration, example, template, benchmark or page names."""
    said = ""
    for place in SETTERS:
        path = ROOT / place
        files = [path] if path.is_file() else path.rglob("*")
        said += "".join(
            each.read_text(encoding="utf-8")
            for each in files
            if each.suffix in (".md", ".yaml", ".py", ".sh", ".toml", ".ipynb") and each.name != "configuration.md"
        )
    words = set(re.findall(r"\w+", said))
    options = set[str]()
    for name in (
        "run",
        "serve",
        "algo",
        "data",
        "evaluation",
        "harness",
        "launch",
        "learn",
        "lora",
        "teacher",
        "world",
    ):
        tree = ast.parse((PACKAGE / "config" / f"{name}.py").read_text(encoding="utf-8"))
        for section in (each for each in tree.body if isinstance(each, ast.ClassDef)):
            fields = [each.target for each in section.body if isinstance(each, ast.AnnAssign)]
            names = {each.id for each in fields if isinstance(each, ast.Name) and not each.id.startswith("_")}
            options |= {f"{section.name}.{name}" for name in names - words}
    return options


def source_of(module: str) -> str:
    return (PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


def late_imports(module: str, tree: ast.Module, known: set[str]) -> set[str]:
    """Return the package's modules that `module` imports at any time, but for those that only types need."""
    found = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        waiting += ast.iter_child_nodes(node)
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        short = {name.removeprefix("groupwise.") for name in names if name.startswith("groupwise.")}
        found |= (short & known) - {module}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports_of(module: str, tree: ast.Module, known: set[str]) -> set[str]:
    """The package's modules that `module` imports when it is imported itself."""
    found = set()
    for node in import_time(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            short = name.removeprefix("groupwise.")
            if name.startswith("groupwise.") and short != module and short in known:
                found.add(short)
    return found


def import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run at import: not in functions, not under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from import_time(node)


def components(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = set()
            while True:
                component.add(last := stack.pop())
                if last == node:
                    break
            found.append(component)

    for node in edges:
        if node not in index:
            visit(node)
    return found


def layers(edges: dict[str, set[str]]) -> int:
    """The longest chain of imports."""
    depth: dict[int, int] = {}
    found = components(edges)
    place = {node: number for number, component in enumerate(found) for node in component}
    for number, component in enumerate(found):  # Tarjan gives them bottom up
        below = {place[target] for node in component for target in edges[node]} - {number}
        depth[number] = 1 + max((depth[each] for each in below), default=0)
    return max(depth.values())


def recorded(directory: Path) -> dict[int, set[str]]:
    return {int(file.name): set(filter(None, file.read_text().split("\n"))) for file in directory.iterdir()}


def environment(directory: Path, **more: str) -> dict[str, str]:
    hook = directory / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(RECORDER)
    (directory / "to").mkdir()
    return {**os.environ, "PYTHONPATH": str(hook), "WALK_TO": str(directory / "to"), **more}


def walk_of_a_prompt() -> set[str]:
    loop = next(path for path in PACKAGE.rglob("loop.py"))
    with tempfile.TemporaryDirectory() as name:
        env = environment(Path(name), WALK_FROM=f"{loop.relative_to(PACKAGE)}:train")
        run = [sys.executable, "-m", "groupwise", "run", str(ROOT / "configs" / "arithmetic.yaml")]
        overrides = ["train.steps=1", "eval=null", f"run_dir={name}/run", "rollout.prompts_per_step=4"]
        subprocess.run([*run, *overrides], env=env, check=True, stdout=subprocess.DEVNULL, cwd=name)
        return set().union(*recorded(Path(name) / "to").values())


def walk_of_a_job() -> tuple[set[str], set[str]]:
    with tempfile.TemporaryDirectory() as name:
        port = 18437
        serve = [sys.executable, "-m", "groupwise", "serve", "--port", str(port), "--state-dir", f"{name}/state"]
        server = subprocess.Popen(serve, env=environment(Path(name)), stdout=subprocess.DEVNULL, cwd=name)
        url = f"http://127.0.0.1:{port}"

        def call(path: str, body: object = None) -> dict:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        def wait(ready: object) -> None:
            deadline = time.monotonic() + 180
            while not ready():  # type: ignore[operator]
                if time.monotonic() > deadline:
                    raise TimeoutError("the server did not get there within 180 s")
                time.sleep(0.2)

        def up() -> bool:
            try:
                return bool(call("/ready"))
            except OSError:
                return False

        try:
            wait(up)
            time.sleep(5)  # the worker's imports
            server.send_signal(signal.SIGUSR1)
            ask = [{"role": "user", "content": "What is 47 + 138?"}]
            completions = [{"text": "185", "reward": 1.0}, {"text": "184", "reward": 0.0}]
            job = call("/v1/train/grpo", {"groups": [{"messages": ask, "completions": completions}]})["job_id"]
            wait(lambda: call(f"/v1/train/status/{job}")["state"] in {"completed", "failed"})
            call("/v1/chat/completions", {"messages": ask, "max_tokens": 4})
            server.send_signal(signal.SIGUSR2)
            time.sleep(1)
        finally:
            server.terminate()
            server.wait(60)
        seen = recorded(Path(name) / "to")
        walked = seen.pop(server.pid)
        return walked, set().union(*seen.values())


if __name__ == "__main__":
    main()
