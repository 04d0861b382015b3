"""The blocking client is the other one, call by call: the same arguments of the same types."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from triptych_client import Client, Stream, SyncClient, SyncStream

CALLS = [name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")]


def arguments(method: Any) -> dict[str, tuple[Any, Any, Any]]:
    return {
        name: (parameter.kind, parameter.annotation, parameter.default)
        for name, parameter in inspect.signature(method).parameters.items()
    }


@pytest.mark.parametrize("name", [*CALLS, "__init__"])
def test_both_clients_take_the_same_arguments(name: str) -> None:
    assert arguments(getattr(SyncClient, name)) == arguments(getattr(Client, name))


@pytest.mark.parametrize("name", CALLS)
def test_both_clients_give_the_same_and_streams_of_their_own(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(kind, name)).return_annotation for kind in (Client, SyncClient))
    assert ours == {Stream.__name__: SyncStream.__name__}.get(theirs, theirs)


def test_neither_client_has_a_call_that_the_other_lacks() -> None:
    assert [name for name, _ in inspect.getmembers(SyncClient, inspect.isfunction) if not name.startswith("_")] == CALLS
    assert {"generate", "generate_unary", "chat", "chat_unary", "tokenize", "close"} <= set(CALLS)
