"""InferenceService: each RPC from the door to its answer."""

# ruff: noqa: N802  methods have the contract's names

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from services.common.errors import RequestError, unavailable
from services.frontend import responses, resume, sizes
from services.frontend.answer import Answer
from services.frontend.calls import Calls
from services.frontend.door import DOOR
from services.frontend.engine import Scores, Submission
from services.frontend.engine_client import EngineClient
from services.frontend.engine_request import EngineRequest
from services.frontend.intake import Intake
from services.frontend.patience import Patience
from services.frontend.prompt_blocks import block_digests
from services.frontend.request import Delta, EngineFacts, Job, Limits
from services.frontend.responses import Fold
from services.frontend.served_model import ServedModel
from services.frontend.tenant import tenant_of
from services.frontend.tokenizer import off_loop
from services.frontend.validation import check_ids

NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
REQUEST_ID_KEY = "triptych-request-id"

R = TypeVar("R", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)
Context: TypeAlias = Any  # grpc.aio.ServicerContext; the generated base class names a union that mypy cannot narrow
Prepare: TypeAlias = Callable[[EngineFacts], Awaitable[Job]]
Write: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]
Send: TypeAlias = Callable[[list[tuple[int, Delta]]], Awaitable[None]]
"""Deltas to the client by choice, in one message."""

Tell: TypeAlias = Callable[[Scores], Coroutine[Any, Any, None]]
"""Prompt logprobs to the client, in as many messages as it takes."""

MAX_SCORES_BYTES = 64 * 1024
"""Of one message of prompt logprobs."""
NOTHING_TO_SCORE = Scores.plain(1, np.zeros(0, np.float32), np.zeros(0, np.uint32))

log = logging.getLogger(__name__)


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The public API of one model; the state of a request lives in its call alone."""

    def __init__(self, model: ServedModel, engine: EngineClient, calls: Calls, limits: Limits) -> None:
        self._model = model
        self._engine = engine
        self._calls = calls
        self._limits = limits
        self._intake = Intake(model, limits)
        self._scores_bytes = min(MAX_SCORES_BYTES, limits.message_bytes // 2)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """A text or token-id prompt, continued."""

        def prepare(facts: EngineFacts) -> Awaitable[Job]:
            return self._intake.generate(request, facts)

        await self._stream(request, prepare, inference_pb2.GenerateResponse, context)

    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """A conversation, answered."""

        def prepare(facts: EngineFacts) -> Awaitable[Job]:
            return self._intake.chat(request, facts)

        await self._stream(request, prepare, inference_pb2.ChatResponse, context)

    async def GenerateUnary(
        self, request: inference_pb2.GenerateUnaryRequest, context: Context
    ) -> inference_pb2.GenerateUnaryResponse:
        """Generate's messages folded into one."""

        def prepare(facts: EngineFacts) -> Awaitable[Job]:
            return self._intake.generate(request.request, facts, "request.")

        fold = Fold(inference_pb2.GenerateResponse())
        await self._answer(request, prepare, inference_pb2.GenerateResponse, context, fold.write, "request.options")
        answer = inference_pb2.GenerateUnaryResponse(response=fold.result())
        sizes.check_answer(answer, self._limits, "use Generate, which streams it, or raise --max-message-bytes")
        return answer

    async def ChatUnary(
        self, request: inference_pb2.ChatUnaryRequest, context: Context
    ) -> inference_pb2.ChatUnaryResponse:
        """Chat's messages folded into one."""

        def prepare(facts: EngineFacts) -> Awaitable[Job]:
            return self._intake.chat(request.request, facts, "request.")

        fold = Fold(inference_pb2.ChatResponse())
        await self._answer(request, prepare, inference_pb2.ChatResponse, context, fold.write, "request.options")
        answer = inference_pb2.ChatUnaryResponse(response=fold.result())
        sizes.check_answer(answer, self._limits, "use Chat, which streams it, or raise --max-message-bytes")
        return answer

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """The ids of a text or a chat, and each id's bytes."""
        await _greet(context)
        with self._calls.entered():
            sizes.check(request, self._limits)
            DOOR.check(request)
            ids = await self._intake.tokenize(request)
            return await off_loop(len(ids), lambda: self._tokenized(ids))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """The text of ids as a whole."""
        await _greet(context)
        with self._calls.entered():
            sizes.check(request, self._limits)
            DOOR.check(request)
            self._model.check_name(request.model)
            ids = tuple(request.token_ids)
            check_ids(ids, self._vocab_size(), "token_ids")
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await off_loop(len(ids), lambda: self._model.tokenizer.decode(ids, skip_special_tokens=skip))
            return inference_pb2.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        """The model's facts. UNAVAILABLE until an engine has told them."""
        await _greet(context)
        with self._calls.entered():
            DOOR.check(request)
            self._model.check_name(request.model)
            return inference_pb2.GetModelResponse(model=self._describe())

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The one model served here."""
        await _greet(context)
        with self._calls.entered():
            DOOR.check(request)
            return inference_pb2.ListModelsResponse(models=[self._describe()])

    async def _stream(self, request: Message, prepare: Prepare, response: type[R], context: Context) -> None:
        """An answer to a client that has to take it as it comes."""
        patience = Patience(context.write, self._limits.slow_reader_s)
        try:
            await self._answer(request, prepare, response, context, patience.write)
        finally:
            patience.close()

    async def _answer(
        self,
        request: Message,
        prepare: Prepare,
        response: type[R],
        context: Context,
        write: Callable[[R], Awaitable[None]],
        path: str = "options",
    ) -> None:
        """Prompt facts, deltas, usage: the one way every generation goes."""
        request_id = await _greet(context)
        with self._calls.entered():
            sizes.check(request, self._limits)
            DOOR.check(request)
            tenant = tenant_of(context)
            job = await prepare(self._engine.require())
            begun = await resume.begin(job, self._model.tokenizer, path)
            answer = Answer(job, self._model.tokenizer, self._limits.unread_tokens, begun)

            def send(deltas: list[tuple[int, Delta]]) -> Awaitable[None]:
                return write(responses.choices(response(), deltas, self._model.tokenizer))

            async def tell(scores: Scores) -> None:
                for piece in responses.prompt_logprobs(job, scores, self._model.tokenizer, self._scores_bytes):
                    await write(response(prompt_logprobs=piece))

            await write(response(prompt=self._prompt_info(job)))
            if job.options.prompt_logprobs is not None and len(job.prompt_ids) == 1:
                await tell(NOTHING_TO_SCORE)
            if not job.asks_engine:
                if deltas := answer.nothing():
                    await send(deltas)
            elif not answer.running:
                while not answer.done:
                    await send(await answer.take())
            else:
                submission = await _submission(job, answer.running, tenant, context)
                await self._run(job, answer, self._engine.submit(submission, answer), send, tell, request_id, context)
            await write(response(usage=responses.usage(job, answer.completion_tokens, answer.cached_tokens)))
            log.debug(
                "request %s (label %r): %d prompt tokens, %d output tokens, stopped by %s",
                request_id,
                job.options.label,
                len(job.prompt_ids),
                answer.completion_tokens,
                ", ".join(answer.stopped),
            )

    def _prompt_info(self, job: Job) -> inference_pb2.PromptInfo:
        info = responses.prompt_info(job)
        if job.options.echo:
            sizes.check_answer(info, self._limits, "leave out echo, or raise --max-message-bytes")
        return info

    async def _run(
        self,
        job: Job,
        answer: Answer,
        request: EngineRequest,
        send: Send,
        tell: Tell,
        request_id: str,
        context: Context,
    ) -> None:
        """From the engine to the client, until every choice has stopped. A choice that fails ends the call."""
        # A call that is cancelled while a slow client holds up a message may stay where it is: the callback is what
        # tells the engine at once.
        context.add_done_callback(lambda _: request.close())
        try:
            while not answer.done:
                deltas = await answer.take()
                for scores in answer.take_scores():
                    await tell(scores)
                if deltas:
                    await send(deltas)
        except RequestError as error:
            if error.code is grpc.StatusCode.INTERNAL:
                log.error("request %s (label %r): %s", request_id, job.options.label, error.message)
            raise
        finally:
            request.close()
            answer.close()

    def _tokenized(self, ids: tuple[int, ...]) -> inference_pb2.TokenizeResponse:
        answer = responses.tokenized(ids, self._model.tokenizer)
        sizes.check_answer(answer, self._limits, "tokenize it in parts, or raise --max-message-bytes")
        return answer

    def _describe(self) -> inference_pb2.Model:
        facts = self._engine.facts
        if facts is None:
            raise unavailable("NO_ENGINE", "no engine has told the model's facts yet")
        return inference_pb2.Model(
            name=self._model.name,
            aliases=self._model.aliases,
            revision=self._model.revision,
            fingerprint=facts.fingerprint,
            context_tokens=facts.context_tokens,
            vocab_size=self._model.vocab_size(facts),
            eos_token_ids=sorted(self._model.eos_ids),
            defaults=responses.defaults(self._model.defaults),
            limits=self._limits.named(facts),
            has_chat_template=self._model.chat.has_template,
        )

    def _vocab_size(self) -> int:
        """Of what Detokenize reads: the engine's may be padded past the tokenizer's, and its ids can be sampled."""
        facts = self._engine.facts
        return max(self._model.tokenizer.vocab_size, facts.vocab_size if facts else 0)


async def _greet(context: Context) -> str:
    """Tells the request's id before anything else, errors included."""
    request_id = uuid.uuid4().hex
    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
    return request_id


async def _submission(job: Job, running: tuple[int, ...], tenant: str, context: Context) -> Submission:
    digests = await block_digests(job, tenant)
    remaining_s: float | None = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise RequestError(
            grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", "the deadline passed before the engine was asked"
        )
    return Submission(
        prompt_ids=job.prompt_ids,
        sampling=job.options.sampling,
        seed=job.options.seed,
        max_tokens=job.max_tokens,
        min_tokens=job.options.min_tokens,
        stop_ids=job.stop_ids,
        logprobs=job.options.logprobs,
        arrived_unix_ns=time.time_ns(),
        timeout_ms=None if remaining_s is None else int(remaining_s * 1000),
        num_choices=job.options.n if job.max_tokens else 1,  # a prompt is scored once
        prompt_logprobs=job.options.prompt_logprobs,
        priority=job.options.priority,
        tenant=tenant,
        digests=digests,
        resumed=_resumed(job, running),
    )


def _resumed(job: Job, running: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The choices that are still to run, and their ids so far; nothing where all start."""
    received = job.options.received
    if not received:
        return ()
    return tuple((index, received[index].token_ids if index in received else ()) for index in running)
