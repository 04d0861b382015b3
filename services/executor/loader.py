"""Weights out of safetensors files into a model built without any. Never pickle, never remote code.

Tensors go one by one, several at once in threads, from the mapped files to what is served of them, and what was read is
given back: at no time is a checkpoint in memory twice. Whatever can be refused by headers and hash is refused before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kernels.cpu.linear import Packed
from services.common.errors import StartError
from services.executor import architecture, conversion, fusing, memory, packing
from services.executor.attention.selection import IMPLEMENTATION
from services.executor.conversion import Recipe
from services.executor.device import Device
from services.executor.ranks import device_layers, division, layers
from services.executor.ranks.division import Division, Part, Shard
from services.executor.weight_files import Hashing, WeightFiles, enumerated, locate

_HEAD = "lm_head.weight"
"""The output matrix, in every family served; with tied embeddings a file may lack it."""
_HASH_REPORT_S = 0.5

Recipes = dict[str, Recipe]


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


def load(
    path: Path,
    dtype: torch.dtype,
    report: Report,
    expected_hash: str = "",
    shard: Shard | None = None,
    device: Device | None = None,
) -> Checkpoint:
    """Builds the model in `dtype`, by torch's number of threads; `report` is called from this thread.

    On the CPU, or on `device`, where nothing is packed: its modules are transformers' own.

    Of `shard`, a rank, only the part of each tensor is read that the rank holds, its layers are not connected yet with
    the other ranks', and unless it has files of its own, rank 0 alone hashes them.

    Raises StartError when the model is not served, it cannot be divided, a file cannot be read, the weights do not fit
    into memory, tensors are missing, unexpected or of another shape (all listed), or the files hash to another than
    `expected_hash`, unless that is empty.
    """
    config = architecture.read(path)
    files = WeightFiles(path)
    threads = torch.get_num_threads()
    with Hashing(files.paths if shard is None or shard.hashes else (), threads) as hashing:
        model = _skeleton(config, dtype)
        recipes = _recipes(path, model, files)
        if expected_hash:
            _expect(path, expected_hash, _hashed(hashing, report))
        held = _divide(model, config, dtype, recipes, shard, packed=device is None)
        _assign(path, model, recipes, files, dtype, threads, report, held, device)
        digest = _hashed(hashing, report)
    shape = architecture.figures(config)
    if held is None:
        return Checkpoint(model, shape, dtype, digest)
    return Checkpoint(model, held.shape(shape), dtype, digest if held.shard.hashes else "", held)


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's weight files, by name. Raises StartError without any."""
    return sorted(set(locate(path).values()))


def weight_bytes(path: Path, dtype: torch.dtype, shard: Shard | None = None, *, packed: bool = True) -> int:
    """Bytes that the weights take when served in `dtype`, from config.json and the files' headers; none is read.

    Of `shard`, those of its rank; `packed` as on the CPU, or dense as on a device. Raises StartError when the model is
    not served, or cannot be divided, or tensors are missing, unexpected or of another shape.
    """
    config = architecture.read(path)
    model = _skeleton(config, dtype)
    files = WeightFiles(path)
    recipes = _recipes(path, model, files)
    _divide(model, config, dtype, recipes, shard, packed)
    return _held_bytes(model, recipes, files, dtype, packed)


def divided(path: Path, dtype: torch.dtype, shard: Shard, *, packed: bool = True) -> Division:
    """What a rank would hold, `packed` as weight_bytes says. Raises StartError when the model is not served, or cannot
    be divided."""
    config = architecture.read(path)
    return _divided(_skeleton(config, dtype), config, dtype, shard, packed)


def _hashed(hashing: Hashing, report: Report) -> str:
    """The files' hash, waited for."""
    while True:
        report(Progress("hashing", hashing.done_bytes, hashing.total_bytes))
        try:
            digest = hashing.result(_HASH_REPORT_S)
        except TimeoutError:
            continue
        report(Progress("hashing", hashing.total_bytes, hashing.total_bytes))
        return digest


def _expect(path: Path, expected: str, found: str) -> None:
    if found != expected:
        raise StartError(
            f"the weights of {path} hash to {found}, the scheduler expects {expected}; give both the same checkpoint"
        )


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
        raise StartError(f"{type(module).__name__} computes buffers that are not served yet: {enumerated(left)}")


def _recipes(path: Path, model: PreTrainedModel, files: WeightFiles) -> Recipes:
    """How each tensor of the model is made. Raises StartError listing what is missing, has no place, or another shape.

    Of tensors that are made of several ones the shape is known once they are made.
    """
    recipes, unexpected = conversion.plan(model, files.names)
    places = model.state_dict()
    optional = {_HEAD} if model.config.tie_word_embeddings else set()
    found = {name: files.shape(one.sources[0]) for name, one in recipes.items() if one.converter is None}
    _refuse(
        path,
        missing=sorted(set(places) - recipes.keys() - optional),
        unexpected=sorted(unexpected),
        shapes=[_other_shape(name, shape, places[name].shape) for name, shape in found.items()],
    )
    return recipes


def _refuse(path: Path, **problems: Sequence[str]) -> None:
    """Raises StartError where there is any that is not empty."""
    told = [
        f"{kind}: {enumerated(listed)}" for kind, names in problems.items() if (listed := list(filter(None, names)))
    ]
    if told:
        raise StartError(f"the weights of {path} are not those of its config.json; {'; '.join(told)}")


def _other_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """Empty where they are the same."""
    return "" if tuple(found) == tuple(expected) else f"{name} {list(found)} instead of {list(expected)}"


def _divide(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    recipes: Recipes,
    shard: Shard | None,
    packed: bool,
) -> Division | None:
    """Leaves in `model` and `recipes` what the rank holds. Raises StartError where it cannot be divided."""
    if shard is None:
        return None
    held = _divided(model, config, dtype, shard, packed)
    division.cut(model, held)
    for name in held.dropped:
        recipes.pop(name, None)
    return held


def _divided(
    model: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype, shard: Shard, packed: bool
) -> Division:
    if packed and not packing.packable(model, dtype):
        raise StartError(f"weights in {str(dtype).removeprefix('torch.')} are not divided over ranks yet; float32 is")
    return division.divide(model, architecture.figures(config), shard)


def _assign(
    path: Path,
    model: PreTrainedModel,
    recipes: Recipes,
    files: WeightFiles,
    dtype: torch.dtype,
    threads: int,
    report: Report,
    held: Division | None,
    device: Device | None,
) -> None:
    """Replaces the meta parameters by what is served of the files' tensors."""
    total = _held_bytes(model, recipes, files, dtype, packed=device is None)
    parts = {} if held is None else held.parts
    available = _available_bytes(held, device)
    if total > available:
        raise StartError(_too_large(path, total, dtype, available, held, packed=device is None))
    tied = model.config.tie_word_embeddings
    if tied and _HEAD in recipes:
        _check_tied(path, model, recipes, files, parts.get(_HEAD))
    state, packed = _read(
        model,
        recipes,
        files,
        dtype,
        threads,
        parts,
        device,
        lambda done: report(Progress("weights", min(done, total), total)),
    )
    places = model.state_dict()
    _refuse(path, shapes=[_other_shape(name, one.shape, places[name].shape) for name, one in sorted(state.items())])
    model.load_state_dict(state, strict=False, assign=True)
    if tied:
        _tie(model, packed, None if held is not None and held.embedding else parts.get(_HEAD))
    packing.install(model, packed)
    if held is not None:
        (layers if device is None else device_layers).install(model, held)
    if device is not None:
        model.to(device.torch_device)  # what is left on the CPU: buffers, which no file holds
    if packed:
        packed.clear()  # what is fused is a copy: its parts must be free to go
        fusing.install(model)
    model.requires_grad_(False)


def _read(
    model: PreTrainedModel,
    recipes: Recipes,
    files: WeightFiles,
    dtype: torch.dtype,
    threads: int,
    parts: Mapping[str, Part],
    device: Device | None,
    on_bytes: Callable[[int], object],
) -> tuple[dict[str, torch.Tensor], dict[str, Packed]]:
    """All tensors but a tied head, by name: those that stay dense, and the packed ones. `on_bytes` hears the sum."""
    tied = model.config.tie_word_embeddings
    wanted = {name: recipe for name, recipe in recipes.items() if not (tied and name == _HEAD)}
    state: dict[str, torch.Tensor] = {}
    packed: dict[str, Packed] = {}
    done = 0
    for name, one in _made(model, wanted, files, dtype, threads, parts, device):
        if isinstance(one, Packed):
            packed[name] = one
            done += one.panels.nbytes
        else:
            state[name] = one
            done += one.nbytes
        on_bytes(done)
    return state, packed


def _made(
    model: PreTrainedModel,
    recipes: Recipes,
    files: WeightFiles,
    dtype: torch.dtype,
    threads: int,
    parts: Mapping[str, Part],
    device: Device | None,
) -> Iterator[tuple[str, Packed | torch.Tensor]]:
    """Each tensor of the model, packed or in `dtype`, as they become ready: read in the order of the files.

    A thread holds one tensor of the files at a time.
    """
    packable = packing.packable(model, dtype) if device is None else frozenset()
    place = torch.device("cpu") if device is None else device.torch_device

    def make(name: str) -> tuple[str, Packed | torch.Tensor]:
        recipe = recipes[name]
        stored = recipe.make(model, _reading(files, recipe, parts.get(name)))
        # A copy even without conversion: aligned, and safe when the file is replaced while it is served.
        made = packing.pack(stored) if name in packable else stored.to(dtype, copy=True).to(place)
        files.release(recipe.sources)
        return name, made

    pool = ThreadPoolExecutor(threads, thread_name_prefix="load")
    try:
        order = sorted(recipes, key=lambda name: files.place(recipes[name].sources[0]))
        futures = {pool.submit(make, name) for name in order}
        for future in as_completed(futures):
            futures.discard(future)  # nothing here keeps what the caller may let go
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _reading(files: WeightFiles, recipe: Recipe, part: Part | None) -> conversion.Fetch:
    """How a recipe's tensors are read: of a part, no more than goes into it.

    Tensors that are stacked, one an expert, have each the part's indices, a dimension lower, and one block of it.
    """
    if part is None:
        return files.read
    if recipe.converter is None:
        return lambda name: files.read(name, part.dim, part.spans)

    def read(name: str) -> torch.Tensor:
        dim, shape = part.dim - 1, files.shape(name)
        if not 0 <= dim < len(shape) or shape[dim] != part.whole:
            raise StartError(
                f"{name} is {list(shape)}; for {recipe.target} it should be {part.whole} wide, to divide it"
            )
        return files.read(name, dim, [(part.begin, part.end)])

    return read


def _available_bytes(held: Division | None, device: Device | None) -> int:
    if device is not None:
        return device.available_bytes()
    return memory.available_bytes() if held is None else held.shard.available_bytes


def _held_bytes(model: PreTrainedModel, recipes: Recipes, files: WeightFiles, dtype: torch.dtype, packed: bool) -> int:
    """Bytes of all tensors once loaded; tied ones count once."""
    packable = packing.packable(model, dtype) if packed else frozenset()
    total = 0
    for name, tensor in model.state_dict().items():
        if not (name == _HEAD and model.config.tie_word_embeddings):
            bfloat16 = all(files.is_bfloat16(source) for source in recipes[name].sources)
            total += packing.held_bytes(tensor.shape, dtype, packed=name in packable, bfloat16=bfloat16)
    return total


def _too_large(
    path: Path, total: int, dtype: torch.dtype, available: int, held: Division | None, *, packed: bool
) -> str:
    served = f"to be served in {str(dtype).removeprefix('torch.')}"
    mend = "raise the memory limit or serve a smaller model"
    if held is None:
        return f"the weights of {path} take {total} bytes {served}, {available} are free; {mend}"
    rank, size = held.shard.rank, held.shard.size
    by_rank = [weight_bytes(path, dtype, Shard(other, size, 0), packed=packed) for other in range(size)]
    return (
        f"the weights of {path} take {total} bytes on rank {rank} {served}, its share of what is free is {available}"
        f" (by {size} ranks the weights take {', '.join(map(str, by_rank))} bytes, {sum(by_rank)} in all); {mend},"
        " or more ranks"
    )


def _embedding_name(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)


def _check_tied(path: Path, model: PreTrainedModel, recipes: Recipes, files: WeightFiles, part: Part | None) -> None:
    """A file that holds another output matrix than the input embedding contradicts its config."""
    pair = [recipes[_HEAD], recipes[_embedding_name(model)]]
    head, embedding = (recipe.make(model, _reading(files, recipe, part)) for recipe in pair)
    if head.dtype != embedding.dtype:
        head, embedding = head.float(), embedding.float()
    same = torch.equal(head, embedding)
    files.release([source for recipe in pair for source in recipe.sources])
    if not same:
        raise StartError(
            f"{path}: config.json ties the embeddings, yet lm_head.weight in the weights differs from them;"
            " set tie_word_embeddings to false or remove the tensor"
        )


def _tie(model: PreTrainedModel, packed: dict[str, Packed], part: Part | None) -> None:
    """Makes the output matrix the input embedding, or a part of it: the same packed weights, else the same tensor."""
    embedding = _embedding_name(model)
    if embedding in packed:
        packed[_HEAD] = packed[embedding] if part is None else layers.rows(packed[embedding], part)
        return
    weight = model.get_input_embeddings().weight
    if part is not None:
        weight = torch.nn.Parameter(weight[part.begin : part.end], requires_grad=False)
    model.get_output_embeddings().weight = weight
