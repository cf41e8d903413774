"""A stand-in of the Hugging Face hub on localhost, for its own client.

It answers as the hub does: small files from the address itself, after a redirect without a host;
files of LFS by a redirect to another host (`localhost` for `127.0.0.1`), which takes ranges.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".gguf", ".bin", ".pt", "tokenizer.json")


def commit_of(files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(json.dumps(sorted(files)).encode() + b"".join(files.values())).hexdigest()


@dataclass
class HubStandIn:
    """repositories: files by revision. The newest is that of `main`. gated: repositories that need
    a token. token: the only one that is accepted. breaks: bytes after which the next transfers of
    LFS break. requests: method, path, Range and whether there was a token."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    breaks: list[int] = field(default_factory=list)
    status: int = 200
    requests: list[tuple[str, str, str | None, bool]] = field(default_factory=list)

    def add(self, name: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Returns the commit."""
        commit = commit_of(files)
        revisions = self.repositories.setdefault(name, {})
        revisions[revision] = revisions[commit] = dict(files)
        return commit

    def fetched(self, suffix: str = "") -> list[str]:
        """Names of the files that were transferred, in order."""
        paths = [path for method, path, *_ in self.requests if method == "GET"]
        names = [path.rpartition("/")[2] for path in paths if "/cdn/" in path or "/small/" in path]
        return [name for name in names if name.endswith(suffix)]

    @contextmanager
    def served(self) -> Iterator[str]:
        """The URL."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.hub = self  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.paths = json.loads(self.rfile.read(length))["paths"]
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    @property
    def hub(self) -> HubStandIn:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        given = self.headers.get("Authorization")
        self.hub.requests.append((self.command, path, self.headers.get("Range"), bool(given)))
        parts = path.strip("/").split("/")
        if parts[0] in ("cdn", "small"):
            return self._content(parts)
        if self.hub.status != 200:
            return self._send(self.hub.status, b"")
        if given and given != f"Bearer {self.hub.token}":
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        revisions = self.hub.repositories.get(f"{owner}/{name}")
        if revisions is None:
            return self._refuse(404 if given else 401, "RepoNotFound")
        kind, revision = rest[:2] if rest else ("revision", "main")
        files = revisions.get(revision)
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        if is_api:
            return self._about(kind, f"{owner}/{name}", files)
        if f"{owner}/{name}" in self.hub.gated and not given:
            return self._refuse(401, "GatedRepo")
        file = "/".join(rest[2:])
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        return self._place(f"{owner}/{name}", file, files)

    def _about(self, kind: str, name: str, files: Mapping[str, bytes]) -> None:
        if kind == "revision":
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            return self._json({"id": name, "sha": commit_of(files), "siblings": siblings})
        wanted = self.paths if kind == "paths-info" else files
        return self._json(
            [
                {"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40}
                for file in wanted
                if file in files
            ]
        )

    def _place(self, name: str, file: str, files: Mapping[str, bytes]) -> None:
        data, commit = files[file], commit_of(files)
        number = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{number}"'}
        if not file.endswith(LFS):
            place = f"/small/{name}/{commit}/{file}"
            return self._send(307, b"", headers | {"Location": place})
        port = self.server.server_port  # type: ignore[attr-defined]
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{number}"'}
        place = f"http://localhost:{port}/cdn/{name}/{commit}/{file}"
        return self._send(302, b"", headers | {"Location": place})

    def _content(self, parts: list[str]) -> None:
        kind, owner, name, commit, *rest = parts
        files = self.hub.repositories[f"{owner}/{name}"][commit]
        data = files["/".join(rest)]
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status, start, end = 200, 0, len(data)
        if given := self.headers.get("Range"):
            first, _, last = given.removeprefix("bytes=").partition("-")
            status, start, end = 206, int(first), min(int(last or end) + 1, end)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        body = data[start:end]
        most = len(body)
        if kind == "cdn" and self.command == "GET" and self.hub.breaks:
            most = self.hub.breaks.pop(0)
        self._send(status, body, headers, most)

    def _json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> None:
        """most: bytes of the body after which the connection breaks."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:most])
        if most is not None and most < len(body):
            self.close_connection = True
