"""A collector of spans, for tests and benchmarks: takes OTLP over gRPC and keeps it, or only counts.

As a process: `python -m loadtest.otlp_sink --port PORT`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

POLL_S = 0.01


@dataclass(frozen=True)
class SpanSeen:
    """A span as a collector sees it; ids as hex, "" for none."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: str
    error: str | None
    attributes: dict[str, Any]
    events: tuple[tuple[str, int], ...]
    links: tuple[tuple[str, str], ...]
    """(trace id, span id)"""

    @property
    def duration_ns(self) -> int:
        """From start to end."""
        return self.end_ns - self.start_ns


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves from `async with` on, over TLS with `credentials`. `metadata` is the last call's; `resources` are by
    service name."""

    def __init__(self, port: int = 0, *, keeps: bool = True, credentials: grpc.ServerCredentials | None = None) -> None:
        self.port = port
        self.num_spans = 0
        self.spans: list[SpanSeen] = []
        self.resources: dict[str, dict[str, Any]] = {}
        self.instances: set[str] = set()
        self.metadata: dict[str, str | bytes] = {}
        self._keeps = keeps
        self._credentials = credentials
        self.server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"{'http' if self._credentials is None else 'https'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> OtlpSink:
        address = f"127.0.0.1:{self.port}"
        if self._credentials is None:
            self.port = self.server.add_insecure_port(address)
        else:
            self.port = self.server.add_secure_port(address, self._credentials)
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)

    async def Export(  # noqa: N802 - gRPC's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """The one RPC of the contract."""
        self.metadata = dict(context.invocation_metadata())
        for part in request.resource_spans:
            told = _values(part.resource.attributes)
            service = str(told["service.name"])
            self.resources[service] = told
            self.instances.add(str(told.get("service.instance.id")))
            for scope in part.scope_spans:
                self.num_spans += len(scope.spans)
                if self._keeps:
                    self.spans += [_seen(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(
        self, holds: Callable[[list[SpanSeen]], bool], timeout_s: float = 10.0, trace_id: str | None = None
    ) -> list[SpanSeen]:
        """The spans, of one trace or all, once `holds` is true of them. Raises TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(found := self._of(trace_id)):  # noqa: ASYNC110  there is no event to wait for
                    await asyncio.sleep(POLL_S)
                return found
        except TimeoutError:
            raise TimeoutError(f"of the spans wanted these came: {self._of(trace_id)}") from None

    def _of(self, trace_id: str | None) -> list[SpanSeen]:
        return [span for span in self.spans if trace_id in (None, span.trace_id)]


def _seen(service: str, span: trace_pb2.Span) -> SpanSeen:
    is_error = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return SpanSeen(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.status.message if is_error else None,
        _values(span.attributes),
        tuple((event.name, event.time_unix_nano) for event in span.events),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _values(attributes: Sequence[common_pb2.KeyValue]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


async def _serve(port: int) -> None:
    async with OtlpSink(port, keeps=False):
        await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.otlp_sink", description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1 to listen on")
    asyncio.run(_serve(parser.parse_args(argv).port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
