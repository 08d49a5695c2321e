"""The tables of docs/migrating.md, made from those by which files are read (`bridges/*/keys.yaml`).

    python docs/generate_migrating.py    write the tables into docs/migrating.md

A table stands between `<!-- NAME -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ruamel.yaml

from groupwise.bridges.axolotl import supervised as axolotl
from groupwise.bridges.trl import supervised
from groupwise.config.formats.format import format_named
from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.config.yaml import Document, inline
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, understand

TARGET = Path(__file__).parent / "migrating.md"
TABLES = {name: tuple(format_named(name).keys) for name in ("axolotl", "trl", "aitraining", "prime-rl", "unsloth")}
TABLES |= {f"trl {kind}": keys_of(supervised.KEYS[kind]) for kind in ("sft", "dpo")}
SUPERVISED = {kind: keys_of(axolotl.KEYS[kind]) for kind in ("sft", "dpo")}
TABLES["axolotl sft"] = tuple(key for key in SUPERVISED["sft"] if key not in TABLES["axolotl"])
TABLES["axolotl dpo"] = tuple(key for key in SUPERVISED["dpo"] if key not in (*TABLES["axolotl"], *SUPERVISED["sft"]))
TABLES["unsloth"] = tuple(key for key in TABLES["unsloth"] if key not in TABLES["trl"])  # and what differs from TRL's
PUBLISHED = Path(__file__).parent / "published_configs.yaml"
BLOCK = re.compile(r"(<!-- ({}) -->\n).*?(<!-- end -->)".format("|".join([*TABLES, "published"])), re.DOTALL)


def table(keys: Iterable[Key]) -> Iterator[str]:
    """The lines of one system's three tables: what acts, what has no effect, what is not here."""
    keys = list(keys)
    yield from ("", "| key | here | default there | how |", "|---|---|---|---|")
    for key in keys:
        if key.fate in ("plain", "made"):
            here = ", ".join(f"`{each}`" for each in key.here)
            default = "" if key.default is None else f"`{inline(key.default)}`"
            yield f"| `{key.name}` | {here} | {default} | {key.what} |"
    if older := [key for key in keys if key.fate == "older"]:
        yield from ("", "| older name | now |", "|---|---|")
        yield from (f"| `{key.name}` | `{key.now}` |" for key in older)
    yield from ("", "| no effect | because |", "|---|---|")
    reasons = dict.fromkeys(key.what for key in keys if key.fate == "idle")
    for reason in reasons:
        names = ", ".join(f"`{key.name}`" for key in keys if key.fate == "idle" and key.what == reason)
        yield f"| {names} | {reason} |"
    yield from ("", "| not here | why | what runs |", "|---|---|---|")
    for key in keys:
        if key.fate == "absent":
            instead = f"`{key.instead}`" if key.instead else ""
            yield f"| `{key.name}` | {key.what} | {instead} |"
    yield ""


def published() -> dict[str, dict[str, Any]]:
    """The entries of the file, by name, with what they are put on filled in."""
    whole: dict[str, dict[str, Any]] = {}
    for entry in ruamel.yaml.YAML(typ="safe").load(PUBLISHED.read_text("utf-8")):
        under = whole[entry["on"]]["config"] if "on" in entry else {}
        whole[entry["name"]] = entry | {"config": under | entry["config"]}
    return whole


def imported(config: dict[str, Any], *overrides: str) -> LoadedRun:
    """A configuration, read as a run. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        return understand(Document(copy.deepcopy(config), "published.yaml"), list(overrides), folder=Path(folder))


def outcome(config: dict[str, Any]) -> tuple[str, str, list[str]]:
    """What comes of it in a word, of which keys, and the overrides with which it runs."""
    try:
        loaded = imported(config)
    except ConfigError as error:
        keys = re.findall(r"([A-Za-z_.]+): (?:unknown|required)", str(error))
        return "not read", "unknown or missing: " + ", ".join(f"`{key}`" for key in dict.fromkeys(keys)), []
    if not loaded.refused:
        return "runs", "", []
    keys = dict.fromkeys(note.place for note in loaded.refused)
    return "refused", ", ".join(f"`{key}`" for key in keys), [*dict.fromkeys(n.instead for n in loaded.refused)]


def published_table() -> Iterator[str]:
    """A line for each published configuration."""
    yield from ("", "| published | where | it | for | runs with |", "|---|---|---|---|---|")
    for name, entry in published().items():
        word, why, instead = outcome(entry["config"])
        yield f"| {name} | {entry['where']} | {word} | {why} | {' '.join(f'`{each}`' for each in instead)} |"
    yield ""


def page(text: str) -> str:
    """The page with its tables made anew."""
    lines = {"published": published_table} | {name: partial(table, keys) for name, keys in TABLES.items()}
    return BLOCK.sub(lambda found: found[1] + "\n".join(lines[found[2]]()) + "\n" + found[3], text)


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
