"""Rank 0's view of its peers: their processes, what they are told and answer, and the first sign that one is lost."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from services.executor.device import Device
from services.executor.plan import Int64s, RanksLostError
from services.executor.ranks.follower import Place
from services.executor.ranks.group import Group, group_of_children
from services.executor.ranks.messages import Channel, Kind, of_column

_START_S = 300.0
"""What a peer is given to import what it needs, on a machine that does other things too."""
_END_S = 2.0
"""What a peer is given to end by itself once its channel is closed; one that waits for rank 0's sum does not."""
_REASON_S = 2.0
"""What the sign of a lost peer is waited for, when a collective has failed: it says more than the collective."""

log = logging.getLogger(__name__)


class Running(Protocol):
    """Where a peer runs: a process, or in tests a thread."""

    def wait(self, timeout: float) -> int:
        """Its exit status, negative for a signal. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Ends it at once."""


Start = Callable[[Place, Connection, str], Running]
OnProgress = Callable[[int, dict[str, Any]], None]
"""Gets a rank and the fields of its PROGRESS."""


class Peers:
    """All ranks but 0. Of its methods, `close` may be called from anywhere, the others by one thread at a time."""

    def __init__(self, size: int, timeout_s: float, *, here: int, device: Device | None = None) -> None:
        """`here` of the `size` ranks, 0 included, share this machine's memory and CPUs; `device` is rank 0's, None the
        CPU."""
        self.size = size
        self.timeout_s = timeout_s
        self.here = here
        self.device = device
        self.lost: Future[str] = Future()
        """Done once the group is: why, for people."""
        self._loss = threading.Lock()
        self._closing = False
        self._peers: list[Peer] = []

    def connect(self) -> Group:
        """Rank 0's end of the collectives, once the others connect too. Raises RuntimeError where one does not."""
        raise NotImplementedError

    def tell(self, kind: Kind, body: bytes = b"") -> None:
        """Says the same to all. Raises RanksLostError."""
        for peer in self._peers:
            try:
                peer.channel.send(kind, body)
            except OSError as error:
                raise self.lose(f"rank {peer.rank} cannot be reached: {error}") from error

    def tell_json(self, kind: Kind, **fields: object) -> None:
        """Says the same to all. Raises RanksLostError."""
        self.tell(kind, json.dumps(fields).encode())

    def tell_column(self, kind: Kind, column: Int64s) -> None:
        """Says the same to all. Raises RanksLostError."""
        self.tell(kind, of_column(column))

    def wait_ready(self) -> None:
        """Waits until all have started; once. Raises RanksLostError where one does not."""
        for peer in self._peers:
            self._answer(peer, max(_START_S, self.timeout_s))

    def answers(self) -> list[tuple[int, Kind, bytes]]:
        """The next answer of each rank. Raises RanksLostError where one is gone, or silent for longer than allowed."""
        return [(peer.rank, *self._answer(peer, self.timeout_s)) for peer in self._peers]

    def on_progress(self, call: OnProgress | None) -> None:
        """Sets who hears of progress from now on, on threads of this object."""
        for peer in self._peers:
            peer.on_progress = call

    def lose(self, reason: str, *, wait: bool = True) -> RanksLostError:
        """Gives the group up, and returns the error to raise.

        What a peer says of its end wins over `reason`; with `wait` it has a moment to, since a broken sum is heard of
        before who broke it.
        """
        if wait:
            with contextlib.suppress(FutureTimeoutError):
                self.lost.result(_REASON_S)
        self._lose(reason)
        return RanksLostError(self.lost.result())

    def close(self) -> None:
        """Ends all, and tells them why."""
        self._closing = True
        reason = self.lost.result() if self.lost.done() else ""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.channel.send(Kind.END, reason.encode())
            peer.channel.close()
        self._wait_for_ends()

    def _wait_for_ends(self) -> None:
        """One that does not end by itself is killed."""
        for peer in self._peers:
            try:
                peer.running.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.info("rank %d does not end; it is killed", peer.rank)
                peer.running.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    peer.running.wait(_END_S)
            peer.thread.join(_END_S)

    def _answer(self, peer: Peer, timeout_s: float) -> tuple[Kind, bytes]:
        asked_at = time.monotonic()
        while (left_s := max(asked_at, peer.heard_at) + timeout_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                if (answer := peer.answers.get(timeout=left_s)) is None:
                    raise self.lose(f"rank {peer.rank} has ended")
                return answer
        raise self.lose(f"rank {peer.rank} has said nothing for {timeout_s:g} s")

    def _on_end(self, reason: str) -> None:
        if not self._closing:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        with self._loss:
            if not self.lost.done():
                log.error("the ranks are lost: %s", reason)
                self.lost.set_result(reason)


class ChildPeers(Peers):
    """Processes that this one starts, on this machine."""

    def __init__(
        self,
        path: Path,
        *,
        size: int,
        threads: int,
        timeout_s: float,
        log_level: str = "info",
        log_format: str = "text",
        device: Device | None = None,
        on_devices: Sequence[Mapping[str, Any]] = (),
        start: Start | None = None,
    ) -> None:
        """Starts them; they get ready by themselves. Call it from the main thread, which they must not outlive.

        `on_devices`: by rank, what a Place says of its device, where `device` is rank 0's.
        """
        super().__init__(size, timeout_s, here=size, device=device)
        self._rendezvous_fd = os.memfd_create("triptych-rendezvous")
        for rank in range(1, size):
            place = Place(str(path), rank, size, threads, timeout_s, self._rendezvous_fd, log_format=log_format)
            if on_devices:
                place = replace(place, **on_devices[rank])
            ours, theirs = Pipe()
            running = (start or start_process)(place, theirs, log_level)
            theirs.close()
            self._peers.append(Peer(rank, Channel(ours), running, self._on_end))

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [peer.running.pid for peer in self._peers if isinstance(peer.running, subprocess.Popen)]

    def connect(self) -> Group:
        """As Peers'."""
        return group_of_children(self._rendezvous_fd, 0, self.size, self.timeout_s, self.device)


class Peer:
    """One of them, and the thread that listens to it."""

    def __init__(self, rank: int, channel: Channel, running: Running, on_end: Callable[[str], None]) -> None:
        self.rank = rank
        self.channel = channel
        self.running = running
        self.heard_at = time.monotonic()
        self.answers: queue.SimpleQueue[tuple[Kind, bytes] | None] = queue.SimpleQueue()
        self.on_progress: OnProgress | None = None
        self._on_end = on_end
        self.thread = threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        reason = ""
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, body = self.channel.receive()
                self.heard_at = time.monotonic()
                if kind == Kind.BROKEN:
                    reason = f"rank {self.rank}: {body.decode(errors='replace')}"
                elif kind == Kind.PROGRESS:
                    if (call := self.on_progress) is not None:
                        call(self.rank, json.loads(body))
                else:
                    self.answers.put((kind, body))
        self._on_end(reason or f"rank {self.rank} {self._ending()}")
        self.answers.put(None)

    def _ending(self) -> str:
        try:
            code = self.running.wait(_REASON_S)
        except subprocess.TimeoutExpired:
            return "has closed its channel"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def start_process(place: Place, connection: Connection, log_level: str) -> Running:
    """A process of its own, by exec; the kernel ends it when this thread does."""
    fds = (connection.fileno(), place.rendezvous_fd)
    arguments = (str(os.getpid()), str(connection.fileno()), log_level, json.dumps(asdict(place)))
    return subprocess.Popen(
        # -P: a folder `services` where the user stands must not be taken for ours.
        [sys.executable, "-P", "-m", "services.executor.ranks.main", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,  # a terminal's Ctrl-C reaches rank 0 alone, which ends the others in order
    )
