"""One step's update: the thread it runs in."""

import threading

import pytest
import torch

from groupwise.update import learner_thread


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_training_keeps_its_threads_when_the_engine_decodes_on_one(two_threads):
    thread = learner_thread()
    engine = threading.Thread(target=torch.set_num_threads, args=(1,))
    engine.start()
    engine.join()
    assert thread.submit(torch.get_num_threads).result() == 2
    thread.shutdown()
