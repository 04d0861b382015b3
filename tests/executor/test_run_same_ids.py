"""Greedy ids through the executor's real server equal transformers' generate, however the work is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, serve
from tests.support.checkpoints import check_same_ids, reference_ids

NEW_TOKENS = 24


def prompts(*lengths: int, vocab: int = 512) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab, length).tolist() for length in lengths]


async def generate(
    path: Path, asked: list[list[int]], *, block_tokens: int = 16, budget: int = 256, slots: int = 8, preempt: int = 0
) -> list[list[int]]:
    blocks = 1 + sum(-(-(len(prompt) + NEW_TOKENS) // block_tokens) for prompt in asked)
    async with serve(path, num_blocks=blocks, block_tokens=block_tokens, max_slots=slots) as rig:
        run = await RunStream.open(rig)
        requests = [Request(prompt, NEW_TOKENS) for prompt in asked]
        await MiniScheduler(run, rig.config, blocks, budget=budget).finish(requests, preempt_every=preempt)
        await run.close()
    return [request.output for request in requests]


def check(path: Path, asked: list[list[int]], got: list[list[int]]) -> None:
    check_same_ids(path, asked, got, reference_ids(path, asked, NEW_TOKENS, ignore_eos=True))


@pytest.mark.parametrize("block_tokens", [1, 16, 32])
async def test_interleaved_requests_whatever_the_block_size(tiny: Path, block_tokens: int) -> None:
    asked = prompts(1, 2, 15, 16, 17, 64, 100)
    check(tiny, asked, await generate(tiny, asked, block_tokens=block_tokens))


@pytest.mark.parametrize("budget", [7, 16, 64])
async def test_prompts_cut_into_chunks(tiny: Path, budget: int) -> None:
    asked = prompts(1, 63, 64, 65, 200)
    check(tiny, asked, await generate(tiny, asked, budget=budget))


async def test_more_requests_than_slots_reuse_them(tiny: Path) -> None:
    asked = prompts(*range(3, 12))
    check(tiny, asked, await generate(tiny, asked, slots=2))


@pytest.mark.parametrize("block_tokens", [1, 16])
async def test_preempted_requests_come_back_with_their_output(tiny: Path, block_tokens: int) -> None:
    asked = prompts(5, 40, 90)
    check(tiny, asked, await generate(tiny, asked, block_tokens=block_tokens, budget=64, preempt=5))
