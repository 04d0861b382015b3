"""The kernels' times beside what the memory or the tensor cores of the card allow, and beside their targets.

A line is timed by replaying a CUDA graph of many calls, over buffers that together are more than twice the L2, so that
nothing a call reads is left from the one before. The median of seven replays counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.cache_rope import CacheRope
from kernels.instances import FP8
from kernels.launch import Decode, Prefill, number_of_splits
from kernels.sampling import Row, Sampling, pack
from tests.gpu_check.checks import Check, Place, SkippedError

Call = Callable[[], Any]

HEAD_DIM, KV_HEADS, GROUP, BLOCK_TOKENS = 128, 8, 4, 16
REPLAYS = 7
CALLS_A_GRAPH = 20


@dataclass(frozen=True)
class Roof:
    """Of a card, as its maker states it."""

    bytes_per_s: float
    flops: float
    """bfloat16 tensor cores, dense."""


ROOFS = {"H200": Roof(4.8e12, 989e12), "H100": Roof(3.35e12, 989e12), "A100": Roof(2.039e12, 312e12)}
"""By what the card's name holds."""


@dataclass(frozen=True)
class Line:
    """What one call moves or computes, and how long it may take."""

    name: str
    calls: Sequence[Call]
    bytes: float = 0.0
    flop: float = 0.0
    target_us: float | None = None
    """On an H200."""


@dataclass(frozen=True)
class Measured:
    """A line of the table; None where it was not timed, or no bound is known."""

    name: str
    bound_us: float | None
    target_us: float | None
    measured_us: float | None

    def cells(self) -> tuple[str, ...]:
        """For loadtest.report.table."""
        numbers = (self.bound_us, self.target_us, self.measured_us)
        share = self.bound_us / self.measured_us if self.bound_us and self.measured_us else None
        cells = ["-" if number is None else f"{number:.1f}" for number in numbers]
        return (self.name, *cells, "-" if share is None else f"{share:.0%}")


HEADER = ("kernel", "bound us", "target us", "measured us", "of the bound")


def checks(place: Place, table: list[Measured]) -> Iterator[Check]:
    """A check a line, which fills the table; without a card a line is called once, on the shim and much smaller."""
    bench = Bench(place)
    lines: list[tuple[str, Callable[[], Line]]] = [
        ("copy of 1 GiB by torch", bench.copy),
        ("cache_rope, 2048 tokens, 32 + 8 heads", bench.cache_rope),
        ("attn_decode, 64 rows of 4096", lambda: bench.decode(64, 4096, "bfloat16", 295)),
        ("attn_decode, fp8 KV, 64 rows of 4096", lambda: bench.decode(64, 4096, FP8, 295 / 1.7)),
        ("attn_decode, 8 rows of 4096", lambda: bench.decode(8, 4096, "bfloat16", None)),
        ("attn_decode and reduce, 1 row of 4096", lambda: bench.decode(1, 4096, "bfloat16", 15)),
        ("attn_decode, 256 rows of 1024", lambda: bench.decode(256, 1024, "bfloat16", None)),
        ("attn_prefill, 2048 tokens behind 8192", lambda: bench.prefill(2048, 8192, 309e9 / 330e12 * 1e6)),
        ("attn_prefill, 2048 tokens alone", lambda: bench.prefill(2048, 0, None)),
        ("sampling, 64 rows of 128256, greedy", lambda: bench.sampling(None)),
        ("sampling, top-k 50", lambda: bench.sampling(Row(1.0, top_k=50))),
        ("sampling, top-p 0.9", lambda: bench.sampling(Row(1.0, top_p=0.9))),
        ("add + RMSNorm by torch.compile, 2048 x 4096", bench.add_norm),
        ("SiLU * mul by torch.compile, 2048 x 14336", bench.gated),
    ]
    for name, make in lines:
        yield Check(name, lambda name=name, make=make: bench.line(name, make, table))


class Bench:
    """Makes lines, and times them."""

    def __init__(self, place: Place) -> None:
        import torch

        self.torch, self.place = torch, place
        self.device = "cpu" if place.dry else "cuda"
        self.kernels = place.kernels()
        self.roof = None if place.dry else _roof(torch.cuda.get_device_name())
        self.multiprocessors = 132 if place.dry else torch.cuda.get_device_properties(0).multi_processor_count
        self.l2_bytes = 0 if place.dry else torch.cuda.get_device_properties(0).L2_cache_size

    def line(self, name: str, make: Callable[[], Line], table: list[Measured]) -> str:
        """Times, and adds a line to the table."""
        line = make()
        if self.place.dry:
            for call in line.calls[:1]:
                call()
            raise SkippedError("called once on the shim, small; nothing was timed")
        bound = None
        if self.roof:
            bound = max(line.bytes / self.roof.bytes_per_s, line.flop / self.roof.flops) * 1e6
        measured = self._timed_us(line.calls)
        row = Measured(name, bound, line.target_us, measured)
        table.append(row)
        rate = f"{line.flop / measured / 1e6:.0f} TFLOP/s" if line.flop else f"{line.bytes / measured / 1e3:.0f} GB/s"
        self.torch.cuda.empty_cache()
        return f"{measured:.1f} us, {rate}"

    def _timed_us(self, calls: Sequence[Call]) -> float:
        """Of one call."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls[0]()  # modules are loaded, and what compiles is compiled, before anything is captured
        torch.cuda.current_stream().wait_stream(side)
        graph, rounds = torch.cuda.CUDAGraph(), -(-CALLS_A_GRAPH // len(calls))
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        times = []
        for _ in range(REPLAYS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
        return statistics.median(times[2:])

    def _copies(self, bytes_a_call: float) -> int:
        """How many sets of buffers there must be, so that a call finds nothing of its own in the L2."""
        return 1 if self.place.dry else max(1, min(64, -(-2 * self.l2_bytes // int(bytes_a_call))))

    def _random(self, *shape: int, dtype: Any = None) -> Any:
        torch = self.torch
        dtype = dtype or torch.bfloat16
        if dtype == torch.float8_e4m3fn:
            return torch.randn(shape, device=self.device, dtype=torch.bfloat16).to(dtype)
        return torch.randn(shape, device=self.device, dtype=dtype)

    def copy(self) -> Line:
        """Reads and writes."""
        count = 1 << (10 if self.place.dry else 29)
        source = self._random(count)
        target = self.torch.empty_like(source)
        return Line("copy", [lambda: target.copy_(source)], bytes=4 * count)

    def cache_rope(self) -> Line:
        """Joined projections in, queries and blocks out, angles from tables."""
        torch, tokens, heads = self.torch, 40 if self.place.dry else 2048, GROUP * KV_HEADS
        moved = tokens * ((2 * heads + 4 * KV_HEADS) * HEAD_DIM * 2 + HEAD_DIM * 4)
        calls = []
        for _ in range(self._copies(moved)):
            projected = self._random(tokens, heads + 2 * KV_HEADS, HEAD_DIM)
            query = torch.empty(tokens, heads, HEAD_DIM, device=self.device, dtype=torch.bfloat16)
            blocks = -(-tokens // BLOCK_TOKENS) + 1
            caches = [self._random(blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM) for _ in range(2)]
            angles = [self._random(tokens, HEAD_DIM // 2, dtype=torch.float32) for _ in range(2)]
            places = torch.arange(tokens, device=self.device) + BLOCK_TOKENS
            call = CacheRope(self.kernels, dtype="bfloat16", kv_dtype="bfloat16", head_dim=HEAD_DIM)
            call.params.set(
                query=projected.data_ptr(),
                key=projected.data_ptr() + 2 * heads * HEAD_DIM,
                value=projected.data_ptr() + 2 * (heads + KV_HEADS) * HEAD_DIM,
                query_out=query.data_ptr(),
                keys=caches[0].data_ptr(),
                values=caches[1].data_ptr(),
                places=places.data_ptr(),
                cos=angles[0].data_ptr(),
                sin=angles[1].data_ptr(),
                angle_stride=HEAD_DIM // 2,
                **dict.fromkeys(("query_stride", "key_stride", "value_stride"), projected.stride(0)),
                query_out_stride=heads * HEAD_DIM,
                block_stride=caches[0].stride(0),
                head_stride=caches[0].stride(1),
                tokens=tokens,
                heads=heads,
                kv_heads=KV_HEADS,
                block_tokens=BLOCK_TOKENS,
                rotary_dim=HEAD_DIM,
            )
            calls.append(_holding(call, projected, query, caches, angles, places))
        return Line("cache_rope", calls, bytes=moved)

    def decode(self, rows: int, context: int, kv_dtype: str, target_us: float | None) -> Line:
        """One layer's attention of `rows` requests of `context` tokens."""
        torch = self.torch
        if self.place.dry:
            rows, context = min(rows, 2), context // 40
        heads, entries = GROUP * KV_HEADS, -(-context // BLOCK_TOKENS)
        item = 1 if kv_dtype == FP8 else 2
        moved = rows * context * KV_HEADS * HEAD_DIM * 2 * item
        kind = torch.float8_e4m3fn if kv_dtype == FP8 else torch.bfloat16
        calls = []
        for _ in range(self._copies(moved)):
            call = Decode(self.kernels, dtype="bfloat16", kv_dtype=kv_dtype, head_dim=HEAD_DIM)
            fitting = self.kernels.architecture.fitting(call.attend.shared_bytes)
            splits = number_of_splits(rows * KV_HEADS, self.multiprocessors * fitting, context)
            query, out = (self._random(rows, heads, HEAD_DIM) for _ in range(2))
            caches = [self._random(rows * entries, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, dtype=kind) for _ in range(2)]
            tables = torch.randperm(rows * entries, device=self.device).int().view(rows, entries)
            contexts = torch.full((rows,), context, dtype=torch.int32, device=self.device)
            parts = self._random(rows, heads, splits, HEAD_DIM, dtype=torch.float32)
            sums = self._random(rows, heads, splits, dtype=torch.float32)
            call.params.set(
                **_attention(query, out, caches, tables, contexts),
                partial_out=parts.data_ptr(),
                partial_lse=sums.data_ptr(),
                splits=splits,
            )
            calls.append(_holding(lambda call=call: call(rows), query, out, caches, tables, contexts, parts, sums))
        return Line("attn_decode", calls, bytes=moved, target_us=target_us)

    def prefill(self, fresh: int, before: int, target_us: float | None) -> Line:
        """One row."""
        torch = self.torch
        if self.place.dry:
            fresh, before = 40, before // 200
        heads, context = GROUP * KV_HEADS, before + fresh
        entries = -(-context // BLOCK_TOKENS)
        query, out = (self._random(fresh, heads, HEAD_DIM) for _ in range(2))
        caches = [self._random(entries, KV_HEADS, BLOCK_TOKENS, HEAD_DIM) for _ in range(2)]
        tables = torch.randperm(entries, device=self.device).int().view(1, entries)
        contexts = torch.full((1,), context, dtype=torch.int32, device=self.device)
        starts = torch.tensor([0, fresh], dtype=torch.int32, device=self.device)
        call = Prefill(self.kernels, dtype="bfloat16", kv_dtype="bfloat16", head_dim=HEAD_DIM)
        call.params.set(**_attention(query, out, caches, tables, contexts), query_starts=starts.data_ptr(), rows=1)
        keys = fresh * before + fresh * (fresh + 1) // 2
        calls = [_holding(lambda: call(fresh), query, out, caches, tables, contexts, starts)]
        return Line("attn_prefill", calls, flop=4 * HEAD_DIM * heads * keys, target_us=target_us)

    def sampling(self, row: Row | None) -> Line:
        """The bound is one pass over the logits."""
        torch, rows, vocab = self.torch, 2 if self.place.dry else 64, 3000 if self.place.dry else 128_256
        moved, calls = rows * vocab * 2, []
        for copy in range(self._copies(moved)):
            logits = self._random(rows, vocab) * 3
            drawn = [Row(None) if row is None else Row(1.0, row.top_k, row.top_p, seed=copy) for _ in range(rows)]
            how = torch.from_numpy(pack(drawn).view("u1")).to(self.device)
            ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
            failed = torch.zeros(rows, dtype=torch.int32, device=self.device)
            call = Sampling(self.kernels, dtype="bfloat16")
            call.params.set(
                logits=logits.data_ptr(),
                rows=how.data_ptr(),
                token_ids=ids.data_ptr(),
                failed=failed.data_ptr(),
                logits_stride=vocab,
                vocab=vocab,
            )
            calls.append(_holding(lambda call=call: call(rows), logits, how, ids, failed))
        return Line("sampling", calls, bytes=moved)

    def add_norm(self) -> Line:
        """What the kernels leave to torch.compile: fused add and RMSNorm."""
        self.place.needs_card("torch.compile is measured on a card alone")
        torch, tokens, width = self.torch, 2048, 4096
        moved = tokens * width * 2 * 4

        def add_norm(x: Any, residual: Any, gain: Any) -> Any:
            total = x + residual
            return total, torch.nn.functional.rms_norm(total, (width,), gain)

        compiled = torch.compile(add_norm)
        sets = [
            (self._random(tokens, width), self._random(tokens, width), self._random(width))
            for _ in range(self._copies(moved))
        ]
        return self._compiled("add + RMSNorm", compiled, sets, moved)

    def gated(self) -> Line:
        """SiLU of one half times the other."""
        self.place.needs_card("torch.compile is measured on a card alone")
        torch, tokens, width = self.torch, 2048, 14336
        moved = tokens * width * 2 * 3
        compiled = torch.compile(lambda x: torch.nn.functional.silu(x[:, :width]) * x[:, width:])
        sets = [(self._random(tokens, 2 * width),) for _ in range(self._copies(moved))]
        return self._compiled("SiLU * mul", compiled, sets, moved)

    def _compiled(self, name: str, compiled: Any, sets: Sequence[tuple[Any, ...]], moved: float) -> Line:
        """Compiles; where that cannot be done (no C compiler, no Triton) the line is skipped."""
        try:
            compiled(*sets[0])
        except Exception as error:
            raise SkippedError(f"torch.compile does not work here: {str(error).splitlines()[0][:150]}") from None
        calls = [lambda given=given: compiled(*given) for given in sets]
        bound_us = moved / self.roof.bytes_per_s * 1e6 if self.roof else None
        return Line(name, calls, bytes=moved, target_us=bound_us and bound_us / 0.85)


def _roof(name: str) -> Roof | None:
    return next((roof for known, roof in ROOFS.items() if known in name), None)


def _holding(call: Call, *tensors: Any) -> Call:
    """The call, with the tensors whose addresses it has."""

    def held() -> Any:
        _ = tensors
        return call()

    return held


def _attention(query: Any, out: Any, caches: Sequence[Any], tables: Any, contexts: Any) -> dict[str, Any]:
    return {
        "out": out.data_ptr(),
        "query": query.data_ptr(),
        "keys": caches[0].data_ptr(),
        "values": caches[1].data_ptr(),
        "tables": tables.data_ptr(),
        "contexts": contexts.data_ptr(),
        "out_stride": out.stride(0),
        "query_stride": query.stride(0),
        "block_stride": caches[0].stride(0),
        "head_stride": caches[0].stride(1),
        "table_stride": tables.stride(0),
        "heads": query.shape[1],
        "group": GROUP,
        "block_tokens": BLOCK_TOKENS,
        "scale": HEAD_DIM**-0.5,
    }
