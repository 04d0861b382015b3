"""What the frontend says to an engine and hears from it, as own types; protobuf stays in engine_wire."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.common.errors import RequestError
from services.common.grammar import Grammar
from services.frontend.request import Logprob, Sampling


@dataclass(frozen=True)
class BlockDigests:
    """Of a prompt: `root` [32 bytes], and `blocks` [prompt // block_tokens] of 32 bytes, chained to it."""

    root: bytes
    blocks: bytes


@dataclass(frozen=True)
class Submission:
    """A request as an engine takes it. `timeout_ms` is what is left of the client's deadline, None without one."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    logprobs: int | None
    arrived_unix_ns: int
    timeout_ms: int | None
    num_choices: int = 1
    priority: int = 0
    tenant: str = ""
    digests: BlockDigests | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    traceparent: str = ""
    tracestate: str = ""
    clock_offset_ns: int | None = None
    """What the engine's clock is ahead of ours; None where nothing is traced."""
    resumed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(choice, its ids so far): those that are run; empty: all, from their start."""

    @property
    def choices(self) -> tuple[int, ...]:
        """Those that are run."""
        return tuple(choice for choice, _ in self.resumed) or tuple(range(self.num_choices))


@dataclass(frozen=True)
class EngineFinish:
    """The engine's last word on a choice: `reason` "stop" or "length"; `stop_id` is the id that stopped it, if any."""

    reason: str
    stop_id: int | None
    last_token_unix_ns: int = 0
    """By the engine's clock."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Logprobs (natural, float32 [n]) and ranks (from 1, uint32 [n]) of prompt ids, from position `start` on.

    And the likeliest ids of each position, likeliest first: uint32 and float32 [n, k].
    """

    start: int
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def plain(cls, start: int, logprobs: npt.NDArray[np.float32], ranks: npt.NDArray[np.uint32]) -> Scores:
        """Without alternatives."""
        none = np.zeros((len(logprobs), 0))
        return cls(start, logprobs, ranks, none.astype(np.uint32), none.astype(np.float32))

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + len(self.logprobs)


class Outputs(NamedTuple):
    """What is new of one choice; `logprobs` is as long as `token_ids`, or empty where none were asked for.

    `scores` are of the prompt, and come before the first id. One a token, and so a tuple: see Delta.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    cached_tokens: int | None = None
    finish: EngineFinish | None = None
    scores: tuple[Scores, ...] = ()

    def then(self, later: Outputs) -> Outputs:
        """Both, in order, as one."""
        return Outputs.joined((self, later))

    @classmethod
    def joined(cls, parts: Sequence[Outputs]) -> Outputs:
        """One or more, in order, as one."""
        if len(parts) == 1:
            return parts[0]
        cached = [part.cached_tokens for part in parts if part.cached_tokens is not None]
        return cls(
            tuple(itertools.chain.from_iterable(part.token_ids for part in parts)),
            tuple(itertools.chain.from_iterable(part.logprobs for part in parts)),
            cached[-1] if cached else None,
            next((part.finish for part in reversed(parts) if part.finish is not None), None),
            tuple(itertools.chain.from_iterable(part.scores for part in parts)),
        )


@dataclass(frozen=True)
class StepReport:
    """One StepOutputs: what is new by choice (request id + index), and the requests that failed."""

    outputs: dict[int, Outputs] = field(default_factory=dict)
    failures: dict[int, RequestError] = field(default_factory=dict)
