"""The ranks' collectives: torch.distributed's gloo, over sockets on loopback.

Ranks find one another in a memory file that rank 0 hands to its children: there is no address to listen on for that,
nothing of it lies on a disk, and it is gone with the last process that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

_c10d: Any = torch.distributed  # its stubs lack what is used here
_LOOPBACK = "127.0.0.1"


class Group:
    """One rank's end. Every rank must call the same collectives in the same order, from one thread."""

    def __init__(self, rendezvous_fd: int, rank: int, size: int, timeout_s: float) -> None:
        """Connects with all other ranks; `timeout_s` is what this and every collective may take.

        `rendezvous_fd` is a memory file, the same for all ranks. Raises RuntimeError where a rank does not come.
        """
        self.rank = rank
        self.size = size
        store = _c10d.FileStore(f"/proc/self/fd/{rendezvous_fd}", size)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timedelta(seconds=timeout_s)
        self._gloo = _c10d.ProcessGroupGloo(store, rank, size, options)
        self._timeout = timedelta(seconds=timeout_s)

    def add(self, x: torch.Tensor) -> None:
        """Makes `x`, contiguous, the sum over the ranks, in place. Raises RuntimeError when a rank is lost or late."""
        self._gloo.allreduce([x]).wait(self._timeout)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [..., widths[rank]], contiguous -> [..., sum of widths] on rank 0, the ranks' side by side; elsewhere `x`.

        Raises RuntimeError when a rank is lost or late.
        """
        if self.rank:
            self._gloo.send([x], 0, 0).wait(self._timeout)
            return x
        parts = [x, *(torch.empty(*x.shape[:-1], width) for width in widths[1:])]
        waits = [self._gloo.recv([part], rank, 0) for rank, part in enumerate(parts) if rank]
        for wait in waits:
            wait.wait(self._timeout)
        return torch.cat(parts, dim=-1)
