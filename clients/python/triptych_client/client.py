"""The client of triptych.inference.v1.InferenceService."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from triptych_client import messages as _messages
from triptych_client import requests as _requests
from triptych_client import results
from triptych_client.course import Course, Response
from triptych_client.errors import REQUEST_ID_KEY, cancelled, from_rpc, text_of
from triptych_client.messages import MessageLike
from triptych_client.options import OptionArgs
from triptych_client.results import Completion, Model
from triptych_client.retry import Attempts, Retry
from triptych_client.stream import Stream
from triptych_client.tools import ToolChoiceLike, ToolLike

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_RETRY = Retry()


class Client:
    """One channel to a frontend, opened by the first call and closed by `close` or `async with`.

    `model` is asked for in each call (empty: the one served there). `timeout_s` is the deadline of calls that name none
    of their own (None: none). `tenant` is the label that fair shares count by and cached blocks are kept apart by (128
    bytes of printable ASCII). `token` is a bearer token, sent with each call; whoever is between reads it unless the
    channel is encrypted. `metadata` goes with each call: W3C trace context, other credentials. Without `credentials`
    (`tls_credentials` makes some of files) the channel is plain text. `server_name` is the name that the server's
    certificate must have, where it is not that of the address. `retry` says how calls that break are tried again;
    None: not.

    `address` is a gRPC target: HOST:PORT, or several frontends as "ipv4:10.0.0.1:50051,10.0.0.2:50051", of which the
    next is taken when one is gone. Calls to a name that stands for several addresses ("dns:///frontends:50051", a
    headless Service of Kubernetes) are spread over all of them; it is looked up again when a connection ends.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "",
        timeout_s: float | None = None,
        tenant: str = "",
        token: str = "",
        metadata: Sequence[tuple[str, str | bytes]] = (),
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        retry: Retry | None = DEFAULT_RETRY,
    ) -> None:
        self.address = address
        self._model = model
        self._timeout_s = timeout_s
        self._metadata = (*metadata, *_requests.metadata(tenant), *_requests.authorization(token))
        self._credentials = credentials
        self._options = channel_options(address, max_message_bytes, server_name=server_name)
        self._retry = retry
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
        return Stream(self._start("Generate"), Course(request, self._attempts(timeout_s)))

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
        call, response = await self._answer("GenerateUnary", request, timeout_s)
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
        return Stream(self._start("Chat"), Course(request, self._attempts(timeout_s)))

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
        request = inference_pb2.ChatUnaryRequest(request=inner)
        call, response = await self._answer("ChatUnary", request, timeout_s)
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
        _, response = await self._answer("Tokenize", request, timeout_s)
        return tuple(response.token_ids)

    async def detokenize(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        """Text of ids."""
        request = inference_pb2.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        _, response = await self._answer("Detokenize", request, timeout_s)
        return str(response.text)

    async def get_model(self, model: str = "", *, timeout_s: float | None = None) -> Model:
        """Facts and defaults of a model, by default this client's."""
        request = inference_pb2.GetModelRequest(model=model or self._model)
        _, response = await self._answer("GetModel", request, timeout_s)
        return results.model(response.model)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """All models served there."""
        request = inference_pb2.ListModelsRequest()
        _, response = await self._answer("ListModels", request, timeout_s)
        return tuple(results.model(model) for model in response.models)

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        # Opened late, because grpc.aio binds a channel to the event loop that runs when it is made.
        if self._channel is None:
            self._channel = _open(self.address, self._credentials, self._options)
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    def _start(self, method: str) -> Callable[[Any, float | None], Any]:
        """Calls of a method, on the channel that is open now."""
        return functools.partial(_begin, getattr(self._stub, method), self._metadata)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)

    async def _answer(self, method: str, request: Any, timeout_s: float | None) -> tuple[Any, Any]:
        """The call that was answered, and its answer. Raises TriptychError."""
        start, attempts = self._start(method), self._attempts(timeout_s)
        while True:
            try:
                call = start(request, attempts.left_s)
                return call, await call
            except grpc.aio.AioRpcError as error:
                wait_s = attempts.wait_s(from_rpc(error))
            except grpc.aio.UsageError:  # the client was closed meanwhile
                raise cancelled() from None
            await asyncio.sleep(wait_s)


def _begin(method: Any, metadata: Any, request: Any, timeout_s: float | None) -> Any:
    return method(request, timeout=timeout_s, metadata=metadata)


_SPREAD = '{"loadBalancingConfig":[{"round_robin":{}}]}'


def tls_credentials(
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> grpc.ChannelCredentials:
    """Of PEM files: the CAs that the server's certificate may be of (None: those that gRPC brings), and, where the
    server asks for one, a certificate of one's own with its key. Raises OSError, and ValueError for one without the
    other."""
    if (cert is None) != (key is None):
        raise ValueError("a certificate and its key go together; give both, or neither")
    read = [Path(path).read_bytes() if path is not None else None for path in (ca, key, cert)]
    return grpc.ssl_channel_credentials(*read)


def channel_options(
    address: str, max_message_bytes: int = MAX_MESSAGE_BYTES, *, server_name: str = ""
) -> list[tuple[str, int | str]]:
    """Options of a channel to that target. A list of addresses is in the caller's order, so its first one is taken;
    the addresses of a name have none, so calls are spread over them."""
    listed = address.startswith(("ipv4:", "ipv6:", "unix:", "unix-abstract:"))
    balance: list[tuple[str, int | str]] = [] if listed else [("grpc.service_config", _SPREAD)]
    named: list[tuple[str, int | str]] = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return [
        *balance,
        *named,
        # Names are looked up when a connection ends. gRPC's least time between two look-ups, 30 s, is longer than the
        # tries of a call last, and a frontend that came back elsewhere would not be found by them.
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def _open(
    address: str, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, int | str]]
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


async def _completion(call: grpc.aio.UnaryUnaryCall[Any, Any], response: Response) -> Completion:
    return results.completion(text_of(await call.initial_metadata(), REQUEST_ID_KEY) or "", response)
