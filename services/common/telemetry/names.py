"""All names that telemetry tells: of spans, their attributes, metrics and their labels.

They follow the OpenTelemetry conventions (GenAI, RPC) where these have a name, and else vLLM's words under our prefix.
Times are in seconds.
"""

from __future__ import annotations

# -- spans and their attributes

SERVICE_NAME = "triptych-{service}"
SCOPE = "triptych"

TOKENIZE, QUEUE, PREFILL, DECODE, DELIVERY = "tokenize", "queue", "prefill", "decode", "delivery"
"""They partition the SERVER span of a generation, in this order."""
STEP = "step"

RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_RESPONSE_STATUS_CODE = "rpc.response.status_code"
ERROR_TYPE = "error.type"

GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_OUTPUT_TYPE = "gen_ai.output.type"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

PROVIDER = "triptych"
CHAT, TEXT_COMPLETION = "chat", "text_completion"

RESUMED = "triptych.request.resumed"
PROMPT_TOKENS = "triptych.prompt_tokens"
CACHED_TOKENS = "triptych.cached_tokens"
PREEMPTIONS = "triptych.preemptions"
END = "triptych.end"
"""Why a phase was the last one: finished, aborted (by the frontend: a client left, or a stop string came) or failed."""
CLOCK_OFFSET = "triptych.clock_offset_s"
"""What the service's clock was ahead of the frontend's; it has been taken off the span's times already."""

STEP_NUMBER = "triptych.step.number"
STEP_ROWS = "triptych.step.rows"
STEP_TOKENS = "triptych.step.tokens"
STEP_REQUESTS = "triptych.step.traced_requests"
STEP_GRAPH = "triptych.step.graph"
PLAN_TIME = "triptych.step.plan_s"
WAIT_TIME = "triptych.step.wait_s"
EXECUTE_TIME = "triptych.step.execute_s"
SAMPLE_TIME = "triptych.step.sample_s"
APPLY_TIME = "triptych.step.apply_s"

# -- metrics and their labels
