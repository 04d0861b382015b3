"""Arguments that a model writes bare, each between tags: the tool's schema says which are text and which are JSON.

An argument that can be nothing but text is passed on as it comes, made a JSON string; any other once it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.json_value import read_value

STRING = "string"
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""As templates that use Jinja's `string` write them."""
_MAX_DEPTH = 16
"""Of references and alternatives that are followed in a schema."""


class Arguments:
    """Of one call, which begins with the first of them."""

    def __init__(self, tape: Tape, name: str) -> None:
        self._tape = tape
        self._name = name
        self._schema = tape.schemas.get(name, {})
        self._count = 0

    def read(self, key: str, *ends: str, types: frozenset[str] | None = None) -> Reading[None]:
        """Takes an argument up to one of `ends`, the longest first, and the end. Raises MalformedError without one.

        `types` is what it may be, where that is known without the schema.
        """
        if types is None:
            types = types_of(self._schema, key)
        if types == {STRING}:
            self._begin_member(key)
            self._tape.argument('"')
            if not (yield from self._tape.until(ends, lambda text: self._tape.argument(_in_quotes(text)))):
                raise MalformedError
            self._tape.argument('"')
        else:
            written = as_json((yield from _up_to(self._tape, ends)), types)
            self._begin_member(key)
            self._tape.argument(written)

    def read_json(self) -> Reading[None]:
        """Takes all of them at once, an object: as a model does that is held to a schema. Raises MalformedError."""
        self._tape.begin(self._name)
        yield from read_value(self._tape, self._tape.argument)
        self._tape.end()

    def end(self) -> None:
        """There are no more."""
        if not self._count:
            self._tape.begin(self._name)
        self._tape.argument("}" if self._count else "{}")
        self._tape.end()

    def _begin_member(self, key: str) -> None:
        if not self._count:
            self._tape.begin(self._name)
        self._tape.argument(("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that a schema lets a property have; none where it does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(found, schema, _MAX_DEPTH))


def as_json(written: str, types: frozenset[str]) -> str:
    """What was written, as JSON: itself where it is that, of a type that is allowed; else a string."""
    text = written.strip()
    text = _PYTHON_WORDS.get(text, text)
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()  # halves of surrogate pairs cannot be sent
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    if isinstance(value, str) or (types and not _names_of(value) & types):
        return json.dumps(written, ensure_ascii=False)
    return text


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    else:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        for value in [*values, *([schema["const"]] if "const" in schema else [])]:
            yield from ({STRING} if isinstance(value, str) else _names_of(value))
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(word) or ():
            yield from _types(part, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_resolved(reference, root), root, depth - 1)


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the schema itself names (RFC 6901), None for any other."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference.split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _names_of(value: Any) -> frozenset[str]:
    """Types that a JSON value other than a string is of."""
    name = _JSON_TYPES[type(value)]
    if name == "integer" or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    return frozenset({name})


def _up_to(tape: Tape, ends: tuple[str, ...]) -> Reading[str]:
    found = ""
    while not found.endswith(ends):
        if not (yield from tape.peek()):
            raise MalformedError
        found += tape.take()
    return found.removesuffix(next(end for end in ends if found.endswith(end)))


def _in_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
