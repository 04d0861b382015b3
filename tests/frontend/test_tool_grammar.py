"""The grammars that hold a model to its tools, as the contract has them."""

from __future__ import annotations

import json

import pytest
from triptych.inference.v1 import generation_pb2

from services.common.grammar import to_proto
from services.frontend import tool_grammar
from services.frontend.conversation import Calling, Tool, ToolUse
from services.frontend.tool_calls.formats import FORMATS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("get_weather", "", SCHEMA)
STRICT = Tool("add", "", {"properties": {"a": {"type": "integer"}}}, strict=True)
NOW = Tool("now", "", {})
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tags(use: ToolUse, form: str = "hermes", **until: str) -> generation_pb2.Grammar.StructuralTags:
    return to_proto(tool_grammar.make(use, FORMATS[form], **until)).structural_tags


@pytest.mark.parametrize(
    ("use", "promised"),
    [
        (ToolUse((WEATHER,), Calling.AUTO), ""),
        (ToolUse((STRICT,), Calling.NONE, parallel=False), ""),
        (ToolUse((WEATHER,), Calling.REQUIRED), "tool_choice"),
        (ToolUse((WEATHER,), Calling.REQUIRED, "get_weather"), "tool_choice"),
        (ToolUse((WEATHER, STRICT), Calling.AUTO), "tools[1].strict"),
        (ToolUse((WEATHER,), Calling.AUTO, parallel=False), "parallel_tool_calls"),
    ],
)
def test_a_grammar_is_needed_for_what_is_promised(use: ToolUse, promised: str) -> None:
    assert tool_grammar.promise(use) == promised


def test_required_holds_every_call_to_its_schema() -> None:
    made = tags(ToolUse((WEATHER, STRICT, NOW), Calling.REQUIRED))
    assert made.required and not made.single
    assert [json.loads(tag.json_schema) for tag in made.tags] == [SCHEMA, {**STRICT.schema, "type": "object"}, NOTHING]
    assert made.tags[0].begin == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert (made.tags[0].end, made.tags[0].trigger) == ("}\n</tool_call>", "<tool_call>")


def test_a_named_tool_is_called_once_and_no_other_is() -> None:
    made = tags(ToolUse((WEATHER, STRICT), Calling.REQUIRED, "add"))
    assert made.required and made.single and ['"add"' in tag.begin for tag in made.tags] == [True]


def test_strict_holds_its_own_tool_and_leaves_the_others_an_object() -> None:
    made = tags(ToolUse((WEATHER, STRICT), Calling.AUTO))
    assert not made.required and not made.single
    assert json.loads(made.tags[0].json_schema) == {"type": "object"}
    assert json.loads(made.tags[1].json_schema)["properties"] == {"a": {"type": "integer"}}


def test_without_parallel_calls_there_is_one_span_at_most() -> None:
    made = tags(ToolUse((WEATHER,), Calling.AUTO, parallel=False))
    assert made.single and not made.required


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_format_can_be_held(form: str) -> None:
    (tag,) = tags(ToolUse((WEATHER,), Calling.REQUIRED), form).tags
    assert "get_weather" in tag.begin and tag.begin.startswith(tag.trigger) and tag.trigger


def test_reasoning_comes_before_calls_that_are_required_and_is_free_anyway_before_others() -> None:
    assert tags(ToolUse((WEATHER,), Calling.REQUIRED), text_until="</think>").text_until == "</think>"
    assert tags(ToolUse((STRICT,), Calling.AUTO), text_until="</think>").text_until == ""
