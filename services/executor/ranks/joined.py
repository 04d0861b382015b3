"""The process of a rank other than 0 that was started by itself: `triptych executor --tp-rank 1 --tp-rendezvous ...`.

It comes to rank 0 and does what it is told until the group ends. Its port serves health alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from services.common.errors import StartError
from services.common.server import Server
from services.executor.config import ExecutorConfig
from services.executor.device import Device
from services.executor.memory import Threads
from services.executor.ranks import meeting
from services.executor.ranks.follower import Apart, Follower, LeftError, Place
from services.executor.ranks.group import Group, group_of
from services.executor.ranks.meeting import Hello
from services.executor.ranks.messages import Channel, Kind

log = logging.getLogger(__name__)

_c10d: Any = torch.distributed  # its stubs lack what is used here
_RETRY_S = 0.5


def run(path: Path, settings: ExecutorConfig, threads: Threads, device: Device | None = None) -> None:
    """Returns when rank 0 ends in order, or after a signal. Raises StartError when the group ends otherwise."""
    asyncio.run(_serve(path, settings, threads, device))


async def _serve(path: Path, settings: ExecutorConfig, threads: Threads, device: Device | None) -> None:
    server = Server(settings.host, settings.port, access=settings.access())
    await server.start([])
    await server.health.set_ready(True)
    log.info("serving health of rank %d on %s:%d", settings.tp_rank, settings.host, server.port)
    following = asyncio.wrap_future(_in_thread(path, settings, threads, device))
    # Signalled with its group, it serves on until rank 0 has ended the steps in flight.
    serving = asyncio.create_task(server.run(lambda: _until(following), drain_s=settings.drain_s))
    await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        serving.cancel()
        await server.stop()
    if following.done() and not following.cancelled():
        following.result()


async def _until(following: asyncio.Future[None]) -> None:
    await asyncio.wait({following})


def _in_thread(path: Path, settings: ExecutorConfig, threads: Threads, device: Device | None) -> Future[None]:
    """Done when the rank is: a thread that hangs in a sum must not keep the process."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            _follow(path, settings, threads, device)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=work, name="rank", daemon=True).start()
    return done


def _follow(path: Path, settings: ExecutorConfig, threads: Threads, device: Device | None) -> None:
    rank, size = settings.tp_rank or 0, settings.tp_size
    hello = Hello.of(path, rank, size, "cpu" if device is None else device.kind)
    joined = join(str(settings.tp_rendezvous), hello, settings.rank_timeout_s)
    log.info("rank %d of %d has joined rank 0 at %s", rank, size, settings.tp_rendezvous)
    place = Place(str(path), rank, size, threads.count, joined.timeout_s, -1)
    if device is not None:
        place = replace(place, device=device.name, compile_mode=settings.compile)
    apart = Apart(lambda: joined.connect(rank, size, device), settings.kv_memory_bytes)
    try:
        Follower(place, joined.channel, apart, device).run()
    except LeftError as error:
        raise StartError(f"{error}; rank {rank} ends with its group, start it again") from error
    except Exception as error:
        log.error("rank %d has failed", rank, exc_info=error)
        raise StartError(f"rank {rank}: {type(error).__name__}: {error}; the group ends, start it again") from error
    log.info("rank 0 has ended, and this rank with it")


class Joined:
    """A rank's connection with rank 0, and what it was told there."""

    def __init__(self, channel: Channel, own_ip: str, rank_0_ip: str, timeout_s: float, store_port: int) -> None:
        self.channel = channel
        self.timeout_s = timeout_s
        self._own_ip = own_ip
        self._store = (rank_0_ip, store_port)

    def connect(self, rank: int, size: int, device: Device | None = None) -> Group:
        """This rank's end of the collectives. It listens on the address by which it reaches rank 0."""
        timeout = timedelta(seconds=self.timeout_s)
        store = _c10d.TCPStore(*self._store, size, is_master=False, timeout=timeout, wait_for_workers=False)
        return group_of(device)(store, rank, size, self.timeout_s, address=self._own_ip)


def join(address: str, hello: Hello, timeout_s: float) -> Joined:
    """Comes to rank 0, which may start later or begin again, and waits there until all have come.

    Raises StartError where it does not come about within `timeout_s`, or rank 0 refuses this rank.
    """
    until = time.monotonic() + timeout_s
    why = "nobody listens there"
    log.info("rank %d looks for rank 0 at %s", hello.rank, address)
    while (left_s := until - time.monotonic()) > 0:
        try:
            with contextlib.closing(socket.create_connection(meeting.split(address), left_s)) as connected:
                return _introduce(connected, hello, until)
        except TimeoutError:
            why = "it answered, and then the other ranks were waited for" if time.monotonic() >= until else "no answer"
        except (EOFError, OSError, ValueError) as error:
            why = str(error) or "it hung up"
        time.sleep(min(_RETRY_S, max(0.0, until - time.monotonic())))
    raise StartError(
        f"rank {hello.rank} has not met rank 0 at {address} within {timeout_s:g} s ({why}); start rank 0 with"
        " --tp-rank 0 and this --tp-rendezvous, and every other rank"
    )


def _introduce(connected: socket.socket, hello: Hello, until: float) -> Joined:
    """Raises StartError where rank 0 refuses it; EOFError or OSError where rank 0 leaves, or it takes too long."""
    own_ip, rank_0_ip = connected.getsockname()[0], connected.getpeername()[0]
    limited = connected.dup()
    channel = meeting.channel(connected)
    try:
        channel.send_json(Kind.JOIN, **asdict(hello))
        meeting.limit_reads(limited, max(0.001, until - time.monotonic()))
        try:
            kind, body = channel.receive()
        except BlockingIOError as error:
            raise TimeoutError from error
        if kind == Kind.UNWELCOME:
            raise StartError(f"rank 0 refuses this rank: {body.decode(errors='replace')}")
        if kind == Kind.END:
            raise EOFError(f"rank 0 has ended: {body.decode(errors='replace')}")
        if kind != Kind.WELCOME:
            raise ValueError(f"{kind.name} came where WELCOME was due")
        meeting.limit_reads(limited, 0)
        return Joined(channel, own_ip, rank_0_ip, **json.loads(body))
    except BaseException:
        channel.close()
        raise
    finally:
        limited.close()
