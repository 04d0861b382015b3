"""Versions of torch, CuPy and the NVIDIA driver, and whether they go together. Nothing is started on a device."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: its own version where the kernel tells it, and the newest CUDA it serves."""

    version: str | None
    cuda: tuple[int, int]


def misfits(torch_cuda: int | None, cupy_majors: Sequence[int], driver_cuda: int | None) -> list[str]:
    """What does not go together, by CUDA major versions; None: it has none.

    Within a major version any driver runs any build (NVIDIA's minor version compatibility); an older major never does.
    torch and CuPy load the libraries of one major into one process.
    """
    found = []
    if len(cupy_majors) > 1:
        found.append(f"CuPy is installed for CUDA {' and '.join(map(str, cupy_majors))}; keep one of them")
    if torch_cuda is not None and driver_cuda is not None and torch_cuda > driver_cuda:
        found.append(f"torch is built for CUDA {torch_cuda}, the driver serves up to {driver_cuda}; update the driver")
    for major in cupy_majors:
        if torch_cuda is not None and major != torch_cuda:
            found.append(
                f"torch is built for CUDA {torch_cuda}, CuPy for {major}; install cupy-cuda{torch_cuda}x in its place"
            )
        if driver_cuda is not None and major > driver_cuda:
            found.append(f"CuPy is built for CUDA {major}, the driver serves up to {driver_cuda}; update the driver")
    if torch_cuda is None and cupy_majors and driver_cuda is not None:
        found.append("torch is built without CUDA, so CuPy has nothing to work with; install a CUDA build of torch")
    return found


def find_driver(library: str = "libcuda.so.1", file: Path = DRIVER_FILE) -> Driver | None:
    """None where there is no driver."""
    number = ctypes.c_int(0)
    try:
        # cuDriverGetVersion needs no cuInit, so no device is touched.
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        told = re.search(r"Module.*?\s(\d+\.[\d.]+)\s", file.read_text())
    except OSError:
        told = None
    return Driver(told[1] if told else None, (number.value // 1000, number.value % 1000 // 10))


def cupy_installed() -> list[tuple[int, str]]:
    """CUDA major, and name with version, of each CuPy wheel."""
    found = {}
    for one in distributions():
        if named := re.fullmatch(r"cupy[-_]cuda(\d+)x", one.metadata["Name"] or "", re.IGNORECASE):
            found[int(named[1])] = f"{one.metadata['Name']} {one.version}"
    return sorted(found.items())
