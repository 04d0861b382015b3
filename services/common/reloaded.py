"""Files that are read again when they have changed; one that cannot be read any more leaves what was read before."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from services.common.errors import StartError

V = TypeVar("V")
Stamp: TypeAlias = tuple[tuple[int, int, int], ...]

log = logging.getLogger(__name__)


class Reloaded(Generic[V]):
    """What `read` makes of some files. `read` raises StartError, at the start; later its message is logged once a
    change. A change is one of what the names lead to: Kubernetes swaps a symbolic link."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], V]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._stamp = _stamp(self._paths)
        self._value = read()

    @property
    def value(self) -> V:
        """Without a look at the files."""
        return self._value

    def refreshed(self) -> bool:
        """Looks at the files; whether there is a new value."""
        stamp = _stamp(self._paths)
        if stamp == self._stamp:
            return False
        try:
            value = self._read()
        except StartError as error:
            log.error("%s; what was read before stays in use", error)
            self._stamp = stamp
            return False
        if _stamp(self._paths) == stamp:  # else it changed meanwhile: the next look reads it again
            self._stamp = stamp
        self._value = value
        return True

    def now(self) -> V:
        """With a look at the files."""
        self.refreshed()
        return self._value


def _stamp(paths: Sequence[Path]) -> Stamp:
    return tuple(_stamp_of(path) for path in paths)


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)
