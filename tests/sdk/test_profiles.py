"""Profiles by name, the one that fits when none is named, the command that lists them; no torch before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from groupwise.cli.main import app
from groupwise.errors import ConfigError
from groupwise.sdk.profiles import PROFILES, Machine, choose_profile, find_profile
from wording import raises

LAPTOP, CARD, LARGE = Machine({"cpu": 8.3}), Machine({"cpu": 67, "cuda": 25.3}), Machine({"cpu": 137, "cuda": 150})


def test_a_profile_is_found_where_it_fits() -> None:
    assert find_profile("cpu-small", machine=LAPTOP).dtype == "float32"
    assert find_profile("gpu-24g-lora", machine=CARD).trains_with(lora=True)
    with raises(ConfigError):
        find_profile("gpu-24g-lora", machine=LAPTOP)
    with raises(ConfigError):
        find_profile("cpu-smal", machine=LAPTOP, option="ref_training_shape_id")


@pytest.mark.parametrize(
    ("machine", "lora", "name"),
    [
        (LAPTOP, True, "cpu-small"),
        (LAPTOP, False, "cpu-small"),
        (CARD, True, "gpu-24g-lora"),
        (CARD, False, "cpu-large"),
        (LARGE, True, "gpu-141g-lora"),
        (LARGE, False, "gpu-141g-full"),
        (Machine({"cpu": 0.5}), True, "cpu-small"),
    ],
)
def test_without_a_name_the_largest_that_fits(machine: Machine, lora: bool, name: str) -> None:
    assert choose_profile(lora=lora, machine=machine).name == name


def test_a_micro_batch_holds_the_longest_sequence() -> None:
    assert all(profile.micro_tokens >= profile.max_seq_len for profile in PROFILES.values())


def test_the_command_lists_them() -> None:
    shown = CliRunner().invoke(app, ["profiles"])
    assert shown.exit_code == 0 and all(name in shown.stdout for name in PROFILES)
    told = json.loads(CliRunner().invoke(app, ["profiles", "--json"]).stdout)
    assert [each["name"] for each in told["profiles"]] == list(PROFILES)
    fits = {each["name"]: each["fits"] for each in told["profiles"]}
    assert fits[told["default"]["lora"]] and told["machine"]["cpu"] > 0


def test_configuration_and_datums_do_without_torch() -> None:
    code = "import sys, groupwise; groupwise.LoopConfig, groupwise.Datum, groupwise.build_grpo_datums; "
    code += "import groupwise.cli.main, groupwise.sdk.profiles; assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
