"""torch, CuPy and the NVIDIA driver: which versions, and whether they go together. Nothing is started on a device."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

from services.cli.doctor.findings import Finding, Section

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: its own version where the kernel tells it, and the newest CUDA it serves."""

    version: str | None
    cuda: tuple[int, int]


def section() -> Section:
    """Versions, and what does not fit."""
    torch_cuda, torch_text = _torch()
    cupy = cupy_installed()
    driver = find_driver()
    majors = sorted({major for major, _ in cupy})
    return Section(
        "CUDA",
        (
            torch_text,
            Finding("CuPy", "; ".join(text for _, text in cupy) or "not installed", facts={"cuda_majors": majors}),
            _driver_finding(driver),
            _fit_finding(misfits(torch_cuda, majors, driver.cuda[0] if driver else None), driver is not None),
        ),
    )


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


def _torch() -> tuple[int | None, Finding]:
    try:
        torch = import_module("torch")
    except ImportError as error:
        return None, Finding("torch", f"cannot be imported: {error}", "note")
    cuda: str | None = torch.version.cuda
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    capability = torch.backends.cpu.get_cpu_capability()
    facts = {"version": torch.__version__, "cuda": cuda, "cpu_capability": capability}
    text = f"{torch.__version__}, {built}; on this CPU it computes with {capability}"
    return int(cuda.split(".")[0]) if cuda else None, Finding("torch", text, facts=facts)


def _driver_finding(driver: Driver | None) -> Finding:
    if driver is None:
        return Finding("driver", "no NVIDIA driver", facts={"version": None})
    major, minor = driver.cuda
    text = f"{driver.version or 'of unknown version'}, serves CUDA up to {major}.{minor}"
    return Finding("driver", text, facts={"version": driver.version, "cuda": f"{major}.{minor}"})


def _fit_finding(found: Sequence[str], driver: bool) -> Finding:
    # Never a fault: the executor serves on the CPU alone.
    if found:
        return Finding("fit", "; ".join(found), "note", {"misfits": list(found)})
    text = (
        "these go together; the executor serves on the CPU alone yet" if driver else "no GPU is used: served on the CPU"
    )
    return Finding("fit", text, facts={"misfits": []})
