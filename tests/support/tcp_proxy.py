"""A TCP proxy on loopback that does to connections what networks do: cuts them, swallows what they carry, slows it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 16 * 1024
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: a close is then a reset, and what was on its way is lost."""


class TcpProxy:
    """Forwards what comes at `port` to 127.0.0.1:`target_port`, as long as its switches let it."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port = port
        self.target_port = target_port
        self.delay_s = 0.0
        """Of each chunk, one way."""
        self.bytes_per_s: float | None = None
        self.num_cut = 0
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._links, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection."""
        for task, writers in list(self._links.items()):
            self.num_cut += 1
            for writer in writers:
                with contextlib.suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            task.cancel()

    def swallow(self) -> None:
        """Connections stay, and carry nothing any more; new ones are taken, and carry nothing either."""
        self._flows.clear()

    def heal(self) -> None:
        """What waits is carried on."""
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links[task] = [writer]
        try:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._links[task].append(onward_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, onward_writer))
                both.create_task(self._carry(onward_reader, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # either side is gone, and so is the other
        finally:
            for each in self._links.pop(task):
                each.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.bytes_per_s:
                await asyncio.sleep(len(chunk) / self.bytes_per_s)
            await self._flows.wait()
            writer.write(chunk)
            await writer.drain()
        raise ConnectionResetError("one side has ended")
