"""torch, CuPy and the NVIDIA driver: which versions, and whether they go together. Nothing is started on a device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from services.cli.doctor.findings import Finding, Section
from services.common.cuda_versions import Driver, cupy_installed, find_driver, misfits


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
    # Never a fault: on the CPU the model can be served all the same.
    if found:
        return Finding("fit", "; ".join(found), "note", {"misfits": list(found)})
    text = "these go together: --device cuda can be served" if driver else "no GPU is used: served on the CPU"
    return Finding("fit", text, facts={"misfits": []})
