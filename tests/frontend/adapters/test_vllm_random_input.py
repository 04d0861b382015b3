"""Random requests at the adapter: each ends well or is refused, none is an error of ours, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb

from tests.frontend.harness import VOCAB_SIZE, scripted, serving
from tests.support.checkpoints import EOS_ID
from tests.support.vllm_calls import generate, stub

NUM_REQUESTS = 400
AT_ONCE = 20

FLOATS = (0.0, 0.5, 1.0, 1.5, -1.0, 1e-12, 1e30, math.nan, math.inf, -math.inf)
COUNTS = (0, 1, 2, 3, 16, 17, 1023, 1024, 2**31, 2**32 - 1)
SIGNED = (-(2**31), -1, 0, 1, 3, 20, 21, 2**31 - 1)
IDS = (0, 1, EOS_ID, 50, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31, 2**32 - 1)
TEXTS = ("", " ", "a", "STOP", "é", "😀", "<|im_end|>", "\0", "x" * 2000, "{", "(", "root ::= (", '{"type": "object"}')

REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def random_params(rng: random.Random) -> pb.SamplingParams:
    values: dict[str, Any] = {
        **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), FLOATS),
        "repetition_penalty": FLOATS,
        **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "n"), COUNTS),
        **dict.fromkeys(("logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens"), SIGNED),
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "ignore_eos"), (False, True)),
        **dict.fromkeys(("include_stop_str_in_output", "grammar_from_first_token"), (False, True)),
        **dict.fromkeys(("json_schema", "regex", "grammar", "structural_tag"), TEXTS),
        "json_object": (False, True),
    }
    # Few at a time: the more there are, the surer one of them is refused.
    params = pb.SamplingParams(
        **{name: rng.choice(values[name]) for name in rng.sample(sorted(values), rng.randrange(5))}
    )
    if rng.random() < 0.3:
        params.stop.extend(rng.choices(TEXTS, k=rng.randrange(4)))
    if rng.random() < 0.3:
        params.stop_token_ids.extend(rng.choices(IDS, k=rng.randrange(4)))
    if rng.random() < 0.2:
        params.logit_bias.update({rng.choice(SIGNED): rng.choice(FLOATS) for _ in range(3)})
    return params


def random_request(rng: random.Random) -> pb.GenerateRequest:
    request = pb.GenerateRequest(sampling_params=random_params(rng), stream=rng.random() < 0.5)
    request.request_id = rng.choice(("", "a", "b", "x" * 200))
    if rng.random() < 0.6:
        request.tokenized.input_ids.extend(rng.choices(IDS[: rng.choice((5, len(IDS)))], k=rng.randrange(20)))
    elif rng.random() < 0.8:
        request.text = rng.choice(TEXTS)
    if rng.random() < 0.05:
        request.kv_transfer_params_json = json.dumps({})
    return request


async def test_no_random_request_breaks_the_adapter(text_model: Path) -> None:
    rng = random.Random(7)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    ended: dict[grpc.StatusCode, int] = {}
    async with serving(text_model, scripted([50, 51, 52, EOS_ID]), vllm_adapter=True) as served:

        async def ask(request: pb.GenerateRequest) -> None:
            try:
                reply = await generate(served.channel, request)
                code = grpc.StatusCode.OK
                assert len(reply.completes) == (request.sampling_params.n or 1)
            except grpc.aio.AioRpcError as error:
                code = error.code()
                assert code in REFUSED, (request, error)
            ended[code] = ended.get(code, 0) + 1
            if rng.random() < 0.2:
                await stub(served.channel).Abort(pb.AbortRequest(request_ids=["a", "b", "unknown"]))

        for start in range(0, NUM_REQUESTS, AT_ONCE):
            await asyncio.gather(*map(ask, requests[start : start + AT_ONCE]))
        await served.engine.wait_until(lambda engine: engine.num_running == 0)
        assert served.frontend.calls.num_running == 0
    assert ended[grpc.StatusCode.OK] > NUM_REQUESTS / 10 and len(ended) > 2, ended
