"""Launching cache_rope: norm and rope of queries and keys, and the write of keys and values into the cache."""

from __future__ import annotations

from kernels import instances
from kernels.instances import DTYPES, FP8, FP8_FROM, HEAD_DIMS, Instance
from kernels.launch import Device
from kernels.params import Params

_QUAD = 4
"""Elements that are read at a time from the tables of cos and sin."""
ANGLES_UNIT = 2 * _QUAD
"""Rotary dimensions of a head are a multiple of this."""


class CacheRope:
    """What lies between a layer's projections and its attention.

    Set the fields of `params` that change (pointers a layer, tokens, positions and places a step), then call. Pointers
    and strides of queries, keys, values and caches are multiples of 16 bytes, those of cos, sin and inv_freq too.
    """

    def __init__(self, device: Device, *, dtype: str, kv_dtype: str, head_dim: int) -> None:
        if dtype not in (*DTYPES, "float32") or head_dim not in HEAD_DIMS:
            raise ValueError(
                f"no kernel for {dtype} heads of {head_dim}: there are {DTYPES} and float32 of {HEAD_DIMS}"
            )
        if kv_dtype != dtype and (kv_dtype != FP8 or dtype == "float32"):
            raise ValueError(
                f"no kernel writes {dtype} into a cache in {kv_dtype}: KV can be {dtype} or, of 16 bits, {FP8}"
            )
        if kv_dtype == FP8 and device.architecture.capability < FP8_FROM:
            raise ValueError(
                f"fp8 KV needs compute capability {FP8_FROM}, the device has {device.architecture.capability}"
            )
        self._device = device
        self._head_dim = head_dim
        self._element_bytes = 4 if dtype == "float32" else 2
        self.instance: Instance = instances.cache_rope(dtype, kv_dtype, head_dim)
        self.params = Params("CacheParams")

    def __call__(self) -> None:
        """Queues the work on params.tokens tokens; none: nothing. Raises ValueError for what the kernel cannot do."""
        self._check()
        tokens, heads, kv_heads = (int(self.params.get(name)) for name in ("tokens", "heads", "kv_heads"))
        parts = -(-(heads + 2 * kv_heads) // instances.heads_a_block(self.instance, self._head_dim))
        if tokens and parts:
            self._device.launch(self.instance, (tokens, parts, 1), self.params)

    def _check(self) -> None:
        get = self.params.get
        rotary_dim = int(get("rotary_dim"))
        if not 0 <= rotary_dim <= self._head_dim or rotary_dim % ANGLES_UNIT:
            raise ValueError(
                f"rotary_dim is {rotary_dim}: a multiple of {ANGLES_UNIT} up to head_dim {self._head_dim}, or 0"
            )
        if rotary_dim and not get("inv_freq") and not (get("cos") and get("sin")):
            raise ValueError("rotary_dim is set: give inv_freq, or cos and sin")
        for name in ("query_stride", "key_stride", "value_stride", "query_out_stride", "block_stride", "head_stride"):
            if int(get(name)) * self._element_bytes % 16:
                raise ValueError(f"{name} is {get(name)} elements: rows must begin at multiples of 16 bytes")
        if int(get("angle_stride")) % _QUAD:
            raise ValueError(f"angle_stride is {get('angle_stride')}: a multiple of {_QUAD}")
        for name in ("query", "key", "value", "query_out", "keys", "values", "cos", "sin", "query_norm", "key_norm"):
            if int(get(name)) % 16:
                raise ValueError(f"{name} lies at {get(name):#x}: at a multiple of 16 bytes")
