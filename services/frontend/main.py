"""The frontend's process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common import collector, config, logs
from services.common.startup import Startup
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM. Raises StartError."""
    startup = Startup()
    startup.done("imports")
    settings = config.load(FrontendConfig, argv)
    logs.setup(settings.service, settings.log_level)
    asyncio.run(_serve(settings, startup))
    return 0


async def _serve(settings: FrontendConfig, startup: Startup) -> None:
    frontend = Frontend(settings, startup)
    await frontend.start()
    startup.done("tokenizer and template")
    collector.settle()
    await frontend.run()
