"""The same client for programs that block: threads, scripts, notebooks."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from triptych_client import messages as _messages
from triptych_client import requests as _requests
from triptych_client import results
from triptych_client.client import DEFAULT_ADDRESS, DEFAULT_RETRY, MAX_MESSAGE_BYTES, channel_options
from triptych_client.course import Course, Request, Response
from triptych_client.errors import REQUEST_ID_KEY, TriptychError, cancelled, from_rpc, text_of
from triptych_client.messages import MessageLike
from triptych_client.options import OptionArgs
from triptych_client.results import Completion, Delta, Model, PositionLogprobs, PromptInfo, Usage
from triptych_client.retry import Attempts, Retry
from triptych_client.tools import ToolChoiceLike, ToolLike

Start = Callable[[Request, float | None], Any]
"""Begins a call, within so many seconds."""


class SyncStream:
    """The deltas of one generation, as Stream has them; `for delta in client.chat(...)`."""

    def __init__(self, start: Start, course: Course) -> None:
        self._start = start
        self._course = course
        self._pending: deque[Delta] = deque()
        self._cancelled = False
        self._call = start(course.request(), course.attempts.left_s)

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None and call.is_active():
            call.cancel()

    @property
    def prompt(self) -> PromptInfo | None:
        """Known once the first delta is."""
        return self._course.prompt

    @property
    def prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Known once the first delta is."""
        return self._course.prompt_logprobs

    @property
    def usage(self) -> Usage | None:
        """Known at the end."""
        return self._course.usage

    def request_id(self) -> str:
        """The server's name for the call that runs; waits for it."""
        return text_of(self._call.initial_metadata(), REQUEST_ID_KEY) or ""

    def cancel(self) -> None:
        """Ends it, from any thread; who reads on gets TriptychError(CANCELLED)."""
        self._cancelled = True
        self._call.cancel()

    def collect(self) -> Completion:
        """Reads to the end, and joins the deltas."""
        choices = results.join(self)
        if self.prompt is None or self.usage is None:
            raise TriptychError(grpc.StatusCode.INTERNAL, "", "the stream ended without prompt facts or usage")
        return Completion(self.request_id(), self.prompt, self.prompt_logprobs, choices, self.usage)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._pending:
            try:
                self._pending.extend(self._course.take(next(self._call)))
            except grpc.RpcError as error:
                self._go_on(from_rpc(error))
        return self._pending.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _go_on(self, error: TriptychError) -> None:
        """With another call, after a while. Raises what ends the stream."""
        if self._cancelled:
            raise cancelled()
        time.sleep(self._course.wait_s(error))
        if self._cancelled:
            raise cancelled()
        try:
            self._call = self._start(self._course.request(), self._course.attempts.left_s)
        except ValueError:  # the client was closed meanwhile
            raise cancelled() from None


class SyncClient:
    """Client, with methods that block; one may be shared by threads. Its arguments are Client's."""

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
        self._retry = retry
        options = channel_options(address, max_message_bytes, server_name=server_name)
        self._channel = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        self._stub: inference_pb2_grpc.InferenceServiceStub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
        **options: Unpack[OptionArgs],
    ) -> SyncStream:
        """Continues a text or token ids, streamed."""
        request = _requests.generate(self._model, prompt, add_special_tokens, options)
        return SyncStream(self._start("Generate"), Course(request, self._attempts(timeout_s)))

    def generate_unary(
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
        call, response = self._answer("GenerateUnary", request, timeout_s)
        return _completion(call, response.response)

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
    ) -> SyncStream:
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
        return SyncStream(self._start("Chat"), Course(request, self._attempts(timeout_s)))

    def chat_unary(
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
        call, response = self._answer("ChatUnary", request, timeout_s)
        return _completion(call, response.response)

    def tokenize(
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
        _, response = self._answer("Tokenize", request, timeout_s)
        return tuple(response.token_ids)

    def detokenize(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        """Text of ids."""
        request = inference_pb2.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        _, response = self._answer("Detokenize", request, timeout_s)
        return str(response.text)

    def get_model(self, model: str = "", *, timeout_s: float | None = None) -> Model:
        """Facts and defaults of a model, by default this client's."""
        request = inference_pb2.GetModelRequest(model=model or self._model)
        _, response = self._answer("GetModel", request, timeout_s)
        return results.model(response.model)

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """All models served there."""
        request = inference_pb2.ListModelsRequest()
        _, response = self._answer("ListModels", request, timeout_s)
        return tuple(results.model(model) for model in response.models)

    def _start(self, method: str) -> Callable[[Any, float | None], Any]:
        return functools.partial(_begin, getattr(self._stub, method), self._metadata)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)

    def _answer(self, method: str, request: Any, timeout_s: float | None) -> tuple[Any, Any]:
        """The call that was answered, and its answer. Raises TriptychError."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                response, call = getattr(self._stub, method).with_call(
                    request, timeout=attempts.left_s, metadata=self._metadata
                )
                return call, response
            except grpc.RpcError as error:
                wait_s = attempts.wait_s(from_rpc(error))
            except ValueError:  # the client was closed meanwhile
                raise cancelled() from None
            time.sleep(wait_s)


def _begin(method: Any, metadata: Any, request: Any, timeout_s: float | None) -> Any:
    return method(request, timeout=timeout_s, metadata=metadata)


def _completion(call: Any, response: Response) -> Completion:
    return results.completion(text_of(call.initial_metadata(), REQUEST_ID_KEY) or "", response)
