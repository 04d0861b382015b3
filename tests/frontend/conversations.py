"""Conversations as own types, for tests below the door."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.frontend.chat import ChatEncoder
from services.frontend.conversation import Conversation, Turn


def talk(*turns: tuple[str, str], **fields: Any) -> Conversation:
    """Of (role, text)."""
    return Conversation(tuple(Turn(role, text) for role, text in turns), **fields)


def ids_of(chat: ChatEncoder, turns: Iterable[tuple[str, str]]) -> tuple[int, ...]:
    """Prompt ids of (role, text), the template run in this process."""
    return chat.ids(chat.render(talk(*turns), "messages"))
