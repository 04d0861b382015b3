"""A card that takes the calls that tests/kernels makes of the host shim: arrays lie on the host, and are carried."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.instances import Instance
from kernels.launch import Device, Grid
from kernels.params import Params


@cache
def cupy_device(capability: int, cubins: Path) -> Any:
    """One for all checks: its modules stay loaded. What is not among `cubins` it would have to compile."""
    from kernels.cupy_device import CupyDevice

    return CupyDevice(
        capability, lambda: torch.cuda.current_stream().cuda_stream, built=cubins, cache=cubins / "compiled-on-the-card"
    )


class Card:
    """A kernels.launch.Device for arrays of the host, as HostDevice is.

    `pointer` makes an array known; `launch` carries what a kernel reads to the device, waits, and carries back what it
    wrote. Slow, and right for checks alone. `kernels` launches on tensors of `device`: CupyDevice on those of "cuda",
    HostDevice, which makes this a copy of itself, on those of "cpu".
    """

    def __init__(self, kernels: Device, device: str) -> None:
        self.kernels, self._device = kernels, device
        self.architecture = kernels.architecture
        self._known: dict[int, np.ndarray] = {}

    def pointer(self, array: np.ndarray) -> int:
        """The array's address on the host, which stands for it in parameters."""
        if not array.flags.c_contiguous:
            raise ValueError("kernels take contiguous arrays")
        self._known[array.ctypes.data] = array
        return array.ctypes.data

    def launch(self, instance: Instance, grid: Grid, params: Params) -> None:
        """Carries, launches, waits, carries back."""
        moved = Params(instance.params)
        moved.buffer[:] = params.buffer
        carried: dict[int, torch.Tensor] = {}
        written = set()
        for name in params.layout.pointers:
            if not (at := int(params.get(name))):
                continue
            base = self._base(at)
            if base not in carried:
                carried[base] = torch.from_numpy(_bytes(self._known[base])).to(self._device, copy=True)
            moved.set(**{name: carried[base].data_ptr() + at - base})
            if name in params.layout.written:
                written.add(base)
        self.kernels.launch(instance, grid, moved)
        for base in written:
            _bytes(self._known[base])[:] = carried[base].cpu().numpy()  # waits for the stream

    def _base(self, at: int) -> int:
        """Address of the array in which an address lies. Arrays that are known stay alive, so there is one."""
        if at in self._known:
            return at
        return next(base for base, array in self._known.items() if base <= at < base + array.nbytes)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
