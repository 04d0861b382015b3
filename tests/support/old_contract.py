"""A peer of another version: a proxy between two real services that passes on what the other contract knows.

The previous contract is the committed image of the last release, `proto/image.binpb`; the hellos that its services sent
stand in tests/data/hellos.json. Both are written anew when a contract is released (CONTRIBUTING.md).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, unknown_fields
from google.protobuf.message import Message

from services.common.server import channel_options, server_options

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "proto" / "image.binpb"
HELLOS = ROOT / "tests" / "data" / "hellos.json"

Change: TypeAlias = Callable[[Message], None]
"""Of a message on its way, by the other side's version."""

UNKNOWN_FIELD = b"\xf8\x7f\x01"
"""Number 2047, a varint, 1: what no version has."""


class Contract:
    """Message classes of an image, apart from those that this version has."""

    def __init__(self, image: Path = IMAGE) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file:
            self._pool.Add(file)

    def method(self, path: str) -> tuple[type[Message], type[Message]]:
        """Classes of request and response of "/package.Service/Method"."""
        service, _, name = path.lstrip("/").partition("/")
        found = self._pool.FindServiceByName(service).methods_by_name[name]
        return message_factory.GetMessageClass(found.input_type), message_factory.GetMessageClass(found.output_type)


class Proxy(grpc.GenericRpcHandler):
    """Every message goes through the contract's classes, and loses what they do not know, or gains what nobody does.

    `seen` are the messages as the other contract read them; `unread` the requests of which it did not know a part.
    """

    def __init__(
        self, target: str, contract: Contract, *, change: Change = lambda message: None, from_the_future: bool = False
    ) -> None:
        self.target = target
        self._contract = contract
        self._change = change
        self._tail = UNKNOWN_FIELD if from_the_future else b""
        self.seen: list[Message] = []
        self.unread: list[Message] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Its port."""
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((self,))
        port = server.add_insecure_port("127.0.0.1:0")
        async with grpc.aio.insecure_channel(self.target, options=channel_options()) as self._channel:
            await server.start()
            try:
                yield port
            finally:
                await server.stop(None)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """All methods as streams both ways, which on the wire unary ones are too."""
        path = handler_call_details.method
        if path.startswith("/grpc."):
            return None

        async def relay(requests: Any, context: Any) -> AsyncIterator[bytes]:
            request_type, response_type = self._contract.method(path)

            async def passed() -> AsyncIterator[bytes]:
                async for request in requests:
                    yield self._through(request_type, request, self.unread)

            call = self._channel.stream_stream(path)(passed())
            try:
                async for response in call:
                    yield self._through(response_type, response, [])
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(relay)

    def _through(self, kind: type[Message], raw: bytes, unread: list[Message]) -> bytes:
        message = kind.FromString(raw)
        if len(unknown_fields.UnknownFieldSet(message)):
            unread.append(message)
        message.DiscardUnknownFields()  # type: ignore[attr-defined]
        self._change(message)
        self.seen.append(message)
        return message.SerializeToString() + self._tail


def recorded() -> dict[str, Any]:
    """By message name, as JSON."""
    return dict(json.loads(HELLOS.read_text()))


def as_recorded(name: str) -> Change:
    """Gives the hello inside a message, or the message itself, the version and features of the one recorded."""

    def change(message: Message) -> None:
        hello = _find(message, name)
        if hello is not None:
            for field in ("min_version", "max_version", "version", "features"):
                if field in hello.DESCRIPTOR.fields_by_name:
                    hello.ClearField(field)
            json_format.ParseDict(recorded()[name], hello)

    return change


def with_fields(name: str, **fields: Any) -> Change:
    """Lays fields over a message, or one inside it."""

    def change(message: Message) -> None:
        found = _find(message, name)
        if found is not None:
            for field in fields:
                found.ClearField(field)
            json_format.ParseDict(fields, found)

    return change


def _find(message: Message, name: str) -> Message | None:
    if message.DESCRIPTOR.name == name:
        return message
    set_ones = [value for field, value in message.ListFields() if field.message_type and not field.is_repeated]
    return next((value for value in set_ones if value.DESCRIPTOR.name == name), None)


def told_by(message: Message, name: str) -> dict[str, Any] | None:
    """Version and features of the hello in a message, as JSON."""
    hello = _find(message, name)
    if hello is None:
        return None
    told: dict[str, Any] = json_format.MessageToDict(hello, preserving_proto_field_name=True)
    return {field: told[field] for field in ("min_version", "max_version", "version", "features") if field in told}
