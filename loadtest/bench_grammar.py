"""Masks of grammars beside the step loop: `python -m loadtest.bench_grammar [--quick]`.

JSON schemas of tests/data/json_schemas.json, compiled with the embedded model's tokenizer. Each is walked as a request
would: a mask, an id drawn at random of those it allows (EOS where the language may end, one time in four), the state
advanced. The first position is a new request's under a grammar that is kept; `compile` is what the first one waits for.
Beside it, what a forced walk saves: ids that were appended without a mask of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from triptych.inference.v1 import generation_pb2

from loadtest import report
from services.common import checkpoint
from services.common.grammar import Grammar, JsonSchema
from services.common.grammar_compiler import Compiler
from services.scheduler.grammar_state import Bans, GrammarState

SCHEMAS = Path(__file__).parents[1] / "tests" / "data" / "json_schemas.json"
REPETITIONS = 3
T = TypeVar("T")
MAX_TOKENS = 256


@dataclass
class Times:
    """Milliseconds: by the clock, and of the thread's own CPU time, which a busy machine changes less."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def of(self, work: Callable[[], T]) -> T:
        """What `work` returns; how long it took is kept."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        result = work()
        self.cpu_ms.append(1000 * (time.thread_time() - cpu_s))
        self.wall_ms.append(1000 * (time.perf_counter() - wall_s))
        return result


@dataclass
class Found:
    """Of all schemas and walks."""

    compiles: Times = field(default_factory=Times)
    firsts: Times = field(default_factory=Times)
    masks: Times = field(default_factory=Times)
    advances: Times = field(default_factory=Times)
    forced_ids: int = 0
    forced_drawn: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_grammar", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--model", default=checkpoint.EMBEDDED_MODEL, help="whose tokenizer (%(default)s)")
    parser.add_argument("--schemas", type=int, help="so many of them; by default all")
    options = parser.parse_args(argv)
    facts = report.head("bench_grammar")
    folder = checkpoint.find(options.model)
    figures = checkpoint.read_config(folder)
    compiler = Compiler(folder, figures.eos_token_ids)
    vocab_size = figures.vocab_size or compiler.tokenizer.vocab_size
    found = Found()
    schemas = [json.dumps(entry["schema"]) for entry in json.loads(SCHEMAS.read_text())["compile"]][: options.schemas]
    for repetition in range(1 if options.quick else REPETITIONS):
        for number, schema in enumerate(schemas):
            measure(
                found, compiler, schema, vocab_size, figures.eos_token_ids, random.Random(1000 * repetition + number)
            )
    print(table(found))
    print()
    report.last_line(facts | values(found, len(schemas)))
    return 0


def measure(
    found: Found, compiler: Compiler, schema: str, vocab_size: int, eos_ids: Sequence[int], rng: random.Random
) -> None:
    """Compiles a schema, and walks it twice: drawing each id, and with forced ones appended."""
    matcher = found.compiles.of(lambda: compiler.compile(Grammar(JsonSchema(schema))))
    bans = Bans.of(generation_pb2.Sampling(), (), 0, vocab_size)
    _walk(found, GrammarState(matcher.deep_copy(), vocab_size, bans), eos_ids, rng)
    drawn, forced = _walk_forced(GrammarState(matcher.deep_copy(), vocab_size, bans, forces=True), eos_ids, rng)
    found.forced_drawn += drawn
    found.forced_ids += forced


def _walk(found: Found, state: GrammarState, eos_ids: Sequence[int], rng: random.Random) -> None:
    for position in range(MAX_TOKENS):
        words = (found.masks if position else found.firsts).of(state.mask)
        token_id = None if words is None else _drawn(words, eos_ids, rng)
        if token_id is None:
            return
        ids = [token_id]
        found.advances.of(lambda ids=ids: state.take(ids))  # type: ignore[misc]


def _walk_forced(state: GrammarState, eos_ids: Sequence[int], rng: random.Random) -> tuple[int, int]:
    """(ids drawn, ids appended)."""
    drawn = forced = 0
    while drawn + forced < MAX_TOKENS:
        words = state.mask()
        token_id = None if words is None else _drawn(words, eos_ids, rng)
        if token_id is None:
            break
        state.take([token_id])
        drawn += 1
        forced += len(state.force())
    return drawn, forced


def _drawn(words: np.ndarray[Any, np.dtype[np.uint32]], eos_ids: Sequence[int], rng: random.Random) -> int | None:
    """None for EOS."""
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    text = allowed[~np.isin(allowed, list(eos_ids))]
    if not len(text) or (len(text) < len(allowed) and rng.random() < 0.25):
        return None
    return int(text[rng.randrange(len(text))])


def table(found: Found) -> str:
    """A row each for what is timed."""
    rows = [
        _row("mask, first position", found.firsts),
        _row("mask, later positions", found.masks),
        _row("id taken", found.advances),
        _row("compile, first mask included", found.compiles),
    ]
    return report.table(("ms", "count", "p50", "p99", "largest", "CPU p50", "p99", "largest"), rows)


def _row(name: str, times: Times) -> tuple[str, ...]:
    cells = [name, f"{len(times.wall_ms):,}"]
    for column in (times.wall_ms, times.cpu_ms):
        cells += [report.number(report.percentile(column, percent)) for percent in (50, 99, 100)]
    return tuple(cells)


def values(found: Found, schemas: int) -> dict[str, object]:
    """The last line's."""
    kinds = {"mask_first": found.firsts, "mask": found.masks, "advance": found.advances, "compile": found.compiles}
    told: dict[str, object] = {"schemas": schemas}
    for name, times in kinds.items():
        for percent in (50, 99):
            told[f"{name}_p{percent}_ms"] = report.percentile(times.wall_ms, percent)
        told[f"{name}_cpu_p99_ms"] = report.percentile(times.cpu_ms, 99)
    return told | {"forced_share": found.forced_ids / max(1, found.forced_ids + found.forced_drawn)}


if __name__ == "__main__":
    sys.exit(main())
