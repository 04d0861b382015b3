"""What ranks that are started one by one, each on its own machine perhaps, say when they meet, and their sockets.

A rank connects to rank 0's address and says JOIN with a Hello. It hears WELCOME once all have come, or UNWELCOME with
the reason. The connection is then their Channel; it is neither authenticated nor encrypted, as the sums' are not.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers

from services.common.checkpoint import config_hash
from services.common.errors import StartError
from services.executor.ranks.messages import Channel

HELLO_BYTES = 4096
"""The most that a Hello may take: who sends more is no rank."""

_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 25_000,  # ms
}
"""A machine that is gone without a word is noticed within half a minute."""


@dataclass(frozen=True)
class Hello:
    """Who comes."""

    rank: int
    size: int
    version: str
    """Of all that the ranks must have alike, as `versions` tells it."""
    config_hash: str
    device: str = "cpu"
    """The kind that its tensors lie on."""

    @classmethod
    def of(cls, path: Path, rank: int, size: int, device: str = "cpu") -> Hello:
        """This process, serving the checkpoint at `path`."""
        return cls(rank, size, versions(), config_hash(path), device)


def versions() -> str:
    """Of what computes: ranks of different ones might not compute the same, or not understand each other."""
    return f"triptych {version('triptych')}, torch {torch.__version__}, transformers {transformers.__version__}"


def unfit(hello: Hello, own: Hello) -> str:
    """Why `hello` cannot be one of rank 0's group, `own`, and what to do; empty where it can."""
    who = f"rank {hello.rank}"
    if hello.size != own.size:
        return f"{who} has --tp-size {hello.size}, rank 0 {own.size}; start both with the same"
    if not 1 <= hello.rank < own.size:
        return f"{who} is none of ranks 1 to {own.size - 1}, which rank 0 waits for; give each its own --tp-rank"
    if hello.version != own.version:
        return f"{who} has {hello.version}; rank 0 has {own.version}; install the same on both"
    if hello.device != own.device:
        return f"{who} is on {hello.device}, rank 0 on {own.device}; give both the same kind of --device"
    if hello.config_hash != own.config_hash:
        return (
            f"{who} has a config.json that hashes to {hello.config_hash}, rank 0's to {own.config_hash}; give both the"
            " same checkpoint"
        )
    return ""


def split(address: str) -> tuple[str, int]:
    """HOST:PORT or [HOST]:PORT in its two parts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """A listener on that address and no other. Raises StartError."""
    host, port = split(address)
    try:
        ((family, _, _, _, where), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        raise StartError(
            f"rank 0 cannot listen on --tp-rendezvous {address}: {error.strerror or error}; name an address of its"
            " machine, and a port that is free"
        ) from error


def channel(connected: socket.socket) -> Channel:
    """The Channel over a connection, which is the Channel's from now on."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return Channel(Connection(connected.detach()))


def limit_reads(connected: socket.socket, seconds: float) -> None:
    """Lets a read that takes longer fail; 0: it may take any time. It holds for the socket's Channel too."""
    with contextlib.suppress(OSError):  # it is gone, which the next read will say
        whole, rest = divmod(seconds, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(rest * 1e6)))
