"""What the output of a request is held to, as own types: the contract's Grammar, read at two doors.

The frontend compiles a grammar to refuse a bad one, the scheduler to build masks; `grammar_compiler` does it for both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeAlias

from triptych.inference.v1 import generation_pb2


@dataclass(frozen=True)
class JsonSchema:
    """A JSON text that the schema, itself JSON, holds for."""

    schema: str


@dataclass(frozen=True)
class Regex:
    """A text that the expression matches as a whole."""

    pattern: str


@dataclass(frozen=True)
class Lark:
    """A text of the language of a grammar in llguidance's dialect of Lark."""

    source: str


@dataclass(frozen=True)
class Choices:
    """Exactly one of these."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Tag:
    """A span: `begin`, JSON that the schema holds for, `end`. `trigger` is a start of `begin`, "" is all of it."""

    begin: str
    json_schema: str
    end: str = ""
    trigger: str = ""


@dataclass(frozen=True)
class StructuralTags:
    """Text with spans in it. `required`: spans alone, one or more, behind `text_until` and what comes before it."""

    tags: tuple[Tag, ...]
    required: bool = False
    single: bool = False
    text_until: str = ""


Rule: TypeAlias = JsonSchema | Regex | Lark | Choices | StructuralTags


@dataclass(frozen=True)
class Grammar:
    """`forced_tokens`: ids without an alternative are appended instead of drawn."""

    rule: Rule
    forced_tokens: bool = False

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all its texts."""
        return sum(len(text.encode()) for text in self._texts())

    @property
    def digest(self) -> bytes:
        """Equal digests, equal languages; forced tokens do not count."""
        return hashlib.sha256(to_proto(Grammar(self.rule)).SerializeToString(deterministic=True)).digest()

    @property
    def field(self) -> str:
        """Of the message Grammar, that holds the rule."""
        match self.rule:
            case JsonSchema():
                return "json_schema"
            case Regex():
                return "regex"
            case Lark():
                return "lark"
            case Choices():
                return "choices"
            case StructuralTags():
                return "structural_tags"

    def has_room_for(self, mark: str) -> bool:
        """Whether an output may have it as a mark: in text that is free, or because the grammar names it."""
        match self.rule:
            case StructuralTags(required=required, text_until=until):
                return not required or bool(until)
            case JsonSchema():
                return False  # in a string of the JSON it is no mark
            case _:
                return any(mark in text for text in self._texts())

    def _texts(self) -> list[str]:
        match self.rule:
            case JsonSchema(text) | Regex(text) | Lark(text):
                return [text]
            case Choices(values):
                return list(values)
            case StructuralTags(tags, text_until=until):
                return [until, *(text for tag in tags for text in (tag.begin, tag.json_schema, tag.end, tag.trigger))]


class GrammarError(Exception):
    """A grammar that cannot be used. `field` is where in the message Grammar, "" for all of it."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}" if field else description)
        self.field = field
        self.description = description

    def under(self, path: str) -> str:
        """The field's path where the message stands at `path`."""
        return f"{path}.{self.field}" if self.field else path


def from_proto(message: generation_pb2.Grammar) -> Grammar:
    """Raises GrammarError for one that could not be compiled whatever the tokenizer."""
    return Grammar(_rule(message), message.forced_tokens)


def to_proto(grammar: Grammar) -> generation_pb2.Grammar:
    """The reverse."""
    message = generation_pb2.Grammar(forced_tokens=grammar.forced_tokens)
    match grammar.rule:
        case JsonSchema(schema):
            message.json_schema = schema
        case Regex(pattern):
            message.regex = pattern
        case Lark(source):
            message.lark = source
        case Choices(values):
            message.choices.values.extend(values)
        case StructuralTags(tags, required, single, until):
            message.structural_tags.CopyFrom(
                generation_pb2.Grammar.StructuralTags(required=required, single=single, text_until=until)
            )
            for tag in tags:
                message.structural_tags.tags.add(
                    begin=tag.begin, json_schema=tag.json_schema, end=tag.end, trigger=tag.trigger
                )
    return message


def _rule(message: generation_pb2.Grammar) -> Rule:
    match message.WhichOneof("rule"):
        case "json_schema":
            return JsonSchema(message.json_schema)
        case "regex":
            return Regex(message.regex)
        case "lark":
            return Lark(message.lark)
        case "choices":
            return _choices(message.choices)
        case "structural_tags":
            return _structural_tags(message.structural_tags)
    raise GrammarError("", "holds no rule; give json_schema, regex, lark, choices or structural_tags")


def _choices(message: generation_pb2.Grammar.Choices) -> Choices:
    if not message.values:
        raise GrammarError("choices.values", "is empty; give one text or more to choose from")
    for i, value in enumerate(message.values):
        if not value:
            raise GrammarError(f"choices.values[{i}]", "is empty; a choice has one character or more")
    return Choices(tuple(message.values))


def _structural_tags(message: generation_pb2.Grammar.StructuralTags) -> StructuralTags:
    path = "structural_tags"
    if not message.tags:
        raise GrammarError(f"{path}.tags", "is empty; give one tag or more")
    if message.text_until and not message.required:
        raise GrammarError(f"{path}.text_until", "is for required; without it text is free before every span")
    tags = tuple(_tag(tag, f"{path}.tags[{i}]") for i, tag in enumerate(message.tags))
    return StructuralTags(tags, message.required, message.single, message.text_until)


def _tag(tag: generation_pb2.Grammar.Tag, path: str) -> Tag:
    if not tag.begin:
        raise GrammarError(f"{path}.begin", "is empty; a span begins with one character or more")
    if not tag.begin.startswith(tag.trigger):
        raise GrammarError(f"{path}.trigger", f"is {tag.trigger[:40]!r}, which is no start of begin")
    return Tag(tag.begin, tag.json_schema, tag.end, tag.trigger)
