"""Answers of real models' formats, and what each means. `source` is where the format is shown in public."""

# ruff: noqa: E501  samples stand as models write them

from __future__ import annotations

from dataclasses import dataclass

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


_B, _E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CB, _CE, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

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
)
