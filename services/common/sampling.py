"""The ranges of Sampling's fields: one rule for the frontend, which tells the client, and for those behind it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """[low, high], or (low, high] where `open_low`; NaN lies in none."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


RANGES = {
    "temperature": Range(0, 100),
    "top_k": Range(-1, math.inf),
    "top_p": Range(0, 1, open_low=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, open_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
LOGIT_BIAS = Range(-100, 100)
"""Or -inf."""


def fault(
    values: Mapping[str, float], logit_bias: Iterable[tuple[int, float]], vocab_size: int
) -> tuple[str, str] | None:
    """(field, what is wrong with it) of the first value out of its range; None where all are in it.

    `values` holds fields of RANGES by name, those that are set.
    """
    for name, value in values.items():
        if value not in RANGES[name]:
            if name == "top_k":
                return name, f"is {value}; -1 and 0 turn it off, else it is 1 or more"
            return name, f"is {value:g}, not in {RANGES[name]}"
    for token_id, bias in logit_bias:
        field = f"logit_bias[{token_id}]"
        if not 0 <= token_id < vocab_size:
            return field, f"ids lie below the vocabulary size, {vocab_size}"
        if bias not in LOGIT_BIAS and bias != -math.inf:
            return field, f"is {bias:g}, not in {LOGIT_BIAS} or -inf"
    return None


def choice_fault(
    allowed: Sequence[int],
    banned: Sequence[int],
    logit_bias: Iterable[tuple[int, float]],
    vocab_size: int,
    *,
    stop_ids: Collection[int] = (),
) -> tuple[str, str] | None:
    """(field, what is wrong with it) of allowed_token_ids and banned_token_ids; None where an id can be drawn.

    `stop_ids` are those that min_tokens keeps from being drawn, empty without it.
    """
    for name, ids in (("allowed_token_ids", allowed), ("banned_token_ids", banned)):
        if (fault := _list_fault(name, ids, vocab_size)) is not None:
            return fault
    out = {*banned, *(token_id for token_id, bias in logit_bias if bias == -math.inf)}
    if allowed:
        left, drawable = len(set(allowed) - out), len(set(allowed) - out - set(stop_ids))
    else:
        left, drawable = vocab_size - len(out), vocab_size - len(out.union(stop_ids))
    if drawable:
        return None
    field = "allowed_token_ids" if allowed else "banned_token_ids" if banned else "logit_bias"
    if left:
        return field, "leaves stop ids alone, which min_tokens keeps from being drawn; allow another id or lower it"
    return field, "leaves no id to draw beside banned_token_ids and a logit_bias of -inf; leave one more"


def _list_fault(field: str, ids: Sequence[int], vocab_size: int) -> tuple[str, str] | None:
    if not ids:
        return None
    if max(ids) >= vocab_size or min(ids) < 0:
        place = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        return f"{field}[{place}]", f"is {ids[place]}; ids lie below the vocabulary size, {vocab_size}"
    if len(set(ids)) < len(ids):
        firsts = {token_id: i for i, token_id in reversed(list(enumerate(ids)))}
        place = next(i for i, token_id in enumerate(ids) if firsts[token_id] < i)
        return f"{field}[{place}]", f"is {ids[place]} once more; name each id once"
    return None


def logprob_bytes(alternatives: int) -> int:
    """What the logprobs of an id take in LogprobColumns."""
    return 8 + (4 + 8 * alternatives if alternatives else 0)
