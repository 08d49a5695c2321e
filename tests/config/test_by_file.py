import math
import sys
from pathlib import Path

import pytest

from groupwise.config.load import load_object
from groupwise.errors import LoadError
from wording import raises


@pytest.fixture
def folder(tmp_path, request):
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_functions_and_classes_of_installed_modules():
    assert load_object("math:sqrt") is math.sqrt
    assert load_object("pathlib.Path") is Path
    assert load_object("pathlib:Path.home")() == Path.home()


def test_a_module_beside_the_configuration(folder):
    (folder / "beside_one.py").write_text("from beside_two import VALUE\ndef f(): return VALUE\n")
    (folder / "beside_two.py").write_text("VALUE = 7\n")
    assert load_object("beside_one:f", folder=folder)() == 7
    assert str(folder) not in sys.path


def test_a_package_beside_the_configuration(folder):
    (folder / "beside_package").mkdir()
    (folder / "beside_package" / "__init__.py").touch()
    (folder / "beside_package" / "inner.py").write_text("def f(): return 8\n")
    assert load_object("beside_package.inner:f", folder=folder)() == 8
    assert load_object("beside_package.inner.f", folder=folder)() == 8


def test_a_module_named_like_an_imported_one_wins_for_that_call_only(folder):
    installed = sys.modules["fractions"] if "fractions" in sys.modules else __import__("fractions")
    (folder / "fractions.py").write_text("def f(): return 'mine'\n")
    assert load_object("fractions:f", folder=folder)() == "mine"
    assert sys.modules["fractions"] is installed


def test_two_folders_with_modules_of_one_name(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "same_name.py").write_text(f"def f(): return {name!r}\n")
    assert load_object("same_name:f", folder=folder / "a")() == "a"
    assert load_object("same_name:f", folder=folder / "b")() == "b"
    assert load_object("same_name:f", folder=folder / "a")() == "a"


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "exact",
        "my rewards:exact",
        "my_rewards.py",
        "no/such.py:exact",
        "math.py:a b",
        "no_such_module_here:f",
        "os.no_such_module:f",
        "math:sqrtt",
        "math:pi",
    ],
)
def test_references_that_do_not_load(reference):
    with raises(LoadError):
        load_object(reference)


def test_a_file_by_its_path(folder):
    """Wherever it is, however it is named, and whatever module of its name was imported before; it imports what is
    beside it."""
    for place, value in ((".", 1), ("deep", 2), ("a folder", 3)):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "scores.py").write_text(f"from beside_{value} import VALUE\ndef f(): return VALUE\n")
        (folder / place / f"beside_{value}.py").write_text(f"VALUE = {value}\n")
    (folder / "my-scores.py").write_text("class A:\n    @staticmethod\n    def f(): return 4\n")
    for _ in range(2):
        assert load_object("deep/scores.py:f", folder=folder)() == 2
        assert load_object("scores.py:f", folder=folder)() == 1
        assert load_object("scores:f", folder=folder)() == 1
        assert load_object("../a folder/scores.py:f", folder=folder / "deep")() == 3
        assert load_object(f"{folder}/deep/scores.py:f")() == 2
    assert load_object("my-scores.py:A.f", folder=folder)() == 4
    with raises(LoadError):
        load_object("deep/score.py:f", folder=folder)
    with raises(LoadError):
        load_object("scores.py:g", folder=folder)


def test_a_misspelt_module_is_suggested(folder):
    (folder / "my_rewards.py").touch()
    with raises(LoadError):
        load_object("my_reward:f", folder=folder)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\ndef f(:\n",
        "x = 1\nimport not_installed_anywhere\n",
        "\n\n1 / 0\n",
        "import sys\nsys.exit(4)\n",
        "x = 1\n",
    ],
)
def test_modules_that_fail_to_import(folder, text):
    (folder / "broken.py").write_text(text)
    with raises(LoadError):
        load_object("broken:f", folder=folder)
    assert str(folder) not in sys.path
