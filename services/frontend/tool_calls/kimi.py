"""Kimi K2: a section of calls, each with an id that holds its name and number, and JSON.

    <section begin><call begin>functions.f:0<argument begin>{...}<call end>...<section end>

https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
"""

from __future__ import annotations

import re

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.format import Span, ToolCallFormat
from services.frontend.tool_calls.json_value import read_value

SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_BEGIN, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_MARKS = (SECTION_BEGIN, _SECTION_END, _CALL_BEGIN, _CALL_END, _ARGUMENTS)
_ID = re.compile(r"(?:functions\.)?(?P<name>[^:]+)(?::\d+)?")


def _read(tape: Tape) -> Reading[None]:
    after_call = False
    while (yield from tape.until((SECTION_BEGIN,), tape.text, layout=after_call)):
        after_call = False
        try:
            yield from _read_section(tape)
            after_call = True
        except MalformedError:
            tape.give_up()


def _read_section(tape: Tape) -> Reading[None]:
    count = 0
    while (yield from tape.blank()):  # some end without saying that the section does
        if (yield from tape.expect(_CALL_BEGIN, _SECTION_END)) == _SECTION_END:
            break
        yield from _read_call(tape)
        count += 1
    if not count:
        raise MalformedError
    tape.drop()


def _read_call(tape: Tape) -> Reading[None]:
    found = _ID.fullmatch((yield from tape.name(_ARGUMENTS)))
    if found is None or (yield from tape.blank()) != "{":
        raise MalformedError
    tape.begin(found["name"])
    yield from read_value(tape, tape.argument)
    tape.end()
    if (yield from tape.blank()):
        yield from tape.expect(_CALL_END)
    tape.drop()


def _span(name: str) -> Span:
    begin = f"{SECTION_BEGIN}{_CALL_BEGIN}functions.{name}:0{_ARGUMENTS}"
    return Span(begin, f"{_CALL_END}{_SECTION_END}", SECTION_BEGIN)


KIMI_K2 = ToolCallFormat("kimi_k2", _read, _MARKS, _span)
