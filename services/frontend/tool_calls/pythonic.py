"""Python calls in a list, as the whole answer or between Llama 4's marks: [f(a=1, b="x"), g()].

Arguments are literals (true, false and null as well); each is passed on as JSON once it is whole. A model that is held
to a schema, which says nothing about Python, writes them as one JSON object: [f(**{"a": 1})].
https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md
"""

from __future__ import annotations

import ast
import json
from typing import Any

from services.frontend.tape import MalformedError, Reading, Tape
from services.frontend.tool_calls.format import Span, ToolCallFormat
from services.frontend.tool_calls.json_value import read_value

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"
_UNPACKED = "**"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}


def _read(tape: Tape) -> Reading[None]:
    here = (yield from tape.blank()) == "["
    after_call = False
    while here or (yield from tape.until((_OPEN,), tape.text, layout=after_call)):
        after_call = here = False
        try:
            yield from tape.blank()
            yield from _read_list(tape)
            after_call = True
            yield from tape.skip(_CLOSE)
            here = (yield from tape.blank()) == "["
        except MalformedError:
            tape.give_up()


def _read_list(tape: Tape) -> Reading[None]:
    yield from tape.expect("[")
    while True:
        yield from _read_call(tape)
        yield from tape.blank()
        if (yield from tape.expect(",", "]")) == "]":
            break
    tape.drop()


def _read_call(tape: Tape) -> Reading[None]:
    yield from tape.blank()
    name = yield from _word(tape, dots=True)
    yield from tape.expect("(")
    if (yield from tape.blank()) == "*":
        yield from _read_object(tape, name)
        return
    count = 0
    while (yield from tape.blank()) != ")":
        key = yield from _word(tape)
        yield from tape.expect("=")
        value = _as_json((yield from _source(tape)))
        if count == 0:
            tape.begin(name)
        tape.argument(("{" if count == 0 else ", ") + f"{json.dumps(key)}: {value}")
        count += 1
        if (yield from tape.peek()) == ",":
            tape.take()
    yield from tape.expect(")")
    if count == 0:
        tape.begin(name)
    tape.argument("}" if count else "{}")
    tape.end()


def _read_object(tape: Tape, name: str) -> Reading[None]:
    yield from tape.expect(_UNPACKED)
    if (yield from tape.blank()) != "{":
        raise MalformedError
    tape.begin(name)
    yield from read_value(tape, tape.argument)
    tape.end()
    yield from tape.blank()
    yield from tape.expect(")")


def _span(name: str) -> Span:
    return Span(f"[{name}({_UNPACKED}", ")]", f"[{name}(")


def _word(tape: Tape, *, dots: bool = False) -> Reading[str]:
    """A name, and the blanks behind it."""
    word = ""
    while (character := (yield from tape.peek())) and (
        character.isidentifier() or character.isdigit() or (dots and character in ".-")
    ):
        word += tape.take()
    yield from tape.blank()
    if not word or word[0].isdigit():
        raise MalformedError
    return word


def _source(tape: Tape) -> Reading[str]:
    """An argument as it is written, up to the comma or bracket that ends it."""
    written = ""
    closers: list[str] = []
    quote = ""
    while True:
        character = yield from tape.peek()
        if not character:
            raise MalformedError
        if not quote and not closers and character in ",)":
            return written
        written += tape.take()
        if quote:
            if character == "\\":
                if not (yield from tape.peek()):
                    raise MalformedError
                written += tape.take()
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _BRACKETS:
            closers.append(_BRACKETS[character])
        elif closers and character == closers[-1]:
            closers.pop()


def _as_json(source: str) -> str:
    """Raises MalformedError for what is no literal."""
    try:
        value = _literal(ast.parse(source.strip(), mode="eval").body)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # halves of surrogate pairs cannot be sent
        return written
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise MalformedError from error


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=("true" | "false" | "null") as name):
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
    raise MalformedError


PYTHONIC = ToolCallFormat("pythonic", _read, (_OPEN, _CLOSE), _span)
