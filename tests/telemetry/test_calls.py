"""The one wrapper around a call's handler: who is told, in which order, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common.errors import RequestError
from services.common.server import Server
from services.common.telemetry.calls import CallInterceptor
from tests.support.attached import until

SERVICE = "test.v1.Test"


class Told:
    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def end(self, code: str) -> None:
        self._events.append(f"{self._name} ends {code}")

    def over(self, code: str) -> None:
        self._events.append(f"{self._name} is over {code}")


class Teller:
    def __init__(self, name: str, events: list[str], *, tells: bool = True) -> None:
        self._name, self._events, self._tells = name, events, tells

    def begin(self, method: str, context: Any) -> Told | None:
        self._events.append(f"{self._name} begins {method}")
        return Told(self._name, self._events) if self._tells else None


async def handler(request: bytes, context: Any) -> bytes:
    if request == b"refuse":
        raise RequestError(grpc.StatusCode.NOT_FOUND, "NONE", "there is none")
    return request


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[grpc.aio.Channel, list[str]]]:
    events: list[str] = []
    tellers = [Teller("first", events), Teller("none", events, tells=False), Teller("last", events)]
    server = Server("127.0.0.1", 0, interceptors=[CallInterceptor([SERVICE], tellers)])
    methods = {"unary": grpc.unary_unary_rpc_method_handler(handler)}
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    await server.start([])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel, events
    await server.stop()


BEGUN = [f"{name} begins {SERVICE}/unary" for name in ("first", "none", "last")]


@pytest.mark.parametrize(("request_", "code"), [(b"x", "OK"), (b"refuse", "NOT_FOUND")])
async def test_who_begins_first_ends_last_and_each_once(request_: bytes, code: str) -> None:
    async with serving() as (channel, events):
        await asyncio.gather(channel.unary_unary(f"/{SERVICE}/unary")(request_), return_exceptions=True)
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
    assert events == [*BEGUN, f"last ends {code}", f"first ends {code}"]


class GoneContext:
    """Of a call whose end gRPC tells before its handler has come back, at a time of its own choice."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def code(self) -> None:
        return None

    def time_remaining(self) -> None:
        return None


async def test_a_call_that_is_over_is_told_before_its_handler_comes_back_which_then_has_the_last_word() -> None:
    events: list[str] = []
    told = CallInterceptor([SERVICE], [Teller("first", events), Teller("last", events)])
    context, lets_go = GoneContext(), asyncio.Event()

    async def waits(request: bytes, context: Any) -> bytes:
        await lets_go.wait()
        return request

    async def found(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(waits)

    wrapped: Any = await told.intercept_service(found, Details())
    call = asyncio.create_task(wrapped.unary_unary(b"x", context))
    await until(lambda: len(context.callbacks) == 1)
    context.callbacks[0](None)
    over = ["last is over CANCELLED", "first is over CANCELLED"]
    assert events[2:] == over
    lets_go.set()
    assert await call == b"x"
    assert events[2:] == [*over, "last ends OK", "first ends OK"]
    context.callbacks[0](None)
    assert len(events) == 6, "what has ended is not told to be over"


class Details(grpc.HandlerCallDetails):
    method = f"/{SERVICE}/unary"
    invocation_metadata = None
