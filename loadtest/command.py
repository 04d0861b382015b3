"""A benchmark as a command: its errors are a line, its end from outside is orderly."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any


def run(name: str, work: Coroutine[Any, Any, None], errors: tuple[type[Exception], ...]) -> int:
    """Runs `work` to its end; its exit code: 1 after one of `errors`, 130 and 143 where SIGINT and SIGTERM ended it."""
    try:
        asyncio.run(_ended_in_order(work))
    except errors as error:
        print(f"loadtest.{name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143
    return 0


async def _ended_in_order(work: Coroutine[Any, Any, None]) -> None:
    # Ended from outside, it must still end the processes it has started.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work
