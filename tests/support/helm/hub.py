"""A model hub on loopback: what `hf download` and `hf cache verify` use of Hugging Face's HTTP API."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPOSITORY, REVISION = "org/tiny", "a" * 40


@dataclass
class Hub:
    """files: of the one repository. token: of all calls. cut: files whose first download ends early."""

    files: Mapping[str, bytes]
    token: str = ""
    cut: set[str] = field(default_factory=set)
    url: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def checksum(self, name: str) -> str:
        """As the hub gives it: of large files their SHA-256, of small ones git's own."""
        data = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def entry(self, name: str) -> dict[str, Any]:
        """What a listing says of a file."""
        size, oid = len(self.files[name]), self.checksum(name)
        entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": oid}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": oid, "size": size, "pointerSize": 130}
        return entry


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves it until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, wanted = self.path.partition("?")[0], self.headers.get("Range")
            hub.asked.append((self.command, path, wanted))
            name = path.removeprefix(f"/{REPOSITORY}/resolve/{REVISION}/")
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, b"")
            elif path.startswith(f"/api/models/{REPOSITORY}/revision/"):
                names = [{"rfilename": name} for name in hub.files]
                self.answer(200, json.dumps({"id": REPOSITORY, "sha": REVISION, "siblings": names}).encode())
            elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                self.answer(200, json.dumps([hub.entry(name) for name in hub.files]).encode())
            elif name in hub.files:
                self.file(name, wanted)
            else:
                self.answer(404, b"")

        def file(self, name: str, wanted: str | None) -> None:
            data = hub.files[name]
            start = int(m[1]) if (m := re.fullmatch(r"bytes=(\d+)-", wanted or "")) else 0
            headers = {"ETag": f'"{hub.checksum(name)}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            cut = self.command == "GET" and name in hub.cut
            hub.cut.discard(name) if cut else None
            self.answer(206 if start else 200, data[start:], headers, cut=cut)

        def answer(
            self, code: int, body: bytes, headers: Mapping[str, str] | None = None, *, cut: bool = False
        ) -> None:
            self.send_response(code)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
