"""A `triptych` process that `triptych up` started, and that does not outlive it: `child PARENT_PID COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.cli.main import main as command
from services.common.dying import die_with


def main(argv: Sequence[str]) -> int:
    """Ties this process to its parent, then runs the command."""
    die_with(int(argv[0]))
    return command(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
