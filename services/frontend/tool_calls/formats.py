"""The formats there are, and which one a chat template has its model write."""

from __future__ import annotations

from services.frontend.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31, SEP
from services.frontend.tool_calls.deepseek_dsml import DEEPSEEK_V32, MARK
from services.frontend.tool_calls.format import ToolCallFormat
from services.frontend.tool_calls.glm import GLM45
from services.frontend.tool_calls.hermes import HERMES
from services.frontend.tool_calls.kimi import KIMI_K2, SECTION_BEGIN
from services.frontend.tool_calls.llama import LLAMA3_JSON
from services.frontend.tool_calls.mistral import MISTRAL, MISTRAL_V11
from services.frontend.tool_calls.pythonic import PYTHONIC
from services.frontend.tool_calls.qwen3_coder import QWEN3_CODER

FORMATS = {
    form.name: form
    for form in (
        *(HERMES, QWEN3_CODER, GLM45, LLAMA3_JSON, PYTHONIC, MISTRAL, MISTRAL_V11),
        *(DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2),
    )
}


def recognise(template: str) -> ToolCallFormat | None:
    """By what a template writes for calls of earlier turns, or tells the model to write; None for none known here."""
    if MARK in template:
        return DEEPSEEK_V32
    if SEP in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "[TOOL_CALLS]" in template:
        return MISTRAL_V11 if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        # The same tag, with XML in it.
        if "<function=" in template:
            return QWEN3_CODER
        return GLM45 if "<arg_key>" in template else HERMES
    if SECTION_BEGIN in template:
        return KIMI_K2
    if "<|python_start|>" in template or "func_name1(" in template:
        return PYTHONIC
    if "parameters" in template and ("<|python_tag|>" in template or '{"name": function name' in template):
        return LLAMA3_JSON
    return None
