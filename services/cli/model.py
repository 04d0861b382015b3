"""`triptych model`: models in the cache folder."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli.parts import missing, part
from services.common.checkpoint import EMBEDDED_MODEL, fetched_path, find, is_fetched
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
    if is_fetched(name):  # without the seconds that importing torch takes
        return fetched_path(name)
    embedded = part("services.executor.embedded", extra="executor", what="fetching a model")
    try:
        path: Path = embedded.fetch(lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))
    except ModuleNotFoundError as error:
        raise missing(error, extra="executor", what="fetching a model") from error
    return path


def provide(model: str) -> None:
    """Fetches the embedded model if it is the one asked for and not here. Raises StartError where there is no model."""
    if model == EMBEDDED_MODEL and not Path(model).is_dir() and not is_fetched(model):
        # In a process of its own: torch, which converts it, would stay in this one.
        command = [sys.executable, "-P", "-m", "services.cli.main", "model", "fetch", model]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode != 0:
            raise StartError(f"{model} could not be fetched; the reason is above")
    find(model)
