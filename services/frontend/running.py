"""The one way of every generation, by whichever API it came: to the engine, and what comes of it to the client."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import numpy as np

from services.common.contract import TRACE_CONTEXT
from services.common.errors import RequestError
from services.common.telemetry.names import DELIVERY
from services.common.telemetry.server_span import ServerSpan, server_span
from services.frontend import request_spans
from services.frontend.answer import Answer
from services.frontend.engine import Scores, Submission
from services.frontend.fleet import Fleet
from services.frontend.generation_metrics import generation_times
from services.frontend.journey import Journey
from services.frontend.prompt_blocks import block_digests
from services.frontend.quotas import Quotas
from services.frontend.request import Delta, Job
from services.frontend.trace_context import TraceContext, trace_context_of

Context: TypeAlias = Any  # grpc.aio.ServicerContext; the generated base class names a union that mypy cannot narrow
Send: TypeAlias = Callable[[list[tuple[int, Delta]]], Awaitable[None]]
"""Deltas to the client, by choice."""

Tell: TypeAlias = Callable[[Scores], Coroutine[Any, Any, None]]
"""Prompt logprobs to the client."""

Submitted: TypeAlias = Callable[[Journey], None]
"""Told of the engine's request, for who may have to close it."""

NOTHING_TO_SCORE = Scores.plain(1, np.zeros(0, np.float32), np.zeros(0, np.uint32))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """Whose generation it is, and the gRPC call that waits for it."""

    request_id: str
    tenant: str
    context: Context
    span: ServerSpan | None = field(default_factory=server_span)
    """None where it is not traced."""


class Runner:
    """Runs jobs on the one engine."""

    def __init__(self, engine: Fleet, quotas: Quotas) -> None:
        self._engine = engine
        self._quotas = quotas

    async def run(
        self,
        job: Job,
        answer: Answer,
        call: Call,
        send: Send,
        tell: Tell,
        submitted: Submitted = lambda request: None,
    ) -> None:
        """Returns when every choice has stopped. Raises what has ended it before, once all that came is sent.

        A stream that a client resumes is charged for what is computed again, its prompt and the ids that had arrived,
        and for what is new.
        """
        self._quotas.charge(call.tenant, len(job.prompt_ids) + answer.repeated_tokens)
        try:
            await self._timed(job, answer, call, send, tell, submitted)
        finally:
            self._quotas.charge(call.tenant, answer.new_tokens)

    async def _timed(self, job: Job, answer: Answer, call: Call, send: Send, tell: Tell, submitted: Submitted) -> None:
        """The same, with its spans and durations where these are told."""
        times = generation_times()
        if times is None and call.span is None:
            await self._run(job, answer, call, send, tell, submitted)
            return
        if times is not None:
            times.asked(job)
            send = times.timing(send)
        if call.span is not None:
            request_spans.asked(call.span, job, call.request_id)
        try:
            await self._run(job, answer, call, send, tell, submitted)
        finally:
            if times is not None:
                times.answered(answer)
            if call.span is not None:
                request_spans.answered(call.span, job, answer)

    async def _run(self, job: Job, answer: Answer, call: Call, send: Send, tell: Tell, submitted: Submitted) -> None:
        if job.options.prompt_logprobs is not None and len(job.prompt_ids) == 1:
            await tell(NOTHING_TO_SCORE)
        if not job.asks_engine:
            if deltas := answer.nothing():
                await send(deltas)
        elif not answer.running:
            while not answer.done:
                await send(await answer.take())
        else:
            submission = await _submission(job, answer.running, call)
            if call.span is not None:
                call.span.leave(submission.arrived_unix_ns)
            request = self._engine.submit(submission, answer)
            submitted(request)
            try:
                await _deliver(job, answer, request, call, send, tell)
            finally:
                if call.span is not None and not answer.running:
                    call.span.begin(DELIVERY, request.ended_unix_ns())


async def _deliver(job: Job, answer: Answer, request: Journey, call: Call, send: Send, tell: Tell) -> None:
    """From the engine to the client, until every choice has stopped. A choice that fails ends the call."""
    # A call that is cancelled while a slow client holds up a message may stay where it is: the callback is what
    # tells the engine at once.
    call.context.add_done_callback(lambda _: request.close())
    untold = call.span
    try:
        while not answer.done:
            deltas = await answer.take()
            for scores in answer.take_scores():
                await tell(scores)
            if deltas:
                await send(deltas)
                if untold is not None:
                    request_spans.first_told(untold)
                    untold = None
    except RequestError as error:
        if error.code is grpc.StatusCode.INTERNAL:
            log.error("request %s (label %r): %s", call.request_id, job.options.label, error.message)
        raise
    finally:
        request.close()
        answer.close()


async def _submission(job: Job, running: tuple[int, ...], call: Call) -> Submission:
    digests = await block_digests(job, call.tenant)
    remaining_s: float | None = call.context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise RequestError(
            grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", "the deadline passed before the engine was asked"
        )
    trace = trace_context_of(call.context) if TRACE_CONTEXT in job.engine.features else TraceContext()
    return Submission(
        prompt_ids=job.prompt_ids,
        sampling=job.options.sampling,
        seed=job.options.seed,
        max_tokens=job.max_tokens,
        min_tokens=job.options.min_tokens,
        stop_ids=job.stop_ids,
        logprobs=job.options.engine_logprobs,
        arrived_unix_ns=time.time_ns(),
        timeout_ms=None if remaining_s is None else int(remaining_s * 1000),
        num_choices=job.options.num_choices if job.max_tokens else 1,  # a prompt is scored once
        prompt_logprobs=job.options.prompt_logprobs,
        grammar=job.options.grammar if job.max_tokens else None,
        priority=job.options.priority,
        tenant=call.tenant,
        digests=digests,
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        is_traced=call.span is not None,
        resumed=_resumed(job, running),
    )


def _resumed(job: Job, running: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The choices that are still to run, and their ids so far; nothing where all start."""
    received = job.options.received
    if not received:
        return ()
    return tuple((index, received[index].token_ids if index in received else ()) for index in running)
