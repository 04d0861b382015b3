"""The end of a process's telemetry."""

from __future__ import annotations

import asyncio

from services.common.telemetry.metrics import Metrics
from services.common.telemetry.tracing import Tracer


async def close(tracer: Tracer | None, metrics: Metrics | None) -> None:
    """Both at once: a collector that takes neither holds up a shutdown once, not twice."""
    await asyncio.gather(*(one.close() for one in (tracer, metrics) if one is not None))
