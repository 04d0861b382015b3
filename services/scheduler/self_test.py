"""The idle self-test: a token is made when none has been for a while, so that health says what is so, not what was.

One greedy id after one prompt id goes the way of every request, through the core and the executor, under a frontend's
number that no frontend has. Nobody is told of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

import numpy as np
from triptych.inference.v1 import generation_pb2

from services.scheduler.core.request import RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import Updates

log = logging.getLogger(__name__)

FRONTEND = 0
"""The number of the self-test; those of frontends begin at 1."""

LIMIT_S = 10.0
"""A self-test that takes longer has failed, until it comes back after all."""

RETRY_S = 2.0
"""From a failed self-test to the next."""


class SelfTest:
    """Lives on the event loop; its owner says when the engine is idle and what became of its requests.

    `interval_s` without a token make one due. `on_change` is called when `passes` has changed.
    """

    def __init__(self, interval_s: float, on_change: Callable[[], None]) -> None:
        self.passes = True
        """False from a failed self-test to the next token."""
        self._interval_s = interval_s
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._key: RequestKey | None = None
        self._next_s = time.monotonic() + interval_s
        self._began_s = 0.0
        self._late: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """One is under way."""
        return self._key is not None

    def due_in_s(self) -> float | None:
        """When to begin one if the engine is idle until then; None while one is under way."""
        return None if self.is_running else max(0.0, self._next_s - time.monotonic())

    def new_epoch(self) -> None:
        """An executor is there again; one that follows a failure has to prove itself at once."""
        self._next_s = time.monotonic() + (self._interval_s if self.passes else 0)

    def token_made(self, now_s: float) -> None:
        """By whatever request."""
        self._next_s = now_s + self._interval_s
        self._judge(True)

    def begin(self, core: Scheduler, now_ns: int) -> None:
        """Queues one. It takes no one's place in the queue."""
        key = RequestKey(FRONTEND, next(self._numbers))
        submission = Submission(
            key=key,
            prompt_ids=np.zeros(1, np.uint32),
            max_tokens=1,
            sampling=generation_pb2.Sampling(temperature=0),
            is_counted=False,
        )
        if (failure := core.submit(submission, now_ns)) is not None:
            log.debug("no self-test: %s", failure.message)
            self._next_s = time.monotonic() + RETRY_S
            return
        self._key, self._began_s = key, time.monotonic()
        self._late = asyncio.get_running_loop().call_later(LIMIT_S, self._judge, False)

    def settle(self, core: Scheduler, updates: Updates) -> None:
        """Looks for its end in what the core tells."""
        if self._key is None:
            return
        if any(finished.key == self._key for finished in updates.finished):
            self._end()
            log.debug("a self-test took %.3f s", time.monotonic() - self._began_s)
        elif failures := [failure for failure in updates.failed if failure.key == self._key]:
            self._end()
            self._next_s = time.monotonic() + min(RETRY_S, self._interval_s)
            log.debug("the self-test failed: %s", failures[0].message)
            self._judge(False)

    def abandon(self, core: Scheduler) -> None:
        """Ends the one under way without a verdict."""
        if self._key is not None:
            core.abort(self._key)
            self._end()

    def _end(self) -> None:
        self._key = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _judge(self, passes: bool) -> None:
        if passes != self.passes:
            self.passes = passes
            log.log(
                logging.INFO if passes else logging.WARNING,
                "the self-test %s",
                "passes again" if passes else "fails: generate is NOT_SERVING until it passes",
            )
            self._on_change()
