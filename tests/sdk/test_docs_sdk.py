"""docs/sdk.md is true of the code: its blocks, names, tables and numbers."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import groupwise
from groupwise.sdk import losses
from groupwise.sdk.config import LoopConfig, WeightSyncConfig
from groupwise.sdk.infra import FULL
from groupwise.sdk.profiles import PROFILES
from groupwise.sdk.sampler import Status
from groupwise.sdk.weight_sync import KEEP

GUIDE = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_every_block_is_python_and_imports_what_there_is() -> None:
    for block in BLOCKS:
        compiled = compile(block, "sdk.md", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(compiled):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)
    assert len(BLOCKS) > 6


def test_the_configuration_in_the_guide_is_one() -> None:
    names: dict[str, object] = {}
    exec(next(block for block in BLOCKS if "LoopConfig(" in block).split("with setup_infra", 1)[0], names)
    assert isinstance(names["config"], LoopConfig)


def test_the_tables_are_the_codes() -> None:
    shown = re.findall(r"^\| `([\w-]+)` \| (\d+) GB \| .* \| ([\d,]+) \| (\d+) \|$", GUIDE, re.MULTILINE)
    table = {name: tuple(int(number.replace(",", "")) for number in numbers) for name, *numbers in shown}
    assert table == {p.name: (p.memory_gb, p.max_seq_len, p.batch_rows) for p in PROFILES.values()}
    assert set(re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE)) >= set(Status)
    within = f"({(FULL - 1) * PROFILES['cpu-small'].batch_rows} completions for `cpu-small`)"
    assert within in GUIDE and KEEP == 3 and WeightSyncConfig().dcp_save_interval == 0


def test_every_loss_that_is_named_is_there() -> None:
    assert all(f"`{name}`" in GUIDE for name in losses.BUILT_IN)
    for name in re.findall(r"`(\w+_loss)`", GUIDE):
        assert hasattr(losses, name) and hasattr(losses, f"make_{name}_fn")
    assert hasattr(groupwise, "make_grpo_loss_fn")
