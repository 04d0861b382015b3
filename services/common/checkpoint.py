"""A checkpoint's folder as every service reads it: names, plain JSON files and hashes. No weights, no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import StartError

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
"""Served when no model is named; `triptych model fetch` brings it into the cache folder."""


def cache_dir() -> Path:
    """$TRIPTYCH_CACHE, else `triptych` under the user's cache folder (XDG Base Directory)."""
    if explicit := os.environ.get("TRIPTYCH_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


def fetched_path(name: str) -> Path:
    """Where `triptych model fetch` puts a model of that name."""
    return cache_dir() / "models" / name


FETCHED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def is_fetched(name: str) -> bool:
    """Whether the cache holds a fetched model of that name; a folder appears there whole or not at all."""
    return all((fetched_path(name) / file).is_file() for file in FETCHED_FILES)


def find(model: str) -> Path:
    """The folder of `model`: a local path, or the name of a fetched model. Raises StartError saying what to do."""
    for path in (Path(model).expanduser(), fetched_path(model)):
        if (path / "config.json").is_file():
            return path.resolve()
    if Path(model).expanduser().is_dir():
        raise StartError(
            f"{model} has no config.json; a checkpoint folder holds that, tokenizer.json and *.safetensors"
        )
    raise StartError(
        f"no model at {model!r}: give --model a checkpoint folder, or fetch a model by name with `triptych model fetch`"
    )


def revision(path: Path) -> str:
    """The hub's commit of a checkpoint that lies where hub clients keep it (`.../snapshots/COMMIT`); else empty."""
    known = path.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", path.name)
    return path.name if known else ""


def tokenizer_hash(path: Path) -> str:
    """SHA-256 of tokenizer.json, hex: equal hashes, equal ids for a text."""
    return _file_hash(path / "tokenizer.json")


def tokenizer_size(path: Path) -> int | None:
    """Ids of tokenizer.json: the highest plus one, None where it tells none. A model may be padded past them."""
    file = path / "tokenizer.json"
    definition = _json(file) if file.is_file() else {}
    vocab = definition.get("model", {}).get("vocab", {})
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = [token["id"] for token in definition.get("added_tokens", [])]
    return max([*ids, *added], default=-1) + 1 or None


def config_hash(path: Path) -> str:
    """SHA-256 of config.json, hex: equal hashes, the same architecture and figures."""
    return _file_hash(path / "config.json")


def _file_hash(file: Path) -> str:
    if not file.is_file():
        raise StartError(f"{file.parent} has no {file.name}")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@dataclass(frozen=True)
class ModelConfig:
    """What config.json and generation_config.json say, apart from the architecture."""

    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    """generation_config.json, {} without one."""


def read_config(path: Path) -> ModelConfig:
    """Reads a checkpoint folder. Raises StartError where a needed figure is missing."""
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    text = config.get("text_config", config)
    context, vocab = (_figure(text, name, path) for name in ("max_position_embeddings", "vocab_size"))
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab:
            raise StartError(f"{path}: eos_token_id holds {token_id!r}; ids lie in [0, {vocab})")
    return ModelConfig(context, vocab, tuple(sorted(set(ids))), generation)


def _figure(config: dict[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        told = f"{name} is {value!r}" if name in config else f"has no {name}"
        raise StartError(f"{path / 'config.json'}: {told}; a whole number of 1 or more is needed")
    return value


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{path} does not hold a JSON object")
    return value
