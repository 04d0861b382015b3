"""A span as the services make it: ids, two times and plain values, until the exporter's thread makes OTLP of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from services.common.telemetry.context import SpanContext

Value: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, Value]


class Event(NamedTuple):
    """A moment in a span."""

    name: str
    unix_ns: int


class Span(NamedTuple):
    """An ended one. `error` is what its status says went wrong; None: nothing."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_unix_ns: int
    end_unix_ns: int
    attributes: Attributes
    is_server: bool = False
    error: str | None = None
    events: tuple[Event, ...] = ()
    links: tuple[SpanContext, ...] = ()
