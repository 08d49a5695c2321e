import socket
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from groupwise.config import hub
from groupwise.config.data import DatasetConfig
from groupwise.errors import DataError, ModelError
from groupwise.model.load import load_tokenizer
from groupwise.tasks.prompts import open_prompts
from wording import raises


class Deaf:
    """A hub that closes every connection without an answer; `asked` counts them."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.asked += 1
            connection.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def deaf(monkeypatch) -> Iterator[Deaf]:
    deaf = Deaf()
    monkeypatch.setattr(constants, "ENDPOINT", deaf.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", deaf.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._answers.cache_clear()
    yield deaf
    hub._answers.cache_clear()
    deaf.close()


def test_a_hub_that_does_not_answer_is_asked_once_for_all_files(deaf):
    for _ in range(2):
        with raises(ModelError):
            load_tokenizer("nobody/nothing")
    with raises(DataError):
        open_prompts(DatasetConfig(source="nobody/nothing", prompt_key="prompt"))
    assert deaf.asked == 1
    assert not constants.HF_HUB_OFFLINE  # as it was


def test_a_folder_is_read_without_asking(deaf):
    load_tokenizer("starter")
    assert deaf.asked == 0


def test_readers_beside_each_other_leave_the_mode_together(deaf):
    with hub.reading("nobody/one"):
        with hub.reading("nobody/two"):
            assert constants.HF_HUB_OFFLINE
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
