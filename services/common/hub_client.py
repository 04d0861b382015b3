"""Manners of the hub's client: its progress, log and errors as single lines for people, and an end at once when told.

huggingface_hub is imported in the calls: a service that reads a local folder does without it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import StartError

Say = Callable[[str], None]
"""Takes a line for people."""

DEFAULT_REVISION = "main"
SAY_EVERY_S = 5.0


@dataclass(frozen=True)
class Source:
    """What is wanted of a hub."""

    model: str
    revision: str
    offline: bool

    @property
    def told(self) -> str:
        """For people."""
        return f"{self.model} at {self.revision}"

    @property
    def fetch_command(self) -> str:
        """What brings it into the cache."""
        pin = "" if self.revision == DEFAULT_REVISION else f" --revision {self.revision}"
        return f"triptych model fetch {self.model}{pin}"


def progress_lines(model: str, say: Say) -> Any:
    """A tqdm class that says in lines how many bytes have come: services log, and a log is no terminal."""
    from tqdm import tqdm

    said_s = time.monotonic()

    class Lines(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, unit: str = "it", **options: Any) -> None:
            self.counts_bytes = unit == "B"
            super().__init__(*args, unit=unit, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            nonlocal said_s
            self.n += n or 0
            if self.counts_bytes and self.total and time.monotonic() - said_s >= SAY_EVERY_S:
                said_s = time.monotonic()
                say(f"{model}: {self.n / 1e6:.0f} of {self.total / 1e6:.0f} MB have come")

    return Lines


class _Heard(logging.Handler):
    """What the client logs, now and then: it reads on after a broken connection, or finds no hub."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        if (now_s := time.monotonic()) - self._said_s >= SAY_EVERY_S:  # its threads all say the same
            self._said_s = now_s
            self._say(" ".join(record.getMessage().split())[:300])


@contextlib.contextmanager
def heard(say: Say) -> Iterator[None]:
    """The client's own handler would write bare lines, several a retry, to standard error."""
    from huggingface_hub import snapshot_download  # noqa: F401  that import gives the logger its own handler

    logger = logging.getLogger("huggingface_hub")
    before, logger.handlers = logger.handlers, [_Heard(say)]
    try:
        yield
    finally:
        logger.handlers = before


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """SIGINT and SIGTERM end the process, with the shell's exit code for them: the client's threads cannot be told to
    stop, and would be waited for until their files are whole. The parts of files that they hold open are removed; whole
    files stay for the next try."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if (file := os.readlink(link)).endswith(".incomplete"):
                    Path(file).unlink()
        os._exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def explained(source: Source) -> Iterator[None]:
    """Turns whatever the client and its transports raise (HTTP, Xet, files: kinds of their own) into one line."""
    try:
        yield
    except (StartError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise StartError(_explanation(source, error)) from error


def _explanation(source: Source, error: Exception) -> str:
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if source.offline:
        return (
            f"{source.told} is not whole in the cache {cache}, and no network is asked now; fetch it where "
            f"there is one: `{source.fetch_command}`"
        )
    cause = _root(error)
    if isinstance(cause, errors.GatedRepoError):
        return f"{source.model} on {hub} is gated: ask for access on its page, and set HF_TOKEN to that account's token"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {source.model!r} here, and {hub} has no model of that name, or hides it: check the "
            "name, or set HF_TOKEN to a token that may read it"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{source.model} on {hub} has no revision {source.revision!r}; give a branch, a tag or a whole commit"
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        if status in (401, 403):
            return (
                f"{hub} refuses {source.model} (HTTP {status}): set HF_TOKEN to a token that is valid and may read it"
            )
        return f"{hub} answers HTTP {status} for {source.model}; try again later"
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return f"cannot write {source.model} into the cache {cache}: {cause.strerror}; HF_HUB_CACHE names another"
    if isinstance(cause, ValueError):
        return f"{source.told} cannot be asked of {hub}: {_one_line(cause)}"
    return (
        f"there is no folder {source.model!r} here, and {source.told} cannot be fetched from {hub}: "
        f"{_one_line(cause)}; check the name and the network, or start with --offline where it was fetched already"
    )


def _root(error: BaseException) -> BaseException:
    """The client wraps what it met on the way; what it met says more."""
    from huggingface_hub import errors

    wrappers = (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)
    while isinstance(error, wrappers) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
