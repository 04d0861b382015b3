"""DeepSeek V3.2 and V4: a block of tags under DeepSeek's own mark, each of whose parameters says whether it is text.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="true">value</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>                    "tool_calls" for "function_calls" since V4

https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/encoding_dsv32.py
"""

from __future__ import annotations

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.bare_arguments import STRING, Arguments
from services.frontend.tool_calls.format import Span, ToolCallFormat

MARK = "｜DSML｜"
_BLOCKS = ("function_calls", "tool_calls")
_OPENS = tuple(f"<{MARK}{block}>" for block in _BLOCKS)
_INVOKE, _INVOKE_END = f'<{MARK}invoke name="', f"</{MARK}invoke>"
_PARAMETER, _PARAMETER_END = f'<{MARK}parameter name="', f"</{MARK}parameter>"
_TEXT, _JSON = 'true">', 'false">'
_NO_TEXT = frozenset({"boolean", "integer", "number", "object", "array", "null"})


def _read(tape: Tape) -> Reading[None]:
    after_call = False
    while mark := (yield from tape.until(_OPENS, tape.text, layout=after_call)):
        after_call = False
        try:
            yield from _read_block(tape, mark.replace("<", "</"))
            after_call = True
        except MalformedError:
            tape.give_up()


def _read_block(tape: Tape, end: str) -> Reading[None]:
    count = 0
    while (yield from tape.blank()):  # some end without saying that the block does
        if (yield from tape.expect(_INVOKE, end)) == end:
            break
        yield from _read_call(tape)
        count += 1
    if not count:
        raise MalformedError
    tape.drop()


def _read_call(tape: Tape) -> Reading[None]:
    arguments = Arguments(tape, (yield from tape.name('">')))
    if (yield from tape.blank()) == "{":
        yield from arguments.read_json()
        yield from tape.skip(_INVOKE_END)
        return
    while (yield from tape.expect(_PARAMETER, _INVOKE_END)) == _PARAMETER:
        key = yield from tape.name('" string="')
        is_text = (yield from tape.expect(_TEXT, _JSON)) == _TEXT
        yield from arguments.read(key, _PARAMETER_END, types=frozenset({STRING}) if is_text else _NO_TEXT)
        yield from tape.blank()
    arguments.end()


def _span(name: str) -> Span:
    return Span(f'{_OPENS[0]}\n{_INVOKE}{name}">\n', f"\n{_INVOKE_END}\n</{MARK}{_BLOCKS[0]}>", _OPENS[0])


DEEPSEEK_V32 = ToolCallFormat("deepseek_v32", _read, (MARK,), _span)
