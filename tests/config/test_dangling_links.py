"""A link that leads nowhere is not proposed in the place of itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.data import DataConfig
from groupwise.config.run import load_config
from groupwise.errors import GroupwiseError
from groupwise.tasks.prompts import open_prompts

READERS: dict[str, Callable[[Path], Any]] = {
    "run.yaml": load_config,
    "rows.jsonl": lambda path: open_prompts(DataConfig(source=str(path))),
}


@pytest.mark.parametrize("name", READERS)
def test_only_what_is_there_is_proposed(tmp_path: Path, name: str) -> None:
    link = tmp_path / name
    link.symlink_to(tmp_path / "gone" / name)
    with pytest.raises(GroupwiseError) as alone:
        READERS[name](link)
    assert not (alone.value.hint or "").endswith(f"{name}?")
    (tmp_path / f"my_{name}").write_text("")
    with pytest.raises(GroupwiseError) as beside:
        READERS[name](link)
    assert (beside.value.hint or "").endswith(f"my_{name}?")
