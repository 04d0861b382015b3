"""The engine contract's messages to and from own types."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

import grpc
import numpy as np
import numpy.typing as npt
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2

from services.common.contract import GRAMMAR, PROTOCOL_VERSION
from services.common.errors import RequestError
from services.common.grammar import to_proto
from services.frontend.engine import EngineFinish, Outputs, Scores, StepReport, Submission
from services.frontend.request import EngineFacts, Logprob, Sampling

_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_RETRY_AFTER_S = 1.0
_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
_REASONS = {generation_pb2.FINISH_REASON_STOP: "stop", generation_pb2.FINISH_REASON_LENGTH: "length"}
LOWEST_LOGPROB = -9999.0


FEATURES = (GRAMMAR,)
"""Optional parts of the contract that this frontend knows."""


class EngineContractError(Exception):
    """The engine sent what the contract does not allow; its stream cannot be trusted further."""


def hello(frontend_id: str, tokenizer_hash: str) -> engine_pb2.AttachRequest:
    """The first message down."""
    return engine_pb2.AttachRequest(
        hello=engine_pb2.FrontendHello(
            min_version=PROTOCOL_VERSION,
            max_version=PROTOCOL_VERSION,
            features=FEATURES,
            frontend_id=frontend_id,
            tokenizer_hash=tokenizer_hash,
        )
    )


def new_frontend_id() -> str:
    """Random, once a process."""
    return secrets.token_hex(16)


def submit(request_id: int, submission: Submission) -> engine_pb2.AttachRequest:
    """A whole request down."""
    return engine_pb2.AttachRequest(
        submit=engine_pb2.Submit(
            request_id=request_id,
            num_choices=submission.num_choices,
            prompt_ids=_column(submission.prompt_ids, "<u4"),
            sampling=sampling_message(submission.sampling),
            seed=submission.seed,
            max_tokens=submission.max_tokens,
            min_tokens=submission.min_tokens,
            stop_ids=_column(submission.stop_ids, "<u4"),
            logprobs=submission.logprobs,
            prompt_logprobs=submission.prompt_logprobs,
            grammar=None if submission.grammar is None else to_proto(submission.grammar),
            priority=submission.priority,
            tenant=submission.tenant,
            block_digests=submission.digests.blocks if submission.digests else b"",
            root_digest=submission.digests.root if submission.digests else b"",
            arrived_unix_ns=submission.arrived_unix_ns,
            timeout_ms=submission.timeout_ms,
            traceparent=submission.traceparent,
            tracestate=submission.tracestate,
            clock_offset_ns=submission.clock_offset_ns,
            resumed=[
                engine_pb2.Submit.Resumed(choice=choice, token_ids=_column(ids, "<u4"))
                for choice, ids in submission.resumed
            ],
        )
    )


def abort(choice_ids: Sequence[int]) -> engine_pb2.AttachRequest:
    """The end of choices that nobody waits for; choice i of a request is its id + i."""
    return engine_pb2.AttachRequest(abort=engine_pb2.Abort(request_ids=_column(choice_ids, "<u8")))


def ping(sent_unix_ns: int) -> engine_pb2.AttachRequest:
    """Answered by a heartbeat at once."""
    return engine_pb2.AttachRequest(ping=engine_pb2.Ping(sent_unix_ns=sent_unix_ns))


def sampling_message(sampling: Sampling) -> generation_pb2.Sampling:
    """Every scalar set, as the engine contract wants."""
    return generation_pb2.Sampling(
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        logit_bias=dict(sampling.logit_bias),
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )


def read_hello(message: engine_pb2.EngineHello) -> EngineFacts:
    """Raises EngineContractError for a version that is not spoken here, or facts that cannot be."""
    if message.version != PROTOCOL_VERSION:
        raise EngineContractError(f"the engine speaks version {message.version}, this frontend {PROTOCOL_VERSION}")
    if message.vocab_size == 0 or message.context_tokens == 0:
        raise EngineContractError(
            f"the engine's hello has vocab_size {message.vocab_size} and context_tokens {message.context_tokens}"
        )
    return EngineFacts(
        engine_id=message.engine_id,
        model=message.model,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        context_tokens=message.context_tokens,
        block_tokens=message.block_tokens,
        max_choices=max(message.max_choices, 1),
        max_logprobs=message.max_logprobs,
        fragment_bytes=message.fragment_bytes,
        features=frozenset(message.features),
    )


def read_outputs(message: engine_pb2.StepOutputs) -> StepReport:
    """Raises EngineContractError where columns do not fit each other."""
    request_ids = _read(message.request_ids, "<u8", "request_ids").tolist()
    token_ids = _read(message.token_ids, "<u4", "token_ids").tolist()
    counts = _read(message.token_counts, "<u4", "token_counts").tolist() or [1] * len(request_ids)
    if len(counts) != len(request_ids) or sum(counts) != len(token_ids):
        raise EngineContractError(
            f"step {message.step}: {len(request_ids)} requests, {len(counts)} counts of {sum(counts)} ids, "
            f"{len(token_ids)} ids"
        )
    logprobs = _read_logprobs(message.logprobs, len(token_ids), message.step) if message.HasField("logprobs") else {}
    if not message.token_counts and not logprobs and len(set(request_ids)) == len(request_ids):
        # By far the most steps: an id a request, and nothing else.
        outputs = {
            request_id: Outputs((token_id,)) for request_id, token_id in zip(request_ids, token_ids, strict=True)
        }
    else:
        outputs = _share_ids(request_ids, counts, token_ids, logprobs)
    for told in message.prompt_logprobs:
        _add(outputs, told.request_id, Outputs(scores=(_read_scores(told, message.step),)))
    for started in message.started:
        _add(outputs, started.request_id, Outputs(cached_tokens=started.cached_tokens))
    for finished in message.finished:
        _add(outputs, finished.request_id, Outputs(finish=_read_finish(finished)))
    return StepReport(outputs, {failed.request_id: _read_failed(failed) for failed in message.failed})


def _share_ids(
    request_ids: Sequence[int], counts: Sequence[int], token_ids: Sequence[int], logprobs: Mapping[int, Logprob]
) -> dict[int, Outputs]:
    outputs: dict[int, Outputs] = {}
    start = 0
    for request_id, count in zip(request_ids, counts, strict=True):
        places = range(start, start + count)
        start += count
        own = tuple(logprobs[place] for place in places if place in logprobs)
        _add(outputs, request_id, Outputs(tuple(token_ids[places.start : places.stop]), own))
    return outputs


def _add(outputs: dict[int, Outputs], request_id: int, new: Outputs) -> None:
    outputs[request_id] = outputs[request_id].then(new) if request_id in outputs else new


def _read_finish(finished: engine_pb2.Finished) -> EngineFinish:
    if finished.reason not in _REASONS:
        raise EngineContractError(f"request {finished.request_id} finished with reason {finished.reason}")
    stop_id = finished.stop_id if finished.HasField("stop_id") else None
    return EngineFinish(_REASONS[finished.reason], stop_id, finished.last_token_unix_ns)


def _read_failed(failed: engine_pb2.Failed) -> RequestError:
    code = _CODES.get(failed.code, grpc.StatusCode.INTERNAL)
    retry_after_s = failed.retry_after_ms / 1000 if failed.HasField("retry_after_ms") else None
    if retry_after_s is None and code in _RETRIED:
        retry_after_s = _RETRY_AFTER_S
    return RequestError(
        code,
        failed.reason or "ENGINE_FAILED",
        failed.message or "the engine gave no reason",
        retry_after_s=retry_after_s,
    )


def _read_logprobs(columns: generation_pb2.LogprobColumns, num_ids: int, step: int) -> dict[int, Logprob]:
    """By place in the step's ids."""
    values = _read(columns.logprobs, "<f4", "logprobs")
    ranks = _read(columns.ranks, "<u4", "ranks")
    places = _read(columns.places, "<u4", "places") if columns.places else np.arange(len(values), dtype="<u4")
    fits = len(values) == len(ranks) == len(places) and (len(places) == 0 or int(places.max()) < num_ids)
    if not fits:
        raise EngineContractError(
            f"step {step}: {len(values)} logprobs, {len(ranks)} ranks, {len(places)} places for {num_ids} ids"
        )
    # A NaN stays one: it is that request's fault, and is found where the request is.
    own = zip(places.tolist(), values.tolist(), ranks.tolist(), strict=True)
    if not columns.top_counts:
        return {place: Logprob(max(value, LOWEST_LOGPROB), rank) for place, value, rank in own}
    counts, ids, logprobs = _read_top(columns, len(values), f"step {step}: logprobs")
    top = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return {
        place: Logprob(max(value, LOWEST_LOGPROB), rank, tuple(top[start:stop]))
        for (place, value, rank), (start, stop) in zip(own, itertools.pairwise([0, *ends]), strict=True)
    }


def _read_top(
    columns: generation_pb2.LogprobColumns, num_ids: int, what: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """How many alternatives each id has, [n], and all of them: ids and logprobs."""
    counts = _read(columns.top_counts, "<u4", "top_counts").astype(np.uint32)
    ids = _read(columns.top_ids, "<u4", "top_ids").astype(np.uint32)
    logprobs = _read(columns.top_logprobs, "<f4", "top_logprobs").astype(np.float32)
    total = int(counts.sum(dtype=np.int64))
    if len(counts) != num_ids or not total == len(ids) == len(logprobs):
        raise EngineContractError(
            f"{what}: {num_ids} of them, {len(counts)} counts of {total} alternatives, {len(ids)} ids and "
            f"{len(logprobs)} logprobs of those"
        )
    return counts, ids, np.maximum(logprobs, np.float32(LOWEST_LOGPROB))


def _read_scores(told: engine_pb2.PromptLogprobs, step: int) -> Scores:
    values = _read(told.logprobs.logprobs, "<f4", "prompt_logprobs.logprobs").astype(np.float32)
    ranks = _read(told.logprobs.ranks, "<u4", "prompt_logprobs.ranks").astype(np.uint32)
    if len(values) != len(ranks) or told.logprobs.places:
        raise EngineContractError(
            f"step {step}: {len(values)} prompt logprobs and {len(ranks)} ranks, or places for them, which have none"
        )
    plain = Scores.plain(told.start, np.maximum(values, np.float32(LOWEST_LOGPROB)), ranks)
    if not told.logprobs.top_counts:
        return plain
    counts, ids, logprobs = _read_top(told.logprobs, len(values), f"step {step}: prompt_logprobs")
    if len(set(counts.tolist())) > 1:
        raise EngineContractError(f"step {step}: prompt_logprobs has more alternatives to one position than to another")
    shape = (len(values), int(counts[0]) if len(counts) else 0)
    return replace(plain, top_ids=ids.reshape(shape), top_logprobs=logprobs.reshape(shape))


def _column(values: Sequence[int], dtype: str) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def _read(column: bytes, dtype: str, name: str) -> npt.NDArray[np.generic]:
    try:
        return np.frombuffer(column, dtype=dtype)
    except ValueError as error:
        raise EngineContractError(f"{name}: {len(column)} bytes are not a column of {dtype}") from error
