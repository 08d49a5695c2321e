"""The Python of notebooks: IPython's own lines are passed over, and nothing else is."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from groupwise.bridges.trl.notebook import python_of
from groupwise.errors import ConfigError
from groupwise.run.config_file import read_run

TRAIN = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from scores import exact
dataset = load_dataset("json", data_files="rows.jsonl", split="train")
args = GRPOConfig(num_generations=4, per_device_train_batch_size=8, max_completion_length=8, max_steps=1)
trainer = GRPOTrainer(model="starter", reward_funcs=[exact], args=args, train_dataset=dataset)
"""


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": each.splitlines(keepends=True)} for each in cells]})


def python(*cells: str) -> str:
    return python_of(notebook(*cells), source="a.ipynb")


@pytest.mark.parametrize(
    ("cell", "left"),
    [
        ("if colab:\n    !pip install trl\nelse:\n    pass\n", "if colab:\n    pass\nelse:\n    pass"),
        (
            "try:\n    import trl\nexcept ImportError:\n    %pip install trl\n",
            "try:\n    import trl\nexcept ImportError:\n    pass",
        ),
        ("if colab: !pip install trl\n", "if colab: pass"),
        ("!pip install \\\n    trl \\\n    peft\nx = 1\n", "pass\n\n\nx = 1"),
        ("files = !ls\n", "files = get_ipython()"),
        ("seconds = %time 3\n", "seconds = 3"),
        ("%time trainer.train()\n", "trainer.train()"),
        ("os.getcwd?\nif a:\n    a??\n?a\n", "pass\nif a:\n    pass\npass"),
        ("#@title Install\n\n%%bash\npip install trl && echo 'don't\n", "\n\n\n"),
        ("%%capture\nx = 1\n", "\nx = 1"),
        ("%%capture out\n!pip install trl\n", "\npass"),
        ("!echo don't\nx = 'a'\n", "pass\nx = 'a'"),
        ("pip install -q trl\ncd /content\n", "pass\npass"),
        ("for x in y: %ls\n", "for x in y: pass"),
        ("%matplotlib inline\n", "pass"),
    ],
)
def test_what_only_ipython_understands_does_nothing(cell: str, left: str) -> None:
    assert python(cell) == left
    ast.parse(left)


@pytest.mark.parametrize(
    "cell",
    [
        'text = """\n!pip install\n%magic\nwhat?\n"""\n',
        "x = (a\n    % b)\n",
        "x %= 3\nx = y != z\nassert 'really?'\n",
        "f'{x:%d}' % y\n",
        "d = {'a':\n  '!b'}\n",
        "x = pip if y else ls\nls = [pip]\n",
        "x = 1 \\\n    % 2\n",
        "def f(a: int) -> int: return a  # why?\n",
        "x = r'\\'\ny = 'it\\'s !'\n",
    ],
)
def test_python_stays_as_it_is(cell: str) -> None:
    assert python(cell) == cell.removesuffix("\n")


def test_every_line_stays_on_its_line() -> None:
    cells = ["!pip install \\\n trl\n", "%%bash\nls\nls", "", 'x = """\na\n"""', "y?"]
    text = python(*cells)
    assert text.count("\n") + 1 == sum(max(1, len(each.splitlines())) for each in cells)
    assert text.splitlines()[6] == 'x = """'


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no JSON", '{"cells": [{}]}', '{"cells": [{"cell_type": "code", "source": 5}]}']
)
def test_what_is_no_notebook_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        python_of(text, source="a.ipynb")


@pytest.mark.parametrize(
    "first", ["if colab:\n    !pip install trl\n", "#@title I\n%%bash\npip install trl\n", "x = !ls\n"]
)
def test_a_notebook_is_the_run_that_its_python_is(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.ipynb").write_text(notebook(first, TRAIN))
    (tmp_path / "a.py").write_text(TRAIN)
    assert read_run(tmp_path / "a.ipynb").runnable() == read_run(tmp_path / "a.py").runnable()
