"""Executors of several ranks in one process: the peers are threads, all else is as it is between processes."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from services.executor.ranks.follower import Follower, LeftError, Place
from services.executor.ranks.leader import LeadingExecutor
from services.executor.ranks.messages import Channel
from services.executor.ranks.peers import ChildPeers


class RankThread:
    """A peer, in the place of its process."""

    def __init__(self, place: Place, connection: Connection, log_level: str) -> None:
        channel = Channel(Connection(os.dup(connection.fileno())))

        def run() -> None:
            try:
                Follower(place, channel).run()
            except LeftError:
                pass
            except BaseException:
                self.failed = True
            gc.collect()  # what ends with a process: its connections with the other ranks
            channel.close()

        self.failed = False
        self._thread = threading.Thread(target=run, name=f"peer-{place.rank}", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a thread", timeout)
        return int(self.failed)

    def kill(self) -> None:
        """A thread cannot be: one that waits for a sum goes on until that is given up."""


def ranks(size: int, timeout_s: float = 60.0) -> Callable[..., LeadingExecutor]:
    """What makes an executor of `size` ranks, as `serve(make=...)` takes it."""

    def make(path: Path, *, threads: int, kv_memory_bytes: int) -> LeadingExecutor:
        peers = ChildPeers(path, size=size, threads=threads, timeout_s=timeout_s, start=RankThread)
        return LeadingExecutor(path, peers=peers, threads=threads, kv_memory_bytes=kv_memory_bytes)

    return make
