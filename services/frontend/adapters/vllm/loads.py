"""GetLoads: how busy the engine is, or the engines together, as the one rank that there is.

Not one rank an engine: a gateway may name a rank in a request, and here the frontend chooses the engine."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

from smg_grpc_proto import vllm_engine_pb2 as pb

from services.common.errors import invalid
from services.frontend.engine_admin import Load

_SECTIONS = ("core", "all")
_MAX_INT32 = 2**31 - 1


def check(request: pb.GetLoadsRequest) -> None:
    """Raises INVALID_ARGUMENT for a rank or a section that is not there."""
    if request.dp_rank != 0:
        raise invalid("dp_rank", f"is {request.dp_rank}; there is rank 0 alone")
    for i, section in enumerate(request.include):
        if section not in _SECTIONS:
            raise invalid(f"include[{i}]", f"is {section[:64]!r}; one of {', '.join(_SECTIONS)} is needed")


def response(load: Load, block_tokens: int) -> pb.GetLoadsResponse:
    """Fields that are left at 0 are not known here."""
    used = load.total_blocks - load.free_blocks
    rank = pb.SchedulerLoad(
        num_running_reqs=load.running_requests,
        num_waiting_reqs=load.waiting_requests,
        num_total_reqs=load.running_requests + load.waiting_requests,
        num_used_tokens=min(used * block_tokens, _MAX_INT32),
        max_total_num_tokens=min(load.total_blocks * block_tokens, _MAX_INT32),
        token_usage=used / load.total_blocks if load.total_blocks else 0.0,
        gen_throughput=load.output_tokens_per_s,
        cache_hit_rate=load.prefix_hit_rate,
        num_waiting_uncached_tokens=min(load.waiting_tokens, _MAX_INT32),
    )
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=f"triptych {version('triptych')}",
        dp_rank_count=1,
        loads=[rank],
    )
