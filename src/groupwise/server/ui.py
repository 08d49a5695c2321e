"""The web interface: the built files under /ui, which need no key, outside the guard of all other routes.

    /ui/                the page; browsers request it every time (an ETag makes that cheap), under a strict policy
    /ui/assets/...      the page's scripts and styles, named by hashes of their content: browsers keep them for a year
    /ui, and / in a browser     lead to /ui/

The files hold no data: the page requests data from the API, with the key that the user typed in. So the files are
    served while the model is loaded, too. Sources are in ui/, built by `npm run build` into the directory next to this
    file.
Content Security Policy, level 3: nothing inline but pictures, nothing from elsewhere, no framing.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from groupwise.server.errors import MethodNotAllowedError, RouteNotFoundError, printable, respond

BUILT = Path(__file__).parent / "ui"
ROOT, PAGE = "/ui/", "index.html"
HASHED = "assets/"
READS = ("GET", "HEAD")
YEAR_S = 365 * 24 * 3600
POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)
SAFETY = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, kw_only=True)
class WebFile:
    """A built file as it is sent."""

    content: bytes
    zipped: bytes
    kind: str
    etag: str
    kept_s: int


class Web:
    """ASGI middleware: answers for /ui, and leaves everything else to `app`."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (answer := _answer(scope)):
            await answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _answer(scope: Scope) -> Response | None:
    """Return the answer for a path of the web interface, None for any other path."""
    path, headers = scope["path"], Headers(scope=scope)
    if path == "/" and scope["method"] in READS:
        return RedirectResponse("ui/", status_code=307, headers=SAFETY)
    if path == ROOT.rstrip("/"):
        return _checked(scope["method"], RedirectResponse("ui/", status_code=308, headers=SAFETY))
    if not path.startswith(ROOT):
        return None
    file = built_files().get(path.removeprefix(ROOT) or PAGE)
    if file is None:
        hint = "the web interface begins at /ui/"
        return _safe(respond(RouteNotFoundError(f"there is no file {printable(path)!r}", hint=hint)))
    return _checked(scope["method"], _sent(file, headers))


def _sent(file: WebFile, asked: Headers) -> Response:
    cache = f"public, max-age={file.kept_s}, immutable" if file.kept_s else "no-cache"
    headers = {**SAFETY, "cache-control": cache, "etag": file.etag, "vary": "accept-encoding"}
    if file.etag in asked.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    zips = "gzip" in asked.get("accept-encoding", "") and len(file.zipped) < len(file.content)
    if zips:
        headers["content-encoding"] = "gzip"
    return Response(file.zipped if zips else file.content, headers={**headers, "content-type": file.kind})


def _checked(method: str, answer: Response) -> Response:
    """`answer`, without its body for HEAD; an error for methods that a file does not have."""
    if method not in READS:
        message = f"{printable(method)} is not a method of the web interface's files; they have GET, HEAD"
        return _safe(respond(MethodNotAllowedError(message, allowed=READS)))
    if method == "HEAD":
        answer.body = b""  # content-length stays that of GET
    return answer


def _safe(answer: Response) -> Response:
    answer.headers.update(SAFETY)
    return answer


@cache
def built_files() -> dict[str, WebFile]:
    """Return every built file by its path under /ui/; empty where the interface has not been built."""
    paths = (path for path in sorted(BUILT.rglob("*")) if path.is_file())
    return {path.relative_to(BUILT).as_posix(): _read(path) for path in paths}


def _read(path: Path) -> WebFile:
    content = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    textual = kind.startswith("text/") or kind in ("application/json", "image/svg+xml")
    hashed = path.relative_to(BUILT).as_posix().startswith(HASHED)
    return WebFile(
        content=content,
        zipped=gzip.compress(content, mtime=0),
        kind=f"{kind}; charset=utf-8" if textual else kind,
        etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        kept_s=YEAR_S if hashed else 0,
    )
