"""What the core has done since it began: tokens, ends and latencies. Only what is counted takes part (`is_counted`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from services.scheduler.core.request import FinishReason, Request

TIME_TO_FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
"""Those of `gen_ai.server.time_to_first_token` in OpenTelemetry's GenAI conventions, then on: a queue can be long."""

INTER_TOKEN_LATENCY_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Those of `gen_ai.server.time_per_output_token`, then on: a preemption stands between two tokens."""


class Histogram:
    """Durations by bucket; a bound, in seconds, is the last value of its bucket, and one more bucket takes the rest."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_ns = 0
        self._bounds_ns = [round(1e9 * bound_s) for bound_s in bounds_s]

    def add(self, duration_ns: int, times: int = 1) -> None:
        """So long, so many times."""
        self.counts[bisect_left(self._bounds_ns, duration_ns)] += times
        self.sum_ns += duration_ns * times


class Counters:
    """They only rise. A choice counts as a request of its own, but its prompt once for all choices."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Of the requests that started, what was found in the cache included; a preempted one counts once."""
        self.output_tokens = 0
        """Ids that their owners were told."""
        self.dropped_tokens = 0
        """Ids sampled past the end of their request."""
        self.prefix_query_tokens = 0
        """Prompt tokens of the requests that started and read the prefix cache."""
        self.prefix_hit_tokens = 0
        """Of these, the ones found there."""
        self.preemptions = 0
        self.finished: Counter[FinishReason] = Counter()
        self.aborted = 0
        """Requests that their frontend ended: a client left, or a stop string was found."""
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_BOUNDS_S)
        """From the submission, of each choice that got an id."""
        self.inter_token_latency = Histogram(INTER_TOKEN_LATENCY_BOUNDS_S)
        """Between a choice's ids, from step to step. (A step brings a choice one id. Where one will bring several, each
        has an equal share of the time, so that the sum stays the time a reader waits.)"""
        self.queue_time = Histogram(TIME_TO_FIRST_TOKEN_BOUNDS_S)
        """From the submission to the first step, of each choice that ran."""
        self.prefill_time = Histogram(TIME_TO_FIRST_TOKEN_BOUNDS_S)
        """From there to the first id, of each choice that got one."""
        self.decode_time = Histogram(TIME_TO_FIRST_TOKEN_BOUNDS_S)
        """From there to the last id, of each of these, once it has ended."""
        self.last_ids_ns = -1
        """When a step last brought ids; never 0, which is a request's that has none."""

    def started(self, request: Request) -> None:
        """A request has begun to run, for the first time. The first choice that does counts the prompt of all."""
        if request.counts_prompt and request.submission.is_counted:
            request.counts_prompt = False
            self.prompt_tokens += request.prompt_tokens

    def first_step(self, request: Request) -> None:
        """A choice has left the queue, for the first time."""
        if request.submission.is_counted:
            self.queue_time.add(request.scheduled_ns - request.queued_ns)

    def first_id(self, request: Request) -> None:
        """A choice has its first id."""
        if request.submission.is_counted:
            self.time_to_first_token.add(request.first_token_ns - request.queued_ns)
            self.prefill_time.add(request.first_token_ns - request.scheduled_ns)

    def ended(self, request: Request) -> None:
        """A request is over, however. Where it never ran, another choice counts the prompt."""
        if request.first_token_ns and request.submission.is_counted:
            self.decode_time.add(request.last_id_ns - request.first_token_ns)
        if request.counts_prompt and request.siblings:
            heir = request.siblings[0]
            heir.counts_prompt = True
            if heir.scheduled_ns:
                self.started(heir)

    def ids_told(self, num_ids: int, num_hidden: int, earlier_ns: Sequence[int], now_ns: int) -> None:
        """A step has brought an id to each of `num_ids` choices, `num_hidden` of which do not count.

        `earlier_ns` are the times of the last id of those who had none at `last_ids_ns`; 0: none at all.
        """
        self.output_tokens += num_ids - num_hidden
        if steady := num_ids - len(earlier_ns):
            self.inter_token_latency.add(now_ns - self.last_ids_ns, steady)
        for id_ns in earlier_ns:
            if id_ns:
                self.inter_token_latency.add(now_ns - id_ns)
        if num_ids:
            self.last_ids_ns = now_ns
