"""Log-probabilities as both stubs make them up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from triptych.inference.v1 import generation_pb2


def alternatives(number: int, count: int) -> list[tuple[int, float]]:
    """(id, logprob) of made-up alternatives by any number, likeliest first; exact in float32, ids below 5 + 3 count."""
    return [(number % 5 + 3 * i, -(number % 3) - (i + 1) / 16) for i in range(count)]


def columns(own: Sequence[tuple[float, int]], tops: Sequence[list[tuple[int, float]]]) -> generation_pb2.LogprobColumns:
    """Of (logprob, rank) and the alternatives of each."""
    flat = [one for top in tops for one in top]
    return generation_pb2.LogprobColumns(
        logprobs=np.array([logprob for logprob, _ in own], "<f4").tobytes(),
        ranks=np.array([rank for _, rank in own], "<u4").tobytes(),
        top_counts=np.array([len(top) for top in tops], "<u4").tobytes() if flat else b"",
        top_ids=np.array([token_id for token_id, _ in flat], "<u4").tobytes(),
        top_logprobs=np.array([logprob for _, logprob in flat], "<f4").tobytes(),
    )
