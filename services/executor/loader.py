"""Weights out of safetensors files into a model built without any. Never pickle, never remote code."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kernels.cpu.linear import Packed
from services.common.errors import StartError
from services.executor import architecture, conversion, fusing, memory, packing
from services.executor.attention.selection import IMPLEMENTATION
from services.executor.ranks import division, layers
from services.executor.ranks.division import Division, Part, Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
"""The output matrix, in every family served; with tied embeddings a file may lack it."""
_LISTED = 8
"""Names an error lists before it counts the rest."""


@dataclass(frozen=True)
class Progress:
    """How far a load has come."""

    stage: str
    done_bytes: int
    total_bytes: int


Report = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model on its device, and the hash of the files it came from."""

    model: PreTrainedModel
    shape: architecture.Architecture
    dtype: torch.dtype
    weights_hash: str
    division: Division | None = None
    """What of the model this is; None: all of it."""


def load(path: Path, dtype: torch.dtype, report: Report, shard: Shard | None = None) -> Checkpoint:
    """Builds the model on the CPU in `dtype`; `report` is called from this thread.

    Of `shard`, a rank, only the part of each tensor is read that the rank holds, its layers are not connected yet with
    the other ranks', and rank 0 alone hashes the files. Raises StartError when the model is not served, a file cannot
    be read, the weights do not fit into memory, or tensors are missing, unexpected or of another shape (all listed).
    """
    config = architecture.read(path)
    where = _locate(path)
    files = sorted(set(where.values())) if shard is None or shard.rank == 0 else []
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as pool:
        hashing = pool.submit(weights_hash, files)
        model = _skeleton(config, dtype)
        recipes = _recipes(path, model, where)
        held = _divide(model, config, dtype, recipes, shard)
        _assign(path, model, recipes, where, dtype, report, held)
        total = sum(file.stat().st_size for file in files)
        report(Progress("hashing", 0, total))
        digest = hashing.result()
        report(Progress("hashing", total, total))
    shape = architecture.figures(config)
    if held is None:
        return Checkpoint(model, shape, dtype, digest)
    return Checkpoint(model, held.shape(shape), dtype, digest if held.shard.rank == 0 else "", held)


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's weight files, by name. Raises StartError without any."""
    return sorted(set(_locate(path).values()))


def weight_bytes(path: Path, dtype: torch.dtype, shard: Shard | None = None) -> int:
    """Bytes that the weights take when served in `dtype`, from config.json and the files' headers; none is read.

    Of `shard`, those of its rank. Raises StartError when the model is not served, or cannot be divided, or tensors are
    missing or unexpected.
    """
    config = architecture.read(path)
    model = _skeleton(config, dtype)
    where = _locate(path)
    recipes = _recipes(path, model, where)
    _divide(model, config, dtype, recipes, shard)
    with contextlib.ExitStack() as open_files:
        return _held_bytes(model, recipes, _Files(where, open_files, framework="np"), dtype)


def divided(path: Path, dtype: torch.dtype, shard: Shard) -> Division:
    """What a rank would hold. Raises StartError when the model is not served, or cannot be divided."""
    config = architecture.read(path)
    return _divided(_skeleton(config, dtype), config, dtype, shard)


def weights_hash(files: Sequence[Path]) -> str:
    """SHA-256, hex, over the concatenated hex SHA-256 of each file, files in order of their names."""
    whole = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").hexdigest().encode())
    return whole.hexdigest()


def _locate(path: Path) -> dict[str, Path]:
    """File of each tensor: what the single file holds, else what the index says."""
    if (path / SINGLE_FILE).is_file():
        # As for numpy: torch maps a file so that the kernel counts it as memory, even when only its names are read.
        with _open(path / SINGLE_FILE, framework="np") as tensors:
            return dict.fromkeys(tensors.keys(), path / SINGLE_FILE)
    if not (path / INDEX_FILE).is_file():
        raise StartError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights are read from safetensors alone")
    try:
        weight_map = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        where = {str(name): path / Path(file).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{path / INDEX_FILE} holds no weight_map of tensor names to files") from error
    if missing := sorted({file.name for file in where.values() if not file.is_file()}):
        raise StartError(f"{path} lacks {_enumerate(missing)}, which {INDEX_FILE} names")
    return where


def _open(file: Path, framework: str = "pt") -> safe_open:
    try:
        return safe_open(file, framework=framework, device="cpu")
    except (OSError, SafetensorError, RuntimeError) as error:  # the last is torch's, where it cannot map the file
        raise StartError(f"cannot read {file}: {error}") from error


def _skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with parameters on the meta device and its buffers, which no file holds, on the CPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    for module in model.modules():
        _compute_buffers(model, module)
    model.eval().requires_grad_(False)
    return model


def _compute_buffers(model: PreTrainedModel, module: torch.nn.Module) -> None:
    """Lets transformers fill a module's own buffers (rotary frequencies, scales), which follow from the config."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    for name in names:
        buffer = module.get_buffer(name)
        setattr(module, name, torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device="cpu"))
    if names:
        model._init_weights(module)
    if left := [name for name in names if module.get_buffer(name).isnan().any()]:
        raise StartError(f"{type(module).__name__} computes buffers that are not served yet: {_enumerate(left)}")


def _recipes(path: Path, model: PreTrainedModel, where: dict[str, Path]) -> dict[str, conversion.Recipe]:
    """How each tensor of the model is made. Raises StartError listing what is missing or has no place."""
    recipes, unexpected = conversion.plan(model, where.keys())
    optional = {_HEAD} if model.config.tie_word_embeddings else set()
    missing = sorted(set(model.state_dict()) - recipes.keys() - optional)
    problems = []
    if missing:
        problems.append(f"missing: {_enumerate(missing)}")
    if unexpected:
        problems.append(f"unexpected: {_enumerate(sorted(unexpected))}")
    if problems:
        raise StartError(f"the weights of {path} are not those of its config.json; {'; '.join(problems)}")
    return recipes


def _divide(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    recipes: dict[str, conversion.Recipe],
    shard: Shard | None,
) -> Division | None:
    """Leaves in `model` and `recipes` what the rank holds. Raises StartError where it cannot be divided."""
    if shard is None:
        return None
    held = _divided(model, config, dtype, shard)
    division.cut(model, held)
    for name in held.dropped:
        recipes.pop(name, None)
    return held


def _divided(model: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype, shard: Shard) -> Division:
    if not packing.packable(model, dtype):
        raise StartError(f"weights in {str(dtype).removeprefix('torch.')} are not divided over ranks yet; float32 is")
    return division.divide(model, architecture.figures(config), shard)


def _assign(
    path: Path,
    model: PreTrainedModel,
    recipes: dict[str, conversion.Recipe],
    where: dict[str, Path],
    dtype: torch.dtype,
    report: Report,
    held: Division | None,
) -> None:
    """Replaces the meta parameters, one after another through the files' memory maps, converted to `dtype`."""
    parts = {} if held is None else held.parts
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tied = model.config.tie_word_embeddings
    packable = packing.packable(model, dtype)
    state: dict[str, torch.Tensor] = {}
    packed: dict[str, Packed] = {}
    done, wrong = 0, []
    head: torch.Tensor | None = None
    with contextlib.ExitStack() as open_files:
        files = _Files(where, open_files)
        total = _held_bytes(model, recipes, files, dtype)
        available = memory.available_bytes() if held is None else held.shard.available_bytes
        if total > available:
            raise StartError(_too_large(path, total, dtype, available))
        for name in sorted(recipes, key=lambda name: where[recipes[name].sources[0]]):
            stored = _made(model, recipes[name], files, parts.get(name))
            if stored.shape != shapes[name]:
                wrong.append(f"{name} {list(stored.shape)} instead of {list(shapes[name])}")
            elif tied and name == _HEAD:
                head = stored
            elif name in packable:
                packed[name] = packing.pack(stored)
                done += packed[name].panels.nbytes
            else:
                # A copy even without conversion: aligned, and safe when the file is replaced while it is served.
                state[name] = stored.to(dtype, copy=True)
                done += state[name].nbytes
            report(Progress("weights", done, total))
        if wrong:
            raise StartError(f"the weights of {path} are not those of its config.json; shapes: {_enumerate(wrong)}")
        if head is not None:
            _check_tied(path, model, head, recipes, files, parts.get(_HEAD))
    model.load_state_dict(state, strict=False, assign=True)
    if tied:
        _tie(model, packed, parts.get(_HEAD))
    packing.install(model, packed)
    if held is not None:
        layers.install(model, held)
    if packed:
        packed.clear()  # what is fused is a copy: its parts must be free to go
        fusing.install(model)
    model.requires_grad_(False)


def _made(model: PreTrainedModel, recipe: conversion.Recipe, files: _Files, part: Part | None) -> torch.Tensor:
    """A tensor of the model, or a part of it; of the files no more is read than that where it stands there as it is."""
    if part is None:
        return recipe.make(model, files.fetch)
    if recipe.converter is None:
        return files.fetch_part(recipe.sources[0], part)
    return recipe.make(model, files.fetch).narrow(part.dim, part.begin, part.end - part.begin)


def _held_bytes(
    model: PreTrainedModel, recipes: dict[str, conversion.Recipe], files: _Files, dtype: torch.dtype
) -> int:
    """Bytes of all tensors once loaded; tied ones count once."""
    packable = packing.packable(model, dtype)
    total = 0
    for name, tensor in model.state_dict().items():
        if not (name == _HEAD and model.config.tie_word_embeddings):
            bfloat16 = all(files.is_bfloat16(source) for source in recipes[name].sources)
            total += packing.held_bytes(tensor.shape, dtype, packed=name in packable, bfloat16=bfloat16)
    return total


def _too_large(path: Path, total: int, dtype: torch.dtype, available: int) -> str:
    return (
        f"the weights of {path} take {total} bytes to be served in {str(dtype).removeprefix('torch.')}, {available} are"
        " free; raise the memory limit or serve a smaller model"
    )


class _Files:
    """The checkpoint's files, open as long as `open_files`, and the tensors mapped from them."""

    def __init__(self, where: dict[str, Path], open_files: contextlib.ExitStack, framework: str = "pt") -> None:
        self._where = where
        self._files = {file: open_files.enter_context(_open(file, framework)) for file in set(where.values())}
        self._held = {file: set(tensors.keys()) for file, tensors in self._files.items()}

    def fetch(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def fetch_part(self, name: str, part: Part) -> torch.Tensor:
        """Reads no other part. One of another size than the model's is returned whole, for the caller to refuse."""
        stored = self._file(name).get_slice(name)
        shape = stored.get_shape()
        if len(shape) <= part.dim or shape[part.dim] != part.whole:
            return self.fetch(name)
        wanted = (*[slice(None)] * part.dim, slice(part.begin, part.end))
        tensor: torch.Tensor = stored[wanted]
        return tensor

    def is_bfloat16(self, name: str) -> bool:
        """By the file's header."""
        return bool(self._file(name).get_slice(name).get_dtype() == "BF16")

    def _file(self, name: str) -> Any:
        file = self._where[name]
        if name not in self._held[file]:
            raise StartError(f"{file} lacks {name}, which {INDEX_FILE} places there")
        return self._files[file]


def _embedding_name(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)


def _check_tied(
    path: Path,
    model: PreTrainedModel,
    head: torch.Tensor,
    recipes: dict[str, conversion.Recipe],
    files: _Files,
    part: Part | None,
) -> None:
    """A file that holds another output matrix than the input embedding contradicts its config."""
    embedding = _made(model, recipes[_embedding_name(model)], files, part)
    if head.dtype != embedding.dtype:
        head, embedding = head.float(), embedding.float()
    if not torch.equal(head, embedding):
        raise StartError(
            f"{path}: config.json ties the embeddings, yet lm_head.weight in the weights differs from them;"
            " set tie_word_embeddings to false or remove the tensor"
        )


def _tie(model: PreTrainedModel, packed: dict[str, Packed], part: Part | None) -> None:
    """Makes the output matrix the input embedding, or a part of it: the same packed weights, else the same tensor."""
    embedding = _embedding_name(model)
    if embedding in packed:
        packed[_HEAD] = packed[embedding] if part is None else layers.rows(packed[embedding], part)
    else:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _enumerate(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
