"""The rules that keep the house small and its map true."""

import ast
import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from groupwise.config.loss import loss_of
from groupwise.config.run import RunConfig, load_config, parse_config
from groupwise.config.yaml import key_paths
from sources import SOURCE, bound, nodes_of, tree_of

ROOT = Path(__file__).parent.parent
TEMPLATES = SOURCE / "cli" / "templates"  # files that `groupwise init` writes for users: no modules of ours
MODULES = sorted(path for path in SOURCE.rglob("*.py") if TEMPLATES not in path.parents)
SCRIPTS = sorted(p for folder in ("benchmarks", "tools", "examples", "docs") for p in (ROOT / folder).rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGURED = {".".join(path) for path in key_paths(RunConfig)}


reads_all = pytest.mark.xdist_group("sources")  # once a process


@cache
def texts() -> dict[str, str]:
    """Every module's text, by its place in the package."""
    return {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in MODULES}


def test_a_file_has_800_lines_at_most() -> None:
    assert {name: text.count("\n") for name, text in texts().items() if text.count("\n") > 800} == {}


@reads_all
def test_a_function_has_100_lines_at_most() -> None:
    too_long = {
        (path.name, node.name): node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno >= 100
    }
    assert too_long == {}


def test_a_file_has_one_head() -> None:
    """What needs a head of its own is a file of its own."""
    assert [name for name, text in texts().items() if re.search(r"(?m)^# -{60,}\n# \S", text)] == []


@pytest.fixture(scope="module")
def house() -> ModuleType:
    """`tools/house.py`, imported."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    assert spec is not None and spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    return house


@pytest.fixture(scope="module")
def counted(house: ModuleType) -> dict[str, set[str]]:
    """The counts of `tools/house.py`, each as the places of what is counted."""
    trees = {house.module_of(path): tree_of(path) for path in SOURCE.rglob("*.py")}
    return house.counted(trees)


@reads_all
@pytest.mark.parametrize(
    "what", ["core imports bridges", "isinstance on kinds", "trained elsewhere", "options nothing sets"]
)
def test_there_is_none_of_it(counted: dict[str, set[str]], what: str) -> None:
    """An option is there only if a configuration, an example or a page names it; a bridge is found, never imported."""
    assert not counted[what]


@reads_all
def test_docstrings_say_what_a_thing_is_or_does(counted: dict[str, set[str]]) -> None:
    """A function's begins with a verb: a noun alone ("The file.") can be completed only by its author. That of a class
    or a module names a thing or what it does: a question ("What is kept.") can be answered only by its author."""
    assert len(counted["docstring fragments"]) < 10, sorted(counted["docstring fragments"])


def test_a_fragment_is_found_in_functions_classes_and_modules(house: ModuleType) -> None:
    tree = ast.parse(
        '''"""What is kept."""
class Kept:
    """Whose it is."""
    def of(self): """The file."""
    @property
    def size(self): """Of the file."""
class Bound:
    """The bounds of a tenant."""
def read(): """Return the file."""
'''
    )
    assert list(house.fragments("store.kept", tree)) == [
        "store.kept:1 (the module)",
        "store.kept:2 Kept",
        "store.kept:4 of",
    ]


def test_no_module_is_a_drawer() -> None:
    assert not {p.stem for p in MODULES} & {"utils", "helpers", "common", "manager", "misc"}


def test_the_package_has_twelve_rooms_eight_files_and_bridges() -> None:
    """What is new goes into a room, and what is in a room into a file that a reader would look for by name."""
    tops = {p.relative_to(SOURCE).parts[0] for p in MODULES} - {"__init__.py", "__main__.py"}
    assert tops == {
        *(
            "types.py",
            "recorded.py",
            "errors.py",
            "platform.py",
            "pictures.py",
            "sampler.py",
            "seeds.py",
            "extensions.py",
            "config",
            "algo",
            "rewards",
            "tasks",
            "model",
            "store",
            "engine",
            "train",
            "run",
        ),
        *("sdk", "server", "cli", "bridges"),
    }
    assert max(len(p.relative_to(SOURCE).parts) for p in MODULES) <= 3


@reads_all
def test_every_module_begins_with_what_it_is() -> None:
    silent = [p.name for p in MODULES if not ast.get_docstring(tree_of(p))]
    assert not silent


ROOMS = ("algo", "bridges", "cli", "engine", "model", "rewards", "run", "sdk", "server", "store", "tasks", "train")


def test_what_docstrings_and_comments_name_is_there() -> None:
    """`room.module.name` and `module.py`, so that a reader who follows them arrives."""
    gone, files = set[tuple[str, str]](), [f"/{p.relative_to(ROOT).as_posix()}" for p in [*MODULES, *SCRIPTS]]
    for place, text in texts().items():
        dotted = re.findall(r"`(?:groupwise\.)?([a-z_]+\.[A-Za-z_.]+)`", text)
        gone |= {(place, each) for each in dotted if not is_there(each)}
        named = re.findall(r"`([\w/]+\.py)`", text)
        gone |= {(place, each) for each in named if not any(file.endswith(f"/{each}") for file in files)}
    assert gone == set()


@cache
def is_there(dotted: str) -> bool:
    """Whether a dotted name that begins with a room leads to a module, or to something that a module defines."""
    first, *rest = dotted.split(".")
    if first not in ROOMS:
        return True
    place = SOURCE / first
    while rest and (place / rest[0]).is_dir():
        place = place / rest.pop(0)
    if not rest or dotted in CONFIGURED:
        return True
    module = place / f"{rest[0]}.py"
    if not module.exists():
        return f"{rest[0]} = " in (place / "__init__.py").read_text(encoding="utf-8")
    return len(rest) == 1 or bool(
        re.search(rf"^(class|def|async def) {rest[1]}\b|^{rest[1]}\b.* =", module.read_text(), re.M)
    )


def neighbour(path: Path, module: str) -> Path | None:
    """Return the file of a module that a script imports from its folder, those of other scripts, or the tests."""
    folders = (path.parent, *(ROOT / each for each in ("benchmarks", "tools", "tests")))
    files = ((folder / Path(*module.split("."))).with_suffix(".py") for folder in folders)
    return next((file for file in files if file.exists()), None)


@cache
def names_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in bound(node))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_is_there(path: Path) -> None:
    """Benchmarks, tools and examples are run by hand, and are not to find out then that a name has gone."""
    tree, modules, gone = ast.parse(path.read_text("utf-8")), dict[str, object](), list[str]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if not node.module.startswith("groupwise"):
            near = neighbour(path, node.module)
            gone += [f"{node.module}.{each.name}" for each in node.names if near and each.name not in names_of(near)]
            continue
        source = importlib.import_module(node.module)
        for each in node.names:
            dotted = f"{node.module}.{each.name}"
            if hasattr(source, "__path__") and importlib.util.find_spec(dotted) is not None:
                modules[each.asname or each.name] = importlib.import_module(dotted)
            elif not hasattr(source, each.name):
                gone.append(dotted)
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    of_modules = [(n.value.id, n.attr) for n in used if isinstance(n.value, ast.Name) and n.value.id in modules]
    gone += [f"{module}.{attribute}" for module, attribute in of_modules if not hasattr(modules[module], attribute)]
    assert not gone


def test_the_readme_is_read_in_one_sitting() -> None:
    assert README.count("\n") <= 220


def test_the_readme_has_a_line_for_each_room() -> None:
    block = README.split("src/groupwise/\n", 1)[1].split("```", 1)[0]
    lines = dict(re.findall(r"^  ([\w/.]+?)/? {2,}(\S.*)$", block, re.MULTILINE))
    tops = {p.relative_to(SOURCE).parts[0] for p in MODULES} - {"__init__.py", "__main__.py"}
    assert set(lines) == tops and all(len(what) > 10 for what in lines.values())


def test_the_readme_example_is_a_valid_run() -> None:
    import ruamel.yaml

    example = next(block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "rewards:" in block)
    config = parse_config(ruamel.yaml.YAML(typ="safe").load(example))
    assert loss_of(config.algo, max_tokens=config.rollout.max_tokens).surrogate == "clip"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    config = load_config(path)
    loss_of(config.algo, max_tokens=config.rollout.max_tokens)


@pytest.mark.xdist_group("a group")
def test_a_group_of_tests_is_one_to_xdist(request: pytest.FixtureRequest) -> None:
    """Otherwise each process of the suite starts its own of what a group shares."""
    grouped = request.config.getoption("loadgroup", False)
    assert request.node.nodeid.endswith("@a group") == grouped
