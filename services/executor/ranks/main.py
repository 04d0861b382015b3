"""The process of a rank other than 0: `main PARENT_PID CHANNEL_FD LOG_LEVEL PLACE`, as Peers starts it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from services.common import logs
from services.common.dying import die_with
from services.executor.ranks.follower import Follower, LeftError, Place
from services.executor.ranks.messages import Channel


def main(argv: Sequence[str]) -> int:
    """Ends with rank 0, however that ends, and by nothing that rank 0 could still need it for."""
    parent_pid, channel_fd, log_level, place_json = argv
    die_with(int(parent_pid))
    # A supervisor may signal all processes of a service; rank 0 finishes its step first and then closes the channel.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    place = Place(**json.loads(place_json))
    # It does what rank 0 says that it does: only what goes wrong here is worth a line.
    level = "warning" if log_level == "info" else log_level
    logs.setup(f"executor rank {place.rank}", level, place.log_format)
    with contextlib.suppress(LeftError):
        Follower(place, Channel(Connection(int(channel_fd)))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
