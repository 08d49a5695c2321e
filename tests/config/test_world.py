import pytest

from groupwise.config.world import World, world
from groupwise.errors import ConfigError
from wording import raises


def test_one_process_unless_torchrun_says_more(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert world() == World(rank=0, size=1, local_rank=0) and world().leads
    monkeypatch.setenv("RANK", "7")  # other launchers set it too
    assert world().size == 1
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert world() == World(rank=7, size=16, local_rank=3) and not world().leads
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert world().local_size == 8


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("one", "2"), ("0", "0"), ("0", "")])
def test_an_environment_that_cannot_be(monkeypatch, rank, size) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with raises(ConfigError):
        world()
