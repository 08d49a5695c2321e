"""The container: what its files name is there, and what they run does what it says. It cannot be built without its base
image, which is on a hub."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML
from typer.main import get_command

from groupwise.cli.main import app
from seed_page import Live

ROOT = Path(__file__).parents[1]
COMPOSE, KUBERNETES = ROOT / "deploy" / "compose.yaml", ROOT / "deploy" / "kubernetes.yaml"


def steps() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, with continued lines put together."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def argument(name: str) -> list[Any]:
    return [json.loads(value) for step, value in steps() if step == name]


def documents() -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(KUBERNETES.read_text()))


def serve_options() -> set[str]:
    return {option for each in get_command(app).commands["serve"].params for option in each.opts}  # type: ignore[attr-defined]


def test_what_is_copied_is_there_and_is_not_left_out():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for step, value in steps():
        if step == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists() and source in kept


def test_the_image_that_runs_has_the_compiler_that_gpu_kernels_are_compiled_with():
    """Triton's launchers need gcc and Python's headers, torch.compile on a CPU g++; only the last stage is kept."""
    last = max(number for number, (step, _) in enumerate(steps()) if step == "FROM")
    installed = " ".join(value for step, value in steps()[last:] if step == "RUN").split()
    assert {"gcc", "g++", "libc6-dev"} <= set(installed)
    assert "slim" in next(
        value for step, value in steps() if step == "ARG" and value.startswith("BASE")
    )  # has Python.h


def commands() -> dict[str, list[str]]:
    """Every way in which the server is started."""
    composed = YAML(typ="safe").load(COMPOSE.read_text())["services"]["serve"]["command"]
    plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", composed)
    [pod] = [each for each in documents() if each["kind"] == "StatefulSet"]
    container = pod["spec"]["template"]["spec"]["containers"][0]
    return {"Dockerfile": argument("CMD")[0], "compose": shlex.split(plain), "kubernetes": container["args"]}


@pytest.mark.parametrize("where", ["Dockerfile", "compose", "kubernetes"])
def test_the_server_is_started_with_options_that_it_has(where: str):
    command, model, *options = commands()[where]
    assert (command, model) == ("serve", "starter")
    assert set(options[::2]) <= serve_options() and "--state-dir" in options


def test_it_runs_without_rights_and_keeps_its_state_in_a_volume():
    said = dict(steps())
    assert said["USER"] == "10001" and said["VOLUME"] == "/var/lib/groupwise"
    [pod] = [each for each in documents() if each["kind"] == "StatefulSet"]
    spec = pod["spec"]["template"]["spec"]
    assert (
        spec["securityContext"]["runAsUser"] == 10001
        and spec["containers"][0]["volumeMounts"][0]["mountPath"] in (said["VOLUME"])
    )


def test_a_pod_writes_to_its_volumes_only_within_limits_and_has_no_token():
    [pod] = [each for each in documents() if each["kind"] == "StatefulSet"]
    spec = pod["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
        assert "/tmp" in [each["mountPath"] for each in container["volumeMounts"]]
    assert all("sizeLimit" in each["emptyDir"] for each in spec["volumes"] if "emptyDir" in each)


def test_the_network_policy_is_the_pods_and_lets_only_its_port_in():
    kinds = {each["kind"]: each for each in documents()}
    policy, labels = kinds["NetworkPolicy"]["spec"], kinds["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == [8420]


def run(command: list[str], live: Live, **environment: str) -> int:
    """The exit status of a probe against a server that runs here."""
    moved = [each.replace("http://127.0.0.1:8420", live.url.rstrip("/")) for each in command]
    assert moved != command
    return subprocess.run(
        [sys.executable, *moved[1:]], env=os.environ | environment, capture_output=True, timeout=60
    ).returncode


@pytest.mark.xdist_group("live server")
def test_the_health_check_and_the_probe_answer_as_the_server_does(live: Live):
    [check] = [json.loads(value[value.index("[") :]) for step, value in steps() if step == "HEALTHCHECK"]
    [pod] = [each for each in documents() if each["kind"] == "StatefulSet"]
    probe = pod["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]["command"]
    assert run(check, live) == 0
    assert run(probe, live, GROUPWISE_API_KEY="any") == 0
    gone = [each.replace("8420", "1") for each in check]
    assert subprocess.run([sys.executable, *gone[1:]], capture_output=True, timeout=60).returncode != 0


def test_what_is_installed_from_the_lock_has_a_hash():
    text = re.sub(r"\\\n\s*", " ", (ROOT / "deploy" / "requirements.lock").read_text())
    pins = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert pins
    for pin, *hashes in pins:
        assert "==" in pin and hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin
    [install] = [value for step, value in steps() if step == "RUN" and "requirements.lock" in value]
    assert "--require-hashes" in install.split() and "--no-deps" in install.split()


def test_the_lock_has_what_the_package_asks_for():
    lines = (ROOT / "deploy" / "requirements.lock").read_text().splitlines()
    locked = dict(line.split()[0].split("==") for line in lines if "==" in line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["tinker"]):
        wanted = Requirement(text)
        if wanted.name != "torch":
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), text
