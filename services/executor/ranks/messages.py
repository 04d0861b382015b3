"""What rank 0 and a peer say to each other, over a pair of sockets that only the two of them hold, or over TCP.

A message is a kind and its bytes: JSON, a StepPlan of the contract as it came, or columns. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from services.executor.plan import Int64s


class Kind(IntEnum):
    """Of a message."""

    # From rank 0, in the order of its step thread.
    LOAD = 1
    """JSON: how the model is served. Answered by LOADED or REFUSED."""
    UNLOAD = 2
    """Answered by DONE, once the memory is free."""
    ALLOCATE = 3
    """JSON: num_blocks, kv_bytes. Answered by DONE."""
    PLAN = 4
    """A StepPlan; followed by what rank 0 scored and drew, where it does."""
    FAILED_SLOTS = 5
    """[n] little-endian int64"""
    DRAWN = 6
    """[rows] little-endian int64; -1 where a row failed. Empty of ranks on devices, who hear it there."""
    ABANDONED = 7
    """Rank 0 has begun the step and does not end it; an epoch ends with it."""
    RESET = 8
    WELCOME = 9
    """JSON: timeout_s, store_port. To a rank that was started elsewhere, once all of them have come."""
    UNWELCOME = 10
    """Text: why that rank cannot be one of the group. The last it is told."""
    END = 11
    """Text: why the group is over; empty where rank 0 ends in order. The last a peer is told."""
    SETTLED = 12
    """Rank 0 has taken in the oldest step that is not; of ranks on devices, which learn of it when rank 0 does."""
    MEASURE = 13
    """Every rank has its weights: what a step of full size takes is measured. Answered by MEASURED or REFUSED."""
    LOG_LEVEL = 14
    """JSON: level, logger, duration_s."""
    # From a peer.
    READY = 16
    PROGRESS = 17
    """JSON: stage, done_bytes, total_bytes."""
    LOADED = 18
    """JSON: block_bytes; of a rank with files and memory of its own also kv_bytes and weights_hash."""
    DONE = 19
    REFUSED = 20
    """Text: why it cannot load."""
    BROKEN = 21
    """Text: an error nobody expected. The last of a peer."""
    JOIN = 22
    """JSON: a Hello. The first of a rank that was started elsewhere."""
    MEASURED = 23
    """JSON: kv_bytes."""


class AbandonedError(Exception):
    """Rank 0 does not end the step."""


class EndedError(Exception):
    """The group is over: why, for people; empty where rank 0 ends in order."""


class Channel:
    """One end. One thread sends, one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Raises OSError when the other end is gone."""
        self._connection.send_bytes(bytes([kind]) + body)

    def send_json(self, kind: Kind, **fields: Any) -> None:
        """Raises OSError when the other end is gone."""
        self.send(kind, json.dumps(fields).encode())

    def receive(self, max_bytes: int | None = None) -> tuple[Kind, bytes]:
        """The next message, once it has come. Raises EOFError or OSError when the other end is gone, has not spoken in
        time where its socket has a limit, or sends more than `max_bytes`; ValueError for what is no message."""
        message = self._connection.recv_bytes(max_bytes)
        if not message:
            raise ValueError("an empty message")
        return Kind(message[0]), message[1:]

    def expect(self, kind: Kind) -> bytes:
        """The next message, which is of this kind. Raises AbandonedError, EndedError, or RuntimeError where it is of
        another."""
        got, body = self.receive()
        if got == Kind.END:
            raise EndedError(body.decode(errors="replace"))
        if got == Kind.ABANDONED:
            raise AbandonedError
        if got != kind:
            raise RuntimeError(f"{got.name} came where {kind.name} was due: the ranks are out of step")
        return body

    def close(self) -> None:
        """Both ends read an end of file from now on, also a thread that waits in `receive`."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def of_column(column: Int64s) -> bytes:
    """A column as it is sent."""
    return column.astype("<i8").tobytes()


def to_column(body: bytes) -> Int64s:
    """A column as it was sent."""
    return np.frombuffer(body, "<i8").astype(np.int64)
