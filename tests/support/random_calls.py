"""Random calls at a public API: each ends in time with a status that is the caller's, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Callable

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from triptych.inference.v1 import inference_pb2

from tests.support.random_messages import METHODS, Call, calls

SEED_VARIABLE = "TRIPTYCH_RANDOM_SEED"
A_RUN = 2000
"""Calls that hypothesis makes with one seed: it remembers all of a run, 7 KB each."""
AT_ONCE = 4
LIMIT_S = 30.0
"""Of AT_ONCE calls together, on a machine that does other things too."""

ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
"""Nothing here breaks an engine, passes a deadline or finds none: INTERNAL, UNKNOWN, UNAVAILABLE are faults."""

_KINDS = {method.name: method for method in METHODS}


def run(address: str, loop: asyncio.AbstractEventLoop, count: int, after_each: Callable[[], None]) -> Counter[str]:
    """So many calls, AT_ONCE at a time; how many ended with which code. `loop` runs in a thread of its own."""
    number = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"random input: {SEED_VARIABLE}={number}", flush=True)
    codes: Counter[str] = Counter()
    for i, begin in enumerate(range(0, count, A_RUN)):
        codes += _run(number + i, address, loop, min(A_RUN, count - begin), after_each)
    print(f"random input: {codes}", flush=True)
    return codes


def _run(
    number: int, address: str, loop: asyncio.AbstractEventLoop, count: int, after_each: Callable[[], None]
) -> Counter[str]:
    codes: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=count // AT_ONCE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(st.lists(calls(), min_size=AT_ONCE, max_size=AT_ONCE))
    def check(together: list[Call]) -> None:
        ended = asyncio.run_coroutine_threadsafe(_all(address, together), loop).result(LIMIT_S + 10)
        codes.update(code.name for code in ended)
        after_each()

    check()
    return codes


async def _all(address: str, together: list[Call]) -> list[grpc.StatusCode]:
    async with asyncio.timeout(LIMIT_S), grpc.aio.insecure_channel(address) as channel:
        return await asyncio.gather(*(_one(channel, call) for call in together))


async def _one(channel: grpc.aio.Channel, call: Call) -> grpc.StatusCode:
    method = _KINDS[call.method]
    path = f"/{method.containing_service.full_name}/{method.name}"
    codec = {
        "request_serializer": lambda message: message.SerializeToString(),
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    received: list[Message] = []
    try:
        if not method.server_streaming:
            received.append(await channel.unary_unary(path, **codec)(call.request))
        else:
            stream = channel.unary_stream(path, **codec)(call.request)
            while (message := await stream.read()) is not grpc.aio.EOF:
                received.append(message)
                if call.leaves_after is not None and len(received) > call.leaves_after:
                    stream.cancel()
                    return grpc.StatusCode.CANCELLED
            _check_stream(received)
    except grpc.aio.AioRpcError as error:
        assert error.code() in ALLOWED, f"{call.method} ended with {error.code().name}: {error.details()}"
        if error.code() is not grpc.StatusCode.OK:
            assert error.details(), "an error says what is wrong"
        return error.code()
    return grpc.StatusCode.OK


def _check_stream(messages: list[Message]) -> None:
    """Prompt facts first, each choice with its one finish and nothing after it, usage last and once."""
    assert messages[0].HasField("prompt") and messages[-1].HasField("usage")
    ended: set[int] = set()
    for message in messages:
        for choice in message.choices:
            assert choice.index not in ended, "something comes after the finish"
            if choice.HasField("finish"):
                ended.add(choice.index)
    assert [message.HasField("usage") for message in messages].count(True) == 1
    assert all(isinstance(choice, inference_pb2.Choice) for message in messages for choice in message.choices)
