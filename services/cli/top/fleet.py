"""The engines that are looked at: asked all at once, each with what it said before. One that is away may come back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import Any

import grpc
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.cli.top.figures import Histogram, Span, Stats, nothing_before
from services.common.peer import Peer

TIMEOUT_S = 2.0
WINDOW_S = 60.0
"""That latencies and shares of steps are taken over."""
MAX_LOOKS = 240
"""That sparklines are drawn from."""

QUANTILES = (0.5, 0.9, 0.99)


class Engine:
    """One scheduler, by its address, or as it is dialled."""

    def __init__(self, peer: Peer | str) -> None:
        self._peer = Peer(peer) if isinstance(peer, str) else peer
        self.address = self._peer.target
        self.now: Stats | None = None
        """The last answer; None while it does not answer."""
        self.trouble = ""
        """Why it does not."""
        self.away_since_s: float | None = None
        self.looks: deque[Span | None] = deque(maxlen=MAX_LOOKS)
        """From look to look; None where there was no answer to one of the two."""
        self._window: deque[Stats] = deque()

    async def look(self) -> None:
        """Asks it. Never raises for what it answers."""
        stub = admin_pb2_grpc.AdminServiceStub(self._peer.channel())
        try:
            message = await stub.GetStats(admin_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._lose(error.code().name)
        else:
            self.take(Stats.read(message, time.monotonic()))

    def take(self, stats: Stats) -> None:
        """A new answer."""
        before = self.now
        self.now, self.trouble, self.away_since_s = stats, "", None
        self.looks.append(Span(before, stats) if before is not None and stats.follows(before) else None)
        if self._window and not stats.follows(self._window[-1]):
            self._window.clear()
        self._window.append(stats)
        while len(self._window) > 2 and stats.at_s - self._window[1].at_s >= WINDOW_S:
            self._window.popleft()

    def _lose(self, trouble: str) -> None:
        self.now, self.trouble = None, trouble
        self.away_since_s = self.away_since_s or time.monotonic()
        self.looks.append(None)

    async def close(self) -> None:
        """Hangs up."""
        await self._peer.close()

    @property
    def last_look(self) -> Span | None:
        """What has come since the look before the last."""
        return self.looks[-1] if self.looks else None

    @property
    def window(self) -> Span | None:
        """The last minute, or as much of it as has been looked at; None before the second answer."""
        if self.now is None or len(self._window) < 2:
            return None
        return Span(self._window[0], self._window[-1])

    @property
    def life(self) -> Span | None:
        """Since the scheduler's start."""
        return None if self.now is None else Span(nothing_before(self.now), self.now)

    def as_json(self) -> dict[str, Any]:
        """Keys carry their units; latencies are since the scheduler's start."""
        told: dict[str, Any] = {"address": self.address, "state": "away" if self.now is None else self.now.state}
        now, life, look = self.now, self.life, self.last_look
        if now is None or life is None:
            return told | {"error": self.trouble}
        return told | {
            "engine_id": now.engine_id,
            "uptime_s": now.uptime_s,
            "epoch": now.epoch,
            "step": now.step,
            "running_requests": now.running,
            "waiting_requests": now.waiting,
            "waiting_tokens": now.waiting_tokens,
            "requests": dict(now.requests),
            "total_blocks": now.total_blocks,
            "free_blocks": now.free_blocks,
            "kv_share": now.kv_share,
            "prefix_query_tokens": now.prefix_query_tokens,
            "prefix_hit_tokens": now.prefix_hit_tokens,
            "preemptions": now.preemptions,
            "prompt_tokens_per_s": None if look is None else look.prompt_tokens_per_s,
            "output_tokens_per_s": None if look is None else look.output_tokens_per_s,
            "steps_per_s": None if look is None else look.steps_per_s,
            "step_s": dict(now.step_s),
            "ttft_s": _quantiles(life.ttft),
            "itl_s": _quantiles(life.itl),
            "finished": dict(now.finished),
            "failed": dict(now.failed),
        }


class Fleet:
    """All of them, in the order given."""

    def __init__(self, peers: Sequence[Peer | str]) -> None:
        self.engines = [Engine(peer) for peer in peers]

    async def look(self) -> None:
        """Asks all at once."""
        await asyncio.gather(*(engine.look() for engine in self.engines))

    async def close(self) -> None:
        """Hangs up."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    @property
    def answering(self) -> list[Stats]:
        """The last answers of those that do."""
        return [engine.now for engine in self.engines if engine.now is not None]

    def as_json(self) -> dict[str, Any]:
        """One look at all."""
        return {"unix_s": time.time(), "engines": [engine.as_json() for engine in self.engines]}


def together(histograms: Sequence[Histogram]) -> Histogram:
    """As one."""
    return reduce(Histogram.plus, histograms, Histogram())


def _quantiles(histogram: Histogram) -> dict[str, float | int | None]:
    told: dict[str, float | int | None] = {f"p{100 * share:g}": histogram.quantile_s(share) for share in QUANTILES}
    return told | {"count": histogram.total}
