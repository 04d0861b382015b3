"""The phases of traced requests, queue, prefill and decode, as spans below the one that a Submit names.

Times are taken by this service's clock and told by that of the frontend, whose span they are parts of. All choices of a
request are told as one: it queues until its first choice is scheduled, and decodes until its last has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.engine.v1 import engine_pb2

from services.common.telemetry import names
from services.common.telemetry.context import MAX_TRACESTATE_BYTES, SpanContext, read_parent
from services.common.telemetry.spans import Event, Span, Value
from services.common.telemetry.tracing import Tracer
from services.scheduler.core.request import RequestKey, Submission
from services.scheduler.core.step import StepPlan, Updates

RECEIVED = "received"
"""An event of the queue span: until then the request was on its way here."""


@dataclass(eq=False)
class TracedRequest:
    """One that has not ended. Times in ns of this service's clock, 0: not yet."""

    parent: SpanContext
    offset_ns: int
    """What this clock is ahead of the one that the spans are told by."""
    submitted_ns: int
    received_ns: int
    prompt_tokens: int
    choices: set[RequestKey]
    """That have not ended."""
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    fault: str = ""
    was_aborted: bool = False


class RequestSpans:
    """All traced requests of the engine, by their choices. Costs nothing where none is traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._by_choice: dict[RequestKey, TracedRequest] = {}
        self._by_slot: dict[int, TracedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_choice)

    def received(self, submit: engine_pb2.Submit, submission: Submission, now_ns: int) -> None:
        """A request has come, which may be refused yet."""
        state = submit.tracestate if len(submit.tracestate) <= MAX_TRACESTATE_BYTES else ""
        parent = read_parent(submit.traceparent, state) if submit.traceparent else None
        if parent is None or not parent.is_sampled:
            return
        offset_ns = submit.clock_offset_ns
        request = TracedRequest(
            parent=parent,
            offset_ns=offset_ns,
            # Not after it came: clocks agree no better than their offset is known.
            submitted_ns=min(submit.arrived_unix_ns + offset_ns, now_ns) if submit.arrived_unix_ns else now_ns,
            received_ns=now_ns,
            prompt_tokens=len(submission.prompt_ids),
            choices=set(submission.choice_keys()),
        )
        self._by_choice.update(dict.fromkeys(request.choices, request))

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """A step was planned; it may start requests, or give their slots to others."""
        for slot in plan.freed_slots:
            self._by_slot.pop(slot, None)
        for start in plan.started:
            request = self._by_choice.get(start.key)
            if request is None:
                self._by_slot.pop(start.slot, None)
                continue
            self._by_slot[start.slot] = request
            request.scheduled_ns = request.scheduled_ns or now_ns

    def carried(self, plan: StepPlan) -> list[TracedRequest]:
        """The traced requests that a plan has rows of, each once."""
        found = (self._by_slot.get(slot) for slot in plan.slots)
        return list(dict.fromkeys(request for request in found if request is not None))

    def updated(self, updates: Updates) -> None:
        """A step was applied, or requests have failed."""
        for started in updates.started:
            if (request := self._by_choice.get(started.key)) is not None:
                request.scheduled_ns = min(request.scheduled_ns or started.scheduled_ns, started.scheduled_ns)
                if not request.first_token_ns:
                    request.first_token_ns, request.cached_tokens = started.first_token_ns, started.cached_tokens
        for finished in updates.finished:
            if (request := self._by_choice.get(finished.key)) is not None:
                request.last_token_ns = max(request.last_token_ns, finished.last_token_ns)
                request.preemptions += finished.preemptions
                self._end(finished.key, request, finished.last_token_ns)

    def failed(self, keys: Iterable[RequestKey], reason: str, now_ns: int) -> None:
        """Requests or choices end with an error."""
        for key in keys:
            if (request := self._by_choice.get(key)) is not None:
                request.fault = reason
                self._end(key, request, now_ns)

    def aborted(self, key: RequestKey, now_ns: int) -> None:
        """Nobody waits for a choice any more."""
        if (request := self._by_choice.get(key)) is not None:
            request.was_aborted = True
            self._end(key, request, now_ns)

    def left(self, frontend: int, now_ns: int) -> None:
        """Nobody waits for what a frontend has asked for."""
        for key in [key for key in self._by_choice if key.frontend == frontend]:
            self.aborted(key, now_ns)

    def _end(self, key: RequestKey, request: TracedRequest, now_ns: int) -> None:
        del self._by_choice[key]
        request.choices.discard(key)
        if not request.choices:
            self._by_slot = {slot: each for slot, each in self._by_slot.items() if each is not request}
            self._tell(request, now_ns)

    def _tell(self, request: TracedRequest, end_ns: int) -> None:
        if not (request.fault or request.was_aborted):
            end_ns = request.last_token_ns or end_ns
        marks = [
            (names.QUEUE, request.submitted_ns),
            (names.PREFILL, request.scheduled_ns),
            (names.DECODE, request.first_token_ns),
        ]
        reached = [(name, at_ns) for name, at_ns in marks if at_ns]
        for i, (name, start_ns) in enumerate(reached):
            is_last = i + 1 == len(reached)
            stop_ns = end_ns if is_last else reached[i + 1][1]
            self._tell_phase(request, name, start_ns, max(start_ns, stop_ns), is_last=is_last)

    def _tell_phase(self, request: TracedRequest, name: str, start_ns: int, end_ns: int, *, is_last: bool) -> None:
        attributes: dict[str, Value] = {names.CLOCK_OFFSET: request.offset_ns / 1e9}
        events: tuple[Event, ...] = ()
        if name == names.QUEUE:
            events = (Event(RECEIVED, request.received_ns - request.offset_ns),)
        elif name == names.PREFILL:
            attributes |= {names.PROMPT_TOKENS: request.prompt_tokens, names.CACHED_TOKENS: request.cached_tokens}
        else:
            attributes[names.PREEMPTIONS] = request.preemptions
        fault = request.fault if is_last else ""
        if is_last:
            attributes[names.END] = "failed" if fault else "aborted" if request.was_aborted else "finished"
        if fault:
            attributes[names.ERROR_TYPE] = fault
        self._tracer.end(
            Span(
                name,
                request.parent.child(),
                request.parent,
                start_ns - request.offset_ns,
                end_ns - request.offset_ns,
                attributes,
                error=fault or None,
                events=events,
            )
        )
