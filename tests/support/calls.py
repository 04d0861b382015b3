"""Public API calls as tests make them: raw stubs, everything that came back kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc


@dataclass
class Answer:
    """One stream of one choice, folded; `messages` are kept as they came."""

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


async def generate(
    channel: grpc.aio.Channel,
    request: inference_pb2.GenerateRequest,
    *,
    timeout_s: float = 300,
    metadata: tuple[tuple[str, str], ...] = (),
    on_message: Callable[[], object] = lambda: None,
) -> Answer:
    """Runs one stream to its end; `on_message` is called with each message. Raises grpc.aio.AioRpcError."""
    answer = Answer()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    async for message in stub.Generate(request, timeout=timeout_s, metadata=metadata):
        answer.messages.append(message)
        on_message()
    return answer


async def chat(channel: grpc.aio.Channel, request: inference_pb2.ChatRequest, *, timeout_s: float = 300) -> Answer:
    """Runs one chat stream to its end. Raises grpc.aio.AioRpcError."""
    answer = Answer()
    async for message in inference_pb2_grpc.InferenceServiceStub(channel).Chat(request, timeout=timeout_s):
        answer.messages.append(message)
    return answer
