"""One step's update: the thread it runs in."""

import threading

import torch

from groupwise.update import learner_thread


def test_training_keeps_its_threads_when_the_engine_decodes_on_one():
    thread = learner_thread(2)
    engine = threading.Thread(target=torch.set_num_threads, args=(1,))
    engine.start()
    engine.join()
    assert thread.submit(torch.get_num_threads).result() == 2
    thread.shutdown()
