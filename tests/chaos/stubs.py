"""Fleets on the stub executor, whose ids are known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.stub_batch import expected_ids
from tests.chaos.fleet import Fleet, Load

VOCAB_SIZE = 512
SCHEDULER_FLAGS = ["--max-num-seqs", "256", "--max-num-batched-tokens", "2048"]
"""As for a GPU: what was lost is prefilled again in a second or two, as real executors of that kind do."""


def stub_fleet(
    model: Path, folder: Path, *, replicas: int, step_ms: int, frontends: int = 1, faults: Sequence[str] = ()
) -> Fleet:
    """`faults` are flags of loadtest.stub_executor."""
    executor = ["-m", "loadtest.stub_executor", "--vocab-size", str(VOCAB_SIZE), "--step-ms", str(step_ms), *faults]
    return Fleet(model, folder, executor, replicas, scheduler_flags=SCHEDULER_FLAGS, frontends=frontends)


def ids_of(prompt: Sequence[int], seed: int, count: int) -> Sequence[int]:
    """Of an undisturbed answer."""
    return expected_ids(list(prompt), seed, count, VOCAB_SIZE)


def load_on(fleet: Fleet, clients: int, max_tokens: tuple[int, int]) -> Load:
    """Plain gRPC clients."""
    return Load(fleet, clients, max_tokens, ids_of, VOCAB_SIZE)
