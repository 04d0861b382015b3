"""Which kernels have a ceiling of registers, and what writes register_ceilings.json anew with the installed compiler:

python -m tests.kernels.register_ceilings
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from kernels import build, instances, nvrtc
from kernels.instances import ARCHITECTURES, Instance

PATH = Path(__file__).with_suffix(".json")
WHOLE = 90
"""The compute capability for which all instances have a ceiling."""
PART = (80, 86, 100)
"""Those for which one instance of every kernel has."""


def of_each_kernel(capability: int) -> Iterator[Instance]:
    """One instance of every kernel: bfloat16, heads of 128; sampling has no heads."""
    seen = set()
    for instance in instances.every_instance(ARCHITECTURES[capability]):
        kernel, _, arguments = instance.name.partition("<")
        headless = kernel == "sampling"
        if "bfloat16" in arguments and (headless or ", 128" in arguments) and kernel not in seen:
            seen.add(kernel)
            yield instance


def by_source(wanted: Iterable[Instance]) -> dict[str, list[str]]:
    """Names of instances by the source that they are compiled from."""
    names: dict[str, list[str]] = {}
    for instance in wanted:
        names.setdefault(instance.source, []).append(instance.name)
    return names


def main() -> None:
    """Other compiler versions' ceilings stay."""
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    found = {}
    for capability in (*PART, WHOLE):
        wanted = instances.every_instance(ARCHITECTURES[WHOLE]) if capability == WHOLE else of_each_kernel(capability)
        for source, names in by_source(wanted).items():
            for name, resources in build.compile_cubin(source, names, capability).resources.items():
                found[f"sm_{capability} {name}"] = resources.registers
    known[nvrtc.version()] = found
    PATH.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
