"""An engine without a scheduler: the real EngineService over gRPC, with ids from a script or a plain function.

    async with StubEngine(script=[72, 105, 2]) as engine:
        ... a frontend attached to engine.address ...

One batched StepOutputs a step, as a scheduler sends them; lower priorities stand first in it. Prompt blocks count as
cached once their digests were seen. What it was asked stands in `submits` and `aborts`; faults come by constructor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc
from triptych.inference.v1 import generation_pb2

from loadtest.stub_cache import StubCache
from loadtest.stub_steps import StubRequest, StubStep
from services.common.contract import GRAMMAR, RESUME, TRACE_CONTEXT
from services.common.server import server_options

NextId = Callable[[tuple[int, ...], int], int]
"""(prompt ids, output position) to the id that stands there; a stub has no state a request could disturb. Choices after
the first have the ids that follow it in the vocabulary: choice i's are i higher."""

log = logging.getLogger("stub_engine")


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and where; positions count output ids of one request."""

    silent: bool = False
    """Submits are taken and never answered."""
    cut_at: int | None = None
    """The Attach stream breaks off when a request has this many ids."""
    bad_id_at: int | None = None
    bad_id: int = 0xFFFFFFFF
    only_prompt: tuple[int, ...] | None = None
    """Faults hit the request with this prompt alone; None: every request."""
    failed: engine_pb2.Failed | None = None
    """Sent, with the request's own id, when it has `failed_at` ids; all its choices end."""
    failed_at: int = 0
    no_hello: grpc.StatusCode | None = None
    """Attach ends with this status in place of a hello."""
    hello_version: int = 1
    no_heartbeats: bool = False

    def hit(self, prompt: tuple[int, ...]) -> bool:
        """Whether a request with this prompt meets the faults."""
        return self.only_prompt is None or self.only_prompt == prompt


class StubEngine:
    """Serves EngineService on a loopback port. `script` is by position, for every prompt or by prompt."""

    def __init__(
        self,
        *,
        script: Sequence[int] | Mapping[tuple[int, ...], Sequence[int]] | None = None,
        next_id: NextId | None = None,
        vocab_size: int = 49_152,
        context_tokens: int = 2048,
        block_tokens: int = 16,
        max_choices: int = 16,
        tokenizer_hash: str | None = None,
        model: str = "stub",
        fingerprint: str = "f" * 64,
        ids_per_step: int = 1,
        scores_per_step: int = 256,
        fragment_bytes: int = 64 * 1024 * 1024,
        features: tuple[str, ...] = (GRAMMAR, RESUME, TRACE_CONTEXT),
        step_s: float = 0.0,
        heartbeat_s: float = 1.0,
        faults: Faults | None = None,
        port: int = 0,
    ) -> None:
        self.port = port
        self.submits: list[engine_pb2.Submit] = []
        self.frontends_that_submitted: list[str] = []
        """The frontend_id behind each of `submits`."""
        self.aborts: list[int] = []
        self.hellos: list[engine_pb2.FrontendHello] = []
        self.changed = asyncio.Condition()
        self.faults = faults or Faults()
        self._next_id = next_id or _scripted(script, vocab_size)
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._block_tokens = block_tokens
        self._max_choices = max_choices
        self._cache = StubCache(block_tokens)
        self._tokenizer_hash = tokenizer_hash
        self._model = model
        self._fingerprint = fingerprint
        self._ids_per_step = ids_per_step
        self.scores_per_step = scores_per_step
        """Prompt positions of each request."""
        self.fragment_bytes = fragment_bytes
        self.fragments: list[engine_pb2.Fragment] = []
        self.features = list(features)
        self._step_s = step_s
        self._heartbeat_s = heartbeat_s
        self._state: engine_pb2.EngineState.ValueType = engine_pb2.ENGINE_STATE_SERVING
        self._sessions: set[_Session] = set()
        self._server: grpc.aio.Server | None = None
        self.engine_id = f"stub-{time.time_ns():x}"
        self._go = asyncio.Event()
        self._go.set()

    @property
    def address(self) -> str:
        """HOST:PORT to dial."""
        return f"127.0.0.1:{self.port}"

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Prompt ids of `submits`."""
        return [tuple(np.frombuffer(submit.prompt_ids, "<u4").tolist()) for submit in self.submits]

    @property
    def num_running(self) -> int:
        """Choices that have neither finished nor been aborted."""
        return sum(len(session.running) for session in self._sessions)

    async def __aenter__(self) -> StubEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; after `stop` on the same port again."""
        self._server = grpc.aio.server(options=server_options())
        engine_pb2_grpc.add_EngineServiceServicer_to_server(_Service(self), self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Breaks every stream off, as a process that dies."""
        if self._server is not None:
            for session in list(self._sessions):
                session.end()
            await self._server.stop(grace=None)
            self._server = None

    def pause(self) -> None:
        """Makes no ids and no heartbeats until `resume`: a process that was stopped."""
        self._go.clear()

    def resume(self) -> None:
        """Goes on."""
        self._go.set()

    def set_state(self, state: engine_pb2.EngineState.ValueType) -> None:
        """Tells every frontend at once."""
        self._state = state
        for session in self._sessions:
            session.heartbeat()

    async def wait_until(self, condition: Callable[[StubEngine], bool], timeout_s: float = 10.0) -> None:
        """Returns when `condition` holds; looked at whenever something came in or went out."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: condition(self)), timeout_s)

    async def tell(self) -> None:
        """Wakes `wait_until`."""
        async with self.changed:
            self.changed.notify_all()

    async def turn(self) -> None:
        """Waits for the next step."""
        await asyncio.sleep(self._step_s)
        await self._go.wait()

    async def beat(self) -> None:
        """Waits for the next heartbeat."""
        await asyncio.sleep(self._heartbeat_s)
        await self._go.wait()

    def id_at(self, request: StubRequest) -> int:
        """The next id of a choice, the fault's where there is one."""
        if self.faults.hit(request.prompt) and self.faults.bad_id_at == request.num_output:
            return self.faults.bad_id
        first = self._next_id(request.prompt, request.num_output)
        return first if request.choice == 0 else (first + request.choice) % self._vocab_size

    def admit(self, submit: engine_pb2.Submit) -> list[StubRequest]:
        """The choices of a request. Raises ValueError for one that the contract does not allow."""
        if not 1 <= submit.num_choices <= self._max_choices:
            raise ValueError(f"num_choices is {submit.num_choices}, not in [1, {self._max_choices}]")
        if wrong := self._cache.misfit(submit):
            raise ValueError(wrong)
        cached_tokens = self._cache.cached_tokens(submit)
        had = {resumed.choice: len(resumed.token_ids) // 4 for resumed in submit.resumed}
        if any(choice >= submit.num_choices or count >= submit.max_tokens for choice, count in had.items()):
            raise ValueError(f"resumed has a choice that is none or has ended: {had}")
        choices = had or dict.fromkeys(range(submit.num_choices), 0)
        return [StubRequest.of(submit, choice, cached_tokens, count) for choice, count in choices.items()]

    def hello(self) -> engine_pb2.EngineHello:
        """What a loaded engine says."""
        return engine_pb2.EngineHello(
            version=self.faults.hello_version,
            features=self.features,
            engine_id=self.engine_id,
            model=self._model,
            fingerprint=self._fingerprint,
            vocab_size=self._vocab_size,
            context_tokens=self._context_tokens,
            block_tokens=self._block_tokens,
            pool_tokens=self._context_tokens * 64,
            max_choices=self._max_choices,
            max_logprobs=20,
            fragment_bytes=self.fragment_bytes,
        )

    def beat_message(self, running: int) -> engine_pb2.Heartbeat:
        """Now."""
        return engine_pb2.Heartbeat(sent_unix_ns=time.time_ns(), state=self._state, running_requests=running)

    def refuses(self, hello: engine_pb2.FrontendHello) -> str | None:
        """Why a frontend does not fit, if so."""
        if self._tokenizer_hash is not None and hello.tokenizer_hash != self._tokenizer_hash:
            return f"tokenizer {hello.tokenizer_hash} is not the engine's, {self._tokenizer_hash}"
        return None

    def add(self, session: _Session) -> None:
        """A frontend has attached."""
        self._sessions.add(session)

    def remove(self, session: _Session) -> None:
        """A frontend has gone."""
        self._sessions.discard(session)

    @property
    def ids_per_step(self) -> int:
        """Of each request."""
        return self._ids_per_step


def _scripted(script: Sequence[int] | Mapping[tuple[int, ...], Sequence[int]] | None, vocab_size: int) -> NextId:
    if script is None:
        # A fixed walk over the vocabulary (Knuth's multiplicative hash), different for each prompt.
        return lambda prompt, position: (sum(prompt) + 2654435761 * (position + 1)) % vocab_size

    def next_id(prompt: tuple[int, ...], position: int) -> int:
        ids = script[prompt] if isinstance(script, Mapping) else script
        return ids[position % len(ids)]

    return next_id


class _Service(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine

    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        engine = self._engine
        first = await anext(requests)
        engine.hellos.append(first.hello)
        await engine.tell()
        if engine.faults.no_hello is not None:
            await context.abort(engine.faults.no_hello, "the stub was told to refuse")
        if refusal := engine.refuses(first.hello):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        session = _Session(engine, first.hello.frontend_id)
        engine.add(session)
        session.send(engine_pb2.AttachResponse(hello=engine.hello()))
        tasks = [asyncio.create_task(session.read(requests)), asyncio.create_task(session.step())]
        if not engine.faults.no_heartbeats:
            tasks.append(asyncio.create_task(session.beat()))
        try:
            while (message := await session.outbox.get()) is not None:
                yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stub's stream was cut")
        finally:
            for task in tasks:
                task.cancel()
            engine.remove(session)


@dataclass(eq=False)
class _Session:
    """One attached frontend: its requests and what goes up to it."""

    engine: StubEngine
    frontend_id: str
    running: dict[int, StubRequest] = field(default_factory=dict)
    outbox: asyncio.Queue[engine_pb2.AttachResponse | None] = field(default_factory=asyncio.Queue)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    steps: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    half_sent: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # (bytes of the whole, those that came)

    def send(self, message: engine_pb2.AttachResponse) -> None:
        self.outbox.put_nowait(message)

    def end(self) -> None:
        self.running.clear()
        self.outbox.put_nowait(None)

    def heartbeat(self) -> None:
        self.send(engine_pb2.AttachResponse(heartbeat=self.engine.beat_message(len(self.running))))

    async def read(self, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._submit(message.submit)
            elif kind == "fragment":
                self._add_fragment(message.fragment)
            elif kind == "abort":
                for request_id in np.frombuffer(message.abort.request_ids, "<u8").tolist():
                    self.engine.aborts.append(request_id)
                    self.running.pop(request_id, None)
                    self.half_sent.pop(request_id, None)
            elif kind == "ping":
                self.heartbeat()
            await self.engine.tell()

    def _submit(self, submit: engine_pb2.Submit) -> None:
        self.engine.submits.append(submit)
        self.engine.frontends_that_submitted.append(self.frontend_id)
        try:
            choices = self.engine.admit(submit)
        except ValueError as error:
            failed = engine_pb2.Failed(request_id=submit.request_id, code=3, reason="INVALID_FIELD", message=str(error))
            self.send(engine_pb2.AttachResponse(outputs=engine_pb2.StepOutputs(failed=[failed])))
            return
        self.running.update((request.request_id, request) for request in choices)
        self.work.set()

    def _add_fragment(self, fragment: engine_pb2.Fragment) -> None:
        self.engine.fragments.append(fragment)
        total, data = self.half_sent.pop(fragment.request_id, (fragment.total_bytes, b""))
        data += fragment.data
        if total and len(data) < total:
            self.half_sent[fragment.request_id] = (total, data)
        elif total:
            self._submit(engine_pb2.Submit.FromString(data))

    async def beat(self) -> None:
        while True:
            self.heartbeat()
            await self.engine.beat()

    async def step(self) -> None:
        while True:
            await self.work.wait()
            await self.engine.turn()
            self._make_step()
            await self.engine.tell()
            if not any(self._steps(request) for request in self.running.values()):
                self.work.clear()

    def _steps(self, request: StubRequest) -> bool:
        return not (self.engine.faults.silent and self.engine.faults.hit(request.prompt))

    def _make_step(self) -> None:
        step = StubStep(next(self.steps))
        for request in sorted(self.running.values(), key=lambda request: request.submit.priority):
            if request.request_id not in self.running or not self._steps(request):
                continue
            if self._meets_fault(request, step):
                continue
            self._advance(request, step)
        if step.anything:
            self.send(engine_pb2.AttachResponse(outputs=step.message()))
        faults = self.engine.faults
        if any(faults.cut_at == r.num_output and faults.hit(r.prompt) for r in self.running.values()):
            self.end()

    def _meets_fault(self, request: StubRequest, step: StubStep) -> bool:
        faults = self.engine.faults
        if faults.failed is None or not faults.hit(request.prompt) or request.num_output < faults.failed_at:
            return False
        failed = engine_pb2.Failed()
        failed.CopyFrom(faults.failed)
        failed.request_id = request.submit.request_id
        step.failed.append(failed)
        for choice in range(request.submit.num_choices):
            self.running.pop(request.submit.request_id + choice, None)
        return True

    def _advance(self, request: StubRequest, step: StubStep) -> None:
        submit = request.submit
        if self._scores(request, step):
            return
        ids: list[int] = []
        finished: engine_pb2.Finished | None = None
        if submit.max_tokens == 0:
            finished = engine_pb2.Finished(reason=generation_pb2.FINISH_REASON_LENGTH)
        while finished is None and len(ids) < self.engine.ids_per_step:
            token_id = self.engine.id_at(request)
            ids.append(token_id)
            request.num_output += 1
            if token_id in request.stop_ids and request.num_output > submit.min_tokens:
                finished = engine_pb2.Finished(reason=generation_pb2.FINISH_REASON_STOP, stop_id=token_id)
            elif request.num_output == submit.max_tokens:
                finished = engine_pb2.Finished(reason=generation_pb2.FINISH_REASON_LENGTH)
            elif self.engine.faults.cut_at == request.num_output:
                break
        if ids:
            step.add(request, ids)
        if finished is not None:
            finished.request_id = request.request_id
            finished.last_token_unix_ns = time.time_ns()
            step.finished.append(finished)
            del self.running[request.request_id]

    def _scores(self, request: StubRequest, step: StubStep) -> bool:
        """Whether the prompt is still being scored after this step; the first choice does it for all."""
        if request.scores_left:
            step.score(request, self.engine.scores_per_step)
        first = self.running.get(request.submit.request_id, request)
        return first.scores_left > 0


async def _serve(options: argparse.Namespace) -> None:
    engine = StubEngine(
        port=options.port,
        vocab_size=options.vocab_size,
        context_tokens=options.context_tokens,
        ids_per_step=options.ids_per_step,
        step_s=options.step_ms / 1000,
    )
    async with engine:
        log.info("serving stub engine on %s", engine.address)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def main() -> None:
    """`python -m loadtest.stub_engine --port 50052`: an engine to load a frontend with."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(description="an engine without a scheduler, for tests and load")
    parser.add_argument("--port", type=int, default=50052, help="port to listen on; 0 takes a free one")
    parser.add_argument("--vocab-size", type=int, default=49_152, help="ids are below it")
    parser.add_argument("--context-tokens", type=int, default=8192, help="prompt and output of one request")
    parser.add_argument("--ids-per-step", type=int, default=1, help="ids of a request in one step")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time between steps")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
