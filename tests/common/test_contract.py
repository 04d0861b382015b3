"""A door lets through the fields that are served, and names the first one that is not."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2
from triptych.inference.v1 import inference_pb2 as pb

from services.common.contract import Door
from services.common.errors import RequestError

DOOR = Door(
    {
        "triptych.inference.v1.ChatRequest": frozenset({"messages", "options"}),
        "triptych.inference.v1.ChatMessage": frozenset({"role", "content"}),
        "triptych.inference.v1.ContentPart": frozenset({"text"}),
        "triptych.inference.v1.Options": frozenset({"sampling", "max_tokens", "stop"}),
        "triptych.inference.v1.Sampling": frozenset({"temperature", "logit_bias"}),
    }
)


def _refusal(message: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        DOOR.check(message)
    return caught.value


def test_served_fields_pass_whatever_their_value() -> None:
    sampling = generation_pb2.Sampling(temperature=0, logit_bias={1: 0.0, 2: -1.0})
    options = pb.Options(sampling=sampling, max_tokens=0, stop=["", "a"])
    message = pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="")])
    DOOR.check(pb.ChatRequest(messages=[message, message], options=options))
    DOOR.check(pb.ChatRequest())


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (pb.ChatRequest(model="m"), "model"),
        (pb.ChatRequest(options=pb.Options(n=1)), "options.n"),
        (pb.ChatRequest(options=pb.Options(n=0)), "options.n"),  # set to zero is set
        (pb.ChatRequest(options=pb.Options(sampling=generation_pb2.Sampling(top_k=3))), "options.sampling.top_k"),
        (pb.ChatRequest(messages=[pb.ChatMessage(), pb.ChatMessage(name="x")]), "messages[1].name"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(content=[pb.ContentPart(media=pb.Media())])]),
            "messages[0].content[0].media",
        ),
        (pb.GenerateRequest(text="x"), "text"),  # a message type that the door does not know serves nothing
    ],
)
def test_an_unserved_field_is_refused_by_its_path(message: Any, path: str) -> None:
    error = _refusal(message)
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.reason == "FIELD_NOT_SERVED"
    assert [v.field for v in error.violations] == [path]
    assert error.message.startswith(path)


def test_a_field_of_a_newer_contract_is_refused_by_its_number_at_any_depth() -> None:
    field_99 = b"\x98\x06\x01"  # tag (99 << 3 | varint) = 0x318, value 1
    top = pb.ChatRequest.FromString(field_99)
    assert _refusal(top).violations[0].field == "99"
    options = field_99
    deep = pb.ChatRequest.FromString(b"\x42" + bytes([len(options)]) + options)  # field 8, options
    assert _refusal(deep).violations[0].field == "options.99"
