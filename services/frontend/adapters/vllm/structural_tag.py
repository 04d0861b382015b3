"""A gateway's `structural_tag`: XGrammar's JSON (https://xgrammar.mlc.ai, "Structural Tag"), as our own tags.

Two forms are read: the older one, with `structures` and `triggers`, and `triggered_tags` of the newer one, with JSON
Schemas in the tags. What else the newer one can say is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from triptych.inference.v1 import generation_pb2

from services.common.errors import RequestError, invalid, unserved

Tags = generation_pb2.Grammar.StructuralTags


def grammar(text: str, path: str) -> generation_pb2.Grammar:
    """Raises RequestError: INVALID_ARGUMENT for what is no structural tag, UNIMPLEMENTED for a format not read here."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(path, f"is not JSON: {error}") from error
    document = _Object(document, path)
    if document.get("type", str, "structural_tag") != "structural_tag":
        raise document.wrong("type", 'is not "structural_tag"')
    tags = _newer(document.object("format")) if document.has("format") else _older(document)
    document.all_read()
    return generation_pb2.Grammar(structural_tags=tags)


def _older(document: _Object) -> Tags:
    triggers = document.strings("triggers")
    tags = []
    for structure in document.objects("structures"):
        tags.append(_tag(structure, structure.schema("schema"), triggers))
        structure.all_read()
    return Tags(tags=tags)


def _newer(form: _Object) -> Tags:
    if (kind := form.get("type", str)) != "triggered_tags":
        raise unserved(f"{form.path}.type", f"{kind!r} is not read here, triggered_tags is")
    triggers = form.strings("triggers")
    tags = []
    for tag in form.objects("tags"):
        if tag.get("type", str, "tag") != "tag":
            raise tag.wrong("type", 'is not "tag"')
        content = tag.object("content")
        if (kind := content.get("type", str)) != "json_schema":
            raise unserved(f"{content.path}.type", f"{kind!r} is not read here, json_schema is")
        tags.append(_tag(tag, content.schema("json_schema"), triggers))
        content.all_read()
        tag.all_read()
    read = Tags(
        tags=tags, required=form.get("at_least_one", bool, False), single=form.get("stop_after_first", bool, False)
    )
    form.all_read()
    return read


def _tag(tag: _Object, schema: str, triggers: Sequence[str]) -> generation_pb2.Grammar.Tag:
    begin = tag.get("begin", str)
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        raise tag.wrong("begin", f"starts with none of the triggers {list(triggers)}")
    return generation_pb2.Grammar.Tag(begin=begin, json_schema=schema, end=tag.get("end", str), trigger=trigger)


class _Object:
    """A JSON object whose keys are read once each; any that is left is refused."""

    def __init__(self, value: Any, path: str) -> None:
        self.path = path
        if not isinstance(value, Mapping):
            raise invalid(path, "is not a JSON object")
        self._left = dict(value)

    def has(self, key: str) -> bool:
        return key in self._left

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._left.pop(key, default)
        if not isinstance(value, kind):
            raise self.wrong(key, f"is missing, or not a {kind.__name__}")
        return value

    def object(self, key: str) -> _Object:
        return _Object(self._left.pop(key, None), f"{self.path}.{key}")

    def objects(self, key: str) -> list[_Object]:
        return [_Object(item, f"{self.path}.{key}[{i}]") for i, item in enumerate(self.get(key, list))]

    def strings(self, key: str) -> list[str]:
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "holds something that is not a string")
        return list(values)

    def schema(self, key: str) -> str:
        value = self._left.pop(key, None)
        if not isinstance(value, Mapping | bool):
            raise self.wrong(key, "is missing, or no JSON Schema: an object is needed")
        return json.dumps(value)

    def all_read(self) -> None:
        for key in self._left:
            raise unserved(f"{self.path}.{key}"[:200])

    def wrong(self, key: str, description: str) -> RequestError:
        return invalid(f"{self.path}.{key}", description)
