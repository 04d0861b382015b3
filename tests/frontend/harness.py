"""A frontend on loopback with a stub engine behind it, and checkpoints that hold text alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from loadtest.stub_engine import StubEngine
from services.common.errors import STATUS_DETAILS_KEY
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.support.checkpoints import CHAT_TEMPLATE, EOS_ID, tiny_tokenizer

VOCAB_SIZE = 512


def text_checkpoint(
    path: Path, *, chat_template: str | None = CHAT_TEMPLATE, generation: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint folder without weights: byte-level tokenizer, template, configs. EOS is id 2."""
    tiny_tokenizer(path, vocab_size=VOCAB_SIZE, chat_template=chat_template)
    config = {"max_position_embeddings": 1024, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID} | dict(generation or {})))
    return path


@dataclass(frozen=True)
class Served:
    """What a test holds: the frontend, the engine behind it and a client's stub."""

    frontend: Frontend
    engine: StubEngine
    channel: grpc.aio.Channel

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    def ids(self, text: str) -> list[int]:
        """The tokenizer's ids of a text."""
        return list(self.frontend.model.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """A decode of the whole."""
        return self.frontend.model.tokenizer.decode(ids, skip_special_tokens=True)


@asynccontextmanager
async def serving(model: Path, engine: StubEngine | None = None, **config: Any) -> AsyncIterator[Served]:
    """A frontend that has attached to `engine` (one with the tiny vocabulary by default).

    A request whose engine is lost ends at once, unless `failover_s` is told.
    """
    config = {"failover_s": 0.0, **config}
    async with engine or StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024) as stub:
        frontend = Frontend(FrontendConfig(port=0, engine=stub.address, model=str(model), **config))
        await frontend.start()
        try:
            await attached(frontend)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
                yield Served(frontend, stub, channel)
        finally:
            await frontend.close()


async def attached(frontend: Frontend) -> None:
    """Returns when the frontend can generate."""
    while not frontend.engine.can_generate():
        frontend.engine.changed.clear()
        await frontend.engine.changed.wait()


def scripted(script: list[int] | Mapping[tuple[int, ...], list[int]], **arguments: Any) -> StubEngine:
    """A stub engine of the tiny vocabulary that answers with a script."""
    return StubEngine(script=script, **{"vocab_size": VOCAB_SIZE, "context_tokens": 1024} | arguments)


def detail(error: grpc.aio.AioRpcError, kind: type[Message]) -> Any:
    """The detail of that type in an error's google.rpc.Status. Fails where there is none."""
    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing[STATUS_DETAILS_KEY])
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            found = kind()
            packed.Unpack(found)
            return found
    raise AssertionError(f"no {kind.DESCRIPTOR.name} in {status}")


def fields_at_fault(error: grpc.aio.AioRpcError) -> list[str]:
    """The fields a BadRequest names."""
    return [violation.field for violation in detail(error, error_details_pb2.BadRequest).field_violations]


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    """What RetryInfo says."""
    delay = detail(error, error_details_pb2.RetryInfo).retry_delay
    return float(delay.seconds + delay.nanos / 1e9)


def reason(error: grpc.aio.AioRpcError) -> str:
    """ErrorInfo.reason."""
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


def user(text: str) -> inference_pb2.ChatMessage:
    """A user's message."""
    return message(inference_pb2.ROLE_USER, text)


def message(role: inference_pb2.Role.ValueType, text: str) -> inference_pb2.ChatMessage:
    """A message of one text part."""
    return inference_pb2.ChatMessage(role=role, content=[inference_pb2.ContentPart(text=text)])
