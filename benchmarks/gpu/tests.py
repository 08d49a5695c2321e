"""The tests that need a GPU (tests/gpu), a file each, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from gpu.cases import ROOT, Cases, Result, Setting, missing

TESTS = ROOT / "tests" / "gpu"


def cases(setting: Setting) -> Cases:
    return {path.stem: lambda path=path: tested(path) for path in sorted(TESTS.glob("test_*.py"))}


def tested(path: Path) -> Result:
    """Raises RuntimeError with the end of what pytest says if a test fails."""
    if absent := missing("pytest"):
        return absent
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(path), "-q", "--confcutdir", str(TESTS), f"--junitxml={report}"]
        # warnings are of versions here; a test that cares about one looks for it
        command += ["-p", "no:cacheprovider", "-W", "default", "--basetemp", f"{folder}/tests"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{(done.stdout + done.stderr)[-6000:]}")
        return {"row": counted(report), "said": done.stdout[-2000:]}


def counted(report: Path) -> dict[str, object]:
    """How many tests passed and were left out, and why."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    skipped = [each.get("message", "") for each in suite.iter("skipped")]
    passed = int(suite.get("tests", 0)) - len(skipped)
    return {
        "passed": passed,
        "left out": len(skipped),
        "seconds": float(suite.get("time", 0)),
        "note": "; ".join(sorted(set(skipped))),
    }
