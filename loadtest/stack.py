"""The whole engine as three processes of its own, for the time of a benchmark."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.cli import up_plan
from services.cli.model import provide
from services.cli.processes import Processes, ending
from services.cli.readiness import wait_ready
from services.cli.up import START_ORDER, STOP_ORDER
from services.common.errors import StartError

START_S = 300.0
KEPT_LINES = 15


@asynccontextmanager
async def running(arguments: Sequence[str]) -> AsyncIterator[str]:
    """Starts what `triptych up ARGUMENTS` would, on a free port, and gives the frontend's address; ends it at exit.

    Raises StartError, with the last lines they wrote, where one of the three ends or they are not ready in START_S.
    """
    plan = up_plan.read(["--port", "0", *arguments])
    plan = up_plan.pinned(plan, provide(plan.configs))
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    processes = Processes(lambda name, line: lines.append(f"{name} | {line}"))
    try:
        for name in START_ORDER:
            await processes.start(plan.commands[name])
        await _ready(processes, plan, lines)
        yield plan.addresses["frontend"]
    finally:
        await processes.stop(STOP_ORDER)


async def _ready(processes: Processes, plan: up_plan.Plan, lines: deque[str]) -> None:
    ready = asyncio.create_task(wait_ready(plan.addresses, lambda _: None))
    died = asyncio.create_task(processes.first_exit())
    try:
        await asyncio.wait({ready, died}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            name, code = died.result()
            raise StartError("\n".join([f"the {name} {ending(code)}; the last lines:", *lines]))
        if not ready.done():
            raise StartError("\n".join([f"the engine was not ready within {START_S:g} s; the last lines:", *lines]))
        ready.result()
    finally:
        for task in (ready, died):
            task.cancel()
        await asyncio.gather(ready, died, return_exceptions=True)
