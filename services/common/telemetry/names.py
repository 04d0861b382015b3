"""All names that telemetry tells: of spans, their attributes, metrics and their labels.

They follow the OpenTelemetry conventions (GenAI, RPC) where these have a name, and else vLLM's words under our prefix.
Times are in seconds.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

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


class Metric(NamedTuple):
    """`labels` are its attributes' names; a histogram has `bounds_s`, the upper bounds of its buckets in seconds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    bounds_s: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus: https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/"""
        unit = {"s": "_seconds", "By": "_bytes", "1": "_ratio" if self.kind == "gauge" else ""}.get(self.unit, "")
        return prometheus_label(self.name) + unit + ("_total" if self.kind == "counter" else "")


def prometheus_label(name: str) -> str:
    """An attribute's name as Prometheus has it."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _counter(name: str, unit: str, description: str, *labels: str) -> Metric:
    return Metric(name, "counter", unit, description, labels)


def _gauge(name: str, unit: str, description: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, description, labels)


def _histogram(name: str, description: str, bounds_s: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", "s", description, labels, bounds_s)


TIME_TO_FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
TIME_PER_OUTPUT_TOKEN_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_DURATION_BOUNDS_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36, 1310.72),
)
CALL_DURATION_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0),
)
"""The conventions' buckets, then on upward: a queue can be long, a preemption may stand between two tokens."""

# Labels. Each has few values, known from the code or the configuration: never a caller's text.
OPERATION = GEN_AI_OPERATION_NAME
REQUEST_MODEL = GEN_AI_REQUEST_MODEL
ERROR = ERROR_TYPE
METHOD = RPC_METHOD
STATUS_CODE = RPC_RESPONSE_STATUS_CODE
PHASE, REASON, PART, STATE, GRAPH, KIND, WORKER = "phase", "reason", "part", "state", "graph", "kind", "worker"

# Every service's.
INFO = _gauge("triptych.info", "", "1, with what this process is", "service", "model", "version")

# The frontend's: what callers see.
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "from a generation's arrival to its last byte, tokenization and queue included",
    REQUEST_DURATION_BOUNDS_S,
    *(OPERATION, REQUEST_MODEL, ERROR),
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "from a generation's arrival to its first token on the way to the client, queue included; once a request, and "
    "not of one that a client resumes",
    TIME_TO_FIRST_TOKEN_BOUNDS_S,
    *(OPERATION, REQUEST_MODEL),
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "mean time of a choice's tokens after the first, of generations that ended well",
    TIME_PER_OUTPUT_TOKEN_BOUNDS_S,
    *(OPERATION, REQUEST_MODEL),
)
CALL_DURATION = _histogram(
    "rpc.server.call.duration", "of every call, by method and status", CALL_DURATION_BOUNDS_S, METHOD, STATUS_CODE
)
CALLS = _gauge("triptych.frontend.calls", "{call}", "calls under way")
CALLS_FAILED = _counter(
    "triptych.frontend.calls_failed", "{call}", "calls that ended with an error, by the reason told", REASON
)
ENGINE_READY = _gauge("triptych.frontend.engine_ready", "", "1 where the engine could make a token for this frontend")
CLIENT_TOKENS = _counter(
    "triptych.frontend.output_tokens",
    "{token}",
    "ids that answers kept, of ended generations; of one that a client resumes those that are new",
)

# The scheduler's: requests and KV blocks.
REQUESTS_RUNNING = _gauge("triptych.num_requests_running", "{request}", "choices that hold KV blocks", PHASE)
REQUESTS_WAITING = _gauge("triptych.num_requests_waiting", "{request}", "choices that wait, by what for", REASON)
WAITING_TOKENS = _gauge("triptych.waiting_tokens", "{token}", "tokens to be computed of what waits")
EXPECTED_WAIT = _gauge(
    "triptych.expected_queue_wait", "s", "that a short request which comes now is expected to wait before it starts"
)
REQUEST_SLOTS = _gauge("triptych.max_num_seqs", "{request}", "choices that may run at once")
KV_USAGE = _gauge("triptych.kv_cache_usage", "1", "share of the KV blocks that requests hold")
KV_BLOCKS = _gauge("triptych.kv_cache_blocks", "{block}", "KV blocks: held, free", STATE)
PREFIX_BLOCKS = _gauge(
    "triptych.prefix_cache_blocks", "{block}", "KV blocks that the prefix cache can find, held ones included"
)
PREFIX_QUERIES = _counter("triptych.prefix_cache_queries", "{token}", "prompt tokens looked up in the prefix cache")
PREFIX_HITS = _counter("triptych.prefix_cache_hits", "{token}", "of these, found there")
PREEMPTIONS_COUNT = _counter(
    "triptych.num_preemptions", "{request}", "choices put back into the queue for want of blocks"
)
PROMPT_TOKENS_COUNT = _counter(
    "triptych.prompt_tokens", "{token}", "prompt tokens of requests that started, cached ones included"
)
GENERATION_TOKENS = _counter("triptych.generation_tokens", "{token}", "ids that frontends were told")
DROPPED_TOKENS = _counter("triptych.dropped_tokens", "{token}", "ids sampled past the end of their request")
FINISHED = _counter("triptych.requests_finished", "{request}", "choices that ended: stop, length, abort", REASON)
FAILED = _counter("triptych.requests_failed", "{request}", "requests refused or lost, by the reason told", REASON)
QUEUE_TIME = _histogram(
    "triptych.request_queue_time", "from the submission to the first step", TIME_TO_FIRST_TOKEN_BOUNDS_S
)
PREFILL_TIME = _histogram(
    "triptych.request_prefill_time", "from the first step to the first id", TIME_TO_FIRST_TOKEN_BOUNDS_S
)
DECODE_TIME = _histogram(
    "triptych.request_decode_time", "from the first id to the last, preemptions included", TIME_TO_FIRST_TOKEN_BOUNDS_S
)
ENGINE_TIME_TO_FIRST_TOKEN = _histogram(
    "triptych.time_to_first_token", "from the submission to a choice's first id", TIME_TO_FIRST_TOKEN_BOUNDS_S
)
INTER_TOKEN_LATENCY = _histogram(
    "triptych.inter_token_latency", "between two ids of a choice", TIME_PER_OUTPUT_TOKEN_BOUNDS_S
)
STEPS = _counter("triptych.steps", "{step}", "steps with rows: full (a graph replayed), eager, none (no graphs)", GRAPH)
STEP_TIME = _counter("triptych.step_time", "s", "time of steps: plan, execute, sample, apply", PART)
EPOCHS = _counter("triptych.epochs", "{epoch}", "times that an executor was taken into use")
CAN_GENERATE = _gauge("triptych.can_generate", "", "1 where a token could be made now")
FRONTENDS = _gauge("triptych.frontends", "{frontend}", "frontends attached")
IDLE_FAULTS = _counter("triptych.idle_faults", "{fault}", "idle checks that found the books out of balance; a bug each")
GRAMMAR_REQUESTS = _counter("triptych.grammar_requests", "{request}", "choices that ran under a grammar")
MASKS = _counter("triptych.masks", "{mask}", "masks built for them")
MASK_TIME = _counter("triptych.mask_time", "s", "what building them took, off the step loop")

# The executor's: the device.
EXECUTOR_STEPS = _counter(
    "triptych.executor.steps",
    "{step}",
    "steps with rows that were computed, without a scheduler's self-tests",
)
EXECUTOR_STEP_TIME = _counter(
    "triptych.executor.step_time", "s", "time of steps: wait (behind the one before), execute, sample", PART
)
EXECUTOR_ROWS = _counter("triptych.executor.rows", "{row}", "rows of these steps: one a choice that has part in it")
EXECUTOR_TOKENS = _counter("triptych.executor.tokens", "{token}", "tokens computed in these steps")
EXECUTOR_FAULTS = _counter("triptych.executor.faults", "{fault}", "faults told to the scheduler", KIND)
EXECUTOR_EPOCHS = _counter("triptych.executor.epochs", "{epoch}", "epochs that schedulers opened")
EXECUTOR_DRIVEN = _gauge("triptych.executor.driven", "", "1 while a scheduler has an epoch open")
KV_BYTES = _gauge("triptych.executor.kv_cache", "By", "of the KV tensors, of all ranks")
LOAD_TIME = _gauge("triptych.executor.load_time", "s", "what loading the weights took")
WARM_UP_TIME = _gauge("triptych.executor.warm_up_time", "s", "what making the KV tensors and warming up took")
RANKS = _gauge("triptych.executor.ranks", "", "processes that divide the model; rank 0 tells for all")

METRICS: dict[str, tuple[Metric, ...]] = {
    "every service": (INFO,),
    "frontend": (
        *(REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, CALL_DURATION),
        *(CALLS, CALLS_FAILED, ENGINE_READY, CLIENT_TOKENS),
    ),
    "scheduler": (
        *(REQUESTS_RUNNING, REQUESTS_WAITING, WAITING_TOKENS, EXPECTED_WAIT, REQUEST_SLOTS, KV_USAGE, KV_BLOCKS),
        *(PREFIX_BLOCKS, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS_COUNT, PROMPT_TOKENS_COUNT, GENERATION_TOKENS),
        *(DROPPED_TOKENS, FINISHED, FAILED, QUEUE_TIME, PREFILL_TIME, DECODE_TIME, ENGINE_TIME_TO_FIRST_TOKEN),
        *(
            INTER_TOKEN_LATENCY,
            STEPS,
            STEP_TIME,
            EPOCHS,
            CAN_GENERATE,
            FRONTENDS,
            IDLE_FAULTS,
            GRAMMAR_REQUESTS,
            MASKS,
            MASK_TIME,
        ),
    ),
    "executor": (
        *(EXECUTOR_STEPS, EXECUTOR_STEP_TIME, EXECUTOR_ROWS, EXECUTOR_TOKENS, EXECUTOR_FAULTS, EXECUTOR_EPOCHS),
        *(EXECUTOR_DRIVEN, KV_BYTES, LOAD_TIME, WARM_UP_TIME, RANKS),
    ),
}
"""By the service that tells them."""
