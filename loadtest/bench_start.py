"""From `triptych up` to the first token, and where the time goes: `python -m loadtest.bench_start [--quick]`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest import command, report
from services.common.checkpoint import EMBEDDED_MODEL
from services.common.errors import StartError
from services.common.startup import StartTimes, read_line

REPETITIONS = 5
START_S = 300.0
STOP_S = 20.0
KEPT_LINES = 15
PROMPT = "Once upon a time"
SUPERVISOR = "triptych"
"""How `up` names itself in its output; the services go by their names."""


@dataclass
class Start:
    """One start: seconds since the command was run, the processes' own accounts, and the CPU time of them all."""

    ready_s: float = 0.0
    first_token_s: float = 0.0
    cpu_s: float = 0.0
    """User and system, of all four processes, their end included."""
    told: dict[str, StartTimes] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where the engine does not start."""
    options = _parser().parse_args(argv)
    return command.run("bench_start", _run(options), (StartError,))


async def _run(options: argparse.Namespace) -> None:
    facts = report.head("bench_start")
    times = 1 if options.quick else options.repetitions
    print(f"{options.model}: `triptych up` to the first token; one start before, then {times} measured\n", flush=True)
    starts = [await measure(["--model", options.model]) for _ in range(1 + times)][1:]
    print(table(starts), end="\n\n", flush=True)
    report.last_line(facts | {"model": options.model, "repetitions": times, "quick": options.quick} | values(starts))


async def measure(arguments: Sequence[str]) -> Start:
    """Runs `triptych up ARGUMENTS` on a free port until it has made a token. Raises StartError where it does not."""
    start = Start()
    cpu_before_s, begun_s = _children_cpu_s(), time.monotonic()
    async with _up(arguments, start) as address:
        start.ready_s = time.monotonic() - begun_s
        await _first_token(address)
        start.first_token_s = time.monotonic() - begun_s
    start.cpu_s = _children_cpu_s() - cpu_before_s
    return start


@asynccontextmanager
async def _up(arguments: Sequence[str], start: Start) -> AsyncIterator[str]:
    """The frontend's address, once a token can be made; ends all at exit."""
    own = ["up", "--port", "0", "--ready-json", "--parent", str(os.getpid())]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "services.cli.main", *own, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    reader = asyncio.create_task(_read(process.stderr, lines, start))
    try:
        try:
            told = await asyncio.wait_for(process.stdout.readline(), START_S)
        except TimeoutError:
            told = b""
        if (address := json.loads(told or "{}").get("address")) is None:  # it has ended, or its time is up
            await asyncio.wait({reader}, timeout=1)
            raise StartError("\n".join([f"no token could be made within {START_S:g} s; the last lines:", *lines]))
        yield address
    finally:
        await _end(process)
        await reader


async def _read(stream: asyncio.StreamReader, lines: deque[str], start: Start) -> None:
    async for raw in stream:
        line = raw.decode("utf-8", "replace").rstrip()
        lines.append(line)
        if (times := read_line(line)) is not None:
            start.told[line.partition("|")[0].strip()] = times


async def _end(process: asyncio.subprocess.Process) -> None:
    for signal_it in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            signal_it()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
            return


async def _first_token(address: str) -> None:
    request = inference_pb2.GenerateRequest(
        text=PROMPT,
        options=inference_pb2.Options(sampling=generation_pb2.Sampling(temperature=0), max_tokens=1),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async for message in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=START_S):
                if any(choice.token_ids for choice in message.choices):
                    return
        except grpc.aio.AioRpcError as error:
            raise StartError(f"the first token failed: {error.code().name}: {error.details()}") from None
    raise StartError("the stream ended without a token")


def _children_cpu_s() -> float:
    """Of children that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def values(starts: Sequence[Start]) -> dict[str, Any]:
    """Medians: of the whole, and of each part that a process told of."""
    whole = {
        "start_to_first_token_s": [one.first_token_s for one in starts],
        "start_to_ready_s": [one.ready_s for one in starts],
        "cpu_s": [one.cpu_s for one in starts],
    }
    return {key: report.middle(found) for key, found in (whole | _parts(starts)).items()}


def table(starts: Sequence[Start]) -> str:
    """A row a number: the whole first, then each process's parts in their order."""
    rows = [
        ("the command to the first token", report.spread([one.first_token_s for one in starts], 2)),
        ("the command to ready", report.spread([one.ready_s for one in starts], 2)),
        ("CPU time of the four processes", report.spread([one.cpu_s for one in starts], 2)),
    ]
    for service in starts[-1].told:
        whole = [one.told[service].total_s for one in starts if service in one.told]
        rows.append((f"{service}, its start to ready", report.spread(whole)))
        for part in starts[-1].told[service].parts_s:
            found = [one.told[service].parts_s.get(part) for one in starts if service in one.told]
            rows.append((f"  {part}", report.spread(found)))
    return report.table(("seconds: median (range)", ""), rows)


def _parts(starts: Sequence[Start]) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for service, times in starts[-1].told.items():
        for part in times.parts_s:
            key = f"{service}_{re.sub(r'[^a-z0-9]+', '_', part.lower())}_s"
            found[key] = [one.told[service].parts_s.get(part) for one in starts if service in one.told]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_start", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="without --quick (%(default)s)")
    parser.add_argument(
        "--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
