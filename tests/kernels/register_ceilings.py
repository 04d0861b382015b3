"""Writes register_ceilings.json anew: what every kernel takes with the compiler that is installed.

python -m tests.kernels.register_ceilings
"""

from __future__ import annotations

import json
from pathlib import Path

from kernels import build, instances, nvrtc

PATH = Path(__file__).with_suffix(".json")


def main() -> None:
    """Other compiler versions' ceilings stay."""
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    found = {}
    for capability, architecture in instances.ARCHITECTURES.items():
        by_source: dict[str, list[str]] = {}
        for instance in instances.every_instance(architecture):
            by_source.setdefault(instance.source, []).append(instance.name)
        for source, names in by_source.items():
            for name, resources in build.compile_cubin(source, names, capability).resources.items():
                found[f"sm_{capability} {name}"] = resources.registers
                if resources.spill_bytes or resources.stack_bytes:
                    print(f"sm_{capability} {name} spills {resources.spill_bytes} bytes")
    known[nvrtc.version()] = found
    PATH.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
