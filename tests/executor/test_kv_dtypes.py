"""Keys and values in float32, bfloat16 and int8: what the executor says of them, and what they do to a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from services.executor.attention.contract import Needs
from services.executor.attention.cpu import CpuBackend
from services.executor.embedded import fetch
from services.executor.executor import Executor, Facts
from services.executor.plan import Plan, Settings, Started
from services.executor.sampling_params import SamplingParams
from tests.executor.forward import logits
from tests.support.checkpoints import float64_logits

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
"""The beginning of Lewis Carroll, "Alice's Adventures in Wonderland" (1865), in the public domain."""
CHUNK_TOKENS = 256
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
NO_IDS = np.zeros(0, np.int64)
NO_PAIRS = NO_IDS.reshape(0, 2)


def needs(kv_dtype: torch.dtype) -> Needs:
    return Needs("cpu", torch.float32, kv_dtype, heads=4, kv_heads=2, head_dim=16, block_tokens=8)


def prompt_logprobs(path: Path, ids: Sequence[int], kv_dtype: torch.dtype) -> tuple[np.ndarray, Facts]:
    """Of every id but the first, computed in chunks, so that all but a chunk's own keys come out of the cache."""
    executor = Executor(path, threads=torch.get_num_threads(), kv_memory_bytes=512 << 20)
    blocks = -(-(len(ids) + 1) // 16)
    settings = Settings(context_tokens=len(ids) + 1, block_tokens=16, max_slots=1, max_step_tokens=CHUNK_TOKENS)
    facts = executor.load(settings, torch.float32, "", lambda progress: None, kv_dtype=kv_dtype)
    executor.allocate(blocks + 1)
    request = Started(
        slot=0,
        token_ids=np.array(ids, np.uint32),
        prompt_tokens=len(ids),
        computed_tokens=0,
        block_ids=np.arange(1, blocks + 1),
        sampling=SamplingParams(temperature=0.0),
        scored=0,
    )
    found: list[np.ndarray] = []
    for step, begin in enumerate(range(0, len(ids), CHUNK_TOKENS)):
        count = min(CHUNK_TOKENS, len(ids) - begin)
        started = () if step else (request,)
        plan = Plan(step + 1, NO_IDS, started, NO_PAIRS, np.array([0]), np.array([count]), None, None)
        found += [scores.logprobs.own for scores in executor.execute(plan).prompt_scores]
    return np.concatenate(found), facts


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_perplexity_hardly_grows_with_smaller_keys_and_values() -> None:
    """Bounds: 0.5% for bfloat16 and 1% for int8, over the same text with float32."""
    embedded = fetch(print)
    ids = Tokenizer.from_file(str(embedded / "tokenizer.json")).encode(TEXT.read_text()).ids
    assert len(ids) > 1000
    perplexity, block_bytes = {}, {}
    for kv_dtype in DTYPES:
        logprobs, facts = prompt_logprobs(embedded, ids, kv_dtype)
        assert len(logprobs) == len(ids) - 1
        perplexity[kv_dtype], block_bytes[kv_dtype] = math.exp(-logprobs.mean(dtype=np.float64)), facts.block_bytes
        print(kv_dtype, perplexity[kv_dtype], block_bytes[kv_dtype])
    assert 5 < perplexity[torch.float32] < 50  # English that a model of this size has a notion of
    assert perplexity[torch.bfloat16] <= 1.005 * perplexity[torch.float32]
    assert perplexity[torch.int8] <= 1.01 * perplexity[torch.float32]
    vector_bytes = {dtype: size // (2 * 30 * 3 * 16) for dtype, size in block_bytes.items()}  # of 64 numbers
    assert vector_bytes == {torch.float32: 256, torch.bfloat16: 128, torch.int8: 68}


def test_smaller_keys_and_values_are_what_is_computed_with(tiny: Path) -> None:
    """Logits move by what rounding explains: not at all would be float32, far would be wrong."""
    ids = np.random.default_rng(3).integers(3, 512, 100).tolist()
    exact = float64_logits(tiny, ids)
    off = {dtype: float(np.abs(logits(tiny, ids, dtype) - exact).max()) for dtype in DTYPES}
    spread = float(np.abs(exact).max())
    assert off[torch.float32] < 1e-4 * spread
    assert off[torch.float32] < off[torch.bfloat16] < 0.1 * spread
    assert off[torch.float32] < off[torch.int8] < 0.1 * spread


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_blocks_are_copied_with_their_scales_in_all_layers_all_sources_read_first(kv_dtype: torch.dtype) -> None:
    cache = CpuBackend().allocate(needs(kv_dtype), layers=2, num_blocks=5)
    for layer in range(2):
        for array in vars(cache.layers[layer]).values():
            array[:] = (10 * layer + np.arange(len(array))).reshape(-1, *[1] * (array.ndim - 1))
    cache.copy_blocks(torch.tensor([1, 2, 3]), torch.tensor([2, 1, 4]))
    for layer in range(2):
        keys, values, *scales = vars(cache.layers[layer]).values()
        for array in (keys, values, *(scales if kv_dtype == torch.int8 else ())):
            firsts = array.reshape(5, -1)
            assert (firsts == firsts[:, :1]).all()
            assert firsts[:, 0].tolist() == [10 * layer + block for block in (0, 2, 1, 3, 3)]


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_what_a_block_takes_is_told_before_it_is_made(kv_dtype: torch.dtype) -> None:
    cache = CpuBackend().allocate(needs(kv_dtype), layers=3, num_blocks=7)
    held = sum(array.nbytes for layer in cache.layers for array in vars(layer).values())
    assert held == 3 * 7 * needs(kv_dtype).block_bytes
