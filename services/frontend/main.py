"""The frontend's process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common import collector, config, logs
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM. Raises StartError."""
    settings = config.load(FrontendConfig, argv)
    logs.setup(settings.service, settings.log_level)
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: FrontendConfig) -> None:
    frontend = Frontend(settings)
    await frontend.start()
    collector.settle()
    await frontend.run()
