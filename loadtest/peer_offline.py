"""Engines as libraries: a script in a peer's own Python makes a model's tokens without a server between.

A script reads lines of JSON, {"requests": [{"prompt_ids": [...], "output_tokens": 64}, ...]}, each a burst, and writes
{"ready": true} once it has loaded, then for each burst {"token_s": [[...], ...]}: by request, seconds after the burst's
start at which its ids came. It has no part of Triptych, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest import alone, peer_process, peer_vllm, workload
from loadtest.open_loop import Outcome
from loadtest.serve_load import LoadError, Run
from services.common.errors import StartError

START_S = 300.0
BURST_S = 300.0
VLLM_SCRIPT = Path(__file__).with_name("vllm_offline.py")
LLAMACPP_SCRIPT = Path(__file__).with_name("llamacpp_offline.py")


@asynccontextmanager
async def vllm(python: Path, model: Path) -> AsyncIterator[Run]:
    """vLLM's CPU build at its best settings. Raises StartError with its last lines."""
    # Its own tools first.
    path = {"PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])}
    arguments = [str(model), str(peer_vllm.MAX_SEQS)]
    async with running("vllm", python, VLLM_SCRIPT, arguments, peer_vllm.ENVIRONMENT | path) as run:
        yield run


@asynccontextmanager
async def llamacpp(python: Path, threads: int) -> AsyncIterator[Run]:
    """llama.cpp on the 4-bit file of the embedded model, which its environment has. Raises StartError."""
    async with running("llamacpp", python, LLAMACPP_SCRIPT, [str(threads)], {"PYTHONUNBUFFERED": "1"}) as run:
        yield run


@asynccontextmanager
async def running(
    name: str, python: Path, script: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[Run]:
    """Starts the script in that environment. Raises StartError with its last lines."""
    # -P: the folder of the script holds modules of ours, which the peer must not find.
    async with peer_process.running([str(python), "-P", str(script), *arguments], environment, pipe=True) as peer:
        said = await _line(peer, START_S)
        if said is None or not said.get("ready"):
            raise StartError("\n".join([f"{name} has not started; its last lines:", *await peer.last_lines()]))

        async def run(plan: workload.Plan) -> list[Outcome]:
            requests = [{"prompt_ids": one.prompt_ids, "output_tokens": one.output_tokens} for one in plan.requests]
            assert peer.process.stdin is not None
            peer.process.stdin.write(json.dumps({"requests": requests}).encode() + b"\n")
            said = await _line(peer, BURST_S)
            if said is None:
                raise LoadError("\n".join([f"{name} did not answer; its last lines:", *await peer.last_lines()]))
            return alone.outcomes(plan, said["token_s"])

        yield run


async def _line(peer: peer_process.PeerProcess, limit_s: float) -> dict[str, Any] | None:
    """What it says next; None: nothing in time, or it has ended."""
    assert peer.process.stdout is not None
    try:
        async with asyncio.timeout(limit_s):
            line = await peer.process.stdout.readline()
    except TimeoutError:
        return None
    said: dict[str, Any] | None = json.loads(line) if line else None
    return said
