"""Arguments that a model writes without quotes: which are text, which JSON, and that text comes as it is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.frontend.output_reader import OutputFormats, OutputReader
from services.frontend.tape import Call, Parts
from services.frontend.tool_calls.bare_arguments import as_json, types_of
from services.frontend.tool_calls.formats import FORMATS

SCHEMA: dict[str, Any] = {
    "$defs": {"Unit": {"enum": ["c", "f"]}, "Deep": {"$ref": "#/$defs/Unit"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "text": {"type": "string"},
        "either": {"type": ["integer", "null"]},
        "optional": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "unit": {"$ref": "#/$defs/Deep"},
        "loop": {"$ref": "#/$defs/Loop"},
        "mixed": {"enum": ["a", 1, None]},
        "const": {"const": True},
        "far": {"$ref": "https://example.com/schema"},
        "anything": True,
        "open": {},
    },
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("text", {"string"}),
        ("either", {"integer", "null"}),
        ("optional", {"number", "null"}),
        ("unit", {"string"}),
        ("loop", set()),
        ("mixed", {"string", "integer", "number", "null"}),
        ("const", {"boolean"}),
        ("far", set()),
        ("anything", set()),
        ("open", set()),
        ("nowhere", set()),
    ],
)
def test_a_schema_says_of_which_types_an_argument_may_be(key: str, types: set[str]) -> None:
    assert types_of(SCHEMA, key) == types


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": {"a": {"type": {}, "anyOf": [3]}}}])
def test_a_schema_that_does_not_say_leaves_every_type(schema: dict[str, Any]) -> None:
    assert types_of(schema, "a") == set()


@pytest.mark.parametrize(
    ("written", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("\n 5 ", {"integer"}, 5),
        ("5.0", {"integer"}, 5.0),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"number"}, 5),
        ("True", {"boolean"}, True),
        ("true", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("None", {"string", "null"}, None),
        ("5", {"string", "null"}, "5"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': 1}", {"object"}, "{'a': 1}"),
        ("01", {"integer"}, "01"),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"string"}, "1e999"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ('"\\ud800"', set(), '"\\ud800"'),
        ('["\\ud800"]', set(), '["\\ud800"]'),
        ('"quoted"', set(), '"quoted"'),
        ("[1, 2]", set(), [1, 2]),
        ("plain text", set(), "plain text"),
        ("", set(), ""),
    ],
)
def test_what_is_no_json_of_its_types_is_a_string_as_it_stands(written: str, types: set[str], value: Any) -> None:
    made = as_json(written, frozenset(types))
    made.encode()
    found = json.loads(made)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("form", "head", "tail"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\n", "\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    ],
)
def test_text_is_passed_on_as_it_is_written(form: str, head: str, tail: str) -> None:
    reader = OutputReader(OutputFormats(None, FORMATS[form], schemas={"f": SCHEMA}))
    assert reader.push(head) == Parts(calls=(Call(0, "f", '{"text": "'),))
    assert reader.push('Say "') == Parts(calls=(Call(0, "", 'Say \\"'),))
    assert reader.push("\u00e9") == Parts(calls=(Call(0, "", "\u00e9"),))
    assert reader.push(tail) == Parts(calls=(Call(0, "", '"}', whole=True),))
    assert reader.finish() == Parts()


def test_a_number_is_passed_on_once_it_is_whole() -> None:
    reader = OutputReader(OutputFormats(None, FORMATS["qwen3_coder"], schemas={"f": SCHEMA}))
    assert reader.push("<tool_call>\n<function=f>\n<parameter=either>\n12") == Parts()
    assert reader.push("34\n</parameter>\n") == Parts(calls=(Call(0, "f", '{"either": 1234'),))


def test_a_number_that_is_cut_off_is_text_and_nothing_is_lost() -> None:
    reader = OutputReader(OutputFormats(None, FORMATS["qwen3_coder"], schemas={"f": SCHEMA}))
    written = "<tool_call>\n<function=f>\n<parameter=either>\n12"
    assert (reader.push(written), reader.finish()) == (Parts(), Parts(written))


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "deepseek_v32"])
def test_a_model_that_is_held_to_a_schema_writes_json_in_their_place(form: str) -> None:
    span = FORMATS[form].span("f")
    reader = OutputReader(OutputFormats(None, FORMATS[form], schemas={"f": SCHEMA}))
    found = [reader.push(character) for character in f'{span.begin}{{"text": "x", "either": 5}}{span.end}']
    assert "".join(call.arguments for parts in found for call in parts.calls) == '{"text": "x", "either": 5}'
    assert reader.whole_calls == 1 and reader.finish() == Parts()
