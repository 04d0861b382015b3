"""Sends a plan's requests when they are due and keeps what became of each.

Open loop: a request is sent at its due time whether or not others were answered, and all of its latencies count from
that due time. A server (or this client) that falls behind can therefore neither slow the arrivals nor hide its delay,
which is the coordinated omission of closed loops (Gil Tene, How NOT to Measure Latency, 2013).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.workload import Plan, Planned

Ask = Callable[[Planned, float], AsyncIterator[int]]
"""(request, seconds until its deadline) to the number of new ids in each message; raises CallError."""

LEAD_S = 0.05
"""From making the tasks to the first due time."""
NO_TOKENS = "NO_TOKENS"
SHORT = "SHORT"


class CallError(Exception):
    """A call that failed; `kind` is what failures are counted by, such as a gRPC status's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True)
class Outcome:
    """What became of a request. Times are seconds after it was due; `token_s` holds one for each id."""

    due_s: float
    prompt_tokens: int
    asked_tokens: int
    lag_s: float
    """By which the client itself sent it late."""
    token_s: tuple[float, ...]
    end_s: float
    failure: str | None = None
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first id."""
        return self.token_s[0] if self.token_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies: between consecutive ids; 0 between those of one message."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def mean_itl_s(self) -> float | None:
        """Mean of the gaps."""
        gaps = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / gaps if gaps > 0 else None


async def run(plan: Plan, ask: Ask, *, timeout_s: float) -> list[Outcome]:
    """Outcomes in the order of the plan. Ends at most `timeout_s` (and a moment) after the last due time."""
    start_s = time.monotonic() + LEAD_S
    tasks: list[asyncio.Task[Outcome]] = []
    try:
        for request in plan.requests:
            await asyncio.sleep(max(0.0, start_s + request.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(_one(request, ask, start_s + request.at_s, timeout_s)))
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(request: Planned, ask: Ask, due_s: float, timeout_s: float) -> Outcome:
    sent_s = time.monotonic()
    token_s: list[float] = []
    failure: str | None = None
    message = ""
    try:
        # The deadline also counts from the due time. The margin lets the server's own answer to it come first.
        left_s = due_s + timeout_s - sent_s
        async with asyncio.timeout(left_s + 1.0):
            async for count in ask(request, max(left_s, 0.001)):
                token_s += [time.monotonic() - due_s] * count
    except CallError as error:
        failure, message = error.kind, str(error)
    except TimeoutError:
        failure, message = grpc.StatusCode.DEADLINE_EXCEEDED.name, f"no end within {timeout_s:g} s"
    end_s = time.monotonic() - due_s
    if failure is None and len(token_s) != request.output_tokens:
        failure = SHORT if token_s else NO_TOKENS
        message = f"{len(token_s)} of {request.output_tokens} ids came, in a stream that ended well"
    lengths = len(request.prompt_ids), request.output_tokens
    return Outcome(request.at_s, *lengths, sent_s - due_s, tuple(token_s), end_s, failure, message)


def over_grpc(channel: grpc.aio.Channel, *, model: str = "", temperature: float = 0.0) -> Ask:
    """Asks Triptych's public API. Every request is told to ignore EOS, so that it makes what was planned."""
    stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def ask(request: Planned, left_s: float) -> AsyncIterator[int]:
        options = inference_pb2.Options(
            sampling=generation_pb2.Sampling(temperature=temperature),
            max_tokens=request.output_tokens,
            ignore_eos=True,
        )
        ids = inference_pb2.TokenIds(ids=request.prompt_ids)
        call = stub.Generate(inference_pb2.GenerateRequest(model=model, token_ids=ids, options=options), timeout=left_s)
        try:
            async for message in call:
                if count := sum(len(choice.token_ids) for choice in message.choices):
                    yield count
        except grpc.aio.AioRpcError as error:
            raise CallError(error.code().name, error.details() or "") from None
        finally:
            call.cancel()

    return ask


async def vocab_size(channel: grpc.aio.Channel, model: str, timeout_s: float) -> int:
    """Of the model served there. Raises CallError."""
    stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
    try:
        answer = await stub.GetModel(inference_pb2.GetModelRequest(model=model), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise CallError(error.code().name, error.details() or "") from None
    return int(answer.model.vocab_size)
