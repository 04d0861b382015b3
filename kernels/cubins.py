"""Finds the machine code of a kernel: built ahead of time, or compiled once on this machine and kept."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels import build, instances, nvrtc
from kernels.instances import Architecture, Instance


@dataclass(frozen=True)
class Code:
    """One kernel in machine code."""

    cubin: bytes
    lowered: str
    """The kernel's name in it."""


def architecture_for(capability: int) -> Architecture:
    """Whose code a device of this compute capability runs: its own, or the nearest lower one of the same major.

    Raises ValueError where there is none; CUDA C++ Programming Guide, "Binary Compatibility".
    """
    fitting = [known for known in instances.ARCHITECTURES if known // 10 == capability // 10 and known <= capability]
    if not fitting:
        raise ValueError(
            f"no kernels for compute capability {capability}: there are some for {list(instances.ARCHITECTURES)}"
        )
    return instances.ARCHITECTURES[max(fitting)]


@dataclass(frozen=True)
class Cubins:
    """`built` is what `make kernels` wrote, `cache` what was compiled here; both are for one architecture."""

    architecture: Architecture
    built: Path
    cache: Path

    def find(self, instance: Instance) -> Code:
        """Built code where its sources are today's, else from the cache, else compiled into the cache.

        Raises nvrtc.CompilerMissingError where it would have to compile and cannot.
        """
        return self._ahead_of_time(instance) or self._cached(instance) or self._compiled(instance)

    @cached_property
    def _manifest(self) -> dict[str, dict[str, Any]]:
        path = self.built / f"manifest.sm_{self.architecture.capability}.json"
        if not path.exists():
            return {}
        manifest = json.loads(path.read_text())
        if manifest["sources"] != build.fingerprint():
            return {}
        return {kernel["name"]: kernel for kernel in manifest["kernels"]}

    def _ahead_of_time(self, instance: Instance) -> Code | None:
        found = self._manifest.get(instance.name)
        return Code((self.built / found["cubin"]).read_bytes(), found["lowered"]) if found else None

    def _entry(self, instance: Instance) -> Path:
        key = f"{build.fingerprint()} {instance.name} {self.architecture.capability} {nvrtc.major()}"
        return self.cache / hashlib.sha256(key.encode()).hexdigest()[:32]

    def _cached(self, instance: Instance) -> Code | None:
        entry = self._entry(instance)
        try:
            lowered, _, cubin = entry.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return Code(cubin, lowered.decode())

    def _compiled(self, instance: Instance) -> Code:
        try:
            made = build.compile_cubin(instance.source, [instance.name], self.architecture.capability)
        except nvrtc.CompilerMissingError as missing:
            raise nvrtc.CompilerMissingError(
                f"{instance.name} is not in {self.built} and cannot be compiled here: {missing}; or run `make kernels` "
                "where it can, and copy the folder"
            ) from None
        entry = self._entry(instance)
        self.cache.mkdir(parents=True, exist_ok=True)
        whole = entry.with_suffix(f".{os.getpid()}")  # renamed when complete: other processes read the cache too
        whole.write_bytes(made.lowered[instance.name].encode() + b"\n" + made.code)
        whole.replace(entry)
        return Code(made.code, made.lowered[instance.name])
