"""The course of one generation over as many calls as it takes: what has come of it, and how it goes on."""

from __future__ import annotations

import copy
from typing import TypeAlias

import grpc
from triptych.inference.v1 import inference_pb2

from triptych_client import results
from triptych_client.errors import TriptychError
from triptych_client.results import Delta, PositionLogprobs, PromptInfo, Usage
from triptych_client.retry import Attempts, is_passing

Request: TypeAlias = inference_pb2.GenerateRequest | inference_pb2.ChatRequest
Response: TypeAlias = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


class Course:
    """Between the calls and whoever reads: a stream that breaks is resumed where it broke.

    Before the first message another attempt is the same request again; after it, one with Options.resume.
    """

    def __init__(self, request: Request, attempts: Attempts) -> None:
        self.attempts = attempts
        self.prompt: PromptInfo | None = None
        self.prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self.usage: Usage | None = None
        self._request = request
        self._received: dict[int, inference_pb2.Resume.Received] = {}
        for before in request.options.resume.choices:  # the caller resumes a stream of its own
            self._received[before.index] = inference_pb2.Resume.Received()
            self._received[before.index].CopyFrom(before)
        self._broken: TriptychError | None = None

    def request(self) -> Request:
        """What the next call asks for."""
        if self.prompt is None:
            return self._request
        again = copy.deepcopy(self._request)
        again.options.resume.Clear()
        again.options.resume.seed = self.prompt.seed
        again.options.resume.fingerprint = self.prompt.fingerprint
        again.options.resume.choices.extend(self._received.values())
        return again

    def take(self, response: Response) -> list[Delta]:
        """The deltas of a message."""
        if response.HasField("prompt"):
            self.prompt = results.prompt_info(response.prompt)
            if not self._received:
                self.prompt_logprobs = ()  # they are told again from the first
        if response.HasField("prompt_logprobs"):
            self.prompt_logprobs += results.positions(response.prompt_logprobs.positions)
        deltas = [results.delta(choice) for choice in response.choices]
        for delta in deltas:
            self._receive(delta)
        if deltas:
            self._broken = None
            self.attempts.progressed()
        if response.HasField("usage"):
            self.usage = results.usage(response.usage)
            deltas.append(Delta(usage=self.usage))
        return deltas

    def wait_s(self, error: TriptychError) -> float:
        """After a call has failed: how long to wait for the next. Raises what ends the course."""
        if error.code is grpc.StatusCode.UNIMPLEMENTED and self._broken is not None:
            raise self._broken from error  # the server does not resume
        if self._received and self._request.options.HasField("best_of"):
            raise error from None  # the likeliest come together at the end; some of them cannot be had again
        wait_s = self.attempts.wait_s(error)
        if is_passing(error) and self._broken is None:
            self._broken = error
        return wait_s

    def _receive(self, delta: Delta) -> None:
        one = self._received.setdefault(delta.index, inference_pb2.Resume.Received(index=delta.index))
        one.token_ids.extend(delta.token_ids)
        one.text_bytes += _text_bytes(delta)
        one.finished |= delta.finish is not None
        if self._request.options.HasField("logprobs"):
            one.cumulative_logprob += sum(entry.token.logprob for entry in delta.logprobs if entry.token)


def _text_bytes(delta: Delta) -> int:
    """Of all that is not sent again: text, reasoning, names and arguments of tools."""
    parts = [delta.text, delta.reasoning, *(part for call in delta.tool_calls for part in (call.name, call.arguments))]
    return sum(len(part.encode()) for part in parts)
