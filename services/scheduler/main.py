"""The scheduler's entry point."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common import collector, logs
from services.common.config import load
from services.common.startup import Startup
from services.scheduler.config import SchedulerConfig
from services.scheduler.server import SchedulerServer


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM. Raises StartError when it cannot."""
    startup = Startup()
    startup.done("imports")
    config = load(SchedulerConfig, argv)
    logs.setup("scheduler", config.log_level, config.log_format)
    asyncio.run(_serve(config, startup))
    return 0


async def _serve(config: SchedulerConfig, startup: Startup) -> None:
    server = SchedulerServer(config, startup=startup)
    await server.start()
    startup.done("configuration")
    collector.settle()
    await server.run()
