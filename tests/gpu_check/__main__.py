"""Checks the CUDA kernels, and the engine on them, on a card; under four minutes.

python -m tests.gpu_check [--dry] [--model PATH] [--cubins DIR] [--only STAGE ...] [--json FILE]

Compiles nothing: `make kernels` on any machine makes the cubins. --dry runs the same without a card, on the host shim,
as far as that goes, and says what was skipped and why. Exit status: 0: all that was checked is right; 1: something is
not; 2: nothing could be checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernels import build, instances
from kernels.cubins import architecture_for
from loadtest.report import machine, table
from tests.gpu_check import cases, engine, graphs, roofline, sanitizer, wrappers
from tests.gpu_check.checks import Place, Tally

STAGES = ("wrappers", "cases", "graphs", "engine", "roofline", "sanitizer")
BUDGET_S = 230.0


class NothingToCheckError(Exception):
    """No card, no CuPy, no cubins: the text says which, and what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages, prints their tables."""
    begun = time.monotonic()
    given = _parser().parse_args(arguments)
    place = Place(given.dry, given.cubins, given.few, given.model, begun + given.budget_s)
    try:
        print(f"no card: {machine()}" if given.dry else _card(place))
    except NothingToCheckError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    tally, roofs = Tally(place), list[roofline.Measured]()
    for stage in given.only or STAGES:
        module: Any = {"wrappers": wrappers, "cases": cases, "graphs": graphs, "engine": engine}.get(stage)
        if module is None:
            module = {"roofline": roofline, "sanitizer": sanitizer}[stage]
        tally.run(stage, module.checks(place, roofs) if stage == "roofline" else module.checks(place))
    if roofs:
        print("\n" + table(roofline.HEADER, [row.cells() for row in roofs]))
    print("\n" + table(("stage", "right", "wrong", "skipped", "seconds"), tally.table()))
    print(f"{time.monotonic() - begun:.0f} s; {'something is WRONG' if tally.failed else 'nothing is wrong'}")
    if given.json:
        record = {"outcomes": [asdict(each) for each in tally.outcomes], "roofline": [asdict(row) for row in roofs]}
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(tally.failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="without a card, on the host shim")
    parser.add_argument("--model", type=Path, help="a checkpoint folder to serve as well")
    parser.add_argument("--cubins", type=Path, default=Path("build/kernels"), help="what `make kernels` wrote")
    parser.add_argument("--only", nargs="*", choices=STAGES, metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument(
        "--few", action="store_true", help="one type and head size of each kernel, as a sanitizer takes"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no check begins after so many seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write outcomes and roofline there")
    return parser


def _card(place: Place) -> str:
    """What the card is and what drives it. Raises NothingToCheckError."""
    try:
        import cupy
        import torch
    except ImportError as error:
        raise NothingToCheckError(f"{error}: install the extra executor-cuda or executor-cuda13") from None
    if not torch.cuda.is_available():
        raise NothingToCheckError("torch sees no CUDA device; --dry checks without one")
    major, minor = torch.cuda.get_device_capability()
    try:
        architecture = architecture_for(10 * major + minor)
    except ValueError as error:
        raise NothingToCheckError(str(error)) from None
    place.capability = 10 * major + minor
    compiler = compiler_of(place.cubins, architecture.capability)
    driver = cupy.cuda.runtime.driverGetVersion()
    properties = torch.cuda.get_device_properties(0)
    if int(compiler.split(".")[0]) > driver // 1000:
        raise NothingToCheckError(
            f"the cubins are CUDA {compiler}'s, the driver runs CUDA {driver // 1000}'s and older"
        )
    return (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
        f"{properties.total_memory / 2**30:.0f} GiB, compute capability {major}.{minor}; driver for CUDA "
        f"{driver // 1000}.{driver % 1000 // 10}; torch {torch.__version__} (CUDA {torch.version.cuda}), "
        f"cupy {_cupy()}; cubins by NVRTC {compiler} for sm_{architecture.capability}"
    )


def compiler_of(cubins: Path, capability: int) -> str:
    """The NVRTC that made the cubins, which must be of today's sources, and all of them."""
    path = cubins / f"manifest.sm_{capability}.json"
    if not path.exists():
        raise NothingToCheckError(f"{path} is missing: run `make kernels` on any machine, and bring {cubins} here")
    manifest = json.loads(path.read_text())
    if manifest["sources"] != build.fingerprint():
        raise NothingToCheckError(f"{path} is of other kernel sources than these: run `make kernels` again")
    wanted = {instance.name for instance in instances.every_instance(instances.ARCHITECTURES[capability])}
    if missing := sorted(wanted - {kernel["name"] for kernel in manifest["kernels"]}):
        raise NothingToCheckError(f"{path} lacks {missing[0]} and {len(missing) - 1} more: run `make kernels` again")
    return str(manifest["nvrtc"])


def _cupy() -> str:
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return "of no known package"


if __name__ == "__main__":
    sys.exit(main())
