"""Servers on other machines, and who starts those of a run: orders through a store, processes that are there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from groupwise.config.engine import VllmConfig
from groupwise.config.run import RunConfig, parse_config
from groupwise.config.world import World
from groupwise.engine.vllm.seats import Seat
from groupwise.engine.vllm.server import Shape, free_port
from groupwise.run import vllm_servers
from groupwise.run.vllm_servers import MachineServers, RemoteServer, machine_servers, own_address, reachable
from processes import becomes, running

SHAPE = Shape(model="some/model", dtype="float32", context_length=64, rank=8, targets=("q_proj",), rows=4, cpu=True)
SECOND = Seat(number=1, node=1)


@pytest.fixture
def meeting() -> list[TCPStore]:
    """Where ranks meet, on a port of its own; who empties the list ends it."""
    return [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))]


@pytest.fixture
def mail(meeting: list[TCPStore]) -> Callable[[], PrefixStore]:
    """Makes a connection to it: rank 0's, or the other machine's."""
    port, patience = meeting[0].port, timedelta(seconds=20)
    return lambda: PrefixStore("vllm/0", TCPStore("127.0.0.1", port, is_master=False, timeout=patience))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_servers, "LOOK_S", 0.02)


def interpreter(folder: Path, code: str) -> str:
    """What stands for vLLM's interpreter there: a shell that notes what it is asked to start."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{code}\n')
    program.chmod(0o755)
    return str(program)


def test_another_machine_starts_replaces_and_ends_a_server_as_it_is_told(mail, quick, tmp_path: Path) -> None:
    marker = f"sleeps-for-{tmp_path}"
    vllm = VllmConfig(python=interpreter(tmp_path, f"exec sh -c 'sleep 600; :' {marker}"), log=str(tmp_path / "v.log"))
    machine = MachineServers(mail(), [SECOND], alone=False, address="127.0.0.1")
    leader = mail()
    server = RemoteServer(leader, vllm, SHAPE, SECOND)
    assert becomes(lambda: server.url is not None and running(marker))
    port = (server.url or "").rpartition(":")[2]
    asked = (tmp_path / "asked").read_text()
    assert f"--port {port}" in asked and "--model some/model" in asked and server.ended is None
    os.kill(next(pid for pid in running(marker)), signal.SIGKILL)
    assert becomes(lambda: server.ended) and (tmp_path / "v-1.log").exists()

    again = RemoteServer(leader, vllm, SHAPE, SECOND)
    assert becomes(lambda: again.url is not None and running(marker)) and again.ended is None
    again.stop()
    assert again.ended and not running(marker)

    RemoteServer(leader, vllm, SHAPE, SECOND)
    assert becomes(lambda: running(marker))
    machine.close()
    assert not running(marker)


def test_what_cannot_be_started_there_is_known_here(mail, quick, tmp_path: Path) -> None:
    machine = MachineServers(mail(), [SECOND], alone=True, address="127.0.0.1")
    server = RemoteServer(mail(), VllmConfig(python=str(tmp_path / "nothing")), SHAPE, SECOND)
    assert becomes(lambda: server.ended) and "vllm.python" in (server.ended or "") and server.url is None
    machine.close()


def test_without_rank_0_a_machine_ends_its_servers(meeting: list[TCPStore], mail, quick, tmp_path: Path) -> None:
    marker = f"outlives-{tmp_path}"
    vllm = VllmConfig(python=interpreter(tmp_path, f"exec sh -c 'sleep 600; :' {marker}"), log=str(tmp_path / "v.log"))
    machine = MachineServers(mail(), [SECOND], alone=True, address="127.0.0.1")
    server = RemoteServer(mail(), vllm, SHAPE, SECOND)
    assert becomes(lambda: running(marker))
    meeting.clear()
    assert becomes(lambda: not running(marker))
    assert server.url is None and server.ended is None  # nobody answers any more
    machine.close()


def run(**vllm: Any) -> RunConfig:
    needed = {"data": {"source": "x.jsonl"}, "rewards": ["m:f"], "device": "cpu"}
    return parse_config(needed | {"engine": "vllm", "vllm": vllm})


@pytest.mark.parametrize(
    ("here", "vllm", "has"),
    [
        (World(rank=2, size=4, local_rank=0, local_size=2), {"servers": 2}, True),
        (World(rank=2, size=4, local_rank=0, local_size=2), {}, False),  # one server, and that is on the first machine
        (World(rank=3, size=4, local_rank=1, local_size=2), {"servers": 2}, False),  # the first rank there has it
        (World(rank=1, size=4, local_rank=1, local_size=2), {"servers": 2}, False),  # rank 0 has this machine's
        (World(rank=1, size=2, local_rank=1), {"servers": 2}, False),
        (World(rank=2, size=4, local_rank=0, local_size=2), {"urls": ["http://a:1"]}, False),
    ],
)
def test_the_first_process_of_each_other_machine_has_its_servers(
    mail, monkeypatch: pytest.MonkeyPatch, here: World, vllm: dict[str, Any], has: bool
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    class Meeting:
        def own_line(self, name: str) -> Any:
            return mail()

    found = machine_servers(run(**vllm), here, torch.device("cpu"), Meeting())  # pyright: ignore[reportArgumentType]
    assert (found is not None) == has
    if found is not None:
        found.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [(each, "10.0.0.7") for each in ("127.0.0.1", "localhost", "::1", "0.0.0.0")]
    + [(each, each) for each in ("gpu7", "10.1.1.1")],
)
def test_a_server_listens_where_other_machines_reach_it(host: str, expected: str) -> None:
    assert reachable(VllmConfig(host=host), "10.0.0.7").host == expected


def test_a_machine_knows_its_address() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1" and free_port("127.0.0.1")
