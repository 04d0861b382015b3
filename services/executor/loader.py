"""Weights out of safetensors files into a model built without any. Never pickle, never remote code."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from services.common.errors import StartError
from services.executor import architecture, conversion, memory
from services.executor.attention.selection import IMPLEMENTATION

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


def load(path: Path, dtype: torch.dtype, report: Report) -> Checkpoint:
    """Builds the model on the CPU in `dtype`; `report` is called from this thread.

    Raises StartError when the model is not served, a file cannot be read, the weights do not fit into memory, or
    tensors are missing, unexpected or of another shape (all listed).
    """
    config = architecture.read(path)
    where = _locate(path)
    files = sorted(set(where.values()))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as pool:
        hashing = pool.submit(weights_hash, files)
        model = _skeleton(config, dtype)
        recipes = _recipes(path, model, where)
        _assign(path, model, recipes, where, dtype, report)
        total = sum(file.stat().st_size for file in files)
        report(Progress("hashing", 0, total))
        digest = hashing.result()
        report(Progress("hashing", total, total))
    return Checkpoint(model, architecture.figures(config), dtype, digest)


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's weight files, by name. Raises StartError without any."""
    return sorted(set(_locate(path).values()))


def weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """Bytes that the weights take as `dtype`, from config.json and the names in the files' headers; none is read.

    Raises StartError when the model is not served, or tensors are missing or unexpected.
    """
    config = architecture.read(path)
    model = _skeleton(config, dtype)
    _recipes(path, model, _locate(path))
    return sum(tensor.nbytes for tensor in model.parameters())  # tied ones come once


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


def _assign(
    path: Path,
    model: PreTrainedModel,
    recipes: dict[str, conversion.Recipe],
    where: dict[str, Path],
    dtype: torch.dtype,
    report: Report,
) -> None:
    """Replaces the meta parameters, one after another through the files' memory maps, converted to `dtype`."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tied = model.config.tie_word_embeddings
    total = sum(shape.numel() for name, shape in shapes.items() if not (tied and name == _HEAD))
    total *= dtype.itemsize
    if total > (available := memory.available_bytes()):
        raise StartError(
            f"the weights of {path} take {total} bytes as {str(dtype).removeprefix('torch.')}, {available} are free;"
            " raise the memory limit or serve a smaller model"
        )
    state: dict[str, torch.Tensor] = {}
    done, wrong = 0, []
    head: torch.Tensor | None = None
    with contextlib.ExitStack() as open_files:
        fetch = _fetcher(where, open_files)
        for name in sorted(recipes, key=lambda name: where[recipes[name].sources[0]]):
            stored = recipes[name].make(model, fetch)
            if stored.shape != shapes[name]:
                wrong.append(f"{name} {list(stored.shape)} instead of {list(shapes[name])}")
            elif tied and name == _HEAD:
                head = stored.to(dtype)
            else:
                # A copy even without conversion: aligned, and safe when the file is replaced while it is served.
                state[name] = stored.to(dtype, copy=True)
                done += state[name].nbytes
                report(Progress("weights", done, total))
    if wrong:
        raise StartError(f"the weights of {path} are not those of its config.json; shapes: {_enumerate(wrong)}")
    model.load_state_dict(state, strict=False, assign=True)
    if tied:
        _tie(path, model, head)
    model.requires_grad_(False)


def _fetcher(where: dict[str, Path], open_files: contextlib.ExitStack) -> conversion.Fetch:
    """A function from a tensor's name to the tensor, mapped from its file; files stay open as long as `open_files`."""
    files = {file: open_files.enter_context(_open(file)) for file in set(where.values())}
    held = {file: set(tensors.keys()) for file, tensors in files.items()}

    def fetch(name: str) -> torch.Tensor:
        file = where[name]
        if name not in held[file]:
            raise StartError(f"{file} lacks {name}, which {INDEX_FILE} places there")
        tensor: torch.Tensor = files[file].get_tensor(name)
        return tensor

    return fetch


def _tie(path: Path, model: PreTrainedModel, head: torch.Tensor | None) -> None:
    """Makes the output matrix the input embedding; a file that holds another one contradicts its config."""
    embedding = model.get_input_embeddings().weight
    if head is not None and not torch.equal(head, embedding):
        raise StartError(
            f"{path}: config.json ties the embeddings, yet lm_head.weight in the weights differs from them;"
            " set tie_word_embeddings to false or remove the tensor"
        )
    model.get_output_embeddings().weight = embedding


def _enumerate(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
