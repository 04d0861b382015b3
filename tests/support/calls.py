"""Public API calls as tests make them: raw stubs, everything that came back kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

RPCS = ("Generate", "GenerateUnary", "Chat", "ChatUnary")
STREAM_AND_UNARY = pytest.mark.parametrize("rpc", RPCS[:2])
CHAT_STREAM_AND_UNARY = pytest.mark.parametrize("rpc", RPCS[2:])
EVERY_CALL = pytest.mark.parametrize("rpc", RPCS)


def is_unary(rpc: str) -> bool:
    """Whether a call's answer is one message."""
    return rpc.endswith("Unary")


def place(rpc: str, field_path: str) -> str:
    """A field of GenerateRequest or ChatRequest as errors of that call name it."""
    return f"request.{field_path}" if is_unary(rpc) else field_path


@dataclass
class Answer:
    """A call of one choice, folded; `messages` are kept as they came, one of a unary call."""

    messages: list[inference_pb2.GenerateResponse | inference_pb2.ChatResponse] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [i for m in self.messages for choice in m.choices for i in choice.token_ids]

    @property
    def text(self) -> str:
        return "".join(choice.text for m in self.messages for choice in m.choices)

    @property
    def finishes(self) -> list[inference_pb2.Finish]:
        return [choice.finish for m in self.messages for choice in m.choices if choice.HasField("finish")]

    @property
    def reason(self) -> str:
        (finish,) = self.finishes
        return generation_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_")

    @property
    def usage(self) -> inference_pb2.Usage:
        (usage,) = [m.usage for m in self.messages if m.HasField("usage")]
        return usage

    @property
    def prompt(self) -> inference_pb2.PromptInfo:
        return self.messages[0].prompt


def greedy(**options: object) -> inference_pb2.Options:
    """Options of a greedy generation."""
    return inference_pb2.Options(sampling=generation_pb2.Sampling(temperature=0), **options)


def by_ids(ids: list[int], options: inference_pb2.Options) -> inference_pb2.GenerateRequest:
    """A request whose prompt is token ids."""
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), options=options)


def by_text(text: str, options: inference_pb2.Options) -> inference_pb2.GenerateRequest:
    """A request whose prompt is text."""
    return inference_pb2.GenerateRequest(text=text, options=options)


async def call(
    channel: grpc.aio.Channel,
    rpc: str,
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
    *,
    timeout_s: float = 300,
    metadata: tuple[tuple[str, str], ...] = (),
    on_message: Callable[[], object] = lambda: None,
) -> Answer:
    """Runs one call to its end, a unary one's answer being its only message; `on_message` is called with each message.

    Raises grpc.aio.AioRpcError.
    """
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    method, options = getattr(stub, rpc), {"timeout": timeout_s, "metadata": metadata}
    if is_unary(rpc):
        wrap = inference_pb2.GenerateUnaryRequest if rpc == "GenerateUnary" else inference_pb2.ChatUnaryRequest
        return Answer([(await method(wrap(request=request), **options)).response])
    answer = Answer()
    async for message in method(request, **options):
        answer.messages.append(message)
        on_message()
    return answer


async def ask(channel: grpc.aio.Channel, rpc: str, options: inference_pb2.Options, **arguments: Any) -> Answer:
    """A call with a short prompt of no meaning, whichever call it is."""
    if rpc.startswith("Chat"):
        hi = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=[inference_pb2.ContentPart(text="hi")])
        return await call(channel, rpc, inference_pb2.ChatRequest(messages=[hi], options=options), **arguments)
    return await call(channel, rpc, by_ids([10], options), **arguments)


async def generate(
    channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, *, rpc: str = "Generate", **arguments: Any
) -> Answer:
    """Runs one Generate, or its unary twin, to its end. Raises grpc.aio.AioRpcError."""
    return await call(channel, rpc, request, **arguments)


async def chat(
    channel: grpc.aio.Channel, request: inference_pb2.ChatRequest, *, rpc: str = "Chat", **arguments: Any
) -> Answer:
    """Runs one Chat, or its unary twin, to its end. Raises grpc.aio.AioRpcError."""
    return await call(channel, rpc, request, **arguments)
