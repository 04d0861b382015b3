"""What serving a checkpoint takes on this machine, from config.json and the headers of its files: no weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from triptych.executor.v1 import executor_pb2 as pb

from kernels.cpu import compact, objects, tile
from services.common.contract import PROTOCOL_VERSION
from services.common.errors import RequestError, StartError
from services.executor import architecture, devices, loader, memory, wire
from services.executor.attention import selection
from services.executor.attention.contract import Needs
from services.executor.config import ExecutorConfig
from services.executor.device import Device
from services.executor.device_elementwise import Elementwise
from services.executor.device_executor import KV_SHARE as DEVICE_KV_SHARE
from services.executor.dtypes import CPU_DTYPES, Dtypes, on_device
from services.executor.ranks.division import Shard


@dataclass(frozen=True)
class Fit:
    """The memory arithmetic of a model, and what each attention backend says of it."""

    device: str
    dtype: str
    kv_dtype: str
    vocab_size: int
    weight_bytes: int
    """As they are held: the CPU's linear layers keep bfloat16 where the files do, whatever `dtype` is. Of all ranks."""
    available_bytes: int
    """Before the weights."""
    kv_bytes: int
    """Of each rank, as are those below; where the ranks differ, of the one that holds the most."""
    block_bytes: int
    token_bytes: int
    """KV of one token, in all layers."""
    rank_weight_bytes: Sequence[int]
    """By rank."""
    whole: Sequence[str]
    """What every rank holds whole beside norms and routers, with the reason."""
    threads: memory.Threads
    backends: Mapping[str, Sequence[str]]
    """By name, the best first: reasons for not serving this model, none where it does."""
    backend: str | None
    """The one that was asked for by name; None: the best."""
    eager_since: str
    """Why norms, gates and sums are torch's own kernels on a device; empty where they are compiled."""

    @property
    def vector_bits(self) -> int:
        """Of the vectors that the CPU's kernels compute with here."""
        return objects.LANES * 32

    @property
    def bfloat16_bits(self) -> int:
        """Of a weight on the CPU that the files hold in bfloat16."""
        return 12 if compact.IS_SERVED else 16

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and outputs of the CPU's largest tile of a product."""
        return tile.ROWS, tile.PANELS_BESIDE[tile.ROWS] * tile.OUTPUTS


def fit(path: Path, engine: pb.EngineConfig, config: ExecutorConfig) -> Fit:
    """As an executor of `config` would decide on a Load of `engine`. Raises StartError with its reason for refusing."""
    device = _device(config)
    dtypes = CPU_DTYPES if device is None else on_device(path)
    call = _load_call(engine, config.tp_size, dtypes)
    shape = architecture.figures(architecture.read(path))
    threads = memory.compute_threads(config.threads, ranks=config.ranks_here)
    available = memory.available_bytes() if device is None else device.available_bytes()
    # Ranks on this machine divide its memory, but of devices each has one for itself.
    ranks, here = config.tp_size, config.ranks_here if device is None else 1
    shards = [Shard(rank, ranks, available // here) for rank in range(ranks)] if ranks > 1 else [None]
    rank_weight_bytes = [loader.weight_bytes(path, call.dtype, shard, packed=device is None) for shard in shards]
    weight_bytes = sum(rank_weight_bytes)
    held_here = weight_bytes if here == ranks else rank_weight_bytes[config.tp_rank or 0]
    whole: tuple[str, ...] = ()
    if shards[0] is not None:
        held = loader.divided(path, call.dtype, shards[0], packed=device is None)  # rank 0 has the most heads
        shape, whole = held.shape(shape), held.whole
    if held_here > available or (here > 1 and max(rank_weight_bytes) > available // here):
        raise StartError(
            f"the weights of {path.name} take {weight_bytes} bytes{_by_rank(rank_weight_bytes)} to be served in "
            f"{_name(call.dtype)}, {available} are free; raise the memory limit or serve a smaller model"
        )
    needs = Needs.of(
        shape,
        device="cpu" if device is None else device.kind,
        dtype=call.dtype,
        kv_dtype=call.kv_dtype,
        block_tokens=engine.block_tokens,
        capability=None if device is None else device.capability,
        graphs=bool(config.graph_sizes),
    )
    block_bytes = shape.layers * needs.block_bytes
    share = memory.KV_SHARE if device is None else DEVICE_KV_SHARE  # there after activations, which are not known here
    return Fit(
        device="cpu" if device is None else device.name,
        dtype=_name(call.dtype),
        kv_dtype=_name(call.kv_dtype),
        vocab_size=shape.vocab_size,
        weight_bytes=weight_bytes,
        available_bytes=available,
        kv_bytes=memory.kv_budget_bytes(config.kv_memory_bytes, (available - held_here) // here, here, share),
        block_bytes=block_bytes,
        token_bytes=block_bytes // engine.block_tokens,
        rank_weight_bytes=rank_weight_bytes,
        whole=whole,
        threads=threads,
        backends=selection.survey(needs),
        backend=config.attention_backend,
        eager_since=_eager_since(config, device),
    )


def family(path: Path) -> str:
    """model_type of a checkpoint that an executor takes: a family served, and all its tensors in the files' headers.

    Raises StartError with the reasons where it is not.
    """
    loader.weight_bytes(path, torch.float32)
    return str(architecture.read(path).model_type)


def _device(config: ExecutorConfig) -> Device | None:
    """Rank 0's."""
    if config.ranks_here > 1:
        return devices.choose_for_ranks(config.device, config.tp_size, config.kernels)[0]
    return devices.choose(config.device, config.kernels)


def _eager_since(config: ExecutorConfig, device: Device | None) -> str:
    if device is None:
        return "the device is the CPU"
    return Elementwise(config.compile, device.torch_device.type).reason


def _by_rank(weight_bytes: Sequence[int]) -> str:
    return f" by {len(weight_bytes)} ranks ({', '.join(map(str, weight_bytes))})" if len(weight_bytes) > 1 else ""


def _load_call(engine: pb.EngineConfig, tp_size: int, dtypes: Dtypes) -> wire.LoadCall:
    request = pb.LoadRequest(min_version=PROTOCOL_VERSION, max_version=PROTOCOL_VERSION, config=engine)
    try:
        return wire.load_call(request, tp_size, dtypes)
    except RequestError as error:
        raise StartError(f"the executor refuses it: {error.message}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
