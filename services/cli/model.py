"""`triptych model`: models in the cache folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli.parts import missing, part
from services.common.checkpoint import EMBEDDED_MODEL, fetched_path
from services.common.errors import StartError


def run(argv: Sequence[str]) -> int:
    """Prints the folder of the model to standard output, progress to standard error."""
    parser = argparse.ArgumentParser(prog="triptych model", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetcher = commands.add_parser("fetch", help="bring a model into the cache", allow_abbrev=False)
    fetcher.add_argument("name", nargs="?", default=EMBEDDED_MODEL, help=f"by default {EMBEDDED_MODEL}")
    options = parser.parse_args(argv)
    print(fetch(options.name))
    return 0


def fetch(name: str) -> Path:
    """Raises StartError for a name that cannot be fetched."""
    if name != EMBEDDED_MODEL:
        raise StartError(
            f"cannot fetch {name!r}: only {EMBEDDED_MODEL} can be fetched by name; "
            "another model is served from its checkpoint folder, with --model FOLDER"
        )
    embedded = part("services.executor.embedded", extra="executor", what="fetching a model")
    try:
        path: Path = embedded.fetch(lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))
    except ModuleNotFoundError as error:
        raise missing(error, extra="executor", what="fetching a model") from error
    return path


def fetch_if_wanted(model: str) -> None:
    """Fetches the embedded model when it is the one asked for and not here yet."""
    if model == EMBEDDED_MODEL and not fetched_path(model).is_dir() and not Path(model).is_dir():
        fetch(model)
