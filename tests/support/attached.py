"""A frontend of the tests: speaks the engine contract to a real scheduler over real gRPC, and keeps what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc
from triptych.inference.v1 import generation_pb2

from loadtest.stub_executor import StubExecutor
from services.common.server import channel_options
from services.scheduler.config import SchedulerConfig
from services.scheduler.server import SchedulerServer

TIMEOUT_S = 20.0

Top = list[tuple[int, float]]
"""(id, logprob) of alternatives, likeliest first."""


def write_model(folder: Path, *, vocab_size: int = 512, context_tokens: int = 1024) -> Path:
    """As much of a checkpoint as a scheduler reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"max_position_embeddings": context_tokens, "vocab_size": vocab_size, "eos_token_id": 2})
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


@dataclass
class Port:
    """An executor of another kind than the stub, by its port."""

    port: int
    violations: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def scheduler_for(
    stub: StubExecutor | Port, model: Path, *, max_pending_bytes: int | None = None, wait: bool = True, **config: Any
) -> AsyncIterator[SchedulerServer]:
    """A scheduler on a free port. At the end it must be idle with balanced books, and the stub without a complaint."""
    settings = SchedulerConfig(port=0, executor=f"127.0.0.1:{stub.port}", model=str(model), **config)
    extra = {} if max_pending_bytes is None else {"max_pending_bytes": max_pending_bytes}
    server = SchedulerServer(settings, **extra)
    await server.start()
    try:
        if wait:
            await until(lambda: server.engine.can_generate)
        yield server
        assert server.engine.idle_faults == 0
        assert stub.violations == []
    finally:
        await server.stop()


async def until(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    """Returns once `condition()` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def until_idle(server: SchedulerServer, timeout_s: float = TIMEOUT_S) -> None:
    """Returns once no request is left and the executor knows it; then everything must be free."""
    core = server.engine.core
    await until(lambda: core.is_idle, timeout_s)
    core.check_idle()
    assert core.free_blocks == core.total_blocks


@dataclass
class Told:
    """What a frontend was told of one request. `done` is set by its one terminal event."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int]] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)  # alternatives to each of them
    scores: list[tuple[float, int]] = field(default_factory=list)  # of the prompt's ids, from position 1
    score_tops: list[Top] = field(default_factory=list)
    started: engine_pb2.Started | None = None
    finished: engine_pb2.Finished | None = None
    failed: engine_pb2.Failed | None = None
    after_end: int = 0  # things said of it after its end
    first: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def code(self) -> grpc.StatusCode:
        """Of its failure."""
        assert self.failed is not None, "it did not fail"
        return next(code for code in grpc.StatusCode if code.value[0] == self.failed.code)


class Frontend:
    """`async with Frontend(server) as frontend: told = await frontend.run([1, 2, 3], max_tokens=4)`."""

    def __init__(self, server: SchedulerServer | int, *, window_bytes: int | None = None, **hello: Any) -> None:
        """Of a scheduler in this process, or at a port; then `tokenizer_hash` must be given."""
        self._options = channel_options()
        if window_bytes is not None:  # how far the transport reads ahead of a reader that pauses
            self._options += [("grpc.http2.lookahead_bytes", window_bytes), ("grpc.http2.bdp_probe", 0)]
        if not isinstance(server, int):
            hello.setdefault("tokenizer_hash", server.engine.model.tokenizer_hash)
        self._address = f"127.0.0.1:{server if isinstance(server, int) else server.server.port}"
        self._hello_fields = {
            "min_version": 1,
            "max_version": 1,
            "frontend_id": "test",
            **hello,
        }
        self.told: dict[int, Told] = {}
        self.hello: engine_pb2.EngineHello | None = None
        self.heartbeats: list[engine_pb2.Heartbeat] = []
        self.outputs: list[engine_pb2.StepOutputs] = []
        self.ended: grpc.aio.AioRpcError | None = None
        self._next_id = 1
        self._paused = asyncio.Event()
        self._paused.set()

    async def __aenter__(self) -> Frontend:
        self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
        self.call = engine_pb2_grpc.EngineServiceStub(self._channel).Attach()
        self._reader = asyncio.create_task(self._read())
        await self.send(hello=engine_pb2.FrontendHello(**self._hello_fields))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def greeted(self) -> engine_pb2.EngineHello:
        """The engine's hello."""
        await until(lambda: self.hello is not None or self.ended is not None)
        if self.ended is not None:
            raise self.ended
        assert self.hello is not None
        return self.hello

    async def send(self, **message: Any) -> None:
        """One AttachRequest."""
        with contextlib.suppress(asyncio.InvalidStateError):
            await self.call.write(engine_pb2.AttachRequest(**message))

    async def submit(self, prompt: Sequence[int], *, request_id: int | None = None, **fields: Any) -> Told:
        """Sends a request; fields are Submit's, ids may be plain numbers."""
        if request_id is None:
            request_id, self._next_id = self._next_id, self._next_id + 1
        fields = {"num_choices": 1, "max_tokens": 8, "seed": request_id, **fields}
        stop_ids = ids_column(fields.pop("stop_ids", ()))
        told = self.told[request_id] = Told()
        message = engine_pb2.Submit(request_id=request_id, prompt_ids=ids_column(prompt), stop_ids=stop_ids, **fields)
        await self.send(submit=message)
        return told

    async def run(self, prompt: Sequence[int], **fields: Any) -> Told:
        """Sends a request and waits for its end."""
        told = await self.submit(prompt, **fields)
        await finished(told)
        return told

    async def abort(self, *request_ids: int) -> None:
        """Ends requests."""
        await self.send(abort=engine_pb2.Abort(request_ids=np.array(request_ids, dtype="<u8").tobytes()))

    async def synced(self) -> engine_pb2.Heartbeat:
        """All that was sent before has been handled: a ping has come back."""
        stamp = len(self.heartbeats) + 1_000_000
        await self.send(ping=engine_pb2.Ping(sent_unix_ns=stamp))
        found: list[engine_pb2.Heartbeat] = []

        def answered() -> bool:
            found[:] = [beat for beat in self.heartbeats if beat.ping_unix_ns == stamp]
            return bool(found)

        await until(answered)
        return found[0]

    def pause(self) -> None:
        """Reads nothing from now on."""
        self._paused.clear()

    def resume(self) -> None:
        """Reads again."""
        self._paused.set()

    async def _read(self) -> None:
        try:
            while True:
                await self._paused.wait()
                message = await self.call.read()
                if message is grpc.aio.EOF:
                    code = await self.call.code()
                    if code is not grpc.StatusCode.OK:
                        raise grpc.aio.AioRpcError(
                            code,
                            await self.call.initial_metadata(),
                            await self.call.trailing_metadata(),
                            await self.call.details(),
                        )
                    return
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.ended = error

    def _take(self, message: engine_pb2.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            assert self.hello is None, "a second hello"
            self.hello = message.hello
        elif kind == "heartbeat":
            self.heartbeats.append(message.heartbeat)
        else:
            self._take_outputs(message.outputs)

    def _take_outputs(self, outputs: engine_pb2.StepOutputs) -> None:
        self.outputs.append(outputs)
        request_ids = np.frombuffer(outputs.request_ids, dtype="<u8").tolist()
        counts = np.frombuffer(outputs.token_counts, dtype="<u4").tolist() or [1] * len(request_ids)
        token_ids = np.frombuffer(outputs.token_ids, dtype="<u4").tolist()
        assert len(set(request_ids)) == len(request_ids) == len(counts)
        assert sum(counts) == len(token_ids)
        logprobs = _logprobs(outputs, len(token_ids))
        for entry in outputs.prompt_logprobs:
            self._take_scores(entry)
        for started in outputs.started:
            told = self._of(started.request_id)
            assert told.started is None and not told.ids
            told.started = started
        at = 0
        for request_id, count in zip(request_ids, counts, strict=True):
            told = self._of(request_id)
            told.ids += token_ids[at : at + count]
            told.logprobs += [logprobs[i][0] for i in range(at, at + count) if i in logprobs]
            told.tops += [logprobs[i][1] for i in range(at, at + count) if i in logprobs]
            told.first.set()
            at += count
        for finished_ in outputs.finished:
            told = self._of(finished_.request_id)
            told.finished = finished_
            told.done.set()
        for failed in outputs.failed:
            told = self._of(failed.request_id)
            told.failed = failed
            told.done.set()

    def _take_scores(self, entry: engine_pb2.PromptLogprobs) -> None:
        told = self._of(entry.request_id)
        assert not told.ids, "prompt logprobs after an id"
        assert entry.start == len(told.scores) + 1, "a position twice, or one left out"
        own, tops = _columns(entry.logprobs)
        told.scores += own
        told.score_tops += tops

    def _of(self, request_id: int) -> Told:
        told = self.told.setdefault(request_id, Told())
        if told.done.is_set():
            told.after_end += 1
        return told


async def finished(*all_told: Told) -> None:
    """Waits for the end of each; it must be the only one."""
    async with asyncio.timeout(TIMEOUT_S):
        for told in all_told:
            await told.done.wait()
            assert told.after_end == 0


def ids_column(ids: Sequence[int]) -> bytes:
    """Little-endian uint32."""
    return np.array(list(ids), dtype="<u4").tobytes()


def _logprobs(outputs: engine_pb2.StepOutputs, num_ids: int) -> dict[int, tuple[tuple[float, int], Top]]:
    own, tops = _columns(outputs.logprobs)
    places = np.frombuffer(outputs.logprobs.places, dtype="<u4").tolist()
    if own and not places:
        assert len(own) == num_ids
        places = list(range(num_ids))
    return dict(zip(places, zip(own, tops, strict=True), strict=True))


def _columns(columns: generation_pb2.LogprobColumns) -> tuple[list[tuple[float, int]], list[Top]]:
    """(logprob, rank) of each id, and its alternatives."""
    values = np.frombuffer(columns.logprobs, dtype="<f4").tolist()
    ranks = np.frombuffer(columns.ranks, dtype="<u4").tolist()
    counts = np.frombuffer(columns.top_counts, dtype="<u4").tolist() or [0] * len(values)
    ids = np.frombuffer(columns.top_ids, dtype="<u4").tolist()
    logprobs = np.frombuffer(columns.top_logprobs, dtype="<f4").tolist()
    flat = list(zip(ids, logprobs, strict=True))
    assert len(flat) == sum(counts) and len(counts) == len(values)
    ends = list(itertools.accumulate(counts))
    tops = [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return list(zip(values, ranks, strict=True)), tops


@dataclass
class Bench:
    """A stub executor, a scheduler on it, and one frontend attached."""

    stub: StubExecutor
    server: SchedulerServer
    frontend: Frontend

    async def idle(self) -> None:
        """Nothing is left, everything is free, and the executor holds nothing either."""
        await until_idle(self.server)
        batch = self.stub.batch
        await until(lambda: batch is not None and not batch.slots and batch.num_blocks_held == 0)

    @property
    def free_blocks(self) -> int:
        return self.server.engine.core.free_blocks

    @property
    def total_blocks(self) -> int:
        return self.server.engine.core.total_blocks


@contextlib.asynccontextmanager
async def bench(
    model: Path, *, stub: StubExecutor | None = None, max_pending_bytes: int | None = None, **config: Any
) -> AsyncIterator[Bench]:
    """All three, ready; ends idle, or fails."""
    stub = stub or StubExecutor()
    async with (
        stub,
        scheduler_for(stub, model, max_pending_bytes=max_pending_bytes, **config) as server,
        Frontend(server) as frontend,
    ):
        await frontend.greeted()
        found = Bench(stub, server, frontend)
        yield found
        if stub.is_serving and server.engine.can_generate:
            stub.release()
            await frontend.abort(*frontend.told)
            await found.idle()
