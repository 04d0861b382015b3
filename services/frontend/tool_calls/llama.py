"""Llama 3: {"name": "f", "parameters": {...}} as the whole answer, or after <|python_tag|>; several with ; between.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
"""

from __future__ import annotations

import json

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.format import Span, ToolCallFormat
from services.frontend.tool_calls.json_value import read_call

_TAG = "<|python_tag|>"


def _read(tape: Tape) -> Reading[None]:
    here = (yield from tape.blank()) == "{"
    after_call = False
    while here or (yield from tape.until((_TAG,), tape.text, layout=after_call)):
        after_call = here = False
        try:
            yield from tape.blank()
            yield from read_call(tape)
            after_call = True
            here = yield from _another(tape)
        except MalformedError:
            tape.give_up()


def _another(tape: Tape) -> Reading[bool]:
    """Whether one more call follows without a tag. Raises MalformedError after a separator that separates nothing."""
    if (yield from tape.blank()) == ";":
        tape.take()
        if (yield from tape.blank()) != "{":
            raise MalformedError
    return (yield from tape.peek()) == "{"


def _span(name: str) -> Span:
    return Span(f'{{"name": {json.dumps(name)}, "parameters": ', "}", '{"name": "')


LLAMA3_JSON = ToolCallFormat("llama3_json", _read, (_TAG,), _span)
