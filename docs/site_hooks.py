"""mkdocs' hook: links from a page to a file of the repository that is no page lead to the repository on GitHub.

On GitHub `../src/groupwise/run/loop.py` opens the file; the site has only what is in docs/. tests/test_docs_pages.py
checks that the file exists.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text with every relative link that leaves docs/ made absolute."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def absolute(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        outside = not target.startswith("docs/") or target.endswith((".json", ".yaml", ".py"))
        return f"{config.repo_url}/blob/main/{target}" if outside else match[1]

    return LINK.sub(absolute, markdown)
