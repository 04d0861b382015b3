"""JSON as a model writes it: checked character by character (RFC 8259), so that a value is passed on as it comes."""

from __future__ import annotations

import json
import re

from services.frontend.tape import MalformedError, Put, Reading, Tape

_WORD = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
_WORD_CHARACTERS = frozenset("+-.0123456789eEtrufalsn")
_ESCAPES = frozenset('"\\/bfnrt')
_NOT_PLAIN = frozenset(map(chr, range(ord(" ")))) | {'"', "\\"}
"""Characters that are not themselves in a string."""
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")


def read_value(tape: Tape, put: Put) -> Reading[None]:
    """Takes one value, without blanks around it, and gives its characters to `put`. Raises MalformedError."""
    closers: list[str] = []
    due = "value"
    while True:
        character = yield from tape.blank(put if closers else None)
        if due in ("value", "item"):
            due = yield from _value(tape, put, character, closers, may_close=due == "item")
        elif due in ("key", "member"):
            if character == "}" and due == "member":
                tape.take(put)
                closers.pop()
                due = "more"
            else:
                yield from read_string(tape, put)
                if (yield from tape.blank(put)) != ":":
                    raise MalformedError
                tape.take(put)
                due = "value"
        elif character == ",":
            tape.take(put)
            due = "key" if closers[-1] == "}" else "value"
        elif character and character == closers[-1]:
            tape.take(put)
            closers.pop()
        else:
            raise MalformedError
        if not closers:
            return


def read_string(tape: Tape, put: Put | None = None) -> Reading[str]:
    """Takes a string, and returns what it stands for. Raises MalformedError."""
    if (yield from tape.peek()) != '"':
        raise MalformedError
    written = [tape.take(put)]

    def go_on(text: str) -> None:
        written.append(text)
        tape.take_text(text, put or _ignore)

    while True:
        character = yield from tape.peek((_NOT_PLAIN, go_on))
        if character < " ":  # the end too
            raise MalformedError
        written.append(tape.take(put))
        if character == '"':
            return str(json.loads("".join(written)))
        if character == "\\":
            yield from _escape(tape, put, written)


def read_call(tape: Tape) -> Reading[None]:
    """Takes {"name": "f", "arguments": {...}}, "parameters" for "arguments", in either order; "id" and "type" beside.

    The call begins as soon as its name and the first character of its arguments are known; without any they are {}.
    Raises MalformedError; what comes after the call has begun is then not taken back.
    """
    yield from tape.expect("{")
    name = ""
    waiting: list[str] | None = None  # arguments that came before the name
    begun = False
    while True:
        yield from tape.blank()
        key = yield from read_string(tape)
        if (yield from tape.blank()) != ":":
            raise MalformedError
        tape.take()
        first = yield from tape.blank()
        if key == "name" and not name:
            name = yield from read_string(tape)
            if waiting is not None:
                begun = _begin(tape, name, "".join(waiting))
        elif key in _ARGUMENTS and not begun and waiting is None:
            if first != "{":
                raise MalformedError
            if name:
                begun = _begin(tape, name, "")
                yield from read_value(tape, tape.argument)
            else:
                waiting = []
                yield from read_value(tape, waiting.append)
        elif key in _OTHERS:
            yield from read_value(tape, _ignore)
        else:
            raise MalformedError
        if (yield from tape.blank()) != ",":
            break
        tape.take()
    yield from tape.expect("}")
    if not begun:
        _begin(tape, name, "{}")
    tape.end()


def _begin(tape: Tape, name: str, arguments: str) -> bool:
    tape.begin(name)
    if arguments:
        tape.argument(arguments)
    return True


def _ignore(_: str) -> None:
    pass


def _value(tape: Tape, put: Put, character: str, closers: list[str], *, may_close: bool) -> Reading[str]:
    """Takes a value, or the start of one that holds others; what is due after it."""
    if may_close and character == "]":
        tape.take(put)
        closers.pop()
        return "more"
    if character in ("{", "["):
        tape.take(put)
        closers.append(_CLOSERS[character])
        return "member" if character == "{" else "item"
    if character == '"':
        yield from read_string(tape, put)
        return "more"
    word = ""
    while (yield from tape.peek()) in _WORD_CHARACTERS:
        word += tape.take(put)
    if not _WORD.fullmatch(word):
        raise MalformedError
    return "more"


def _escape(tape: Tape, put: Put | None, written: list[str]) -> Reading[None]:
    character = yield from tape.peek()
    if character == "u":
        written.append(tape.take(put))
        for _ in range(4):
            if (yield from tape.peek()) not in _HEX:
                raise MalformedError
            written.append(tape.take(put))
    elif character in _ESCAPES:
        written.append(tape.take(put))
    else:
        raise MalformedError
