"""Random requests of the public API, made from its descriptors: of the right structure, whatever they hold.

Each message has a few of its fields set, most often to what is nearly right: at the edges of ranges, ids around the
vocabulary, texts that spell control tokens. Numbers of enums and fields that nobody knows are among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from triptych.inference.v1 import inference_pb2

METHODS = tuple(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods)

TEXTS = ("", "a", "tea for two", "<|im_end|>", "é猫🦊", "\0", "\n", "{{ 7 }}", "x" * 300, "\N{REPLACEMENT CHARACTER}")
IDS = st.one_of(st.integers(0, 20), st.integers(0, 511), st.sampled_from([510, 511, 512, 513, 2**31, 2**32 - 1]))
_SMALL = st.integers(0, 6)
_EDGES = st.sampled_from([0, 1, 2, 16, 17, 20, 21, 255, 256, 257, 4096, 4097, 2**31 - 1, 2**32 - 1])

BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["", "", "tiny-text", "tiny-llama", "nobody"]),
    "max_tokens": st.one_of(_SMALL, _SMALL, _EDGES),
    "min_tokens": st.one_of(_SMALL, _SMALL, _EDGES),
    "n": st.one_of(st.integers(0, 4), st.sampled_from([16, 17, 2**32 - 1])),
    "logprobs": st.one_of(st.integers(0, 2), _EDGES),
    "prompt_logprobs": st.one_of(st.integers(0, 2), _EDGES),
    "fingerprint": st.sampled_from(["f" * 64, "f" * 64, "", "e" * 64]),
    "temperature": st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32)),
    "top_k": st.sampled_from([-2, -1, 0, 1, 5, 512, 2**31 - 1]),
    "index": st.integers(0, 4),
    "min_delta_interval_ms": st.sampled_from([0, 1, 30, 10_001, 2**32 - 1]),
    "text_bytes": st.one_of(_SMALL, st.sampled_from([2**63])),
}
_DEPTH = 5


@dataclass(frozen=True)
class Call:
    """One call: its method, and after how many messages its client leaves (None: it reads to the end)."""

    method: str
    request: Message
    leaves_after: int | None


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any method; a request that has what such a one needs, most often."""
    method = draw(st.sampled_from(METHODS))
    request = draw(messages(method.input_type))
    if draw(st.integers(0, 4)):
        _complete(draw, request)
    return Call(method.name, request, draw(st.one_of(st.none(), st.none(), st.integers(0, 3))))


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, depth: int = _DEPTH) -> Message:
    """With at most five of its fields set."""
    message = GetMessageClass(kind)()
    names = [field.name for field in kind.fields if depth or field.message_type is None]
    for name in draw(st.lists(st.sampled_from(names), max_size=5, unique=True)) if names else ():
        field = kind.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, message, field, depth)
        elif field.is_repeated:
            values = draw(st.lists(_values(field, depth), max_size=draw(st.sampled_from([1, 3, 12]))))
            getattr(message, name).extend(values)
        elif field.message_type is not None:
            getattr(message, name).CopyFrom(draw(_values(field, depth)))
        else:
            setattr(message, name, draw(_values(field, depth)))
    if not draw(st.integers(0, 60)):
        message.MergeFromString(bytes([0xFA, 0x3F, 1, 120]))  # field 1023, which nobody has
    return message


def _complete(draw: st.DrawFn, request: Message) -> None:
    """Gives it a prompt, and options that are not all refused, in place."""
    if isinstance(request, inference_pb2.GenerateUnaryRequest | inference_pb2.ChatUnaryRequest):
        request = request.request
    if isinstance(request, inference_pb2.GenerateRequest):
        request.token_ids.ids.extend(draw(st.lists(st.integers(3, 500), min_size=1, max_size=20)))
    elif isinstance(request, inference_pb2.ChatRequest):
        del request.messages[:]
        request.messages.add(role=inference_pb2.ROLE_USER).content.add(text=draw(st.sampled_from(TEXTS)))
        for name in ("tools", "tool_choice", "template_args"):
            request.ClearField(name)
    elif isinstance(request, inference_pb2.TokenizeRequest):
        request.text = draw(st.sampled_from(TEXTS))
    if isinstance(request, inference_pb2.GenerateRequest | inference_pb2.ChatRequest):
        for name in ("grammar", "best_of", "adapter", "raw_bytes"):
            if draw(st.integers(0, 3)):
                request.options.ClearField(name)


def _fill_map(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    entries = getattr(message, field.name)
    for one in draw(st.lists(_values(key, depth), max_size=3)):
        if value.message_type is not None:
            entries[one].CopyFrom(draw(_values(value, depth)))
        else:
            entries[one] = draw(_values(value, depth))


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth - 1)
    if field.name in BY_NAME:
        return BY_NAME[field.name]
    kinds = FieldDescriptor
    if field.type == kinds.TYPE_UINT32:
        return IDS if "id" in field.name or field.name == "key" else st.one_of(_SMALL, _EDGES)
    return {
        kinds.TYPE_STRING: st.one_of(st.sampled_from(TEXTS), st.text(max_size=12)),
        kinds.TYPE_BYTES: st.binary(max_size=12),
        kinds.TYPE_BOOL: st.booleans(),
        kinds.TYPE_ENUM: st.one_of(st.integers(0, 5), st.sampled_from([-1, 99, 2**31 - 1])),
        kinds.TYPE_FLOAT: st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32)),
        kinds.TYPE_DOUBLE: st.one_of(st.sampled_from([0.0, -1.5]), st.floats()),
        kinds.TYPE_UINT64: st.integers(0, 2**64 - 1),
        kinds.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
        kinds.TYPE_SINT32: st.one_of(st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1)),
    }[field.type]
