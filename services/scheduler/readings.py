"""What metrics tell of the core and of the masks beside it, read between two steps."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.engine.v1 import engine_pb2

from services.common.telemetry import names
from services.common.telemetry.readings import Reading, Tally
from services.scheduler.clock import now_ns
from services.scheduler.core.counters import Counters, Histogram
from services.scheduler.core.request import FinishReason
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.masking import Masking

_WAITING = "waiting_"
"""What a phase begins with where a choice waits; the reason follows."""


def core_readings(
    core: Scheduler, heartbeat: engine_pb2.Heartbeat, waiting_for_grammars: int, is_tested: bool
) -> Iterator[Reading]:
    """`is_tested`: one request of the core is the self-test, which none of this tells."""
    for phase, count in core.by_phase().items():
        if phase.startswith(_WAITING):
            yield Reading(names.REQUESTS_WAITING, count, {names.REASON: phase.removeprefix(_WAITING)})
        else:
            yield Reading(names.REQUESTS_RUNNING, count, {names.PHASE: phase})
    yield Reading(names.REQUESTS_WAITING, waiting_for_grammars, {names.REASON: "grammar"})
    yield Reading(names.WAITING_TOKENS, heartbeat.waiting_tokens)
    yield Reading(names.EXPECTED_WAIT, core.expected_wait_ns(now_ns()) / 1e9)
    yield Reading(names.REQUEST_SLOTS, core.limits.max_slots)
    # The self-test is one prompt id, and so one block, while it runs.
    held = core.total_blocks - core.free_blocks - int(is_tested and core.num_running > 0)
    yield Reading(names.KV_USAGE, held / core.total_blocks)
    yield Reading(names.KV_BLOCKS, held, {names.STATE: "held"})
    yield Reading(names.KV_BLOCKS, core.total_blocks - held, {names.STATE: "free"})
    yield Reading(names.PREFIX_BLOCKS, core.cached_blocks)
    yield from _counted(core.counters)


def masking_readings(masking: Masking) -> Iterator[Reading]:
    """Of grammars."""
    yield Reading(names.GRAMMAR_REQUESTS, masking.num_requests)
    yield Reading(names.MASKS, masking.num_masks)
    yield Reading(names.MASK_TIME, masking.mask_s)


def _counted(counters: Counters) -> Iterator[Reading]:
    yield Reading(names.PREFIX_QUERIES, counters.prefix_query_tokens)
    yield Reading(names.PREFIX_HITS, counters.prefix_hit_tokens)
    yield Reading(names.PREEMPTIONS_COUNT, counters.preemptions)
    yield Reading(names.PROMPT_TOKENS_COUNT, counters.prompt_tokens)
    yield Reading(names.GENERATION_TOKENS, counters.output_tokens)
    yield Reading(names.DROPPED_TOKENS, counters.dropped_tokens)
    ends = {reason.value: counters.finished[reason] for reason in FinishReason} | {"abort": counters.aborted}
    for reason, count in ends.items():
        yield Reading(names.FINISHED, count, {names.REASON: reason})
    yield Reading(names.QUEUE_TIME, _tally(counters.queue_time))
    yield Reading(names.PREFILL_TIME, _tally(counters.prefill_time))
    yield Reading(names.DECODE_TIME, _tally(counters.decode_time))
    yield Reading(names.ENGINE_TIME_TO_FIRST_TOKEN, _tally(counters.time_to_first_token))
    yield Reading(names.INTER_TOKEN_LATENCY, _tally(counters.inter_token_latency))


def _tally(histogram: Histogram) -> Tally:
    return Tally(histogram.bounds_s, tuple(histogram.counts), histogram.sum_ns / 1e9)
