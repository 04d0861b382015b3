"""A hub on loopback: the calls that huggingface_hub makes to bring a model (info, tree, resolve), over folders."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_the_test"


@dataclass
class Repo:
    """One model: a folder for each commit, and what its branches and tags are now."""

    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    """Its files, not its listing, need TOKEN."""

    def add(self, folder: Path, *refs: str) -> str:
        """A new commit, made of the folder's files, that the refs name from now on; returns it."""
        text = "".join(f"{file.name} {git_hash(file.read_bytes())}\n" for file in sorted(folder.iterdir()))
        commit = hashlib.sha1(f"{len(self.commits)}\n{text}".encode()).hexdigest()
        self.commits[commit] = folder
        self.refs |= dict.fromkeys(refs or ("main",), commit)
        return commit


@dataclass
class Hub:
    """What the server has, what it was asked, and its faults."""

    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """ "METHOD path" of each request, and of one for a part of a file its range."""
    url: str = ""
    cut_after_bytes: dict[str, int] = field(default_factory=dict)
    """File name to bytes after which the connection breaks, once."""
    status: int | None = None
    """Answered to everything, if set."""
    stalled: threading.Event = field(default_factory=threading.Event)
    """Set once a download has come to where it was told to stall."""
    _stall_after_bytes: dict[str, int] = field(default_factory=dict)
    _resumed: threading.Event = field(default_factory=threading.Event)

    def stall(self, file_name: str, after_bytes: int) -> None:
        """That file's next download stops there, its connection open, until `resume`."""
        self.stalled.clear()
        self._resumed.clear()
        self._stall_after_bytes[file_name] = after_bytes

    def resume(self) -> None:
        """Ends all stalls."""
        self._resumed.set()

    def stall_of(self, file_name: str) -> int | None:
        """Where that file's download stalls, once; None: nowhere."""
        return self._stall_after_bytes.pop(file_name, None)

    def wait(self) -> None:
        """Until `resume`, a minute at most."""
        self.stalled.set()
        self._resumed.wait(60)

    def repo(self, name: str) -> Repo:
        """Of that name, made where there is none."""
        return self.repos.setdefault(name, Repo())

    def asked_for(self, method: str, part: str) -> list[str]:
        """Requests of that method whose path holds `part`."""
        return [line for line in self.asked if line.startswith(f"{method} ") and part in line]


def git_hash(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of loopback."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = _Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, cache: Path) -> dict[str, str]:
    """For a process that is to ask this hub and nobody else."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_ETAG_TIMEOUT": "5",
    }


def ask_here(patch: pytest.MonkeyPatch, hub: Hub, cache: Path) -> None:
    """Makes this process ask it too: the client has read its environment when it was imported, long ago."""
    from huggingface_hub import constants

    for name, value in environment(hub, cache).items():
        patch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Quiet: clients that break a connection off are part of the tests."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        part = self.headers.get("Range")
        self.hub.asked.append(f"{self.command} {path}" + (f" {part}" if part else ""))
        if self.hub.status is not None:
            self._json({"error": "told to"}, self.hub.status)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            self._api(found[1], found[2], found[3] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], found[3], body=body)
        else:
            self._json({"error": "no such page"}, 404)

    def _api(self, name: str, kind: str | None, revision: str) -> None:
        found = self._commit(name, revision)
        if found is None:
            return
        commit, folder = found
        files = sorted(folder.iterdir())
        if kind == "tree":
            self._json([_listed(file) for file in files])
        else:
            self._json({"id": name, "sha": commit, "siblings": [{"rfilename": file.name} for file in files]})

    def _commit(self, name: str, revision: str) -> tuple[str, Path] | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            self._json({"error": f"Invalid rev id: {revision}"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, repo.commits[commit]

    def _file(self, name: str, revision: str, file_name: str, *, body: bool) -> None:
        found = self._commit(name, revision)
        if found is None:
            return
        commit, folder = found
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            message = "Invalid credentials in Authorization header"
            self._json({"error": message}, 401, {"X-Error-Message": message})
        elif self.hub.repos[name].gated and authorization is None:
            self._json({"error": "gated"}, 401, {"X-Error-Code": "GatedRepo"})
        elif not (folder / file_name).is_file():
            self._json({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            self._content(folder / file_name, commit, body=body)

    def _content(self, file: Path, commit: str, *, body: bool) -> None:
        content = file.read_bytes()
        listed = _listed(file)
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(HTTPStatus.PARTIAL_CONTENT if begin else HTTPStatus.OK)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{listed["lfs"]["oid"] if "lfs" in listed else listed["oid"]}"')
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return
        cut = self.hub.cut_after_bytes.pop(file.name, None)
        if (stall := self.hub.stall_of(file.name)) is not None:
            self.wfile.write(content[begin:stall])
            self.hub.wait()
            begin = stall
        self.wfile.write(content[begin:cut])
        if cut is not None:
            self.close_connection = True

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _listed(file: Path) -> dict[str, Any]:
    """A file as a tree listing tells it; weights lie in LFS, where their hash is SHA-256."""
    content = file.read_bytes()
    listed: dict[str, Any] = {"type": "file", "path": file.name, "size": len(content), "oid": git_hash(content)}
    if file.suffix in (".safetensors", ".bin"):
        digest = hashlib.sha256(content).hexdigest()
        listed["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return listed
