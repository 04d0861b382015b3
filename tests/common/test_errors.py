"""Errors become google.rpc.Status on the wire, and an unforeseen one tells the caller nothing of the inside."""

from __future__ import annotations

import logging
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from triptych.inference.v1 import inference_pb2 as pb
from triptych.inference.v1 import inference_pb2_grpc

from services.common.errors import RequestError, Violation, clip, invalid, to_status, unavailable, unserved
from services.common.server import Server


def _details(status: Any) -> dict[str, Any]:
    found = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    return found


def test_a_field_at_fault_is_named_in_bad_request() -> None:
    status = to_status(invalid("options.top_p", "must be in (0, 1], not 2"))
    details = _details(status)
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0] == 3
    assert status.message == "options.top_p: must be in (0, 1], not 2"
    assert (details["ErrorInfo"].domain, details["ErrorInfo"].reason) == ("triptych", "INVALID_FIELD")
    violation = details["BadRequest"].field_violations[0]
    assert (violation.field, violation.description) == ("options.top_p", "must be in (0, 1], not 2")
    assert "RetryInfo" not in details


def test_unavailable_says_when_to_come_back() -> None:
    details = _details(to_status(unavailable("DRAINING", "it drains", retry_after_s=1.25)))
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1250
    assert "BadRequest" not in details


def test_an_unserved_field_is_unimplemented() -> None:
    error = unserved("options.n")
    assert (error.code, error.message) == (grpc.StatusCode.UNIMPLEMENTED, "options.n is not served yet")


class Failing(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def GetModel(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield pb.GenerateResponse()
        raise self.error


async def _call(error: Exception, *, stream: bool) -> grpc.aio.AioRpcError:
    server = Server("127.0.0.1", 0)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Failing(error), server.grpc)
    await server.start([])
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if stream:
                    async for _ in stub.Generate(pb.GenerateRequest()):
                        pass
                else:
                    await stub.GetModel(pb.GetModelRequest())
            return caught.value
    finally:
        await server.stop()


def _rich(error: grpc.aio.AioRpcError) -> Any:
    (value,) = [v for k, v in error.trailing_metadata() if k == "grpc-status-details-bin"]
    return status_pb2.Status.FromString(value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_error_reaches_the_caller_whole(stream: bool) -> None:
    error = await _call(unavailable("NO_ENGINE", "no engine", retry_after_s=2), stream=stream)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "no engine")
    status = _rich(error)
    assert (status.code, status.message) == (14, "no engine")
    assert _details(status)["ErrorInfo"].reason == "NO_ENGINE"
    assert _details(status)["RetryInfo"].retry_delay.seconds == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unforeseen_exception_is_internal_without_its_text(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        error = await _call(KeyError("secret prompt"), stream=stream)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    assert b"secret" not in _rich(error).SerializeToString()
    ours = [record for record in caplog.records if record.name == "services.common.errors"]
    assert len(ours) == 1
    assert ours[0].exc_info is not None


def test_the_message_is_the_exceptions_text() -> None:
    assert str(RequestError(grpc.StatusCode.ABORTED, "X", "why")) == "why"


@pytest.mark.parametrize("letter", ["a", "é", "😀", "%"])
def test_a_long_message_is_cut_so_that_details_stay_under_3_kb_and_metadata_under_8(letter: str) -> None:
    error = RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "R" * 10**4,
        letter * 10**6,
        violations=tuple(Violation(letter * 10**5, letter * 10**5) for _ in range(100)),
        retry_after_s=1,
    )
    ((_, packed),) = error.trailing_metadata
    status = status_pb2.Status.FromString(packed)
    assert len(packed) < 3 * 1024
    # As sent: grpc-message percent-encodes each byte that is not printable ASCII, the Status is in base64.
    assert len(urllib.parse.quote(error.message)) + len(packed) * 4 / 3 + 200 < 8 * 1024
    assert error.message.startswith(letter) and error.message.endswith("…") and status.message == error.message
    assert _details(status)["BadRequest"].field_violations[0].field.startswith(letter)


async def test_an_error_of_any_length_reaches_a_caller_with_stock_metadata_limits() -> None:
    error = await _call(invalid("f" * 10**5, "é" * 10**6), stream=False)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _details(_rich(error))["BadRequest"].field_violations[0].description.endswith("…")


def test_a_message_that_fits_is_left_as_it_is() -> None:
    assert clip("é" * 512, 1024) == "é" * 512
    assert clip("é" * 513, 1024) == "é" * 510 + "…" and len(clip("é" * 513, 1024).encode()) == 1023
