"""Rank 0's view of peers that were started by others, on machines of their own: they come to an address of rank 0."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from services.executor.device import Device
from services.executor.plan import RanksLostError
from services.executor.ranks import meeting
from services.executor.ranks.group import Group, group_of
from services.executor.ranks.meeting import Hello
from services.executor.ranks.messages import Channel, Kind
from services.executor.ranks.peers import Peer, Peers

log = logging.getLogger(__name__)

_c10d: Any = torch.distributed  # its stubs lack what is used here
_HELLO_S = 5.0
"""What a connection is given to say who it is."""
_LOOK_S = 0.2
"""How often a wait is looked up from."""


class JoiningPeers(Peers):
    """Ranks that are awaited at `address`, HOST:PORT, the one place that is listened on until all have come."""

    def __init__(self, path: Path, *, size: int, address: str, timeout_s: float, device: Device | None = None) -> None:
        """Listens at once, and waits on a thread of its own. Raises StartError where it cannot listen."""
        super().__init__(size, timeout_s, here=1, device=device)
        self._own = Hello.of(path, 0, size, "cpu" if device is None else device.kind)
        self._address = address
        self._listener = meeting.listen(address)
        self._listener.settimeout(_LOOK_S)
        self._lock = threading.Lock()
        self._came: dict[int, Peer] = {}
        self._own_ip = ""
        self._store: Any = None
        self._refused = ""
        self._all_here = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="ranks", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """That is listened on, while ranks are awaited."""
        return int(self._listener.getsockname()[1])

    def wait_ready(self) -> None:
        """As Peers'; what the others are given to come began when this object was made."""
        while not self._all_here.wait(_LOOK_S):
            if self.lost.done():
                raise RanksLostError(self.lost.result())
        super().wait_ready()

    def connect(self) -> Group:
        """As Peers'."""
        make = group_of(self.device)
        return make(self._store, 0, self.size, self.timeout_s, address=self._own_ip)

    def close(self) -> None:
        """As Peers'; also while ranks are still awaited."""
        self._closing = True
        self._thread.join()
        with self._lock:
            self._peers = self._peers or list(self._came.values())
        super().close()

    def _wait_for_ends(self) -> None:
        """They end by themselves: their processes are others' to kill."""

    def _wait(self) -> None:
        try:
            self._await_all()
        except Exception as error:
            log.error("ranks are not awaited any more", exc_info=error)
            self._lose(f"rank 0: {type(error).__name__}: {error}")

    def _await_all(self) -> None:
        log.info("rank 0 waits at %s for ranks 1 to %d", self._address, self.size - 1)
        until = time.monotonic() + self.timeout_s
        with self._listener:
            while not self._closing and not self.lost.done():
                with self._lock:
                    missing = sorted(set(range(1, self.size)) - self._came.keys())
                    if not missing:
                        self._welcome()
                        return
                if time.monotonic() > until:
                    self._lose(self._late(missing))
                    return
                try:
                    connected, came_from = self._listener.accept()
                except TimeoutError:
                    continue
                self._admit(connected, came_from[0])

    def _late(self, missing: list[int]) -> str:
        who = ", ".join(f"rank {rank}" for rank in missing)
        return (
            f"{who} did not come to {self._address} within {self.timeout_s:g} s"
            f"{f' (the last that came was refused: {self._refused})' if self._refused else ''}; start each with"
            " --tp-rank and this --tp-rendezvous"
        )

    def _admit(self, connected: socket.socket, came_from: str) -> None:
        """Hears who has come, and keeps or refuses it."""
        own_ip = connected.getsockname()[0]
        meeting.limit_reads(connected, _HELLO_S)
        limited = connected.dup()
        peer_channel = meeting.channel(connected)
        try:
            kind, body = peer_channel.receive(meeting.HELLO_BYTES)
            if kind != Kind.JOIN:
                raise ValueError(f"{kind.name} is no JOIN")
            hello = Hello(**json.loads(body))
            reason = meeting.unfit(hello, self._own)
        except (EOFError, OSError, ValueError, TypeError) as error:
            log.warning("%s came to %s and is no rank: %s", came_from, self._address, error)
            peer_channel.close()
            return
        finally:
            meeting.limit_reads(limited, 0)
            limited.close()
        with self._lock:
            if not reason and hello.rank in self._came:
                reason = f"rank {hello.rank} is here already; give each its own --tp-rank"
            if not reason:
                self._own_ip = self._own_ip or own_ip
                self._came[hello.rank] = Peer(hello.rank, peer_channel, _Elsewhere(), self._on_end_of(hello.rank))
                log.info("rank %d has come from %s", hello.rank, came_from)
                return
        self._refused = reason
        log.error("%s came to %s and is refused: %s", came_from, self._address, reason)
        _refuse(peer_channel, reason)

    def _welcome(self) -> None:
        """All are here: they are told where the store is, by which the collectives find one another."""
        host = self._listener.getsockname()[0]
        store = socket.create_server((host, 0), family=self._listener.family)
        port = store.getsockname()[1]
        self._store = _c10d.TCPStore(
            self._own_ip,
            port,
            self.size,
            is_master=True,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
            master_listen_fd=store.detach(),
        )
        self._peers = [self._came[rank] for rank in range(1, self.size)]
        self._all_here.set()
        try:
            self.tell_json(Kind.WELCOME, timeout_s=self.timeout_s, store_port=port)
        except RanksLostError:
            return  # which is told already

    def _on_end_of(self, rank: int) -> Any:
        def ended(reason: str) -> None:
            with self._lock:
                if not self._all_here.is_set():
                    log.warning("%s before all ranks had come; it may come again", reason)
                    self._came.pop(rank, None)
                    return
            self._on_end(reason)

        return ended


class _Elsewhere:
    """Where a peer runs that is not ours to end."""

    def wait(self, timeout: float) -> int:
        """Its connection is all that is known of it."""
        raise subprocess.TimeoutExpired("a rank elsewhere", timeout)

    def kill(self) -> None:
        """It ends when its connection does."""


def _refuse(peer_channel: Channel, reason: str) -> None:
    try:
        peer_channel.send(Kind.UNWELCOME, reason.encode())
    except OSError:
        log.debug("it has left before it was told")
    peer_channel.close()
