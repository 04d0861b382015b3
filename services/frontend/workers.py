"""Several frontend processes that listen on one port: started together, drained together, one that dies is replaced.

One that crashes again and again is not: then all end, with an exit code that says so.

The kernel spreads connections, not calls, over the sockets that share a port (SO_REUSEPORT, socket(7)): a client with
one connection talks to one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Iterator, Sequence

from services.common.errors import StartError
from services.common.server import free_port
from services.frontend.config import FrontendConfig
from services.frontend.worker import COULD_NOT_SERVE, NO_METRICS
from services.frontend.worker_levels import WorkerLevels
from services.frontend.worker_metrics import WorkerMetrics

MOST_CRASHES = 5
CRASH_WINDOW_S = 60.0
"""A place whose processes crash so often within so many seconds is given up, and with it the frontend: whoever watches
this command learns that something is wrong, instead of reading about it in a log."""

FIRST_AGAIN_S, LAST_AGAIN_S = 1.0, 8.0
"""Between a crash and the next process: twice as long after each crash within the window."""

CRASHED = 1
CUT_S = 5.0
"""What a process is given, past its drain, before it is killed."""

log = logging.getLogger(__name__)


class Crashes:
    """Of one place, lately."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque()

    def again_s(self, now_s: float) -> float | None:
        """One more, now: seconds to wait before the next process; None where there should be none."""
        self._at_s.append(now_s)
        while now_s - self._at_s[0] > CRASH_WINDOW_S:
            self._at_s.popleft()
        if len(self._at_s) >= MOST_CRASHES:
            return None
        return min(FIRST_AGAIN_S * 2.0 ** (len(self._at_s) - 1), LAST_AGAIN_S)


class Workers:
    """The processes of one frontend; `argv` is its command line."""

    def __init__(self, config: FrontendConfig, argv: Sequence[str], levels: WorkerLevels | None = None) -> None:
        self._config = config
        self._levels = levels or WorkerLevels()
        self._argv = tuple(argv)
        self._listeners: list[socket.socket] = []
        """Where each process tells its metrics; empty: none does."""
        self._running: set[Process] = set()
        self._ending = asyncio.Event()

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT; the exit code, 1 where a process could not serve or ended badly.

        Raises StartError where the port cannot be had.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        with self._metrics(), _reserved(self._config.host, self._config.port) as port:
            codes = await asyncio.gather(*(self._keep(number, port) for number in range(self._config.workers)))
        return max(codes)

    async def _keep(self, number: int, port: int) -> int:
        """One process after the other, until the end; then 1 where the last one's exit code was an error."""
        crashes = Crashes()
        while True:
            process = await self._start(number, port)
            self._running.add(process)
            self._levels.begin(process)
            if self._ending.is_set():
                process.terminate()  # it was being started when the signal came
            code = await self._ended(process)
            self._running.discard(process)
            self._levels.forget(process)
            if code == COULD_NOT_SERVE:
                self._end()
            if self._ending.is_set():
                return int(code > 0)
            again_s = crashes.again_s(asyncio.get_running_loop().time())
            if again_s is None:
                log.error(
                    "frontend process %d ended %d times within %.0f s, last (pid %d) with %d; what it said before is "
                    "why; the frontend ends",
                    *(number, MOST_CRASHES, CRASH_WINDOW_S, process.pid, code),
                )
                self._end()
                return CRASHED
            log.warning(
                "frontend process %d (pid %d) ended with %d; starting another in %.0f s",
                *(number, process.pid, code, again_s),
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), again_s)
            if self._ending.is_set():
                return 0

    @contextlib.contextmanager
    def _metrics(self) -> Iterator[None]:
        """Answers Prometheus for all, where that is asked for. Raises StartError."""
        if self._config.metrics_port is None:
            yield
            return
        metrics = WorkerMetrics(self._config.metrics_host, self._config.metrics_port, self._config.workers)
        self._listeners = metrics.listeners
        try:
            yield
        finally:
            metrics.close()

    async def _start(self, number: int, port: int) -> Process:
        """One in a session of its own: a signal to the whole group and then ours would be two, and cut its drain."""
        # -P: a folder `services` where the user stands must not be taken for ours.
        descriptors = [self._listeners[number].fileno()] if self._listeners else []
        metrics = str(descriptors[0]) if descriptors else NO_METRICS
        arguments = ("-P", "-m", "services.frontend.worker", str(os.getpid()), str(port), metrics, *self._argv)
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, start_new_session=True, pass_fds=descriptors
        )

    async def _ended(self, process: Process) -> int:
        """Its exit code, once it has ended; one that does not drain in time is killed."""
        ended = asyncio.ensure_future(process.wait())
        told = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not ended.done():
            await asyncio.wait({ended}, timeout=self._config.drain_s + CUT_S)
            if not ended.done():
                process.kill()
        return await ended

    def _end(self) -> None:
        """Passed on each time: a second signal cuts the drain short."""
        self._ending.set()
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """The port, kept from others while processes of this user may listen on it. Raises StartError."""
    try:
        free_port(host, port)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((host, port))  # never listens, so the kernel gives it no connection
            yield int(holder.getsockname()[1])
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host and --port"
        ) from None
