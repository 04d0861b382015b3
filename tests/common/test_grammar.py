"""Grammars as own types, and what each kind allows: texts are walked through the matcher id by id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher
from triptych.inference.v1 import generation_pb2

from services.common.errors import StartError
from services.common.grammar import (
    Choices,
    Grammar,
    GrammarError,
    JsonSchema,
    Lark,
    Regex,
    Rule,
    StructuralTags,
    Tag,
    from_proto,
    to_proto,
)
from services.common.grammar_compiler import Compiler
from tests.support.checkpoints import EOS_ID, SPECIAL_TOKENS, tiny_tokenizer

NUMBER = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
F = Tag('<tool>{"name": "f", "arguments": ', NUMBER, "}</tool>", "<tool>")
G = Tag('<tool>{"name": "g/h", "arguments": ', '{"type": "boolean"}', "}</tool>", "<tool>")
CALL_F = '<tool>{"name": "f", "arguments": {"a": 1}}</tool>'
CALL_G = '<tool>{"name": "g/h", "arguments": true}</tool>'
OTHER, START = SPECIAL_TOKENS[:2]
CONTROLLED = Tag(f"{START}f\n", NUMBER, START)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tiny_tokenizer(tmp_path_factory.mktemp("grammar") / "tiny"), [EOS_ID])


def verdict(compiler: Compiler, matcher: LLMatcher, text: str) -> str:
    """ "whole" for a text of the language, "part" for the start of one, else "no"."""
    ids = compiler.tokenizer.tokenize_str(text, parse_special=True)
    walker = matcher.deep_copy()
    if walker.try_consume_tokens(ids) < len(ids):
        return "no"
    return "whole" if walker.is_accepting() else "part"


ALLOWED: list[tuple[Rule, dict[str, str]]] = [
    (
        JsonSchema(NUMBER),
        {'{"a": 1}': "whole", '{"a":1}': "whole", '{"a": 1': "part", '{"a":  1}': "no", '{\n"a": 1}': "no", "5": "no"},
    ),
    (JsonSchema('{"type": "object"}'), {"{}": "whole", '{"b": [1, null]}': "whole", "[1]": "no"}),
    (JsonSchema(" true "), {"5": "whole", '"x': "part", "{}": "whole"}),
    (Regex("[0-9]{3}-[0-9]{4}"), {"123-4567": "whole", "123-": "part", "12-": "no", "123-45678": "no"}),
    (
        Lark('start: "a"+ | b\nb: "b" %json {"type": "null"}'),
        {"aa": "whole", "bnull": "whole", "b": "part", "ab": "no"},
    ),
    (Choices(("yes", "no", "nothing")), {"yes": "whole", "no": "whole", "noth": "part", "maybe": "no"}),
    (
        Choices(('a"b\\', "\x00\n", "é日😀", "/x/")),
        {'a"b\\': "whole", "\x00\n": "whole", "é日😀": "whole", "/x/": "whole"},
    ),
    (
        StructuralTags((F, G)),
        {
            "": "whole", "a < b, <too": "whole", f"so: {CALL_G} done {CALL_F}": "whole", CALL_F + CALL_G: "whole",
            "then <tool>": "part", '<tool>{"name": "x': "no", '<tool>{"name": "f", "arguments": true': "no",
        },
    ),
    (
        StructuralTags((F, G), single=True),
        {"no call": "whole", f"a {CALL_F} b": "whole", CALL_F + CALL_G: "no", f"{CALL_F} <tool>": "no"},
    ),
    (
        StructuralTags((F, G), required=True),
        {"": "part", "text": "no", CALL_F: "whole", f"{CALL_F}\n{CALL_G}": "whole", f"{CALL_F} text": "no"},
    ),
    (StructuralTags((F, G), required=True, single=True), {CALL_G: "whole", CALL_F + CALL_G: "no"}),
    (
        StructuralTags((F,), required=True, text_until="</think>"),
        {"hm": "part", f"hm</think>{CALL_F}": "whole", CALL_F: "part", f"</think>hm{CALL_F}": "no"},
    ),
    (
        StructuralTags((CONTROLLED,)),
        {
            f'so {START}f\n{{"a": 1}}{START} and': "whole", f"{START}g": "no", START: "part", f"{START}f\n{{}}": "no",
        },
    ),
    (StructuralTags((CONTROLLED,), required=True), {f'{START}f\n{{"a": 1}}{START}': "whole", "x": "no"}),
    (
        StructuralTags((CONTROLLED,), required=True, single=True, text_until=OTHER),
        {f'hm{OTHER}{START}f\n{{"a": 1}}{START}': "whole", f"{START}": "no"},
    ),
    (
        StructuralTags((Tag(f"<a.{START}f", '{"type": "null"}', ">", f"<a.{START}"),)),
        {
            f"b < <a.{START}fnull> c <a.{START}fnull>": "whole",
            "b <a.": "whole",
            f"b <aa{START}fnull>": "no",
            f"{START}fnull>": "no",
            f"<a.{START}f5": "no",
        },
    ),
    (
        StructuralTags((CONTROLLED,), required=True, single=True, text_until=f".{OTHER}"),
        {f'hm.{OTHER}{START}f\n{{"a": 1}}{START}': "whole", f"hm{OTHER}": "no"},
    ),
    (
        StructuralTags((Tag("x y.*/\n~&#(", '{"type": "null"}'),)),
        {"hm x y.*/\n~&#(null.": "whole", "x y.*/\n~&#(5": "no", "x y.*/": "whole"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "texts"), ALLOWED, ids=lambda value: type(value).__name__)
def test_each_kind_allows_just_its_language(compiler: Compiler, rule: Rule, texts: dict[str, str]) -> None:
    grammar = Grammar(rule)
    matcher = compiler.compile(grammar)
    compiler.probe(grammar, matcher)
    assert {text: verdict(compiler, matcher, text) for text in texts} == texts


def test_a_control_token_is_no_text(compiler: Compiler) -> None:
    for rule in (Regex("(.|\n)*"), JsonSchema('{"type": "string"}'), StructuralTags((F,))):
        assert verdict(compiler, compiler.compile(Grammar(rule)), f'"{START}') == "no"


REFUSED: list[tuple[Rule, str, str]] = [
    (JsonSchema("{type: object}"), "json_schema", "cannot be read"),
    (JsonSchema(""), "json_schema", "cannot be read"),
    (JsonSchema("[]"), "json_schema", "cannot be read"),
    (JsonSchema("false"), "json_schema", "cannot be read"),
    (JsonSchema('{"type": "objekt"}'), "json_schema", "Invalid type: objekt"),
    (JsonSchema('{"type": 5}'), "json_schema", "type must be"),
    (JsonSchema('{"not": {}, "x-guidance": {"lenient": true}}'), "json_schema", "Unimplemented keys"),
    (JsonSchema('{"$ref": "#"}'), "json_schema", "allows no text"),
    (JsonSchema('{"$ref": "https://example.com/schema"}'), "json_schema", "retriev"),
    (JsonSchema('{"minLength": 5, "maxLength": 3, "type": "string"}'), "json_schema", "minLength (5) is greater"),
    (JsonSchema('{"a": ' * 5000 + "1" + "}" * 5000), "json_schema", "recursion limit"),
    (JsonSchema('{"items": ' * 5000 + "{}" + "}" * 5000), "json_schema", "recursion limit"),
    (Regex("("), "regex", "unclosed group"),
    (Regex(""), "regex", "empty text alone"),
    (Regex("[^\\s\\S]"), "regex", "allows no text"),
    (Regex("(" * 5000 + ")" * 5000), "regex", "nest"),
    (Lark(""), "lark", "mpty grammar"),
    (Lark("begin: 1"), "lark", ""),
    (Lark("start: start"), "lark", "allows no text"),
    (Lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "lark", "too deeply nested"),
    (StructuralTags((F, Tag("y", '{"type": 3}'))), "structural_tags.tags[1].json_schema", "type must be"),
    (StructuralTags((F, Tag("y", "nope"))), "structural_tags.tags[1].json_schema", "expected"),
]


@pytest.mark.parametrize(("rule", "field", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_no_grammar_is_refused_with_its_field(compiler: Compiler, rule: Rule, field: str, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(Grammar(rule))
    assert caught.value.field == field and says in caught.value.description, caught.value


def test_a_grammar_whose_masks_are_dear_or_fail_is_refused(compiler: Compiler) -> None:
    grammar = Grammar(Regex("a{1000000}"))
    with pytest.raises(GrammarError, match=r"takes \d+ ms to say which ids|cannot be run") as caught:
        compiler.probe(grammar, compiler.compile(grammar))
    assert caught.value.field == "regex"


def test_a_tokenizer_that_cannot_be_read_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match=r"llguidance cannot read .*tokenizer\.json"):
        Compiler(tmp_path, [])


# -- own types


@pytest.mark.parametrize("rule", [rule for rule, _ in ALLOWED], ids=lambda value: type(value).__name__)
def test_a_grammar_comes_back_from_the_wire_as_it_was(rule: Rule) -> None:
    grammar = Grammar(rule, forced_tokens=True)
    assert from_proto(to_proto(grammar)) == grammar


def test_equal_languages_have_equal_digests_whether_ids_are_forced_or_not() -> None:
    assert Grammar(Regex("a")).digest == Grammar(Regex("a"), forced_tokens=True).digest
    digests = {Grammar(rule).digest for rule in (Regex("a"), Lark("a"), JsonSchema("a"), Choices(("a",)), Regex("b"))}
    assert len(digests) == 5


def test_all_texts_of_a_grammar_count_in_its_size() -> None:
    assert Grammar(Choices(("é", "ab"))).num_bytes == 4
    tags = StructuralTags((Tag("<a>", "{}", "</a>", "<"),), required=True, text_until="xy")
    assert Grammar(tags).num_bytes == 3 + 2 + 4 + 1 + 2


Message = generation_pb2.Grammar
FAULTS = {
    "": Message(),
    "choices.values": Message(choices=Message.Choices()),
    "choices.values[1]": Message(choices=Message.Choices(values=["a", ""])),
    "structural_tags.tags": Message(structural_tags=Message.StructuralTags()),
    "structural_tags.tags[0].begin": Message(structural_tags=Message.StructuralTags(tags=[Message.Tag()])),
    "structural_tags.tags[0].trigger": Message(
        structural_tags=Message.StructuralTags(tags=[Message.Tag(begin="<a>", trigger="<b")])
    ),
    "structural_tags.text_until": Message(
        structural_tags=Message.StructuralTags(tags=[Message.Tag(begin="<a>")], text_until="x")
    ),
}


@pytest.mark.parametrize("field", FAULTS)
def test_what_holds_no_rule_or_an_empty_one_is_refused_by_name(field: str) -> None:
    with pytest.raises(GrammarError) as caught:
        from_proto(FAULTS[field])
    assert caught.value.field == field and caught.value.description
    assert caught.value.under("options.grammar") == ("options.grammar." + field).rstrip(".")


def test_a_schema_may_say_how_its_white_space_is(compiler: Compiler) -> None:
    schema = json.dumps({"const": [1, 2], "x-guidance": {"whitespace_pattern": "[ \\n]{0,2}"}})
    assert verdict(compiler, compiler.compile(Grammar(JsonSchema(schema))), "[\n 1,\n2]") == "whole"
