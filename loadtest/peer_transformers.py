"""transformers' continuous batching as a peer, asked over a pipe."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest import peer_process
from loadtest.open_loop import Ask, CallError
from loadtest.workload import Planned
from services.common.errors import StartError

START_S = 120.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
_SERVER = Path(__file__).with_name("transformers_server.py")


@asynccontextmanager
async def serving(python: Path, model: Path) -> AsyncIterator[Ask]:
    """Starts the peer in that environment. Raises StartError with its last lines."""
    # -P: the folder of the script holds modules of ours, which the peer must not find.
    command = [str(python), "-P", str(_SERVER), str(model)]
    async with peer_process.running(command, ENVIRONMENT, pipe=True) as peer:
        pipe = _Pipe(peer)
        reader = asyncio.create_task(pipe.read())
        try:
            ready = asyncio.create_task(pipe.ready.wait())
            await asyncio.wait({ready, reader}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if not pipe.ready.is_set():
                raise StartError("\n".join(["transformers has not started; its last lines:", *peer.lines]))
            yield pipe.ask
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


class _Pipe:
    """Who waits for which request's answers."""

    def __init__(self, peer: peer_process.PeerProcess) -> None:
        self._peer = peer
        self._waiting: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self.ready = asyncio.Event()

    async def read(self) -> None:
        """Hands each line to its request, to the end; then every request has failed."""
        assert self._peer.process.stdout is not None
        async for line in self._peer.process.stdout:
            said = json.loads(line)
            if "ready" in said:
                self.ready.set()
            elif (queue := self._waiting.get(said["id"])) is not None:
                queue.put_nowait(said)
        for queue in self._waiting.values():
            queue.put_nowait({"error": "the process ended: " + " / ".join(list(self._peer.lines)[-3:])})

    async def ask(self, request: Planned, left_s: float) -> AsyncIterator[int]:
        """As open_loop.Ask."""
        number = next(self._numbers)
        queue = self._waiting[number] = asyncio.Queue()
        stdin = self._peer.process.stdin
        assert stdin is not None
        asked = {"id": number, "prompt_ids": request.prompt_ids, "output_tokens": request.output_tokens}
        stdin.write(json.dumps(asked).encode() + b"\n")
        had = 0
        try:
            async with asyncio.timeout(left_s):
                while had < request.output_tokens:
                    said = await queue.get()
                    if "error" in said:
                        raise CallError("PEER", said["error"])
                    if said["count"] > had:
                        yield said["count"] - had
                        had = said["count"]
        finally:
            del self._waiting[number]
