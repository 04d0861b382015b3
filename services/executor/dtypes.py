"""What weights are computed in and what keys and values are kept in, by device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from services.executor import architecture

_HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Dtypes:
    """Of one device and checkpoint."""

    default: torch.dtype
    """Where none is asked for."""
    served: tuple[torch.dtype, ...]
    kv_served: tuple[torch.dtype, ...]
    place: str
    """For people: "on a CPU"."""


CPU_DTYPES = Dtypes(torch.float32, (torch.float32,), (torch.float32, torch.bfloat16, torch.int8), "on a CPU")


def on_device(path: Path) -> Dtypes:
    """Of an accelerator: the checkpoint's own dtype where none is asked for. Raises StartError as architecture.read."""
    own = architecture.read(path).dtype
    served = (*_HALVES, torch.float32)
    return Dtypes(own if own in served else torch.float32, served, (*served, FP8), "on this device")
