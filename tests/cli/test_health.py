"""Two processes that look whether they could train together."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from groupwise.cli import doctor_cluster
from groupwise.cli.doctor_check import DoctorCheck
from groupwise.cli.doctor_cluster import ProcessFacts, cluster_findings, host_findings
from groupwise.config.world import World, world
from groupwise.train.ranks import Ranks
from rank_pairs import on_ranks


def by_name(findings) -> dict[str, DoctorCheck]:
    return {finding.name: finding for finding in findings}


def compared(ranks: Ranks, directory: Path, *, local: tuple[DoctorCheck, ...] = ()) -> dict[str, DoctorCheck]:
    return by_name(doctor_cluster._compared(ranks, world(), local, directory))


def test_all_is_well(tmp_path: Path) -> None:
    found, _ = on_ranks(lambda ranks: compared(ranks, tmp_path))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found.keys() == {"meeting", "versions", "gpus", "clock", "shared storage", "network"}
    assert "2 processes on" in found["meeting"].detail and "torch" in found["versions"].detail
    assert list(tmp_path.iterdir()) == []


def test_what_differs_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(doctor_cluster, "PROBE_S", 0.2)
    broken = DoctorCheck("peft", "fail", "not there", "pip install peft")

    def work(ranks):
        if ranks.rank == 1:
            os.environ["HOME"] = "elsewhere"
            monkeypatch.setattr(doctor_cluster, "PACKAGES", ("groupwise",))
            monkeypatch.setattr(doctor_cluster.time, "time", lambda: 0.0)
            return compared(ranks, tmp_path / "another", local=(broken,))
        return compared(ranks, tmp_path)

    found, _ = on_ranks(work)
    assert found["versions"].status == "fail" and "torch is" in found["versions"].detail
    assert "not there on" in found["versions"].detail
    assert found["clock"].status == "warn" and "chrony" in found["clock"].remedy
    assert found["shared storage"].status == "warn" and "ranks 1 do not see" in found["shared storage"].detail
    (other,) = (finding for name, finding in found.items() if name.startswith("peft of rank 1"))
    assert other.remedy == "pip install peft"


def test_gpus() -> None:
    def facts(*each: tuple[int, tuple[str, ...]]) -> list[ProcessFacts]:
        return [ProcessFacts("host", local_rank, {}, gpus, ()) for local_rank, gpus in each]

    assert doctor_cluster._gpus(facts((0, ("H200", "H200")), (1, ("H200", "H200")))).status == "ok"
    assert doctor_cluster._gpus(facts((0, ("H200",)), (1, ("H200",)))).status == "fail"
    assert doctor_cluster._gpus(facts((0, ("H200",)), (0, ("A100",)))).status == "warn"
    assert doctor_cluster._gpus(facts((0, ("H200",)), (0, ()))).status == "warn"


def test_those_who_do_not_come_are_missed(tmp_path: Path, monkeypatch) -> None:
    with taken_port() as port:
        pass
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    (finding,) = cluster_findings((), directory=tmp_path, deadline_s=0.5)
    assert (finding.name, finding.status) == ("meeting", "fail")
    assert "rank 0 of 2 did not meet the others" in finding.detail


@contextmanager
def taken_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_this_machine(monkeypatch) -> None:
    with taken_port() as port:
        monkeypatch.setattr(doctor_cluster, "PORT", port)
        found = by_name(host_findings())
    assert "gloo" in found["distributed"].detail and socket.gethostname() in found["host name"].detail
    assert found["port"].status == "warn" and str(port) in found["port"].detail
    monkeypatch.setattr(doctor_cluster.socket, "gethostname", lambda: "nowhere.invalid")
    found = by_name(host_findings())
    assert found["port"].status == "ok" and found["host name"].status == "warn"


@pytest.mark.parametrize("size", [1, 2])
def test_the_port_is_torchruns_where_there_is_one(monkeypatch, size) -> None:
    monkeypatch.setattr(doctor_cluster, "world", lambda: World(size=size))
    assert ("port" in by_name(host_findings())) == (size == 1)
