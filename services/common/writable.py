"""Whether there is a folder for what a start compiles, looked at before anything needs it.

A container with a read-only root and a user id that no file knows has no home folder, and maybe no folder to write to
at all; numba, CuPy and torch would say so in a traceback, each in its own words.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.checkpoint import cache_dir
from services.common.errors import StartError

REMEDY = (
    "set TRIPTYCH_CACHE to a folder that can be written, some 500 MB (in Kubernetes an emptyDir; as the image has it: "
    "mount one at /cache)"
)


def require() -> None:
    """Raises StartError where neither Triptych's cache folder nor one for temporary files can be written to."""
    try:
        cache = cache_dir()
    except RuntimeError:  # of Path.home()
        raise StartError(
            f"user id {os.getuid()} has no home folder, and nothing says where to keep files; {REMEDY}"
        ) from None
    if (reason := _refusal(cache)) is None or any(_refusal(folder) is None for folder in _temporary()):
        return
    raise StartError(
        f"compiled kernels cannot be kept: user id {os.getuid()} cannot write to {cache} ({reason}), nor to a folder "
        f"for temporary files; {REMEDY}"
    )


def _temporary() -> Sequence[Path]:
    try:
        return [Path(tempfile.gettempdir())]
    except FileNotFoundError:
        return []


def _refusal(folder: Path) -> str | None:
    """Why nothing can be written there; None where it can. Tried, since a read-only file system grants permission."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
