"""One of several frontend processes on a port, as `workers.py` starts it: `worker PARENT_PID PORT METRICS_FD FLAGS`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from services.common import collector, logs
from services.common.dying import die_with
from services.common.errors import StartError

COULD_NOT_SERVE = os.EX_CONFIG
"""Exit code of a process that found a reason in its configuration: another try finds it again. A crash exits with 1."""


NO_METRICS = "-"
"""Instead of a file descriptor."""


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM, and never outlives the process that started it; its exit code."""
    die_with(int(argv[0]))
    collector.hold()
    from services.frontend.main import serve_one  # late: the parent may be gone by now
    from services.frontend.worker_metrics import inherited

    try:
        metrics = inherited(int(argv[2])) if argv[2] != NO_METRICS else None
        return serve_one(argv[3:], shared_port=int(argv[1]), metrics=metrics)
    except StartError as error:
        logs.fatal(str(error))
        return COULD_NOT_SERVE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
