"""Executors of several ranks in one process: the peers are threads, all else is as it is between processes."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.executor.device import Device
from services.executor.ranks.device_leading import LeadingDeviceExecutor
from services.executor.ranks.follower import Follower, LeftError, Place
from services.executor.ranks.leader import LeadingExecutor
from services.executor.ranks.messages import Channel
from services.executor.ranks.peers import ChildPeers
from tests.executor.shim_device import ShimDevice


class RankThread:
    """A peer, in the place of its process."""

    def __init__(self, place: Place, connection: Connection, log_level: str, device: Device | None = None) -> None:
        channel = Channel(Connection(os.dup(connection.fileno())))

        def run() -> None:
            try:
                Follower(place, channel, device=device).run()
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


def device_ranks(
    *on: ShimDevice, timeout_s: float = 60.0, made: list[Any] | None = None, **options: Any
) -> Callable[..., LeadingDeviceExecutor]:
    """As `ranks`, a shim a rank; gloo carries what NCCL would. `made` gets the executor, `options` are its own."""

    def start(place: Place, connection: Connection, log_level: str) -> RankThread:
        return RankThread(place, connection, log_level, on[place.rank])

    def make(path: Path, *, threads: int, kv_memory_bytes: int | None) -> LeadingDeviceExecutor:
        own = {"compile_mode": "off", "kv_memory_bytes": kv_memory_bytes, **options}
        places = [{"device": f"cuda:{rank}", **_of_place(own)} for rank in range(len(on))]
        peers = ChildPeers(
            path, size=len(on), threads=threads, timeout_s=timeout_s, device=on[0], on_devices=places, start=start
        )
        executor = LeadingDeviceExecutor(path, peers=peers, device=on[0], threads=threads, sampler_threads=64, **own)
        if made is not None:
            made.append(executor)
        return executor

    return make


def _of_place(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("compile_mode", "kv_memory_bytes")}
