"""The engine as an object of a Python program."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast, overload

import grpc
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from triptych_client import requests
from triptych_client.client import channel_options
from triptych_client.errors import TriptychError
from triptych_client.local import batch
from triptych_client.local.process import EngineError, Process
from triptych_client.messages import MessageLike
from triptych_client.options import OptionArgs
from triptych_client.results import Completion

Errors = Literal["raise", "return"]

_DYING_S = 10.0
"""When a call ends with UNAVAILABLE, how long the supervisor may take to see that a service has ended."""


class BatchArgs(OptionArgs, total=False):
    """Options of all calls of a batch, and of the batch: `timeout_s` is each call's deadline (default: none),
    `tenant` is as Client's, `max_in_flight` overrides the engine's, `progress` shows a bar (default: where standard
    error is a terminal)."""

    tenant: str
    timeout_s: float | None
    max_in_flight: int | None
    progress: bool | None


class GenerateArgs(BatchArgs, total=False):
    """Of `generate`."""

    add_special_tokens: bool | None


class ChatArgs(BatchArgs, total=False):
    """Of `chat`, as of `Client.chat`."""

    tools: Iterable[inference_pb2.Tool]
    tool_choice: inference_pb2.ToolChoice | None
    parallel_tool_calls: bool | None
    continue_final_message: bool
    template_args: Mapping[str, Any] | None


class Engine:
    """The three services as child processes, from `with` (or `start`) to its end (or `close`); none outlives this one.

    `model` is a checkpoint folder, a hub's model as ORG/NAME, or the name of a fetched one, None the embedded one.
    `flags` go to `triptych up` ("--revision", "v1", "--scheduler.block-size", "32"). Ports are free ones on loopback.
    Starting raises EngineError with the last lines of the services where a token cannot be made within
    `ready_timeout_s`, fetching the model included. At most `max_in_flight` calls of a batch run at once. Blocking and
    thread-safe: batches of several threads share the engine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        flags: Sequence[str] = (),
        ready_timeout_s: float = 600.0,
        max_in_flight: int = 64,
    ) -> None:
        if isinstance(flags, str):
            raise TypeError(f"flags is a list of words, not one string; give {flags.split()!r}")
        self._arguments = [*flags, *(() if model is None else ("--model", os.fspath(model)))]
        self._ready_timeout_s = ready_timeout_s
        self._max_in_flight = _positive(max_in_flight)
        self._process: Process | None = None
        self._channel: grpc.Channel | None = None
        self._address = self._model = ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> Self:
        """Returns once a token can be made. An engine that is closed may be started again. Raises EngineError."""
        if self._process is not None:
            raise EngineError("the engine has been started already")
        self._process = process = Process(self._arguments)
        weakref.finalize(self, process.close)  # for who forgets `close`: with this object, or with the interpreter
        try:
            self._address, self._model = process.wait_ready(self._ready_timeout_s)
        except BaseException:
            self.close()
            raise
        self._channel = grpc.insecure_channel(self._address, channel_options(self._address))
        return self

    def close(self) -> None:
        """Ends the services; nothing is left. Running batches end with an error."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def address(self) -> str:
        """HOST:PORT of the frontend, for a `Client` while this runs."""
        self._running()
        return self._address

    @property
    def model(self) -> str:
        """Name of the model served."""
        self._running()
        return self._model

    @property
    def pid(self) -> int:
        """Of the supervisor, the parent of the three services."""
        return self._running()[0].pid

    def log_tail(self) -> list[str]:
        """The last lines that the services wrote."""
        return self._running()[0].log_tail()

    @overload
    def generate(
        self,
        prompts: Iterable[str | Iterable[int]],
        *,
        errors: Literal["raise"] = "raise",
        **options: Unpack[GenerateArgs],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompts: Iterable[str | Iterable[int]], *, errors: Literal["return"], **options: Unpack[GenerateArgs]
    ) -> list[Completion | TriptychError]: ...

    def generate(
        self, prompts: Iterable[str | Iterable[int]], *, errors: Errors = "raise", **options: Unpack[GenerateArgs]
    ) -> list[Completion] | list[Completion | TriptychError]:
        """Continues each text or list of ids; the answers come in the order of the prompts.

        A call that fails raises its TriptychError and cancels the others, or, with errors="return", stands in the place
        of its answer. Raises ValueError and TypeError for arguments before anything is sent, EngineError when the
        engine has ended.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is a list of prompts; give [prompt] for one")
        how, rest = _split(options, GenerateArgs)
        special = how.pop("add_special_tokens", None)
        made = [requests.generate("", prompt, special, rest) for prompt in prompts]
        return self._run(
            "GenerateUnary", [inference_pb2.GenerateUnaryRequest(request=one) for one in made], errors, how
        )

    @overload
    def chat(
        self,
        conversations: Iterable[str | Iterable[MessageLike]],
        *,
        errors: Literal["raise"] = "raise",
        **options: Unpack[ChatArgs],
    ) -> list[Completion]: ...

    @overload
    def chat(
        self,
        conversations: Iterable[str | Iterable[MessageLike]],
        *,
        errors: Literal["return"],
        **options: Unpack[ChatArgs],
    ) -> list[Completion | TriptychError]: ...

    def chat(
        self,
        conversations: Iterable[str | Iterable[MessageLike]],
        *,
        errors: Errors = "raise",
        **options: Unpack[ChatArgs],
    ) -> list[Completion] | list[Completion | TriptychError]:
        """Answers each conversation (a string is one user message); otherwise as `generate`."""
        if isinstance(conversations, str):
            raise TypeError("conversations is a list of conversations; give [conversation] for one")
        how, rest = _split(options, ChatArgs)
        tools = tuple(how.pop("tools", ()))
        choice, parallel = how.pop("tool_choice", None), how.pop("parallel_tool_calls", None)
        final, template = how.pop("continue_final_message", False), how.pop("template_args", None)
        unary = inference_pb2.ChatUnaryRequest
        made = [
            unary(request=requests.chat("", one, tools, choice, parallel, final, template, rest))
            for one in conversations
        ]
        return cast("list[Completion]", self._run("ChatUnary", made, errors, how))

    def _run(self, method: str, made: Sequence[Any], errors: Errors, how: dict[str, Any]) -> list[batch.Outcome]:
        """The outcomes of the requests; `how` holds the rest of BatchArgs."""
        if errors not in ("raise", "return"):
            raise ValueError(f"errors is {errors!r}; give 'raise' or 'return'")
        limit = how.get("max_in_flight")
        limit = self._max_in_flight if limit is None else _positive(limit)
        process, channel = self._running()
        call = getattr(inference_pb2_grpc.InferenceServiceStub(channel), method)
        timeout_s, metadata = how.get("timeout_s"), requests.metadata(how.get("tenant", ""))

        def start(index: int) -> Any:
            return call.future(made[index], timeout=timeout_s, metadata=metadata)

        try:
            with batch.progress(len(made), how.get("progress")) as told:
                return batch.run(start, len(made), limit=limit, keep_errors=errors == "return", told=told)
        except TriptychError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE:
                process.check(within_s=_DYING_S)
            raise

    def _running(self) -> tuple[Process, grpc.Channel]:
        if self._process is None or self._channel is None:
            raise EngineError("the engine is not running; use it inside `with Engine(...) as engine:`")
        self._process.check()
        return self._process, self._channel


def _split(options: Mapping[str, Any], kind: type[BatchArgs]) -> tuple[dict[str, Any], OptionArgs]:
    """What is the batch's and the request's own, and what is every generation's."""
    own = frozenset(kind.__annotations__) - frozenset(OptionArgs.__annotations__)
    how = {name: value for name, value in options.items() if name in own}
    return how, cast("OptionArgs", {name: value for name, value in options.items() if name not in own})


def _positive(max_in_flight: int) -> int:
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight is {max_in_flight}; give 1 or more")
    return max_in_flight
