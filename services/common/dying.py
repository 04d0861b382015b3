"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent_pid: int) -> None:
    """From here on the kernel kills this process when its parent is gone, however that ended. Linux.

    It follows the parent's thread that started this process, which is to be the main one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it had gone before
        os._exit(1)
