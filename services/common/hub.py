"""Models of a hub, through its own client, huggingface_hub: names, commits, files in its cache.

The client honours HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_CACHE. It is imported in the calls: a service that reads a
local folder does without it. The layout of the cache is that of the client's guide "Understand caching".
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import StartError
from services.common.hub_client import DEFAULT_REVISION, Say, Source, explained, heard, leaving_at_once, progress_lines

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

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")


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
    from huggingface_hub import constants

    offline = offline or constants.is_offline_mode()
    source = Source(model, revision or DEFAULT_REVISION, offline)
    with explained(source), heard(say), leaving_at_once():
        commit = _commit(source, revision)
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
    from huggingface_hub import constants, errors

    try:
        repos = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
    except errors.CacheNotFound:
        return []
    found = [
        Cached(repo.repo_id, one.commit_hash, tuple(sorted(one.refs)), one.size_on_disk, one.snapshot_path)
        for repo in repos
        if repo.repo_type == "model"
        for one in repo.revisions
    ]
    return sorted(found, key=lambda one: (one.model, one.commit))


def listed_sizes(path: Path) -> dict[str, int]:
    """Bytes of each file that the hub listed for the folder's commit; {} of no hub, or where that was not recorded."""
    if not id_of(path):
        return {}
    import huggingface_hub
    from huggingface_hub import errors

    try:
        entries = huggingface_hub.get_cached_repo_tree(
            id_of(path), revision=commit_of(path), cache_dir=path.parent.parent.parent
        )
    except errors.CachedRepoTreeNotFoundError:
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


def _commit(source: Source, revision: str | None) -> str:
    """What the revision is now, or, of the cache alone, was when it was last asked for."""
    import huggingface_hub
    from huggingface_hub import errors

    api = huggingface_hub.HfApi()
    commit = api.resolve_revision(source.model, revision=revision, local_files_only=source.offline).resolved
    if revision == commit and not source.offline:  # taken at its word so far
        try:
            huggingface_hub.get_cached_repo_tree(source.model, revision=commit)
        except errors.CachedRepoTreeNotFoundError:
            api.model_info(source.model, revision=commit)  # fails at once where the listing would be tried for 25 s
    return commit


def _bring(source: Source, commit: str, names: Iterable[str], say: Say) -> Path:
    """The commit's folder, with those of the files that the commit has."""
    import huggingface_hub

    path = huggingface_hub.snapshot_download(
        source.model,
        revision=commit,
        local_files_only=source.offline,
        allow_patterns=[glob.escape(name) for name in names],
        tqdm_class=progress_lines(source.model, say),
    )
    return Path(path)


def _weight_names(source: Source, path: Path) -> list[str]:
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


def _refuse_uncached(source: Source, path: Path) -> None:
    """Raises where only the cache was asked, and it does not know what else the commit has."""
    if source.offline and not listed_sizes(path):
        raise FileNotFoundError(path)
