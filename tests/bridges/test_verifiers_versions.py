"""Without a version of `verifiers` that the adapter knows, what it says names the versions that it does."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from groupwise.bridges.verifiers.before_0_4 import VerifiersAgent
from groupwise.bridges.verifiers.tasksets import TasksetAgent
from groupwise.errors import ConfigError
from wording import raises


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="it is installed")
def test_none_is_installed():
    with raises(ConfigError):
        VerifiersAgent("wordle")
    with raises(ConfigError):
        TasksetAgent("wordle-v1")


@pytest.mark.parametrize("version", ["0.3.1", "0.5.0"])
def test_tasksets_of_a_version_that_is_not_known(tmp_path, monkeypatch, version):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    try:
        with raises(ConfigError):
            TasksetAgent("wordle-v1")
    finally:
        sys.modules.pop("verifiers", None)


@pytest.mark.parametrize("environment", ["wordle", "my_environments:load_environment"])
def test_one_without_such_environments(tmp_path, monkeypatch, environment):
    """As 0.4 is: a package that has a version and no `load_environment`."""
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text('__version__ = "0.4.0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    try:
        with raises(ConfigError):
            VerifiersAgent(environment)
    finally:
        sys.modules.pop("verifiers", None)
