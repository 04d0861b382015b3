"""Messages of triptych.executor.v1 into own types and back. What is not served is refused here, by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import grpc
import numpy as np
import torch
from triptych.executor.v1 import executor_pb2 as pb
from triptych.inference.v1 import generation_pb2

from services.common.contract import (
    GRAMMAR,
    LOG_LEVEL,
    PROTOCOL_VERSION,
    SAMPLING,
    SERVED_SAMPLING,
    TRACE_CONTEXT,
    UNCOUNTED,
    Door,
)
from services.common.errors import RequestError, invalid, unserved
from services.executor.dtypes import CPU_DTYPES, Dtypes
from services.executor.executor import Facts
from services.executor.logprobs import Logprobs
from services.executor.masks import CACHE_SIZE, Mask, Words, allowing
from services.executor.plan import MAX_IN_FLIGHT, BadPlanError, Int64s, Outcome, Plan, Settings, Started
from services.executor.sampling_params import SamplingParams

FEATURES = (GRAMMAR, LOG_LEVEL, TRACE_CONTEXT, UNCOUNTED)
"""Optional parts of the contract served."""

_DTYPES = {
    pb.D_TYPE_FLOAT32: torch.float32,
    pb.D_TYPE_FLOAT16: torch.float16,
    pb.D_TYPE_BFLOAT16: torch.bfloat16,
    pb.D_TYPE_E4M3: torch.float8_e4m3fn,
    pb.D_TYPE_INT8: torch.int8,
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_GRAPHS = {None: pb.GRAPH_KIND_UNSPECIFIED, False: pb.GRAPH_KIND_EAGER, True: pb.GRAPH_KIND_FULL}

# The fields served now; every other one is refused. Rank and rendezvous are not: the ranks of an executor are its own
# processes, on its own machine. Counts of pipeline and data parallelism are served as "undivided" alone.
_SERVED = {
    "triptych.executor.v1.LoadRequest": frozenset({"min_version", "max_version", "features", "config"}),
    "triptych.executor.v1.EngineConfig": frozenset(
        {
            "model",
            "revision",
            "weights_hash",
            "dtype",
            "kv_dtype",
            "context_tokens",
            "block_tokens",
            "max_slots",
            "max_step_tokens",
            "tp_size",
            "pp_size",
            "dp_size",
        }
    ),
    "triptych.executor.v1.AllocateRequest": frozenset({"num_blocks"}),
    "triptych.executor.v1.RunRequest": frozenset({"open", "plan", "masks", "utility", "ping"}),
    "triptych.executor.v1.Open": frozenset({"epoch", "version"}),
    "triptych.executor.v1.Ping": frozenset({"sent_unix_ns"}),
    "triptych.executor.v1.Utility": frozenset({"id", "budget_ms", "set_log_level", "logger", "duration_s"}),
    "triptych.executor.v1.StepPlan": frozenset(
        {
            "step",
            "freed_slots",
            "started",
            "groups",
            "forced_ids",
            "slots",
            "token_counts",
            "masked_slots",
            "computed_tokens",
            "deadline_ms",
            "traceparent",
            "clock_offset_ns",
            "uncounted_slots",
        }
    ),
    "triptych.executor.v1.Masks": frozenset({"step", "masks"}),
    "triptych.executor.v1.Mask": frozenset(
        {"slot", "cached_id", "allowed_ids", "banned_ids", "bitmap", "cache_as"}  # draft_position: 0 alone
    ),
    "triptych.executor.v1.NewRequest": frozenset(
        {
            "slot",
            "token_ids",
            "prompt_tokens",
            "computed_tokens",
            "block_ids",
            "sampling",
            "seed",
            "min_tokens",
            "stop_ids",
            "logprobs",
            "prompt_logprobs",
        }
    ),
    "triptych.executor.v1.GroupUpdate": frozenset({"new_blocks", "copies"}),
    SAMPLING: SERVED_SAMPLING,
}
DOOR = Door(_SERVED)


@dataclass(frozen=True)
class LoadCall:
    """A checked Load. Two that are equal ask for the same thing.

    `model` is what the scheduler calls the checkpoint, for people; Loaded's hashes say what it is.
    """

    settings: Settings
    dtype: torch.dtype
    kv_dtype: torch.dtype
    model: str = field(compare=False)
    revision: str = field(compare=False)
    """Commit of a hub that the files must be of, where it is known here of which they are; empty: any."""

    def difference(self, other: LoadCall) -> str:
        """What `other` asks for that is not so here, for people."""
        theirs = asdict(other.settings) | {"dtype": other.dtype, "kv_dtype": other.kv_dtype}
        ours = asdict(self.settings) | {"dtype": self.dtype, "kv_dtype": self.kv_dtype}
        return ", ".join(f"{key} is {ours[key]}, not {theirs[key]}" for key in ours if ours[key] != theirs[key])


def load_call(request: pb.LoadRequest, tp_size: int = 1, dtypes: Dtypes = CPU_DTYPES) -> LoadCall:
    """Of an executor of `tp_size` ranks that serves `dtypes`. Raises RequestError where the request is not served or
    not valid."""
    if not request.min_version <= PROTOCOL_VERSION <= request.max_version:
        raise RequestError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "VERSION",
            f"the scheduler speaks contract versions {request.min_version} to {request.max_version}, this executor"
            f" {PROTOCOL_VERSION}; upgrade the older one",
        )
    DOOR.check(request)
    config = request.config
    if (asked := max(1, config.tp_size)) != tp_size:
        raise RequestError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "OTHER_TP_SIZE",
            f"config.tp_size is {asked}, this executor has --tp-size {tp_size}; give scheduler and executor the same",
        )
    for name in ("pp_size", "dp_size"):
        if (size := getattr(config, name)) > 1:
            raise unserved(f"config.{name}", f"= {size} is not served yet; one rank is")
    dtype = _dtype("config.dtype", config.dtype, dtypes.default, dtypes.served, dtypes)
    kv_dtype = _dtype("config.kv_dtype", config.kv_dtype, dtype, dtypes.kv_served, dtypes)
    for name in ("context_tokens", "block_tokens", "max_slots", "max_step_tokens"):
        if getattr(config, name) < 1:
            raise invalid(f"config.{name}", "must be at least 1")
    settings = Settings(config.context_tokens, config.block_tokens, config.max_slots, config.max_step_tokens)
    return LoadCall(settings, dtype, kv_dtype, config.model, config.revision)


def loaded(facts: Facts, settings: Settings, last_epoch: int) -> pb.LoadResponse:
    """The last message of a Load."""
    return pb.LoadResponse(
        loaded=pb.Loaded(
            version=PROTOCOL_VERSION,
            features=FEATURES,
            device=facts.device,
            weights_hash=facts.weights_hash,
            config_hash=facts.config_hash,
            vocab_size=facts.vocab_size,
            kv_groups=[pb.KvGroup(block_tokens=settings.block_tokens, block_bytes=facts.block_bytes)],
            kv_bytes=facts.kv_bytes,
            max_in_flight=MAX_IN_FLIGHT,
            mask_cache_size=CACHE_SIZE,
            dtype=_NUMBERS[facts.dtype],
            kv_dtype=_NUMBERS[facts.kv_dtype],
            last_epoch=last_epoch,
        )
    )


def allocation(request: pb.AllocateRequest) -> int:
    """Blocks of the one KV group. Raises RequestError."""
    DOOR.check(request)
    if len(request.num_blocks) != 1:
        raise invalid("num_blocks", f"has {len(request.num_blocks)} numbers, the model has 1 KV group")
    return int(request.num_blocks[0])


def plan(message: pb.StepPlan) -> Plan:
    """Raises BadPlanError where a field is not served or a column is malformed."""
    try:
        DOOR.check(message, "plan")
    except RequestError as error:
        raise BadPlanError(error.message) from error
    slots = _column(message.slots, "slots")
    if len(message.groups) > 1:
        raise BadPlanError(f"groups has {len(message.groups)} entries, the model has 1 KV group")
    group = message.groups[0] if message.groups else pb.GroupUpdate()
    return Plan(
        step=message.step,
        freed_slots=_column(message.freed_slots, "freed_slots"),
        started=tuple(_started(request) for request in message.started),
        new_blocks=_pairs(group.new_blocks, "new_blocks", "(slot, block)"),
        slots=slots,
        token_counts=_from_tail(_column(message.token_counts, "token_counts"), len(slots)),
        computed_tokens=message.computed_tokens if message.HasField("computed_tokens") else None,
        deadline_s=message.deadline_ms / 1000 if message.deadline_ms else None,
        copies=_pairs(group.copies, "copies", "(source, destination)"),
        masked_slots=_column(message.masked_slots, "masked_slots"),
        forced_ids=_pairs(message.forced_ids, "forced_ids", "(slot, token id)"),
        uncounted_slots=_column(message.uncounted_slots, "uncounted_slots"),
        message=message.SerializeToString(),
    )


def masks(message: pb.Masks, vocab_size: int) -> tuple[Mask, ...]:
    """Raises BadPlanError, naming the slot, where one is not served or malformed."""
    for mask in message.masks:
        try:
            DOOR.check(mask, f"masks: slot {mask.slot}")
        except RequestError as error:
            raise BadPlanError(error.message, (mask.slot,)) from error
    try:
        DOOR.check(message, "masks")
    except RequestError as error:
        raise BadPlanError(error.message) from error
    return tuple(_mask(mask, vocab_size) for mask in message.masks)


def result(outcome: Outcome, received_unix_ns: int, wait_us: int) -> pb.StepResult:
    """An outcome as the plan's StepResult."""
    message = pb.StepResult(
        step=outcome.step,
        token_counts=_to_tail(outcome.token_counts),
        token_ids=outcome.token_ids.astype("<u4").tobytes(),
        failed=[
            pb.FailedRow(
                slot=slot,
                kind=pb.FAULT_KIND_NO_ID_LEFT if slot in outcome.idless_slots else pb.FAULT_KIND_BAD_LOGITS,
            )
            for slot in outcome.failed_slots
        ],
        received_unix_ns=received_unix_ns,
        wait_us=wait_us,
        execute_us=outcome.execute_us,
        sample_us=outcome.sample_us,
        graph=_GRAPHS[outcome.in_graph],
    )
    for scores in outcome.prompt_scores:
        columns = _logprobs(scores.logprobs)
        message.prompt_logprobs.add(slot=scores.slot, start=scores.start, logprobs=columns)
    if outcome.logprob_places.size:
        message.logprobs.CopyFrom(_logprobs(outcome.logprobs))
        if len(outcome.logprob_places) < len(outcome.token_ids):
            message.logprobs.places = outcome.logprob_places.astype("<u4").tobytes()
    return message


def _logprobs(logprobs: Logprobs) -> generation_pb2.LogprobColumns:
    columns = generation_pb2.LogprobColumns(
        logprobs=logprobs.own.astype("<f4").tobytes(), ranks=logprobs.ranks.astype("<u4").tobytes()
    )
    if logprobs.top_ids.size:
        columns.top_counts = logprobs.top_counts.astype("<u4").tobytes()
        columns.top_ids = logprobs.top_ids.astype("<u4").tobytes()
        columns.top_logprobs = logprobs.top.astype("<f4").tobytes()
    return columns


def _mask(mask: pb.Mask, vocab_size: int) -> Mask:
    cache_as = mask.cache_as if mask.HasField("cache_as") else None
    try:
        if cache_as is not None and cache_as >= CACHE_SIZE:
            raise BadPlanError(f"cache_as is {cache_as}, ids of kept masks lie below {CACHE_SIZE}")
        kind = mask.WhichOneof("kind")
        if kind == "cached_id":
            return Mask(mask.slot, None, mask.cached_id, cache_as)
        if kind == "bitmap":
            return Mask(mask.slot, _bitmap(mask.bitmap, vocab_size), None, cache_as)
        if kind is None:
            raise BadPlanError("holds no mask")
        ids = _column(getattr(mask, kind), kind)
        if ids.size and (top := int(ids.max())) >= vocab_size:
            raise BadPlanError(f"{kind} holds id {top}, the vocabulary has {vocab_size}")
        return Mask(mask.slot, allowing(ids, vocab_size, but=kind == "banned_ids"), None, cache_as)
    except BadPlanError as error:
        raise BadPlanError(f"masks: slot {mask.slot}: {error}", (mask.slot,)) from error


def _bitmap(bitmap: bytes, vocab_size: int) -> Words:
    if len(bitmap) != 4 * (words := -(-vocab_size // 32)):
        raise BadPlanError(
            f"bitmap has {len(bitmap)} bytes, a vocabulary of {vocab_size} has {4 * words}: {words} words of 32 ids"
        )
    return np.frombuffer(bitmap, "<u4")


def _started(request: pb.NewRequest) -> Started:
    if len(request.block_ids) != 1:
        raise BadPlanError(f"started: slot {request.slot} has blocks of {len(request.block_ids)} KV groups, not of 1")
    try:
        sampling = SamplingParams.from_proto(request)
    except ValueError as error:
        raise BadPlanError(f"started: slot {request.slot}: {error}", (request.slot,)) from error
    return Started(
        slot=request.slot,
        token_ids=_bytes_to_ids(request.token_ids, "started.token_ids"),
        prompt_tokens=request.prompt_tokens,
        computed_tokens=request.computed_tokens,
        block_ids=_column(request.block_ids[0], "started.block_ids"),
        sampling=sampling,
        scored=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
    )


def _bytes_to_ids(column: bytes, name: str) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    if len(column) % 4:
        raise BadPlanError(f"{name} has {len(column)} bytes, no multiple of 4")
    return np.frombuffer(column, dtype="<u4")


def _column(column: bytes, name: str) -> Int64s:
    return _bytes_to_ids(column, name).astype(np.int64)


def _pairs(column: bytes, name: str, meaning: str) -> Int64s:
    numbers = _column(column, name)
    if numbers.size % 2:
        raise BadPlanError(f"{name} is not made of {meaning} pairs")
    return numbers.reshape(-1, 2)


def _from_tail(tail: Int64s, rows: int) -> Int64s:
    """A tail column at full length: the rows before it have 1."""
    if len(tail) > rows:
        raise BadPlanError(f"token_counts has {len(tail)} entries for {rows} rows")
    whole = np.ones(rows, np.int64)
    whole[rows - len(tail) :] = tail
    return whole


def _to_tail(whole: Int64s) -> bytes:
    others = np.flatnonzero(whole != 1)
    return whole[others[0] :].astype("<u4").tobytes() if others.size else b""


def _dtype(
    field: str, value: pb.DType.ValueType, default: torch.dtype, served: tuple[torch.dtype, ...], dtypes: Dtypes
) -> torch.dtype:
    if value == pb.D_TYPE_UNSPECIFIED:
        return default
    dtype = _DTYPES.get(value)
    if dtype is not None and dtype in served:
        return dtype
    known = ", ".join(_dtype_name(_NUMBERS[one]).lower() for one in served)
    raise unserved(field, f"{_dtype_name(value)} is not served {dtypes.place} yet; served: {known}")


def _dtype_name(value: int) -> str:
    names = pb.DType.DESCRIPTOR.values_by_number
    return str(names[value].name.removeprefix("D_TYPE_")) if value in names else f"number {value}"
