"""Each check on something healthy and on something that is not."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from cli_project import cli, save_model
from groupwise.cli import doctor, doctor_cluster
from groupwise.cli.doctor import check_disk, check_optional, check_python, check_sandbox, check_torch, examine
from groupwise.cli.doctor_check import DoctorCheck
from groupwise.config.run import PACKAGED, STARTER
from groupwise.rewards import sandbox
from groupwise.rewards.sandbox import Isolation
from wording import wording


@pytest.fixture(scope="module")
def tiny_model(make_base, tmp_path_factory):
    base = make_base("qwen3", dtype=torch.float32, context=256)
    return save_model(base, tmp_path_factory.mktemp("model"))


def by_name(findings) -> dict[str, DoctorCheck]:
    return {finding.name: finding for finding in findings}


def put_starter(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Have the package's model lie in `directory`."""
    monkeypatch.setitem(PACKAGED, STARTER, directory)


def test_all_is_well_with_a_whole_model(tiny_model, monkeypatch, tmp_path):
    put_starter(monkeypatch, tiny_model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # not more than any machine has cores
    found = by_name(examine(directory=tmp_path))
    for name in ("python", "torch", "transformers", "peft", "datasets", "math_verify", "starter", "chat template"):
        assert found[name].status == "ok", found[name]
    assert "packed forward within" in found["starter"].detail
    assert found["transformers"].detail[0].isdigit()


def test_a_missing_model_fails_and_says_what_to_do(monkeypatch, tmp_path):
    put_starter(monkeypatch, tmp_path / "nothing")
    found = by_name(examine(directory=tmp_path))
    for name in ("starter", "chat template"):
        assert found[name].status == "fail"
        wording(found[name].remedy)
    assert found["torch"].status != "fail"


def test_a_damaged_model_is_a_finding_and_not_a_crash(tiny_model, monkeypatch, tmp_path):
    damaged = tmp_path / "model"
    shutil.copytree(tiny_model, damaged)
    (damaged / "model.safetensors").write_bytes(b"\x08")
    put_starter(monkeypatch, damaged)
    found = by_name(examine(directory=tmp_path))
    assert found["starter"].status == "fail" and found["chat template"].status == "ok"


def test_a_template_that_drops_the_reply_is_found(tiny_model, monkeypatch, tmp_path):
    damaged = tmp_path / "model"
    shutil.copytree(tiny_model, damaged)
    (damaged / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    put_starter(monkeypatch, damaged)
    assert by_name(examine(directory=tmp_path))["chat template"].status == "fail"


@pytest.mark.parametrize(("warn", "fail", "status"), [(0.0, 0.0, "ok"), (1e9, 0.0, "warn"), (1e9, 1e9, "fail")])
def test_disk(monkeypatch, tmp_path, warn, fail, status):
    monkeypatch.setattr(doctor, "DISK_WARN_GIB", warn)
    monkeypatch.setattr(doctor, "DISK_FAIL_GIB", fail)
    assert check_disk(tmp_path).status == status


@pytest.mark.parametrize(
    ("namespaces", "filtered", "status"), [(False, True, "warn"), (True, False, "warn"), (True, True, "ok")]
)
def test_sandbox(monkeypatch, namespaces, filtered, status):
    level = Isolation(namespaces=namespaces, own_user=False, filtered=filtered, reason="a test")
    monkeypatch.setattr(sandbox, "isolation", lambda: level)
    found = check_sandbox()
    assert found.status == status and "a test" in found.detail
    wording(found.detail)
    wording(found.remedy)


def test_optional_packages_are_no_problem():
    assert check_optional("json", "for nothing").status == "ok"
    absent = check_optional("groupwise_no_such_package", "for tracking.nothing")
    assert absent.status == "absent" and absent.remedy == "pip install 'groupwise[groupwise_no_such_package]'"


def test_versions_are_said():
    assert check_python().status == "ok"
    assert torch.__version__ in check_torch().detail


def test_the_command_exits_with_1_when_something_needed_fails(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    put_starter(monkeypatch, tmp_path / "nothing")
    result = cli("doctor")
    assert result.exit_code == 1
    assert "fail   starter" in result.stdout and "ok     python" in result.stdout


def test_the_command_as_json(tiny_model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    put_starter(monkeypatch, tiny_model)
    result = cli("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"] and {"name", "status", "detail", "remedy"} == set(report["checks"][0])


@pytest.mark.parametrize(
    ("cuda", "driver", "gpu", "status", "says"),
    [
        (None, False, False, "ok", "for CPUs"),
        (None, True, False, "warn", "whl/cu130"),
        ("13.0", False, False, "warn", "whl/cpu"),
        ("13.0", True, True, "ok", "for CUDA 13.0"),
    ],
)
def test_whether_the_torch_that_was_installed_fits(monkeypatch, cuda, driver, gpu, status, says):
    monkeypatch.setattr(doctor_cluster.torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor_cluster.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver else None)
    monkeypatch.setattr(doctor, "installed_bytes", lambda packages: 5_900_000_000)
    found = doctor.check_torch_build()
    assert found.status == status and says in found.detail + found.remedy and "5.9 GB on disk" in found.detail


def test_the_size_of_torch_counts_what_cuda_brings(tmp_path):
    for name, size in (("torch/lib/a.so", 10), ("nvidia/cublas/b.so", 200), ("numpy/c.so", 4000)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert doctor.installed_bytes(tmp_path) == 210
