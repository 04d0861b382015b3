"""Submits that arrive in pieces: what of them has come, of one frontend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError
from triptych.engine.v1 import engine_pb2

from services.common.errors import RequestError, invalid

FRAGMENT_BYTES = 256 * 1024
"""Of a piece, told in the hello: a prompt of 65,000 ids is the longest that still goes whole. Short enough that what
comes between two pieces, an Abort above all, waits for milliseconds."""

MAX_HALF_SENT_BYTES = 64 * 1024 * 1024
"""What one frontend's half-sent Submits may come to together; at least one of the largest size is always taken."""


@dataclass
class _HalfSent:
    total_bytes: int
    data: bytearray = field(default_factory=bytearray)


class HalfSent:
    """Puts Submits together, several at a time. Pieces of a request that was dropped are ignored."""

    def __init__(self) -> None:
        self._requests: dict[int, _HalfSent] = {}
        self._declared_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def add(self, fragment: engine_pb2.Fragment, max_submit_bytes: Callable[[], int]) -> engine_pb2.Submit | None:
        """The whole, with its last piece; None before that.

        `max_submit_bytes` tells what any Submit here can come to; asked with a first piece, it may raise. Raises
        RequestError where the pieces cannot become one; drop the request then.
        """
        request_id, size = fragment.request_id, len(fragment.data)
        if fragment.total_bytes:
            self._begin(fragment, max_submit_bytes())
        request = self._requests.get(request_id)
        if request is None:
            return None
        if not 1 <= size <= FRAGMENT_BYTES:
            raise invalid("fragment.data", f"has {size} bytes, a piece has 1 to {FRAGMENT_BYTES} (fragment_bytes)")
        if len(request.data) + size > request.total_bytes:
            raise invalid(
                "fragment.data", f"{len(request.data) + size} bytes have come, total_bytes is {request.total_bytes}"
            )
        request.data += fragment.data
        if len(request.data) < request.total_bytes:
            return None
        self.drop([request_id])
        return _parse(request_id, request.data)

    def drop(self, request_ids: Iterable[int]) -> None:
        """Forgets what has come of them."""
        for request_id in request_ids:
            if (request := self._requests.pop(request_id, None)) is not None:
                self._declared_bytes -= request.total_bytes

    def refuse_whole(self, request_id: int) -> None:
        """For a Submit that came whole. Raises RequestError where pieces of one with its id are here."""
        if request_id in self._requests:
            self.drop([request_id])
            raise invalid("request_id", f"{request_id} is in use by a Submit that is half sent; use each id once")

    def _begin(self, fragment: engine_pb2.Fragment, max_submit_bytes: int) -> None:
        total_bytes = fragment.total_bytes
        if fragment.request_id in self._requests:
            raise invalid("fragment.request_id", f"{fragment.request_id} is half sent already; use each id once")
        if total_bytes > max_submit_bytes:
            raise invalid(
                "fragment.total_bytes",
                f"is {total_bytes}, no request that fits the context has more than {max_submit_bytes}",
                "TOO_LONG",
            )
        if self._requests and self._declared_bytes + total_bytes > MAX_HALF_SENT_BYTES:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                f"{self._declared_bytes} bytes of half-sent requests are under way, {total_bytes} more are over the "
                f"limit of {MAX_HALF_SENT_BYTES}; send one after the other",
            )
        self._requests[fragment.request_id] = _HalfSent(total_bytes)
        self._declared_bytes += total_bytes


def _parse(request_id: int, data: bytearray) -> engine_pb2.Submit:
    try:
        submit = engine_pb2.Submit.FromString(bytes(data))
    except DecodeError as error:
        raise invalid("fragment.data", f"is no Submit: {error}") from error
    if submit.request_id != request_id:
        raise invalid("fragment.request_id", f"is {request_id}, the Submit's own is {submit.request_id}")
    return submit
