"""GLM-4.5 and later: a tag a call, and one each for a key and for its value, which is text or JSON.

    <tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>

https://huggingface.co/zai-org/GLM-4.5/blob/main/chat_template.jinja
"""

from __future__ import annotations

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.bare_arguments import Arguments
from services.frontend.tool_calls.format import Span, ToolCallFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


def _read(tape: Tape) -> Reading[None]:
    after_call = False
    while (yield from tape.until((_OPEN,), tape.text, layout=after_call)):
        after_call = False
        try:
            yield from _read_call(tape)
            after_call = True
        except MalformedError:
            tape.give_up()


def _read_call(tape: Tape) -> Reading[None]:
    yield from tape.blank()
    arguments = Arguments(tape, (yield from _name(tape)))
    if (yield from tape.blank()) == "{":
        yield from arguments.read_json()
        yield from tape.skip(_CLOSE)
        return
    while (yield from tape.expect(_KEY, _CLOSE)) == _KEY:
        key = yield from tape.name(_KEY_END)
        yield from tape.blank()
        yield from tape.expect(_VALUE)
        yield from arguments.read(key, _VALUE_END)
        yield from tape.blank()
    arguments.end()


def _name(tape: Tape) -> Reading[str]:
    name = ""
    while (character := (yield from tape.peek())) and (character.isalnum() or character in "_-."):
        name += tape.take()
    return name


def _span(name: str) -> Span:
    return Span(f"{_OPEN}{name}\n", f"\n{_CLOSE}", _OPEN)


GLM45 = ToolCallFormat("glm45", _read, (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END), _span)
