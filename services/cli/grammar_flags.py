"""Flags that hold an answer to a language: `--json`, `--json-schema FILE`, `--regex`, `--lark FILE`, `--choice`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.errors import StartError

if TYPE_CHECKING:
    from triptych.inference.v1 import generation_pb2

NAMES = ("json", "json_schema", "regex", "lark", "choice")


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """At most one of the kinds is given."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--json", action="store_true", help="answer with a JSON object")
    one.add_argument("--json-schema", metavar="FILE", help="answer with JSON by this schema; - reads standard input")
    one.add_argument("--regex", metavar="PATTERN", help="answer with a text that it matches as a whole")
    one.add_argument("--lark", metavar="FILE", help="answer with a text of this grammar, llguidance's dialect of Lark")
    one.add_argument("--choice", action="append", metavar="TEXT", help="answer with this text, or another --choice")
    parser.add_argument(
        "--forced-tokens", action="store_true", help="beside one of these: append ids without an alternative undrawn"
    )


def grammar_of(parsed: argparse.Namespace) -> generation_pb2.Grammar | None:
    """None where no kind was given. Raises StartError for a file that cannot be read, a flag that would do nothing."""
    from triptych_client import grammars

    forced = parsed.forced_tokens
    if parsed.json:
        return grammars.json_object(forced_tokens=forced)
    if parsed.json_schema is not None:
        return grammars.json_schema(_read(parsed.json_schema), forced_tokens=forced)
    if parsed.regex is not None:
        return grammars.regex(parsed.regex, forced_tokens=forced)
    if parsed.lark is not None:
        return grammars.lark(_read(parsed.lark), forced_tokens=forced)
    if parsed.choice:
        return grammars.choices(*parsed.choice, forced_tokens=forced)
    if forced:
        raise StartError("--forced-tokens stands beside --json, --json-schema, --regex, --lark or --choice")
    return None


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read {file}: {error}") from None
