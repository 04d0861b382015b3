"""A conversation, as `chat` takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych.inference.v1 import inference_pb2

ROLES = {
    "system": inference_pb2.ROLE_SYSTEM,
    "developer": inference_pb2.ROLE_DEVELOPER,
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
    "tool": inference_pb2.ROLE_TOOL,
}


@dataclass(frozen=True)
class Message:
    """One turn: who speaks ("system", "developer", "user", "assistant" or "tool") and the text."""

    role: str
    content: str


MessageLike = Message | Mapping[str, str] | inference_pb2.ChatMessage
"""A Message, the same as a mapping ({"role": "user", "content": "Hi"}), or the contract's own message."""


def to_proto(messages: str | Iterable[MessageLike]) -> list[inference_pb2.ChatMessage]:
    """One string is one user message. Raises ValueError for an unknown role or key."""
    if isinstance(messages, str):
        messages = [Message("user", messages)]
    return [_one(message) for message in messages]


def _one(message: MessageLike) -> inference_pb2.ChatMessage:
    if isinstance(message, inference_pb2.ChatMessage):
        return message
    role, content = _parts(message)
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
    return inference_pb2.ChatMessage(role=ROLES[role], content=[inference_pb2.ContentPart(text=content)])


def _parts(message: Any) -> tuple[str, str]:
    if isinstance(message, Message):
        return message.role, message.content
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        shown = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise ValueError(f"a message has the keys role and content, not {shown}")
    return message["role"], message["content"]
