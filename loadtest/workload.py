"""What is asked and when, all of it drawn before the first call from one seed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MAX_REQUESTS = 100_000
"""Of one run: each may be in flight at once when the server answers none."""

_NUMBER = r"(\d+(?:\.\d+)?)"
_RANGE = r"(\d+)-(\d+)"


class WorkloadError(ValueError):
    """A workload that cannot be made; the message says why, in one line."""


@dataclass(frozen=True)
class Planned:
    """One request; it is due `at_s` seconds after the start, whatever became of those before it."""

    at_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Plan:
    """Requests by due time. Arrivals are counted from `warmup_s` (before: sent, not counted) to `end_s`."""

    requests: tuple[Planned, ...]
    warmup_s: float
    end_s: float

    @property
    def window_s(self) -> float:
        """The time in which measured requests arrive."""
        return self.end_s - self.warmup_s


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts; `draw(rng, n)` gives an array [n] int64, each 1 or more."""

    text: str
    draw: Callable[[np.random.Generator, int], np.ndarray]
    largest: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Reads `64`, `50-550` (uniform, both ends), `normal:MEAN,SD,LOW-HIGH`, `lognormal:MEDIAN,SIGMA,LOW-HIGH`.

        The last two are clipped to their range. Raises WorkloadError for anything else.
        """
        if found := re.fullmatch(r"\d+", text):
            value = int(text)
            return cls(text, lambda rng, n: np.full(n, value), _bounds(text, value, value)[1])
        if found := re.fullmatch(_RANGE, text):
            low, high = _bounds(text, int(found[1]), int(found[2]))
            return cls(text, lambda rng, n: rng.integers(low, high, n, endpoint=True), high)
        if found := re.fullmatch(rf"(normal|lognormal):{_NUMBER},{_NUMBER},{_RANGE}", text):
            low, high = _bounds(text, int(found[4]), int(found[5]))
            shape = _shape(text, found[1], float(found[2]), float(found[3]))
            return cls(text, lambda rng, n: np.clip(np.rint(shape(rng, n)), low, high).astype(np.int64), high)
        raise WorkloadError(
            f"{text!r} is no length; give 64, 50-550, normal:MEAN,SD,LOW-HIGH or lognormal:MEDIAN,SIGMA,LOW-HIGH"
        )


def _bounds(text: str, low: int, high: int) -> tuple[int, int]:
    if not 1 <= low <= high:
        raise WorkloadError(f"length {text!r}: lengths are 1 or more, and the low end is not above the high one")
    return low, high


def _shape(text: str, name: str, centre: float, width: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    if name == "normal":
        return lambda rng, n: rng.normal(centre, width, n)
    if centre <= 0:
        raise WorkloadError(f"length {text!r}: the median of a lognormal is above 0")
    return lambda rng, n: rng.lognormal(np.log(centre), width, n)


def poisson(
    *,
    rate_per_s: float,
    prompt: Lengths,
    output: Lengths,
    vocab_size: int,
    seed: int,
    max_requests: int,
    duration_s: float,
    warmup_s: float,
) -> Plan:
    """Arrivals of a Poisson process: independent, exponentially distributed gaps with mean 1 / rate.

    Ends with `duration_s`, or at the arrival of the last of `max_requests`. Raises WorkloadError where nothing would be
    measured or a bound is missing.
    """
    _check(rate_per_s, max_requests, duration_s, warmup_s)
    # A stream of its own for each kind of draw, so that another length distribution leaves the arrivals as they are.
    gaps, prompts, outputs, ids = np.random.default_rng(seed).spawn(4)
    at_s = np.cumsum(gaps.exponential(1 / rate_per_s, max_requests))
    at_s = at_s[at_s < duration_s]
    whole = len(at_s) == max_requests
    end_s = float(at_s[-1]) if whole else duration_s
    if not len(at_s) or at_s[-1] < warmup_s:
        raise WorkloadError(
            f"no request arrives after the warm-up of {warmup_s:g} s; lengthen --duration, --requests or --rate"
        )
    requests = _requests(at_s, prompt.draw(prompts, len(at_s)), output.draw(outputs, len(at_s)), vocab_size, ids)
    return Plan(requests, warmup_s, end_s)


def burst(*, streams: int, prompt: Lengths, output: Lengths, vocab_size: int, seed: int) -> Plan:
    """All at once, nothing to warm up."""
    prompts, outputs, ids = np.random.default_rng(seed).spawn(3)
    lengths = prompt.draw(prompts, streams), output.draw(outputs, streams)
    return Plan(_requests(np.zeros(streams), *lengths, vocab_size, ids), 0.0, 0.0)


def _check(rate_per_s: float, max_requests: int, duration_s: float, warmup_s: float) -> None:
    if not 0 < rate_per_s < float("inf"):
        raise WorkloadError(f"rate {rate_per_s} requests/s is not above 0 and finite")
    if not 1 <= max_requests <= MAX_REQUESTS:
        raise WorkloadError(f"{max_requests} requests are not in [1, {MAX_REQUESTS}]")
    if not 0 < duration_s < float("inf"):
        raise WorkloadError(f"a duration of {duration_s} s is not above 0 and finite")
    if not 0 <= warmup_s < duration_s:
        raise WorkloadError(f"a warm-up of {warmup_s} s is not in [0, {duration_s}), the duration")


def _requests(
    at_s: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, vocab_size: int, rng: np.random.Generator
) -> tuple[Planned, ...]:
    # Random ids share no prefix, so no cache helps; the lowest ids are special ones in most vocabularies.
    first = min(64, vocab_size // 2)
    return tuple(
        Planned(float(at), tuple(rng.integers(first, vocab_size, int(prompt)).tolist()), int(output))
        for at, prompt, output in zip(at_s, prompts, outputs, strict=True)
    )
