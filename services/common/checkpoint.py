"""A checkpoint's folder as every service reads it: names, plain JSON files and hashes. No weights, no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import hub
from services.common.errors import StartError
from services.common.hub_client import Say

log = logging.getLogger(__name__)

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


CHECKSUMS = "SHA256SUMS"
"""Hashes of a folder's files that come from no hub, as `sha256sum` writes them."""


def is_fetched(name: str) -> bool:
    """Whether the cache holds a fetched model of that name; a folder appears there whole or not at all."""
    return all((fetched_path(name) / file).is_file() for file in FETCHED_FILES)


def find(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    weights: bool = False,
    say: Say = log.info,
) -> Path:
    """The folder of `model`: a local path, the name of a fetched model, or a hub's ORG/NAME, looked for in this order.

    A hub's model is brought into the hub client's cache at `revision` (branch, tag or commit; None: the default
    branch), with its weights where they are needed; `offline` takes it from there alone. Raises StartError saying what
    to do.
    """
    if of_hub(model):
        return hub.snapshot(model, revision, offline=offline, weights=weights, say=say)
    for path in _local(model):
        if (path / "config.json").is_file():
            if revision is not None:
                raise StartError(
                    f"--revision is {revision!r}, but {model} is the folder {path}, which has none; leave it out, or "
                    "name a hub's model as ORG/NAME"
                )
            return path.resolve()
    if Path(model).expanduser().is_dir():
        raise StartError(
            f"{model} has no config.json; a checkpoint folder holds that, tokenizer.json and *.safetensors"
        )
    raise StartError(
        f"no model at {model!r}: give --model a checkpoint folder, a hub's model as ORG/NAME, or the name of a model "
        "that `triptych model fetch` brought"
    )


def of_hub(model: str) -> bool:
    """Whether `find` would ask a hub: it is spelled ORG/NAME, and there is no such folder here."""
    return hub.is_id(model) and not any(path.is_dir() for path in _local(model))


def _local(model: str) -> tuple[Path, Path]:
    return Path(model).expanduser(), fetched_path(model)


def name(path: Path) -> str:
    """What a model is called where nobody names it: ORG/NAME of a hub's, else the folder's name."""
    return hub.id_of(path) or path.name


def revision(path: Path) -> str:
    """The hub's commit of a folder that `find` returned; empty for one that is of no hub."""
    return hub.commit_of(path)


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

    context_tokens: int | None
    """None: config.json leaves it to its family's default, which is the executor's to know; likewise vocab_size."""
    vocab_size: int | None
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    """generation_config.json, {} without one."""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


def read_config(path: Path) -> ModelConfig:
    """Reads a checkpoint folder. Raises StartError where a figure is none."""
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    text = config.get("text_config", config)
    context, vocab = (_figure(text, name, path) for name in ("max_position_embeddings", "vocab_size"))
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < (vocab or 2**31):
            raise StartError(f"{path}: eos_token_id holds {token_id!r}; ids lie in [0, {vocab or 2**31})")
    return ModelConfig(
        context,
        vocab,
        tuple(sorted(set(ids))),
        generation,
        model_type=str(config.get("model_type") or ""),
        architectures=tuple(map(str, config.get("architectures") or ())),
        bos_token_id=_token_id(text.get("bos_token_id")),
        pad_token_id=_token_id(text.get("pad_token_id")),
    )


def _token_id(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _figure(config: dict[str, Any], name: str, path: Path) -> int | None:
    if name not in config:
        return None
    value = config[name]
    if type(value) is not int or value < 1:
        raise StartError(f"{path / 'config.json'}: {name} is {value!r}; a whole number of 1 or more is needed")
    return value


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{path} does not hold a JSON object")
    return value
