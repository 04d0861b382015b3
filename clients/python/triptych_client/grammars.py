"""What an answer is held to: values of the option `grammar`.

    await client.chat("Where is Paris?", grammar=grammars.json_schema({"type": "object", ...})).completion()

`forced_tokens`: ids that have no alternative are appended instead of drawn, which saves steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from triptych.inference.v1 import generation_pb2

Grammar = generation_pb2.Grammar
Tag = generation_pb2.Grammar.Tag


def json_schema(schema: str | bool | Mapping[str, Any], *, forced_tokens: bool = False) -> Grammar:
    """JSON that the schema, text or what json.dumps takes, holds for."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Grammar(json_schema=text, forced_tokens=forced_tokens)


def json_object(*, forced_tokens: bool = False) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, forced_tokens=forced_tokens)


def regex(pattern: str, *, forced_tokens: bool = False) -> Grammar:
    """A text that the expression, of Rust's syntax, matches as a whole."""
    return Grammar(regex=pattern, forced_tokens=forced_tokens)


def lark(source: str, *, forced_tokens: bool = False) -> Grammar:
    """A text of a grammar in llguidance's dialect of Lark."""
    return Grammar(lark=source, forced_tokens=forced_tokens)


def choices(*values: str, forced_tokens: bool = False) -> Grammar:
    """Exactly one of these texts."""
    return Grammar(choices=Grammar.Choices(values=values), forced_tokens=forced_tokens)


def structural_tags(
    tags: Iterable[Tag],
    *,
    required: bool = False,
    single: bool = False,
    text_until: str = "",
    forced_tokens: bool = False,
) -> Grammar:
    """Text with spans in it that are held to schemas; see Grammar.StructuralTags in generation.proto."""
    spans = Grammar.StructuralTags(tags=tags, required=required, single=single, text_until=text_until)
    return Grammar(structural_tags=spans, forced_tokens=forced_tokens)
