"""A stand-in for the Hugging Face hub, which serves folders over HTTP."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


class Hub:
    """Serves `repositories`, folders by "models/ORG/NAME" or "datasets/ORG/NAME"; answers 403 for those in `gated`.

    Every revision is `COMMIT`, until `move` moves the branch main of a repository.

    Args:
        cache: the folder to which processes with `constants`, those of `huggingface_hub`, download.
    """

    def __init__(self, cache: Path) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.revisions = {"main", COMMIT}
        self.downloads: list[str] = []
        self._newer: dict[str, Path] = {}
        self._requests_before: dict[str, int] = {}
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.constants = {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def move(self, repository: str, folder: Path, after: int = 0) -> None:
        """Let main of a repository be a newer commit, with the files in `folder`, after so many requests for main."""
        self._newer[repository] = folder
        self._requests_before[repository] = after

    def _moved(self, repository: str) -> bool:
        """Whether main of a repository is the newer commit at this request for it."""
        self._requests_before[repository] -= 1
        return self._requests_before[repository] < 0

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(request.path).path)
        kind, name, action, rest = _parts(path)
        repository = f"{kind}/{name}"
        folder = self.repositories.get(repository)
        if folder is None:
            return _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repository in self.gated:
            return _send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        revision, file = rest, ""
        if action == "resolve":
            revision, _, file = rest.partition("/")
        commit = COMMIT
        if repository in self._newer and (revision == NEWER_COMMIT or (revision == "main" and self._moved(repository))):
            folder, commit = self._newer[repository], NEWER_COMMIT
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        names = [str(file.relative_to(folder)) for file in files]
        if action in ("revision", "tree") and revision not in {*self.revisions, commit}:
            return _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if action == "revision":
            return _send_json(request, {"id": name, "sha": commit, "siblings": [{"rfilename": n} for n in names]})
        if action == "tree":
            sizes = [(name, file.stat().st_size) for name, file in zip(names, files, strict=True)]
            return _send_json(request, [{"type": "file", "path": n, "size": size, "oid": n} for n, size in sizes])
        if not (folder / file).is_file():
            return _send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
        body = (folder / file).read_bytes()
        if request.command == "GET":
            self.downloads.append(file)
        return _send(request, 200, body, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'})


@contextlib.contextmanager
def read_from(constants: dict[str, object]) -> Iterator[None]:
    """Let this process read the hub with these `constants` alone, without what it read before, and forget it after."""
    from opslot._base import hub

    cached = (hub.require_safetensors, hub._downloaded_model, hub._downloaded_data)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        for function in cached:
            function.cache_clear()
        try:
            yield
        finally:
            for function in cached:
                function.cache_clear()


def _parts(path: str) -> tuple[str, str, str, str]:
    """Kind and name of a repository, what is asked of it, and the rest of the path."""
    parts = path.strip("/").removeprefix("api/").split("/")
    if parts[0] not in ("models", "datasets"):
        parts = ["models", *parts]
    kind, org, name, action, *rest = [*parts, "", "", ""][: max(len(parts), 4)]
    return kind, f"{org}/{name}", action, "/".join(rest)


def _send(request: http.server.BaseHTTPRequestHandler, code: int, body: bytes, headers: dict[str, str]) -> None:
    request.send_response(code)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _send_json(request: http.server.BaseHTTPRequestHandler, value: object) -> None:
    _send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})
