"""Prompt logprobs through the three services are log-softmax of transformers' float64 logits, whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from tests.support.calls import Answer, by_ids, generate, greedy
from tests.support.checkpoints import check_same_ids, check_scores, reference_ids
from tests.support.cluster import running

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 200)
NEW_TOKENS = 32

# The 8 continued streams come to 348 prompt tokens and 248 computed output tokens; the longest alone to 231. A pool of
# 256 tokens preempts, and a budget of 32 cuts prompts where blocks end and where they do not.
FLAGS = ["--num-kv-blocks", "17", "--max-num-batched-tokens", "32", "--log-level", "debug"]


def scores(answer: Answer) -> list[tuple[float, int]]:
    """(logprob, rank) by position from 1 on, each told once and before any choice."""
    told = [message for message in answer.messages if message.HasField("prompt_logprobs")]
    assert answer.messages[1 : 1 + len(told)] == told
    positions = [position for message in told for position in message.prompt_logprobs.positions]
    assert positions[0] == inference_pb2.PositionLogprobs()
    return [(position.token.logprob, position.token.rank) for position in positions[1:]]


async def ask_all(address: str, prompts: list[list[int]]) -> tuple[list[Answer], list[Answer]]:
    """Every prompt scored and continued, and scored alone, all at once; every second one also unscored beside them."""
    continued = greedy(max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
    alone = greedy(max_tokens=0, prompt_logprobs=0)
    plain = greedy(max_tokens=NEW_TOKENS, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        answers = await asyncio.gather(
            *(generate(channel, by_ids(prompt, continued)) for prompt in prompts),
            *(generate(channel, by_ids(prompt, alone)) for prompt in prompts),
            *(generate(channel, by_ids(prompt, plain)) for prompt in prompts[::2]),
        )
        request = inference_pb2.GenerateUnaryRequest(request=by_ids(prompts[-1], alone))
        whole = (await inference_pb2_grpc.InferenceServiceStub(channel).GenerateUnary(request)).response
        answers.append(Answer([whole]))
    return answers[: len(prompts)], answers[len(prompts) :]


def test_prompt_logprobs_equal_the_reference_in_chunks_batches_and_after_preemptions(
    tiny: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 512, length).tolist() for length in LENGTHS]
    expected = reference_ids(tiny, prompts, NEW_TOKENS, ignore_eos=True)
    with running(tiny, tmp_path, scheduler=FLAGS) as cluster:
        continued, others = asyncio.run(ask_all(cluster.address, prompts))
        log = cluster.log("scheduler")
    assert "preempted" in log
    alone, plain, whole = others[: len(prompts)], others[len(prompts) : -1], others[-1]
    check_scores(tiny, prompts, [scores(answer) for answer in continued])
    check_scores(tiny, prompts, [scores(answer) for answer in alone])
    check_same_ids(tiny, prompts, [answer.ids for answer in continued], expected)
    check_same_ids(tiny, prompts[::2], [answer.ids for answer in plain], expected[::2])
    assert all(answer.reason == "LENGTH" and answer.ids == [] for answer in alone)
    told = whole.messages[0].prompt_logprobs
    assert len(told.positions) == LENGTHS[-1] and told.start == 0
    check_scores(tiny, prompts[-1:], [[(entry.token.logprob, entry.token.rank) for entry in told.positions[1:]]])
