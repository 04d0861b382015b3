"""Checkpoints without weights whose template takes tools, in the manner of Qwen3, and whose tokenizer has its marks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.inference.v1 import inference_pb2

from tests.frontend.harness import text_checkpoint

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}"
    'Write <tool_call>{"name": "...", "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{%- for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}{{ ' ' + m.tool_call_id if "
    "m.tool_call_id }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking == 'off' %}<think>\n\n</think>\n\n{% elif thinking == 'open' %}<think>\n{% endif %}{% endif %}"
)
"""`thinking` is its own argument."""

Chat = inference_pb2.ChatRequest
Message = inference_pb2.ChatMessage
CITY_SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'


def tool_checkpoint(
    path: Path, *, template: str | None = TEMPLATE, special: Sequence[str] = (), plain: Sequence[str] = ()
) -> Path:
    """`special` and `plain` are added tokens in place of as many reserved ones, the latter not special."""
    model = text_checkpoint(path, chat_template=template)
    file = model / "tokenizer.json"
    definition = json.loads(file.read_text())
    reserved = [token for token in definition["added_tokens"] if token["content"].startswith("<|reserved_")]
    vocab = definition["model"]["vocab"]
    for token, content in zip(reserved, [*special, *plain], strict=False):
        if token["content"] in vocab:
            vocab[content] = vocab.pop(token["content"])
        token.update(content=content, special=content in special)
    file.write_text(json.dumps(definition))
    return model


def tool(name: str = "get_weather", schema: str = CITY_SCHEMA, **fields: Any) -> inference_pb2.Tool:
    """A tool that takes a city."""
    return inference_pb2.Tool(name=name, parameters_json_schema=schema, **fields)


def said(role: inference_pb2.Role.ValueType, text: str = "", **fields: Any) -> Message:
    """A message of one text part."""
    return Message(role=role, content=[inference_pb2.ContentPart(text=text)], **fields)


def asked(text: str = "hi") -> Message:
    """A user's message."""
    return said(inference_pb2.ROLE_USER, text)


def answered(text: str = "", **fields: Any) -> Message:
    """An assistant's message."""
    return said(inference_pb2.ROLE_ASSISTANT, text, **fields)


def call(
    name: str = "get_weather", arguments: str = '{"city": "Paris"}', call_id: str = "a1"
) -> inference_pb2.ToolCall:
    """A call of an earlier answer."""
    return inference_pb2.ToolCall(id=call_id, name=name, arguments=arguments)
