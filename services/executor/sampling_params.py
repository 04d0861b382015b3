"""How one request's ids are drawn, taken from its NewRequest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from triptych.executor.v1 import executor_pb2

from services.common import sampling

GREEDY_BELOW = 1e-3
"""A temperature below this means the likeliest id."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's, resolved: nothing unset. Ranges are those of generation.proto's Sampling."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """uint64, the choice's own"""
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    """not drawn before output position `min_tokens`"""
    logprobs: int | None = None
    """report the drawn id's own log-probability and rank, and those of as many alternatives"""
    allowed_ids: tuple[int, ...] = ()
    """only these may be drawn; empty: all"""
    banned_ids: tuple[int, ...] = ()

    @classmethod
    def from_proto(cls, request: executor_pb2.NewRequest) -> SamplingParams:
        """What the request says; a field that the frontend left unset is off (temperature 1)."""
        wanted = request.sampling
        given = {field.name: value for field, value in wanted.ListFields() if field.name in sampling.RANGES}
        return cls(
            **given,
            logit_bias=tuple(sorted(wanted.logit_bias.items())),
            seed=request.seed,
            min_tokens=request.min_tokens,
            stop_ids=tuple(np.frombuffer(request.stop_ids, dtype="<u4").tolist()),
            logprobs=request.logprobs if request.HasField("logprobs") else None,
            allowed_ids=tuple(wanted.allowed_token_ids),
            banned_ids=tuple(wanted.banned_token_ids),
        )

    def check(self, vocab_size: int) -> None:
        """Raises ValueError naming the first field that is out of its range, or that no id is left by."""
        values = {name: getattr(self, name) for name in sampling.RANGES}
        fault = sampling.fault(values, self.logit_bias, vocab_size) or sampling.choice_fault(
            self.allowed_ids, self.banned_ids, self.logit_bias, vocab_size
        )
        if fault is not None:
            raise ValueError(" ".join(fault))
        for token in self.stop_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop_ids holds id {token}, the vocabulary has {vocab_size}")

    @property
    def is_greedy(self) -> bool:
        """The likeliest id is taken, without noise."""
        return self.temperature < GREEDY_BELOW
