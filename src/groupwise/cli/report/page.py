"""Writes the page: the built web interface and the data of the runs in one file, which opens without a server or a
network.

The file makes no requests. Its Content-Security-Policy allows only its own script and style sheet, by their hashes. The
text of models and users is data in the file, never markup: the JSON that holds the text contains no `<`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from groupwise.errors import StorageError
from groupwise.server.ui import PAGE, built_files

DATA_ID = "groupwise-report"  # of the element that ui/src/api/saved.ts reads
_SCRIPT = re.compile(r'<script type="module"[^>]* src="\./([^"]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet"[^>]* href="\./([^"]+)">')
_ICON = re.compile(r'<link rel="icon" href="\./([^"]+)"[^>]*>')
_CHARSET = '<meta charset="utf-8" />'
# What would end an inline script, or keep its end from being seen: written in another way, in a string or a pattern.
_ENDS_SCRIPT = re.compile(r"<(?=!--|/?script)", re.IGNORECASE)


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Write the report of `data` (`data_of`) to `path`, whole or not at all. Raises StorageError."""
    page = render(data)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError.of(
            error, f"{path} cannot be written: {error}", hint="name another file with --out"
        ) from error
    return path


def render(data: Mapping[str, Any]) -> str:
    """Return the page as text. Raises StorageError where the interface is not in this installation."""
    page = _built(PAGE)
    script, style, icon = (_named(pattern, page) for pattern in (_SCRIPT, _STYLE, _ICON))
    code, looks = _ENDS_SCRIPT.sub(r"\\x3C", _built(script)), _built(style)
    title = escape(", ".join(run["detail"]["name"] for run in data["runs"]))
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(looks)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    picture = base64.b64encode(_built(icon).encode()).decode()
    loading = f"This report is drawn by a script. Its data is JSON, in the element {DATA_ID}."
    head = f'{_CHARSET}\n    <meta http-equiv="Content-Security-Policy" content="{policy}" />'
    parts = {  # the script last: nothing is looked for in it
        re.compile(_CHARSET): head,
        re.compile("<title>.*?</title>"): f"<title>{title} · Groupwise</title>",
        _ICON: f'<link rel="icon" href="data:image/svg+xml;base64,{picture}">',
        re.compile("<noscript>.*?</noscript>"): f"<noscript>{loading}</noscript>",
        re.compile("</body>"): f'<script type="application/json" id="{DATA_ID}">{_json(data)}</script>\n  </body>',
        _STYLE: f"<style>{looks}</style>",
        _SCRIPT: f'<script type="module">{code}</script>',
    }
    for pattern, text in parts.items():
        page = pattern.sub(lambda _, text=text: text, page, count=1)
    return page


def _json(data: Mapping[str, Any]) -> str:
    """Return JSON without the only character that could begin markup."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _built(name: str) -> str:
    """Return a built file as text, with the line ends that a parser makes of it."""
    file = built_files().get(name)
    if file is None:
        raise StorageError(
            f"the web interface, of which a report is made, is not in this installation: there is no {name}",
            hint="install groupwise again; in a checkout: make ui",
        )
    return file.content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _named(pattern: re.Pattern[str], page: str) -> str:
    """Return the one file that the page names in this way."""
    [name] = pattern.findall(page)
    return name


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
