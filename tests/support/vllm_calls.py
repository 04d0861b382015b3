"""Calls of the vllm.grpc.engine adapter as tests make them: raw stubs, everything that came back kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc


@dataclass
class Reply:
    """One Generate, folded; `messages` are kept as they came."""

    messages: list[pb.GenerateResponse] = field(default_factory=list)

    @property
    def chunks(self) -> list[pb.GenerateStreamChunk]:
        return [m.chunk for m in self.messages if m.HasField("chunk")]

    @property
    def completes(self) -> list[pb.GenerateComplete]:
        return [m.complete for m in self.messages if m.HasField("complete")]

    @property
    def complete(self) -> pb.GenerateComplete:
        """Of a request of one choice."""
        (complete,) = self.completes
        return complete

    @property
    def ids(self) -> list[int]:
        return list(self.complete.output_ids)

    def streamed(self, index: int = 0) -> list[int]:
        """Ids of a choice's chunks."""
        return [i for chunk in self.chunks if chunk.index == index for i in chunk.token_ids]


def stub(channel: grpc.aio.Channel) -> Any:
    """The adapter's client."""
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


def by_ids(ids: list[int], *, stream: bool = False, request_id: str = "", **params: Any) -> pb.GenerateRequest:
    """A request whose prompt is token ids; greedy where no temperature is given."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="for reference", input_ids=ids),
        sampling_params=pb.SamplingParams(**{"temperature": 0.0} | params),
        stream=stream,
    )


def by_text(text: str, *, stream: bool = False, **params: Any) -> pb.GenerateRequest:
    """A request whose prompt is text."""
    return pb.GenerateRequest(
        text=text, sampling_params=pb.SamplingParams(**{"temperature": 0.0} | params), stream=stream
    )


async def generate(channel: grpc.aio.Channel, request: pb.GenerateRequest, **call: Any) -> Reply:
    """Runs one call to its end. Raises grpc.aio.AioRpcError."""
    reply = Reply()
    async for message in stub(channel).Generate(request, **{"timeout": 60} | call):
        reply.messages.append(message)
    return reply


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")
