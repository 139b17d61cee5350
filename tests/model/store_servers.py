"""Small real servers for the store's tests: a package index and a model hub, on loopback."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit


def make_wheel(members: dict[str, bytes], *, symlinks: tuple[str, ...] = ()) -> bytes:
    """A zip with the given members, as a wheel would hold them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            if name in symlinks:
                info.external_attr = 0o120777 << 16
            archive.writestr(info, content)
    return buffer.getvalue()


@dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    range: str | None
    authorization: str | None


@dataclass
class IndexServer:
    """A PEP 691 / PEP 503 index. Knobs: what is offered, how slowly, and how it misbehaves."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # wheel file name -> content
    promised: dict[str, str] = field(default_factory=dict)  # file name -> sha256, where it should be a lie
    html: bool = False
    hashes: bool = True
    ranges: bool = True
    lengths: bool = True  # False: the end of a file is the end of the connection
    cut_after: int | None = None  # close the connection after so many bytes of every answer
    delay_s: float = 0.0  # per 16 KiB
    unavailable: int = 0  # how many more requests get 503
    password: str | None = None  # "user:password" asked for on every page and file
    seen: list[Seen] = field(default_factory=list)

    def downloads(self) -> list[Seen]:
        """The requests for wheels."""
        return [request for request in self.seen if request.path.endswith(".whl")]

    def page(self, package: str) -> tuple[str, bytes] | None:
        """The project page: content type and body."""
        prefix = package.replace("-", "_") + "-"
        names = [name for name in self.files if name.startswith(prefix)]
        if not names:
            return None
        digests = {name: self.promised.get(name, sha256(self.files[name])) for name in names}
        if self.html:
            anchors = (
                f'<a href="../../files/{name}{f"#sha256={digests[name]}" if self.hashes else ""}">{name}</a>'
                for name in names
            )
            return "text/html", "<!DOCTYPE html><br>".join(anchors).encode()
        rows = [
            {
                "filename": name,
                "url": f"../../files/{name}",
                "hashes": {"sha256": digests[name]} if self.hashes else {},
                "size": len(self.files[name]),
            }
            for name in names
        ]
        body = json.dumps({"meta": {"api-version": "1.1"}, "name": package, "files": rows})
        return "application/vnd.pypi.simple.v1+json", body.encode()


def sha256(content: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ClassVar[Any]

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def answer(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def asked_range(self, size: int) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        return min(int(match[1]), size) if match else 0


class _IndexHandler(_Handler):
    state: ClassVar[IndexServer]

    def do_GET(self) -> None:
        state = self.state
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        state.seen.append(Seen(path, self.headers.get("Range"), authorization))
        if state.unavailable:
            state.unavailable -= 1
            return self.answer(503, "text/plain", b"not now")
        if state.password is not None:
            import base64

            if authorization != "Basic " + base64.b64encode(state.password.encode()).decode():
                return self.answer(401, "text/plain", b"who are you?")
        if match := re.fullmatch(r"/simple/([^/]+)/", path):
            page = state.page(match[1])
            return self.answer(404, "text/plain", b"") if page is None else self.answer(200, *page)
        content = state.files.get(path.rpartition("/")[2])
        if content is None:
            return self.answer(404, "text/plain", b"")
        return self.send_file(content)

    def send_file(self, content: bytes) -> None:
        state = self.state
        start = self.asked_range(len(content)) if state.ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if state.lengths:
            self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Connection", "close")
        self.end_headers()
        body = content[start:]
        if state.cut_after is not None:
            body = body[: state.cut_after]
        try:
            for offset in range(0, len(body), 16384):
                self.wfile.write(body[offset : offset + 16384])
                time.sleep(state.delay_s)
        except ConnectionError:
            return


@dataclass
class HubServer:
    """The parts of the Hugging Face hub's API that fetching a model needs: model info, and resolve."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)  # org/name -> file -> content
    commits: dict[str, str] = field(default_factory=dict)  # org/name -> commit of main
    token: str | None = None
    corrupt: set[str] = field(default_factory=set)  # files sent with another content of the same size
    cut_after: int | None = None
    seen: list[Seen] = field(default_factory=list)

    def fetched(self) -> list[str]:
        """The files whose contents were sent, in order."""
        return [seen.path.rpartition("/")[2] for seen in self.seen if "/resolve/" in seen.path]


class _HubHandler(_Handler):
    state: ClassVar[HubServer]

    def do_HEAD(self) -> None:
        self.route()

    def do_GET(self) -> None:
        self.route()

    def route(self) -> None:
        state = self.state
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        if self.command == "GET":
            state.seen.append(Seen(path, self.headers.get("Range"), authorization))
        if state.token is not None and authorization != f"Bearer {state.token}":
            return self.refuse(401, "RepoNotFound", "Repository not found")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self.info(match[1], match[2] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(match[1], match[2], match[3])
        return self.refuse(404, "EntryNotFound", f"nothing at {path}")

    def refuse(self, status: int, code: str, text: str) -> None:
        body = json.dumps({"error": text}).encode()
        self.answer(status, "application/json", body, {"X-Error-Code": code, "X-Error-Message": text})

    def info(self, repo: str, revision: str) -> None:
        state = self.state
        if repo not in state.repos:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        commit = state.commits[repo]
        if revision not in ("main", commit):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = []
        for name, content in state.repos[repo].items():
            row: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if not name.endswith((".json", ".txt", ".md")):
                row["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
            siblings.append(row)
        body = {
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }
        self.answer(200, "application/json", json.dumps(body).encode())

    def resolve(self, repo: str, revision: str, name: str) -> None:
        state = self.state
        content = state.repos.get(repo, {}).get(name)
        if content is None:
            return self.refuse(404, "EntryNotFound", f"no {name}")
        headers = {
            "ETag": f'"{sha256(content)}"',
            "X-Repo-Commit": state.commits[repo],
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{sha256(content)}"',
            "Accept-Ranges": "bytes",
        }
        if name in state.corrupt:
            content = bytes(byte ^ 0xFF for byte in content)
        if self.command == "HEAD":
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            return None
        start = self.asked_range(len(content))
        self.send_response(206 if start else 200)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for key, value in {**headers, "Content-Length": str(len(content) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        body = content[start:]
        if state.cut_after is not None:
            body = body[: state.cut_after]
            self.close_connection = True
        self.wfile.write(body)
        return None


@contextmanager
def running(state: IndexServer | HubServer) -> Iterator[None]:
    """Serve ``state`` on a free port of 127.0.0.1 and set its ``url``."""
    base = _IndexHandler if isinstance(state, IndexServer) else _HubHandler
    handler = type("Handler", (base,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
