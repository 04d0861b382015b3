"""The step thread, which does all device work one piece at a time, and the watchdog that ends a hung process."""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from services.common import logs

HUNG_EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h: a supervisor sees that the process ended itself."""

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "Future[Any]", float | None]

log = logging.getLogger(__name__)


class StepThread:
    """Runs jobs in the order they are given. What a job raises goes to its future; the thread lives on."""

    def __init__(self, on_end: Callable[[], object] = lambda: None, name: str = "steps") -> None:
        """`on_end` is called from the thread, `name`, when it ends, for whatever reason."""
        self._on_end = on_end
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._watchdog = _Watchdog()
        self._started_at: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], *, deadline_s: float | None = None) -> Future[T]:
        """Queues `job`; the process ends when it runs longer than `deadline_s`. After `close` nothing is taken."""
        future: Future[T] = Future()
        if self._closed:
            future.cancel()
        else:
            self._jobs.put((job, future, deadline_s))
        return future

    def is_alive(self) -> bool:
        """The thread runs; without it nothing here can work again."""
        return self._thread.is_alive()

    def running_ms(self) -> int | None:
        """Age of the job that runs; None: none."""
        started_at = self._started_at
        return None if started_at is None else int((time.monotonic() - started_at) * 1000)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the jobs queued so far; waits `timeout_s` for it."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        self._watchdog.close()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._do(*job)
                del job  # and with it what the job holds, while the next is waited for
        finally:
            self._on_end()

    def _do(self, work: Callable[[], Any], future: Future[Any], deadline_s: float | None) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._started_at = time.monotonic()
        self._watchdog.expect_done_in(deadline_s)
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        self._watchdog.expect_done_in(None)
        self._started_at = None
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)


class _Watchdog:
    """A thread that ends the process when the time given to a job has passed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expires_at: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def expect_done_in(self, deadline_s: float | None) -> None:
        """Starts the clock; None stops it."""
        if deadline_s is None and self._expires_at is None:
            return
        with self._changed:
            self._expires_at = None if deadline_s is None else time.monotonic() + deadline_s
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if self._expires_at is None:
                    self._changed.wait()
                elif (left_s := self._expires_at - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    _end_process()


def _end_process() -> None:
    log.critical("a step passed its deadline; the process ends itself so that a supervisor starts a fresh one")
    logs.flush()
    faulthandler.dump_traceback(sys.stderr)
    sys.stderr.flush()
    os._exit(HUNG_EXIT_STATUS)
