"""A handler of a call with something around its behaviour, as interceptors make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

_FORMS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By whether requests and answers are streams."""


def wrapped(handler: grpc.RpcMethodHandler[Any, Any], wrap: Callable[[Any], Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler, whose behaviour is what `wrap` makes of its own."""
    form, make = _FORMS[handler.request_streaming, handler.response_streaming]
    return make(
        wrap(getattr(handler, form)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
