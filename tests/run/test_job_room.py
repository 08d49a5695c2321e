"""How many jobs are trained at once: as many as their adapters and optimizers leave room for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from groupwise.run import job_room
from groupwise.run.job_room import TREE_BYTES, JobRoom
from groupwise.store.ledger_schema import JobRecord
from job_place import PROMPTS, SMALL, Place, groups


@pytest.fixture
def place(make_base, tmp_path):
    made = Place(tmp_path, make_base("qwen3", dtype=torch.float32))
    yield made
    made.ledger.close()


def post(place: Place, adapter: str, **options) -> JobRecord:
    return place.submit(groups(PROMPTS[:1]), adapter=adapter, **options)


def test_what_a_job_needs_grows_with_its_rank_and_its_targets(place):
    room = JobRoom(place.base, place.ledger, memory=0)
    jobs = [post(place, f"a{rank}", lora_rank=rank) for rank in (2, 4)]
    jobs += [post(place, "all", lora_rank=2, target_modules="all-linear"), post(place, "none", lora_rank=2)]
    two, four, every, again = map(room.need_of, jobs)
    modules = dict(place.base.model.named_modules())
    names = [name for name in modules if name.rpartition(".")[2] in SMALL["target_modules"]]
    a_rank = 16 * sum(sum(modules[name].weight.shape) for name in names)
    payload = 8 * place.ledger.payload_bytes(jobs[0].id)
    assert two == TREE_BYTES + payload + 2 * a_rank and abs(four - two - 2 * a_rank) < 1000
    assert every > two and abs(again - two) < 1000


def test_there_is_room_for_as_many_as_memory_has_and_always_for_one(place, monkeypatch):
    jobs = [post(place, f"a{k}") for k in range(4)]
    room = JobRoom(place.base, place.ledger, memory=0)
    assert room.admits(jobs[0], []) and not room.admits(jobs[1], jobs[:1])
    room.memory = sum(map(room.need_of, jobs[:3]))
    assert room.admits(jobs[2], jobs[:2]) and not room.admits(jobs[3], jobs[:3])
    monkeypatch.setattr(job_room, "MOST_AT_ONCE", 2)
    assert not room.admits(jobs[2], jobs[:2])


def test_of_jobs_that_have_ended_nothing_is_kept(place):
    room = JobRoom(place.base, place.ledger)
    jobs = [post(place, f"a{k}") for k in range(4)]
    for before, job in pairwise(jobs):
        assert room.admits(job, [before])
    assert set(room._needs) == {job.id for job in jobs[2:]}


def test_a_share_of_the_memory_that_there_is(place, monkeypatch):
    for there, share in ((8 << 30, 2 << 30), (0, 1 << 30)):
        monkeypatch.setattr(job_room, "memory_bytes", lambda there=there: there)
        assert JobRoom(place.base, place.ledger).memory == share


def test_targets_that_the_model_has_not_take_nothing_and_the_job_says_so_itself(place):
    room, job = JobRoom(place.base, place.ledger, memory=0), post(place, "a", target_modules=["nowhere"])
    assert room.need_of(job) < TREE_BYTES + 100_000
