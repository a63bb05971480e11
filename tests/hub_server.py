"""A stand-in for the hub: what huggingface_hub asks of it, of repositories in memory, and its wrong answers.

The forms of the answers are those of https://huggingface.co/docs/hub/api and of the package's own parsers.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE = (".safetensors", ".bin", ".parquet")
"""Endings of files that are kept as large ones (LFS)."""


@dataclass
class Answer:
    """What the server sends."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    """Content-Length, where it is not that of the body."""

    @classmethod
    def of_json(cls, content: Any) -> Answer:
        return cls(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    @classmethod
    def of_error(cls, status: int, code: str = "") -> Answer:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        return cls(status, json.dumps({"error": code or "no reason"}).encode(), headers)


@dataclass
class Request:
    """What was asked."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass
class Repository:
    """A model or dataset, with its commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], reference: str = "main") -> str:
        """Add a commit of these files alone, and return its name."""
        content = json.dumps([len(self.commits), sorted((name, git_blob(data)) for name, data in files.items())])
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.references[reference] = sha
        return sha


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubServer:
    """Repositories by kind and name; `override` may give another answer to a request."""

    TOKEN = "hf_the_token_of_the_test"

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[Request] = []
        self.uploaded: dict[str, bytes] = {}
        self.override: Callable[[Request], Answer | None] = lambda request: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                parts = urlsplit(self.path)
                request = Request(
                    self.command,
                    unquote(parts.path),
                    parse_qs(parts.query),
                    dict(self.headers),
                    self.rfile.read(length),
                )
                outer.requests.append(request)
                answer = outer.override(request) or outer.answer(request)
                self.send_response(answer.status)
                size = len(answer.body) if answer.length is None else answer.length
                for name, value in {**answer.headers, "Content-Length": str(size)}.items():
                    self.send_header(name, value)
                if size != len(answer.body):
                    self.close_connection = True
                self.end_headers()
                if self.command != "HEAD":
                    with contextlib.suppress(OSError):  # the client has left
                        self.wfile.write(answer.body)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo: str, files: Mapping[str, bytes], kind: str = "model", reference: str = "main") -> str:
        """Add a commit to a repository, and return its name."""
        return self.repositories.setdefault((kind, repo), Repository()).commit(files, reference)

    def asked(self, method: str, pattern: str) -> int:
        """Return the number of requests whose path matches."""
        return sum(1 for request in self.requests if request.method == method and re.search(pattern, request.path))

    # Answers

    def answer(self, request: Request) -> Answer:
        path = request.path
        if path == "/api/whoami-v2":
            return self._whoami(request)
        if path == "/api/validate-yaml":
            return Answer.of_json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(request)
        if path.startswith("/uploads/"):
            return self._take_upload(request)
        match = re.fullmatch(r"/(?:(dataset)s/)?([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path)
        if match:
            return self._batch(request)
        match = re.fullmatch(r"/api/(model|dataset)s/([\w.-]+/[\w.-]+)(?:/(.*))?", path)
        if match:
            return self._api(request, match[1], match[2], match[3] or "revision/main")
        match = re.fullmatch(r"/(?:(dataset)s/)?([\w.-]+/[\w.-]+)/resolve/(.*)", path)
        if match:
            return self._resolve(request, match[1] or "model", match[2], match[3])
        return Answer.of_error(404)

    def _is_user(self, request: Request) -> bool:
        return request.headers.get("authorization") == f"Bearer {self.TOKEN}"

    def _whoami(self, request: Request) -> Answer:
        if not self._is_user(request):
            return Answer.of_error(401)
        return Answer.of_json({"type": "user", "name": "org", "orgs": [], "auth": {"type": "access_token"}})

    def _repository(self, request: Request, kind: str, repo: str) -> Repository | Answer:
        repository = self.repositories.get((kind, repo))
        if repository is None or (repository.private and not self._is_user(request)):
            return Answer.of_error(401, "RepoNotFound")
        return repository

    def _files(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = repository.references.get(revision, revision)
        files = repository.commits.get(sha)
        return None if files is None else (sha, files)

    def _api(self, request: Request, kind: str, repo: str, rest: str) -> Answer:
        repository = self._repository(request, kind, repo)
        if isinstance(repository, Answer):
            return repository
        what, _, rest = rest.partition("/")
        if what == "preupload":
            names = [file["path"] for file in json.loads(request.body)["files"]]
            modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
            chosen = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            return Answer.of_json({"files": chosen})
        if what == "commit":
            return self._commit(request, repository, repo)
        revision, _, folder = rest.partition("/") if what == "tree" else (rest, "", "")
        found = self._files(repository, revision)
        if found is None:
            return Answer.of_error(404, "RevisionNotFound")
        sha, files = found
        if what == "revision":
            siblings = [self._sibling(name, data) for name, data in files.items()]
            return Answer.of_json({"id": repo, "sha": sha, "private": repository.private, "siblings": siblings})
        if what == "tree":
            inside = {name: data for name, data in files.items() if not folder or name.startswith(f"{folder}/")}
            recursive = request.query.get("recursive", ["false"])[0].lower() in ("true", "1")
            return Answer.of_json(self._tree(inside, folder, recursive=recursive))
        if what == "paths-info":
            paths = _paths_of(request.body)
            entries = [entry for entry in self._tree(files, "", recursive=True) if entry["path"] in paths]
            return Answer.of_json(entries)
        return Answer.of_error(404)

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_blob(data)}
        if name.endswith(LARGE):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def _tree(self, files: Mapping[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for name, data in files.items():
            parts = name.split("/")
            depth = len(folder.split("/")) if folder else 0
            for end in range(depth + 1, len(parts)):
                if recursive or end == depth + 1:
                    path = "/".join(parts[:end])
                    oid = hashlib.sha1(path.encode()).hexdigest()
                    entries[path] = {"type": "directory", "oid": oid, "size": 0, "path": path}
            if recursive or len(parts) == depth + 1:
                entry = {"type": "file", "oid": git_blob(data), "size": len(data), "path": name}
                if name.endswith(LARGE):
                    entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                entries[name] = entry
        return list(entries.values())

    def _resolve(self, request: Request, kind: str, repo: str, rest: str) -> Answer:
        repository = self._repository(request, kind, repo)
        if isinstance(repository, Answer):
            return repository
        if repository.gated and not self._is_user(request):
            return Answer.of_error(403, "GatedRepo")
        revision, _, name = rest.partition("/")
        found = self._files(repository, revision)
        if found is None:
            return Answer.of_error(404, "RevisionNotFound")
        sha, files = found
        if name not in files:
            return Answer.of_error(404, "EntryNotFound")
        data = files[name]
        etag = hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_blob(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if name.endswith(LARGE):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or request.headers.get("range") or "")
        if wanted is None:
            return Answer(200, data, headers)
        begin, end = int(wanted[1]), min(len(data), int(wanted[2] or len(data)) + 1)
        if begin >= len(data):
            return Answer(416, b"", headers)
        return Answer(206, data[begin:end], {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})

    # Uploads

    def _create(self, request: Request) -> Answer:
        if not self._is_user(request):
            return Answer.of_error(401)
        content = json.loads(request.body)
        repo = f"{content.get('organization') or 'org'}/{content['name']}"
        key = (content.get("type") or "model", repo)
        if key in self.repositories:
            return Answer(409, json.dumps({"url": f"{self.url}/{repo}"}).encode())
        # older releases of the package say it by the first
        is_private = bool(content.get("private")) or content.get("visibility") == "private"
        self.repositories[key] = Repository(private=is_private)
        self.repositories[key].commit({})
        return Answer.of_json({"url": f"{self.url}/{repo}"})

    def _batch(self, request: Request) -> Answer:
        objects = []
        for each in json.loads(request.body)["objects"]:
            upload = {"href": f"{self.url}/uploads/{each['oid']}", "header": {}}
            objects.append({**each, "actions": {"upload": upload}})
        return Answer.of_json({"transfer": "basic", "objects": objects})

    def _take_upload(self, request: Request) -> Answer:
        self.uploaded[request.path.rpartition("/")[2]] = request.body
        return Answer()

    def _commit(self, request: Request, repository: Repository, repo: str) -> Answer:
        if not self._is_user(request):
            return Answer.of_error(403)
        files = dict(repository.commits[repository.references["main"]])
        for line in request.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.uploaded[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(files)
        return Answer.of_json({"commitUrl": f"{self.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})


def _paths_of(body: bytes) -> list[str]:
    with contextlib.suppress(ValueError):
        return list(json.loads(body)["paths"])
    return parse_qs(body.decode())["paths"]


@contextlib.contextmanager
def serving() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


def hub_variables(server: HubServer | None, home: Any) -> dict[str, str]:
    """Return the variables by which a process uses the server and an own cache; without a server it is offline."""
    variables = {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    if server is None:
        return {**variables, "HF_HUB_OFFLINE": "1"}
    return {**variables, "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}


def use_hub(monkeypatch: pytest.MonkeyPatch, server: HubServer | None, home: Any) -> None:
    """Let this process use the server and an own cache; the package has read its variables when it was imported."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for name, value in hub_variables(server, home).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", server is None)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    if server is not None:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )


def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package not wait between its attempts, up to 23 s."""
    module = pytest.importorskip("huggingface_hub.utils._http")
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))
