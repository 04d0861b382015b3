"""From an engine's send to a client's receipt, through a frontend: `python -m loadtest.bench_frontend [--quick]`.

128 streams of 40 tokens a second each, all of a step in one message from the engine, one message a token to the client;
the same with coalescing, and with more frontend processes on one port. Engine and client are this process, so both read
one clock. A delta's delay is that of its newest id.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from triptych.inference.v1 import generation_pb2, inference_pb2

from loadtest import command, peer_process, pipeline, report
from loadtest.paced_engine import FIRST_ID, NUM_IDS, PacedEngine
from loadtest.pipeline import StreamError
from services.common.checkpoint import EMBEDDED_MODEL, find, read_config
from services.common.errors import StartError

STREAMS = 128
TOKENS_PER_S = 40.0
TOKENS = 240
SKIPPED_TOKENS = 40
"""Of each stream, its start: prompts are being read then."""
MIN_DELTA_TOKENS = 8
REPETITIONS = 5
CHANNELS = 16
"""Connections of the client: frontend processes that share a port are given connections, not calls."""
METHOD = "/triptych.inference.v1.InferenceService/Generate"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Way:
    """What is measured: a row of the table."""

    name: str
    key: str
    processes: int = 1
    streams_factor: int = 1
    coalesced: bool = False


WAYS = (
    Way("1 process", "delivery"),
    Way("1 process, coalesced", "delivery_coalesced", coalesced=True),
    Way("2 processes", "delivery_2_processes", processes=2),
    Way("1 process, twice the streams", "delivery_double", streams_factor=2),
    Way("2 processes, twice the streams", "delivery_double_2_processes", processes=2, streams_factor=2),
)


@dataclass(frozen=True)
class Run:
    """One repetition: delays of all deltas past the start, and what the frontend's processes worked."""

    delays_ms: list[float]
    tokens: int
    span_s: float
    cpu_s: float

    def at(self, percent: float) -> float | None:
        """A percentile of the delays."""
        return report.percentile(self.delays_ms, percent)

    @property
    def cpu_us_per_token(self) -> float:
        """Of all frontend processes together."""
        return 1e6 * self.cpu_s / self.tokens


@dataclass(frozen=True)
class Frontends:
    """Processes that share an address."""

    address: str
    pids: tuple[int, ...]


@dataclass
class Found:
    """The repetitions of each way."""

    runs: dict[Way, list[Run]] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where a process does not start or a stream fails."""
    return command.run("bench_frontend", _run(_parser().parse_args(argv)), (StartError, StreamError))


async def _run(options: argparse.Namespace) -> None:
    facts = report.head("bench_frontend")
    times = 1 if options.quick else options.repetitions
    print(
        f"{options.model}: {options.streams} streams of {options.tokens} tokens, {options.tokens_per_s:g} a second; "
        f"engine and client on the same cores; coalesced: {MIN_DELTA_TOKENS} ids a message; repetitions: {times}\n",
        flush=True,
    )
    found = await measure(options, times)
    print(f"{_table(found)}\n", flush=True)
    settings = {"model": options.model, "streams": options.streams, "tokens_per_s": options.tokens_per_s}
    report.last_line(facts | settings | {"repetitions": times, "quick": options.quick} | values(found))


async def measure(options: argparse.Namespace, times: int) -> Found:
    """All repetitions of all ways, in turn, so that a noisy minute is not one way's alone."""
    found = Found({way: [] for way in WAYS})
    folder = find(options.model)
    async with AsyncExitStack() as stack:
        vocab_size = read_config(folder).vocab_size or FIRST_ID + NUM_IDS
        paced = PacedEngine(step_s=1 / options.tokens_per_s, vocab_size=vocab_size)
        engine = await stack.enter_async_context(paced)
        served = {
            processes: await stack.enter_async_context(frontends(folder, engine, processes))
            for processes in sorted({way.processes for way in WAYS})
        }
        for frontend in served.values():
            await measure_once(engine, frontend, streams=options.streams, tokens=8, skipped=0)
        for _ in range(times):
            for way in WAYS:
                run = await measure_once(
                    engine,
                    served[way.processes],
                    streams=options.streams * way.streams_factor,
                    tokens=options.tokens,
                    skipped=options.skipped_tokens,
                    min_delta_tokens=MIN_DELTA_TOKENS if way.coalesced else 0,
                )
                found.runs[way].append(run)
                told = f"{way.name}: p50 {run.at(50):.1f} ms, p99 {run.at(99):.1f} ms"
                print(f"loadtest.bench_frontend: {told}", file=sys.stderr, flush=True)
    return found


@asynccontextmanager
async def frontends(folder: Path, engine: PacedEngine, processes: int) -> AsyncIterator[Frontends]:
    """So many frontend processes on one port, ready. Raises StartError."""
    port = peer_process.free_port()
    flags = ["--model", str(folder), "--engine", engine.address, "--port", str(port), "--log-level", "warning"]
    own = ["--workers", str(processes)] if processes > 1 else []
    async with pipeline.ours([sys.executable, "-m", "services.cli.main", "frontend", *flags, *own]) as process:
        address = f"127.0.0.1:{port}"
        await pipeline.ready(address, {"frontend": process})
        pid = process.process.pid
        yield Frontends(address, _children(pid) if processes > 1 else (pid,))


async def measure_once(
    engine: PacedEngine, served: Frontends, *, streams: int, tokens: int, skipped: int, min_delta_tokens: int = 0
) -> Run:
    """All streams at once. Raises StreamError."""
    options = inference_pb2.Options(
        sampling=generation_pb2.Sampling(temperature=0),
        max_tokens=tokens,
        ignore_eos=True,
        min_delta_tokens=min_delta_tokens,
    )
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(served.address, [("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(min(CHANNELS, streams))
        ]
        start_cpu_s, start_s = sum(map(pipeline.cpu_seconds, served.pids)), time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                received = await asyncio.gather(
                    *(_stream(channels[number % len(channels)], number, options) for number in range(streams))
                )
        except grpc.aio.AioRpcError as error:
            raise StreamError(f"a stream failed, {error.code().name}: {error.details()}") from None
        except TimeoutError:
            raise StreamError(f"the streams had not ended after {TIMEOUT_S:g} s") from None
        span_s = time.perf_counter() - start_s
        cpu_s = sum(map(pipeline.cpu_seconds, served.pids)) - start_cpu_s
    delays_ms: list[float] = []
    for number, messages in enumerate(received):
        delays_ms += _delays_ms(engine, number, messages, tokens, skipped)
    return Run(delays_ms, streams * tokens, span_s, cpu_s)


async def _stream(channel: grpc.aio.Channel, number: int, options: inference_pb2.Options) -> list[tuple[float, bytes]]:
    """When each message came, and its bytes: they are read once nothing is measured any more."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[number + 1, 64, 65]), options=options)
    call: Any = channel.unary_stream(METHOD, request_serializer=inference_pb2.GenerateRequest.SerializeToString)(
        request
    )
    received = []
    while (message := await call.read()) is not grpc.aio.EOF:
        received.append((time.perf_counter(), message))
    return received


def _delays_ms(
    engine: PacedEngine, number: int, messages: Sequence[tuple[float, bytes]], tokens: int, skipped: int
) -> list[float]:
    """Of each delta's newest id, from `skipped` on. Raises StreamError where ids are missing."""
    delays_ms, position = [], 0
    for received_s, message in messages:
        for choice in inference_pb2.GenerateResponse.FromString(message).choices:
            position += len(choice.token_ids)
            if choice.token_ids and position > skipped:
                delays_ms.append(1000 * (received_s - engine.sent_s(number + 1, position - 1)))
    if position != tokens:
        raise StreamError(f"{position} ids came of a stream of {tokens}")
    return delays_ms


def _children(pid: int) -> tuple[int, ...]:
    """Of a process's main thread, proc(5)."""
    return tuple(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def values(found: Found) -> dict[str, Any]:
    """Medians over the repetitions."""
    flat: dict[str, Any] = {}
    for way, runs in found.runs.items():
        flat[f"{way.key}_p50_ms"] = report.middle([run.at(50) for run in runs])
        flat[f"{way.key}_p99_ms"] = report.middle([run.at(99) for run in runs])
        flat[f"{way.key}_frontend_cpu_us_per_token"] = report.middle([run.cpu_us_per_token for run in runs])
    return flat


def _table(found: Found) -> str:
    rows = [
        (
            way.name,
            report.spread([run.at(50) for run in runs]),
            report.spread([run.at(99) for run in runs]),
            report.spread([run.tokens / run.span_s for run in runs], 0),
            report.spread([run.cpu_us_per_token for run in runs], 0),
        )
        for way, runs in found.runs.items()
    ]
    return report.table(("median (range)", "p50 ms", "p99 ms", "tokens/s", "frontend CPU us a token"), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_frontend", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="one repetition")
    add("--repetitions", type=int, default=REPETITIONS, help="without --quick (%(default)s)")
    add("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)")
    add("--streams", type=int, default=STREAMS, help="at once (%(default)s)")
    add("--tokens-per-s", type=float, default=TOKENS_PER_S, help="of a stream (%(default)g)")
    add("--tokens", type=int, default=TOKENS, help="of a stream (%(default)s)")
    add("--skipped-tokens", type=int, default=SKIPPED_TOKENS, help="of a stream, left out at its start (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
