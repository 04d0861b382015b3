"""InferenceService: each RPC from the door to its answer."""

# ruff: noqa: N802  methods have the contract's names

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from services.common.contract import GRAMMAR
from services.common.errors import unavailable
from services.frontend import responses, resume, sizes
from services.frontend.answer import Answer
from services.frontend.calls import Calls
from services.frontend.door import DOOR
from services.frontend.engine import Scores
from services.frontend.fleet import Fleet
from services.frontend.grammar_check import GrammarCheck
from services.frontend.intake import Intake
from services.frontend.patience import Patience
from services.frontend.quotas import Quotas
from services.frontend.request import Delta, EngineFacts, Job, Limits
from services.frontend.request_id import greet
from services.frontend.request_log import Entry, RequestLog
from services.frontend.responses import Fold
from services.frontend.running import Call, Context, Runner
from services.frontend.served_model import ServedModel
from services.frontend.tenant import tenant_of
from services.frontend.tokenizer import off_loop
from services.frontend.validation import check_ids

NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

R = TypeVar("R", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)
Prepare: TypeAlias = Callable[[EngineFacts], Awaitable[Job]]
Write: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]

SERVED_FEATURES = frozenset({GRAMMAR})
"""Of Model.features: what the engine must have too."""

MAX_SCORES_BYTES = 64 * 1024
"""Of one message of prompt logprobs."""


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The public API of one model; the state of a request lives in its call alone."""

    def __init__(
        self,
        model: ServedModel,
        engine: Fleet,
        calls: Calls,
        grammars: GrammarCheck,
        limits: Limits,
        quotas: Quotas,
        requests: RequestLog | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._calls = calls
        self._requests = requests or RequestLog(model.name)
        self._limits = limits
        self._intake = Intake(model, grammars, limits)
        self._runner = Runner(engine, quotas)
        self._scores_bytes = min(MAX_SCORES_BYTES, limits.message_bytes // 2)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """A text or token-id prompt, continued."""

        def prepare(facts: EngineFacts) -> Awaitable[Job]:
            return self._intake.generate(request, facts)

        with self._told("Generate", context, request.options.label) as entry:
            await self._stream(request, prepare, inference_pb2.GenerateResponse, entry, context)

    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """A conversation, answered."""

        def prepare(facts: EngineFacts) -> Awaitable[Job]:
            return self._intake.chat(request, facts)

        with self._told("Chat", context, request.options.label) as entry:
            await self._stream(request, prepare, inference_pb2.ChatResponse, entry, context)

    async def GenerateUnary(
        self, request: inference_pb2.GenerateUnaryRequest, context: Context
    ) -> inference_pb2.GenerateUnaryResponse:
        """Generate's messages folded into one."""

        def prepare(facts: EngineFacts) -> Awaitable[Job]:
            return self._intake.generate(request.request, facts, "request.")

        fold, kind = Fold(inference_pb2.GenerateResponse()), inference_pb2.GenerateResponse
        with self._told("GenerateUnary", context, request.request.options.label) as entry:
            await self._answer(request, prepare, kind, entry, context, fold.write, "request.options")
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
        with self._told("ChatUnary", context, request.request.options.label) as entry:
            await self._answer(
                request, prepare, inference_pb2.ChatResponse, entry, context, fold.write, "request.options"
            )
            answer = inference_pb2.ChatUnaryResponse(response=fold.result())
            sizes.check_answer(answer, self._limits, "use Chat, which streams it, or raise --max-message-bytes")
            return answer

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """The ids of a text or a chat, and each id's bytes."""
        with self._told("Tokenize", context) as entry, self._calls.entered():
            await entry.greet()
            sizes.check(request, self._limits)
            DOOR.check(request)
            ids = await self._intake.tokenize(request)
            return await off_loop(len(ids), lambda: self._tokenized(ids))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """The text of ids as a whole."""
        with self._told("Detokenize", context) as entry, self._calls.entered():
            await entry.greet()
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
        await greet(context)
        with self._calls.entered():
            DOOR.check(request)
            self._model.check_name(request.model)
            return inference_pb2.GetModelResponse(model=self._describe())

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The one model served here."""
        await greet(context)
        with self._calls.entered():
            DOOR.check(request)
            return inference_pb2.ListModelsResponse(models=[self._describe()])

    async def _stream(
        self, request: Message, prepare: Prepare, response: type[R], entry: Entry, context: Context
    ) -> None:
        """An answer to a client that has to take it as it comes."""
        patience = Patience(context.write, self._limits.slow_reader_s)
        try:
            await self._answer(request, prepare, response, entry, context, patience.write)
        finally:
            patience.close()

    async def _answer(
        self,
        request: Message,
        prepare: Prepare,
        response: type[R],
        entry: Entry,
        context: Context,
        write: Callable[[R], Awaitable[None]],
        path: str = "options",
    ) -> None:
        """Prompt facts, deltas, usage: the one way every generation goes."""
        request_id = await entry.greet()
        with self._calls.entered():
            sizes.check(request, self._limits)
            DOOR.check(request)
            entry.tenant = tenant_of(context)
            call = Call(request_id, entry.tenant, context)
            entry.job = job = await prepare(self._engine.require())
            begun = await resume.begin(job, self._model.tokenizer, path)
            entry.answer = answer = Answer(job, self._model.tokenizer, self._limits.unread_tokens, begun)

            def send(deltas: list[tuple[int, Delta]]) -> Awaitable[None]:
                return write(responses.choices(response(), deltas, self._model.tokenizer, raw=job.options.raw_bytes))

            async def tell(scores: Scores) -> None:
                for piece in responses.prompt_logprobs(job, scores, self._model.tokenizer, self._scores_bytes):
                    await write(response(prompt_logprobs=piece))

            await write(response(prompt=self._prompt_info(job)))
            await self._runner.run(job, answer, call, send, tell, entry.submitted)
            await write(response(usage=responses.usage(job, answer.completion_tokens, answer.cached_tokens)))

    def _told(self, method: str, context: Context, label: str = "") -> AbstractContextManager[Entry]:
        return self._requests.entered(f"{NAME}/{method}", context, label)

    def _prompt_info(self, job: Job) -> inference_pb2.PromptInfo:
        info = responses.prompt_info(job)
        if job.options.echo:
            sizes.check_answer(info, self._limits, "leave out echo, or raise --max-message-bytes")
        return info

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
            tool_call_format=self._model.tool_calls.name if self._model.tool_calls else "",
            reasoning_format=self._model.reasoning.name if self._model.reasoning else "",
            features=[*sorted(facts.features & SERVED_FEATURES), *self._model.features],
        )

    def _vocab_size(self) -> int:
        """Of what Detokenize reads: the engine's may be padded past the tokenizer's, and its ids can be sampled."""
        facts = self._engine.facts
        return max(self._model.tokenizer.vocab_size, facts.vocab_size if facts else 0)
