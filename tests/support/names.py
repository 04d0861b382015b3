"""A DNS server on loopback: every name has the addresses that a test gives it."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

_HEADER_BYTES = 12
_ANSWER_FLAGS = 0x8180
"""A response, without an error."""
_TYPE_A = 1
_CLASS_IN = 1
_NAME_OF_QUESTION = 0xC00C
"""A pointer to the name that stands after the header."""


class Names(asyncio.DatagramProtocol):
    """Answers A queries with `addresses`, to be held for no time; other types have no records."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    @property
    def authority(self) -> str:
        """HOST:PORT, for targets such as dns://AUTHORITY/name:port."""
        host, port = self._transport.get_extra_info("sockname")
        return f"{host}:{port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, query: bytes, sender: tuple[str, int]) -> None:
        question_end = query.index(0, _HEADER_BYTES) + 5  # the name's end, type, class
        question = query[_HEADER_BYTES:question_end]
        (asked,) = struct.unpack("!H", question[-4:-2])
        found = self.addresses if asked == _TYPE_A else []
        header = query[:2] + struct.pack("!5H", _ANSWER_FLAGS, 1, len(found), 0, 0)
        self._transport.sendto(header + question + b"".join(map(_record, found)), sender)


def _record(address: str) -> bytes:
    packed = ipaddress.IPv4Address(address).packed
    return struct.pack("!HHHIH", _NAME_OF_QUESTION, _TYPE_A, _CLASS_IN, 0, len(packed)) + packed


@asynccontextmanager
async def naming(*addresses: str) -> AsyncIterator[Names]:
    """Serves until it is left."""
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(lambda: Names(*addresses), local_addr=("127.0.0.1", 0))
    try:
        yield names
    finally:
        transport.close()
