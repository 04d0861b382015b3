"""The CUDA backend's kernels, op and selection against the contract of attention written out, on the shim."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import StartError
from services.executor.attention import ops, selection
from services.executor.attention.contract import (
    AttentionBackend,
    DeviceStepShape,
    KvCache,
    Needs,
    Rotary,
    Scores,
    StepShape,
)
from services.executor.attention.cuda import FP8, CudaBackend, CudaKvCache
from services.executor.attention.reference import ReferenceStep
from services.executor.attention.sdpa import SdpaBackend
from tests.executor.shim_device import ShimDevice

BLOCK_TOKENS = 16
NEEDS = Needs(
    device="cuda",
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    heads=6,
    kv_heads=2,
    head_dim=64,
    block_tokens=BLOCK_TOKENS,
    capability=90,
)
CAPPED = Scores(0.125, soft_cap=5.0)
WINDOWED = Scores(0.125, window_tokens=20)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "runs on cuda, not on cpu"),
        ({"capability": 75}, "there are kernels for compute capability 8.0 and later, this device's is 7.5"),
        ({"capability": None}, "this device's is unknown"),
        (
            {"dtype": torch.float64, "kv_dtype": torch.float64},
            "dtype is one of float16, bfloat16, float32, not float64",
        ),
        ({"kv_dtype": torch.float16}, "kv_dtype is bfloat16 or float8_e4m3, not float16"),
        ({"kv_dtype": torch.int8}, "kv_dtype is bfloat16 or float8_e4m3, not int8"),
        ({"kv_dtype": FP8, "capability": 86}, "kv_dtype float8_e4m3 needs compute capability 8.9 or later"),
        ({"kv_dtype": FP8, "dtype": torch.float32}, "kv_dtype float8_e4m3 goes with float16 and bfloat16"),
        ({"head_dim": 72}, "heads have 64, 80, 96, 128, 256 dimensions, not 72"),
        ({"heads": 5}, "5 query heads are no multiple of 2 kv heads"),
    ],
)
def test_what_the_kernels_cannot_serve_is_told_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert CudaBackend().refusals(NEEDS) == []
    assert any(reason in told for told in CudaBackend().refusals(replace(NEEDS, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_dtype": FP8},
        {"kv_dtype": FP8, "capability": 89},
        {"dtype": torch.float32, "kv_dtype": torch.float32, "capability": 120},
        {"capability": 87, "block_tokens": 1, "windows": True, "soft_caps": True, "graphs": True},
        {"head_dim": 256, "heads": 40, "kv_heads": 1},
    ],
)
def test_what_they_can_serve_they_serve_first(changes: dict[str, Any]) -> None:
    assert selection.select(replace(NEEDS, **changes)).name == "cuda-triptych"


def test_a_backend_by_name_is_taken_or_refused() -> None:
    assert selection.select(NEEDS, "torch-sdpa").name == "torch-sdpa"
    with pytest.raises(StartError, match="cpu-numba, which cannot serve this model here: runs on cpu, not on cuda"):
        selection.select(NEEDS, "cpu-numba")
    with pytest.raises(StartError, match="there are cpu-numba, cuda-triptych, torch-sdpa"):
        selection.select(NEEDS, "flash")


@dataclass
class Rows:
    """Prompts that are computed in two steps: what a row has before the second one, and how much it computes in it."""

    projected: list[torch.Tensor]
    """a row each: [tokens, heads + 2 kv_heads, head_dim]"""
    before: list[int]

    @property
    def counts(self) -> list[int]:
        return [len(one) - before for one, before in zip(self.projected, self.before, strict=True)]


def rows(needs: Needs, *sizes: tuple[int, int]) -> Rows:
    """By (tokens computed before, tokens computed now)."""
    generator = torch.Generator().manual_seed(1)
    vectors = needs.heads + 2 * needs.kv_heads
    made = [torch.randn(sum(size), vectors, needs.head_dim, generator=generator).to(needs.dtype) for size in sizes]
    return Rows(made, [before for before, _ in sizes])


MIXED = ((80, 1), (15, 1), (0, 1), (16, 17), (0, 40))
"""Three decodes, one of them the first token of all, a chunk and a prompt."""


def shape(made: Rows, begin: list[int], end: list[int], capability: int | None) -> StepShape:
    """A step of tokens begin .. end of each row; blocks are scrambled, unused entries of the tables name none."""
    live = [i for i in range(len(begin)) if end[i] > begin[i]]
    blocks = np.random.default_rng(0).permutation(np.arange(1, 1 + 8 * len(begin))).reshape(len(begin), 8)
    tables = torch.full((len(begin), 9), -1, dtype=torch.int32)
    for i in range(len(begin)):
        used = -(-end[i] // BLOCK_TOKENS)
        tables[i, :used] = torch.from_numpy(blocks[i, :used])
    counts = [end[i] - begin[i] for i in live]
    starts = np.concatenate([[0], np.cumsum(counts)])
    kind = torch.int64 if capability is None else torch.int32
    fields = {
        "tables": tables,
        "slots": torch.tensor(live, dtype=kind),
        "query_starts": torch.tensor(starts, dtype=kind),
        "contexts": torch.tensor([end[i] for i in live], dtype=kind),
    }
    if capability is None:
        return StepShape(**fields)
    positions = [(i, at) for i in live for at in range(begin[i], end[i])]
    places = [int(tables[i, at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS for i, at in positions]
    leading = next((k for k, count in enumerate(counts) if count != 1), len(counts))
    return DeviceStepShape(
        **fields,
        places=torch.tensor(places),
        leading=leading,
        most_tokens=max(counts[leading:], default=0),
        most_context=max(end[i] for i in live),
    )


def attended(
    cache: KvCache, needs: Needs, made: Rows, scores: Scores, device: ShimDevice | None, rotary: Rotary | None = None
) -> torch.Tensor:
    """What the second step of `made` gives, [tokens, heads, head_dim]; layer 1 of 2."""
    ends = [len(one) for one in made.projected]
    out = torch.empty(0)
    for begin, end in (([0] * len(ends), made.before), (made.before, ends)):
        parts = [one[b:e] for one, b, e in zip(made.projected, begin, end, strict=True)]
        flat = torch.cat(parts)
        if not len(flat):
            continue
        turned = rotary and _of_tokens(rotary, begin, end)
        out = torch.full((len(flat), needs.heads, needs.head_dim), torch.nan, dtype=needs.dtype)
        step = cache.begin(shape(made, begin, end, device and device.capability))
        step.attend(1, flat, turned, scores, out)
    return out


def expected(
    needs: Needs, made: Rows, scores: Scores, rotary: Rotary | None = None, upcast: torch.dtype = torch.float64
) -> torch.Tensor:
    """The contract in float64."""
    found = []
    for one, before in zip(made.projected, made.before, strict=True):
        wide = one.to(upcast)
        out = torch.empty(len(one), needs.heads, needs.head_dim, dtype=upcast)
        turned = rotary and replace(
            rotary, cos=rotary.cos[: len(one)].to(upcast), sin=rotary.sin[: len(one)].to(upcast)
        )
        ReferenceStep().attend(0, wide, turned, scores, out)
        found.append(out[before:])
    return torch.cat(found)


def _of_tokens(rotary: Rotary, begin: list[int], end: list[int]) -> Rotary:
    at = torch.cat([torch.arange(b, e) for b, e in zip(begin, end, strict=True)])
    return replace(rotary, cos=rotary.cos[at], sin=rotary.sin[at])


def made_cache(backend: AttentionBackend, needs: Needs, device: ShimDevice | None) -> KvCache:
    """Two layers, NaN in every slot that nobody has written."""
    cache = backend.allocate(needs, 2, 41, device)
    stored = cache._stored
    stored.view(torch.uint8).fill_(0x7F) if needs.kv_dtype == FP8 else stored.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("scores", [Scores(0.125), CAPPED, WINDOWED], ids=["plain", "soft cap", "window"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
def test_decodes_a_chunk_and_a_prompt_in_one_step(dtype: torch.dtype, tolerance: float, scores: Scores) -> None:
    """Tolerances: what rounding weights and outputs once can do to numbers around 1."""
    needs, device = replace(NEEDS, dtype=dtype, kv_dtype=dtype), ShimDevice()
    device.multiprocessors = 64  # so many that a context is cut into splits
    made = rows(needs, *MIXED)
    got = attended(made_cache(CudaBackend(), needs, device), needs, made, scores, device)
    torch.testing.assert_close(got.double(), expected(needs, made, scores), rtol=0, atol=tolerance)
    kernels = {"attn_reference"} if dtype == torch.float32 else {"attn_prefill", "attn_decode"}
    if dtype == torch.bfloat16 and scores.window_tokens is None:  # a window of 20 is one split
        kernels.add("attn_decode_reduce")
    assert set(device.kernels.launched) == {"cache_rope", *kernels}


@pytest.mark.parametrize("scores", [Scores(0.125), CAPPED, WINDOWED], ids=["plain", "soft cap", "window"])
def test_the_slow_backend_agrees_on_a_cpu_and_on_a_device(scores: Scores) -> None:
    needs = replace(NEEDS, dtype=torch.float32, kv_dtype=torch.float32)
    made = rows(needs, *MIXED)
    for device in (None, ShimDevice()):
        got = attended(made_cache(SdpaBackend(), needs, device), needs, made, scores, device)
        torch.testing.assert_close(got.double(), expected(needs, made, scores), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [CudaBackend(), SdpaBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("dtype", "angles", "offset", "tolerance"),
    [
        (torch.float32, 64, None, 2e-5),
        (torch.float32, 32, 1.0, 2e-5),
        (torch.float32, 12, 0.0, 2e-5),
        (torch.bfloat16, 64, 0.0, 5e-2),
    ],
    ids=["rope alone", "half of a head, norms around 0", "so few that torch turns them", "norms in bfloat16"],
)
def test_heads_are_normed_and_turned_where_a_layer_leaves_that_to_the_backend(
    backend: AttentionBackend, dtype: torch.dtype, angles: int, offset: float | None, tolerance: float
) -> None:
    needs, device = replace(NEEDS, dtype=dtype, kv_dtype=dtype), ShimDevice()
    made, of_half = rows(needs, *MIXED), torch.rand(81, angles // 2)
    rotary = Rotary(torch.cat([of_half.cos()] * 2, -1), torch.cat([of_half.sin()] * 2, -1))
    if offset is not None:
        q_gain, k_gain = torch.rand(2, needs.head_dim).to(dtype)
        rotary = replace(rotary, q_gain=q_gain, k_gain=k_gain, epsilon=0.01, gain_offset=offset)
    wanted = expected(needs, made, Scores(0.125), rotary)
    got = attended(made_cache(backend, needs, device), needs, made, Scores(0.125), device, rotary)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_fp8_keeps_what_lies_past_448_by_scales_that_were_measured() -> None:
    """Keys of one head a thousand times larger than the other's: with scale 1 they would all stop at 448."""
    needs, device = replace(NEEDS, kv_dtype=FP8), ShimDevice()
    made = rows(needs, *MIXED)
    for one in made.projected:
        one[:, needs.heads] *= 1000
        one[:, : needs.heads // 2] /= 1000
        one[:, needs.heads + needs.kv_heads + 1] *= 300
    cache = made_cache(CudaBackend(), needs, device)
    assert isinstance(cache, CudaKvCache) and cache.scales is not None
    plain = attended(cache, needs, made, Scores(0.125), device)
    with cache.calibrating():
        attended(cache, needs, made, Scores(0.125), device)
    scales = cache.scales[:, 1]
    assert (scales == torch.exp2(scales.log2().round())).all(), "powers of two"
    largest = torch.cat(made.projected)[:, needs.heads :].abs().amax(dim=(0, 2)).view(2, 2).float()
    assert (2 * largest <= 448 * scales).all() and (448 * scales <= 4 * largest).all()
    got = attended(cache, needs, made, Scores(0.125), device).double()
    right = expected(needs, made, Scores(0.125))
    scale = torch.cat([torch.ones(3), torch.full((3,), 300.0)])[:, None]
    error, before = (((one.double() - right) / scale).abs() for one in (got, plain))
    # e4m3 has 3 bits behind the point: 1/16 of each key and value, averaged over the keys that a query sees.
    assert error.mean() < 0.02 and 3 * error.mean() < before.mean()


def test_blocks_are_copied_in_all_layers_all_sources_read_first() -> None:
    for backend, kv_dtype in ((CudaBackend(), FP8), (CudaBackend(), torch.bfloat16), (SdpaBackend(), torch.bfloat16)):
        cache = backend.allocate(replace(NEEDS, kv_dtype=kv_dtype), 2, 5, ShimDevice())
        marks = torch.arange(5, dtype=torch.float32).view(1, 1, 5, 1, 1, 1)
        cache._stored.copy_(marks.expand(cache._stored.shape))
        cache.copy_blocks(torch.tensor([1, 2, 3]), torch.tensor([2, 1, 4]))
        assert (cache._stored.float().flatten(3) == torch.tensor([0.0, 2, 1, 3, 3]).view(1, 1, 5, 1)).all()


def test_a_layer_of_other_heads_than_the_cache_is_an_error_and_no_read_past_them() -> None:
    needs, device = replace(NEEDS, dtype=torch.float32, kv_dtype=torch.float32), ShimDevice()
    made = rows(replace(needs, heads=needs.heads + 2), (0, 3))
    with pytest.raises(ValueError, match=r"a layer has 12 heads of 64, for 6 \+ 2 \* 2 of 64 there is a cache"):
        attended(made_cache(CudaBackend(), needs, device), needs, made, Scores(0.125), device)


def _op_arguments(needs: Needs, device: ShimDevice) -> tuple[CudaKvCache, tuple[Any, ...]]:
    made = rows(needs, (0, 1), (0, 1), (0, 5))
    cache = CudaBackend().allocate(needs, 1, 41, device)
    cache._stored.zero_()
    one = shape(made, [0, 0, 0], [1, 1, 5], device.capability)
    assert isinstance(one, DeviceStepShape)
    flat = torch.cat(made.projected)
    out = torch.zeros(7, needs.heads, needs.head_dim, dtype=needs.dtype)
    cos, sin = torch.rand(2, 7, 32)
    gains = torch.rand(2, needs.head_dim)
    tensors = (flat, out, cache.keys[0], cache.values[0], None, None, cos, sin, *gains)
    tensors += (one.places, one.tables, one.slots, one.query_starts, one.contexts)
    figures = (one.leading, one.most_tokens, one.most_context, 0.125, 0, 0.0, 0.0, 1e-6)
    return cache, (cache.launcher, *tensors, *figures)


def test_the_op_keeps_what_torch_asks_of_one() -> None:
    """Schema, fake implementation, autograd registration, and ahead-of-time dispatch (torch.library.opcheck)."""
    needs = replace(NEEDS, dtype=torch.float32, kv_dtype=torch.float32)
    _cache, arguments = _op_arguments(needs, ShimDevice())
    results = torch.library.opcheck(ops.paged_attention, arguments)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_torch_compile_sees_one_op_and_gives_the_same() -> None:
    needs = replace(NEEDS, dtype=torch.float32, kv_dtype=torch.float32)
    _cache, arguments = _op_arguments(needs, ShimDevice())
    number, projected, out = arguments[:3]
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(projected: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ops.paged_attention(number, 2 * projected, out, *arguments[3:])
        return out + 1

    eager = layer(projected, out.clone())
    compiled = torch.compile(layer, fullgraph=True, backend=keep)(projected, out.clone())
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if "paged_attention" in str(node.target)]
    assert called == [torch.ops.triptych.paged_attention.default]


def test_a_launcher_is_known_as_long_as_its_cache_lives() -> None:
    cache, arguments = _op_arguments(replace(NEEDS, dtype=torch.float32, kv_dtype=torch.float32), ShimDevice())
    number = cache.launcher
    other, _ = _op_arguments(replace(NEEDS, dtype=torch.float32, kv_dtype=torch.float32), ShimDevice())
    assert other.launcher != number
    del cache
    with pytest.raises(KeyError):
        ops.paged_attention(*arguments)
