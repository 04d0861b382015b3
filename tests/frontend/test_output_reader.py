"""Reasoning and tool calls in what a model writes: whole whatever the cuts, and nothing lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

from services.frontend.output_reader import CALL_ID_CHARACTERS, CallIds, OutputFormats, OutputReader
from services.frontend.reasoning.tags import FORMATS as REASONING_FORMATS
from services.frontend.tape import Call, Parts
from services.frontend.tool_calls.formats import FORMATS
from tests.frontend.output_samples import SAMPLES, Sample

BY_ID = [pytest.param(sample, id=sample.id) for sample in SAMPLES]


@dataclass
class Joined:
    """Parts, put together as a client does."""

    text: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    whole: int = 0

    def add(self, parts: Parts) -> None:
        self.text += parts.text
        self.reasoning += parts.reasoning
        for call in parts.calls:
            if call.name:
                assert call.index == len(self.names), "a name comes once, in order"
                self.names.append(call.name)
                self.arguments.append("")
            self.arguments[call.index] += call.arguments
            self.whole += call.whole


def formats(
    tool_calls: str = "",
    reasoning: str = "",
    *,
    in_reasoning: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> OutputFormats:
    return OutputFormats(REASONING_FORMATS.get(reasoning), FORMATS.get(tool_calls), in_reasoning, schemas)


def read(pieces: Iterable[str], found: OutputFormats) -> Joined:
    reader, joined = OutputReader(found), Joined()
    for piece in pieces:
        joined.add(reader.push(piece))
    joined.add(reader.finish())
    assert joined.whole == reader.whole_calls
    return joined


def of(sample: Sample, pieces: Iterable[str]) -> Joined:
    found = formats(
        sample.tool_calls, sample.reasoning_format, in_reasoning=sample.in_reasoning, schemas=sample.schemas
    )
    return read(pieces, found)


@pytest.mark.parametrize("sample", BY_ID)
def test_a_sample_means_what_its_source_says(sample: Sample) -> None:
    found = of(sample, [sample.written])
    assert (found.text, found.reasoning) == (sample.text, sample.reasoning)
    assert tuple(zip(found.names, found.arguments, strict=True)) == sample.calls
    assert found.whole == len(sample.calls)
    assert all(isinstance(json.loads(arguments), dict) for arguments in found.arguments)


@pytest.mark.parametrize("sample", BY_ID)
def test_a_sample_that_is_cut_anywhere_means_the_same(sample: Sample) -> None:
    written = sample.written
    whole = of(sample, [written])
    for cut in range(len(written) + 1):
        assert of(sample, [written[:cut], written[cut:]]) == whole, written[:cut]
    assert of(sample, written) == whole
    rng = random.Random(len(written))
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(written) + 1), rng.randrange(1, min(9, len(written)))))
        assert of(sample, [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]) == whole


@pytest.mark.parametrize("sample", BY_ID)
def test_an_answer_that_ends_anywhere_loses_nothing_but_structure(sample: Sample) -> None:
    """What was told before the end stays; the rest is text, or arguments so far of a call that is not whole."""
    for end in range(len(sample.written)):
        found = of(sample, [sample.written[:end]])
        assert found.whole <= len(found.names) <= found.whole + 1
        for arguments in found.arguments[: found.whole]:
            json.loads(arguments)
        if not found.names and not found.reasoning and not sample.in_reasoning and sample.reasoning_format == "":
            assert found.text == sample.written[:end]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_random_text_of_marks_and_pieces_reads_the_same_however_it_is_cut(form: str) -> None:
    rng = random.Random(7)
    pieces = [
        *FORMATS[form].marks,
        *('{"name": "f", "arguments": {', '"a": 1', '"b": [', "]", "}", "}}", ", ", ": ", "[", "f(", "a=", ")", "'x'"),
        *("f[ARGS]{", "\n", " ", ";", "x", "<", "`", "```json\n", '"', "\\", "1", "-", "true", "</think>", "<think>"),
        *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "functions.f:0"),
        *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
        *('<｜DSML｜parameter name="a" string="true">', '<｜DSML｜parameter name="b" string="false">'),
        "</｜DSML｜parameter>",
    ]
    schemas = {"f": {"properties": {"a": {"type": "string"}}}}
    for _ in range(300):
        written = [rng.choice(pieces) for _ in range(rng.randrange(30))]
        whole = read(["".join(written)], formats(form, "think", schemas=schemas))
        assert read(written, formats(form, "think", schemas=schemas)) == whole, written
        assert read("".join(written), formats(form, "think", schemas=schemas)) == whole, written
        for arguments in whole.arguments[: whole.whole]:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_span_that_holds_a_model_to_a_schema_is_read_as_the_call(form: str) -> None:
    span = FORMATS[form].span("get_weather")
    assert span.begin.startswith(span.trigger)
    call = f'{span.begin}{{"city": "Paris"}}{span.end}'
    for count in (1, 2):
        found = read([call * count], formats(form))
        assert (found.names, found.text, found.whole) == (["get_weather"] * count, "", count)
        assert found.arguments == ['{"city": "Paris"}'] * count


def test_arguments_come_in_pieces_as_they_are_written() -> None:
    reader = OutputReader(formats("hermes"))
    assert reader.push('<tool_call>{"name": "f", "arguments": ') == Parts()
    assert reader.push('{"city": "Pa') == Parts(calls=(Call(0, "f", '{"city": "Pa'),))
    assert reader.push('ris", ') == Parts(calls=(Call(0, "", 'ris", '),))
    assert reader.push('"n": 1}') == Parts(calls=(Call(0, "", '"n": 1}'),))
    assert reader.push("}</tool_call>") == Parts(calls=(Call(0, whole=True),))


def test_arguments_that_break_after_they_began_leave_a_call_that_is_not_whole_and_text() -> None:
    found = read(['<tool_call>{"name": "f", "arguments": {"a": 01}} rest'], formats("hermes"))
    assert (found.names, found.arguments, found.whole) == (["f"], ['{"a": 01'], 0)
    assert found.text == "}} rest"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 01}',
        '{"a": tru}',
        '{"a": 1,}',
        '{"a" 1}',
        "{a: 1}",
        '{"a": "\n"}',
        '{"a": "\\x"}',
        '{"a": "\\u12"}',
        "[1]",
    ],
)
def test_arguments_that_are_not_json_never_make_a_whole_call(arguments: str) -> None:
    with pytest.raises(ValueError):
        if not isinstance(json.loads(arguments), dict):
            raise ValueError("arguments are an object")
    assert read([f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'], formats("hermes")).whole == 0


def test_names_and_arguments_that_cannot_be_sent_are_text() -> None:
    for written in ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',):
        assert read([written], formats("hermes")).text == written
    for written in ("[f(a='\\ud800')]", "[f(a=1e999)]", "[f(a=g())]", "[f(a=" + "(" * 300 + ")]"):
        assert read([written], formats("pythonic")).text == written


def test_text_that_never_comes_to_a_name_is_not_held_for_ever() -> None:
    reader = OutputReader(formats("mistral"))
    assert reader.push("[TOOL_CALLS]f[CALL_ID]" + "x" * 1000).text.startswith("[TOOL_CALLS]f[CALL_ID]xxx")


def test_deep_arguments_are_read_without_recursion() -> None:
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    found = read([f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>'], formats("hermes"))
    assert found.arguments == [deep] and found.whole == 1


def test_ids_of_calls_are_nine_letters_made_of_the_request_choice_and_index() -> None:
    def made(prompt: tuple[int, ...] = (1, 2), seed: int = 3, choice: int = 0, index: int = 0) -> str:
        return CallIds(prompt, seed, choice).of(Call(index))

    assert made() == made() and len(made()) == CALL_ID_CHARACTERS and made().isalnum() and made().isascii()
    others = {made((1, 3)), made(seed=4), made(choice=1), made(index=1), made((3, 0, 1)), made(seed=2**64 - 1)}
    assert len(others) == 6 and made() not in others
