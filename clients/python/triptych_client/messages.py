"""A conversation, as `chat` takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych.inference.v1 import inference_pb2

from triptych_client.results import ToolCall

ROLES = {
    "system": inference_pb2.ROLE_SYSTEM,
    "developer": inference_pb2.ROLE_DEVELOPER,
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
    "tool": inference_pb2.ROLE_TOOL,
}


@dataclass(frozen=True)
class Message:
    """One turn: who speaks ("system", "developer", "user", "assistant" or "tool") and the text.

    `reasoning` and `tool_calls` are an assistant's, `tool_call_id` a tool's: the call it answers.
    """

    role: str
    content: str = ""
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


MessageLike = Message | Mapping[str, Any] | inference_pb2.ChatMessage
"""A Message, the same as a mapping ({"role": "user", "content": "Hi"}), or the contract's own message."""

_KEYS = frozenset(Message.__dataclass_fields__)


def to_proto(messages: str | Iterable[MessageLike]) -> list[inference_pb2.ChatMessage]:
    """One string is one user message. Raises ValueError for an unknown role or key."""
    if isinstance(messages, str):
        messages = [Message("user", messages)]
    return [_one(message) for message in messages]


def _one(message: MessageLike) -> inference_pb2.ChatMessage:
    if isinstance(message, inference_pb2.ChatMessage):
        return message
    turn = message if isinstance(message, Message) else _from_mapping(message)
    if turn.role not in ROLES:
        raise ValueError(f"role {turn.role!r} is not one of {', '.join(ROLES)}")
    return inference_pb2.ChatMessage(
        role=ROLES[turn.role],
        content=[inference_pb2.ContentPart(text=turn.content)],
        name=turn.name,
        reasoning=turn.reasoning,
        tool_calls=[
            inference_pb2.ToolCall(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in turn.tool_calls
        ],
        tool_call_id=turn.tool_call_id,
    )


def _from_mapping(message: Any) -> Message:
    keys = set(message) if isinstance(message, Mapping) else set()
    if not keys >= {"role"} or not keys & {"content", "tool_calls"} or not keys <= _KEYS:
        shown = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise ValueError(f"a message has the keys role and content, or others of Message, not {shown}")
    return Message(**message)
