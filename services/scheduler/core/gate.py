"""Who may queue: what can never fit, and what finds the queue full, is refused at once."""

from __future__ import annotations

from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Failure, FailureKind, Submission


def length_failure(submission: Submission, limits: Limits) -> Failure | None:
    """Of a request that could never run to its end."""
    key, prompt_tokens = submission.key, len(submission.prompt_ids)
    choices = submission.num_choices
    places = limits.max_slots + limits.tenant_waiting
    if choices > places and submission.is_counted:
        message = (
            f"num_choices: is {choices}, of one tenant at most {places} can run and wait (--max-num-seqs "
            f"{limits.max_slots}, --tenant-queue-share {limits.tenant_share:g} of --max-waiting-requests "
            f"{limits.max_waiting}); ask for fewer"
        )
        return Failure(key, FailureKind.INVALID, message)
    only_scored = submission.has_scores and submission.num_choices == 1
    if prompt_tokens < 1 or (submission.max_tokens < 1 and not only_scored):
        return Failure(key, FailureKind.INVALID, "prompt_ids and max_tokens: a request needs at least 1 of each")
    if any(len(output) >= submission.max_tokens for _, output in submission.resumed):
        return Failure(key, FailureKind.INVALID, "resumed: a choice has max_tokens ids or more already; it has ended")
    if prompt_tokens + submission.max_tokens <= limits.context_tokens:
        return None
    message = (
        f"prompt has {prompt_tokens} tokens and max_tokens is {submission.max_tokens}, the context holds "
        f"{limits.context_tokens} (the KV pool {limits.pool_tokens}); shorten one of them, or start the "
        "scheduler with a larger --max-model-len or --num-kv-blocks"
    )
    return Failure(key, FailureKind.TOO_LONG, message)


def queue_failure(
    submission: Submission,
    limits: Limits,
    *,
    startable: int,
    waiting: int,
    waiting_tokens: int,
    tenant_waiting: int,
    num_tokens: int,
) -> Failure | None:
    """Of a request that finds the queue, or its tenant's share of it, full.

    `startable` requests could start at once, so as many do not count as waiting; `num_tokens` would be added.
    """
    key, choices = submission.key, submission.num_choices
    if waiting + choices <= startable:
        return None
    if waiting + choices > limits.max_waiting + startable:
        message = f"{waiting} requests wait, the limit is --max-waiting-requests {limits.max_waiting}; try again later"
        return Failure(key, FailureKind.QUEUE_FULL, message)
    if waiting and waiting_tokens + num_tokens > limits.max_waiting_tokens:
        message = (
            f"{waiting_tokens} prompt tokens wait and this request has {num_tokens}, the limit is --max-waiting-tokens "
            f"{limits.max_waiting_tokens}; try again later"
        )
        return Failure(key, FailureKind.QUEUE_FULL, message)
    if tenant_waiting + choices > limits.tenant_waiting + startable:
        message = (
            f"tenant {submission.tenant!r} has {tenant_waiting} requests waiting, its share of the queue is "
            f"{limits.tenant_waiting} of {limits.max_waiting} (--tenant-queue-share {limits.tenant_share:g}); "
            "try again later"
        )
        return Failure(key, FailureKind.TENANT_OVER_SHARE, message)
    return None


def wait_failure(submission: Submission, limits: Limits, expected_ns: int) -> Failure | None:
    """Of a request that would wait too long. One that goes on from elsewhere has begun for its caller, and may wait."""
    limit_ns = limits.max_queue_wait_ns
    if limit_ns is None or expected_ns <= limit_ns or submission.resumed or not submission.is_counted:
        return None
    excess_ns = expected_ns - limit_ns
    message = (
        f"would wait for about {expected_ns / 1e9:.1f} s before it starts, the limit is --max-queue-wait-s "
        f"{limit_ns / 1e9:g}; try again in {excess_ns / 1e9:.1f} s"
    )
    return Failure(submission.key, FailureKind.QUEUE_WAIT, message, excess_ns)
