"""llms.txt, the documentation as a list for language models (https://llmstxt.org): each page by its beginning.

python docs/generate_llms.py    write llms.txt
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "llms.txt"
RAW = "https://raw.githubusercontent.com/groupwise/groupwise/main"
SECTION = re.compile(r"^  - ([\w -]+):$")
PAGE = re.compile(r"^ +- \"?(.+?)\"?: ([\w/]+\.md)$")
HEAD = f"""# Groupwise

> GRPO post-training of language models on your own score of their answers: a run from one YAML file, a live server that
> learns while it serves, a loop of your own in Python. What needs no GPU runs on two CPU cores (`model: starter`).

- In a clone: `pip install .`, `groupwise init my-task`, `groupwise check my_run.yaml`, `groupwise run my_run.yaml`.
- [A skill for coding agents]({RAW}/skills/groupwise/SKILL.md): write a reward, check, run, read what went wrong.
- Errors say what is wrong, the value, what is valid and what to do; `--json` prints one object.
"""


def text() -> str:
    """Return the file, in the order of the site's navigation."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    lines = [HEAD, "## Begin\n"]
    for line in navigation.splitlines():
        if section := SECTION.match(line):
            lines += ["", f"## {section[1]}\n"]
        elif page := PAGE.match(line):
            lines.append(f"- [{page[1]}]({RAW}/docs/{page[2]}): {_beginning(ROOT / 'docs' / page[2])}")
    return "\n".join(lines) + "\n"


def _beginning(page: Path) -> str:
    """Return the first sentence of the page's first paragraph, without links."""
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")[1:]
    first = " ".join(next(each for each in paragraphs if re.match(r"[A-Z*`\[]", each)).split())
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    sentences = [each for each in re.split(r"(?<=[.;])\s", plain) if not each.startswith(("Made by", "do not edit"))]
    return sentences[0].rstrip(".:;") + "."


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
