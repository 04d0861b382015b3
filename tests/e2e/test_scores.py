"""Prompt logprobs through the three services are log-softmax of transformers' float64 logits, whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from tests.support.calls import Answer, by_ids, generate, greedy
from tests.support.checkpoints import check_same_ids, check_scores, check_tops, reference_ids
from tests.support.cluster import running

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 200)
NEW_TOKENS = 48

# The 8 continued streams come to 348 prompt tokens and 376 computed output tokens; the longest alone to 247. A pool of
# 256 tokens preempts, and a budget of 32 cuts prompts where blocks end and where they do not.
FLAGS = ["--num-kv-blocks", "17", "--max-num-batched-tokens", "32", "--log-level", "debug"]


def scores(answer: Answer) -> list[tuple[float, int]]:
    """(logprob, rank) by position from 1 on, each told once and before any choice."""
    told = [message for message in answer.messages if message.HasField("prompt_logprobs")]
    assert answer.messages[1 : 1 + len(told)] == told
    positions = [position for message in told for position in message.prompt_logprobs.positions]
    assert positions[0] == inference_pb2.PositionLogprobs()
    return [(position.token.logprob, position.token.rank) for position in positions[1:]]


def narrow() -> inference_pb2.Options:
    options = greedy(max_tokens=9, ignore_eos=True, logprobs=5)
    options.sampling.allowed_token_ids.extend([300, 301, 302, 511])
    options.sampling.banned_token_ids.append(301)
    return options


async def ask_all(address: str, prompts: list[list[int]]) -> tuple[list[Answer], list[Answer]]:
    """Every prompt scored and continued, and scored alone, all at once; every second one also unscored beside them."""
    continued = greedy(max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=4, logprobs=3)
    alone = greedy(max_tokens=0, prompt_logprobs=0)
    plain = greedy(max_tokens=NEW_TOKENS, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        answers = await asyncio.gather(
            *(generate(channel, by_ids(prompt, continued)) for prompt in prompts),
            *(generate(channel, by_ids(prompt, alone)) for prompt in prompts),
            *(generate(channel, by_ids(prompt, plain)) for prompt in prompts[::2]),
        )
        chosen = await generate(channel, by_ids(prompts[2], narrow()))
        assert len(chosen.ids) == 9 and set(chosen.ids) <= {300, 302, 511}
        tops = [[one.token_id for one in p.top] for m in chosen.messages for c in m.choices for p in c.logprobs]
        assert len(tops) == 9 and not any(
            set(top) <= {300, 302, 511} for top in tops
        )  # the model's own, not the list's
        request = inference_pb2.GenerateUnaryRequest(request=by_ids(prompts[-1], alone))
        whole = (await inference_pb2_grpc.InferenceServiceStub(channel).GenerateUnary(request)).response
        answers.append(Answer([whole]))
    return answers[: len(prompts)], answers[len(prompts) :]


def check_alternatives(path: Path, prompt: list[int], answer: Answer) -> None:
    """Of prompt and output."""
    of_prompt = [p for m in answer.messages if m.HasField("prompt_logprobs") for p in m.prompt_logprobs.positions]
    of_output = [p for m in answer.messages for choice in m.choices for p in choice.logprobs]
    assert len(of_output) == len(answer.ids) == NEW_TOKENS
    for first, positions, count in ((1, of_prompt[1:], 4), (len(prompt), of_output, 3)):
        tops = [[(one.token_id, one.logprob) for one in position.top] for position in positions]
        check_tops(path, [*prompt, *answer.ids], first, tops, count)
    own = [[(p.token.logprob, p.token.rank) for p in of_output]]
    check_scores(path, [[*prompt, *answer.ids]], [[*scores(answer), *own[0]]])


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
    for prompt, answer in zip(prompts, continued, strict=True):
        check_alternatives(tiny, prompt, answer)
    check_same_ids(tiny, prompts, [answer.ids for answer in continued], expected)
    check_same_ids(tiny, prompts[::2], [answer.ids for answer in plain], expected[::2])
    assert all(answer.reason == "LENGTH" and answer.ids == [] for answer in alone)
    told = whole.messages[0].prompt_logprobs
    assert len(told.positions) == LENGTHS[-1] and told.start == 0
    check_scores(tiny, prompts[-1:], [[(entry.token.logprob, entry.token.rank) for entry in told.positions[1:]]])
