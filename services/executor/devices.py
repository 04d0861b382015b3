"""Which device `--device` means."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from services.common.errors import StartError
from services.executor.cuda_device import BUILT, CudaDevice
from services.executor.device import Device

log = logging.getLogger(__name__)


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
