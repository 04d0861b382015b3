"""Greedy ids through the three services are those of transformers.generate on the same checkpoint in float32."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from tests.support.calls import by_ids, generate, greedy
from tests.support.checkpoints import check_same_ids, reference_ids
from tests.support.cluster import running

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 200, 300, 400, 512, 600)
SHORT = (1, 17, 33, 100, 600)
"""Of the prompts, those that the real model's fast test takes: its reference makes 16 ids a second here."""
NEW_TOKENS = 64

# KV of all 20 streams at their end: 2,514 prompt + 20 x 63 computed output tokens. A pool of 1,216 tokens holds less
# than half of them, and the longest alone (663).
SMALL_POOL_BLOCKS = 1216 // 16 + 1


@cache
def prompts(model: Path) -> list[list[int]]:
    """English text (the license), cut to LENGTHS tokens at different places."""
    text = Path("LICENSE").read_text()
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    starts = [(137 * i) % (len(ids) - max(LENGTHS)) for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


async def stream_all(address: str, asked: list[list[int]]) -> list[list[int]]:
    options = greedy(max_tokens=NEW_TOKENS, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        answers = await asyncio.gather(*(generate(channel, by_ids(p, options), timeout_s=600) for p in asked))
    for answer, prompt in zip(answers, asked, strict=True):
        assert answer.reason == "LENGTH"
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(answer.ids) == NEW_TOKENS
    return [answer.ids for answer in answers]


CONFIGS = {
    "plain": [],
    "chunked prefill": ["--max-num-batched-tokens", "64"],
    "block size 1": ["--block-size", "1"],
    "block size 32": ["--block-size", "32"],
    "small pool": ["--num-kv-blocks", str(SMALL_POOL_BLOCKS)],
}


def test_real_model_ids_equal_the_reference_on_some_prompts(embedded: Path, tmp_path: Path) -> None:
    asked = [prompt for prompt in prompts(embedded) if len(prompt) in SHORT]
    expected = reference_ids(embedded, asked, NEW_TOKENS, ignore_eos=True)
    with running(embedded, tmp_path) as cluster:
        got = asyncio.run(stream_all(cluster.address, asked))
    check_same_ids(embedded, asked, got, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", CONFIGS)
def test_real_model_ids_equal_the_reference(embedded: Path, tmp_path: Path, config: str) -> None:
    expected = reference_ids(embedded, prompts(embedded), NEW_TOKENS, ignore_eos=True)
    with running(embedded, tmp_path, scheduler=[*CONFIGS[config], "--log-level", "debug"]) as cluster:
        got = asyncio.run(stream_all(cluster.address, prompts(embedded)))
        log = cluster.log("scheduler")
    check_same_ids(embedded, prompts(embedded), got, expected)
    assert ("preempted" in log) == (config == "small pool")


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=[pytest.mark.slow] if "block" in name else []) for name in CONFIGS]
)
def test_tiny_model_ids_equal_the_reference(tiny: Path, tmp_path: Path, config: str) -> None:
    expected = reference_ids(tiny, prompts(tiny), NEW_TOKENS, ignore_eos=True)
    with running(tiny, tmp_path, scheduler=[*CONFIGS[config], "--log-level", "debug"]) as cluster:
        got = asyncio.run(stream_all(cluster.address, prompts(tiny)))
        log = cluster.log("scheduler")
    check_same_ids(tiny, prompts(tiny), got, expected)
    assert ("preempted" in log) == (config == "small pool")
