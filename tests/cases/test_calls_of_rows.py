"""Which calls each row of the case table is provoked on: text, sampling and stream rows, streamed and unary.

A test says so by its parameter: `rpc` for calls of the public API, `stream` for Generate of the adapter for gateways.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.rows import LATER, ROWS
from tests.support.calls import RPCS
from tests.support.case_table import row_of

TRANSPORT = {
    "G4": "pings belong to connections, not to calls",
    "G7": "servers that come and go are the channel's",
}
"""Rows that are not about a call."""

CHAT_ALONE = {"T9": "templates make control ids", "T10": "templates refuse"}
TEXT_PROMPTS_ALONE = {
    "T1": "a chat's prompt ends in what the template writes",
    "T3": "what tells the broken request from its neighbours is its prompt",
    "T4": "the words that the text goes on from are the prompt",
}
OFF_THE_ADAPTER = {
    "T1": "it answers with ids alone",
    "T2": "it answers with ids alone",
    "T4": "it answers with ids alone",
    "T9": "it takes no chats",
    "T10": "it takes no chats",
}
"""Rows whose field the adapter's contract does not have."""

DUE = sorted(row for row in ROWS if (row[0] in "TSG" or row == "X1") and row not in LATER and row not in TRANSPORT)


def parameters(test: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a test is run with, of parameters given by one name."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize" and isinstance(mark.args[0], str):
            yield from ((mark.args[0], value) for value in mark.args[1])


@pytest.fixture(scope="module")
def calls() -> dict[str, set[str]]:
    """The calls of each row, as the tests beside this one have them."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in Path(__file__).parent.glob("test_*.py"):
        for name, test in vars(importlib.import_module(f"tests.cases.{file.stem}")).items():
            if (row := row_of(name)) is None:
                continue
            for parameter, value in parameters(test):
                if parameter == "rpc":
                    found[row].add(value)
                elif parameter == "stream":
                    found[row].add(f"adapter {'streamed' if value else 'unary'}")
    return found


@pytest.mark.parametrize("row", DUE)
def test_a_row_is_provoked_on_every_call_that_can_have_it(calls: dict[str, set[str]], row: str) -> None:
    due = set(RPCS)
    if row in CHAT_ALONE:
        due -= set(RPCS[:2])
    if row in TEXT_PROMPTS_ALONE:
        due -= set(RPCS[2:])
    if row not in OFF_THE_ADAPTER:
        due |= {"adapter streamed", "adapter unary"}
    assert calls[row] >= due, f"{row} is not provoked on {sorted(due - calls[row])}"


def test_exceptions_are_of_rows_that_there_are() -> None:
    named = {*TRANSPORT, *CHAT_ALONE, *TEXT_PROMPTS_ALONE, *OFF_THE_ADAPTER}
    assert named <= set(ROWS) and not set(DUE) & set(TRANSPORT)
