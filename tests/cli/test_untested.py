"""Which lines of the package only a GPU executes: found by their marks, of which none is missing."""

from __future__ import annotations

from pathlib import Path

from cli_project import cli
from groupwise.cli.untested import PACKAGE, places, unmarked

SOURCE = """
import torch

def one(x, device):
    if device.type == "cuda":{0}
        x = x.half()

        # a comment
        x = torch.compile(x)
    return x

def two(x, device):
    if device.type != "cuda":{1}
        return x
    x = x.pin_memory()
    return x.to(device, non_blocking=True)

def three(x):{2}
    return torch.cuda.mem_get_info(x)

def four(device):
    print("cuda", torch.cuda.is_available())  # neither asks for one
    return 2 if device.type == "cuda" else 1{3}
"""
MARKS = ("  # gpu-only: halves", "  # gpu-only below: pinned", "  # gpu-only: memory", "  # gpu-aware")


def test_marks_say_what_has_never_run(tmp_path: Path):
    (tmp_path / "module.py").write_text(SOURCE.format(*MARKS))
    found = [(each.what, each.first, each.last, each.lines) for each in places(tmp_path)]
    assert found == [("halves", 6, 9, 2), ("pinned", 15, 16, 2), ("memory", 19, 19, 1)]
    seen = [mark.replace("gpu-only", "gpu-seen") for mark in MARKS]
    (tmp_path / "module.py").write_text(SOURCE.format(*seen[:2], *MARKS[2:]))
    assert [each.what for each in places(tmp_path)] == ["memory"]


def test_a_missing_mark_is_found():
    assert unmarked(SOURCE.format(*MARKS)) == []
    assert unmarked(SOURCE.format(*MARKS).replace("gpu-only", "gpu-seen")) == []
    assert unmarked(SOURCE.format("", *MARKS[1:])) == [5]
    assert unmarked(SOURCE.format(MARKS[0], "", *MARKS[2:])) == [13, 15]
    assert unmarked(SOURCE.format(*MARKS[:2], "", MARKS[3])) == [19]
    assert unmarked(SOURCE.format(*MARKS[:3], "")) == [23]
    assert unmarked('text = "# gpu-only: in a string"\nx.is_cuda\n') == [2]


def test_no_line_of_the_package_asks_for_a_gpu_unmarked():
    missing = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := unmarked(path.read_text(encoding="utf-8")))
    }
    assert not missing, "mark them as groupwise/cli/untested.py says, and run: python docs/generate_untested.py"


def test_the_command_names_them():
    shown = cli("doctor", "--untested").stdout
    assert all(f"groupwise/{place.file}:{place.first}-{place.last}  {place.what}" in shown for place in places())
    assert "store/cuda_ipc.py" in shown
