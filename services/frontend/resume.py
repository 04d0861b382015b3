"""A stream that broke, continued: what had arrived of it, and its choices as they were then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import grpc
from triptych.inference.v1 import inference_pb2

from services.common.contract import RESUME
from services.common.errors import RequestError, invalid, unserved
from services.frontend.generation import Choice, NotFittingError
from services.frontend.request import Delta, EngineFacts, Job, Options, Received
from services.frontend.tokenizer import TextTokenizer, off_loop
from services.frontend.validation import check_ids

_BYTES_PER_ID = 16
"""Of text that takes as long to encode as an id to be read again, about."""


class Begun(NamedTuple):
    """A choice that goes on, and what of it had not arrived: text, or a finish."""

    choice: Choice
    delta: Delta


def read(options: inference_pb2.Options, resolved: Options, facts: EngineFacts, path: str) -> Options:
    """Options with the stream's seed and what had arrived of it. Raises RequestError.

    Prompt logprobs come before any id: once there is one they have all arrived.
    """
    if not options.HasField("resume"):
        return resolved
    resume, where = options.resume, f"{path}.resume"
    if options.HasField("seed") and options.seed != resume.seed:
        raise invalid(f"{path}.seed", f"is {options.seed}, but the stream's was {resume.seed}; leave it out, or equal")
    if not resume.fingerprint:
        raise invalid(f"{where}.fingerprint", "is empty; it is the one that PromptInfo told")
    if resume.fingerprint != facts.fingerprint:
        raise RequestError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "FINGERPRINT_MISMATCH",
            f"{where}.fingerprint is {resume.fingerprint:.64}, the engine's is {facts.fingerprint}: its ids would not "
            "go on from those that had arrived; begin anew, without resume",
        )
    if options.HasField("best_of") and resume.choices:
        raise invalid(
            f"{where}.choices",
            "is not for best_of, which tells its choices together at the end; begin anew, with the same seed",
        )
    received = _read_received(resume, resolved, facts, where)
    began = any(one.token_ids or one.is_finished for one in received.values())
    if began and RESUME not in facts.features:
        raise unserved(where, "with ids that had arrived is not served by this engine; begin anew, with the same seed")
    prompt_logprobs = None if began else resolved.prompt_logprobs
    return replace(resolved, seed=resume.seed, received=received if began else {}, prompt_logprobs=prompt_logprobs)


def check_lengths(options: Options, max_tokens: int, path: str) -> None:
    """Raises INVALID_ARGUMENT where more ids had arrived than the request may have."""
    for received in options.received.values():
        if len(received.token_ids) > max_tokens:
            raise invalid(
                f"{path}.resume.choices[{received.place}].token_ids",
                f"has {len(received.token_ids)} ids, max_tokens is {max_tokens}; send the same request",
            )


async def begin(job: Job, tokenizer: TextTokenizer, path: str) -> Mapping[int, Begun]:
    """The choices of which something had arrived. Raises INVALID_ARGUMENT where it does not fit the request."""
    received = job.options.received
    size = _BYTES_PER_ID * sum(len(one.token_ids) for one in received.values())
    return await off_loop(
        size, lambda: {index: _begin(job, tokenizer, index, one, path) for index, one in received.items()}
    )


def _begin(job: Job, tokenizer: TextTokenizer, index: int, received: Received, path: str) -> Begun:
    choice = Choice(job, tokenizer, index)
    if received.is_finished:
        choice.end_before(len(received.token_ids))
        return Begun(choice, Delta())
    try:
        return Begun(choice, choice.replay(received.token_ids, received.cumulative_logprob, received.text_bytes))
    except NotFittingError as error:
        where = f"{path}.resume.choices[{received.place}].{error.field}"
        raise invalid(where, f"{error.description}; send the same request, and what had arrived of it") from None


def _read_received(
    resume: inference_pb2.Resume, options: Options, facts: EngineFacts, path: str
) -> dict[int, Received]:
    found: dict[int, Received] = {}
    for place, one in enumerate(resume.choices):
        where = f"{path}.choices[{place}]"
        if one.index >= options.n:
            raise invalid(f"{where}.index", f"is {one.index}; the request has the choices [0, {options.n})")
        if one.index in found:
            raise invalid(f"{where}.index", f"is {one.index} for a second time")
        if len(one.token_ids) > facts.context_tokens:  # none of them is looked at
            raise invalid(
                f"{where}.token_ids", f"has {len(one.token_ids)} ids, the context holds {facts.context_tokens}"
            )
        ids = tuple(one.token_ids)
        check_ids(ids, facts.vocab_size, f"{where}.token_ids")
        needs_sum = options.logprobs is not None and ids and not one.finished
        if needs_sum and not one.HasField("cumulative_logprob"):
            raise invalid(f"{where}.cumulative_logprob", "is missing; with logprobs it is their sum so far")
        if not math.isfinite(one.cumulative_logprob):
            raise invalid(f"{where}.cumulative_logprob", f"is {one.cumulative_logprob}; a finite number is needed")
        found[one.index] = Received(place, ids, one.text_bytes, one.finished, one.cumulative_logprob)
    return found
