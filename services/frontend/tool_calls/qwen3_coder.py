"""Qwen3-Coder, and those that write like it: a tag a function, one an argument, around what is neither quoted nor JSON.

    <tool_call>\\n<function=f>\\n<parameter=a>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>

The line breaks next to a value are layout. The outer tag may be missing: the model leaves it out now and then.
https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct/blob/main/chat_template.jinja
"""

from __future__ import annotations

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.bare_arguments import Arguments
from services.frontend.tool_calls.format import Span, ToolCallFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read(tape: Tape) -> Reading[None]:
    after_call = False
    while mark := (yield from tape.until((_OPEN, _FUNCTION), tape.text, layout=after_call)):
        after_call = False
        try:
            if mark == _OPEN:
                yield from tape.blank()
                yield from tape.expect(_FUNCTION)
            yield from _read_function(tape)
            after_call = True
            yield from tape.skip(_CLOSE)
        except MalformedError:
            tape.give_up()


def _read_function(tape: Tape) -> Reading[None]:
    arguments = Arguments(tape, (yield from tape.name(">")))
    if (yield from tape.blank()) == "{":
        yield from arguments.read_json()
        yield from tape.skip(_FUNCTION_END)
        return
    while (yield from tape.expect(_PARAMETER, _FUNCTION_END)) == _PARAMETER:
        key = yield from tape.name(">")
        if (yield from tape.peek()) == "\n":
            tape.take()
        yield from arguments.read(key, f"\n{_PARAMETER_END}", _PARAMETER_END)
        yield from tape.blank()
    arguments.end()


def _span(name: str) -> Span:
    return Span(f"{_OPEN}\n{_FUNCTION}{name}>\n", f"\n{_FUNCTION_END}\n{_CLOSE}", _OPEN)


QWEN3_CODER = ToolCallFormat("qwen3_coder", _read, (_OPEN, _CLOSE), _span)
