"""A gateway's `grammar`: Lark as our own API takes it, or EBNF as llama.cpp and XGrammar write it, made Lark here."""

from __future__ import annotations

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from services.common.errors import RequestError, invalid

MAX_EBNF_BYTES = 16 * 1024
"""Of this size it takes up to 80 ms to convert, in a thread."""

WORK = 8
"""A byte of it takes as long as so many of a text take to encode."""


def to_lark(text: str, path: str) -> str:
    """Raises INVALID_ARGUMENT for EBNF that is too long or that is none."""
    if not text.strip():
        raise invalid(path, "is empty; Lark or EBNF is needed")
    if is_lark_syntax(text):
        return text
    if (size := len(text.encode())) > MAX_EBNF_BYTES:
        raise invalid(path, f"has {size} bytes of EBNF, at most {MAX_EBNF_BYTES} are converted; send it as Lark")
    try:
        return gbnf_to_lark(text)
    except RecursionError as error:
        raise _none(path, "its parentheses are nested too deep") from error
    except Exception as error:  # llguidance raises bare Exception for a rule that is not there
        raise _none(path, str(error)) from error


def _none(path: str, why: str) -> RequestError:
    return invalid(path, f"is neither Lark (with a rule `start`) nor EBNF (with a rule `root`): {why}")
