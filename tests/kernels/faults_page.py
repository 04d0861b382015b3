"""docs/kernels_faults.md: the faults that are planted into the CUDA kernels, and which layer of the tests found each.

python -m tests.kernels.faults_page [--missing]

Plants them all, ten minutes on two cores, and writes the page anew; with --missing those that it does not have.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "kernels_faults.md"
LAYERS = (
    # (name on the page, what the layer says, how it finds)
    ("ThreadSanitizer", r"data race", "two threads meet at a place in memory without a barrier between them"),
    ("AddressSanitizer", r"AddressSanitizer", "buffers and shared memory have exactly their size"),
    ("UBSan", r"runtime error", "undefined behaviour of C++, misaligned reads"),
    ("orders", r"in (random|reverse|some) order|order of threads", "threads take turns in another order"),
    ("the shim", r"barrier|left while|deadlock|aligned|not in its mask", "CUDA's own rules, held by name"),
    ("numbers", r"", "float64, long double or exact numbers of the same batch"),
)
_ROW = re.compile(r"^\| `(?P<source>[^`]+)` \| (?P<wrong>[^|]+) \| (?P<layer>[^|]+) \|$", re.MULTILINE)


def layer_of(found: str) -> str:
    """Which layer speaks so."""
    return next(name for name, pattern, _ in LAYERS if re.search(pattern, found))


def rows() -> dict[tuple[str, str], str]:
    """The page's: layer by (source, fault)."""
    return {(row["source"], row["wrong"]): row["layer"] for row in _ROW.finditer(PAGE.read_text())}


def confirm(source: str, wrong: str, found: str) -> None:
    """Raises AssertionError where the page says that another layer found the fault."""
    told = rows().get((source, wrong))
    assert told == layer_of(found), (
        f"{PAGE.name} says {told}, it was {layer_of(found)}: python -m tests.kernels.faults_page"
    )


def every_fault() -> Iterator[tuple[str, str, Callable[[], str]]]:
    """(source, what is wrong, what plants it and returns what its layer says)"""
    from tests.kernels import test_cuda_faults as attention
    from tests.kernels import test_planted_faults_cuda as others
    from tests.kernels.hostshim.hostshim import Fault

    for layer, wrong, source, old, new in attention.FAULTS:
        fault = Fault(source.partition(" ")[0], old, new)
        yield source, wrong, lambda args=(source, layer, fault): attention.verdict(*args)
    for source, faults in (("cache_rope.cu", others.ROPE), ("sampling.cu", others.SAMPLING)):
        for wrong, (old, new, run) in faults.items():
            fault = Fault(source, old, new)
            yield source, wrong, lambda args=(fault, run): others.caught(*args)


def page(found: dict[tuple[str, str], str]) -> str:
    """Its text; `found` is the layer by (source, fault)."""
    counts = Counter(found.values())
    lines = [
        "# Faults planted in the CUDA kernels",
        "",
        f"{len(found)} faults, each of which the tests must find. `python -m tests.kernels.faults_page` plants them",
        "and writes this page; the slow tests plant each again and hold it to the layer named here.",
        "",
        "| layer | how it finds | faults |",
        "|---|---|---|",
        *(f"| {name} | {how} | {counts[name]} |" for name, _, how in LAYERS),
        "",
        "| source | planted | found by |",
        "|---|---|---|",
        *(f"| `{source}` | {wrong} | {layer} |" for (source, wrong), layer in found.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Plants, and writes the page; 1 where a fault is not found."""
    known = rows() if "--missing" in sys.argv[1:] else {}
    found, missed = {}, 0
    for source, wrong, plant in every_fault():
        if (source, wrong) in known:
            found[source, wrong] = known[source, wrong]
            continue
        try:
            said = plant()
        except pytest.fail.Exception:
            said = ""
        print(f"{source}: {wrong}: {said.splitlines()[0][:100] if said else 'NOT FOUND'}", flush=True)
        missed += not said
        if said:
            found[source, wrong] = layer_of(said)
    PAGE.write_text(page(found))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
