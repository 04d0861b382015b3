"""A decode step (cache_rope, attn_decode with its reduce, sampling) captured in a CUDA graph, and replayed.

Half of its rows pad the batch: they have no context, no place in the cache and nothing to draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kernels.cache_rope import CacheRope
from kernels.launch import Decode
from kernels.sampling import Row, Sampling, pack
from tests.gpu_check.checks import Check, Place
from tests.kernels.paged import Batch, batch

DTYPE, HEAD_DIM, GROUP, KV_HEADS, BLOCK_TOKENS, VOCAB, SPLITS = "bfloat16", 128, 4, 2, 16, 5000, 4
PADDING = 4


def checks(place: Place) -> Iterator[Check]:
    """One step, twice: with what it was captured with, and with all of its inputs changed."""
    step = Step(place)
    inputs = [(_rows(1, (130, 17, 64, 1)), 1), (_rows(2, (131, 300, 16, 2)), 2)]
    eager: list[dict[str, bytes]] = []
    yield Check("an eager step leaves its padding alone", lambda: _eager(step, inputs, eager))
    yield Check("a replayed step equals the eager one", lambda: _replayed(place, step, inputs, eager))


def _eager(step: Step, inputs: list[tuple[Batch, int]], eager: list[dict[str, bytes]]) -> str:
    for given, seed in inputs:
        step.load(given, seed=seed)
        step.run()
        eager.append(step.snapshot())
        ids = np.frombuffer(eager[-1]["ids"], np.int64)
        assert (ids[-PADDING:] == -7).all() and (ids[:-PADDING] >= 0).all(), f"padding was drawn: {ids}"
        assert not step.out[-PADDING:].any(), "padding attends to nothing"
    assert eager[0]["ids"] != eager[1]["ids"], "the inputs were to change what is drawn"
    return f"{step.rows} rows, {PADDING} of them padding, {SPLITS} splits"


def _replayed(place: Place, step: Step, inputs: list[tuple[Batch, int]], eager: list[dict[str, bytes]]) -> str:
    place.needs_card("a CPU captures no CUDA graph")
    torch, graph = step.torch, step.torch.cuda.CUDAGraph()
    step.load(inputs[0][0], seed=1)
    with torch.cuda.graph(graph):
        step.run()
    for (given, seed), right in zip(inputs, eager, strict=True):
        step.load(given, seed=seed)
        graph.replay()
        for name, found in step.snapshot().items():
            assert found == right[name], f"{name} differs between graph and eager, inputs {seed}"
    return "two sets of inputs, the same bits"


def _rows(seed: int, contexts: tuple[int, ...]) -> Batch:
    rows = [(context, 1) for context in (*contexts, *[0] * PADDING)]
    return batch(rows, dtype=DTYPE, head_dim=HEAD_DIM, group=GROUP, kv_heads=KV_HEADS, seed=seed)


class Step:
    """Tensors that stay where they are, and the calls on them."""

    def __init__(self, place: Place) -> None:
        import torch

        self.torch, self.device = torch, "cpu" if place.dry else "cuda"
        kernels = place.kernels()
        heads, self.rows, blocks, entries = GROUP * KV_HEADS, 4 + PADDING, 64, 32

        def empty(*shape: int, dtype: Any = torch.bfloat16) -> Any:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.projected = empty(self.rows, heads + 2 * KV_HEADS, HEAD_DIM)
        self.query, self.out = empty(self.rows, heads, HEAD_DIM), empty(self.rows, heads, HEAD_DIM)
        self.keys, self.values = (empty(blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM) for _ in range(2))
        self.tables = empty(self.rows + 2, entries, dtype=torch.int32)
        self.slots, self.contexts = (empty(self.rows, dtype=torch.int32) for _ in range(2))
        self.places, self.positions = (empty(self.rows, dtype=torch.int64) for _ in range(2))
        self.inv_freq = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=self.device, dtype=torch.float32) / HEAD_DIM)
        self.parts = empty(self.rows, heads, SPLITS, HEAD_DIM, dtype=torch.float32)
        self.sums = empty(self.rows, heads, SPLITS, dtype=torch.float32)
        self.logits = empty(self.rows, VOCAB, dtype=torch.float32)
        self.how = empty(self.rows, 56, dtype=torch.uint8)
        self.ids, self.failed = empty(self.rows, dtype=torch.int64), empty(self.rows, dtype=torch.int32)
        strides = {"block_stride": KV_HEADS * BLOCK_TOKENS * HEAD_DIM, "head_stride": BLOCK_TOKENS * HEAD_DIM}
        width = heads * HEAD_DIM
        self.rope = CacheRope(kernels, dtype=DTYPE, kv_dtype=DTYPE, head_dim=HEAD_DIM)
        self.rope.params.set(
            query=self.projected.data_ptr(),
            key=self.projected.data_ptr() + 2 * width,
            value=self.projected.data_ptr() + 2 * (width + KV_HEADS * HEAD_DIM),
            query_out=self.query.data_ptr(),
            keys=self.keys.data_ptr(),
            values=self.values.data_ptr(),
            places=self.places.data_ptr(),
            positions=self.positions.data_ptr(),
            inv_freq=self.inv_freq.data_ptr(),
            **dict.fromkeys(("query_stride", "key_stride", "value_stride"), self.projected.stride(0)),
            **strides,
            query_out_stride=width,
            tokens=self.rows,
            heads=heads,
            kv_heads=KV_HEADS,
            block_tokens=BLOCK_TOKENS,
            rotary_dim=HEAD_DIM,
            rope_factor=1.0,
        )
        self.decode = Decode(kernels, dtype=DTYPE, kv_dtype=DTYPE, head_dim=HEAD_DIM)
        self.decode.params.set(
            out=self.out.data_ptr(),
            partial_out=self.parts.data_ptr(),
            partial_lse=self.sums.data_ptr(),
            query=self.query.data_ptr(),
            keys=self.keys.data_ptr(),
            values=self.values.data_ptr(),
            tables=self.tables.data_ptr(),
            slots=self.slots.data_ptr(),
            contexts=self.contexts.data_ptr(),
            out_stride=width,
            query_stride=width,
            **strides,
            table_stride=entries,
            heads=heads,
            group=GROUP,
            block_tokens=BLOCK_TOKENS,
            splits=SPLITS,
            scale=HEAD_DIM**-0.5,
        )
        self.sampling = Sampling(kernels, dtype="float32")
        self.sampling.params.set(
            logits=self.logits.data_ptr(),
            rows=self.how.data_ptr(),
            token_ids=self.ids.data_ptr(),
            failed=self.failed.data_ptr(),
            logits_stride=VOCAB,
            vocab=VOCAB,
        )

    def load(self, given: Batch, *, seed: int) -> None:
        """Fills the tensors in place, outputs with what no kernel writes."""
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in (self.projected, self.logits):
            tensor.normal_(generator=generator)
        self.tables.fill_(-1)
        self.tables[:, : given.tables.shape[1]] = torch.from_numpy(given.tables).to(self.device)
        for cache, held in ((self.keys, given.keys), (self.values, given.values)):
            cache.zero_()
            cache[: len(held)] = torch.from_numpy(held).view(torch.bfloat16).to(self.device)
        self.slots.copy_(torch.from_numpy(given.slots))
        self.contexts.copy_(torch.from_numpy(given.contexts))
        places = np.full(self.rows, -1, np.int64)
        for row, context in enumerate(given.contexts):
            if context:
                block, offset = divmod(int(context) - 1, BLOCK_TOKENS)
                places[row] = given.tables[given.slots[row], block] * BLOCK_TOKENS + offset
        self.places.copy_(torch.from_numpy(places))
        self.positions.copy_(torch.from_numpy(np.maximum(given.contexts.astype(np.int64) - 1, 0)))
        how = pack([Row(1.0, top_p=0.9, seed=seed * 10 + i) for i in range(4)] + [None] * PADDING)
        self.how.copy_(torch.from_numpy(how.view(np.uint8).reshape(self.rows, -1)))
        self.out.fill_(float("nan"))
        self.ids.fill_(-7)

    def run(self) -> None:
        """Queues the step on the current stream; nothing is allocated."""
        self.rope()
        self.decode(self.rows)
        self.sampling(self.rows)

    def snapshot(self) -> dict[str, bytes]:
        """What the step wrote, to the bit."""
        outputs = {"out": self.out, "keys": self.keys, "values": self.values, "ids": self.ids}
        return {name: tensor.cpu().view(self.torch.uint8).numpy().tobytes() for name, tensor in outputs.items()}
