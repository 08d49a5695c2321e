"""A release: is everything said, does it build, is it what PyPI and a user get? Uploads nothing.

    python tools/release.py check     the version, the changelog and the README, as they are; writes nothing
    python tools/release.py build     ... and dist/: sdist and wheel, looked into, rendered as PyPI does, installed, run
    python tools/release.py tag       ... and today's date in the changelog, a commit of it, and the tag v0.1.0 on that
    python tools/release.py dist      build, of a commit that has the tag: what .github/workflows/release.yml uploads

`pip install build twine 'readme_renderer[md]'` first. What is left to a person is printed at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_YET = "not released"
TEXTS = {
    "project": "pyproject.toml",
    "package": "src/groupwise/__init__.py",
    "changelog": "CHANGELOG.md",
    "readme": "README.md",
}
IN_THE_WHEEL = (
    "groupwise/py.typed",
    "groupwise/algo/metrics.yaml",
    "groupwise/cli/templates/demo/arithmetic.yaml",
    "groupwise/server/ui/index.html",
    "groupwise/tasks/starter/model/model.safetensors",
    "groupwise/tasks/starter/model_vl/model.safetensors",
    "groupwise/tasks/starter/model_vl/preprocessor_config.json",
)


def complaints(*, project: str, package: str, changelog: str, readme: str, tagged: bool = False) -> list[str]:
    """Return what keeps the texts of pyproject.toml, `__init__.py`, the changelog and the README from a release, or,
    where the commit is `tagged`, from being that release."""
    version = tomllib.loads(project)["project"]["version"]
    found = []
    if f'__version__ = "{version}"' not in package:
        found.append(f"groupwise.__version__ is not {version}, which pyproject.toml says")
    heading = re.search(rf"^## {re.escape(version)} - (.*)$", changelog, re.MULTILINE)
    if heading is None:
        found.append(f"CHANGELOG.md has no heading `## {version} - {NOT_YET}`")
    elif tagged and heading[1] == NOT_YET:
        found.append(f"CHANGELOG.md does not say when {version} was released")
    elif not tagged and heading[1] != NOT_YET:
        found.append(f"CHANGELOG.md says that {version} was released: {heading[1]}; raise the version")
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## )", changelog, re.MULTILINE | re.DOTALL)
    if unreleased is not None and unreleased[1].strip():
        found.append(f"CHANGELOG.md has entries under Unreleased: move them under {version}")
    text = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    relative = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("https://")]
    if relative:
        found.append(f"README.md has links that lead nowhere on PyPI: {', '.join(relative)}")
    return found


def dated(changelog: str, *, version: str, day: str) -> str:
    """Return the changelog with the day of the release in its heading."""
    return changelog.replace(f"## {version} - {NOT_YET}", f"## {version} - {day}", 1)


def missing(names: list[str]) -> list[str]:
    """Return what must be in the wheel and is not."""
    return sorted(set(IN_THE_WHEEL) - set(names))


def pictures(readme: str) -> set[str]:
    """Return the addresses of the README's pictures."""
    return set(re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", readme))


def read(text: str) -> str:
    """Return one of the texts that a release is checked by."""
    return (ROOT / TEXTS[text]).read_text(encoding="utf-8")


def check(*, tagged: bool = False) -> str:
    """Return the version to release, or exit with what is in its way."""
    if found := complaints(**{text: read(text) for text in TEXTS}, tagged=tagged):
        sys.exit("\n".join(found))
    version = tomllib.loads(read("project"))["project"]["version"]
    if tagged:
        _run("git", "describe", "--exact-match", "--match", f"v{version}")
    return version


def build(version: str) -> None:
    """Make dist/, and let it show that it is whole: contents, description, an installation that trains for a step."""
    made = [ROOT / "dist" / f"groupwise-{version}{ending}" for ending in (".tar.gz", "-py3-none-any.whl")]
    for old in made:
        old.unlink(missing_ok=True)
    _run(sys.executable, "-m", "build", "--outdir", str(ROOT / "dist"), str(ROOT))
    with zipfile.ZipFile(made[1]) as wheel:
        if gone := missing(wheel.namelist()):
            sys.exit(f"{made[1].name} lacks {', '.join(gone)}")
    _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, made))
    with tempfile.TemporaryDirectory() as folder:
        page, target = Path(folder) / "README.html", Path(folder) / "installed"
        _run(sys.executable, "-m", "readme_renderer", str(ROOT / "README.md"), "--output", str(page))
        if unseen := pictures(read("readme")) - set(re.findall(r'<img [^>]*src="([^"]+)"', page.read_text("utf-8"))):
            sys.exit(f"PyPI would show the README without {', '.join(unseen)}")
        _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(made[1]))
        demo = [sys.executable, "-m", "groupwise", "demo", "--steps", "1", "--no-serve"]  # with this Python's libraries
        installed = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(demo, cwd=folder, env=installed, check=True)
    print("\n".join(f"{path.stat().st_size / 1e6:6.1f} MB  {path}" for path in made))


def tag(version: str) -> None:
    """Commit the day of the release, and tag that commit."""
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout.strip():
        sys.exit("there are changes that are not committed")
    path = ROOT / "CHANGELOG.md"
    day = datetime.now(UTC).date().isoformat()
    path.write_text(dated(path.read_text(encoding="utf-8"), version=version, day=day), encoding="utf-8")
    _run("git", "commit", "--quiet", "--message", f"Release {version}", "CHANGELOG.md")
    _run("git", "tag", "--annotate", f"v{version}", "--message", f"Groupwise {version}")
    print(f"left to you: git push --follow-tags, then {sys.executable} -m twine upload dist/groupwise-{version}*")


def _run(*words: str) -> None:
    subprocess.run(words, cwd=ROOT, check=True)


def main() -> None:
    """Do what the one word of the command line says, and what comes before it."""
    if sys.argv[1:] not in (["check"], ["build"], ["tag"], ["dist"]):
        sys.exit(__doc__)
    version = check(tagged=sys.argv[1] == "dist")
    if sys.argv[1] != "check":
        build(version)
    if sys.argv[1] == "tag":
        tag(version)
    print(f"{version}: ok")


if __name__ == "__main__":
    main()
