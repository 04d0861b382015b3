"""What serving a checkpoint takes on this machine, from config.json and the headers of its files: no weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from triptych.executor.v1 import executor_pb2 as pb

from services.common.contract import PROTOCOL_VERSION
from services.common.errors import RequestError, StartError
from services.executor import architecture, loader, memory, wire
from services.executor.attention import selection
from services.executor.attention.contract import Needs
from services.executor.config import ExecutorConfig
from services.executor.executor import Executor


@dataclass(frozen=True)
class Fit:
    """The memory arithmetic of a model, and what each attention backend says of it."""

    dtype: str
    vocab_size: int
    weight_bytes: int
    """As they are held: the CPU's linear layers keep bfloat16 where the files do, whatever `dtype` is."""
    available_bytes: int
    """Before the weights."""
    kv_bytes: int
    block_bytes: int
    token_bytes: int
    """KV of one token, in all layers."""
    threads: memory.Threads
    backends: Mapping[str, Sequence[str]]
    """By name, the best first: reasons for not serving this model, none where it does."""


def fit(path: Path, engine: pb.EngineConfig, config: ExecutorConfig) -> Fit:
    """As an executor of `config` would decide on a Load of `engine`. Raises StartError with its reason for refusing."""
    call = _load_call(engine)
    shape = architecture.figures(architecture.read(path))
    threads = memory.compute_threads(config.threads)
    Executor(path, threads=threads.count)
    weight_bytes, available = loader.weight_bytes(path, call.dtype), memory.available_bytes()
    if weight_bytes > available:
        raise StartError(
            f"the weights of {path.name} take {weight_bytes} bytes to be served in {_name(call)}, {available} are "
            "free; raise the memory limit or serve a smaller model"
        )
    needs = Needs.of(shape, device=config.device, dtype=call.dtype, block_tokens=engine.block_tokens)
    return Fit(
        dtype=_name(call),
        vocab_size=shape.vocab_size,
        weight_bytes=weight_bytes,
        available_bytes=available,
        kv_bytes=memory.kv_budget_bytes(config.kv_memory_bytes, available - weight_bytes),
        block_bytes=shape.kv_block_bytes(engine.block_tokens, call.dtype.itemsize),
        token_bytes=shape.kv_block_bytes(1, call.dtype.itemsize),
        threads=threads,
        backends=selection.survey(needs),
    )


def family(path: Path) -> str:
    """model_type of a checkpoint that an executor takes: a family served, and all its tensors in the files' headers.

    Raises StartError with the reasons where it is not.
    """
    loader.weight_bytes(path, torch.float32)
    return str(architecture.read(path).model_type)


def _load_call(engine: pb.EngineConfig) -> wire.LoadCall:
    request = pb.LoadRequest(min_version=PROTOCOL_VERSION, max_version=PROTOCOL_VERSION, config=engine)
    try:
        return wire.load_call(request)
    except RequestError as error:
        raise StartError(f"the executor refuses it: {error.message}") from None


def _name(call: wire.LoadCall) -> str:
    return str(call.dtype).removeprefix("torch.")
