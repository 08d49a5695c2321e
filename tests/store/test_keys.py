"""Named keys in a state directory: made, found, turned, revoked, by several processes at once."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from groupwise.errors import ConfigError, StorageError
from groupwise.store.keys import FILE, PREFIX, ROLES, KeyFile
from groupwise.store.masking import MASK, Masking
from wording import raises


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "state")


def test_a_key_is_found_until_it_is_turned_or_revoked(keys: KeyFile) -> None:
    first, other = keys.add("phone-app", role="sample"), keys.add("grafana", role="read")
    assert first.startswith(PREFIX) and first != other
    assert [(key.name, key.role) for key in keys.all()] == [("phone-app", "sample"), ("grafana", "read")]
    found = keys.find(first)
    assert found is not None and (found.name, found.role, found.turned) == ("phone-app", "sample", None)
    second = keys.turn("phone-app")
    assert keys.find(first) is None
    turned = keys.find(second)
    assert turned is not None and turned.role == "sample" and turned.made == found.made and turned.turned is not None
    assert keys.revoke("phone-app").name == "phone-app"
    assert keys.find(second) is None and keys.find(other) is not None


def test_what_another_process_changes_counts_at_once(keys: KeyFile) -> None:
    assert keys.find("x") is None
    another = KeyFile(keys.path.parent)
    key = another.add("a", role="admin")
    assert keys.find(key) is not None
    another.revoke("a")
    assert keys.find(key) is None


def test_no_key_is_on_the_disk(keys: KeyFile) -> None:
    key = keys.add("a", role="train")
    assert not any(key in path.read_text() for path in keys.path.parent.iterdir() if path.is_file())
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert Masking({}).text(f"key: {key}") == f"key: {MASK}"


def test_those_who_make_keys_at_once_lose_none(keys: KeyFile) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda at: KeyFile(keys.path.parent).add(f"k{at}", role=ROLES[at % 4]), range(24)))
    assert {key.name for key in keys.all()} == {f"k{at}" for at in range(24)}
    assert all(keys.find(key) is not None for key in made)


@pytest.mark.parametrize("name", ["", "a b", "../x", "-a", "a\n", "ä", "a" * 65])
def test_a_name_that_is_none(keys: KeyFile, name: str) -> None:
    with raises(ConfigError, field="name"):
        keys.add(name, role="sample")
    assert not keys.path.exists()


@pytest.mark.parametrize("bound", ["requests_per_minute", "tokens_per_day", "concurrent_requests"])
def test_bounds_are_kept_and_one_of_nothing_is_refused(keys: KeyFile, bound: str) -> None:
    with raises(ConfigError, field=bound):
        keys.add("a", role="sample", **{bound: 0})
    assert keys.all() == []
    text = keys.add("a", role="sample", **{bound: 7})
    found = keys.find(text)
    assert found is not None and getattr(found, bound) == 7
    turned = keys.find(keys.turn("a"))
    assert turned is not None and getattr(turned, bound) == 7


def test_the_weight_of_a_tenant_is_the_smallest_of_its_keys(keys: KeyFile) -> None:
    assert keys.weight("acme") == 1
    for name, tenant, weight in (("a", "acme", 4), ("b", "acme", 3), ("c", "acme", None), ("d", "", 9)):
        keys.add(name, role="train", tenant=tenant, weight=weight)
    assert [keys.weight(tenant) for tenant in ("acme", "bell", "")] == [3, 1, 9]
    keys.revoke("b")
    assert keys.weight("acme") == 4
    for weight in (0, 101):
        with raises(ConfigError, field="weight"):
            keys.add("e", role="train", tenant="acme", weight=weight)
    keys.path.write_text("{")
    assert keys.weight("acme") == 1


def test_a_name_is_one_key_s(keys: KeyFile) -> None:
    key = keys.add("a", role="sample")
    with raises(ConfigError, field="name"):
        keys.add("a", role="admin")
    found = keys.find(key)
    assert found is not None and found.role == "sample"


def test_a_name_that_is_not_there(keys: KeyFile) -> None:
    keys.add("a", role="sample")
    for change in (keys.turn, keys.revoke):
        with raises(ConfigError, field="name"):
            change("b")


@pytest.mark.parametrize("text", ["", "[", '{"a": 1}', '[{"name": "a", "role": "king", "digest": "", "made": ""}]'])
def test_a_damaged_file_knows_no_key_and_is_left_alone(keys: KeyFile, text: str) -> None:
    key = keys.add("a", role="admin")
    keys.path.write_text(text)
    for asked in (lambda: keys.find(key), keys.all, lambda: keys.add("b", role="read"), lambda: keys.revoke("a")):
        with raises(StorageError, code="storage_failed"):
            asked()
    assert keys.path.read_text() == text


def test_what_is_written_is_what_was_made(keys: KeyFile) -> None:
    keys.add("a", role="read")
    (row,) = json.loads((keys.path.parent / FILE).read_text())
    assert set(row) == {"name", "role", "digest", "made"}
