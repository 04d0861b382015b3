"""The way to the executor: it is loaded, given its KV blocks, and then run, an epoch at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.executor.v1 import executor_pb2, executor_pb2_grpc

from services.common.contract import GRAMMAR, LOG_LEVEL, PROTOCOL_VERSION, TRACE_CONTEXT, UNCOUNTED
from services.common.errors import StartError
from services.common.health import GENERATE, LIVENESS
from services.common.peer import Peer
from services.scheduler.executor_run import ExecutorLostError, ExecutorRun

log = logging.getLogger(__name__)

FEATURES = (GRAMMAR, LOG_LEVEL, TRACE_CONTEXT, UNCOUNTED)
"""Optional parts of the executor contract that this scheduler knows."""

PROGRESS_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 5.0
REACH_TIMEOUT_S = 3.0
"""A process that does not say in this time that it lives is not waited for: it may be frozen."""
RECONNECT_MS = 250
"""Calls are tried again by the engine's own clock; the channel must not make them wait longer."""

_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)
"""Another try may succeed; any other status is a no to this configuration."""


@dataclass(frozen=True)
class ExecutorFacts:
    """What Loaded says, checked."""

    device: str
    version: int
    weights_hash: str
    config_hash: str
    vocab_size: int
    block_bytes: int
    kv_bytes: int
    max_in_flight: int
    dtype: str
    kv_dtype: str
    features: frozenset[str] = frozenset()


class ExecutorLink:
    """One executor of one rank. Calls raise ExecutorLostError when trying again makes sense, else StartError."""

    def __init__(self, peer: Peer, config: executor_pb2.EngineConfig) -> None:
        self.address = peer.target
        self._config = config
        self._peer = peer
        self._epoch = 0

    async def load(self) -> ExecutorFacts:
        """Has the weights loaded; progress goes to the log."""
        await self._reach()
        request = executor_pb2.LoadRequest(
            min_version=PROTOCOL_VERSION, max_version=PROTOCOL_VERSION, features=FEATURES, config=self._config
        )
        progress = _Progress()
        try:
            async for message in self._stub.Load(request):
                if message.HasField("loaded"):
                    self._epoch = max(self._epoch, message.loaded.last_epoch)
                    return self._facts(message.loaded)
                progress.show(message)
        except grpc.aio.AioRpcError as error:
            raise self._failure("Load", error) from None
        raise ExecutorLostError("Load ended without Loaded")

    async def allocate(self, num_blocks: int) -> None:
        """Has the KV tensors made and the kernels warmed up."""
        try:
            answer = await self._stub.Allocate(executor_pb2.AllocateRequest(num_blocks=[num_blocks]))
        except grpc.aio.AioRpcError as error:
            raise self._failure("Allocate", error) from None
        log.info("the executor has %d KV blocks and is warm after %d ms", num_blocks, answer.warmup_ms)

    async def open(
        self, version: int, on_event: Callable[[], None], *, traces: bool = False, uncounts: bool = False
    ) -> ExecutorRun:
        """A new epoch, higher than all before: milliseconds of the clock, or, where it was set back, one more than the
        executor has seen. The others as ExecutorRun has them."""
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        run = ExecutorRun(self._stub.Run(), self._epoch, on_event, traces=traces, uncounts=uncounts)
        try:
            await run.open(version)
        except BaseException:
            await run.close()
            raise
        return run

    async def _reach(self) -> None:
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        try:
            await health_pb2_grpc.HealthStub(self._peer.channel()).Check(request, timeout=REACH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _PASSING:  # whether it is well is for the calls that follow to find out
                raise ExecutorLostError(f"it cannot be reached: {error.code().name}: {error.details()}") from None

    async def is_driven(self) -> bool:
        """Whether a scheduler has a Run stream open there now: the executor's `generate` health says so."""
        request = health_pb2.HealthCheckRequest(service=GENERATE)
        try:
            answer = await health_pb2_grpc.HealthStub(self._peer.channel()).Check(request, timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False  # a dead one is driven by nobody; the next Load says what is wrong
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Closes the channel."""
        await self._peer.close()

    @property
    def _stub(self) -> executor_pb2_grpc.ExecutorServiceAsyncStub:
        return executor_pb2_grpc.ExecutorServiceStub(self._peer.channel())

    def _facts(self, loaded: executor_pb2.Loaded) -> ExecutorFacts:
        if loaded.version != PROTOCOL_VERSION:
            raise StartError(f"{self._name} speaks version {loaded.version}, this scheduler {PROTOCOL_VERSION}")
        if len(loaded.kv_groups) != 1:
            raise StartError(f"{self._name} has {len(loaded.kv_groups)} KV groups; only models with one are served yet")
        group = loaded.kv_groups[0]
        if group.block_tokens != self._config.block_tokens or group.block_bytes < 1:
            raise StartError(
                f"{self._name} has blocks of {group.block_tokens} tokens and {group.block_bytes} bytes, "
                f"not of {self._config.block_tokens} tokens as --block-size says"
            )
        return ExecutorFacts(
            device=loaded.device,
            version=loaded.version,
            weights_hash=loaded.weights_hash,
            config_hash=loaded.config_hash,
            vocab_size=loaded.vocab_size,
            block_bytes=group.block_bytes,
            kv_bytes=loaded.kv_bytes,
            max_in_flight=max(1, loaded.max_in_flight),
            dtype=_dtype_name(loaded.dtype),
            kv_dtype=_dtype_name(loaded.kv_dtype),
            features=frozenset(loaded.features),
        )

    @property
    def _name(self) -> str:
        return f"the executor at {self.address}"

    def _failure(self, call: str, error: grpc.aio.AioRpcError) -> Exception:
        told = f"{call}: {error.code().name}: {error.details()}"
        return ExecutorLostError(told) if error.code() in _PASSING else StartError(f"{self._name} refuses {told}")


class _Progress:
    """Shows each new stage, and every few seconds how far it is."""

    def __init__(self) -> None:
        self._stage = ""
        self._shown_s = 0.0

    def show(self, message: executor_pb2.LoadResponse) -> None:
        now_s = time.monotonic()
        if message.stage == self._stage and now_s - self._shown_s < PROGRESS_INTERVAL_S:
            return
        self._stage, self._shown_s = message.stage, now_s
        share = f" {100 * message.done_bytes // message.total_bytes}%" if message.total_bytes else ""
        log.info("executor: %s%s", message.stage, share)


def _dtype_name(dtype: executor_pb2.DType.ValueType) -> str:
    return executor_pb2.DType.Name(dtype).removeprefix("D_TYPE_").lower()
