"""A frontend that has more calls than it takes: which are refused, how, and that health is not among them."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.inference.v1 import inference_pb2

from loadtest.stub_engine import StubEngine
from tests.frontend.harness import VOCAB_SIZE, reason, retry_after_s, serving
from tests.support.attached import until


def generate(max_tokens: int = 1000) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text="Hello", options=inference_pb2.Options(max_tokens=max_tokens, ignore_eos=True)
    )


async def test_calls_past_the_limit_are_refused_with_a_hint_and_the_next_is_served_when_one_has_ended(
    text_model: Path,
) -> None:
    engine = StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024, step_s=0.01)
    async with serving(text_model, engine, max_calls=2) as served:
        calls = [served.stub.Generate(generate()) for _ in range(2)]
        for call in calls:
            assert await call.read() is not grpc.aio.EOF
        for refused in (
            served.stub.Generate(generate()).read(),
            served.stub.Tokenize(inference_pb2.TokenizeRequest(text="a")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await refused
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason(error.value) == "TOO_MANY_CALLS" and retry_after_s(error.value) == 1.0
            assert error.value.details() == "2 calls run, the limit is --max-calls 2; try again later"
        health = health_pb2_grpc.HealthStub(served.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(service="generate"))).status == 1
        calls[0].cancel()
        await until(lambda: served.frontend.calls.num_running == 1)
        answer = await served.stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(request=generate(3)))
        assert len(answer.response.choices[0].token_ids) == 3
        calls[1].cancel()
