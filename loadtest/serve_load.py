"""The load that serving engines are compared under: 16 streams at once, then one alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from loadtest import open_loop, workload
from loadtest.summary import Summary, summarize

STREAMS = 16
PROMPT_TOKENS = workload.Lengths.parse("50-550")
SINGLE_PROMPT_TOKENS = workload.Lengths.parse("300")
"""The mean of PROMPT_TOKENS."""
OUTPUT_TOKENS = workload.Lengths.parse("64")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Lengths:
    """Of prompts and outputs, in tokens."""

    prompts: workload.Lengths
    single_prompt: workload.Lengths
    outputs: workload.Lengths


WHOLE = Lengths(PROMPT_TOKENS, SINGLE_PROMPT_TOKENS, OUTPUT_TOKENS)
HALF = Lengths(*map(workload.Lengths.parse, ("25-275", "150", "32")))
"""The same shape in half the tokens, where there is no time for a slow system's whole."""


Run = Callable[[workload.Plan], Awaitable[list[open_loop.Outcome]]]
"""Has a burst served, by whatever serves it."""


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

    @property
    def single_decode_tokens_per_s(self) -> float:
        """Of the one stream after its first id."""
        return len(self.single.itl_s) / sum(self.single.itl_s)


@dataclass
class Measured:
    """The repetitions of one system."""

    name: str
    repetitions: list[Repetition] = field(default_factory=list)


def over(ask: open_loop.Ask) -> Run:
    """Of a server."""

    async def run(plan: workload.Plan) -> list[open_loop.Outcome]:
        return await open_loop.run(plan, ask, timeout_s=TIMEOUT_S)

    return run


async def repeat(ask: open_loop.Ask, measured: Measured, *, vocab_size: int, times: int, seed: int) -> None:
    """Appends `times` repetitions, each with prompts of its own, equal for every system. Raises LoadError."""
    run = over(ask)
    await warm_up(run, measured.name, vocab_size)
    for repetition in range(times):
        measured.repetitions.append(await once(run, measured.name, vocab_size=vocab_size, seed=seed + repetition))


async def warm_up(run: Run, name: str, vocab_size: int) -> None:
    """Two short requests. Raises LoadError."""
    plan = workload.burst(
        streams=2,
        prompt=workload.Lengths.parse("64"),
        output=workload.Lengths.parse("4"),
        vocab_size=vocab_size,
        seed=0,
    )
    await _summary(plan, run, name)


async def once(run: Run, name: str, *, vocab_size: int, seed: int, lengths: Lengths = WHOLE) -> Repetition:
    """One repetition, whose prompts follow from the seed. Raises LoadError."""

    def burst(streams: int, prompt: workload.Lengths) -> workload.Plan:
        return workload.burst(streams=streams, prompt=prompt, output=lengths.outputs, vocab_size=vocab_size, seed=seed)

    many, single = burst(STREAMS, lengths.prompts), burst(1, lengths.single_prompt)
    return Repetition(await _summary(many, run, name), await _summary(single, run, name))


async def _summary(plan: workload.Plan, run: Run, name: str) -> Summary:
    outcomes = await run(plan)
    for outcome in outcomes:
        if outcome.failure is not None:
            raise LoadError(f"{name}: a request of {outcome.prompt_tokens} prompt tokens failed: {outcome.message}")
    return summarize(plan, outcomes)
