"""Python's garbage collector in a service that makes many small messages."""

from __future__ import annotations

import gc

_THRESHOLDS = (50_000, 20, 50)
"""By default a collection comes every 700 new objects, that is every few hundred tokens. Messages and tuples hold no
cycles and are freed by their counts; the collector only has to find the rare cycle, of an error and its traceback."""


def settle() -> None:
    """Call it once a process has started: what is there now stays, and is not looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
