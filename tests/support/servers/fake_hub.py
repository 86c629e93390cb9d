"""A local Hugging Face hub that serves the files of a directory ORG/NAME/… over the hub's HTTP interface."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


GATED = "org/gated"
"""A repository that needs a token."""


class _Handler(BaseHTTPRequestHandler):
    root: Path
    requested: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.requested.append(path)
        parts = path.removeprefix("api/models/").split("/")
        repo = "/".join(parts[:2])
        if repo == GATED:
            return self.fail(403, "GatedRepo")
        if not (self.root / repo).is_dir():
            return self.fail(401, "RepoNotFound")
        if len(parts) > 3 and parts[3] not in ("main", COMMIT):
            return self.fail(404, "RevisionNotFound")
        if "resolve" in parts:
            return self.send_file(self.root / repo / "/".join(parts[4:]))
        files = [p for p in sorted((self.root / repo).rglob("*")) if p.is_file()]
        names = {str(p.relative_to(self.root / repo)): p.stat().st_size for p in files}
        if "tree" in parts:
            return self.send_json(
                [
                    {"type": "file", "path": name, "size": size, "oid": f"{size:040x}"}
                    for name, size in names.items()
                ]
            )
        siblings = [{"rfilename": name} for name in names]
        self.send_json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})

    def send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.reply(200, body, {"Content-Type": "application/json"})

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            return self.fail(404, "EntryNotFound")
        body = path.read_bytes()
        etag = hashlib.sha256(body).hexdigest()
        self.reply(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def fail(self, status: int, code: str) -> None:
        self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Run a hub whose repository `GATED` needs a token, and return its URL and the list of requested paths."""
    requested: list[str] = []
    handler = type("Handler", (_Handler,), {"root": root, "requested": requested})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
