"""Random requests at the frontend, over a stub engine: no crash, no INTERNAL, nothing left of any of them.

In a process of their own, so that what other tests left of the heap does not hide or feign a growth.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from loadtest.stub_engine import StubEngine
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import VOCAB_SIZE, attached
from tests.support import random_calls
from tests.support.checkpoints import EOS_ID

GROWTH_BYTES = 128 * 1024 * 1024
"""Of the process, test and hypothesis included, past the first tenth."""


@dataclass
class Rig:
    """A frontend and its stub engine, in an event loop of their own thread."""

    frontend: Frontend
    engine: StubEngine
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.frontend.server.port}"

    def call(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(60)  # type: ignore[arg-type]

    async def check_nothing_left(self) -> None:
        """No call, no request, at either end."""
        async with asyncio.timeout(20):
            await self.frontend.calls.idle()
            await self.engine.wait_until(lambda engine: engine.num_running == 0, 20)
        assert self.frontend.engine.is_idle
        self.engine.submits.clear()
        self.engine.aborts.clear()
        self.engine.frontends_that_submitted.clear()


@contextmanager
def rigged(model: Path) -> Iterator[Rig]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    script = [*range(40, 90), EOS_ID]
    made: list[Rig] = []

    async def start() -> None:
        engine = StubEngine(script=script, vocab_size=VOCAB_SIZE, context_tokens=256, ids_per_step=8)
        await engine.start()
        frontend = Frontend(FrontendConfig(port=0, engine=engine.address, model=str(model)))
        await frontend.start()
        await attached(frontend)
        made.append(Rig(frontend, engine, loop))

    async def stop() -> None:
        for one in made:
            await one.frontend.close()
            await one.engine.stop()

    asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    yield made[0]
    asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def check(model: Path, count: int) -> Counter[str]:
    """Sends them and returns how often each status came."""
    process, at = psutil.Process(), []
    with rigged(model) as rig:

        def after_each() -> None:
            at.append(process.memory_info().rss)
            if len(at) % 50 == 0:
                rig.call(rig.check_nothing_left())

        codes = random_calls.run(rig.address, rig.loop, count, after_each)
        rig.call(rig.check_nothing_left())
        gc.collect()
        assert process.memory_info().rss - at[len(at) // 10] < GROWTH_BYTES
    assert sum(codes.values()) >= count - random_calls.AT_ONCE
    return codes


def checked(model: Path, count: int) -> Counter[str]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        return apart.submit(check, model, count).result()


def test_2000_random_requests_leave_nothing_behind(text_model: Path) -> None:
    codes = checked(text_model, 2_000)
    assert codes["OK"] > 200 and codes["INVALID_ARGUMENT"] > 200, "some are served, some refused"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_50000_random_requests_leave_nothing_behind(text_model: Path) -> None:
    checked(text_model, 50_000)
