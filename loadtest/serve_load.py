"""The load that serving engines are compared under: 16 streams at once, then one alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest import open_loop, workload
from loadtest.summary import Summary, summarize

STREAMS = 16
PROMPT_TOKENS = workload.Lengths.parse("50-550")
SINGLE_PROMPT_TOKENS = workload.Lengths.parse("300")
"""The mean of PROMPT_TOKENS."""
OUTPUT_TOKENS = workload.Lengths.parse("64")
TIMEOUT_S = 300.0


class LoadError(Exception):
    """A load in which a request failed, so that its numbers mean nothing."""


@dataclass(frozen=True)
class Repetition:
    """One pass over the load."""

    many: Summary
    single: Summary

    @property
    def single_tokens_per_s(self) -> float:
        """Output ids over the whole time of the one stream, its prefill included."""
        return self.single.out_tokens_per_s


@dataclass
class Measured:
    """The repetitions of one system."""

    name: str
    repetitions: list[Repetition] = field(default_factory=list)


async def repeat(ask: open_loop.Ask, measured: Measured, *, vocab_size: int, times: int, seed: int) -> None:
    """Appends `times` repetitions, each with prompts of its own, equal for every system. Raises LoadError."""
    warm_up = workload.burst(
        streams=2,
        prompt=workload.Lengths.parse("64"),
        output=workload.Lengths.parse("4"),
        vocab_size=vocab_size,
        seed=0,
    )
    await _run(warm_up, ask, measured.name)
    for repetition in range(times):
        many = workload.burst(
            streams=STREAMS,
            prompt=PROMPT_TOKENS,
            output=OUTPUT_TOKENS,
            vocab_size=vocab_size,
            seed=seed + repetition,
        )
        single = workload.burst(
            streams=1, prompt=SINGLE_PROMPT_TOKENS, output=OUTPUT_TOKENS, vocab_size=vocab_size, seed=seed + repetition
        )
        measured.repetitions.append(
            Repetition(await _run(many, ask, measured.name), await _run(single, ask, measured.name))
        )


async def _run(plan: workload.Plan, ask: open_loop.Ask, name: str) -> Summary:
    outcomes = await open_loop.run(plan, ask, timeout_s=TIMEOUT_S)
    for outcome in outcomes:
        if outcome.failure is not None:
            raise LoadError(f"{name}: a request of {outcome.prompt_tokens} prompt tokens failed: {outcome.message}")
    return summarize(plan, outcomes)
