"""The formats there are, and which one a chat template has its model write."""

from __future__ import annotations

from services.frontend.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31, SEP
from services.frontend.tool_calls.format import ToolCallFormat
from services.frontend.tool_calls.hermes import HERMES
from services.frontend.tool_calls.llama import LLAMA3_JSON
from services.frontend.tool_calls.mistral import MISTRAL, MISTRAL_V11
from services.frontend.tool_calls.pythonic import PYTHONIC

FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON, PYTHONIC, MISTRAL, MISTRAL_V11, DEEPSEEK_V3, DEEPSEEK_V31)}


def held(form: ToolCallFormat) -> ToolCallFormat:
    """The format in which a model that writes this one is held to a schema."""
    return FORMATS[form.held] if form.held else form


def recognise(template: str) -> ToolCallFormat | None:
    """By what a template writes for calls of earlier turns, or tells the model to write; None for none known here."""
    if SEP in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "[TOOL_CALLS]" in template:
        return MISTRAL_V11 if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM have the tag too, with XML in it.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "<|python_start|>" in template or "func_name1(" in template:
        return PYTHONIC
    if "parameters" in template and ("<|python_tag|>" in template or '{"name": function name' in template):
        return LLAMA3_JSON
    return None
