"""Kernels of the embedded default, compiled by numba. Import this package before numba: it says where code is kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from services.common.checkpoint import cache_dir


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


def _set_environment() -> None:
    """Compiled kernels go below Triptych's cache folder, or to the temporary folder where that is read-only.

    numba compiles anew what has changed, but not what calls it from another file; hence a folder a state of the files.
    """
    state = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))))
    wanted = cache_dir() / "numba" / state.hexdigest()[:16]
    fallback = Path(tempfile.gettempdir()) / f"triptych-numba-{os.getuid()}"
    os.environ.setdefault("NUMBA_CACHE_DIR", str(wanted if _writable(wanted) else fallback))
    os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")


_set_environment()
