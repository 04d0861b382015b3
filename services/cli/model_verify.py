"""`triptych model verify`: whether a model's files are whole, agree with one another, and can be served."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.cli import safetensors_file
from services.cli.parts import missing
from services.common import checkpoint, hub
from services.common.checkpoint import CHECKSUMS
from services.common.errors import StartError

_NEEDED = ("config.json", "tokenizer.json")
_LISTED = 8


@dataclass(frozen=True)
class Check:
    """One thing looked at: what was found, or what is wrong."""

    name: str
    text: str
    problems: tuple[str, ...] = ()


def run(model: str, revision: str | None) -> int:
    """Prints each check, and the problems last; returns the exit code. Raises StartError where there is no model."""
    path = checkpoint.find(model, revision=revision, offline=True, say=lambda line: print(line, file=sys.stderr))
    checks = verify(path)
    print(f"{checkpoint.name(path)} in {path}")
    for check in checks:
        print(f"  {check.name:<10} {'PROBLEM, see below' if check.problems else check.text}")
    problems = [f"{check.name}: {problem}" for check in checks for problem in check.problems]
    for line in [f"{len(problems)} found wrong:", *(f"  {problem}" for problem in problems)] if problems else ["whole"]:
        print(line)
    return 1 if problems else 0


def verify(path: Path) -> list[Check]:
    """All checks of a checkpoint folder, cheap ones first. Files are read for their hashes; no weight is loaded."""
    checks = [check_files(path), check_headers(path), check_hashes(path)]
    checks.append(_asked("text", "frontend", lambda: _text(path)))
    checks.append(_asked("family", "executor", lambda: _family(path)))
    return checks


def _expected(path: Path) -> list[str]:
    """Names of the files that must be here: what is needed, and what the hub has of the rest that is read."""
    listed = hub.listed_sizes(path)
    optional = [name for name in (*hub.TEXT_FILES, hub.WEIGHT_INDEX) if name in listed or (path / name).is_file()]
    return sorted({*_NEEDED, *optional, *hub.weight_names(path)})


def check_files(path: Path) -> Check:
    """What must be here, with the bytes that the hub listed."""
    try:
        names = _expected(path)
    except StartError as error:
        return Check("files", "", (str(error),))
    sizes = hub.listed_sizes(path)
    problems = []
    for name in names:
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif sizes.get(name, (found := file.stat().st_size)) != found:
            problems.append(f"{name} has {found} bytes, the hub listed {sizes[name]}")
    return Check("files", f"{len(names)}, all here", tuple(problems))


def check_headers(path: Path) -> Check:
    """Every safetensors file by itself, and all of them against the index."""
    try:
        names = hub.weight_names(path)
        places = safetensors_file.index(path / hub.WEIGHT_INDEX) if names != [hub.WEIGHT_FILE] else None
    except StartError as error:
        return Check("headers", "", (str(error),))
    problems: list[str] = []
    held: dict[str, set[str]] = {}
    for name in names:
        if (path / name).is_file():
            try:
                held[name] = set(safetensors_file.tensors(path / name))
            except StartError as error:
                problems.append(str(error))
    if places is not None:
        problems += _disagreements(places, held)
    count = sum(len(tensors) for tensors in held.values())
    return Check("headers", f"{count} tensors in {len(held)} files", tuple(problems))


def _disagreements(places: dict[str, str], held: dict[str, set[str]]) -> Iterator[str]:
    for file, tensors in held.items():
        named = {tensor for tensor, place in places.items() if place == file}
        if lacking := sorted(named - tensors):
            yield f"{file} lacks {_enumerate(lacking)}, which {hub.WEIGHT_INDEX} places there"
        if extra := sorted(tensors - named):
            yield f"{file} holds {_enumerate(extra)}, which {hub.WEIGHT_INDEX} does not place there"


def check_hashes(path: Path) -> Check:
    """Against what was recorded at the fetch: the hub's own hashes, or the folder's SHA256SUMS."""
    try:
        recorded = _recorded(path)
    except StartError as error:
        return Check("hashes", "", (str(error),))
    if not recorded:
        return Check("hashes", f"none were recorded: the folder is of no hub and has no {CHECKSUMS}")
    problems = []
    for name, expected in sorted(recorded.items()):
        if (path / name).is_file() and (found := _hash(path / name, len(expected))) != expected:
            problems.append(f"{name} hashes to {found}, recorded is {expected}; fetch it again")
    return Check("hashes", f"{len(recorded)} files, all as recorded", tuple(problems))


def _recorded(path: Path) -> dict[str, str]:
    """Hex hashes by file name. A file of the hub's cache is a link to a blob that is called by the hub's hash of it."""
    if (sums := path / CHECKSUMS).is_file():
        lines = [line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines() if line.strip()]
        if any(len(line) != 2 or len(line[0]) != 64 for line in lines):
            raise StartError(f"{CHECKSUMS} is not as `sha256sum` writes it")
        return {name.lstrip("*"): digest for digest, name in lines}
    if not hub.id_of(path):
        return {}
    links = {file.name: Path(os.readlink(file)).name for file in path.iterdir() if file.is_symlink()}
    return {name: blob for name, blob in links.items() if len(blob) in (40, 64)}


def _hash(file: Path, digits: int) -> str:
    """SHA-256 (64 digits), or what git calls the file's content (40): SHA-1 over a header and it."""
    with file.open("rb") as opened:
        if digits == 64:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _asked(name: str, service: str, ask: Callable[[], str]) -> Check:
    """What a service says of the model; where its extra is not installed, that it was not asked."""
    try:
        return Check(name, ask())
    except ModuleNotFoundError as error:
        fault = missing(error, extra=service, what=f"the {service}")
        if not isinstance(fault, StartError):
            raise
        return Check(name, f"not checked: {fault}")
    except StartError as error:
        return Check(name, "", (str(error),))


def _text(path: Path) -> str:
    checkpoint.read_config(path)
    module = importlib.import_module("services.frontend.served_model")
    model = module.load(str(path), None)
    if model.chat.fault:
        raise StartError(f"the chat template has an error, {model.chat.fault}")
    template = "with" if model.chat.has_template else "without"
    return f"config and tokenizer can be read, {model.tokenizer.vocab_size} ids, {template} a chat template"


def _family(path: Path) -> str:
    family = importlib.import_module("services.executor.fit").family(path)
    return f"{family} is served, and its tensors are all here"


def _enumerate(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
