"""The scheduler's entry point."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common import collector, logs
from services.common.config import load
from services.scheduler.config import SchedulerConfig
from services.scheduler.server import SchedulerServer


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM. Raises StartError when it cannot."""
    config = load(SchedulerConfig, argv)
    logs.setup("scheduler", config.log_level)
    asyncio.run(_serve(config))
    return 0


async def _serve(config: SchedulerConfig) -> None:
    server = SchedulerServer(config)
    await server.start()
    collector.settle()
    await server.run()
