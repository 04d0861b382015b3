"""A frontend with the adapter before a real scheduler and a stub executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc

from loadtest.stub_executor import StubExecutor
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import attached
from tests.support.attached import scheduler_for

T = TypeVar("T")


@asynccontextmanager
async def with_scheduler(model: Path, executor: StubExecutor | None = None) -> AsyncIterator[grpc.aio.Channel]:
    async with executor or StubExecutor() as fake, scheduler_for(fake, model) as server:
        address = f"127.0.0.1:{server.server.port}"
        frontend = Frontend(FrontendConfig(port=0, engine=address, model=str(model), vllm_adapter=True))
        await frontend.start()
        try:
            await attached(frontend)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
                yield channel
        finally:
            await frontend.close()


async def until(ask: Callable[[], Awaitable[T]], condition: Callable[[T], bool]) -> T:
    """The first answer for which the condition holds."""
    while True:
        if condition(answer := await ask()):
            return answer
        await asyncio.sleep(0.01)
