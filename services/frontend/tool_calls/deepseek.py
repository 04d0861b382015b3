"""DeepSeek V3 and R1, whose arguments are fenced, and V3.1, whose are not; both are read whichever is written.

    <calls begin><call begin>function<sep>f\\n```json\\n{...}\\n```<call end>...<calls end>      V3, R1
    <calls begin><call begin>f<sep>{...}<call end>...<calls end>                              V3.1

https://huggingface.co/deepseek-ai/DeepSeek-V3-0324, https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall
"""

from __future__ import annotations

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.format import Span, ToolCallFormat
from services.frontend.tool_calls.json_value import read_value

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
_FENCE = "```"
_MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP)


def _read(tape: Tape) -> Reading[None]:
    after_call = False
    while (yield from tape.until((CALLS_BEGIN,), tape.text, layout=after_call)):
        after_call = False
        try:
            yield from _read_calls(tape)
            after_call = True
        except MalformedError:
            tape.give_up()


def _read_calls(tape: Tape) -> Reading[None]:
    count = 0
    while (yield from tape.blank()):  # some end without saying that the calls do
        if (yield from tape.expect(CALL_BEGIN, CALLS_END)) == CALLS_END:
            break
        yield from _read_one(tape)
        count += 1
    if not count:
        raise MalformedError
    tape.drop()


def _read_one(tape: Tape) -> Reading[None]:
    name = yield from tape.name(SEP)
    fenced = (yield from tape.peek()) != "{"
    if fenced:
        name = yield from tape.name(f"\n{_FENCE}json")
    if (yield from tape.blank()) != "{":
        raise MalformedError
    tape.begin(name)
    yield from read_value(tape, tape.argument)
    tape.end()
    yield from tape.blank()
    if fenced:
        yield from tape.expect(_FENCE)
        yield from tape.blank()
    if (yield from tape.peek()):
        yield from tape.expect(CALL_END)
    tape.drop()


def _fenced_span(name: str) -> Span:
    begin = f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}{name}\n{_FENCE}json\n"
    return Span(begin, f"\n{_FENCE}{CALL_END}{CALLS_END}", CALLS_BEGIN)


def _span(name: str) -> Span:
    return Span(f"{CALLS_BEGIN}{CALL_BEGIN}{name}{SEP}", f"{CALL_END}{CALLS_END}", CALLS_BEGIN)


DEEPSEEK_V3 = ToolCallFormat("deepseek_v3", _read, _MARKS, _fenced_span)
DEEPSEEK_V31 = ToolCallFormat("deepseek_v31", _read, _MARKS, _span)
