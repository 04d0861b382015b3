"""Chat requests from the wire to own types. Every refusal names its field."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from google.protobuf import struct_pb2
from triptych.inference.v1 import inference_pb2

from services.common.errors import invalid, unserved
from services.frontend.conversation import Calling, Conversation, PastCall, Tool, ToolUse, Turn
from services.frontend.request import Limits
from services.frontend.sizes import at_most, utf8_bytes

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ROLES: dict[int, str] = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_DEVELOPER: "developer",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
    inference_pb2.ROLE_TOOL: "tool",
}
_MODES = {
    inference_pb2.ToolChoice.MODE_AUTO: Calling.AUTO,
    inference_pb2.ToolChoice.MODE_NONE: Calling.NONE,
    inference_pb2.ToolChoice.MODE_REQUIRED: Calling.REQUIRED,
}


def read_chat(chat: inference_pb2.ChatRequest, limits: Limits, path: str) -> Conversation:
    """Raises RequestError. `path` is where the request stands in the message that came, "" or "request."."""
    turns = _read_turns(chat, f"{path}messages")
    if chat.continue_final_message:
        _check_continued(turns[-1], f"{path}messages[{len(turns) - 1}]")
    return Conversation(
        turns=turns,
        tool_use=_read_tool_use(chat, limits, path),
        template_args={
            key: _plain(value, f"{path}template_args[{key!r}]") for key, value in chat.template_args.fields.items()
        },
        continues=chat.continue_final_message,
    )


def _read_turns(chat: inference_pb2.ChatRequest, path: str) -> tuple[Turn, ...]:
    if not chat.messages:
        raise invalid(path, "is empty; a chat needs one message or more")
    turns = []
    call_ids: set[str] = set()
    for i, message in enumerate(chat.messages):
        turn = _read_turn(message, f"{path}[{i}]")
        call_ids.update(call.id for call in turn.calls)
        if turn.role == "tool" and turn.call_id not in call_ids:
            raise invalid(f"{path}[{i}].tool_call_id", "is the id of no call of an earlier message")
        turns.append(turn)
    return tuple(turns)


def _read_turn(message: inference_pb2.ChatMessage, path: str) -> Turn:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"{path}.role", f"is {message.role}; one of {', '.join(sorted(_ROLES.values()))} is needed")
    if role != "assistant":
        for name in ("reasoning", "tool_calls"):
            if getattr(message, name):
                raise invalid(f"{path}.{name}", f"is for the assistant's messages, this is the {role}'s")
    if role == "tool" and not message.tool_call_id:
        raise invalid(f"{path}.tool_call_id", "is empty; name the call that this message answers")
    if role != "tool" and message.tool_call_id:
        raise invalid(f"{path}.tool_call_id", f"is for a tool's messages, this is the {role}'s")
    return Turn(
        role=role,
        text=_text(message, f"{path}.content"),
        name=message.name,
        reasoning=message.reasoning,
        calls=tuple(_read_call(call, i, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)),
        call_id=message.tool_call_id,
    )


def _text(message: inference_pb2.ChatMessage, path: str) -> str:
    for i, part in enumerate(message.content):
        kind = part.WhichOneof("part")
        if kind is None:
            raise invalid(f"{path}[{i}]", "holds neither text nor media")
        if kind == "media":
            shown = f"{part.media.mime_type[:100]!r} " if part.media.mime_type else ""
            raise unserved(f"{path}[{i}].media", f"{shown}is not served, this model takes text alone")
    return "".join(part.text for part in message.content)


def _read_call(call: inference_pb2.ToolCall, place: int, path: str) -> PastCall:
    if call.index not in (0, place):
        raise invalid(f"{path}.index", f"is {call.index}, its place is {place}; calls stand in order")
    if not call.name:
        raise invalid(f"{path}.name", "is empty; name the tool that was called")
    arguments = _json_object(call.arguments or "{}", f"{path}.arguments")
    return PastCall(call.id, call.name, arguments, call.arguments or "{}")


def _check_continued(turn: Turn, path: str) -> None:
    if turn.role != "assistant":
        raise invalid(
            f"{path}.role", f"is {turn.role}; with continue_final_message the last message is the assistant's"
        )
    if turn.calls:
        raise invalid(f"{path}.tool_calls", "cannot be continued; with continue_final_message the last one is text")
    if not turn.text:
        raise invalid(f"{path}.content", "is empty; with continue_final_message it is what is gone on with")


def _read_tool_use(chat: inference_pb2.ChatRequest, limits: Limits, path: str) -> ToolUse:
    tools = tuple(_read_tool(tool, limits, f"{path}tools[{i}]") for i, tool in enumerate(chat.tools))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise invalid(f"{path}tools[{i}].name", f"is {name!r} once more; name each tool once")
    choice = chat.tool_choice.WhichOneof("choice")
    if choice == "name" and chat.tool_choice.name not in names:
        raise invalid(f"{path}tool_choice.name", f"is {chat.tool_choice.name[:64]!r}, which no tool of the request is")
    calling = Calling.AUTO if tools else Calling.NONE
    if choice == "name":
        calling = Calling.REQUIRED
    elif choice == "mode":
        if chat.tool_choice.mode not in _MODES:
            raise invalid(f"{path}tool_choice.mode", f"is {chat.tool_choice.mode}; AUTO, NONE or REQUIRED is needed")
        calling = _MODES[chat.tool_choice.mode]
    if not tools and calling is not Calling.NONE:
        raise invalid(f"{path}tool_choice.mode", "needs tools, and the request has none")
    if not tools and chat.HasField("parallel_tool_calls"):
        raise invalid(f"{path}parallel_tool_calls", "needs tools, and the request has none")
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return ToolUse(tools, calling, chat.tool_choice.name if choice == "name" else "", parallel)


def _read_tool(tool: inference_pb2.Tool, limits: Limits, path: str) -> Tool:
    if not TOOL_NAME.fullmatch(tool.name):
        raise invalid(
            f"{path}.name", f"is {tool.name[:64]!r}; it has 1 to 64 letters, digits, underscores, dots and hyphens"
        )
    written = tool.parameters_json_schema
    field = f"{path}.parameters_json_schema"
    at_most(utf8_bytes(written), limits.tool_schema_bytes, "bytes", field, "max_tool_schema_bytes")
    schema = _json_object(written, field) if written else {}
    if schema.get("type", "object") != "object":
        raise invalid(field, f"has the type {str(schema['type'])[:64]!r}; the arguments of a call are an object")
    return Tool(tool.name, tool.description, schema, tool.strict)


def _json_object(written: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(written, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid(path, "is nested too deeply") from None
    except ValueError as error:
        raise invalid(path, f"is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise invalid(path, "is not a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _plain(value: struct_pb2.Value, path: str) -> Any:
    """A template's argument as Python has it; numbers without a fraction are integers, as they were written."""
    match value.WhichOneof("kind"):
        case "number_value":
            if not math.isfinite(value.number_value):
                raise invalid(path, f"is {value.number_value}; a finite number is needed")
            whole = value.number_value.is_integer()
            return int(value.number_value) if whole else value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return [_plain(item, path) for item in value.list_value.values]
        case "struct_value":
            return {key: _plain(item, path) for key, item in value.struct_value.fields.items()}
    return None
