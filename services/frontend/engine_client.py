"""The one Attach stream to the engine: kept for the process's life, and who waits on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc

from services.common.errors import RequestError, unavailable
from services.common.peer import Peer
from services.common.telemetry.clock import ClockOffset, ping_interval_s
from services.frontend import engine_wire
from services.frontend.engine import StepReport, Submission
from services.frontend.engine_choice import Load
from services.frontend.engine_request import EngineRequest, Sink
from services.frontend.engine_wire import EngineContractError
from services.frontend.journey import LOST
from services.frontend.outgoing import Outgoing
from services.frontend.request import EngineFacts

HEARTBEAT_LIMIT_S = 3.0
"""An engine sends one every second; one that has been silent for this long cannot be counted on."""
RETRY_FIRST_S, RETRY_LAST_S = 0.1, 2.0
RETRY_MISMATCH_S = 10.0
"""Between tries where versions or tokenizers do not fit: somebody has to change something first."""

_MISMATCH = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
AttachCall: TypeAlias = grpc.aio.StreamStreamCall[engine_pb2.AttachRequest, engine_pb2.AttachResponse]

log = logging.getLogger(__name__)


class EngineClient:
    """Attaches, and attaches again; hands each request what is its own."""

    def __init__(
        self,
        peer: Peer | str,
        tokenizer_hash: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        tells_clock_offset: bool = False,
    ) -> None:
        self.clock_offset = ClockOffset()
        """What the engine's clock is ahead of ours; kept up where it was asked for."""
        self._tells_clock_offset = tells_clock_offset
        self.changed = asyncio.Event()
        """Set when what `can_generate` or `require` say may have changed; who waits clears it."""
        self.facts: EngineFacts | None = None
        """The last hello; it outlives the stream."""
        self.on_change: Callable[[], object] = lambda: None
        """Called with `changed`."""
        self.on_load: Callable[[Load], object] = lambda load: None
        """Called with each heartbeat."""
        self._peer = Peer(peer) if isinstance(peer, str) else peer
        self.target = self._peer.target
        self._tokenizer_hash = tokenizer_hash
        self._clock = clock
        self._frontend_id = engine_wire.new_frontend_id()
        self._next_id = 1
        self._requests: dict[int, EngineRequest] = {}
        """By id, until they are closed."""
        self._choices: dict[int, EngineRequest] = {}
        """By the id of a choice that has not ended: choice i of a request has its id + i."""
        self._outgoing: Outgoing | None = None
        self._state = engine_pb2.ENGINE_STATE_UNSPECIFIED
        self._heard_s = 0.0
        self._attached = False
        self._trouble = _Trouble("not tried yet")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to attach; never waits for the engine."""
        self._task = asyncio.create_task(self._keep_attached())

    async def close(self) -> None:
        """Leaves the engine, which aborts what still runs."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def can_generate(self) -> bool:
        """Attached, serving, and heard of lately."""
        return self._attached and self._state == engine_pb2.ENGINE_STATE_SERVING and self.silent_s() < HEARTBEAT_LIMIT_S

    @property
    def is_attached(self) -> bool:
        """Its stream stands, and its hello has come."""
        return self._attached

    @property
    def is_idle(self) -> bool:
        """It has no request of this frontend's."""
        return not self._requests and not self._choices

    @property
    def is_recovering(self) -> bool:
        """Attached, and says that it makes no tokens now."""
        return self._attached and self._state == engine_pb2.ENGINE_STATE_RECOVERING

    @property
    def heard_s(self) -> float:
        """When it was last heard of, by the clock; another value with each message."""
        return self._heard_s

    def silent_s(self) -> float:
        """Seconds since the engine was last heard of."""
        return self._clock() - self._heard_s

    def require(self) -> EngineFacts:
        """The engine's facts, where it takes requests. Raises UNAVAILABLE with the reason."""
        if not self._attached or self.facts is None:
            raise unavailable("NO_ENGINE", f"no engine is attached: {self._trouble.told}")
        if self._state == engine_pb2.ENGINE_STATE_DRAINING:
            raise unavailable("ENGINE_DRAINING", "the engine is draining and takes no new requests")
        if self.silent_s() >= HEARTBEAT_LIMIT_S:
            raise unavailable(
                "ENGINE_SILENT",
                f"the engine was last heard of {self.silent_s():.1f} s ago, {HEARTBEAT_LIMIT_S:g} allowed",
            )
        return self.facts

    def submit(self, submission: Submission, sink: Sink) -> EngineRequest:
        """Hands over a request; `sink` is given what comes of it. Raises UNAVAILABLE where `require` does."""
        self.require()
        request = EngineRequest(self._next_id, submission.choices, sink, end=self._end, close=self._close)
        self._next_id += submission.num_choices
        self._requests[request.request_id] = request
        self._choices.update(dict.fromkeys(request.choice_ids, request))
        self._send(engine_wire.submit(request.request_id, submission))
        return request

    def fail_all(self, error: RequestError) -> None:
        """Ends every request with `error`, here and in the engine."""
        for request in list(self._requests.values()):
            request.fail(error)
            request.close()

    def _close(self, request: EngineRequest) -> None:
        self._requests.pop(request.request_id, None)
        self._end(request.choice_ids)

    def _end(self, choice_ids: Sequence[int]) -> None:
        """Tells the engine to stop what has not ended of them."""
        running = [choice_id for choice_id in choice_ids if self._choices.pop(choice_id, None) is not None]
        if running:
            if self._outgoing is not None:
                self._outgoing.drop(running)
            self._send(engine_wire.abort(running))

    def _send(self, message: engine_pb2.AttachRequest) -> None:
        if self._outgoing is not None:
            self._outgoing.put(message)

    async def _keep_attached(self) -> None:
        try:
            wait_s = RETRY_FIRST_S
            while True:
                try:
                    await self._attach(engine_pb2_grpc.EngineServiceStub(self._peer.channel()))
                    trouble = _Trouble("the engine closed the stream")
                except grpc.aio.AioRpcError as error:
                    trouble = _explain(error)
                except EngineContractError as error:
                    trouble = _Trouble(str(error), slow=True)
                except Exception as error:  # a fault of ours must not leave a frontend that never attaches again
                    log.exception("the engine's stream failed")
                    trouble = _Trouble("its stream failed", repr(error), slow=True)
                finally:
                    was_attached = self._attached
                    self._detach()
                self._note(trouble, was_attached)
                wait_s = RETRY_FIRST_S if was_attached else min(wait_s * 2, RETRY_LAST_S)
                await asyncio.sleep(RETRY_MISMATCH_S if trouble.slow else wait_s * random.uniform(0.8, 1.2))
        finally:
            await self._peer.close()

    async def _attach(self, stub: engine_pb2_grpc.EngineServiceStub) -> None:
        """One stream, from hello to its end."""
        call: AttachCall = stub.Attach()  # type: ignore[call-arg, assignment]  # the stubs know only call iterators
        self._outgoing = Outgoing()
        self._outgoing.put(engine_wire.hello(self._frontend_id, self._tokenizer_hash))
        tasks = [asyncio.create_task(_write(call, self._outgoing))]
        if self._tells_clock_offset:
            tasks.append(asyncio.create_task(self._ping()))
        try:
            async for message in call:
                self._receive(message)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()

    async def _ping(self) -> None:
        for number in itertools.count(1):
            self._send(engine_wire.ping(time.time_ns()))
            await asyncio.sleep(ping_interval_s(number))

    def _receive(self, message: engine_pb2.AttachResponse) -> None:
        could = self.can_generate()
        self._heard_s = self._clock()  # any message is a sign of life: heartbeats may wait behind outputs
        kind = message.WhichOneof("message")
        if kind == "outputs":
            self._deliver(engine_wire.read_outputs(message.outputs))
        elif kind == "heartbeat":
            self._on_heartbeat(message.heartbeat)
        elif kind == "hello":
            self._on_hello(message.hello)
        if self.can_generate() != could:
            self._note_change()

    def _deliver(self, report: StepReport) -> None:
        for choice_id, outputs in report.outputs.items():
            request = self._choices.get(choice_id)
            if request is None:
                continue  # under way when it was aborted
            if outputs.finish is not None:
                del self._choices[choice_id]
            request.put(choice_id, outputs)
        for request_id, error in report.failures.items():
            self._fail(request_id, error)

    def _fail(self, request_id: int, error: RequestError) -> None:
        """Ends a request with all its choices; its call closes it, which aborts those that may still run.

        What names the first choice may be of it alone, so the others are aborted too; unknown ids are ignored.
        """
        request = self._choices.pop(request_id, None)
        if request is None and (named := self._requests.get(request_id)) and request_id not in named.choice_ids:
            request = named  # as a whole: its first choice had finished before it was resumed
        if request is not None:
            request.fail(error)

    def _on_hello(self, message: engine_pb2.EngineHello) -> None:
        self.facts = engine_wire.read_hello(message)
        if self._outgoing is not None:
            self._outgoing.fragment_bytes = self.facts.fragment_bytes
        self._attached = True
        self._trouble = _Trouble("")
        if self._state in (engine_pb2.ENGINE_STATE_UNSPECIFIED, engine_pb2.ENGINE_STATE_LOADING):
            self._state = engine_pb2.ENGINE_STATE_SERVING  # a hello comes once the model is loaded
        self._note_change()
        log.info(
            "attached to engine %s at %s: %s, context %d tokens",
            self.facts.engine_id,
            self.target,
            self.facts.model,
            self.facts.context_tokens,
        )

    def _on_heartbeat(self, message: engine_pb2.Heartbeat) -> None:
        if message.HasField("ping_unix_ns"):
            self.clock_offset.add(message.ping_unix_ns, message.sent_unix_ns, time.time_ns())
        before = self._state
        self._state = message.state
        self.on_load(
            Load(
                requests=message.running_requests + message.waiting_requests,
                waiting_tokens=message.waiting_tokens,
                prompt_tokens_per_s=message.prompt_tokens_per_s,
            )
        )
        if not self._attached:
            self._trouble = _Trouble("the engine is loading its model")
        if before != self._state:
            self._note_change()

    def _detach(self) -> None:
        """Everything that hung on the stream ends with it."""
        self._outgoing = None
        self._attached = False
        self._state = engine_pb2.ENGINE_STATE_UNSPECIFIED
        error = unavailable(LOST, "the engine was lost while it worked on this request; send it again")
        lost = list(self._requests.values())
        self._requests.clear()
        self._choices.clear()
        for request in lost:
            request.fail(error)
        self._note_change()

    def _note_change(self) -> None:
        self.changed.set()
        self.on_change()

    def _note(self, trouble: _Trouble, was_attached: bool) -> None:
        """Logs once what keeps the engine away, not at every try."""
        if trouble != self._trouble or was_attached:
            log.warning("no engine at %s: %s", self.target, trouble.logged or trouble.told)
        self._trouble = trouble
        self._note_change()


async def _write(
    call: AttachCall,
    outgoing: Outgoing,
) -> None:
    # The reader reports how a stream ended; a write that finds it ended has nothing to add.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outgoing.take())


@dataclass(frozen=True)
class _Trouble:
    """What keeps the engine away: `told` to clients, who are not to learn inner addresses; `logged` where it says more.

    `slow` where somebody has to change something before another try can succeed.
    """

    told: str
    logged: str = ""
    slow: bool = False


def _explain(error: grpc.aio.AioRpcError) -> _Trouble:
    whole = f"{error.code().name}: {error.details()}"
    if error.code() in _MISMATCH:
        return _Trouble(whole, slow=True)  # the engine's own words about this frontend
    return _Trouble(f"its stream ended with {error.code().name}; the frontend's log says more", whole)
