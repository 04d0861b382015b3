"""From a logger to standard error, without waiting for who reads it: a slow reader costs records, not time."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable

MAX_PENDING_BYTES = 4 * 1024 * 1024
"""Of lines that wait to be written; further ones are dropped."""
END_S = 2.0
"""What the last lines are given to be written as a process ends."""

_CHUNK_BYTES = 64 * 1024


class Writer:
    """Writes lines to a file, in their order, on a thread of its own. `write` may be called from any thread."""

    def __init__(self, fd: int, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self.dropped = 0
        """Lines that found no room, or that the file did not take."""
        self.told_dropped: Callable[[int], str] = lambda count: f"{count} lines were dropped"
        """Makes the line that says how many were dropped since the last such line."""
        self._fd = fd
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._pending_bytes = 0  # what is being written included
        self._untold = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queues it, or drops it; at once."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._changed:
            if self._closed or self._pending_bytes + len(data) > self._max_pending_bytes:
                self._drop(1)
                return
            self._lines.append(data)
            self._pending_bytes += len(data)
            self._changed.notify_all()

    def flush(self, timeout_s: float = END_S) -> bool:
        """Whether all that was queued has been written, once it has, or the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_bytes, timeout_s)

    def close(self, timeout_s: float = END_S) -> None:
        """As `flush`; what is written then is dropped."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._untold += count

    def _run(self) -> None:
        while lines := self._take():
            taken = sum(map(len, lines))
            written = _write_all(self._fd, b"".join(lines))
            with self._changed:
                if not written:
                    self._drop(len(lines))
                self._pending_bytes -= taken
                self._changed.notify_all()

    def _take(self) -> list[bytes]:
        """The next lines, once there are some; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            lines: list[bytes] = []
            room = _CHUNK_BYTES
            while self._lines and room > 0:
                lines.append(self._lines.popleft())
                room -= len(lines[-1])
            if lines and self._untold:
                told = self.told_dropped(self._untold).encode(errors="backslashreplace") + b"\n"
                self._pending_bytes += len(told)
                self._untold = 0
                lines.append(told)
            return lines


class Deliverer(logging.Handler):
    """Formats records where they are made, since what they name may change, and leaves the rest to a Writer."""

    def __init__(self, writer: Writer, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = writer
        writer.told_dropped = self._told_dropped

    @property
    def dropped(self) -> int:
        """Records that were lost."""
        return self._writer.dropped

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # the standard handler would write what it was given as it is
            line = self.format(_own_record("a record of %s could not be written", record.name))
        self._writer.write(line)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _told_dropped(self, count: int) -> str:
        return self.format(_own_record("%d records were dropped: standard error is not read in time", count))


def _own_record(message: str, argument: object) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (argument,), None)


def _write_all(fd: int, data: bytes) -> bool:
    """Whether the file has taken all of it. Not through sys.stderr, whose lock would be held while a reader is slow."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:
            return False
    return True
