"""The client of triptych.inference.v1.InferenceService."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from triptych_client import messages as _messages
from triptych_client import requests as _requests
from triptych_client import results
from triptych_client.errors import REQUEST_ID_KEY, from_rpc, text_of
from triptych_client.messages import MessageLike
from triptych_client.options import OptionArgs
from triptych_client.results import Completion, Model
from triptych_client.stream import Response, Stream
from triptych_client.tools import ToolChoiceLike, ToolLike

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

T = TypeVar("T")


class Client:
    """One channel to a frontend, opened by the first call and closed by `close` or `async with`.

    `model` is asked for in each call (empty: the one served there). `timeout_s` is the deadline of calls that name none
    of their own (None: none). `tenant` is the label that fair shares count by and cached blocks are kept apart by (128
    bytes of printable ASCII). `metadata` goes with each call: credentials, W3C trace context. Without `credentials` the
    channel is plain text.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "",
        timeout_s: float | None = None,
        tenant: str = "",
        metadata: Sequence[tuple[str, str | bytes]] = (),
        credentials: grpc.ChannelCredentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._model = model
        self._timeout_s = timeout_s
        self._metadata = (*metadata, *_requests.metadata(tenant))
        self._credentials = credentials
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
        **options: Unpack[OptionArgs],
    ) -> Stream:
        """Continues a text or token ids, streamed."""
        request = _requests.generate(self._model, prompt, add_special_tokens, options)
        return Stream(self._stub.Generate(request, **self._call(timeout_s)))

    async def generate_unary(
        self,
        prompt: str | Iterable[int],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
        **options: Unpack[OptionArgs],
    ) -> Completion:
        """The same in one answer."""
        inner = _requests.generate(self._model, prompt, add_special_tokens, options)
        request = inference_pb2.GenerateUnaryRequest(request=inner)
        call = self._stub.GenerateUnary(request, **self._call(timeout_s))
        response = await _answer(call)
        return await _completion(call, response.response)

    def chat(
        self,
        messages: str | Iterable[MessageLike],
        *,
        tools: Iterable[ToolLike] = (),
        tool_choice: ToolChoiceLike | None = None,
        parallel_tool_calls: bool | None = None,
        continue_final_message: bool = False,
        template_args: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[OptionArgs],
    ) -> Stream:
        """Answers a conversation (one string is one user message) by the model's chat template, streamed."""
        request = _requests.chat(
            self._model,
            messages,
            tools,
            tool_choice,
            parallel_tool_calls,
            continue_final_message,
            template_args,
            options,
        )
        return Stream(self._stub.Chat(request, **self._call(timeout_s)))

    async def chat_unary(
        self,
        messages: str | Iterable[MessageLike],
        *,
        tools: Iterable[ToolLike] = (),
        tool_choice: ToolChoiceLike | None = None,
        parallel_tool_calls: bool | None = None,
        continue_final_message: bool = False,
        template_args: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[OptionArgs],
    ) -> Completion:
        """The same in one answer."""
        inner = _requests.chat(
            self._model,
            messages,
            tools,
            tool_choice,
            parallel_tool_calls,
            continue_final_message,
            template_args,
            options,
        )
        call = self._stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=inner), **self._call(timeout_s))
        response = await _answer(call)
        return await _completion(call, response.response)

    async def tokenize(
        self,
        text: str | Iterable[MessageLike],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Ids of a text, or of a conversation as `chat` would send it to the model."""
        request = inference_pb2.TokenizeRequest(model=self._model, add_special_tokens=add_special_tokens)
        if isinstance(text, str):
            request.text = text
        else:
            request.chat.messages.extend(_messages.to_proto(text))
        response = await _answer(self._stub.Tokenize(request, **self._call(timeout_s)))
        return tuple(response.token_ids)

    async def detokenize(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        """Text of ids."""
        request = inference_pb2.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        response = await _answer(self._stub.Detokenize(request, **self._call(timeout_s)))
        return response.text

    async def get_model(self, model: str = "", *, timeout_s: float | None = None) -> Model:
        """Facts and defaults of a model, by default this client's."""
        request = inference_pb2.GetModelRequest(model=model or self._model)
        response = await _answer(self._stub.GetModel(request, **self._call(timeout_s)))
        return results.model(response.model)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """All models served there."""
        request = inference_pb2.ListModelsRequest()
        response = await _answer(self._stub.ListModels(request, **self._call(timeout_s)))
        return tuple(results.model(model) for model in response.models)

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        # Opened late, because grpc.aio binds a channel to the event loop that runs when it is made.
        if self._channel is None:
            self._channel = _open(self.address, self._credentials, self._max_message_bytes)
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    def _call(self, timeout_s: float | None) -> dict[str, Any]:
        return {"timeout": self._timeout_s if timeout_s is None else timeout_s, "metadata": self._metadata}


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a channel to a frontend."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def _open(address: str, credentials: grpc.ChannelCredentials | None, max_message_bytes: int) -> grpc.aio.Channel:
    options = channel_options(max_message_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None


async def _completion(call: grpc.aio.UnaryUnaryCall[Any, Any], response: Response) -> Completion:
    return results.completion(text_of(await call.initial_metadata(), REQUEST_ID_KEY) or "", response)
