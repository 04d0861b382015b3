"""From a SIGKILL to the survivor's next token: `python -m loadtest.bench_failover [--quick]`.

Streams run all the while; an executor or a scheduler is killed, again and again, and started again as a kubelet would.
Of each stream that had been with the dead one, the time from the kill to its next id counts. No stream may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest import command, parts, report
from loadtest.parts import Parts
from services.common.checkpoint import EMBEDDED_MODEL
from services.common.errors import StartError

STREAMS = 16
STEP_MS = 20.0
TOKENS = 600
KILLS, QUICK_KILLS = 10, 3
REAL_KILLS = 5
PAUSE_S = 2.0
RESTART_S = 0.2
"""Until what was killed is started again."""
PAUSED_S, REAL_PAUSED_S = 0.15, 0.6
"""A pause between two ids that steps do not make, of stub and real executors: the stream was with the dead one."""
TIMEOUT_S = 120.0


class LostError(Exception):
    """A stream was lost; the message says how many, and the first one's end."""


@dataclass(frozen=True)
class Way:
    """What is killed, and who is there to take over."""

    name: str
    key: str
    victim: str
    replicas: int = 1
    spares: int = 0
    is_real: bool = False


WAYS = (
    Way("executor, another engine serves", "executor_engine", "executor", replicas=2),
    Way("executor, a spare one is loaded", "executor_spare", "executor", spares=1),
    Way("executor, it starts again (stub)", "executor_restart", "executor"),
    Way("executor, it starts again and loads the model", "executor_model", "executor", is_real=True),
    Way("executor, a spare one has the model", "executor_model_spare", "executor", spares=1, is_real=True),
    Way("scheduler, another engine serves", "scheduler_engine", "scheduler", replicas=2),
    Way("scheduler, it starts again (stub)", "scheduler_restart", "scheduler"),
)


@dataclass
class Streams:
    """Streams that begin anew when they end."""

    address: str
    ids_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    """When each had ids, since `mark`."""
    lost: list[str] = field(default_factory=list)

    def mark(self) -> float:
        """From now on, which is told."""
        self.ids_s = [[] for _ in range(STREAMS)]
        return time.monotonic()

    def have_ids(self, after_s: float) -> bool:
        """Whether all of them had one since."""
        return all(ids_s and ids_s[-1] > after_s for ids_s in self.ids_s)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            await asyncio.gather(*(self._one(number, stub) for number in range(STREAMS)))

    async def _one(self, number: int, stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
        sampling = generation_pb2.Sampling(temperature=0.0)
        options = inference_pb2.Options(sampling=sampling, max_tokens=TOKENS, ignore_eos=True, seed=0)
        prompt = inference_pb2.TokenIds(ids=range(100 + number, 164 + number))
        while True:
            count = 0
            try:
                async for message in stub.Generate(
                    inference_pb2.GenerateRequest(token_ids=prompt, options=options), timeout=3600
                ):
                    if came := sum(len(choice.token_ids) for choice in message.choices):
                        count += came
                        self.ids_s[number].append(time.monotonic())
            except grpc.aio.AioRpcError as error:
                if count or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    self.lost.append(f"{error.code().name}: {error.details()}")
                await asyncio.sleep(0.05)  # else no engine could take a new one just then
            else:
                if count != TOKENS:
                    self.lost.append(f"it ended well with {count} ids of {TOKENS}")


@dataclass
class Found:
    """Seconds from a kill to the next id, of each stream that was hurt, over all kills."""

    gaps_s: list[float] = field(default_factory=list)
    kills: int = 0
    lost: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where a process does not start or a stream is lost."""
    options = _parser().parse_args(argv)
    return command.run("bench_failover", _run(options), (StartError, LostError))


async def _run(options: argparse.Namespace) -> None:
    facts = report.head("bench_failover")
    print(
        f"{options.model}: {STREAMS} streams, stub executors with steps of {STEP_MS:g} ms, or real ones\n", flush=True
    )
    found: dict[str, Found] = {}
    for way in WAYS:
        if options.only and way.key not in options.only:
            continue
        kills = options.kills or (QUICK_KILLS if options.quick else REAL_KILLS if way.is_real else KILLS)
        found[way.key] = await measure(way, options.model, kills)
        p50, p99 = (report.percentile(found[way.key].gaps_s, percent) for percent in (50, 99))
        _say(f"{way.name}: p50 {report.number(p50)} s, p99 {report.number(p99)} s, {len(found[way.key].lost)} lost")
    print(_table(found), flush=True)
    report.last_line(facts | {"model": options.model, "quick": options.quick} | values(found))
    if lost := [end for one in found.values() for end in one.lost]:
        raise LostError(f"{len(lost)} streams were lost, the first by {lost[0]}")


async def measure(way: Way, model: str, kills: int) -> Found:
    """Kills of one kind."""
    found = Found()
    step_ms = None if way.is_real else STEP_MS
    async with parts.started(model, replicas=way.replicas, spares=way.spares, step_ms=step_ms) as engine:
        streams = Streams(engine.address)
        running = asyncio.create_task(streams.run())
        try:
            await _until(lambda: streams.have_ids(0.0), streams)
            for _ in range(kills):
                await asyncio.sleep(PAUSE_S)
                found.gaps_s += await _kill(way, engine, streams, found.kills)
                found.kills += 1
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        found.lost = streams.lost
    return found


async def _kill(way: Way, engine: Parts, streams: Streams, number: int) -> list[float]:
    victims = [name for name in engine.names if name.startswith(way.victim)]
    victim = victims[number % len(victims)]
    paused_s = REAL_PAUSED_S if way.is_real else PAUSED_S
    begun_s = streams.mark()
    engine.kill(victim)
    await asyncio.sleep(RESTART_S)
    await engine.start(victim)
    await _until(lambda: streams.have_ids(begun_s + paused_s), streams)
    gaps_s = [gap_s for ids_s in streams.ids_s if (gap_s := gap_of(begun_s, ids_s, paused_s)) is not None]
    await engine.wait_ready()
    return gaps_s


def gap_of(killed_s: float, ids_s: Sequence[float], paused_s: float) -> float | None:
    """From a kill to the first id after a pause; what was on its way at the kill still comes before. None: no pause."""
    times_s = [killed_s, *ids_s]
    ends_s = (after_s for before_s, after_s in itertools.pairwise(times_s) if after_s - before_s > paused_s)
    return next((end_s - killed_s for end_s in ends_s), None)


async def _until(holds: Any, streams: Streams) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise LostError(f"streams stand still for {TIMEOUT_S:g} s; {len(streams.lost)} were lost")
        await asyncio.sleep(0.005)


def values(found: dict[str, Found]) -> dict[str, Any]:
    """For the last line."""
    flat: dict[str, Any] = {"streams_lost": sum(len(one.lost) for one in found.values())}
    for key, one in found.items():
        flat |= {f"{key}_p{percent}_s": report.percentile(one.gaps_s, percent) for percent in (50, 99)}
        flat |= {f"{key}_kills": one.kills, f"{key}_streams_hurt": len(one.gaps_s)}
    return flat


def _table(found: dict[str, Found]) -> str:
    names = {way.key: way.name for way in WAYS}
    rows = [
        (
            names[key],
            str(one.kills),
            str(len(one.gaps_s)),
            *(report.number(report.percentile(one.gaps_s, percent)) for percent in (50, 99)),
            str(len(one.lost)),
        )
        for key, one in found.items()
    ]
    return report.table(("killed: who takes over", "kills", "streams hurt", "p50, s", "p99, s", "lost"), rows)


def _say(line: str) -> None:
    print(f"loadtest.bench_failover: {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_failover", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{QUICK_KILLS} kills of each kind")
    add("--kills", type=int, help="of each kind, whatever --quick says")
    add("--only", action="append", choices=[way.key for way in WAYS], help="this kind; may be given again")
    add("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
