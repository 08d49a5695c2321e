"""What is saved over the Tinker wire, on disk: whole or not at all, whatever is interrupted where."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.bridges.tinker.checkpoints import (
    SAMPLER_WEIGHTS,
    WEIGHTS,
    Checkpoint,
    CheckpointNotFoundError,
    TinkerCheckpoints,
    parse_path,
)
from groupwise.errors import RequestError
from wording import raises

RUN = "0123456789abcdef" * 2 + ":train:0"


def saved(
    checkpoints: TinkerCheckpoints, name: str, content: bytes, *, recorded: bool = True, **about: float
) -> Checkpoint:
    """A state of these bytes."""
    state = checkpoints.new_state(RUN, WEIGHTS, name)
    state.mkdir(parents=True)
    (state / "weights").write_bytes(content)
    made = Checkpoint(run=RUN, kind=WEIGHTS, name=name, base_model="m", lora={"rank": 4}, state=state.name, **about)
    if recorded:
        checkpoints.record(made)
    return made


def content(checkpoints: TinkerCheckpoints, path: str) -> bytes:
    return (checkpoints.directory(checkpoints.find(path)) / "weights").read_bytes()


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_what_is_overwritten_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    checkpoints = TinkerCheckpoints(tmp_path)
    first = saved(checkpoints, "a", b"first")
    saved(checkpoints, "a", b"half", recorded=False)  # the server is killed before the record
    again = TinkerCheckpoints(tmp_path)
    assert content(again, first.path) == b"first" and again.find(first.path).size_bytes == 5
    assert files(tmp_path) == ["record.json", "weights"]  # nothing of the one that was cut
    saved(again, "a", b"second")
    assert content(again, first.path) == b"second" and files(tmp_path) == ["record.json", "weights"]


def test_a_state_without_a_record_was_never_saved(tmp_path: Path) -> None:
    lost = saved(TinkerCheckpoints(tmp_path), "a", b"half", recorded=False)
    checkpoints = TinkerCheckpoints(tmp_path)
    assert checkpoints.list() == [] and files(tmp_path) == []
    with raises(CheckpointNotFoundError):
        checkpoints.find(lost.path)


def test_names_that_look_like_files_are_names(tmp_path: Path) -> None:
    checkpoints = TinkerCheckpoints(tmp_path)
    names = ["x", "x.json", "record.json", "weights"]
    for name in names:
        saved(checkpoints, name, name.encode())
    assert sorted(each.name for each in checkpoints.list(RUN)) == sorted(names)
    assert all(content(checkpoints, f"tinker://{RUN}/weights/{name}") == name.encode() for name in names)
    for name in ("..", ".x", "a/b", "", "x" * 129, "x\n"):
        with pytest.raises(RequestError):
            parse_path(f"tinker://{RUN}/weights/{name}")


def test_time_to_live(tmp_path: Path) -> None:
    checkpoints = TinkerCheckpoints(tmp_path)
    brief = saved(checkpoints, "a", b"x", expires=time.time() - 1)
    assert checkpoints.list() == [] and not checkpoints.exists(RUN, WEIGHTS, "a")
    (expired,) = checkpoints.expired()
    newer = saved(checkpoints, "a", b"y")
    checkpoints.delete(expired)  # its name is another's by now
    assert content(checkpoints, newer.path) == b"y"
    assert checkpoints.keep_for(newer.path, 3600).expires == pytest.approx(time.time() + 3600, abs=5)
    assert checkpoints.keep_for(newer.path, None).expires is None and [*checkpoints.expired()] == []
    checkpoints.delete(checkpoints.find(newer.path))
    assert not (tmp_path / "runs" / RUN).exists()
    with pytest.raises(CheckpointNotFoundError):
        checkpoints.keep_for(brief.path, 1)


def test_a_sampler_is_a_record_alone(tmp_path: Path) -> None:
    checkpoints = TinkerCheckpoints(tmp_path)
    made = Checkpoint(
        run=RUN, kind=SAMPLER_WEIGHTS, name="s", base_model="m", lora={}, version="tinker-1@2", size_bytes=7
    )
    checkpoints.record(made)
    assert checkpoints.find(made.path) == made and checkpoints.list()[0].public()["checkpoint_type"] == "sampler"
    checkpoints.record(replace(made, version="tinker-1@3"))
    assert checkpoints.find(made.path).version == "tinker-1@3"
