"""The public API's door: which fields are served, of messages and of their values."""

from __future__ import annotations

from services.common.contract import SAMPLING, SERVED_GRAMMAR, SERVED_SAMPLING, Door

_PACKAGE = "triptych.inference.v1."

_SERVED = {
    "GenerateRequest": {"model", "text", "token_ids", "add_special_tokens", "options"},
    "GenerateUnaryRequest": {"request"},
    "TokenIds": {"ids"},
    "ChatRequest": {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "continue_final_message",
        "template_args",
        "options",
    },
    "ChatUnaryRequest": {"request"},
    "ChatMessage": {"role", "content", "name", "reasoning", "tool_calls", "tool_call_id"},
    "ContentPart": {"text", "media"},  # media is refused by its type, behind the door
    "Media": {"mime_type", "data"},
    "ToolCall": {"index", "id", "name", "arguments"},
    "Tool": {"name", "description", "parameters_json_schema", "strict"},
    "ToolChoice": {"mode", "name"},
    "Options": {
        "sampling",
        "seed",
        "n",
        "best_of",
        "grammar",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_string",
        "logprobs",
        "prompt_logprobs",
        "echo",
        "raw_bytes",
        "skip_special_tokens",
        "min_delta_tokens",
        "min_delta_interval_ms",
        "priority",
        "cache_salt",
        "label",
        "resume",
        "truncate_prompt_tokens",
    },
    "Resume": {"seed", "fingerprint", "choices"},
    "Resume.Received": {"index", "token_ids", "text_bytes", "finished", "cumulative_logprob"},
    "TokenizeRequest": {"model", "text", "chat", "add_special_tokens"},
    "DetokenizeRequest": {"model", "token_ids", "skip_special_tokens"},
    "GetModelRequest": {"model"},
    "ListModelsRequest": set[str](),
}

_STRUCT = {
    "google.protobuf.Struct": frozenset({"fields"}),
}
"""Its values are read behind the door, which looks at no map's."""

DOOR = Door(
    {SAMPLING: SERVED_SAMPLING}
    | SERVED_GRAMMAR
    | _STRUCT
    | {_PACKAGE + name: frozenset(fields) for name, fields in _SERVED.items()}
)
