"""What the SERVER span of a generation tells: the GenAI conventions, never a word of prompt or answer.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from triptych.inference.v1 import inference_pb2

from services.common.grammar import JsonSchema
from services.common.telemetry import names
from services.common.telemetry.server_span import Kind, ServerSpan, Tracing
from services.common.telemetry.spans import Value
from services.common.telemetry.tracing import Tracer
from services.frontend.answer import Answer
from services.frontend.request import Job
from services.frontend.trace_context import parent_of

OWN = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADAPTER = "vllm.grpc.engine.VllmEngine"
"""Its messages are in a package that is not always installed."""

_MAX_CHOICES = 64
"""Finish reasons told of one answer."""


def _generation(operation: str, **attributes: Value) -> Kind:
    told = {names.GEN_AI_OPERATION_NAME: operation, names.GEN_AI_PROVIDER_NAME: names.PROVIDER, **attributes}
    return Kind(names.TOKENIZE, told)


KINDS = {
    f"{OWN}/Generate": _generation(names.TEXT_COMPLETION, **{names.GEN_AI_REQUEST_STREAM: True}),
    f"{OWN}/GenerateUnary": _generation(names.TEXT_COMPLETION, **{names.GEN_AI_REQUEST_STREAM: False}),
    f"{OWN}/Chat": _generation(names.CHAT, **{names.GEN_AI_REQUEST_STREAM: True}),
    f"{OWN}/ChatUnary": _generation(names.CHAT, **{names.GEN_AI_REQUEST_STREAM: False}),
    f"{ADAPTER}/Generate": _generation(names.TEXT_COMPLETION),
}


def tracing(tracer: Tracer) -> Tracing:
    """For the services that clients call."""
    return Tracing(tracer, parent_of, KINDS)


def asked(span: ServerSpan, job: Job, request_id: str) -> None:
    """What the request is, resolved: as the engine is asked."""
    options, sampling = job.options, job.options.sampling
    span.attributes |= {
        names.GEN_AI_REQUEST_MODEL: job.engine.model,
        names.GEN_AI_REQUEST_MAX_TOKENS: job.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.GEN_AI_OUTPUT_TYPE: "json"
        if options.grammar and isinstance(options.grammar.rule, JsonSchema)
        else "text",
        names.GEN_AI_RESPONSE_ID: request_id,
        names.GEN_AI_RESPONSE_MODEL: job.engine.model,
        names.GEN_AI_USAGE_INPUT_TOKENS: len(job.prompt_ids),
    }
    if options.seed < 1 << 63:  # a larger one is no integer of OTLP's
        span.attributes[names.GEN_AI_REQUEST_SEED] = options.seed
    if options.n > 1:  # the conventions leave out 1
        span.attributes[names.GEN_AI_REQUEST_CHOICE_COUNT] = options.n
    if options.received:
        span.attributes[names.RESUMED] = True


def first_told(span: ServerSpan) -> None:
    """The first of the answer is on its way to the client."""
    span.attributes[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = span.age_s()


def answered(span: ServerSpan, job: Job, answer: Answer) -> None:
    """What came of it, also where it ended before its end."""
    span.attributes |= {
        names.GEN_AI_USAGE_OUTPUT_TOKENS: answer.completion_tokens,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: answer.cached_tokens,
        # One a choice, as the conventions have it; "" of a choice that did not end by itself.
        names.GEN_AI_RESPONSE_FINISH_REASONS: answer.stopped[: min(job.options.n, _MAX_CHOICES)],
    }
