"""A hub of Hugging Face with real sockets, which its own client (`huggingface_hub`) is driven against: it keeps what is
pushed in memory and gives it back.

It speaks what the client sends over plain HTTP: whoami, repository info and creation, `preupload`, the LFS batch with
its uploads, the commit as lines of JSON, the tree, and downloads with their ETags. The client's other way of sending
files, Xet, is switched off (HF_HUB_DISABLE_XET). `plan(...)` makes it fail in the next requests of a route.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_" + "t" * 34
LARGE = (".safetensors", ".gguf", ".parquet", ".bin")  # what the real one keeps in LFS
_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_REPO = r"(?P<repo>[^/]+/[^/]+?)"
_KIND = r"(?P<kind>models|datasets|spaces)"
_UNDER = r"(?:(?P<kind>datasets|spaces)/)?"


@dataclass
class Repo:
    """A repository: its files at each commit, the newest last."""

    name: str
    kind: str
    private: bool
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)  # (id, message, files)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][2]

    def commit(self, message: str, changed: Mapping[str, bytes]) -> str:
        files = {**(self.files if self.commits else {}), **changed}
        id = hashlib.sha1(f"{self.name}{len(self.commits)}{message}".encode()).hexdigest()
        self.commits.append((id, message, files))
        return id

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for id, _, files in reversed(self.commits):
            if revision in ("main", id):
                return id, files
        return None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A status, with what the real hub says of it; or, with `cut`, the connection closed in the middle."""

    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False


class FakeHub:
    """`url`, its `repos` by (kind, name), what was asked (`seen`: method and path), and faults by `plan`."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.stored: dict[str, bytes] = {}  # LFS objects, by their sha256
        self.seen: list[tuple[str, str]] = []
        self.role = "write"
        self.closed = False
        self._faults: dict[tuple[str, str], deque[Refusal]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Be away: nothing is answered any more, on connections that are open neither."""
        if self.closed:
            return
        self.closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def plan(self, method: str, path: str, *refusals: Refusal) -> None:
        """Let the next requests of a method, to a path that has `path` in it, be refused."""
        self._faults.setdefault((method, path), deque()).extend(refusals)

    def add(self, name: str, *, kind: str = "model", private: bool = True, **files: bytes) -> Repo:
        """Put a repository there."""
        repo = self.repos[kind, name] = Repo(name, kind, private)
        repo.commit("initial commit", {".gitattributes": b"", **files})
        return repo

    def sent(self, method: str, path: str) -> int:
        """Return how many requests there were of this method to paths with `path` in them."""
        return sum(each == method and path in where for each, where in self.seen)

    def fault(self, method: str, path: str) -> Refusal | None:
        for (planned, part), refusals in self._faults.items():
            if planned == method and part in path and refusals:
                return refusals.popleft()
        return None


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub while the block runs."""
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.close()


@contextmanager
def asked_here(hub: FakeHub, folder: Path) -> Iterator[FakeHub]:
    """The client of this process asks `hub`, logged in, with its caches in `folder` and without waits between its
    attempts; what HF_ENDPOINT and others do for a process that begins."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(hf_api.api, "endpoint", hub.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_ASSETS_CACHE", str(folder / "assets"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))  # all of its time
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub


def _oid(name: str, content: bytes) -> str:
    """What the hub calls a file by: the sha256 of a large one, else git's name of the blob."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            self._answer("GET")

        def do_HEAD(self) -> None:
            self._answer("HEAD")

        def do_POST(self) -> None:
            self._answer("POST")

        def do_PUT(self) -> None:
            self._answer("PUT")

        # ---- the protocol below ----
        def _answer(self, method: str) -> None:
            path = unquote(urlsplit(self.path).path)
            refusal = Refusal(cut=True) if hub.closed else hub.fault(method, path)
            hub.seen.append((method, path))
            if refusal is not None and refusal.cut:
                self.close_connection = True
                self.connection.close()
                return
            body = self._body()
            if refusal is not None:
                return self._send(refusal.status, {"error": "planned"}, headers=refusal.headers)
            for routed, pattern, act in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and method in routed:
                    return act(self, found, body)
            self._send(404, {"error": f"no route {method} {path}"})

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            chunks = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def _send(self, status: int, value: Any, *, headers: Mapping[str, str] | None = None) -> None:
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        @property
        def _known(self) -> bool:
            return self.headers.get("authorization") == f"Bearer {TOKEN}"

        def _repo(self, found: re.Match[str]) -> Repo | None:
            """The repository that is asked for, if it may be seen; else it is refused here."""
            kind = _KINDS.get(found["kind"] or "models", "model")
            repo = hub.repos.get((kind, found["repo"]))
            if repo is None or (repo.private and not self._known):
                self._send(404 if self._known else 401, {"error": "x"}, headers={"X-Error-Code": "RepoNotFound"})
                return None
            return repo

        # ---- what it answers ----
        def whoami(self, found: re.Match[str], body: bytes) -> None:
            if not self._known:
                return self._send(401, {"error": "Invalid credentials in Authorization header"})
            access = {"accessToken": {"role": hub.role, "displayName": "t"}}
            self._send(200, {"type": "user", "name": "me", "orgs": [{"name": "my-lab"}], "auth": access})

        def validate(self, found: re.Match[str], body: bytes) -> None:
            text = json.loads(body)["content"]
            head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
            errors = [] if head else [{"message": "no metadata"}]
            self._send(400 if errors else 200, {"errors": errors, "warnings": []})

        def create(self, found: re.Match[str], body: bytes) -> None:
            asked = json.loads(body)
            kind = asked.get("type") or "model"
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            private = asked.get("private", asked.get("visibility") == "private")
            if (kind, name) in hub.repos:
                return self._send(409, {"error": "You already created this repo", "url": f"{hub.url}/{name}"})
            if kind == "space":
                assert asked["sdk"] == "gradio"
            hub.add(name, kind=kind, private=bool(private))
            self._send(200, {"url": f"{hub.url}/{'' if kind == 'model' else kind + 's/'}{name}", "id": "1"})

        def info(self, found: re.Match[str], body: bytes) -> None:
            repo = self._repo(found)
            if repo is None:
                return
            at = repo.at(found["revision"] or "main")
            if at is None:
                return self._send(404, {"error": "x"}, headers={"X-Error-Code": "RevisionNotFound"})
            card = re.search(rb"^license: (.*)$", at[1].get("README.md", b""), re.MULTILINE)
            said = {"id": repo.name, "sha": at[0], "private": repo.private, "tags": []}
            said["siblings"] = [{"rfilename": name} for name in sorted(at[1])]
            self._send(200, said | ({"cardData": {"license": card[1].decode()}} if card else {}))

        def tree(self, found: re.Match[str], body: bytes) -> None:
            repo = self._repo(found)
            if repo is None:
                return
            at = repo.at(found["revision"])
            assert at is not None
            entries = []
            for name, content in sorted(at[1].items()):
                entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _oid(name, content)}
                if name.endswith(LARGE):
                    entry["lfs"] = {"oid": _oid(name, content), "size": len(content), "pointerSize": 130}
                entries.append(entry)
            self._send(200, entries)

        def preupload(self, found: re.Match[str], body: bytes) -> None:
            repo = self._repo(found)
            if repo is None:
                return
            files = []
            for each in json.loads(body)["files"]:
                name = each["path"]
                there = repo.files.get(name)
                mode = "lfs" if name.endswith(LARGE) else "regular"
                file = {"path": name, "uploadMode": mode, "shouldIgnore": False}
                files.append(file | ({} if there is None else {"oid": _oid(name, there)}))
            self._send(200, {"files": files})

        def batch(self, found: re.Match[str], body: bytes) -> None:
            objects = []
            for each in json.loads(body)["objects"]:
                entry = {"oid": each["oid"], "size": each["size"]}
                if each["oid"] not in hub.stored:
                    upload = {"href": f"{hub.url}/lfs/{each['oid']}", "header": {}}
                    verify = {"href": f"{hub.url}/verify", "header": {}}
                    entry["actions"] = {"upload": upload, "verify": verify}
                objects.append(entry)
            self._send(200, {"transfer": "basic", "objects": objects})

        def store(self, found: re.Match[str], body: bytes) -> None:
            if hashlib.sha256(body).hexdigest() != found["oid"]:
                return self._send(400, {"error": "not this object"})
            hub.stored[found["oid"]] = body
            self._send(200, {})

        def verify(self, found: re.Match[str], body: bytes) -> None:
            asked = json.loads(body)
            whole = len(hub.stored.get(asked["oid"], b"")) == asked["size"]
            self._send(200 if whole else 404, {})

        def commit(self, found: re.Match[str], body: bytes) -> None:
            repo = self._repo(found)
            if repo is None:
                return
            message, changed = "", {}
            for line in body.splitlines():
                said = json.loads(line)
                value = said["value"]
                if said["key"] == "header":
                    message = value["summary"]
                elif said["key"] == "file":
                    changed[value["path"]] = base64.b64decode(value["content"])
                elif said["key"] == "lfsFile":
                    changed[value["path"]] = hub.stored[value["oid"]]
            id = repo.commit(message, changed)
            self._send(200, {"success": True, "commitOid": id, "commitUrl": f"{hub.url}/{repo.name}/commit/{id}"})

        def resolve(self, found: re.Match[str], body: bytes) -> None:
            repo = self._repo(found)
            if repo is None:
                return
            at = repo.at(found["revision"])
            if at is None or found["path"] not in at[1]:
                code = "RevisionNotFound" if at is None else "EntryNotFound"
                return self._send(404, b"", headers={"X-Error-Code": code, "X-Repo-Commit": at[0] if at else ""})
            content = at[1][found["path"]]
            tag = f'"{_oid(found["path"], content)}"'
            self._send(200, content, headers={"X-Repo-Commit": at[0], "ETag": tag, "X-Linked-Size": str(len(content))})

    ROUTES = [
        (("GET",), r"/api/whoami-v2", Handler.whoami),
        (("POST",), r"/api/validate-yaml", Handler.validate),
        (("POST",), r"/api/repos/create", Handler.create),
        (("POST",), rf"/api/{_KIND}/{_REPO}/preupload/(?P<revision>.+)", Handler.preupload),
        (("POST",), rf"/api/{_KIND}/{_REPO}/commit/(?P<revision>.+)", Handler.commit),
        (("GET",), rf"/api/{_KIND}/{_REPO}/tree/(?P<revision>[^/]+)", Handler.tree),
        (("GET",), rf"/api/{_KIND}/{_REPO}(?:/revision/(?P<revision>.+))?", Handler.info),
        (("POST",), rf"/{_UNDER}{_REPO}\.git/info/lfs/objects/batch", Handler.batch),
        (("PUT",), r"/lfs/(?P<oid>[0-9a-f]{64})", Handler.store),
        (("POST",), r"/verify", Handler.verify),
        (("GET", "HEAD"), rf"/{_UNDER}{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    ]
    return Handler
