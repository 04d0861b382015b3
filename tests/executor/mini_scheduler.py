"""A scheduler of a few lines that drives a real executor server: what the executor's tests speak to it with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from triptych.executor.v1 import executor_pb2 as pb
from triptych.executor.v1 import executor_pb2_grpc
from triptych.inference.v1 import generation_pb2

from services.common.health import Health
from services.common.server import Server, channel_options
from services.executor.executor import Executor
from services.executor.plan import MAX_IN_FLIGHT
from services.executor.server import SERVICE_NAME, ExecutorServicer

GREEDY = generation_pb2.Sampling(temperature=0)
_epochs = itertools.count(1)


def column(*values: int) -> bytes:
    """Values as a column of the contract."""
    return np.array(values, dtype="<u4").tobytes()


def read(values: bytes) -> list[int]:
    """The reverse."""
    return np.frombuffer(values, dtype="<u4").tolist()


def next_epoch() -> int:
    """Higher than any before it in this process."""
    return next(_epochs)


@dataclass
class Rig:
    """A served executor and a channel to it."""

    stub: executor_pb2_grpc.ExecutorServiceStub
    channel: grpc.aio.Channel
    servicer: ExecutorServicer
    health: Health
    config: pb.EngineConfig
    port: int

    async def load(self, **changes: Any) -> pb.Loaded:
        """Load with this rig's config; `changes` are laid over the LoadRequest."""
        responses = [r async for r in self.stub.Load(self.load_request(**changes))]
        return responses[-1].loaded

    def load_request(self, **changes: Any) -> pb.LoadRequest:
        """What `load` sends."""
        return pb.LoadRequest(**({"min_version": 1, "max_version": 1, "config": self.config} | changes))

    async def allocate(self, num_blocks: int) -> pb.AllocateResponse:
        """Allocate for the one KV group."""
        return await self.stub.Allocate(pb.AllocateRequest(num_blocks=[num_blocks]))


@contextlib.asynccontextmanager
async def serve(
    path: Path,
    *,
    num_blocks: int | None = None,
    block_tokens: int = 16,
    context_tokens: int = 1024,
    max_slots: int = 8,
    max_step_tokens: int = 256,
    kv_memory_bytes: int = 64 << 20,
    make: Callable[..., Executor] = Executor,
) -> AsyncIterator[Rig]:
    """Serves a checkpoint in this process; loaded and allocated when `num_blocks` is given."""
    server = Server("127.0.0.1", 0)
    executor = make(path, threads=1, kv_memory_bytes=kv_memory_bytes)
    servicer = ExecutorServicer(executor, server.health)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
    await server.start([SERVICE_NAME])
    config = pb.EngineConfig(
        model=path.name,
        context_tokens=context_tokens,
        block_tokens=block_tokens,
        max_slots=max_slots,
        max_step_tokens=max_step_tokens,
        tp_size=executor.tp_size,
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", channel_options()) as channel:
        rig = Rig(executor_pb2_grpc.ExecutorServiceStub(channel), channel, servicer, server.health, config, server.port)
        try:
            if num_blocks is not None:
                await rig.load()
                await rig.allocate(num_blocks)
            yield rig
        finally:
            await servicer.drain()
            await server.stop()
            await servicer.close()
            executor.close()


@dataclass
class RunStream:
    """One epoch, message by message."""

    call: grpc.aio.StreamStreamCall
    steps: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    async def open(cls, rig: Rig, epoch: int | None = None) -> RunStream:
        """Opens a Run stream and awaits the Heartbeat that answers it."""
        call = rig.stub.Run()
        await call.write(pb.RunRequest(open=pb.Open(epoch=epoch or next_epoch(), version=1)))
        first = await call.read()
        assert first.WhichOneof("event") == "heartbeat", first
        return cls(call)

    async def send(self, **plan: Any) -> None:
        """Writes one StepPlan; its step number is counted here unless given."""
        await self.call.write(pb.RunRequest(plan=pb.StepPlan(**({"step": next(self.steps)} | plan))))

    async def send_ping(self) -> None:
        """Sends a ping and awaits its answer; what was sent before it has been read by then."""
        await self.call.write(pb.RunRequest(ping=pb.Ping(sent_unix_ns=1)))
        while not (await self.call.read()).heartbeat.ping_unix_ns:
            pass

    async def event(self) -> pb.RunResponse | Any:
        """The next message that is no Heartbeat; grpc.aio.EOF at the end."""
        while (event := await self.call.read()) is not grpc.aio.EOF:
            if event.WhichOneof("event") != "heartbeat":
                break
        return event

    async def step(self, **plan: Any) -> pb.StepResult:
        """Sends a plan and returns its result."""
        await self.send(**plan)
        return await self.result()

    async def result(self) -> pb.StepResult:
        """The next result."""
        event = await self.event()
        assert event.WhichOneof("event") == "result", event
        return event.result

    async def fault(self, **plan: Any) -> pb.Fault:
        """Sends a plan that is to end the stream with a Fault, and returns it."""
        await self.send(**plan)
        event = await self.event()
        assert event.WhichOneof("event") == "fault", event
        assert await self.event() is grpc.aio.EOF
        assert await self.call.code() == grpc.StatusCode.OK
        return event.fault

    async def close(self) -> None:
        """Half-closes and awaits an orderly end."""
        await self.call.done_writing()
        assert await self.event() is grpc.aio.EOF
        assert await self.call.code() == grpc.StatusCode.OK


@dataclass
class Request:
    """A greedy request as the mini scheduler follows it; `pending` ids are sampled by steps under way."""

    prompt: list[int]
    max_new: int
    output: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sampling: generation_pb2.Sampling = field(default_factory=lambda: GREEDY)
    seed: int = 0
    stop_id: int | None = None
    pending: int = 0
    overran: int = 0
    scored: int | None = None
    """alternatives wanted of each prompt id"""
    scores: dict[int, tuple[float, int]] = field(default_factory=dict)
    """(logprob, rank) of prompt ids by position"""
    tops: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """(id, logprob) of the alternatives to each"""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.output]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_new or (bool(self.output) and self.output[-1] == self.stop_id)

    @property
    def to_compute(self) -> int:
        """The last id allowed is never computed."""
        return min(len(self.ids) + self.pending, len(self.prompt) + self.max_new - 1) - self.computed

    def take_scores(self, entry: pb.PromptLogprobs) -> None:
        """What is computed again after a preemption is scored again, to nearly the same."""
        logprobs = np.frombuffer(entry.logprobs.logprobs, dtype="<f4").tolist()
        assert self.scored is not None and entry.start >= 1 and entry.logprobs.places == b""
        for position, score in enumerate(zip(logprobs, read(entry.logprobs.ranks), strict=True), start=entry.start):
            before = self.scores.setdefault(position, score)
            assert abs(before[0] - score[0]) < 1e-3
        assert read(entry.logprobs.top_counts) == ([self.scored] * len(logprobs) if self.scored else [])
        told = np.frombuffer(entry.logprobs.top_logprobs, dtype="<f4").tolist()
        top = list(zip(read(entry.logprobs.top_ids), told, strict=True))
        for at in range(len(logprobs)):
            self.tops[entry.start + at] = top[at * self.scored : (at + 1) * self.scored]


class MiniScheduler:
    """First come, first served; a token budget a step; block ids handed out in a scrambled order.

    Up to `max_in_flight` plans are under way before the first one's result is read.
    """

    def __init__(
        self, run: RunStream, config: pb.EngineConfig, num_blocks: int, *, budget: int = 256, max_in_flight: int = 1
    ) -> None:
        self._run = run
        self._block_tokens = config.block_tokens
        self._budget = budget
        self._max_in_flight = max_in_flight
        self._free_slots = list(range(config.max_slots))
        self._cooling: list[tuple[int, int]] = []  # (step from which it may be used again, slot)
        self._free_blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist()
        self._freed: list[int] = []
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._in_flight: list[list[tuple[Request, int, bool]]] = []  # (request, slot, whether it samples)
        self.steps = 0
        self.most_in_flight = 0

    async def finish(self, requests: Sequence[Request], *, preempt_every: int = 0) -> None:
        """Runs all requests to their end; every `preempt_every` steps the youngest is preempted and comes back."""
        self._waiting += requests
        while self._running or self._waiting or self._in_flight:
            if preempt_every and self.steps % preempt_every == preempt_every - 1 and self._running:
                self._leave(victim := self._running[-1])
                self._waiting.insert(0, victim)
            while len(self._in_flight) < self._max_in_flight and await self._plan():
                pass
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
            if self._in_flight:
                self._apply(self._in_flight.pop(0), await self._run.result())

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self._freed.append(request.slot)
        self._free_blocks += request.blocks
        request.slot, request.computed, request.blocks = None, 0, []

    async def _plan(self) -> bool:
        """Sends the next plan, unless nothing can be computed before a result is there."""
        number = self.steps + 1
        self._free_slots += [slot for step, slot in self._cooling if step <= number]
        self._cooling = [(step, slot) for step, slot in self._cooling if step > number]
        started: list[Request] = []
        rows: list[tuple[Request, int]] = []
        new_blocks: list[int] = []
        budget = self._budget
        for request in [*self._running, *self._waiting]:
            if request.slot is None and (not self._free_slots or request.pending):
                break
            count = min(request.to_compute, budget)
            if budget == 0:
                break
            if count == 0:
                continue
            needed = -(-(request.computed + count) // self._block_tokens) - len(request.blocks)
            blocks = [self._free_blocks.pop() for _ in range(needed)]
            request.blocks += blocks
            if request.slot is None:
                request.slot = self._free_slots.pop(0)
                started.append(request)
            else:
                new_blocks += [value for block in blocks for value in (request.slot, block)]
            rows.append((request, count))
            budget -= count
        if not rows and self._in_flight:
            return False
        self._waiting = [request for request in self._waiting if request not in started]
        self._running += started
        # Rows that compute one token first: what the column is shortened by.
        rows.sort(key=lambda row: row[1] != 1)
        ones = sum(count == 1 for _, count in rows)
        freed, self._freed = self._freed, []
        await self._run.send(
            freed_slots=column(*freed),
            started=[self._whole(request) for request in started],
            groups=[pb.GroupUpdate(new_blocks=column(*new_blocks))],
            slots=column(*(request.slot for request, _ in rows)),
            token_counts=column(*(count for _, count in rows[ones:])),
            computed_tokens=sum(request.computed for request, _ in rows),
        )
        self.steps = number
        self._cooling += [(number + MAX_IN_FLIGHT, slot) for slot in freed]
        self._in_flight.append([self._move_on(request, count) for request, count in rows])
        return True

    def _move_on(self, request: Request, count: int) -> tuple[Request, int, bool]:
        request.computed += count
        samples = request.computed == len(request.ids) + request.pending
        request.pending += samples
        return request, request.slot, samples

    def _whole(self, request: Request) -> pb.NewRequest:
        return pb.NewRequest(
            slot=request.slot,
            token_ids=column(*request.ids),
            prompt_tokens=len(request.prompt),
            block_ids=[column(*request.blocks)],
            sampling=request.sampling,
            seed=request.seed,
            prompt_logprobs=request.scored,
        )

    def _apply(self, rows: list[tuple[Request, int, bool]], result: pb.StepResult) -> None:
        tail, ids = read(result.token_counts), read(result.token_ids)
        counts = [1] * (len(rows) - len(tail)) + tail
        for entry in result.prompt_logprobs:
            (request,) = [request for request, slot, _ in rows if slot == entry.slot]
            request.take_scores(entry)
        for (request, slot, samples), count in zip(rows, counts, strict=True):
            assert count == samples, "a row samples just when it reaches its end"
            if not count:
                continue
            token_id = ids.pop(0)
            request.pending -= 1
            if request.done:
                request.overran += 1  # planned before the stop was known
                continue
            request.output.append(token_id)
            if request.done and request.slot == slot:
                self._leave(request)
            elif request.done:
                self._waiting.remove(request)  # preempted while its last id was on its way
        assert not ids
