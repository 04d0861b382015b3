"""Python's garbage collector in a service that makes many small messages."""

from __future__ import annotations

import gc

_THRESHOLDS = (50_000, 20, 50)
"""By default a collection comes every 700 new objects, that is every few hundred tokens. Messages and tuples hold no
cycles and are freed by their counts; the collector only has to find the rare cycle, of an error and its traceback."""


def hold() -> None:
    """Until `settle`: what a start makes stays, and looking through it again and again is a sixth of its time."""
    gc.disable()


def settle(*, collect: bool = True) -> None:
    """Call it once a process has started: what is there now stays, and is not looked through again.

    Without `collect` the cycles of the start that nobody holds stay too, and a large process saves half a second.
    """
    if collect:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
