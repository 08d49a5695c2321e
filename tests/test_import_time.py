"""`import groupwise` and `groupwise --help` do not wait for torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise
from wording import raises

HEAVY = "{'torch', 'transformers', 'peft', 'datasets', 'numpy'}"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code",
    [
        "import groupwise",
        "import groupwise; groupwise.Message, groupwise.Prompt, groupwise.PolicyVersion, groupwise.GroupwiseError",
        "import groupwise; groupwise.load_config, groupwise.parse_config, groupwise.RunConfig, groupwise.resolve_loss",
        "import groupwise.cli.main",
        "from typer.testing import CliRunner; from groupwise.cli.main import app; "
        "assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0",
    ],
)
def test_torch_is_not_imported(code):
    ran = python(f"{code}\nimport sys; heavy = {HEAVY} & set(sys.modules); assert not heavy, heavy")
    assert ran.returncode == 0, ran.stderr


def test_adapters_and_their_files_do_without_torch(tmp_path):
    code = f"import sys, groupwise; groupwise.AdapterStore({str(tmp_path)!r}).list(); assert 'torch' not in sys.modules"
    ran = python(code)
    assert ran.returncode == 0, ran.stderr


def test_every_public_name_is_there():
    for name in groupwise.__all__:
        assert getattr(groupwise, name) is not None, name
    assert set(groupwise.__all__) <= set(dir(groupwise))
    assert groupwise.run_loop.__module__ == "groupwise.run.loop"


def test_the_type_checker_is_told_the_same_names():
    tree = ast.parse(Path(groupwise.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    told = {alias.name: node.module for node in imports for alias in node.names}
    assert told == {name: f"groupwise.{module}" for name, module in groupwise._MODULES.items()}


def test_an_unknown_name_is_an_attribute_error():
    with raises(AttributeError):
        groupwise.nonsense  # noqa: B018
