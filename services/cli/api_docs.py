"""Writes docs/api/*.md from the contracts and their comments.

Comments follow the convention at the top of generation.proto: what it is; range; default. who acts on it. A range
starts with a bracket. What can be told without a comment is: the unit from the name, the default of a field without
presence, and, for the public API, whether the frontend's door lets it pass.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from services.cli.parts import part

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "api"

PAGES = {
    "inference": ("The public API", "clients and the frontend", ("inference/v1/inference", "inference/v1/generation")),
    "engine": ("The engine contract", "frontend and scheduler", ("engine/v1/engine", "engine/v1/admin")),
    "executor": ("The executor contract", "scheduler and executor", ("executor/v1/executor",)),
}
_HEAD = ("field", "type", "what it is", "range", "default", "errors")
_UNITS = {
    "_unix_ns": "ns since 1970",
    "_ns": "ns",
    "_ms": "ms",
    "_s": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_blocks": "blocks",
}
_CODES = re.compile(
    r"\b(INVALID_ARGUMENT|NOT_FOUND|FAILED_PRECONDITION|UNIMPLEMENTED|RESOURCE_EXHAUSTED|UNAVAILABLE|OUT_OF_RANGE)\b"
)
_RANGE = re.compile(r"[\[(]\s*-?[\w\[]")
_ACTORS = re.compile(r"((?:^|[.;]? )\[(?:frontend|scheduler|executor)\].*)$", re.DOTALL)
_Field = FieldDescriptorProto
_ZERO = {_Field.TYPE_BOOL: "false", _Field.TYPE_STRING: "empty", _Field.TYPE_BYTES: "empty", _Field.TYPE_ENUM: "unset"}
_PACKAGE = ".triptych."

Place = tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """A comment taken apart; empty where it does not say."""

    what: str
    range: str = ""
    default: str = ""

    @classmethod
    def of(cls, comment: str) -> Told:
        """The first part that starts with a bracket is the range, the one behind it the default."""
        actors = _ACTORS.search(comment)
        body = comment[: actors.start()] if actors else comment
        parts = [one.strip() for one in body.split("; ")]
        at = next((i for i, one in enumerate(parts) if i and _RANGE.match(one)), None)
        if at is None:
            is_flag = len(parts) > 1 and parts[-1].rstrip(".") in ("true", "false")
            what, told = (parts[:-1], ("", parts[-1].rstrip("."))) if is_flag else (parts, ("", ""))
        else:
            default, _, rest = parts[at + 1].partition(". ") if len(parts) > at + 1 else ("", "", "")
            what = parts[:at] + ([rest] if rest else []) + parts[at + 2 :]
            told = (parts[at].rstrip("."), default.removeprefix("unset: ").rstrip("."))
        return cls("; ".join(what) + (f" ({actors.group().strip(' .;')})" if actors else ""), *told)


class Page:
    """One contract as Markdown."""

    def __init__(self, name: str, files: dict[str, FileDescriptorProto]) -> None:
        self._name = name
        self._title, self._between, paths = PAGES[name]
        self._files = [files[f"triptych/{path}.proto"] for path in paths]
        self._asked = _asked(self._files)

    def render(self) -> str:
        """The whole page."""
        return "\n".join([*self._intro(), *(line for file in self._files for line in self._file(file))]) + "\n"

    def undescribed(self) -> list[str]:
        """Fields without a comment of their own."""
        return [
            f"{full}.{field.name}"
            for file in self._files
            for full, message, place in _messages(file)
            for i, field in enumerate(message.field)
            if not _comments(file).get((*place, 2, i)) and not _is_map_entry(message)
        ]

    def _intro(self) -> Iterator[str]:
        yield f"# {self._title}"
        yield ""
        yield "Generated from the contract by `python -m services.cli.docs`; do not edit."
        yield ""
        yield f"Between {self._between}. How it may change is told in [versioning](../versioning.md)."
        if self._name == "inference":
            yield _ERRORS

    def _file(self, file: FileDescriptorProto) -> Iterator[str]:
        comments = _comments(file)
        yield f"\n## {file.name}\n"
        yield comments.get((12,), "") or comments.get((2,), "")
        for i, service in enumerate(file.service):
            yield from _service(service, (6, i), comments)
        for full, message, place in _messages(file):
            if not _is_map_entry(message):
                yield from self._message(full, message, place, comments)
        for full, enum, place in _enums(file):
            yield from _enum(full, enum, place, comments)

    def _message(self, full: str, message: DescriptorProto, place: Place, comments: dict[Place, str]) -> Iterator[str]:
        yield f"\n### {_short(full)}\n"
        if told := comments.get(place):
            yield f"{_cell(told)}\n"
        if not message.field:
            yield "No fields."
            return
        yield f"| {' | '.join(_HEAD)} |"
        yield "|" + "---|" * len(_HEAD)
        maps = {entry.name: entry for entry in message.nested_type if _is_map_entry(entry)}
        for i, field in enumerate(message.field):
            oneof = ""
            if field.HasField("oneof_index") and not field.proto3_optional:
                oneof = message.oneof_decl[field.oneof_index].name
            yield self._row(full, field, comments.get((*place, 2, i), ""), maps, oneof)

    def _row(self, full: str, field: _Field, comment: str, maps: dict[str, DescriptorProto], oneof: str) -> str:
        told = Told.of(comment)
        what = told.what
        if oneof:
            what += f" (one of `{oneof}`)"
        is_number = not field.type_name and field.type not in _ZERO
        if is_number and (unit := next((unit for end, unit in _UNITS.items() if field.name.endswith(end)), "")):
            what = f"{what} ({unit})".strip()
        asked = full in self._asked
        default = told.default or (_default(field, bool(oneof)) if asked else "")
        errors = self._errors(full, field, comment, told, asked)
        cells = (f"`{field.name}` = {field.number}", _type(field, maps), what, told.range, default, errors)
        return f"| {' | '.join(map(_cell, cells))} |"

    def _errors(self, full: str, field: _Field, comment: str, told: Told, asked: bool) -> str:
        if not asked:
            return ""
        if self._name == "inference" and not _serves(full, field.name):
            return "UNIMPLEMENTED: not served yet"
        codes = list(dict.fromkeys(_CODES.findall(comment)))
        if (told.range or "none twice" in comment or "none empty" in comment) and "INVALID_ARGUMENT" not in codes:
            codes.append("INVALID_ARGUMENT")
        return ", ".join(codes)


_ERRORS = """
## Errors

Every error is a `google.rpc.Status` in the trailing metadata `grpc-status-details-bin`, with `ErrorInfo{reason, domain:
"triptych"}`. `BadRequest` names the fields at fault by their path (`options.stop[1]`; of a unary call from its message
on: `request.options.n`), and `RetryInfo` stands where another try may succeed.

| condition | code |
|---|---|
| a value is out of range, a prompt is too long or larger than the KV pool | INVALID_ARGUMENT |
| a field or an RPC that is not served yet, or not known | UNIMPLEMENTED |
| the model cannot do it (it has no chat template, ...), or no engine has the fingerprint of a resumed stream | \
FAILED_PRECONDITION |
| unknown model or adapter | NOT_FOUND |
| the queue is full, or the tenant over its share; the client reads too slowly | RESOURCE_EXHAUSTED |
| the deadline passed, also while queued | DEADLINE_EXCEEDED |
| no engine can generate now, or the server drains | UNAVAILABLE |
| this request broke the engine (its logits are NaN, ...) | INTERNAL |

In the tables below, `[0, 1]` holds its ends and `(0, 1]` not the first; names like `max_choices` are the frontend's
[configuration](../configuration.md), and `GetModel` tells their values. "Model's, 1" is the value of the checkpoint's
`generation_config.json`, else 1. Any field may be refused with UNIMPLEMENTED by a server older than the field."""


def render(name: str) -> str:
    """One page, by its name in PAGES."""
    return Page(name, _files()).render()


def undescribed(name: str) -> list[str]:
    """Fields of a contract without a comment, as Message.field."""
    return Page(name, _files()).undescribed()


def path(name: str) -> Path:
    """Where a page is kept."""
    return FOLDER / f"{name}.md"


@cache
def _files() -> dict[str, FileDescriptorProto]:
    """The contracts with their comments, by path. Raises CalledProcessError where they do not compile."""
    buf = Path(sys.executable).parent / "buf"
    built = subprocess.run([buf, "build", "-o", "-"], cwd=ROOT / "proto", check=True, stdout=subprocess.PIPE)
    return {file.name: file for file in FileDescriptorSet.FromString(built.stdout).file}


def _comments(file: FileDescriptorProto) -> dict[Place, str]:
    """By the path of descriptor.proto's SourceCodeInfo; lines joined, paragraphs kept."""
    found = {}
    for location in file.source_code_info.location:
        lines = (location.leading_comments + "\n" + location.trailing_comments).strip().split("\n")
        paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
        if text := "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs):
            found[tuple(location.path)] = text
    return found


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto, Place]]:
    def inside(prefix: str, message: DescriptorProto, place: Place) -> Iterator[tuple[str, DescriptorProto, Place]]:
        full = f"{prefix}.{message.name}"
        yield full, message, place
        for i, nested in enumerate(message.nested_type):
            yield from inside(full, nested, (*place, 3, i))

    for i, message in enumerate(file.message_type):
        yield from inside(f".{file.package}", message, (4, i))


def _enums(file: FileDescriptorProto) -> Iterator[tuple[str, EnumDescriptorProto, Place]]:
    for i, enum in enumerate(file.enum_type):
        yield f".{file.package}.{enum.name}", enum, (5, i)
    for full, message, place in _messages(file):
        for i, enum in enumerate(message.enum_type):
            yield f"{full}.{enum.name}", enum, (*place, 4, i)


def _asked(files: list[FileDescriptorProto]) -> set[str]:
    """The messages that callers write: requests, and what stands in them."""
    messages = {full: message for file in files for full, message, _ in _messages(file)}
    left = [method.input_type for file in files for service in file.service for method in service.method]
    found: set[str] = set()
    while left:
        full = left.pop()
        if full in messages and full not in found:
            found.add(full)
            left += [field.type_name for field in messages[full].field if field.type == _Field.TYPE_MESSAGE]
    return found


def _service(service: ServiceDescriptorProto, place: Place, comments: dict[Place, str]) -> Iterator[str]:
    yield f"\n### {service.name}\n"
    if told := comments.get(place):
        yield f"{told}\n"
    yield "| RPC | takes | answers with | what it does |"
    yield "|---|---|---|---|"
    for i, method in enumerate(service.method):
        takes = _link(method.input_type, "a stream of " if method.client_streaming else "")
        answers = _link(method.output_type, "a stream of " if method.server_streaming else "")
        yield f"| `{method.name}` | {takes} | {answers} | {_cell(comments.get((*place, 2, i), ''))} |"


def _enum(full: str, enum: EnumDescriptorProto, place: Place, comments: dict[Place, str]) -> Iterator[str]:
    yield f"\n### {_short(full)}\n"
    if told := comments.get(place):
        yield f"{_cell(told)}\n"
    yield "| value | what it is |"
    yield "|---|---|"
    for i, value in enumerate(enum.value):
        yield f"| `{value.name}` = {value.number} | {_cell(comments.get((*place, 2, i), ''))} |"


def _type(field: _Field, maps: dict[str, DescriptorProto]) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in maps:
        key, value = maps[name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    many = "list of " if field.label == _Field.LABEL_REPEATED else ""
    if field.type_name:
        return _link(field.type_name, many)
    return many + _Field.Type.Name(field.type).removeprefix("TYPE_").lower()


def _default(field: _Field, in_oneof: bool) -> str:
    if field.label == _Field.LABEL_REPEATED:
        return "empty"
    if in_oneof or field.proto3_optional or field.type == _Field.TYPE_MESSAGE:
        return "unset"
    return _ZERO.get(field.type, "0")


def _link(full: str, before: str = "") -> str:
    """To a message of the same contract; of another one, to its page."""
    if not full.startswith(_PACKAGE):
        return before + full.lstrip(".")
    page = full.split(".")[2]
    short = _short(full)
    return f"{before}[{short}]({page}.md#{short.replace('.', '').lower()})"


def _serves(full: str, field: str) -> bool:
    door = part("services.frontend.door", extra="frontend", what="the reference of the public API").DOOR
    return bool(door.serves(full.lstrip("."), field))


def _short(full: str) -> str:
    return full.split(".v1.")[1]


def _is_map_entry(message: DescriptorProto) -> bool:
    return message.options.map_entry


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
