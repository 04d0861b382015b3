"""`triptych chat`: one answer to a prompt, or a conversation."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.cli.ask import Shown, add_options, client_of, for_people, options_of, show
from services.common.errors import StartError

if TYPE_CHECKING:
    from triptych_client import Client, Message

HELP = "Ctrl-C stops an answer; /clear forgets the conversation; Ctrl-D or /quit leaves."


def run(argv: Sequence[str]) -> int:
    """Streams answers to standard output."""
    parser = argparse.ArgumentParser(prog="triptych chat", description=__doc__, epilog=HELP, allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="one question; without it, a conversation")
    parser.add_argument("--system", metavar="TEXT", help="system message that comes first")
    add_options(parser)
    parsed = parser.parse_args(argv)
    with asyncio.Runner() as runner:
        chat = _Chat(runner, client_of(parsed), parsed)
        try:
            if parsed.prompt is None:
                chat.converse()
            else:
                chat.answer(parsed.prompt)
        finally:
            chat.close()
    return 0


class _Chat:
    """A conversation: the messages so far. One event loop lives through all of it, and runs while an answer comes."""

    def __init__(self, runner: asyncio.Runner, connection: Client, parsed: argparse.Namespace) -> None:
        self._runner = runner
        self._client = connection
        self._parsed = parsed
        self._history: list[Message] = []
        self._tty = sys.stdin.isatty()
        self.clear()

    def clear(self) -> None:
        from triptych_client import Message

        self._history = [Message("system", self._parsed.system)] if self._parsed.system is not None else []

    def converse(self) -> None:
        """Reads turns until the end of standard input."""
        if self._tty:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  gives input() line editing and history
            print(HELP, file=sys.stderr)
        while (line := self._read()) is not None:
            if line == "/quit":
                return
            if line == "/clear":
                self.clear()
            elif line.strip():
                self._turn(line)

    def answer(self, prompt: str) -> None:
        """One turn; what was shown of an answer is remembered, also when it fails or is stopped."""
        from triptych_client import Message

        shown = Shown()
        turn = Message("user", prompt)
        try:
            self._runner.run(self._stream([*self._history, turn], shown))
        finally:
            if shown.text:
                self._history += [turn, Message("assistant", shown.text)]

    def close(self) -> None:
        self._runner.run(self._client.close())

    def _turn(self, line: str) -> None:
        try:
            self.answer(line)
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
        except StartError as error:
            print(f"triptych: error: {error}", file=sys.stderr)

    def _read(self) -> str | None:
        while True:
            try:
                return input("> " if self._tty else "")
            except EOFError:
                if self._tty:
                    print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(f"\n{HELP}", file=sys.stderr)

    async def _stream(self, messages: Sequence[Message], shown: Shown) -> None:
        from triptych_client import TriptychError

        try:
            await show(self._client.chat(messages, **options_of(self._parsed)), shown)
        except ValueError as error:  # an option that its field cannot hold
            raise StartError(str(error)) from None
        except TriptychError as error:
            if shown.text:
                print()
            raise for_people(error, self._parsed.address) from None
