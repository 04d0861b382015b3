"""The door of the engine contract: what a Submit may hold, and the core's own type made of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2

from services.common import sampling
from services.common.contract import SAMPLING, SERVED_GRAMMAR, SERVED_SAMPLING, Door
from services.common.digests import DIGEST_BYTES
from services.common.errors import invalid, unserved
from services.common.grammar import Grammar, GrammarError, from_proto
from services.common.philox import derived_seed
from services.scheduler.core.request import RequestKey, Submission

NS_PER_MS = 1_000_000

_MAX_TIMEOUT_MS = 10 * 366 * 24 * 3600 * 1000
"""Longer ones (gRPC's "infinite" among them) are no deadline."""

PRIORITIES = range(-1000, 1001)
MAX_TENANT_BYTES = 128

MAX_STOP_IDS = 4096
"""The frontend's own cap is far lower; this one bounds what a frontend gone wrong can cost."""

_DOOR = Door(
    {
        "triptych.engine.v1.Submit": frozenset(
            {
                "request_id",
                "num_choices",
                "prompt_ids",
                "block_digests",
                "root_digest",
                "sampling",
                "seed",
                "max_tokens",
                "min_tokens",
                "stop_ids",
                "grammar",
                "logprobs",
                "prompt_logprobs",
                "priority",
                "tenant",
                "arrived_unix_ns",
                "timeout_ms",
                "traceparent",  # unread: a trace id is never a reason to refuse
                "tracestate",
                "clock_offset_ns",
                "resumed",
            }
        ),
        "triptych.engine.v1.Submit.Resumed": frozenset({"choice", "token_ids"}),
        SAMPLING: SERVED_SAMPLING,
        **SERVED_GRAMMAR,
        "triptych.engine.v1.FrontendHello": frozenset(
            {"min_version", "max_version", "features", "frontend_id", "tokenizer_hash"}
        ),
        "triptych.engine.v1.Fragment": frozenset({"request_id", "total_bytes", "data"}),
        "triptych.engine.v1.Abort": frozenset({"request_ids"}),
        "triptych.engine.v1.Ping": frozenset({"sent_unix_ns"}),
    }
)


def check(message: engine_pb2.FrontendHello | engine_pb2.Ping | engine_pb2.Fragment) -> None:
    """Raises RequestError(UNIMPLEMENTED) for a field that is not served."""
    _DOOR.check(message)


def read_submit(
    submit: engine_pb2.Submit,
    frontend: int,
    now_ns: int,
    *,
    vocab_size: int,
    text_vocab_size: int,
    block_tokens: int,
    max_choices: int,
    max_logprobs: int,
) -> Submission:
    """A request as the core takes it. Raises RequestError naming the field: INVALID_ARGUMENT or UNIMPLEMENTED.

    Ids that a caller chose lie below `text_vocab_size`. Digests are taken on trust: a frontend that could tell wrong
    ones reads all prompts anyway; their number is checked, which a frontend with another block size gets wrong.
    Sampling goes on unread but for its ranges: what the executor cannot take must end here, not there with the whole
    epoch. Lengths are the core's.
    """
    _DOOR.check(submit)
    if submit.num_choices == 0:
        raise invalid("num_choices", "is 0; a request has 1 choice or more")
    if submit.num_choices > max_choices:
        raise invalid("num_choices", f"is {submit.num_choices}, the limit is --max-choices {max_choices}")
    if submit.request_id + submit.num_choices > 1 << 64:
        raise invalid(
            "request_id", f"is {submit.request_id}, the last of its {submit.num_choices} choices has no uint64 number"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(submit, name)) > max_logprobs:
            raise invalid(name, f"is {wanted}, at most {max_logprobs} are taken here (the scheduler's --max-logprobs)")
    if submit.min_tokens > submit.max_tokens:
        raise invalid("min_tokens", f"is {submit.min_tokens}, more than max_tokens {submit.max_tokens}")
    _check_sampling(submit.sampling, text_vocab_size)
    if submit.priority not in PRIORITIES:
        raise invalid("priority", f"is {submit.priority}, not in [{PRIORITIES[0]}, {PRIORITIES[-1]}]")
    if len(submit.tenant.encode()) > MAX_TENANT_BYTES:
        raise invalid("tenant", f"has {len(submit.tenant.encode())} bytes, the limit is {MAX_TENANT_BYTES}")
    stop_ids = _ids("stop_ids", submit.stop_ids, vocab_size)
    if len(stop_ids) > MAX_STOP_IDS:
        raise invalid("stop_ids", f"has {len(stop_ids)} ids, the limit is {MAX_STOP_IDS}")
    prompt_ids = _ids("prompt_ids", submit.prompt_ids, text_vocab_size)
    _check_digests(submit, len(prompt_ids) // block_tokens, block_tokens)
    return Submission(
        key=RequestKey(frontend, submit.request_id),
        prompt_ids=prompt_ids,
        max_tokens=submit.max_tokens,
        min_tokens=submit.min_tokens,
        stop_ids=frozenset(stop_ids.tolist()),
        seed=derived_seed(submit.seed, 0),
        more_seeds=tuple(derived_seed(submit.seed, choice) for choice in range(1, submit.num_choices)),
        sampling=submit.sampling,
        logprobs=submit.logprobs if submit.HasField("logprobs") else None,
        prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
        deadline_ns=_deadline_ns(submit, now_ns),
        priority=submit.priority,
        tenant=submit.tenant,
        root_digest=submit.root_digest,
        digests=submit.block_digests,
        is_masked=submit.HasField("grammar"),
        is_stepwise=submit.grammar.forced_tokens,
        resumed=_read_resumed(submit, vocab_size),
    )


def _read_resumed(submit: engine_pb2.Submit, vocab_size: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The choices to run, in order, each with the ids it has."""
    found: dict[int, tuple[int, ...]] = {}
    for i, resumed in enumerate(submit.resumed):
        if resumed.choice >= submit.num_choices:
            raise invalid(
                f"resumed[{i}].choice", f"is {resumed.choice}; the request has the choices [0, {submit.num_choices})"
            )
        if resumed.choice in found:
            raise invalid(f"resumed[{i}].choice", f"is {resumed.choice} for a second time")
        ids = _ids(f"resumed[{i}].token_ids", resumed.token_ids, vocab_size)
        if len(ids) >= submit.max_tokens:
            raise invalid(
                f"resumed[{i}].token_ids", f"has {len(ids)} ids, max_tokens is {submit.max_tokens}; it has ended"
            )
        found[resumed.choice] = tuple(ids.tolist())
    if found and submit.HasField("prompt_logprobs"):
        raise invalid("prompt_logprobs", "is for choices from their start; they came before the ids that are resumed")
    return tuple(sorted(found.items()))


def read_grammar(submit: engine_pb2.Submit, *, is_served: bool) -> Grammar | None:
    """What its output is held to, None where nothing. Raises RequestError: INVALID_ARGUMENT or UNIMPLEMENTED."""
    if not submit.HasField("grammar"):
        return None
    if not is_served:
        raise unserved("grammar", "is not served by this engine; its log says why")
    try:
        grammar = from_proto(submit.grammar)
    except GrammarError as error:
        raise invalid(error.under("grammar"), error.description) from None
    if grammar.forced_tokens and submit.HasField("logprobs"):
        raise invalid("grammar.forced_tokens", "appends ids that have no logprobs; leave one of the two out")
    return grammar


def read_abort(abort: engine_pb2.Abort, frontend: int) -> list[RequestKey]:
    """The requests to end. Raises RequestError(INVALID_ARGUMENT) for a column of the wrong width."""
    return [RequestKey(frontend, request_id) for request_id in read_abort_ids(abort)]


def read_abort_ids(abort: engine_pb2.Abort) -> list[int]:
    """The frontend's own numbers of them. Raises as `read_abort`."""
    _DOOR.check(abort)
    if len(abort.request_ids) % 8:
        raise invalid("abort.request_ids", f"has {len(abort.request_ids)} bytes; a column of uint64 has 8 an id")
    ids: list[int] = np.frombuffer(abort.request_ids, "<u8").tolist()
    return ids


def _check_digests(submit: engine_pb2.Submit, full_blocks: int, block_tokens: int) -> None:
    if not submit.root_digest and not submit.block_digests:
        return
    if len(submit.root_digest) != DIGEST_BYTES:
        raise invalid("root_digest", f"has {len(submit.root_digest)} bytes; a digest has {DIGEST_BYTES}")
    if len(submit.block_digests) != full_blocks * DIGEST_BYTES:
        raise invalid(
            "block_digests",
            f"has {len(submit.block_digests)} bytes; the prompt fills {full_blocks} blocks of {block_tokens} tokens, "
            f"whose digests have {full_blocks * DIGEST_BYTES}",
        )


def _check_sampling(sampled: generation_pb2.Sampling, vocab_size: int) -> None:
    values = {field.name: value for field, value in sampled.ListFields() if field.name in sampling.RANGES}
    for name in ("allowed_token_ids", "banned_token_ids"):
        if (count := len(getattr(sampled, name))) > vocab_size:
            raise invalid(f"sampling.{name}", f"has {count} ids, the vocabulary {vocab_size}; name each id once")
    biases = sampled.logit_bias.items()
    fault = sampling.fault(values, biases, vocab_size) or sampling.choice_fault(
        sampled.allowed_token_ids, sampled.banned_token_ids, biases, vocab_size
    )
    if fault is not None:
        field, description = fault
        raise invalid(f"sampling.{field}", description)


def _ids(field: str, column: bytes, vocab_size: int) -> npt.NDArray[np.uint32]:
    if len(column) % 4:
        raise invalid(field, f"has {len(column)} bytes; a column of ids has 4 an id")
    ids = np.frombuffer(column, dtype="<u4")
    if len(ids) and int(ids.max()) >= vocab_size:
        raise invalid(field, f"holds id {int(ids.max())}, the vocabulary has {vocab_size}")
    return ids


def _deadline_ns(submit: engine_pb2.Submit, now_ns: int) -> int | None:
    if not submit.HasField("timeout_ms") or submit.timeout_ms > _MAX_TIMEOUT_MS:
        return None
    return now_ns + submit.timeout_ms * NS_PER_MS
