"""SERVER spans of calls of every shape, whichever way they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common.errors import RequestError
from services.common.server import Server
from services.common.telemetry import server_span
from services.common.telemetry.calls import CallInterceptor
from services.common.telemetry.context import current_trace_id
from services.common.telemetry.server_span import Kind, Tracing
from services.common.telemetry.spans import Span
from services.common.telemetry.tracing import Tracer
from services.frontend.trace_context import parent_of
from tests.support.attached import until
from tests.telemetry.stack import SAMPLED, TRACE_ID

SERVICE = "test.v1.Test"


class Kept:
    """An exporter that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    async def one(self) -> Span:
        """The SERVER span, once it has come."""
        await until(lambda: any(span.is_server for span in self.spans))
        (found,) = [span for span in self.spans if span.is_server]
        return found


class Calls:
    """One method of each kind; `what` says how it ends."""

    def __init__(self) -> None:
        self.trace_ids: list[str] = []

    async def _end(self, what: bytes) -> bytes:
        self.trace_ids.append(current_trace_id())
        if what == b"refuse":
            raise RequestError(grpc.StatusCode.NOT_FOUND, "NONE", "there is none")
        if what == b"break":
            raise RuntimeError("a bug")
        if what == b"wait":
            await asyncio.sleep(60)
        return what

    async def unary(self, request: bytes, context: Any) -> bytes:
        return await self._end(request)

    async def writes(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        await self._end(request)
        while request == b"flood":
            await context.write(bytes(1 << 20))

    async def yields(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self._end(request)

    async def takes(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return await self._end(b"".join([request async for request in requests]))

    def handlers(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        kinds = {
            "unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "writes": grpc.unary_stream_rpc_method_handler(self.writes),
            "yields": grpc.unary_stream_rpc_method_handler(self.yields),
            "takes": grpc.stream_unary_rpc_method_handler(self.takes),
        }
        return grpc.method_handlers_generic_handler(SERVICE, kinds)


@asynccontextmanager
async def serving(kept: Kept, ratio: float = 1.0) -> AsyncIterator[tuple[grpc.aio.Channel, Calls, Tracing, Server]]:
    tracer = Tracer(kept, ratio)  # type: ignore[arg-type]
    kinds = {f"{SERVICE}/unary": Kind("tokenize", {"told": True})}
    tracing = Tracing(tracer, parent_of, kinds)
    server = Server("127.0.0.1", 0, interceptors=[CallInterceptor([SERVICE], [tracing])])
    calls = Calls()
    server.grpc.add_generic_rpc_handlers((calls.handlers(),))
    await server.start([])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel, calls, tracing, server
    await server.stop()


def begin(channel: grpc.aio.Channel, method: str, what: bytes, **arguments: Any) -> Any:
    path = f"/{SERVICE}/{method}"
    if method == "takes":
        return channel.stream_unary(path)(iter([what]), metadata=SAMPLED, **arguments)
    if method == "unary":
        return channel.unary_unary(path)(what, metadata=SAMPLED, **arguments)
    return channel.unary_stream(path)(what, metadata=SAMPLED, **arguments)


async def end_of(call: Any) -> grpc.StatusCode:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()


METHODS = ["unary", "writes", "yields", "takes"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("what", "code", "error"), [(b"ok", "OK", None), (b"refuse", "NOT_FOUND", None), (b"break", "INTERNAL", "INTERNAL")]
)
async def test_a_call_of_any_shape_ends_its_span_with_its_status(
    method: str, what: bytes, code: str, error: str | None
) -> None:
    kept = Kept()
    async with serving(kept) as (channel, calls, _, _):
        assert (await end_of(begin(channel, method, what))).name == code
        span = await kept.one()
    assert (span.name, span.context.trace_id) == (f"{SERVICE}/{method}", TRACE_ID)
    assert span.attributes["rpc.response.status_code"] == code and span.error == error
    assert span.attributes.get("error.type") == (None if code == "OK" else code)
    assert calls.trace_ids == [TRACE_ID], "log lines of the call can name its trace"


@pytest.mark.parametrize("method", METHODS)
async def test_a_client_that_leaves_ends_the_span_at_once(method: str) -> None:
    kept = Kept()
    async with serving(kept) as (channel, calls, _, _):
        call = begin(channel, method, b"wait")
        ended = asyncio.ensure_future(end_of(call))
        await until(lambda: bool(calls.trace_ids))
        call.cancel()
        assert await ended is grpc.StatusCode.CANCELLED
        span = await kept.one()
    assert span.attributes["error.type"] == "CANCELLED" and span.error is None


@pytest.mark.parametrize("method", METHODS)
async def test_a_deadline_that_passes_is_told_as_such(method: str) -> None:
    kept = Kept()
    async with serving(kept) as (channel, _, _, _):
        assert await end_of(begin(channel, method, b"wait", timeout=0.3)) is grpc.StatusCode.DEADLINE_EXCEEDED
        span = await kept.one()
    assert span.error == "DEADLINE_EXCEEDED" and span.end_unix_ns - span.start_unix_ns > 250_000_000


async def test_G5_a_handler_held_up_by_a_client_that_reads_nothing_does_not_keep_its_span_open() -> None:
    kept = Kept()
    async with serving(kept) as (channel, calls, _, _):
        call = begin(channel, "writes", b"flood")
        await until(lambda: bool(calls.trace_ids))
        await asyncio.sleep(0.3)  # what the transport takes is full
        call.cancel()
        span = await kept.one()
        assert span.attributes["error.type"] == "CANCELLED"
        await asyncio.sleep(server_span.STUCK_S + 0.2)
    assert sum(span.is_server for span in kept.spans) == 1, "it ends once"


async def test_G5_a_server_that_stops_ends_the_spans_of_what_it_cuts() -> None:
    kept = Kept()
    async with serving(kept) as (channel, calls, tracing, server):
        ended = [asyncio.ensure_future(end_of(begin(channel, method, b"wait"))) for method in ("unary", "yields")]
        await until(lambda: len(calls.trace_ids) == 2)
        await server.stop()
        tracing.close()
        await asyncio.gather(*ended)
    assert [span.attributes["error.type"] for span in kept.spans if span.is_server] == ["CANCELLED"] * 2


async def test_what_is_not_sampled_and_what_is_not_ours_has_no_span() -> None:
    kept = Kept()
    async with serving(kept, ratio=0.0) as (channel, calls, _, _):
        await channel.unary_unary(f"/{SERVICE}/unary")(b"ok")
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", metadata=SAMPLED)
        assert calls.trace_ids == [""]
    assert kept.spans == []


async def test_about_the_ratio_of_new_traces_is_kept_by_their_ids() -> None:
    tracer = Tracer(Kept(), 0.25)  # type: ignore[arg-type]
    kept = sum(tracer.begin(None) is not None for _ in range(4000))
    assert 850 <= kept <= 1150  # 1,000 +- 5 standard deviations of a binomial


async def test_the_first_part_and_the_attributes_of_a_kind_are_there_from_the_start() -> None:
    kept = Kept()
    async with serving(kept) as (channel, _, _, _):
        await end_of(begin(channel, "unary", b"break"))
        whole = await kept.one()
    (part,) = [span for span in kept.spans if not span.is_server]
    assert whole.attributes["told"] is True and part.name == "tokenize" and part.parent == whole.context
    assert (part.start_unix_ns, part.end_unix_ns) == (whole.start_unix_ns, whole.end_unix_ns)
    assert part.error == whole.error == "INTERNAL"
