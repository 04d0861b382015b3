"""Which device `--device` means."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from services.common.errors import StartError
from services.executor.cuda_device import BUILT, CudaDevice
from services.executor.device import Device

log = logging.getLogger(__name__)


def choose_for_ranks(asked: str, ranks: int, built: Path | None = None) -> tuple[Device | None, tuple[str, ...]]:
    """Rank 0's device, and the names of all `ranks` that share this machine, a device each; None and no names: the CPU.

    Raises StartError where there are not so many, or one is named.
    """
    if asked not in ("cpu", "cuda", "auto"):
        raise StartError(
            f"--device is {asked}, which is one, and --tp-size {ranks} ranks take one each; give --device cuda "
            "(CUDA_VISIBLE_DEVICES says which), or start each rank by itself with --tp-rank"
        )
    first = choose(asked, built)
    if first is None:
        return None, ()
    if (count := torch.cuda.device_count()) < ranks:
        reason = f"--tp-size is {ranks}, a device a rank, and this machine has {count}"
        if asked == "cuda":
            raise StartError(f"{reason}; lower it, or start ranks on other machines too, each with --tp-rank")
        log.info("served on the CPU: %s", reason)
        return None, ()
    return first, tuple(f"cuda:{rank}" for rank in range(ranks))


def choose(asked: str, built: Path | None = None) -> Device | None:
    """The device; None: the CPU. "auto" is the first CUDA device where it can be used. Raises StartError where what
    is asked for cannot be."""
    if asked == "cpu":
        return None
    number = re.fullmatch(r"cuda(?::(\d+))?", asked)
    if number is not None:
        return CudaDevice(int(number[1] or 0), built or BUILT)
    if asked != "auto":
        raise StartError(f"--device is {asked}: cpu, cuda, cuda:N or auto")
    try:
        return CudaDevice(0, built or BUILT)
    except StartError as error:
        log.info("served on the CPU: %s", error)
        return None
