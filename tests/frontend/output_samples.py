"""Answers of real models' formats, and what each means. `source` is where the format is shown in public."""

# ruff: noqa: E501  samples stand as models write them

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HERMES_CARD = "https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B#prompt-format-for-function-calling"
QWEN = "https://qwen.readthedocs.io/en/latest/framework/function_call.html"
QWEN3 = "https://huggingface.co/Qwen/Qwen3-8B#switching-between-thinking-and-non-thinking-mode"
LLAMA31 = "https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling"
LLAMA32 = "https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md"
LLAMA4 = "https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/"
VLLM = "https://docs.vllm.ai/en/latest/features/tool_calling/"
MISTRAL7B = "https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.3#function-calling"
MISTRAL_V11 = "https://huggingface.co/mistralai/Mistral-Small-3.2-24B-Instruct-2506"
DEEPSEEK_V3 = "https://huggingface.co/deepseek-ai/DeepSeek-V3-0324/blob/main/tokenizer_config.json"
DEEPSEEK_V31 = "https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall"
DEEPSEEK_R1 = "https://huggingface.co/deepseek-ai/DeepSeek-R1#usage-recommendations"
DEEPSEEK_V32 = "https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/encoding_dsv32.py"
QWEN3_CODER = "https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct/blob/main/chat_template.jinja"
QWEN3_CODER_IN_VLLM = "https://github.com/vllm-project/vllm/blob/main/tests/tool_parsers/test_qwen3coder_tool_parser.py"
GLM = "https://huggingface.co/zai-org/GLM-4.6/blob/main/chat_template.jinja"
KIMI = "https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md"
MAGISTRAL = "https://huggingface.co/mistralai/Magistral-Small-2507"


@dataclass(frozen=True)
class Sample:
    """An answer, and its parts: `calls` as (name, arguments) as they are told."""

    id: str
    source: str
    written: str
    tool_calls: str = ""
    reasoning_format: str = ""
    in_reasoning: bool = False
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_B, _E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_D = "｜DSML｜"
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KB, _KA, _KE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CB, _CE, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_WEATHER = {"get_current_weather": _object(city=_TEXT, state=_TEXT, unit={"type": "string", "enum": ["fahrenheit"]})}
_AREA = {"calculate_area": _object(shape=_TEXT, dimensions={"type": "object"}, precision=_INTEGER)}

SAMPLES = (
    Sample(
        "hermes-arguments-first",
        HERMES_CARD,
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n</tool_call>',
        "hermes",
        calls=(("get_stock_fundamentals", '{"symbol": "TSLA"}'),),
    ),
    Sample(
        "qwen-two-calls",
        QWEN,
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n</tool_call>\n<tool_call>\n{"name": "get_temperature_date", "arguments": {"location": "San Francisco, CA, USA", "date": "2024-10-01"}}\n</tool_call>',
        "hermes",
        calls=(
            ("get_current_temperature", '{"location": "San Francisco, CA, USA"}'),
            ("get_temperature_date", '{"location": "San Francisco, CA, USA", "date": "2024-10-01"}'),
        ),
    ),
    Sample(
        "hermes-between-texts",
        HERMES_CARD,
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, -2.5e3, {"b": "\\u00e9 } \\" </tool_call>"}], "c": null}}\n</tool_call>\n\nDone < soon.',
        "hermes",
        text="Let me look.\n\n\nDone < soon.",
        calls=(("f", '{"a": [1, -2.5e3, {"b": "\\u00e9 } \\" </tool_call>"}], "c": null}'),),
    ),
    Sample(
        "hermes-no-arguments-and-no-end",
        HERMES_CARD,
        '<tool_call>{"name": "now"}\n<tool_call>{"name":"later","arguments":{}}\n',
        "hermes",
        calls=(("now", "{}"), ("later", "{}")),
    ),
    Sample(
        "hermes-text-that-is-no-call",
        HERMES_CARD,
        'The tag <tool_call> opens a call, <tool_call>{"name": 1}</tool_call> is none.',
        "hermes",
        text='The tag <tool_call> opens a call, <tool_call>{"name": 1}</tool_call> is none.',
    ),
    Sample(
        "qwen3-thinks-and-calls",
        QWEN3,
        '<think>\nOkay, the user wants the weather.\n\nI call <tool_call>.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "hermes",
        "think",
        reasoning="Okay, the user wants the weather.\n\nI call <tool_call>.",
        calls=(("get_weather", '{"city": "Paris"}'),),
    ),
    Sample(
        "qwen3-thinking-off",
        QWEN3,
        "Paris is the capital.\n",
        "hermes",
        "think",
        text="Paris is the capital.\n",
    ),
    Sample(
        "r1-opened-by-the-prompt",
        DEEPSEEK_R1,
        "First 1 < 2.\n</think>\n\nThe answer is \\boxed{2}.",
        "",
        "think",
        in_reasoning=True,
        reasoning="First 1 < 2.",
        text="The answer is \\boxed{2}.",
    ),
    Sample(
        "thinking-is-cut",
        QWEN3,
        "<think>\nI wonder </thi",
        "",
        "think",
        reasoning="I wonder </thi",
    ),
    Sample(
        "magistral",
        MAGISTRAL,
        "[THINK]Two and two.[/THINK]4",
        "mistral",
        "mistral",
        reasoning="Two and two.",
        text="4",
    ),
    Sample(
        "llama31-json",
        LLAMA31,
        '{"name": "trending_songs", "parameters": {"n": "10", "genre": "all"}}',
        "llama3_json",
        calls=(("trending_songs", '{"n": "10", "genre": "all"}'),),
    ),
    Sample(
        "llama31-tag-and-type",
        LLAMA31,
        '<|python_tag|>{"type": "function", "name": "trending_songs", "parameters": {"n": 10}}; {"name": "g", "parameters": {}}',
        "llama3_json",
        calls=(("trending_songs", '{"n": 10}'), ("g", "{}")),
    ),
    Sample(
        "llama31-json-that-is-an-answer",
        LLAMA31,
        '\n{"city": "Paris", "name": "x"} is it.',
        "llama3_json",
        text='\n{"city": "Paris", "name": "x"} is it.',
    ),
    Sample(
        "llama31-code-after-the-tag",
        LLAMA31,
        '<|python_tag|>brave_search.call(query="weather")',
        "llama3_json",
        text='<|python_tag|>brave_search.call(query="weather")',
    ),
    Sample(
        "llama31-text",
        LLAMA31,
        'Use {"name": "f", "parameters": {}} to call; 1 < 2.',
        "llama3_json",
        text='Use {"name": "f", "parameters": {}} to call; 1 < 2.',
    ),
    Sample(
        "pythonic-vllm",
        VLLM,
        "[get_weather(city='San Francisco', metric='celsius'), get_weather(city='Seattle', metric='celsius')]",
        "pythonic",
        calls=(
            ("get_weather", '{"city": "San Francisco", "metric": "celsius"}'),
            ("get_weather", '{"city": "Seattle", "metric": "celsius"}'),
        ),
    ),
    Sample(
        "pythonic-llama32",
        LLAMA32,
        '[get_user_info(user_id=7890, special="black", opts={"a": [1, -2.0, (True, None)], \'b\': false}), now( )]',
        "pythonic",
        calls=(
            (
                "get_user_info",
                '{"user_id": 7890, "special": "black", "opts": {"a": [1, -2.0, [true, null]], "b": false}}',
            ),
            ("now", "{}"),
        ),
    ),
    Sample(
        "pythonic-llama4-marks",
        LLAMA4,
        'I look.<|python_start|>[get(q="it\'s ), here\\n", n=2,)]<|python_end|>',
        "pythonic",
        text="I look.",
        calls=(("get", '{"q": "it\'s ), here\\n", "n": 2}'),),
    ),
    Sample(
        "pythonic-text-in-brackets",
        LLAMA32,
        "[see f(x)] or [f(a=b)] or [1, 2].",
        "pythonic",
        text="[see f(x)] or [f(a=b)] or [1, 2].",
    ),
    Sample(
        "mistral-array",
        MISTRAL7B,
        '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Paris, France", "format": "celsius"}}]',
        "mistral",
        calls=(("get_current_weather", '{"location": "Paris, France", "format": "celsius"}'),),
    ),
    Sample(
        "mistral-array-of-two-with-ids",
        MISTRAL7B,
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3.5, "b": 4}, "id": "VvvODy9mT"}, {"name": "sub", "arguments": {}}]',
        "mistral",
        calls=(("add", '{"a": 3.5, "b": 4}'), ("sub", "{}")),
    ),
    Sample(
        "mistral-v11-two",
        MISTRAL_V11,
        'Both.[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4}[TOOL_CALLS]multiply[CALL_ID]VvvODy9mT[ARGS]{"a": 3, "b": 6}',
        "mistral_v11",
        text="Both.",
        calls=(("add", '{"a": 3.5, "b": 4}'), ("multiply", '{"a": 3, "b": 6}')),
    ),
    Sample(
        "mistral-v11-without-args-mark",
        MISTRAL_V11,
        '[TOOL_CALLS]get_current_weather{"city": "Dallas", "state": "TX"}',
        "mistral_v11",
        calls=(("get_current_weather", '{"city": "Dallas", "state": "TX"}'),),
    ),
    Sample(
        "mistral-broken",
        MISTRAL7B,
        "[TOOL_CALLS] none [TOOL_CALLS]f[ARGS]x [TOOL_CALLS] [",
        "mistral",
        text="[TOOL_CALLS] none [TOOL_CALLS]f[ARGS]x [TOOL_CALLS] [",
    ),
    Sample(
        "deepseek-v3-two",
        DEEPSEEK_V3,
        f'Sure.{_B}{_CB}function{_SEP}get_weather\n```json\n{{"city": "Hangzhou"}}\n```{_CE}\n{_CB}function{_SEP}get_time\n```json\n{{}}\n```{_CE}{_E}',
        "deepseek_v3",
        text="Sure.",
        calls=(("get_weather", '{"city": "Hangzhou"}'), ("get_time", "{}")),
    ),
    Sample(
        "deepseek-v31-two",
        DEEPSEEK_V31,
        f'{_B}{_CB}get_weather{_SEP}{{"city": "Hangzhou"}}{_CE}{_CB}get_time{_SEP}{{"zone": "UTC"}}{_CE}{_E}',
        "deepseek_v31",
        calls=(("get_weather", '{"city": "Hangzhou"}'), ("get_time", '{"zone": "UTC"}')),
    ),
    Sample(
        "deepseek-r1-thinks-and-calls",
        DEEPSEEK_V3,
        f'I need it.\n</think>\n\n{_B}{_CB}function{_SEP}f\n```json\n{{"a": 1}}\n```{_CE}',
        "deepseek_v3",
        "think",
        in_reasoning=True,
        reasoning="I need it.",
        calls=(("f", '{"a": 1}'),),
    ),
    Sample(
        "deepseek-broken",
        DEEPSEEK_V3,
        f"{_B}{_CB}function{_SEP}f\n```json\nnothing",
        "deepseek_v3",
        text=f"{_B}{_CB}function{_SEP}f\n```json\nnothing",
    ),
    Sample(
        "qwen3-coder-two",
        QWEN3_CODER_IN_VLLM,
        "Sure!<tool_call>\n<function=get_current_weather>\n<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX\n</parameter>\n<parameter=unit>\nfahrenheit\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_current_weather>\n<parameter=city>\nOrlando\n</parameter>\n</function>\n</tool_call>",
        "qwen3_coder",
        text="Sure!",
        calls=(
            ("get_current_weather", '{"city": "Dallas", "state": "TX", "unit": "fahrenheit"}'),
            ("get_current_weather", '{"city": "Orlando"}'),
        ),
        schemas=_WEATHER,
    ),
    Sample(
        "qwen3-coder-types",
        QWEN3_CODER_IN_VLLM,
        '<tool_call>\n<function=calculate_area>\n<parameter=shape>\n5\n</parameter>\n<parameter=dimensions>\n{"width": 10, \n "height": 20}\n</parameter>\n<parameter=precision>\n2\n</parameter>\n</function>\n</tool_call>',
        "qwen3_coder",
        calls=(("calculate_area", '{"shape": "5", "dimensions": {"width": 10, \n "height": 20}, "precision": 2}'),),
        schemas=_AREA,
    ),
    Sample(
        "qwen3-coder-several-lines",
        QWEN3_CODER,
        '<tool_call>\n<function=write>\n<parameter=body>\n\n  if a < "b":\n    <tool_call> </para\n\n</parameter>\n<parameter=sure>\nTrue\n</parameter>\n</function>\n</tool_call>',
        "qwen3_coder",
        calls=(("write", '{"body": "\\n  if a < \\"b\\":\\n    <tool_call> </para\\n", "sure": true}'),),
        schemas={"write": _object(body=_TEXT, sure={"type": "boolean"})},
    ),
    Sample(
        "qwen3-coder-without-outer-tag-or-schema",
        QWEN3_CODER_IN_VLLM,
        "I look.\n<function=f>\n<parameter=n>42</parameter>\n<parameter=s>\ntext\n</parameter>\n</function>\n<function=g>\n</function>",
        "qwen3_coder",
        text="I look.\n",
        calls=(("f", '{"n": 42, "s": "text"}'), ("g", "{}")),
    ),
    Sample(
        "qwen3-coder-broken",
        QWEN3_CODER,
        'See <tool_call> and <function=f> text, <tool_call>\n{"name": "f"}.',
        "qwen3_coder",
        text='See <tool_call> and <function=f> text, <tool_call>\n{"name": "f"}.',
    ),
    Sample(
        "glm-thinks-and-calls-two",
        GLM,
        '<think>Which?</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北京 "a"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
        "glm45",
        "think",
        reasoning="Which?",
        text="I look.\n",
        calls=(("get_weather", '{"city": "北京 \\"a\\"", "days": [1, 2]}'), ("now", "{}")),
        schemas={"get_weather": _object(city=_TEXT, days={"type": "array"})},
    ),
    Sample(
        "glm-on-one-line",
        GLM,
        "<tool_call>f<arg_key>zip</arg_key><arg_value>01234</arg_value><arg_key>note</arg_key><arg_value>null</arg_value><arg_key>more</arg_key><arg_value>null</arg_value></tool_call>",
        "glm45",
        calls=(("f", '{"zip": "01234", "note": "null", "more": null}'),),
        schemas={"f": _object(zip=_INTEGER, note=_TEXT, more={"anyOf": [_TEXT, {"type": "null"}]})},
    ),
    Sample(
        "glm-broken",
        GLM,
        "The tag <tool_call> opens, <tool_call>a b</tool_call> is none, <tool_call>f<arg_key>k</arg_key>v",
        "glm45",
        text="The tag <tool_call> opens, <tool_call>a b</tool_call> is none, <tool_call>f<arg_key>k</arg_key>v",
    ),
    Sample(
        "deepseek-v32-two",
        DEEPSEEK_V32,
        f'Let me check.\n\n<{_D}function_calls>\n<{_D}invoke name="get_weather">\n<{_D}parameter name="location" string="true">Hang "zhou"\n</{_D}parameter>\n<{_D}parameter name="days" string="false">[1, {{"a": 2}}]</{_D}parameter>\n</{_D}invoke>\n<{_D}invoke name="now">\n</{_D}invoke>\n</{_D}function_calls>',
        "deepseek_v32",
        text="Let me check.\n\n",
        calls=(("get_weather", '{"location": "Hang \\"zhou\\"\\n", "days": [1, {"a": 2}]}'), ("now", "{}")),
    ),
    Sample(
        "deepseek-v4-thinks-and-calls",
        DEEPSEEK_V32,
        f'I need it.\n</think>\n\n<{_D}tool_calls>\n<{_D}invoke name="f">\n<{_D}parameter name="n" string="false">3</{_D}parameter>\n</{_D}invoke>\n</{_D}tool_calls>',
        "deepseek_v32",
        "think",
        in_reasoning=True,
        reasoning="I need it.",
        calls=(("f", '{"n": 3}'),),
    ),
    Sample(
        "deepseek-v32-broken",
        DEEPSEEK_V32,
        f'<{_D}function_calls>\n</{_D}function_calls> <{_D}function_calls><{_D}invoke name="f"> <{_D}parameter name="n" string="maybe">',
        "deepseek_v32",
        text=f'<{_D}function_calls>\n</{_D}function_calls> <{_D}function_calls><{_D}invoke name="f"> <{_D}parameter name="n" string="maybe">',
    ),
    Sample(
        "kimi-two",
        KIMI,
        f'I look.{_SECTION}{_KB}functions.get_weather:0{_KA}{{"city": "Beijing"}}{_KE}\n{_KB}now:1{_KA}{{}}{_KE}{_SECTION_END}',
        "kimi_k2",
        text="I look.",
        calls=(("get_weather", '{"city": "Beijing"}'), ("now", "{}")),
    ),
    Sample(
        "kimi-without-an-end",
        KIMI,
        f'{_SECTION}{_KB}functions.a.b:12{_KA} {{"a": 1}}',
        "kimi_k2",
        calls=(("a.b", '{"a": 1}'),),
    ),
    Sample(
        "kimi-broken",
        KIMI,
        f"{_SECTION} nothing {_SECTION}{_KB}:{_KA}{{}}",
        "kimi_k2",
        text=f"{_SECTION} nothing {_SECTION}{_KB}:{_KA}{{}}",
    ),
)
