"""A sampler written out: one row, Python floats, plain loops, straight from the comments of generation.proto."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.executor.sampling_params import SamplingParams


@dataclass(frozen=True)
class Reference:
    """What is left to draw from."""

    scores: list[float]
    """after bans, bias and penalties"""
    probabilities: list[float]
    """after temperature and filters; their sum is not 1 where ids were cut off"""
    slack: float
    """how far the nearest filter was from keeping one id more or less, as a share of probability"""


def reference(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    mask: Sequence[int] | None = None,
) -> Reference:
    """The distribution of the id at output position len(output); `mask` holds the ids that it allows."""
    scores = adjusted(logits, params, prompt, output, mask)
    if params.temperature < 1e-3 or max(scores) == -math.inf:
        return Reference(scores, [], math.inf)
    scaled = [score / params.temperature for score in scores]
    probabilities = softmax(scaled)
    order = sorted(range(len(logits)), key=lambda i: (-scores[i], i))
    slack = math.inf
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    if params.top_p < 1:
        left = sum(probabilities[i] for i in order)
        total, kept = 0.0, []
        for i in order:
            kept.append(i)
            total += probabilities[i] / left
            slack = min(slack, abs(total - params.top_p))
            if total >= params.top_p:
                break
        order = kept
    if params.min_p > 0:
        shares = [probabilities[i] / probabilities[order[0]] for i in order]
        slack = min(slack, *(abs(share - params.min_p) for share in shares))
        order = [i for i, share in zip(order, shares, strict=True) if share >= params.min_p] or order[:1]
    kept_ids = set(order)
    return Reference(scores, [p if i in kept_ids else 0.0 for i, p in enumerate(probabilities)], slack)


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    mask: Sequence[int] | None = None,
) -> list[float]:
    scores = [float(logit) for logit in logits]
    for i in range(len(scores)):
        if mask is not None and i not in mask:
            scores[i] = -math.inf
        if params.allowed_ids and i not in params.allowed_ids:
            scores[i] = -math.inf
        if i in params.banned_ids:
            scores[i] = -math.inf
    if len(output) < params.min_tokens:
        for i in params.stop_ids:
            scores[i] = -math.inf
    for i, bias in params.logit_bias:
        scores[i] += bias
    for i in {*prompt, *output}:
        scores[i] = scores[i] / params.repetition_penalty if scores[i] > 0 else scores[i] * params.repetition_penalty
    for i in set(output):
        scores[i] -= params.presence_penalty
        scores[i] -= params.frequency_penalty * list(output).count(i)
    return scores


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def draw(probabilities: Sequence[float], uniform: float) -> tuple[int, float]:
    """The id whose piece of the summed probabilities holds `uniform`, and how far the nearest border is."""
    total = math.fsum(probabilities)
    target, below = uniform * total, 0.0
    for i, probability in enumerate(probabilities):
        if below <= target < below + probability:
            return i, min(target - below, below + probability - target) / total
        below += probability
    last = max(i for i, probability in enumerate(probabilities) if probability > 0)
    return last, 0.0


def alternatives(logits: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest ids by the logits as they are, with their natural log-probabilities."""
    top = max(logits)
    log_sum = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    return [(i, max(logits[i] - log_sum, -9999.0)) for i in order[:count]]


def likeliest(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda i: (scores[i], -i))
