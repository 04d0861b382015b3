"""VllmEngine: each RPC of the adapter's contract."""

# ruff: noqa: N802  methods have the contract's names

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from services.common import audit
from services.common.caller import caller
from services.common.errors import RequestError, invalid, unavailable, unserved
from services.frontend import sizes
from services.frontend.adapters.vllm import ebnf, kv_events, loads, requests
from services.frontend.adapters.vllm.aborts import AbortedError, RunningCall, RunningCalls
from services.frontend.adapters.vllm.door import DOOR
from services.frontend.adapters.vllm.facts import ModelFacts, ServerFacts
from services.frontend.adapters.vllm.paths import named_as_theirs
from services.frontend.adapters.vllm.replies import Replies
from services.frontend.adapters.vllm.tokenizer_files import TokenizerFiles
from services.frontend.answer import Answer
from services.frontend.calls import Calls
from services.frontend.door import DOOR as OWN_DOOR
from services.frontend.engine import Scores
from services.frontend.fleet import Fleet
from services.frontend.fleet_admin import FleetAdmin
from services.frontend.grammar_check import GrammarCheck
from services.frontend.intake import Intake
from services.frontend.journey import Journey
from services.frontend.patience import Patience
from services.frontend.quotas import Quotas
from services.frontend.request import Delta, EngineFacts, Job, Limits
from services.frontend.request_id import greet, new_id, tell
from services.frontend.request_log import Entry, RequestLog
from services.frontend.running import Call, Context, Runner
from services.frontend.served_model import ServedModel
from services.frontend.tenant import tenant_of
from services.frontend.tokenizer import off_loop

NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

MAX_FLUSH_WAIT_S = 3600.0
FLUSH_POLL_S = 0.05


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the package has no types
    """The adapter. A generation goes the way of all others: this file reads and answers it in the other contract."""

    def __init__(
        self,
        model: ServedModel,
        engine: Fleet,
        admin: FleetAdmin,
        calls: Calls,
        grammars: GrammarCheck,
        limits: Limits,
        quotas: Quotas,
        requests: RequestLog | None = None,
    ) -> None:
        self._requests = requests or RequestLog(model.name)
        self._model = model
        self._engine = engine
        self._admin = admin
        self._calls = calls
        self._limits = limits
        self._intake = Intake(model, grammars, limits)
        self._runner = Runner(engine, quotas)
        self._running = RunningCalls()
        self._server = ServerFacts()
        self._told = ModelFacts(model)
        self._tokenizer_files = TokenizerFiles(model.folder)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Ids for ids, or for text; in chunks or at the end."""
        self._server.received()
        with (
            self._requests.entered(f"{NAME}/Generate", context, request.request_id) as entry,
            self._calls.entered(),
            self._running.entered(request.request_id, caller()) as running,
            named_as_theirs(request),
        ):
            entry.request_id, entry.tenant = new_id(), tenant_of(context)
            call = Call(entry.request_id, entry.tenant, context)
            entry.job = job = await self._prepare(request)
            await self._answer(job, call, running, entry, stream=request.stream)
            entry.is_aborted = running.is_aborted

    async def _prepare(self, request: pb.GenerateRequest) -> Job:
        DOOR.check(request)
        work = ebnf.WORK * len(request.sampling_params.grammar)
        own = await off_loop(work, lambda: requests.generate_request(request))
        sizes.check(own, self._limits)
        OWN_DOOR.check(own)
        return await self._intake.generate(own, self._engine.require())

    async def _answer(self, job: Job, call: Call, running: RunningCall, entry: Entry, *, stream: bool) -> None:
        replies = Replies(job, stream=stream)
        entry.answer = answer = Answer(job, self._model.tokenizer, self._limits.unread_tokens)
        patience = Patience(call.context.write, self._limits.slow_reader_s)
        write = _Writer(call, patience, self._limits).write

        async def send(deltas: list[tuple[int, Delta]]) -> None:
            replies.cached_tokens = answer.cached_tokens
            for reply in replies.take(deltas):
                await write(reply)

        async def score(scores: Scores) -> None:
            replies.score(scores)

        def submitted(journey: Journey) -> None:
            entry.submitted(journey)
            running.submitted(journey)

        running.answering(answer)
        try:
            with suppress(AbortedError):
                if not running.is_aborted:
                    await self._runner.run(job, answer, call, send, score, submitted)
            for reply in replies.end():
                await write(reply)
        finally:
            answer.close()
            patience.close()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends the caller's calls of these ids, which end with finish_reason "abort"; unknown ids are nobody's."""
        DOOR.check(request)
        for request_id in request.request_ids:
            self._running.abort(request_id, caller())
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Whether a token could be made now, and if not, why.

        UNAVAILABLE until an engine has told the model's facts: a gateway that starts before then goes on waiting, and
        asks GetModelInfo, which it does only once, when there is an answer.
        """
        DOOR.check(request)
        self._facts()
        if self._calls.draining:
            return pb.HealthCheckResponse(healthy=False, message="this frontend is shutting down")
        if self._engine.can_generate():
            return pb.HealthCheckResponse(healthy=True, message="a token can be made")
        return pb.HealthCheckResponse(healthy=False, message=self._trouble())

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """The model's facts. UNAVAILABLE until an engine has told them."""
        DOOR.check(request)
        return self._told.info(self._facts())

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """This frontend's own."""
        DOOR.check(request)
        return self._server.info(active_requests=self._calls.num_running, facts=self._engine.facts)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """The load now, of all engines that answer."""
        DOOR.check(request)
        loads.check(request)
        return loads.response(await self._admin.load(), self._facts().block_tokens)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The checkpoint's text side as a zip archive."""
        DOOR.check(request)
        async for chunk in self._tokenizer_files.chunks():
            yield chunk

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Forgets the prefix caches of all engines, where they are idle, or become so in time."""
        DOOR.check(request)
        wait_s = request.timeout_s
        if not (math.isfinite(wait_s) and 0 <= wait_s <= MAX_FLUSH_WAIT_S):
            raise invalid("timeout_s", f"is {wait_s:g}; it must be in [0, {MAX_FLUSH_WAIT_S:g}]")
        told: dict[str, object] = {}
        with audit.told("FlushCache", context, told):
            answer = await self._flush(wait_s)
            told["result"] = answer.message
            return answer

    async def _flush(self, wait_s: float) -> common_pb2.FlushCacheResponse:
        deadline_s = time.monotonic() + wait_s
        while not (load := await self._admin.all_loads()).is_idle:
            if time.monotonic() >= deadline_s:
                busy = load.running_requests + load.waiting_requests
                message = f"{busy} requests are in flight after {wait_s:g} s (timeout_s); nothing was flushed"
                return common_pb2.FlushCacheResponse(success=False, message=message)
            await asyncio.sleep(FLUSH_POLL_S)
        flushed, errors = await self._admin.flush_prefix_cache()
        message = f"{flushed} blocks were forgotten"
        if errors:
            message += f"; {len(errors)} of {len(self._admin)} engines have not: {errors[0].message}"
        return common_pb2.FlushCacheResponse(success=not errors, message=message)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """What the caller's requests could find cached at the first engine, and each change to it."""
        DOOR.check(request)
        start = request.start_sequence_number
        async with kv_events.subscribed(self._admin, tenant_of(context), start) as batches:
            await greet(context)  # the first change may be long in coming; a refusal comes without, at once
            async for batch in batches:
                yield batch

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Not served."""
        raise unserved("Embed")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Not served."""
        raise unserved("StartProfile")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        """Not served."""
        raise unserved("StopProfile")

    def _trouble(self) -> str:
        try:
            self._engine.require()
        except RequestError as error:
            return error.message
        return "the engine is recovering: no token can be made now"

    def _facts(self) -> EngineFacts:
        if self._engine.facts is None:
            raise unavailable("NO_ENGINE", "no engine has told the model's facts yet")
        return self._engine.facts


class _Writer:
    """Replies to the client.

    Until the first one no metadata is sent: a gateway makes an HTTP status of a refusal, but not once a stream has
    begun.
    """

    def __init__(self, call: Call, patience: Patience, limits: Limits) -> None:
        self._call = call
        self._patience = patience
        self._limits = limits
        self._has_begun = False

    async def write(self, reply: pb.GenerateResponse) -> None:
        sizes.check_answer(reply, self._limits, "ask for less, or raise --max-message-bytes")
        if not self._has_begun:
            self._has_begun = True
            await tell(self._call.context, self._call.request_id)
        await self._patience.write(reply)
