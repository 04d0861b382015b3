"""Whether a model can fit into memory at all, told at once instead of after the start of three processes.

A lower bound out of the files' headers: the executor, which decides, counts exactly, and `triptych doctor` tells how.
"""

from __future__ import annotations

import json
from pathlib import Path

from services.cli import safetensors_file
from services.cli.parts import part
from services.common import checkpoint, hub
from services.common.errors import StartError

_HEAD = "lm_head.weight"


def refuse_too_large(path: Path) -> None:
    """Raises StartError where the weights of the folder at `path` alone are more than what is free."""
    memory = part("services.executor.memory", extra="executor", what="the executor")
    needed, available = stored_bytes(path), memory.available_bytes()
    if needed > available:
        raise StartError(
            f"the weights of {checkpoint.name(path)} take {needed} bytes or more, {available} are free; raise the "
            "memory limit or serve a smaller model"
        )


def stored_bytes(path: Path) -> int:
    """Bytes of the weights in the files; 0 where those cannot be read, which is the executor's to tell."""
    try:
        sizes: dict[str, int] = {}
        for name in hub.weight_names(path):
            sizes |= safetensors_file.tensors(path / name)
        if json.loads((path / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings") is not False:
            sizes.pop(_HEAD, None)  # it may be the embedding once more
    except (StartError, OSError, ValueError):
        return 0
    return sum(sizes.values())
