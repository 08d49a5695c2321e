"""Names that configurations were written with lead to where things are now."""

import pytest

from groupwise.config.load import MOVED, load_object


@pytest.mark.parametrize("old", MOVED)
def test_a_name_of_before_is_found(old: str) -> None:
    assert load_object(old) is load_object(MOVED[old])
