"""Every metric that a page, a configuration or an example names has a definition (`algo/metrics.yaml`), or is TRL's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise.algo.metrics import definitions
from groupwise.store.trl_names import TRL_NAMES
from test_docs_pages import PAGES, inline_code, name_of

ROOT = Path(__file__).parent.parent
CONFIGURATIONS = sorted(
    path
    for folder in ("configs", "examples", "src/groupwise/cli/templates")
    for path in (ROOT / folder).rglob("*.yaml")
)
FAMILIES = "|".join(sorted({each.metric.partition("/")[0] for each in definitions()}))
THEIRS = {theirs for _, theirs in TRL_NAMES}
A_FILE = re.compile(r"\.(py|yaml|jsonl?|md|sh|txt|png|html)\b")


def is_defined(name: str) -> bool:
    """Whether a metric of ours or of TRL's has this name; `*` and `...` are anything, `<name>` is any one part."""
    if "*" in name or "..." in name:
        wanted = re.compile(".+".join(re.escape(part) for part in re.split(r"\*|\.\.\.", name)))
        return any(wanted.fullmatch(each) for each in (*THEIRS, *(each.metric for each in definitions())))
    return name in THEIRS or any(each.fits(re.sub(r"<[^>]+>", "any", name)) for each in definitions())


def named(text: str) -> set[str]:
    """The words of a text that read as metrics: a family of ours, a slash, and no file's ending."""
    found = re.findall(rf"(?<![\w./<-])(?:{FAMILIES})/[\w/<>*.@-]*[\w>*]", text)
    return {each for each in found if not A_FILE.search(each)}


def test_what_is_not_a_metric_is_seen() -> None:
    assert named("watch rollout/truncated_frac and env/calls, not train/forward.py") == {
        "rollout/truncated_frac",
        "env/calls",
    }
    assert is_defined("eval/<mode>/reward") and is_defined("eval/sampled/reward") and is_defined("mismatch/*")
    assert not is_defined("rollout/truncated")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_metrics_of_a_page_are_defined(page: Path) -> None:
    code = [code for code in inline_code(page) if re.fullmatch(rf"(?:{FAMILIES})/[^ ]*", code)]
    gone = {name for each in code for name in named(each)}
    assert {name for name in gone if not is_defined(name)} == set()


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=name_of)
def test_the_metrics_of_a_configuration_are_defined(path: Path) -> None:
    """Its comments say what to watch in a run, where only our names are."""
    comments = "\n".join(re.findall(r"#(.*)", path.read_text(encoding="utf-8")))
    assert {name for name in named(comments) if name in THEIRS or not is_defined(name)} == set()
    assert not [each for each in THEIRS if "/" in each and each in comments]
