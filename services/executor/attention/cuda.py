"""The CUDA backend: our own kernels over a paged cache, decode for rows of one token and prefill for all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from kernels import instances, launch
from kernels.cache_rope import ANGLES_UNIT, CacheRope
from kernels.cubins import architecture_for
from kernels.instances import Instance
from services.executor.attention import ops
from services.executor.attention.contract import (
    AttentionBackend,
    DeviceStepShape,
    Needs,
    Rotary,
    Scores,
    StepShape,
    dtype_name,
    shared_refusals,
)
from services.executor.attention.reference import turned
from services.executor.device import Device

FP8 = torch.float8_e4m3fn
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8_MOST = 448.0
"""The largest e4m3 number; what is larger stops there."""
_HEADROOM = 2.0
"""Room over what was measured, for what other prompts bring."""


class CudaBackend(AttentionBackend):
    """Tensor cores for float16 and bfloat16; float32 through the reference kernel, which is slow.

    Any window, soft cap, block size and number of query heads a kv head.
    """

    name = "cuda-triptych"
    graphs = True

    def refusals(self, needs: Needs) -> list[str]:
        if needs.device != "cuda":
            return [f"runs on cuda, not on {needs.device}"]
        reasons = []
        if not _has_kernels(needs.capability):
            told = "unknown" if needs.capability is None else f"{needs.capability // 10}.{needs.capability % 10}"
            reasons.append(f"there are kernels for compute capability 8.0 and later, this device's is {told}")
        if needs.dtype not in _DTYPES:
            reasons.append(f"dtype is one of {', '.join(map(dtype_name, _DTYPES))}, not {dtype_name(needs.dtype)}")
        if needs.kv_dtype == FP8 and needs.dtype == torch.float32:
            reasons.append("kv_dtype float8_e4m3 goes with float16 and bfloat16, not with float32")
        elif needs.kv_dtype == FP8 and (needs.capability or 0) < instances.FP8_FROM:
            reasons.append("kv_dtype float8_e4m3 needs compute capability 8.9 or later")
        if needs.head_dim not in instances.HEAD_DIMS:
            reasons.append(f"heads have {', '.join(map(str, instances.HEAD_DIMS))} dimensions, not {needs.head_dim}")
        return reasons + shared_refusals(needs, kv_dtypes=(needs.dtype, FP8), graphs=self.graphs)

    def instances(self, needs: Needs) -> list[Instance]:
        dtype, kv_dtype, dim = dtype_name(needs.dtype), dtype_name(needs.kv_dtype), needs.head_dim
        write = instances.cache_rope(dtype, kv_dtype, dim)
        if needs.dtype == torch.float32:
            return [write, instances.reference(dtype, dim)]
        architecture = architecture_for(needs.capability or 0)
        return [
            write,
            instances.decode(architecture, dtype, kv_dtype, dim),
            instances.decode_reduce(dtype, dim),
            instances.prefill(architecture, dtype, kv_dtype, dim),
        ]

    def allocate(self, needs: Needs, layers: int, num_blocks: int, on: Device | None = None) -> CudaKvCache:
        if on is None:
            raise ValueError(f"{self.name} needs a device")
        return CudaKvCache(needs, layers, num_blocks, on)


class CudaKvCache:
    """[keys and values, layers, num_blocks, kv_heads, block_tokens, head_dim]; of fp8 a scale a layer and kv head."""

    def __init__(self, needs: Needs, layers: int, num_blocks: int, device: Device) -> None:
        self._needs = needs
        shape = (2, layers, num_blocks, needs.kv_heads, needs.block_tokens, needs.head_dim)
        self._stored = torch.empty(shape, dtype=needs.kv_dtype, device=device.torch_device)
        self.keys, self.values = self._stored
        self.scales: torch.Tensor | None = None
        """[keys and values, layers, kv_heads] float32"""
        if needs.kv_dtype == FP8:
            self.scales = torch.ones(2, layers, needs.kv_heads, device=device.torch_device)
        self._launcher = KernelLauncher(needs, device)
        self.launcher = ops.register(self._launcher)
        self._measured: torch.Tensor | None = None

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        stored = self._stored.view(torch.uint8)  # fp8 is not indexed everywhere
        stored.index_copy_(2, destinations, stored.index_select(2, sources))

    def begin(self, shape: StepShape) -> CudaStep:
        if not isinstance(shape, DeviceStepShape):
            raise TypeError("a step on a device needs a DeviceStepShape")
        return CudaStep(self, shape)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """The largest keys and values of the steps within set the scales: powers of two, so that what differs a little
        from card to card makes the same ones."""
        if self.scales is None:
            yield
            return
        self._measured = torch.zeros_like(self.scales)
        yield
        wanted = self._measured.clamp(min=torch.finfo(torch.float32).tiny) * (_HEADROOM / _FP8_MOST)
        self.scales.copy_(torch.exp2(torch.log2(wanted).ceil().clamp(min=-60)))
        self._measured = None

    def check(self, projected: torch.Tensor) -> None:
        """Raises ValueError for heads of another number or size than the cache is made for: kernels would read past
        them."""
        needs = self._needs
        if projected.shape[1:] != (needs.heads + 2 * needs.kv_heads, needs.head_dim):
            raise ValueError(
                f"a layer has {projected.shape[1]} heads of {projected.shape[2]}, for {needs.heads} + 2 * "
                f"{needs.kv_heads} of {needs.head_dim} there is a cache; config.json and the model's code disagree"
            )

    def measure(self, layer: int, projected: torch.Tensor, rotary: Rotary | None) -> None:
        """Within `calibrating`: takes note of a layer's keys and values."""
        if self._measured is not None:
            if rotary is not None:
                projected = turned(projected, self._needs.heads, rotary)
            most = projected[:, self._needs.heads :].abs().amax(dim=(0, 2)).float()
            measured = self._measured[:, layer]
            measured.copy_(torch.maximum(measured, most.view(2, self._needs.kv_heads)))


class CudaStep:
    """A step's rows; every layer makes the same call of the op."""

    def __init__(self, cache: CudaKvCache, shape: DeviceStepShape) -> None:
        self._cache = cache
        self._shape = shape

    def attend(
        self, layer: int, projected: torch.Tensor, rotary: Rotary | None, scores: Scores, out: torch.Tensor
    ) -> None:
        cache, shape = self._cache, self._shape
        cache.check(projected)
        if rotary is not None and not _kernel_turns(rotary, projected):
            projected, rotary = turned(projected, out.shape[1], rotary), None
        cache.measure(layer, projected, rotary)
        cos, sin, q_gain, k_gain = (rotary.cos, rotary.sin, rotary.q_gain, rotary.k_gain) if rotary else 4 * (None,)
        scales = (None, None) if cache.scales is None else (cache.scales[0, layer], cache.scales[1, layer])
        ops.paged_attention(
            cache.launcher, projected, out, cache.keys[layer], cache.values[layer], *scales, cos, sin, q_gain, k_gain,
            shape.places, shape.tables, shape.slots, shape.query_starts, shape.contexts, shape.leading,
            shape.most_tokens, shape.most_context, scores.scale, scores.window_tokens or 0, scores.soft_cap or 0.0,
            rotary.gain_offset if rotary else 0.0, rotary.epsilon if rotary else 0.0,
        )  # fmt: skip


def _kernel_turns(rotary: Rotary, projected: torch.Tensor) -> bool:
    """Whether cache_rope can: others are turned by torch before it."""
    gains = [gain for gain in (rotary.q_gain, rotary.k_gain) if gain is not None]
    return (
        rotary.cos.shape[1] % ANGLES_UNIT == 0
        and rotary.cos.dtype == rotary.sin.dtype == torch.float32
        and rotary.cos.stride() == rotary.sin.stride() == (rotary.cos.shape[1], 1)
        and all(gain.dtype == projected.dtype for gain in gains)
    )


class KernelLauncher:
    """The kernels that one model needs; an ops.Launcher."""

    def __init__(self, needs: Needs, device: Device) -> None:
        dtype, kv_dtype, dim = dtype_name(needs.dtype), dtype_name(needs.kv_dtype), needs.head_dim
        self._needs = needs
        self._multiprocessors = device.multiprocessors
        self._write = CacheRope(device.kernels, dtype=dtype, kv_dtype=kv_dtype, head_dim=dim)
        if needs.dtype == torch.float32:
            self._reference = launch.Reference(device.kernels, dtype=dtype, head_dim=dim)
            return
        self._decode = launch.Decode(device.kernels, dtype=dtype, kv_dtype=kv_dtype, head_dim=dim)
        self._prefill = launch.Prefill(device.kernels, dtype=dtype, kv_dtype=kv_dtype, head_dim=dim)
        fitting = device.kernels.architecture.fitting(self._decode.attend.shared_bytes)
        heads, group = needs.kv_heads, needs.heads // needs.kv_heads
        self._splits = lru_cache(maxsize=1024)(
            lambda rows, tiles_of_keys: launch.number_of_splits(
                rows * heads * -(-group // launch.QUERY_TILE),
                self._multiprocessors * fitting,
                tiles_of_keys * launch.SPLIT_KEYS,
            )
        )

    def attend(self, call: ops.Call) -> None:
        """As ops.paged_attention."""
        needs, rows, projected, out = self._needs, len(call.contexts), call.projected, call.out
        cache: dict[str, int | float] = {
            "keys": call.keys.data_ptr(),
            "values": call.values.data_ptr(),
            "key_scales": _address(call.key_scales),
            "value_scales": _address(call.value_scales),
            "block_stride": call.keys.stride(0),
            "head_stride": call.keys.stride(1),
            "block_tokens": needs.block_tokens,
        }
        self._cache(call, cache)
        fields = cache | {
            "out": out.data_ptr(),
            "query": projected.data_ptr(),
            "out_stride": out.stride(0),
            "query_stride": projected.stride(0),
            "tables": call.tables.data_ptr(),
            "table_stride": call.tables.stride(0),
            "slots": call.slots.data_ptr(),
            "contexts": call.contexts.data_ptr(),
            "heads": needs.heads,
            "group": needs.heads // needs.kv_heads,
            "window": call.window,
            "scale": call.scale,
            "cap": call.cap,
        }
        if needs.dtype == torch.float32:
            self._reference.params.set(**fields, query_starts=call.query_starts.data_ptr(), rows=rows)
            self._reference(len(projected))
            return
        leading = call.leading
        if leading:
            seen = min(call.most_context, call.window) if call.window else call.most_context
            self._of_one_token(fields, leading, -(-seen // launch.SPLIT_KEYS), out)
        if leading < rows:
            # Token numbers in query_starts count from the batch's first token, so queries and out stay where they are.
            self._prefill.params.set(**fields)
            self._prefill.params.set(
                query_starts=call.query_starts[leading:].data_ptr(),
                slots=call.slots[leading:].data_ptr(),
                contexts=call.contexts[leading:].data_ptr(),
                rows=rows - leading,
            )
            self._prefill(call.most_tokens)

    def _cache(self, call: ops.Call, cache: dict[str, int | float]) -> None:
        """Turns queries in place and keys on their way into the cache, and writes these and values.

        Without angles queries are not touched.
        """
        needs, projected, cos = self._needs, call.projected, call.cos
        head_bytes = needs.head_dim * projected.element_size()
        key = projected.data_ptr() + needs.heads * head_bytes
        self._write.params.set(
            **cache,
            query=projected.data_ptr(),
            query_out=projected.data_ptr(),
            key=key,
            value=key + needs.kv_heads * head_bytes,
            query_stride=projected.stride(0),
            query_out_stride=projected.stride(0),
            key_stride=projected.stride(0),
            value_stride=projected.stride(0),
            places=call.places.data_ptr(),
            tokens=len(projected),
            heads=0 if cos is None else needs.heads,
            kv_heads=needs.kv_heads,
            rotary_dim=0 if cos is None else cos.shape[1],
            cos=_address(cos),
            sin=_address(call.sin),
            angle_stride=0 if cos is None else cos.stride(0),
            query_norm=_address(call.query_gain),
            key_norm=_address(call.key_gain),
            norm_offset=call.gain_offset,
            epsilon=call.epsilon,
        )
        self._write()

    def _of_one_token(self, fields: dict[str, int | float], rows: int, tiles_of_keys: int, out: torch.Tensor) -> None:
        splits = self._splits(rows, tiles_of_keys)
        self._decode.params.set(**fields, splits=splits, partial_out=0, partial_lse=0)
        if splits > 1:
            parts = torch.empty(
                rows, self._needs.heads, splits, self._needs.head_dim + 1, dtype=torch.float32, device=out.device
            )
            # One piece of memory: first all partial outputs, then their sums.
            self._decode.params.set(
                partial_out=parts.data_ptr(),
                partial_lse=parts.data_ptr() + 4 * rows * self._needs.heads * splits * self._needs.head_dim,
            )
            self._decode(rows)
            return
        self._decode(rows)


def _has_kernels(capability: int | None) -> bool:
    try:
        architecture_for(capability or 0)
    except ValueError:
        return False
    return True


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
