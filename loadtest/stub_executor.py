"""A real ExecutorService without a model: for tests and benchmarks of everything above it.

    async with StubExecutor(vocab_size=512) as stub:
        ...  # a scheduler with --executor 127.0.0.1:{stub.port}

Plans are checked strictly and ids are those of `stub_batch.expected_ids`. Up to `max_in_flight` plans, 1 or 2, are
taken before the first one's result. Faults are constructor arguments, and some are switched while it runs: `hold()`
keeps steps from being done until `release()`.

    python -m loadtest.stub_executor --port 50053
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from triptych.executor.v1 import executor_pb2, executor_pb2_grpc

from loadtest import stub_logprobs
from loadtest.stub_batch import Batch, NoIdError, PlanError, Row, own_logprob
from loadtest.stub_masks import Allowed, StubMasks
from services.common.health import Health
from services.common.server import server_options

HEARTBEAT_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Faults:
    """What goes wrong. Output positions count from 0 and are named by a request's seed; steps count from 1 an epoch."""

    bad_ids: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (seed, output position): id told instead
    failed_rows: frozenset[tuple[int, int]] = frozenset()  # (seed, output position) whose row fails
    idless_rows: frozenset[tuple[int, int]] = frozenset()  # (seed, output position) that no id is left for
    fault_at_step: int | None = None  # answered by a Fault
    cut_at_step: int | None = None  # the stream ends without a word
    hang_at_step: int | None = None  # never answered
    wrong_count_at_step: int | None = None  # a result with one id too many
    deadly: frozenset[tuple[int, int]] = frozenset()  # (seed, output position) in whose step the stream ends
    blamed: frozenset[tuple[int, int]] = frozenset()  # in whose step a Fault names the slot
    epochs: int = 1  # step faults happen in so many epochs


class StubExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """`step_s` and `token_s` are the time a step takes, and more for each of its tokens."""

    def __init__(
        self,
        *,
        vocab_size: int = 512,
        kv_bytes: int = 1 << 20,
        block_bytes: int = 1024,
        step_s: float = 0.0,
        token_s: float = 0.0,
        max_in_flight: int = 1,
        read_back: bool = True,
        faults: Faults | None = None,
        weights_hash: str = "ab" * 32,
        config_hash: str = "",
        refuse_load: str = "",
        features: tuple[str, ...] = ("grammar", "log-level"),
        port: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.kv_bytes = kv_bytes
        self.block_bytes = block_bytes
        self.faults = faults or Faults()
        self.port = port
        self.config: executor_pb2.EngineConfig | None = None
        self.num_blocks: int | None = None
        self.epochs: list[int] = []
        self.plans: list[executor_pb2.StepPlan] = []
        self.batches: list[Batch] = []  # of each epoch
        self.batch: Batch | None = None
        self.keep_plans = True
        self.utilities: list[executor_pb2.Utility] = []
        self.utility_error: str | None = ""
        """How they are answered; None: not at all."""
        self.masks_seen = 0
        self._step_s, self._token_s = step_s, token_s
        self._max_in_flight = max_in_flight
        self._read_back = read_back
        self._weights_hash = weights_hash
        self._config_hash = config_hash
        self._refuse_load = refuse_load
        self._features = features
        self._gate = asyncio.Event()
        self._gate.set()
        self._passes = 0
        self._pass = asyncio.Event()
        self._arrived = asyncio.Event()
        self._violations: list[str] = []
        self._under_way = 0
        self._server: grpc.aio.Server | None = None

    # -- the process

    async def start(self) -> None:
        """Listens on 127.0.0.1; `port` tells where."""
        self._server = grpc.aio.server(options=server_options())
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, self._server)
        self._health = Health()
        self._health.add_to(self._server)
        await self._health.set_live(True)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """As a death of the process: open streams end."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    @property
    def violations(self) -> list[str]:
        """Plans against the contract, and KV read that was another's."""
        return self._violations + [misread for batch in self.batches for misread in batch.misreads]

    @property
    def is_serving(self) -> bool:
        """Started and not stopped."""
        return self._server is not None

    async def __aenter__(self) -> StubExecutor:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- the gate

    def hold(self) -> None:
        """From the next step on, results wait for `release` or `let`."""
        self._passes = 0
        self._gate.clear()

    def release(self) -> None:
        """Steps run freely again."""
        self._gate.set()
        self._pass.set()

    def let(self, steps: int = 1) -> None:
        """So many held steps may be done."""
        self._passes += steps
        self._pass.set()

    async def plan_arrived(self, count: int) -> executor_pb2.StepPlan:
        """The plan number `count`, from 1 over all epochs, once it is here."""
        while len(self.plans) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return self.plans[count - 1]

    async def _pass_gate(self) -> None:
        while not self._gate.is_set() and self._passes == 0:
            self._pass.clear()
            await self._pass.wait()
        if not self._gate.is_set():
            self._passes -= 1

    # -- the contract

    async def Load(self, request: Any, context: Any) -> AsyncIterator[executor_pb2.LoadResponse]:  # noqa: N802
        """Two messages of progress, then Loaded."""
        if self._refuse_load:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._refuse_load)
        if self.config is not None and self.config != request.config:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another configuration is loaded")
        self.config = request.config
        for done in (50, 100):
            yield executor_pb2.LoadResponse(stage="pretending", done_bytes=done, total_bytes=100)
        loaded = executor_pb2.Loaded(
            version=request.max_version,
            device="stub",
            features=self._features,
            weights_hash=self._weights_hash,
            config_hash=self._config_hash,
            vocab_size=self.vocab_size,
            kv_groups=[
                executor_pb2.KvGroup(block_tokens=request.config.block_tokens, block_bytes=self.block_bytes),
            ],
            kv_bytes=self.kv_bytes,
            max_in_flight=self._max_in_flight,
            dtype=executor_pb2.D_TYPE_FLOAT32,
            kv_dtype=executor_pb2.D_TYPE_FLOAT32,
            last_epoch=max(self.epochs, default=0),
        )
        yield executor_pb2.LoadResponse(loaded=loaded)

    async def Allocate(self, request: Any, context: Any) -> executor_pb2.AllocateResponse:  # noqa: N802
        """Remembers the number; another one later is refused."""
        (num_blocks,) = request.num_blocks
        if self.config is None or self.num_blocks not in (None, num_blocks):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{self.num_blocks} blocks are allocated")
        self.num_blocks = num_blocks
        return executor_pb2.AllocateResponse(warmup_ms=0)

    async def Run(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[executor_pb2.RunResponse]:
        """One epoch."""
        first = await anext(aiter(request_iterator))
        if first.WhichOneof("command") != "open" or self.num_blocks is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Run begins with Open, after Allocate")
        epoch = first.open.epoch
        if self.epochs and epoch <= self.epochs[-1]:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {epoch} is not above {self.epochs[-1]}")
        self.epochs.append(epoch)
        events: asyncio.Queue[executor_pb2.RunResponse | None] = asyncio.Queue()
        events.put_nowait(_heartbeat(epoch))
        plans: asyncio.Queue[_Taken] = asyncio.Queue()
        masks = StubMasks(self.vocab_size)
        tasks = [
            asyncio.create_task(self._take(request_iterator, plans, masks, events)),
            asyncio.create_task(self._work(plans, masks, events)),
            asyncio.create_task(_beat(epoch, events)),
        ]
        try:
            await self._health.set_generate(True)
            while (event := await events.get()) is not None:
                yield event
                if event.HasField("fault"):
                    return
        finally:
            await self._health.set_generate(False)
            for task in tasks:
                task.cancel()

    def _new_batch(self) -> Batch:
        assert self.config is not None
        assert self.num_blocks is not None
        return Batch(
            vocab_size=self.vocab_size,
            num_blocks=self.num_blocks,
            block_tokens=self.config.block_tokens,
            max_slots=self.config.max_slots,
            max_step_tokens=self.config.max_step_tokens,
            context_tokens=self.config.context_tokens,
            max_in_flight=self._max_in_flight,
            read_back=self._read_back,
        )

    async def _take(
        self,
        requests: Any,
        plans: asyncio.Queue[_Taken],
        masks: StubMasks,
        events: asyncio.Queue[executor_pb2.RunResponse | None],
    ) -> None:
        """Reads plans and masks as they come; the results read ahead of are at most `max_in_flight` - 1."""
        self._under_way = 0
        async for request in requests:
            if request.HasField("masks"):
                self.masks_seen += len(request.masks.masks)
                try:
                    masks.put(request.masks)
                except PlanError as error:
                    self._fault(events, error)
                    return
                continue
            if request.HasField("utility"):
                self.utilities.append(request.utility)
                if self.utility_error is not None:
                    done = executor_pb2.UtilityDone(id=request.utility.id, error=self.utility_error)
                    events.put_nowait(executor_pb2.RunResponse(utility=done))
                continue
            if self._under_way >= self._max_in_flight:
                self._fault(events, PlanError(f"a plan came while {self._under_way} were in flight"))
                return
            self._under_way += 1
            if self.keep_plans:
                self.plans.append(request.plan)
                self._arrived.set()
            plans.put_nowait(_Taken(request.plan, time.time_ns()))

    async def _work(
        self,
        plans: asyncio.Queue[_Taken],
        masks: StubMasks,
        events: asyncio.Queue[executor_pb2.RunResponse | None],
    ) -> None:
        batch = self.batch = self._new_batch()
        self.batches.append(batch)
        step = 0
        try:
            while True:
                taken = await plans.get()
                step += 1
                result = await self._step(batch, step, taken, masks)
                if result is None:
                    events.put_nowait(None)
                    return
                self._under_way -= 1
                events.put_nowait(executor_pb2.RunResponse(result=result))
        except PlanError as error:
            self._fault(events, error)
        except _Injected as error:
            events.put_nowait(_fault(executor_pb2.FAULT_KIND_DEVICE, str(error), error.slots))

    def _fault(self, events: asyncio.Queue[executor_pb2.RunResponse | None], error: PlanError) -> None:
        self._violations.append(str(error))
        events.put_nowait(_fault(executor_pb2.FAULT_KIND_BAD_PLAN, str(error)))

    async def _step(self, batch: Batch, step: int, taken: _Taken, masks: StubMasks) -> executor_pb2.StepResult | None:
        wait_us = (time.time_ns() - taken.received_unix_ns) // 1000
        rows = batch.take(taken.plan)
        await self._pass_gate()
        pause_s = self._step_s + self._token_s * sum(row.count for row in rows)
        if pause_s and rows:
            await asyncio.sleep(pause_s)
        faulty = len(self.epochs) <= self.faults.epochs
        if faulty and step == self.faults.fault_at_step:
            raise _Injected(f"injected in step {step}")
        if faulty and step == self.faults.cut_at_step:
            return None
        if self._holds(rows, self.faults.deadly):
            return None
        if blamed := self._holds(rows, self.faults.blamed):
            raise _Injected(f"injected in step {step}", blamed)
        if faulty and step == self.faults.hang_at_step:
            await asyncio.Event().wait()
        masked = frozenset(np.frombuffer(taken.plan.masked_slots, "<u4").tolist())
        result = self._result(batch, taken.plan.step, rows, await masks.take(taken.plan.step, masked))
        result.received_unix_ns = taken.received_unix_ns
        result.wait_us = max(0, wait_us)
        result.execute_us = round(1e6 * pause_s)
        result.sample_us = len(result.token_ids) // 4  # as if an id took 1 us
        if faulty and step == self.faults.wrong_count_at_step:
            result.token_ids += b"\0\0\0\0"
        return result

    @staticmethod
    def _holds(rows: list[Row], places: frozenset[tuple[int, int]]) -> list[int]:
        """The slots of rows that draw an id of these (seed, output position)."""
        return [row.number for row in rows if row.samples and (row.slot.seed, row.slot.output_position) in places]

    def _result(
        self, batch: Batch, step: int, rows: list[Row], masks: Mapping[int, Allowed]
    ) -> executor_pb2.StepResult:
        counts: list[int] = []
        ids: list[int] = []
        places: list[int] = []
        own: list[tuple[float, int]] = []
        tops: list[list[tuple[int, float]]] = []
        failed: list[executor_pb2.FailedRow] = []
        scored: list[executor_pb2.PromptLogprobs] = []
        for row in rows:
            at = (row.slot.seed, row.slot.output_position)
            token_id = self._drawn(batch, row, masks.get(row.number))
            idless = row.samples and (token_id is None or at in self.faults.idless_rows)
            if row.slot.failed or idless or (row.samples and at in self.faults.failed_rows):
                kind = executor_pb2.FAULT_KIND_NO_ID_LEFT if idless else executor_pb2.FAULT_KIND_BAD_LOGITS
                failed.append(executor_pb2.FailedRow(slot=row.number, kind=kind))
                row.slot.fail(samples=row.samples)
                counts.append(0)
                continue
            if row.scored:
                scored.append(_scores(row))
            if token_id is None:
                counts.append(0)
                continue
            row.slot.append(token_id)
            token_id = self.faults.bad_ids.get(at, token_id)
            if row.slot.logprobs is not None:
                places.append(len(ids))
                own.append(own_logprob(token_id))
                tops.append(stub_logprobs.alternatives(token_id, row.slot.logprobs))
            counts.append(1)
            ids.append(token_id)
        result = executor_pb2.StepResult(
            step=step,
            token_counts=_tail(counts),
            token_ids=np.array(ids, dtype="<u4").tobytes(),
            prompt_logprobs=[scores for scores in scored if scores.slot not in {row.slot for row in failed}],
            failed=failed,
        )
        if own:
            result.logprobs.CopyFrom(stub_logprobs.columns(own, tops))
            result.logprobs.places = b"" if len(own) == len(ids) else np.array(places, dtype="<u4").tobytes()
        return result

    @staticmethod
    def _drawn(batch: Batch, row: Row, allowed: Allowed | None) -> int | None:
        """None where the row does not sample, or has no id to draw."""
        try:
            return batch.next_id(row.slot, allowed) if row.samples else None
        except NoIdError:
            return None


@dataclass(frozen=True)
class _Taken:
    plan: executor_pb2.StepPlan
    received_unix_ns: int


class _Injected(Exception):  # noqa: N818
    def __init__(self, message: str, slots: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.slots = slots


async def _beat(epoch: int, events: asyncio.Queue[executor_pb2.RunResponse | None]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        events.put_nowait(_heartbeat(epoch))


def _heartbeat(epoch: int) -> executor_pb2.RunResponse:
    return executor_pb2.RunResponse(heartbeat=executor_pb2.Heartbeat(epoch=epoch, sent_unix_ns=time.time_ns()))


def _fault(kind: executor_pb2.FaultKind.ValueType, message: str, slots: Sequence[int] = ()) -> executor_pb2.RunResponse:
    column = np.array(slots, dtype="<u4").tobytes()
    return executor_pb2.RunResponse(fault=executor_pb2.Fault(kind=kind, message=message, slots=column))


def _scores(row: Row) -> executor_pb2.PromptLogprobs:
    ids = [row.slot.ids[position] for position in row.scored]
    columns = stub_logprobs.columns(
        [own_logprob(token_id) for token_id in ids],
        [stub_logprobs.alternatives(token_id, row.slot.scored or 0) for token_id in ids],
    )
    return executor_pb2.PromptLogprobs(slot=row.number, start=row.scored.start, logprobs=columns)


def _tail(counts: list[int]) -> bytes:
    first = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    return np.array(counts[first:], dtype="<u4").tobytes()


async def _serve(options: argparse.Namespace) -> None:
    stub = StubExecutor(
        port=options.port,
        vocab_size=options.vocab_size,
        kv_bytes=options.kv_blocks * 1024,
        step_s=options.step_ms / 1000,
        token_s=options.token_us / 1e6,
        max_in_flight=options.max_in_flight,
        read_back=False,
        faults=Faults(fault_at_step=options.fault_at_step, epochs=1 << 30) if options.fault_at_step else None,
    )
    stub.keep_plans = False
    async with stub:
        print(f"serving stub executor on 127.0.0.1:{stub.port}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.stub_executor", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=50053)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--kv-blocks", type=int, default=65536)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time a step takes")
    parser.add_argument("--token-us", type=float, default=0.0, help="and more for each of its tokens")
    parser.add_argument("--max-in-flight", type=int, default=2, choices=(1, 2), help="plans taken at once")
    parser.add_argument("--fault-at-step", type=int, help="of each epoch: a fault is told, and the epoch is over")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
