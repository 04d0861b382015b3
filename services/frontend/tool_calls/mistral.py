"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], and since tokenizer 11 [TOOL_CALLS]f[ARGS]{...}.

The newer one may have a [CALL_ID] between name and arguments, or no [ARGS]. Both are read whichever is written.
https://docs.mistral.ai/capabilities/function_calling
"""

from __future__ import annotations

import json

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.format import Span, ToolCallFormat
from services.frontend.tool_calls.json_value import read_call, read_value

_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKS = (_CALLS, _CALL_ID, _ARGS)


def _read(tape: Tape) -> Reading[None]:
    after_call = False
    while (yield from tape.until((_CALLS,), tape.text, layout=after_call)):
        after_call = False
        try:
            if (yield from tape.blank()) == "[":
                yield from _read_array(tape)
            else:
                yield from _read_named(tape)
            after_call = True
        except MalformedError:
            tape.give_up()


def _read_array(tape: Tape) -> Reading[None]:
    yield from tape.expect("[")
    while True:
        yield from tape.blank()
        yield from read_call(tape)
        yield from tape.blank()
        if (yield from tape.expect(",", "]")) == "]":
            break
    tape.drop()


def _read_named(tape: Tape) -> Reading[None]:
    name = ""
    while (character := (yield from tape.peek())) and (character.isalnum() or character in "_-."):
        name += tape.take()
    if character == "[" and (yield from tape.expect(_CALL_ID, _ARGS)) == _CALL_ID:
        yield from tape.name(_ARGS)
    if (yield from tape.blank()) != "{":
        raise MalformedError
    tape.begin(name)
    yield from read_value(tape, tape.argument)
    tape.end()


def _span_of_array(name: str) -> Span:
    return Span(f'{_CALLS} [{{"name": {json.dumps(name)}, "arguments": ', "}]", _CALLS)


def _span_of_named(name: str) -> Span:
    return Span(f"{_CALLS}{name}{_ARGS}", "", _CALLS)


MISTRAL = ToolCallFormat("mistral", _read, _MARKS, _span_of_array)
MISTRAL_V11 = ToolCallFormat("mistral_v11", _read, _MARKS, _span_of_named)
