"""The frontend's process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from services.common import collector, config, logs
from services.common.startup import Startup
from services.frontend import admin, worker_levels
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from services.frontend.worker_levels import WorkerLevels
from services.frontend.workers import Workers


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM, with as many processes as it is told. Raises StartError."""
    settings = config.load(FrontendConfig, argv)
    if settings.workers == 1:
        return serve_one(argv)
    logs.setup(settings.service, settings.log_level, settings.log_format)
    return asyncio.run(_serve_many(settings, argv))


def serve_one(argv: Sequence[str], *, shared_port: int | None = None, metrics: socket.socket | None = None) -> int:
    """Serves in this process, until SIGTERM; on a port that others share, where that is given. Raises StartError.

    `metrics` is where they are told, instead of the configured port.
    """
    startup = Startup()
    startup.done("imports")
    settings = config.load(FrontendConfig, argv)
    logs.setup(settings.service, settings.log_level, settings.log_format)
    if shared_port is not None:
        settings = settings.model_copy(update={"port": shared_port})
    asyncio.run(_serve(settings, startup, metrics, shares_port=shared_port is not None))
    return 0


async def _serve_many(settings: FrontendConfig, argv: Sequence[str]) -> int:
    levels = WorkerLevels()
    async with admin.serving(settings, {"workers": levels.set}):
        return await Workers(settings, argv, levels).run()


async def _serve(
    settings: FrontendConfig, startup: Startup, metrics: socket.socket | None, *, shares_port: bool
) -> None:
    frontend = Frontend(settings, startup, shares_port=shares_port, metrics_listener=metrics)
    await frontend.start()
    startup.done("tokenizer and template")
    collector.settle()
    async with worker_levels.followed() if shares_port else admin.serving(settings, {}):
        await frontend.run()
