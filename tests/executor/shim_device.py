"""A device whose tensors lie on the CPU and whose kernels run in the host shim: what a card is to the executor.

Its graphs re-execute what was captured. It also holds the executor to what a card cannot do: nothing that was captured
may be given other memory, and no copy to the host is read before an event behind it was waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels import instances
from kernels.instances import Architecture, Instance
from kernels.launch import Grid
from kernels.params import Params
from tests.kernels.hostshim.hostshim import HostDevice


class Shim(HostDevice):
    """Counts launches by kernel, and holds no array, since torch does."""

    def __init__(self, architecture: Architecture, together: tuple[Instance, ...]) -> None:
        super().__init__(architecture=architecture, together=together)
        self.launched: list[str] = []
        self.recorded: list[tuple[str, Grid, dict[str, float]]] | None = None

    def launch(self, instance: Instance, grid: Grid, params: Params) -> None:
        self.launched.append(instance.name.split("<")[0])
        if self.recorded is not None:
            fixed = [name for name in params.layout.fields if name not in _INTERMEDIATE]
            self.recorded.append((instance.name, grid, {name: params.get(name) for name in fixed}))
        with _ONE_AT_A_TIME:
            super().launch(instance, grid, params)

    def recording(self, work: Callable[[], object]) -> list[tuple[str, Grid, dict[str, float]]]:
        """Kernels that `work` launches, with what a captured graph would launch them with again."""
        self.recorded = []
        with torch.inference_mode():
            work()
        recorded, self.recorded = self.recorded, None
        return recorded


_ONE_AT_A_TIME = threading.Lock()
"""What the shim keeps of a running kernel is the process's, and ranks that are threads share one."""
_INTERMEDIATE = {"out", "query", "query_out", "key", "value", "cos", "sin", "partial_out", "partial_lse"}
"""Addresses of tensors between layers: a graph keeps their memory for itself, here they come and go."""


@dataclass(eq=False)
class ShimEvent:
    """Everything before it is done when it is made; downloads before it are filled when it is waited for."""

    device: ShimDevice
    number: int
    """of the downloads before it"""
    at_s: float = field(default_factory=time.perf_counter)

    def wait(self) -> None:
        if self.device.hang is not None:
            self.device.hang.wait(20)
        self.device.fill(self.number)
        self.device.waits += 1
        if self.device.failure is not None:
            raise self.device.failure

    def us_since(self, earlier: ShimEvent) -> int:
        return int((self.at_s - earlier.at_s) * 1e6)


@dataclass(eq=False)
class ShimGraph:
    """A replay launches what was captured: the same grids, and the same arguments down to the addresses."""

    device: ShimDevice
    work: Callable[[], object]
    captured: list[tuple[str, Grid, dict[str, float]]]

    def replay(self) -> None:
        self.device.replays += 1
        replayed = self.device.kernels.recording(self.work)
        assert replayed == self.captured, "a replay differs from what was captured"


class ShimDevice:
    """A services.executor.device.Device."""

    name = "cuda:0"
    kind = "cuda"
    torch_device = torch.device("cpu")
    multiprocessors = 4

    def __init__(self, capability: int = 90, free_bytes: int = 64 << 20) -> None:
        self.capability = capability
        self.free_bytes = free_bytes
        architecture = instances.ARCHITECTURES[capability]
        self.kernels = Shim(architecture, ())
        self.loaded: list[Instance] = []
        self.waits = 0
        self.replays = 0
        self.failure: RuntimeError | None = None
        """What waiting for an event raises."""
        self.hang: threading.Event | None = None
        """Nothing is done before this is set."""
        self._downloads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._filled = 0
        self._filling = threading.Lock()

    def activate(self) -> None:
        pass

    def load_kernels(self, instances: Sequence[Instance]) -> None:
        self.loaded += instances

    def available_bytes(self) -> int:
        return self.free_bytes

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 1 << 20

    def upload(self, array: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
        copy = torch.from_numpy(np.array(array))
        return copy if into is None else into.copy_(copy)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Poisoned until an event behind it is waited for; what lay on the device at this point comes then."""
        host = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else -(10**6))
        with self._filling:
            self._downloads.append((host, tensor.clone()))
        return host

    def record(self) -> ShimEvent:
        with self._filling:
            return ShimEvent(self, self._filled + len(self._downloads))

    def fill(self, number: int) -> None:
        """Brings the first `number` downloads of all to the host."""
        with self._filling, torch.inference_mode():
            while self._filled < number:
                host, tensor = self._downloads.pop(0)
                host.copy_(tensor)
                self._filled += 1

    def capture(self, work: Callable[[], object]) -> ShimGraph:
        return ShimGraph(self, work, self.kernels.recording(work))

    def is_lost(self, error: BaseException) -> bool:
        return "sticky" in str(error)


def device_executor(*args: Any, **options: Any) -> Any:
    """A DeviceExecutor on a shim of its own."""
    from services.executor.device_executor import DeviceExecutor

    options.setdefault("device", ShimDevice())
    options.setdefault("compile_mode", "off")  # inductor would run the C++ compiler in every test
    return DeviceExecutor(*args, sampler_threads=64, **options)
