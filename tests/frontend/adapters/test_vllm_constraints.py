"""Structured output as a gateway asks for it, as our own Grammar: the adapter maps, our own door decides."""

from __future__ import annotations

import json
from typing import Any

import grpc
import llguidance
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from triptych.inference.v1 import generation_pb2

from services.common.errors import RequestError
from services.frontend.adapters.vllm.ebnf import MAX_EBNF_BYTES
from services.frontend.adapters.vllm.paths import theirs
from services.frontend.adapters.vllm.requests import generate_request

Grammar = generation_pb2.Grammar
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def grammar(**constraint: Any) -> Grammar:
    request = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(**constraint))
    return generate_request(request).options.grammar


def refusal(**constraint: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        grammar(**constraint)
    return caught.value


def test_each_constraint_has_its_rule() -> None:
    assert grammar(json_schema=json.dumps(SCHEMA)) == Grammar(json_schema=json.dumps(SCHEMA))
    assert grammar(regex="[ab]+") == Grammar(regex="[ab]+")
    assert grammar(json_object=True) == Grammar(json_schema='{"type": "object"}')
    choices = pb.ChoiceConstraint(choices=["yes", "no"])
    assert grammar(choice=choices) == Grammar(choices=Grammar.Choices(values=["yes", "no"]))
    assert grammar(grammar='start: "a" | "b"') == Grammar(lark='start: "a" | "b"')
    request = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams())
    assert not generate_request(request).options.HasField("grammar")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "yes" | "no" [a-z]+',
        'root ::= item ("," item)*\nitem ::= [0-9]+ # digits',
        'root ::= "a"{2,3} ws\nws ::= [ \\t\\n]?',
    ],
)
def test_ebnf_becomes_lark_that_compiles(text: str) -> None:
    lark = grammar(grammar=text).lark
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        llguidance.LLMatcher.grammar_from_lark(lark)
    )
    assert not is_error, messages


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("root ::= (", "neither Lark"),
        ("hello", "neither Lark"),
        ("root ::= " + "(" * 5000, "nested too deep"),
        ("root ::= nothing", "Rule 'nothing' not found"),
        ('root ::= "' + "a" * MAX_EBNF_BYTES + '"', "send it as Lark"),
    ],
)
def test_what_is_neither_lark_nor_ebnf_is_refused(text: str, says: str) -> None:
    error = refusal(grammar=text)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT and says in error.message
    assert error.violations[0].field == "sampling_params.grammar"


OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=get>", "schema": SCHEMA, "end": "</function>"}],
    "triggers": ["<function="],
}
TAG = {
    "type": "tag",
    "begin": "<tool_call>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</tool_call>",
}
NEWER = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool"],
        "tags": [TAG],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


def test_both_forms_of_a_structural_tag_are_read() -> None:
    (tag,) = grammar(structural_tag=json.dumps(OLDER)).structural_tags.tags
    assert (tag.begin, tag.end, tag.trigger) == ("<function=get>", "</function>", "<function=")
    assert json.loads(tag.json_schema) == SCHEMA
    tags = grammar(structural_tag=json.dumps(NEWER)).structural_tags
    assert (tags.required, tags.single) == (True, True)
    assert (tags.tags[0].begin, tags.tags[0].trigger) == ("<tool_call>", "<tool")
    assert json.loads(tags.tags[0].json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("{", "INVALID_ARGUMENT", ""),
        ("[]", "INVALID_ARGUMENT", ""),
        ("[" * 100_000, "INVALID_ARGUMENT", ""),
        (json.dumps({"type": "other"}), "INVALID_ARGUMENT", ".type"),
        (json.dumps({"structures": []}), "INVALID_ARGUMENT", ".triggers"),
        (json.dumps({"structures": [1], "triggers": ["a"]}), "INVALID_ARGUMENT", ".structures[0]"),
        (json.dumps(OLDER | {"triggers": ["<other"]}), "INVALID_ARGUMENT", ".structures[0].begin"),
        (json.dumps(OLDER | {"triggers": [1]}), "INVALID_ARGUMENT", ".triggers"),
        (json.dumps(OLDER | {"more": 1}), "UNIMPLEMENTED", ".more"),
        (json.dumps({"format": {"type": "sequence", "elements": []}}), "UNIMPLEMENTED", ".format.type"),
        (
            json.dumps({"format": NEWER["format"] | {"tags": [TAG | {"content": {"type": "any_text"}}]}}),  # type: ignore[operator]
            "UNIMPLEMENTED",
            ".format.tags[0].content.type",
        ),
    ],
)
def test_what_is_no_structural_tag_or_not_read_is_refused_by_its_place(text: str, code: str, field: str) -> None:
    error = refusal(structural_tag=text)
    assert error.code.name == code and error.violations[0].field == f"sampling_params.structural_tag{field}"


@pytest.mark.parametrize(
    ("ours", "named"),
    [
        ("options.stop[1]", "sampling_params.stop[1]"),
        ("options.sampling.logit_bias[7]", "sampling_params.logit_bias[7]"),
        ("token_ids.ids[3]", "tokenized.input_ids[3]"),
        ("token_ids", "tokenized.input_ids"),
        ("options.include_stop_string", "sampling_params.include_stop_str_in_output"),
        ("options.grammar.lark", "sampling_params.grammar"),
        ("options.grammar.choices.values[2]", "sampling_params.choice.choices[2]"),
        ("options.grammar", "sampling_params.grammar"),
        ("options.label", "request_id"),
        ("text", "text"),
        ("triptych-tenant", "triptych-tenant"),
        ("optionsX", "optionsX"),
    ],
)
def test_an_error_of_our_own_door_names_the_adapters_field(ours: str, named: str) -> None:
    assert theirs(ours) == named


def test_an_error_about_a_grammar_names_the_constraint_that_was_asked_for() -> None:
    assert theirs("options.grammar.json_schema", "json_schema") == "sampling_params.json_schema"
    assert theirs("options.grammar.json_schema", "json_object") == "sampling_params.json_object"
    assert theirs("options.grammar", "structural_tag") == "sampling_params.structural_tag"
