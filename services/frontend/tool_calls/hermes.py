"""Hermes and Qwen: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, between texts.

https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import json

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.format import Span, ToolCallFormat
from services.frontend.tool_calls.json_value import read_call

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read(tape: Tape) -> Reading[None]:
    after_call = False
    while (yield from tape.until((_OPEN,), tape.text, layout=after_call)):
        after_call = False
        try:
            yield from tape.blank()
            yield from read_call(tape)
            after_call = True
            yield from tape.skip(_CLOSE)
        except MalformedError:
            tape.give_up()


def _span(name: str) -> Span:
    return Span(f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{_CLOSE}", _OPEN)


HERMES = ToolCallFormat("hermes", _read, (_OPEN, _CLOSE), _span)
