"""`triptych model list`: what is in the cache folders."""

from __future__ import annotations

from pathlib import Path

from services.cli.parts import missing
from services.common import hub
from services.common.checkpoint import cache_dir

_HEADINGS = ("MODEL", "REVISION", "SIZE", "PATH")


def table() -> str:
    """One line a model and commit: name, revision (with the branches and tags that were it), size and folder."""
    rows = [_HEADINGS, *_fetched(), *_of_hub()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() + "\n" for row in rows
    )


def _fetched() -> list[tuple[str, str, str, str]]:
    """The embedded model, where it was fetched."""
    folders = sorted(path.parent for path in (cache_dir() / "models").glob("*/config.json"))
    return [
        (folder.name, "-", _size(sum(file.stat().st_size for file in _files(folder))), str(folder))
        for folder in folders
        if not folder.name.startswith(".")
    ]


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()]


def _of_hub() -> list[tuple[str, str, str, str]]:
    try:
        found = hub.cached()
    except ModuleNotFoundError as error:
        raise missing(error, extra="cli", what="listing a hub's models") from error
    return [(one.model, _revision(one), _size(one.size_bytes), str(one.path)) for one in found]


def _revision(one: hub.Cached) -> str:
    return one.commit + (f" ({', '.join(one.refs)})" if one.refs else "")


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.2f} GB" if count_bytes >= 10_000_000 else f"{count_bytes / 1e6:.2f} MB"
