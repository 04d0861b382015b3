"""How much a request may hold: counted before anything of it is read, walked through or tokenized."""

from __future__ import annotations

import grpc
from google.protobuf.message import Message
from triptych.inference.v1 import inference_pb2

from services.common.errors import RequestError, invalid
from services.frontend.request import Limits


def check(request: Message, limits: Limits) -> None:
    """Raises INVALID_ARGUMENT for a prompt, a chat or a list of ids past its cap, naming field, count, limit and key.

    Costs as much as counting what the caps allow: of a longer list nothing but its length is looked at.
    """
    if isinstance(request, inference_pb2.GenerateUnaryRequest | inference_pb2.ChatUnaryRequest):
        _check_prompt(request.request, limits, "request.")
    elif isinstance(request, inference_pb2.DetokenizeRequest):
        at_most(len(request.token_ids), limits.detokenize_ids, "ids", "token_ids", "max_detokenize_ids")
    elif isinstance(request, inference_pb2.TokenizeRequest) and request.HasField("chat"):
        _check_prompt(request.chat, limits, "chat.")
    else:
        _check_prompt(request, limits, "")


def at_most(count: int, limit: int, what: str, path: str, key: str, reason: str = "INVALID_FIELD") -> None:
    """Raises INVALID_ARGUMENT where `count` is over `limit`, the frontend's configuration key `key`."""
    if count > limit:
        raise invalid(path, f"has {count} {what}, at most {limit} are taken ({key})", reason)


def check_answer(answer: Message, limits: Limits, instead: str) -> None:
    """Raises RESOURCE_EXHAUSTED for an answer that is larger than a message may be; `instead` says what to do."""
    if (size := answer.ByteSize()) > limits.message_bytes:
        raise RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "ANSWER_TOO_LARGE",
            f"the answer has {size} bytes, a message at most {limits.message_bytes} (max_message_bytes); {instead}",
        )


def _check_prompt(request: Message, limits: Limits, path: str) -> None:
    if isinstance(request, inference_pb2.GenerateRequest | inference_pb2.ChatRequest):
        resumed = len(request.options.resume.choices)
        at_most(resumed, limits.choices, "choices", f"{path}options.resume.choices", "max_choices")
    if isinstance(request, inference_pb2.ChatRequest):
        _check_chat(request, limits, path)
    elif isinstance(request, inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest):
        _check_bytes(utf8_bytes(request.text), limits, f"{path}text")


def _check_chat(chat: inference_pb2.ChatRequest, limits: Limits, path: str) -> None:
    at_most(len(chat.messages), limits.messages, "messages", f"{path}messages", "max_messages")
    parts = sum(len(message.content) + len(message.tool_calls) for message in chat.messages)
    at_most(parts, limits.content_parts, "content parts and tool calls", f"{path}messages", "max_content_parts")
    at_most(len(chat.tools), limits.tools, "tools", f"{path}tools", "max_tools")
    beside = chat.template_args.ByteSize() + sum(_tool_bytes(tool) for tool in chat.tools)
    _check_bytes(beside + sum(_message_bytes(message) for message in chat.messages), limits, f"{path}messages")


def _message_bytes(message: inference_pb2.ChatMessage) -> int:
    said = sum(utf8_bytes(part.text) for part in message.content)
    named = utf8_bytes(message.name) + utf8_bytes(message.reasoning) + utf8_bytes(message.tool_call_id)
    called = sum(
        utf8_bytes(call.id) + utf8_bytes(call.name) + utf8_bytes(call.arguments) for call in message.tool_calls
    )
    return said + named + called


def _tool_bytes(tool: inference_pb2.Tool) -> int:
    return utf8_bytes(tool.name) + utf8_bytes(tool.description) + utf8_bytes(tool.parameters_json_schema)


def _check_bytes(count: int, limits: Limits, path: str) -> None:
    at_most(count, limits.prompt_bytes, "bytes of text", path, "max_prompt_bytes", "PROMPT_TOO_LONG")


def utf8_bytes(text: str) -> int:
    """Length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
