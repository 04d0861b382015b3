"""Which kernels exist: template arguments, threads and shared memory of each, by architecture.

Group size, block size, window and soft cap are run-time arguments; head size and types are compiled in, and the depth
of the pipelines is chosen by the architecture's shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = ("float16", "bfloat16")
FP8 = "float8_e4m3"
FP8_FROM = 89
"""Compute capability from which the hardware converts fp8."""

_C_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", FP8: "__nv_fp8_e4m3"}
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, FP8: 1}

_PROBE_SHARED_BYTES = 3 * 32 * 16


@dataclass(frozen=True)
class Architecture:
    """Shared memory of a compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability"); of every block the hardware keeps 1 KiB for itself."""

    capability: int
    shared_kib: int
    """Of a multiprocessor."""

    @property
    def most_shared_bytes(self) -> int:
        """That one block can have."""
        return (self.shared_kib - 1) * 1024

    def fitting(self, shared_bytes: int) -> int:
        """Blocks that a multiprocessor's shared memory holds at a time."""
        return self.shared_kib * 1024 // (shared_bytes + 1024)


ARCHITECTURES = {
    capability: Architecture(capability, shared_kib)
    for capability, shared_kib in {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}.items()
}


@dataclass(frozen=True)
class Instance:
    """A kernel with its template arguments, and how it is launched."""

    source: str
    """File in kernels/csrc."""
    name: str
    """C++ name expression."""
    params: str
    """Struct of params.cuh."""
    threads: int
    shared_bytes: int = 0


def _row_bytes(kv_dtype: str, head_dim: int) -> int:
    """Of a padded row in shared memory: an odd number of 16-byte chunks (TileRow in fragments.cuh)."""
    return (head_dim * _BYTES[kv_dtype] // 16 | 1) * 16


def _decode_shared_bytes(kv_dtype: str, head_dim: int, warps: int, stages: int) -> int:
    ring = warps * stages * 2 * 16 * _row_bytes(kv_dtype, head_dim)
    merge = warps * 16 * (2 + head_dim) * 4
    return max(ring, merge)


def decode(architecture: Architecture, dtype: str, kv_dtype: str, head_dim: int) -> Instance:
    """The deepest pipeline that still lets two blocks share a multiprocessor; else the deepest that fits at all."""
    shapes = [(warps, stages) for warps in (4, 2) for stages in (4, 3, 2)]
    sizes = {shape: _decode_shared_bytes(kv_dtype, head_dim, *shape) for shape in shapes}
    fitting = [shape for shape in shapes if sizes[shape] <= architecture.most_shared_bytes]
    warps, stages = next((shape for shape in fitting if architecture.fitting(sizes[shape]) >= 2), fitting[0])
    arguments = f"{_C_TYPES[dtype]}, {_C_TYPES[kv_dtype]}, {head_dim}, {warps}, {stages}"
    return Instance("attn_decode.cu", f"attn_decode<{arguments}>", "DecodeParams", 32 * warps, sizes[warps, stages])


def decode_reduce(dtype: str, head_dim: int) -> Instance:
    """Merges the splits of `decode`."""
    name = f"attn_decode_reduce<{_C_TYPES[dtype]}, {head_dim}>"
    return Instance("attn_decode.cu", name, "DecodeParams", head_dim)


def prefill(architecture: Architecture, dtype: str, kv_dtype: str, head_dim: int) -> Instance:
    """The most keys a tile that let two blocks share a multiprocessor; else the most that fit at all.

    At most 32 where heads are larger than 64: with more, a thread's scores and outputs are too many for its registers.
    """
    rows = prefill_rows(head_dim)

    def shared_bytes(keys: int) -> int:
        return rows * _row_bytes(dtype, head_dim) + 4 * keys * _row_bytes(kv_dtype, head_dim) + 2 * keys * 8

    choices = (64, 32, 16) if head_dim <= 64 else (32, 16)
    fitting = [keys for keys in choices if shared_bytes(keys) <= architecture.most_shared_bytes]
    keys = next((keys for keys in fitting if architecture.fitting(shared_bytes(keys)) >= 2), fitting[0])
    arguments = f"{_C_TYPES[dtype]}, {_C_TYPES[kv_dtype]}, {head_dim}, {keys}, {rows // 64}"
    return Instance("attn_prefill.cu", f"attn_prefill<{arguments}>", "PrefillParams", 128, shared_bytes(keys))


def prefill_rows(head_dim: int) -> int:
    """Packed (token, head) rows of a block of `prefill`: one or two times 16 a warp, as registers allow."""
    return 128 if head_dim <= 128 else 64


def reference(dtype: str, head_dim: int) -> Instance:
    """Attention of any number of new tokens, slowly."""
    return Instance("attn_reference.cu", f"attn_reference<{_C_TYPES[dtype]}, {head_dim}>", "PrefillParams", 32)


def cache_rope(dtype: str, kv_dtype: str, head_dim: int) -> Instance:
    """Norm and rope of queries and keys, and the write into the cache."""
    chunks = head_dim * _BYTES[dtype] // 16
    lanes = next(lanes for lanes in (8, 16, 32) if lanes >= min(chunks, 32))
    name = f"cache_rope<{_C_TYPES[dtype]}, {_C_TYPES[kv_dtype]}, {head_dim}>"
    return Instance("cache_rope.cu", name, "CacheParams", 128, 128 // lanes * head_dim * 4)


def heads_a_block(instance: Instance, head_dim: int) -> int:
    """Heads of tokens that a block of `cache_rope` does: each has its own piece of shared memory."""
    return instance.shared_bytes // (head_dim * 4)


def sampling(dtype: str, threads: int = 1024) -> Instance:
    """Draws the next ids from logits in `dtype`, a block a row."""
    warps, sums = threads // 32, 4
    shared_bytes = (warps + 1) * sums * 8 + threads * 16 + 16
    return Instance("sampling.cu", f"sampling<{_C_TYPES[dtype]}, {threads}>", "SamplingParams", threads, shared_bytes)


def probes() -> Iterator[Instance]:
    """Of what the other kernels are made of, one by one: for the check on a card alone."""
    typed = [
        f"{kernel}<{_C_TYPES[dtype]}>" for kernel in ("probe_mma", "probe_pair", "probe_fp8_pair") for dtype in DTYPES
    ]
    plain = ["probe_ldmatrix", "probe_cp_async", "probe_floats", "probe_fp8", "probe_doubles", "probe_warp"]
    for name in typed + plain:
        yield Instance("probes.cu", name, "ProbeParams", 32, _PROBE_SHARED_BYTES)


def every_instance(architecture: Architecture) -> Iterator[Instance]:
    """All that `make kernels` builds for an architecture."""
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for kv_dtype in (dtype, FP8) if architecture.capability >= FP8_FROM else (dtype,):
                yield decode(architecture, dtype, kv_dtype, head_dim)
                yield prefill(architecture, dtype, kv_dtype, head_dim)
                yield cache_rope(dtype, kv_dtype, head_dim)
            yield decode_reduce(dtype, head_dim)
    for dtype in (*DTYPES, "float32"):
        for head_dim in HEAD_DIMS:
            yield reference(dtype, head_dim)
        yield sampling(dtype)
    for head_dim in HEAD_DIMS:
        yield cache_rope("float32", "float32", head_dim)
    yield from probes()
