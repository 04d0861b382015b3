"""A CUDA card as the executor's device: torch for memory, copies, events and graphs, CuPy for our kernels.

Not yet run on hardware: docs/kernels.md lists what remains to be confirmed there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels import nvrtc
from kernels.instances import Instance
from services.common import checkpoint
from services.common.cuda_versions import cupy_installed, find_driver, misfits
from services.common.errors import StartError
from services.executor.device import Event, Graph

BUILT = Path(nvrtc.__file__).parents[1] / "build" / "kernels"
"""Where `make kernels` writes."""


def kernel_cache() -> Path:
    """Where kernels are kept that were compiled here."""
    return checkpoint.cache_dir() / "kernels"


def check_installation() -> None:
    """Raises StartError where torch, CuPy and the driver are not there or do not go together."""
    if torch.version.cuda is None:
        raise StartError(
            f"--device cuda: torch {torch.__version__} is built without CUDA; install a CUDA build of torch, and the "
            "extra executor-cuda"
        )
    major, driver = int(torch.version.cuda.split(".")[0]), find_driver()
    cupy = [one for one, _ in cupy_installed()]
    if not cupy:
        raise StartError(f"--device cuda: CuPy is not installed; torch is built for CUDA {major}: cupy-cuda{major}x")
    if found := misfits(major, cupy, driver.cuda[0] if driver else None):
        raise StartError(f"--device cuda: {'; '.join(found)}")
    if not torch.cuda.is_available():
        told = "there is no NVIDIA driver" if driver is None else "torch finds no device"
        raise StartError(f"--device cuda: {told}; start the executor with --device cpu, or give it a GPU")


class CudaDevice:
    """A services.executor.device.Device. Raises StartError where the card cannot be used."""

    kind = "cuda"

    def __init__(self, number: int = 0, built: Path = BUILT) -> None:
        """`built` holds the kernels that were built ahead of time."""
        check_installation()
        if number >= (count := torch.cuda.device_count()):
            raise StartError(f"--device is cuda:{number}, there are {count} devices, numbered from 0")
        self.name = f"cuda:{number}"
        self.torch_device = torch.device("cuda", number)
        self._number = number
        properties = torch.cuda.get_device_properties(number)
        self.capability = 10 * properties.major + properties.minor
        self.multiprocessors = properties.multi_processor_count
        self._built = built
        self.kernels = self._cupy()
        self._capture_stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def activate(self) -> None:
        torch.cuda.set_device(self._number)
        import cupy

        cupy.cuda.Device(self._number).use()

    def load_kernels(self, instances: Sequence[Instance]) -> None:
        try:
            for instance in instances:
                self.kernels.load(instance)
        except (nvrtc.CompilerMissingError, nvrtc.CompileError) as error:
            raise StartError(f"the CUDA kernels: {error}") from error
        except OSError as error:
            raise StartError(
                f"compiled kernels cannot be kept in {kernel_cache()}: {error.strerror}; set TRIPTYCH_CACHE to a "
                f"folder that can be written, or run `make kernels` and have the result in {self._built}"
            ) from error

    def available_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._number)
        kept = torch.cuda.memory_reserved(self._number) - torch.cuda.memory_allocated(self._number)
        return int(free + kept)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self._number)
        torch.cuda.reset_peak_memory_stats(self._number)
        before = torch.cuda.memory_allocated(self._number)
        work()
        torch.cuda.synchronize(self._number)
        peak = torch.cuda.max_memory_allocated(self._number) - before
        torch.cuda.empty_cache()
        return int(peak)

    def upload(self, array: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        # Pinned memory comes out of torch's cache, which gives it to nobody else before the copy is done.
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        if into is not None:
            return into.copy_(pinned, non_blocking=True)
        return pinned.to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def record(self) -> Event:
        # Blocking: the thread that waits sleeps.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._number))
        return _CudaEvent(event, self._number)

    def capture(self, work: Callable[[], object]) -> Graph:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self._number)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        stream = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream(self._number))
        with torch.cuda.stream(stream):
            work()  # on the stream that captures, so that what libraries make once a stream is made
        torch.cuda.current_stream(self._number).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph

    def is_lost(self, error: BaseException) -> bool:
        if isinstance(error, torch.OutOfMemoryError):
            return False
        try:
            torch.cuda.synchronize(self._number)
        except RuntimeError:
            return True
        return False

    def _cupy(self) -> Any:
        # Before CuPy is imported: it would take a folder under the user's home, which may not be writable.
        os.environ.setdefault("CUPY_CACHE_DIR", str(checkpoint.cache_dir() / "cupy"))
        try:
            from kernels.cupy_device import CupyDevice
        except ImportError as error:
            raise StartError(f"--device cuda: CuPy cannot be imported: {error}") from error
        number = self._number
        try:
            return CupyDevice(
                self.capability,
                lambda: torch.cuda.current_stream(number).cuda_stream,
                built=self._built,
                cache=kernel_cache(),
            )
        except ValueError as error:
            raise StartError(f"--device cuda: {error}") from error


class _CudaEvent:
    """A services.executor.device.Event."""

    def __init__(self, event: torch.cuda.Event, number: int) -> None:
        self.event = event
        self._number = number

    def wait(self) -> None:
        torch.cuda.set_device(self._number)  # else a thread of its own would wake card 0 too
        self.event.synchronize()

    def us_since(self, earlier: Event) -> int:
        if not isinstance(earlier, _CudaEvent):
            raise TypeError("events of two devices")
        return int(1000 * earlier.event.elapsed_time(self.event))
