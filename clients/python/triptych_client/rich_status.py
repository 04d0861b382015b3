"""google.rpc.Status and the details that errors carry (https://google.aip.dev/193), read with protobuf alone.

The messages are made here, in a pool of their own: a program that has googleapis-common-protos keeps its own.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_Field = FieldDescriptorProto
_STRING, _INT32, _MESSAGE = _Field.TYPE_STRING, _Field.TYPE_INT32, _Field.TYPE_MESSAGE


def _message(name: str, *fields: FieldDescriptorProto, nested: tuple[DescriptorProto, ...] = ()) -> DescriptorProto:
    return DescriptorProto(name=name, field=fields, nested_type=nested)


def _field(
    name: str, number: int, kind: _Field.Type.ValueType, type_name: str = "", *, many: bool = False
) -> FieldDescriptorProto:
    label = _Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
    return FieldDescriptorProto(name=name, number=number, type=kind, label=label, type_name=type_name or None)


_FILE = FileDescriptorProto(
    name="google/rpc/error_details_of_triptych_client.proto",
    package="google.rpc",
    syntax="proto3",
    dependency=[any_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name],
    message_type=[
        _message(
            "Status",
            _field("code", 1, _INT32),
            _field("message", 2, _STRING),
            _field("details", 3, _MESSAGE, ".google.protobuf.Any", many=True),
        ),
        _message("ErrorInfo", _field("reason", 1, _STRING), _field("domain", 2, _STRING)),
        _message("RetryInfo", _field("retry_delay", 1, _MESSAGE, ".google.protobuf.Duration")),
        _message(
            "BadRequest",
            _field("field_violations", 1, _MESSAGE, ".google.rpc.BadRequest.FieldViolation", many=True),
            nested=(_message("FieldViolation", _field("field", 1, _STRING), _field("description", 2, _STRING)),),
        ),
    ],
)


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    for file in (any_pb2.DESCRIPTOR, duration_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    pool.AddSerializedFile(_FILE.SerializeToString())
    found = pool.FindFileByName(_FILE.name)
    return {name: GetMessageClass(descriptor) for name, descriptor in found.message_types_by_name.items()}


_CLASSES = _classes()


def status(data: bytes) -> Any:
    """A google.rpc.Status; empty for none."""
    return _CLASSES["Status"].FromString(data)


def detail(packed: Any, name: str) -> Any:
    """An Any as google.rpc's message of that name; None where it is another."""
    if packed.type_url.rpartition("/")[2] != f"google.rpc.{name}":
        return None
    return _CLASSES[name].FromString(packed.value)
