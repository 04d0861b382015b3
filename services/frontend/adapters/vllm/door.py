"""Which fields of the adapter's contract are served; every other one that is set is refused by its name."""

from __future__ import annotations

from services.common.contract import Door

_VLLM = "vllm.grpc.engine."
_COMMON = "smg.grpc.common."

_SERVED = {
    f"{_VLLM}GenerateRequest": {"request_id", "tokenized", "text", "sampling_params", "stream"},
    # original_text is the contract's "for reference": nothing is to be done with it.
    f"{_VLLM}TokenizedInput": {"original_text", "input_ids"},
    f"{_VLLM}SamplingParams": {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        # Both values are one to a tokenizer.json: it has no spaces of its own to put between special tokens.
        "spaces_between_special_tokens",
        "ignore_eos",
        "n",
        "logprobs",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "seed",
        "include_stop_str_in_output",
        "logit_bias",
        "grammar_from_first_token",  # a grammar here always holds from the first id
        "json_schema",
        "regex",
        "grammar",
        "structural_tag",
        "json_object",
        "choice",
    },
    f"{_VLLM}ChoiceConstraint": {"choices"},
    f"{_VLLM}HealthCheckRequest": set(),
    f"{_VLLM}AbortRequest": {"request_ids"},
    f"{_VLLM}GetModelInfoRequest": set(),
    f"{_VLLM}GetServerInfoRequest": set(),
    f"{_VLLM}GetLoadsRequest": {"dp_rank", "include"},
    f"{_COMMON}GetTokenizerRequest": set(),
    f"{_COMMON}FlushCacheRequest": {"timeout_s"},
    # load_records_before_first_batch says what the subscriber can read: no batch here holds a load record.
    f"{_COMMON}SubscribeKvEventsRequest": {"start_sequence_number", "load_records_before_first_batch"},
}

DOOR = Door({name: frozenset(fields) for name, fields in _SERVED.items()})
