"""The public API's door: which fields are served, of messages and of their values."""

from __future__ import annotations

from triptych.inference.v1 import inference_pb2

from services.common.contract import SAMPLING, SERVED_SAMPLING, Door
from services.common.errors import invalid, unserved

_PACKAGE = "triptych.inference.v1."

_SERVED = {
    "GenerateRequest": {"model", "text", "token_ids", "add_special_tokens", "options"},
    "GenerateUnaryRequest": {"request"},
    "TokenIds": {"ids"},
    "ChatRequest": {"model", "messages", "options"},
    "ChatUnaryRequest": {"request"},
    "ChatMessage": {"role", "content"},
    "ContentPart": {"text"},
    "Options": {
        "sampling",
        "seed",
        "n",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_string",
        "logprobs",
        "prompt_logprobs",
        "echo",
        "skip_special_tokens",
        "min_delta_tokens",
        "min_delta_interval_ms",
        "priority",
        "cache_salt",
        "label",
        "resume",
    },
    "Resume": {"seed", "fingerprint", "choices"},
    "Resume.Received": {"index", "token_ids", "text_bytes", "finished", "cumulative_logprob"},
    "TokenizeRequest": {"model", "text", "chat", "add_special_tokens"},
    "DetokenizeRequest": {"model", "token_ids", "skip_special_tokens"},
    "GetModelRequest": {"model"},
    "ListModelsRequest": set[str](),
}

DOOR = Door({SAMPLING: SERVED_SAMPLING} | {_PACKAGE + name: frozenset(fields) for name, fields in _SERVED.items()})

_ROLES: dict[int, str] = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_DEVELOPER: "developer",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
}


def read_messages(chat: inference_pb2.ChatRequest, path: str) -> tuple[tuple[str, str], ...]:
    """(role, text) of each message, its parts joined. Raises RequestError; `path` is of the field, for messages."""
    if not chat.messages:
        raise invalid(path, "is empty; a chat needs one message or more")
    return tuple(
        (_role(message.role, f"{path}[{i}].role"), _text(message, f"{path}[{i}].content"))
        for i, message in enumerate(chat.messages)
    )


def _role(role: int, path: str) -> str:
    if role in _ROLES:
        return _ROLES[role]
    if role == inference_pb2.ROLE_TOOL:
        raise unserved(path, "ROLE_TOOL is not served yet")
    raise invalid(path, f"is {role}; one of {', '.join(sorted(_ROLES.values()))} is needed")


def _text(message: inference_pb2.ChatMessage, path: str) -> str:
    for i, part in enumerate(message.content):
        if part.WhichOneof("part") is None:
            raise invalid(f"{path}[{i}]", "holds neither text nor media")
    return "".join(part.text for part in message.content)
