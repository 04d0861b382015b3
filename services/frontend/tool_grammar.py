"""What holds a model to its tools: a grammar of spans, one a tool, made where the request promises more than a try."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.common.errors import RequestError, invalid
from services.common.grammar import Grammar, StructuralTags, Tag
from services.frontend.conversation import Calling, Tool, ToolUse
from services.frontend.tool_calls.format import ToolCallFormat

PATH = "tool_grammar"
"""Where a fault in such a grammar is said to be, before `blame` says which field of the request it is."""
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SCHEMA_FIELD = re.compile(rf"{PATH}\.structural_tags\.tags\[(\d+)\]\.json_schema")


def promise(tool_use: ToolUse) -> str:
    """The field of the request that a grammar is needed for; "" where there is none."""
    if tool_use.calling is Calling.NONE:
        return ""
    if tool_use.calling is Calling.REQUIRED:
        return "tool_choice"
    strict = next((i for i, tool in enumerate(tool_use.tools) if tool.strict), None)
    if strict is not None:
        return f"tools[{strict}].strict"
    return "" if tool_use.parallel else "parallel_tool_calls"


def make(tool_use: ToolUse, form: ToolCallFormat, *, text_until: str = "") -> Grammar:
    """Of a request that promises something.

    REQUIRED and a named tool hold all arguments to their schemas; AUTO those of strict tools, the others to an object.
    A named tool is called once. Before calls that are required there is text up to `text_until`, reasoning, or none.
    """
    required = tool_use.calling is Calling.REQUIRED
    tags = []
    for tool in _callable(tool_use):
        text = form.span(tool.name)
        schema = _schema(tool) if required or tool.strict else _ANY_OBJECT
        tags.append(Tag(text.begin, json.dumps(schema, ensure_ascii=False), text.end, text.trigger))
    single = bool(tool_use.named) or not tool_use.parallel
    return Grammar(StructuralTags(tuple(tags), required, single, text_until if required else ""))


def blame(error: RequestError, tool_use: ToolUse, promised: str, path: str) -> RequestError:
    """The check's error as the caller has to read it: of a tool's schema, else of `promised`, the field that asked."""
    if not error.violations:
        return error
    found = _SCHEMA_FIELD.fullmatch(error.violations[0].field)
    field = promised
    if found is not None:
        field = f"{path}tools[{tool_use.tools.index(_callable(tool_use)[int(found[1])])}].parameters_json_schema"
    return invalid(field, error.violations[0].description, error.reason)


def _callable(tool_use: ToolUse) -> list[Tool]:
    return [tool for tool in tool_use.tools if tool_use.named in ("", tool.name)]


def _schema(tool: Tool) -> Mapping[str, Any]:
    if not tool.schema:
        return _NO_ARGUMENTS
    return tool.schema if "type" in tool.schema else {**tool.schema, "type": "object"}
