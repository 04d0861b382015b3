"""What the executor asks of an accelerator: memory, copies that do not wait, events, kernels and graphs.

`cuda_device.CudaDevice` is a card. Tests have one of their own, whose tensors lie on the CPU and whose kernels run in
the host shim: so all that stands above this protocol is the same on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels import launch
from kernels.instances import Instance


class DeviceLostError(Exception):
    """The device has failed for good, and what this process holds on it is lost: it cannot work any more."""


class Event(Protocol):
    """A point in the device's queue."""

    def wait(self) -> None:
        """Returns once the device has come there; from any thread. Raises what went wrong on the device before it."""

    def us_since(self, earlier: Event) -> int:
        """Microseconds of the device between two points; both have been waited for."""


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Queues it again, over the same memory."""


class Device(Protocol):
    """One accelerator. All but an event's `wait` is called from one thread, after `activate`."""

    name: str
    """As people and the scheduler are told it: "cuda:0"."""
    kind: str
    """As attention backends know it: "cuda"."""
    torch_device: torch.device
    """Where tensors lie."""
    capability: int
    """Compute capability, 90 for 9.0."""
    multiprocessors: int
    kernels: launch.Device

    def activate(self) -> None:
        """Makes it the calling thread's."""

    def load_kernels(self, instances: Sequence[Instance]) -> None:
        """Makes them ready to be launched. Raises StartError where one is neither built nor can be compiled."""

    def available_bytes(self) -> int:
        """Free memory; what torch keeps for later use counts as free."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Bytes that `work` takes at its height, over what is held before it."""

    def upload(self, array: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy on the device, queued: the host does not wait, and the array may change at once."""

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, queued: valid once an event that is recorded after it has been waited for."""

    def record(self) -> Event:
        """Marks where the queue ends now."""

    def capture(self, work: Callable[[], object]) -> Graph:
        """What `work` queues, as a graph; it has run before. The tensors it works on must live as long as the graph."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether after this error nothing on the device works any more."""


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A host tensor as numpy sees it, without a copy."""
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def index(array: npt.NDArray[Any], device: Device) -> torch.Tensor:
    """Numbers to index by, on the device."""
    return device.upload(np.ascontiguousarray(array, np.int64))
