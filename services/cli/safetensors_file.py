"""Headers of safetensors files, read without the package: eight bytes of length, JSON, then the tensors' bytes.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from services.common.errors import StartError

_MAX_HEADER_BYTES = 100_000_000
"""Of the format."""

_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_ITEM_BYTES |= {"BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}


def index(file: Path) -> dict[str, str]:
    """File name of each tensor, as the index says. Raises StartError for an index that is none."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(name) for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{file.name} holds no weight_map of tensor names to files") from error


def tensors(file: Path) -> dict[str, int]:
    """Bytes of each tensor by name. Raises StartError where header and size contradict each other."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if size < 8 or header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise StartError(
                f"{file.name} has {size} bytes and a header of {header_bytes}; cut short, or of another kind"
            )
        try:
            header = json.loads(opened.read(header_bytes))
            header.pop("__metadata__", None)
            spans = sorted(_span(name, entry) for name, entry in header.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartError(f"{file.name} has no header of a safetensors file: {error}") from error
    end = 0
    for first, last, name in spans:
        if first != end:
            raise StartError(f"{file.name}: {name} begins at byte {first}, the tensor before it ends at {end}")
        end = last
    if end != size - 8 - header_bytes:
        raise StartError(f"{file.name} holds {size - 8 - header_bytes} bytes of tensors, its header tells of {end}")
    return {name: last - first for first, last, name in spans}


def _span(name: str, entry: dict[str, Any]) -> tuple[int, int, str]:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    item_bytes = _ITEM_BYTES.get(entry["dtype"])
    if item_bytes is not None and end - begin != item_bytes * math.prod(entry["shape"]):
        raise ValueError(f"{name} {entry['dtype']} {entry['shape']} is said to have {end - begin} bytes")
    return begin, end, name
