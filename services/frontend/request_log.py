"""One line of the log for each request, as it ends, however that is: whose it was, what it took, what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from services.common.caller import caller
from services.common.errors import RequestError
from services.common.telemetry.context import CURRENT
from services.frontend import request_id
from services.frontend.answer import Answer
from services.frontend.journey import Journey
from services.frontend.request import Job
from services.frontend.trace_context import parent_of

LABEL_CHARS = 256

log = logging.getLogger(__name__)


class Entry:
    """What is known of one call so far; who learns more sets it."""

    def __init__(self, model: str, method: str, context: Any, label: str) -> None:
        """`method` by its full name, `label` the client's own."""
        self.request_id = ""
        self.tenant = caller()
        self.is_aborted = False
        """By another call: what had not stopped was ended by it."""
        self.job: Job | None = None
        self.answer: Answer | None = None
        self._journey: Journey | None = None
        self._model = model
        self._method = method
        self._context = context
        self._label = label[:LABEL_CHARS]
        span = CURRENT.get() or parent_of(context)
        self._trace_id, self._span_id = (span.trace_id, span.span_id) if span is not None else ("", "")
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()

    async def greet(self) -> str:
        """Gives the call its id, and tells its caller."""
        self.request_id = request_id.new_id()
        await request_id.tell(self._context, self.request_id)
        return self.request_id

    def submitted(self, journey: Journey) -> None:
        """An engine has it; another may by its end."""
        self._journey = journey

    def fields(self, code: grpc.StatusCode, error: RequestError | None) -> dict[str, object]:
        """All of it, at the call's end."""
        told: dict[str, object] = {
            "request_id": self.request_id,
            "trace_id": self._trace_id,
            "span_id": self._span_id,
            "method": self._method,
            "model": self._model,
            "peer": self._context.peer(),
            "tenant": self.tenant,
            "label": self._label,
            "status": code.name,
            "duration_s": self._loop.time() - self._begun_s,
        }
        if error is not None:
            told |= {"reason": error.reason, "error": _words(error)}
        if self.job is not None:
            told |= self._accounting(self.job)
        return {name: value for name, value in told.items() if value != ""}

    def _accounting(self, job: Job) -> Mapping[str, object]:
        told: dict[str, object] = {
            "engine_id": "" if self._journey is None else self._journey.engine_id,
            "choices": job.options.n,
            "prompt_tokens": len(job.prompt_ids),
        }
        answer = self.answer
        if answer is None:
            return told
        ends = Counter(reason or ("abort" if self.is_aborted else "") for reason in answer.stopped)
        del ends[""]
        first_s = answer.first_ids_s
        return told | {
            "cached_tokens": answer.cached_tokens,
            "output_tokens": answer.completion_tokens,
            "finish_reasons": ends,
            "queue_s": answer.queue_s,
            "ttft_s": None if first_s is None else first_s - self._begun_s,
        }


class RequestLog:
    """Tells each call of a model once, where that is wanted."""

    def __init__(self, model: str, *, is_on: bool = True) -> None:
        self._model = model
        self._is_on = is_on

    @contextmanager
    def entered(self, method: str, context: Any, label: str = "") -> Iterator[Entry]:
        """Around a call. Where its client has left, that is told at once: a call that waits for the client to take a
        message may end much later."""
        entry = Entry(self._model, method, context, label)
        is_told = not self._is_on

        def tell(code: grpc.StatusCode, error: RequestError | None = None) -> None:
            nonlocal is_told
            if not is_told:
                is_told = True
                log.info("request ended", extra={"fields": entry.fields(code, error)})

        context.add_done_callback(lambda _: tell(_left(context)))
        try:
            yield entry
        except RequestError as error:
            tell(error.code, error)
            raise
        except asyncio.CancelledError:
            tell(_left(context))
            raise
        except Exception:
            tell(grpc.StatusCode.INTERNAL)
            raise
        else:
            tell(grpc.StatusCode.OK)


def _words(error: RequestError) -> str:
    """What may stand in a log: errors hold no text of a prompt, but a compiler's words quote the grammar."""
    if not error.reason.startswith("GRAMMAR"):
        return error.message
    fields = ", ".join(violation.field for violation in error.violations)
    return f"{fields or 'the grammar'}: its client was told more"


def _left(context: Any) -> grpc.StatusCode:
    """Why a call is over that has not ended by itself."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED
