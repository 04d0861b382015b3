"""The ranks' collectives: torch.distributed's process group of their device, over sockets on addresses that are named.

Ranks that rank 0 starts find one another in a memory file that it hands to its children: there is no address to listen
on for that, nothing of it lies on a disk, and it is gone with the last process that holds it. Ranks that were started
elsewhere meet at a store that rank 0 listens for (joining.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from services.common.errors import StartError
from services.executor.device import Device
from services.executor.ranks.interfaces import interface_of

_c10d: Any = torch.distributed  # its stubs lack what is used here
LOOPBACK = "127.0.0.1"

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries sums between ranks, by the device that holds the weights."""


class Group:
    """One rank's end. Every rank must call the same collectives in the same order, from one thread."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, *, address: str = LOOPBACK, device: str = "cpu"
    ) -> None:
        """Connects with all other ranks; `timeout_s` is what this and every collective may take.

        `store` is a torch.distributed store that all ranks share, `address` the IP address of this machine that the
        others reach it by and the only one it listens on, `device` a key of BACKENDS. Raises RuntimeError where a rank
        does not come, StartError for a device whose backend this torch lacks.
        """
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._processes = _PROCESS_GROUPS[backend(device)](store, rank, size, self._timeout, address)

    def add(self, x: torch.Tensor) -> None:
        """Makes `x`, contiguous, the sum over the ranks, in place. Raises RuntimeError when a rank is lost or late."""
        self._processes.allreduce([x]).wait(self._timeout)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [..., widths[rank]], contiguous -> [..., sum of widths] on rank 0, the ranks' side by side; elsewhere `x`.

        Raises RuntimeError when a rank is lost or late.
        """
        if self.rank:
            self._processes.send([x], 0, 0).wait(self._timeout)
            return x
        parts = [x, *(torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device) for width in widths[1:])]
        waits = [self._processes.recv([part], rank, 0) for rank, part in enumerate(parts) if rank]
        for wait in waits:
            wait.wait(self._timeout)
        return torch.cat(parts, dim=-1)


def group_of_children(
    rendezvous_fd: int, rank: int, size: int, timeout_s: float, device: Device | None = None
) -> Group:
    """On one machine, over loopback; `rendezvous_fd` is a memory file, the same for all ranks."""
    return group_of(device)(_c10d.FileStore(f"/proc/self/fd/{rendezvous_fd}", size), rank, size, timeout_s)


class DeviceGroup(Group):
    """The same, queued on the device behind what computes `x`: where the backend is the device's own, nothing waits on
    the host, and what is called can be captured in a graph.

    A rank that is lost is then not heard of here: the work behind it never ends, which the step's deadline finds.
    """

    def add(self, x: torch.Tensor) -> None:
        """As Group's."""
        self._processes.allreduce([x]).wait()

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [..., widths[rank]] -> [..., sum of widths] on every rank: one exchange of equal parts, since what two
        ranks send each other apart takes turns."""
        most = max(widths)
        own = torch.nn.functional.pad(x, (0, most - x.shape[-1])).contiguous()
        every = own.new_empty(self.size * own.numel())
        self._processes._allgather_base(every, own.view(-1)).wait()
        parts = every.view(self.size, *own.shape)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def share(self, x: torch.Tensor) -> None:
        """Makes `x`, contiguous, what it is on rank 0."""
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        self._processes.broadcast([x], options).wait()


def group_of(device: Device | None) -> Callable[..., Group]:
    """What makes a Group for tensors on `device`, None being the CPU; it takes the arguments of Group but `device`."""
    if device is None:
        return Group
    return partial(DeviceGroup, device=device.torch_device.type)


def backend(device: str) -> str:
    """Name of the collectives' backend for tensors on `device`. Raises StartError where there is none."""
    if device not in BACKENDS:
        raise StartError(f"ranks on device {device!r} are not served; served are {', '.join(BACKENDS)}")
    return BACKENDS[device]


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    if not hasattr(_c10d, "ProcessGroupNCCL"):
        raise StartError("ranks on device 'cuda' need NCCL, which this torch is built without; install torch for CUDA")
    # NCCL is told no address but the interface that has it; an operator's own choice stands.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(address)}")
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(store, rank, size, options)


_PROCESS_GROUPS = {"gloo": _gloo, "nccl": _nccl}
