"""Models of a hub (https://huggingface.co/docs/hub/api), through its own client: names, commits, files in its cache.

The client honours HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_CACHE. It is imported in the calls: a service that reads a
local folder does without it. Layout of the cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import StartError

Say = Callable[[str], None]
"""Takes a line for people."""

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""What frontends and schedulers read; a checkpoint need not have all of them."""

WEIGHT_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5", ".gguf")
"""Weights in other formats; the first ones run code when they are opened."""

DEFAULT_REVISION = "main"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_SAY_EVERY_S = 5.0


@dataclass(frozen=True)
class Cached:
    """One commit of a model in the cache."""

    model: str
    commit: str
    refs: tuple[str, ...]
    """Branches and tags that were this commit when they were last asked for."""
    size_bytes: int
    path: Path


def is_id(model: str) -> bool:
    """Whether it is spelled like a hub's model, ORG/NAME."""
    return _ID.fullmatch(model) is not None


def commit_of(path: Path) -> str:
    """The commit of a folder that lies where the client keeps it (`.../snapshots/COMMIT`); else empty."""
    return path.name if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name) else ""


def id_of(path: Path) -> str:
    """ORG/NAME of such a folder (`.../models--ORG--NAME/snapshots/COMMIT`); else empty."""
    kind, _, name = path.parent.parent.name.partition("--")
    return name.replace("--", "/", 1) if commit_of(path) and kind == "models" else ""


def snapshot(model: str, revision: str | None, *, offline: bool, weights: bool, say: Say) -> Path:
    """The folder of a model's commit in the cache; what is missing there is fetched, unless `offline`.

    `revision` is a branch, a tag or a commit, None the default branch; `weights` says whether the weights are needed.
    Raises StartError in one line: no such model or revision, no access, no network, not cached, no safetensors.
    """
    import huggingface_hub

    offline = offline or huggingface_hub.constants.is_offline_mode()
    source = _Source(model, revision or DEFAULT_REVISION, offline)
    with _explained(source), _client_heard(say):
        commit = huggingface_hub.HfApi().resolve_revision(model, revision=revision, local_files_only=offline).resolved
        path = _bring(source, commit, [*TEXT_FILES, WEIGHT_INDEX] if weights else TEXT_FILES, say)
        if not (path / "config.json").is_file():
            _refuse_uncached(source, path)
            raise StartError(f"{source.told} has no config.json, so it is no checkpoint that can be served")
        if weights:
            _bring(source, commit, _weight_names(source, path), say)
    say(f"{model} at {source.revision} is commit {commit}, in {path}")
    return path


def cached() -> list[Cached]:
    """Every commit of a model in the cache, whole or not, by name."""
    import huggingface_hub

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.errors.CacheNotFound:
        return []
    found = [
        Cached(repo.repo_id, one.commit_hash, tuple(sorted(one.refs)), one.size_on_disk, one.snapshot_path)
        for repo in repos
        if repo.repo_type == "model"
        for one in repo.revisions
    ]
    return sorted(found, key=lambda one: (one.model, one.commit))


def listed_sizes(path: Path) -> dict[str, int]:
    """Bytes of each file that the hub listed for the folder's commit; {} where that was not recorded."""
    import huggingface_hub

    try:
        entries = huggingface_hub.get_cached_repo_tree(
            id_of(path), revision=commit_of(path), cache_dir=path.parent.parent.parent
        )
    except huggingface_hub.errors.CachedRepoTreeNotFoundError:
        return {}
    return {entry.path: entry.size for entry in entries}


def weight_names(path: Path) -> list[str]:
    """Names of the weight files: the index's, else the single file's. Raises StartError for an index that is none."""
    index = path / WEIGHT_INDEX
    if (path / WEIGHT_FILE).is_file() or not index.is_file():
        return [WEIGHT_FILE]
    try:
        return sorted(
            {Path(file).name for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{index} holds no weight_map of tensor names to files") from error


@dataclass(frozen=True)
class _Source:
    model: str
    revision: str
    offline: bool

    @property
    def told(self) -> str:
        return f"{self.model} at {self.revision}"

    @property
    def fetch_command(self) -> str:
        pin = "" if self.revision == DEFAULT_REVISION else f" --revision {self.revision}"
        return f"triptych model fetch {self.model}{pin}"


def _bring(source: _Source, commit: str, names: Iterable[str], say: Say) -> Path:
    """The commit's folder, with those of the files that the commit has."""
    import huggingface_hub

    path = huggingface_hub.snapshot_download(
        source.model,
        revision=commit,
        local_files_only=source.offline,
        allow_patterns=[glob.escape(name) for name in names],
        tqdm_class=_progress_lines(source.model, say),
    )
    return Path(path)


def _weight_names(source: _Source, path: Path) -> list[str]:
    """Names of the weight files to bring. Raises StartError where the commit has none that is opened."""
    names = weight_names(path)
    there = set(listed_sizes(path)) or {file.name for file in path.iterdir()}
    if WEIGHT_INDEX in there and not (path / WEIGHT_FILE).is_file() and WEIGHT_FILE in there:
        names = [WEIGHT_FILE]  # the executor takes it first too
    missing = [name for name in names if name not in there]
    if not missing:
        return names
    _refuse_uncached(source, path)
    if others := sorted(name for name in there if name.endswith(_PICKLES)):
        kinds = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise StartError(
            f"{source.told} has no {WEIGHT_FILE}, only {kinds}: weights are read from safetensors alone, pickle is "
            "never opened; choose a revision or a model that has safetensors"
        )
    raise StartError(f"{source.told} has no {', '.join(missing[:3])}; weights are read from safetensors alone")


def _refuse_uncached(source: _Source, path: Path) -> None:
    """Raises where only the cache was asked, and it does not know what else the commit has."""
    if source.offline and not listed_sizes(path):
        raise FileNotFoundError(path)


def _progress_lines(model: str, say: Say) -> Any:
    """A tqdm class that says in lines how many bytes have come: services log, and a log is no terminal."""
    from tqdm import tqdm

    said_s = time.monotonic()

    class Lines(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, unit: str = "it", **options: Any) -> None:
            self.counts_bytes = unit == "B"
            super().__init__(*args, unit=unit, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            nonlocal said_s
            self.n += n or 0
            if self.counts_bytes and self.total and time.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = time.monotonic()
                say(f"{model}: {self.n / 1e6:.0f} of {self.total / 1e6:.0f} MB have come")

    return Lines


class _Lines(logging.Handler):
    """What the client logs (it reads on from a broken connection, it found no hub and takes the cache), now and then."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        if (now_s := time.monotonic()) - self._said_s >= _SAY_EVERY_S:  # its threads all say the same
            self._said_s = now_s
            self._say(" ".join(record.getMessage().split())[:300])


@contextlib.contextmanager
def _client_heard(say: Say) -> Iterator[None]:
    """The client's own handler would write bare lines, several a retry, to standard error."""
    logger = logging.getLogger("huggingface_hub")
    before, logger.handlers = logger.handlers, [_Lines(say)]
    try:
        yield
    finally:
        logger.handlers = before


@contextlib.contextmanager
def _explained(source: _Source) -> Iterator[None]:
    """Turns whatever the client and its transports raise (HTTP, Xet, files: kinds of their own) into one line."""
    try:
        yield
    except (StartError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise StartError(_explanation(source, error)) from error


def _explanation(source: _Source, error: Exception) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    hub, cache = huggingface_hub.constants.ENDPOINT, huggingface_hub.constants.HF_HUB_CACHE
    if source.offline:
        return (
            f"{source.told} is not whole in the cache {cache}, and the network is not asked (--offline or "
            f"HF_HUB_OFFLINE); fetch it where there is one: `{source.fetch_command}`"
        )
    cause = _root(error)
    if isinstance(cause, errors.GatedRepoError):
        return f"{source.model} on {hub} is gated: ask for access on its page, and set HF_TOKEN to that account's token"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {source.model!r} here, and {hub} has no model of that name, or hides it: check the "
            "name, or set HF_TOKEN to a token that may read it"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{source.model} on {hub} has no revision {source.revision!r}; give a branch, a tag or a whole commit"
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        if status in (401, 403):
            return (
                f"{hub} refuses {source.model} (HTTP {status}): set HF_TOKEN to a token that is valid and may read it"
            )
        return f"{hub} answers HTTP {status} for {source.model}; try again later"
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return f"cannot write {source.model} into the cache {cache}: {cause.strerror}; HF_HUB_CACHE names another"
    if isinstance(cause, ValueError):
        return f"{source.told} cannot be asked of {hub}: {_one_line(cause)}"
    return (
        f"cannot fetch {source.told} from {hub}: {_one_line(cause)}; check the network, or start with "
        "--offline where it was fetched already"
    )


def _root(error: BaseException) -> BaseException:
    """The client wraps what it met on the way; what it met says more."""
    import huggingface_hub.errors as errors

    wrappers = (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)
    while isinstance(error, wrappers) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
