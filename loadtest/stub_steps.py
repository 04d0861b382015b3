"""The stub engine's requests and the StepOutputs it makes of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2

from loadtest import stub_logprobs
from loadtest.stub_logprobs import alternatives


def prompt_score(position: int) -> tuple[float, int]:
    """Logprob, exact in float32, and rank made up for a prompt position."""
    return -position / 16, position % 9 + 1


@dataclass
class StubRequest:
    """A choice of a request, under way."""

    submit: engine_pb2.Submit
    prompt: tuple[int, ...]
    stop_ids: frozenset[int]
    arrived_unix_ns: int
    choice: int = 0
    cached_tokens: int = 0
    num_output: int = 0
    started: bool = False
    next_scored: int = 1

    @classmethod
    def of(cls, submit: engine_pb2.Submit, choice: int, cached_tokens: int, num_output: int = 0) -> StubRequest:
        """A choice that arrives now, with so many ids of its output already."""
        return cls(
            submit,
            prompt=tuple(np.frombuffer(submit.prompt_ids, "<u4").tolist()),
            stop_ids=frozenset(np.frombuffer(submit.stop_ids, "<u4").tolist()),
            arrived_unix_ns=time.time_ns(),
            choice=choice,
            cached_tokens=cached_tokens,
            num_output=num_output,
        )

    @property
    def scores_left(self) -> int:
        """Prompt positions whose logprobs are still to be told, by the first choice."""
        wanted = self.submit.HasField("prompt_logprobs") and self.choice == 0
        return len(self.prompt) - self.next_scored if wanted else 0

    @property
    def request_id(self) -> int:
        """In messages: choice i of a request has its id + i."""
        return self.submit.request_id + self.choice


@dataclass
class StubStep:
    """One StepOutputs in the making.

    A made-up logprob is -(position + 1) / 8, rank position + 1; that of a prompt id is `prompt_score` of its position.
    Alternatives to either are `alternatives` of the position.
    """

    number: int
    request_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: list[engine_pb2.PromptLogprobs] = field(default_factory=list)
    started: list[engine_pb2.Started] = field(default_factory=list)
    finished: list[engine_pb2.Finished] = field(default_factory=list)
    failed: list[engine_pb2.Failed] = field(default_factory=list)

    @property
    def anything(self) -> bool:
        """Whether there is something to send."""
        return bool(self.request_ids or self.scores or self.finished or self.failed)

    def score(self, request: StubRequest, limit: int) -> None:
        """The next prompt positions, at most `limit`."""
        start = request.next_scored
        request.next_scored = stop = start + min(limit, request.scores_left)
        told = [prompt_score(position) for position in range(start, stop)]
        count = request.submit.prompt_logprobs
        columns = stub_logprobs.columns(told, [alternatives(position, count) for position in range(start, stop)])
        self.scores.append(engine_pb2.PromptLogprobs(request_id=request.request_id, start=start, logprobs=columns))

    def add(self, request: StubRequest, ids: list[int]) -> None:
        """New ids, counted in the request already."""
        if request.submit.HasField("logprobs"):
            self.places += range(len(self.token_ids), len(self.token_ids) + len(ids))
            positions = range(request.num_output - len(ids), request.num_output)
            self.positions += positions
            self.tops += [alternatives(position, request.submit.logprobs) for position in positions]
        self.request_ids.append(request.request_id)
        self.counts.append(len(ids))
        self.token_ids += ids
        if not request.started:
            request.started = True
            now = time.time_ns()
            self.started.append(
                engine_pb2.Started(
                    request_id=request.request_id,
                    cached_tokens=request.cached_tokens,
                    queued_unix_ns=request.arrived_unix_ns,
                    scheduled_unix_ns=now,
                    first_token_unix_ns=now,
                )
            )

    def message(self) -> engine_pb2.StepOutputs:
        one_each = all(count == 1 for count in self.counts)
        return engine_pb2.StepOutputs(
            step=self.number,
            request_ids=np.array(self.request_ids, "<u8").tobytes(),
            token_counts=b"" if one_each else np.array(self.counts, "<u4").tobytes(),
            token_ids=np.array(self.token_ids, "<u4").tobytes(),
            logprobs=self._logprobs(),
            prompt_logprobs=self.scores,
            started=self.started,
            finished=self.finished,
            failed=self.failed,
        )

    def _logprobs(self) -> generation_pb2.LogprobColumns | None:
        if not self.places:
            return None
        every = len(self.places) == len(self.token_ids)
        columns = stub_logprobs.columns([(-(at + 1) / 8, at + 1) for at in self.positions], self.tops)
        columns.places = b"" if every else np.array(self.places, "<u4").tobytes()
        return columns
