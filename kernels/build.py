"""Compiles the CUDA kernels ahead of time: a cubin and a manifest an architecture. Needs NVRTC, not a GPU.

python -m kernels.build [--out DIR] [--architecture 80 90 ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels import instances, nvrtc
from kernels.instances import Architecture, Instance

SOURCES = Path(__file__).parent / "csrc"

_REPORT = re.compile(
    r"entry function '(?P<name>\S+)' for.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor, as ptxas reports it. Any local-memory traffic shows in the last two."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    """Stores and loads."""


@dataclass(frozen=True)
class Cubin:
    """The kernels of one source for one architecture."""

    code: bytes
    lowered: dict[str, str]
    """Name in the cubin by instance name."""
    resources: dict[str, Resources]


def fingerprint() -> str:
    """Of all kernel sources: a cubin of others is stale."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compile_cubin(
    source: str, names: Sequence[str], capability: int, using: nvrtc.Toolkit | None = None, sources: Path = SOURCES
) -> Cubin:
    """`source` is a file name in `sources`, `names` the instances to make of it; `using`: else nvrtc.toolkit()."""
    options = [
        f"-arch=sm_{capability}",
        "-std=c++17",
        "-default-device",
        "--ptxas-options=-v",
        f"-I{SOURCES}",
    ]
    made = nvrtc.compile_source((sources / source).read_text(), source, names, options, using)
    report = {match["name"]: match for match in _REPORT.finditer(made.log)}
    resources = {}
    for name, lowered in made.lowered.items():
        found = report[lowered]
        spilled = int(found["stores"]) + int(found["loads"])
        resources[name] = Resources(int(found["registers"]), int(found["stack"]), spilled)
    return Cubin(made.cubin, made.lowered, resources)


def write_architecture(architecture: Architecture, wanted: Iterable[Instance], out: Path) -> Path:
    """Writes `<source>.sm_NN.cubin` and `manifest.sm_NN.json` into `out`; returns the manifest's path."""
    by_source: dict[str, list[Instance]] = {}
    for instance in wanted:
        by_source.setdefault(instance.source, []).append(instance)
    kernels = []
    for source, members in by_source.items():
        cubin = compile_cubin(source, [member.name for member in members], architecture.capability)
        file = f"{Path(source).stem}.sm_{architecture.capability}.cubin"
        (out / file).write_bytes(cubin.code)
        for member in members:
            found = {"cubin": file, "lowered": cubin.lowered[member.name]}
            kernels.append(asdict(member) | found | asdict(cubin.resources[member.name]))
    manifest = {"sources": fingerprint(), "nvrtc": nvrtc.version(), "kernels": kernels}
    path = out / f"manifest.sm_{architecture.capability}.json"
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds and prints what spills; 1 where a kernel does that may not."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/kernels"))
    parser.add_argument("--architecture", type=int, nargs="*", default=list(instances.ARCHITECTURES))
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.architecture) - set(instances.ARCHITECTURES))
    if unknown:
        parser.error(f"no kernels for {unknown}; there are some for {list(instances.ARCHITECTURES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    for capability in given.architecture:
        architecture = instances.ARCHITECTURES[capability]
        path = write_architecture(architecture, instances.every_instance(architecture), given.out)
        kernels = json.loads(path.read_text())["kernels"]
        sys.stdout.write(f"{path}: {len(kernels)} kernels\n")
        for kernel in kernels:
            if kernel["spill_bytes"] or kernel["stack_bytes"]:
                sys.stdout.write(f"  {kernel['name']} spills {kernel['spill_bytes']} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
