"""Every module, class and function of ours that a docstring or a comment names in backticks exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from groupwise.config.run import RunConfig
from groupwise.config.serve import ServeConfig
from groupwise.config.yaml import key_paths
from sources import SOURCE, bound, nodes_of, tree_of

FILES = sorted(SOURCE.rglob("*.py"))
DOTTED = re.compile(r"`+(?:groupwise\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`+")
PRIVATE = re.compile(r"`+(_[A-Z]\w*)`+")
OTHERS = ("datasets.Dataset", "textarena.Agent", "vllm.LLM")  # what other packages with names as ours have


pytestmark = pytest.mark.xdist_group("sources")  # all of them are read once a process


@pytest.fixture(scope="module", autouse=True)
def afterwards() -> Iterator[None]:
    """Forget a million nodes, through which each collection of garbage would look until the process ends: this is the
    last file that needs them."""
    yield
    for each in (tree_of, nodes_of, modules, everything, exists):
        each.cache_clear()


@cache
def modules() -> dict[str, frozenset[str]]:
    """Module -> every name that is bound anywhere in it."""
    found = {}
    for path in FILES:
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = frozenset(each for node in nodes_of(path) for each in bound(node))
    return found


@cache
def everything() -> frozenset[str]:
    return frozenset[str]().union(*modules().values())


@cache
def keys() -> frozenset[str]:
    """The dotted keys of configurations, and their last parts: `train.devices` is no module."""
    whole = [".".join(map(str, keys)) for config in (RunConfig, ServeConfig) for keys in key_paths(config)]
    return frozenset(".".join(key.split(".")[at:]) for key in whole for at in range(key.count(".") + 1))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a file, with their lines."""
    text = path.read_text("utf-8")
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    if re.search(r"#.*`", text):  # else no comment names anything: reading tokens takes longer than all else
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


@cache
def exists(name: str) -> bool:
    """Whether a dotted name is a module, or is bound in the module that it begins with; True of what is not ours."""
    parts, rooms = name.split("."), {module.partition(".")[0] for module in modules()}
    for end in range(len(parts), 0, -1):
        of = ".".join(parts[:end])
        if meant := [module for module in modules() if module == of or module.endswith(f".{of}")]:
            rest = parts[end:]
            if not rest or any(rest[0] in modules()[each] for each in meant):
                return True
            classes = any(part[0].isupper() for part in rest)
            return not (classes or (len(parts) > 2 and parts[0] in rooms)) or name in keys()
    return True


def test_what_is_named_exists() -> None:
    gone = list[str]()
    for path in FILES:
        for line, text in prose(path):
            missing = [name for name in DOTTED.findall(text) if not (exists(name) or name.startswith(OTHERS))]
            missing += [name for name in PRIVATE.findall(text) if name not in everything()]
            gone += [f"{path.relative_to(SOURCE)}:{line}: there is no {name}" for name in missing]
    assert gone == []


def test_the_check_finds_what_is_not_there() -> None:
    assert exists("algo.distillation.soft_divergence") and exists("sampler.Sampler.sample") and exists("numpy.array")
    assert not exists("algo.distillation.soft_divergense") and not exists("sampler.Sampling")
