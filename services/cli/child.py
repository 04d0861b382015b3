"""A `triptych` process that `triptych up` started, and that does not outlive it: `child PARENT_PID COMMAND ...`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from services.cli.main import main as command

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(argv: Sequence[str]) -> int:
    """Ties this process to its parent, then runs the command."""
    die_with(int(argv[0]))
    return command(argv[1:])


def die_with(parent_pid: int) -> None:
    """From here on the kernel kills this process when its parent is gone, however that ended. Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it had gone before
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
