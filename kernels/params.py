"""The kernels' parameter structs, laid out as csrc/params.cuh declares them and refilled in place.

A kernel takes one struct by value. Launch after launch only a few of its fields change, and packing those into a
buffer that stays costs a fraction of passing a dozen arguments one by one.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HEADER = Path(__file__).parent / "csrc" / "params.cuh"
_STRUCT = re.compile(r"struct (\w+) \{[^\n]*\n(.*?)\n\};", re.DOTALL)
_FIELD = re.compile(r" *(?P<type>[\w ]+?\*?) *(?P<name>\w+); *(//.*)?")
_FORMATS = {"i64": "q", "int": "i", "float": "f"}


class Layout:
    """Offsets of a struct's fields, by C's rules of alignment."""

    def __init__(self, fields: dict[str, str], written: list[str]) -> None:
        self.fields: dict[str, tuple[struct.Struct, int]] = {}
        self.pointers: list[str] = [name for name, code in fields.items() if code == "P"]
        self.written = written
        """Pointers to what a kernel may write: those that are not to const."""
        format_ = "@"
        for name, code in fields.items():
            format_ += code
            self.fields[name] = (struct.Struct("@" + code), struct.calcsize(format_) - struct.calcsize("@" + code))
        self.bytes = struct.calcsize(format_ + "0P")


@cache
def layouts() -> dict[str, Layout]:
    """By name of the struct."""
    found = {}
    for name, body in _STRUCT.findall(_HEADER.read_text()):
        fields, written = {}, []
        for line in body.splitlines():
            match = _FIELD.fullmatch(line)
            if match is None:
                raise ValueError(f"{_HEADER.name}, struct {name}: {line.strip()!r} is not `type name;  // meaning`")
            fields[match["name"]] = "P" if match["type"].endswith("*") else _FORMATS[match["type"].strip()]
            if match["type"].endswith("*") and not match["type"].startswith("const "):
                written.append(match["name"])
        found[name] = Layout(fields, written)
    return found


class Params:
    """One kernel's arguments. All zero (null, 0, 0.0) until set."""

    def __init__(self, struct_name: str) -> None:
        self.layout = layouts()[struct_name]
        self.buffer: npt.NDArray[np.uint8] = np.zeros(self.layout.bytes, np.uint8)
        self.by_value: npt.NDArray[np.void] = self.buffer.view(np.dtype((np.void, self.layout.bytes)))
        """The same memory as an array of one item, which is what CuPy passes by value."""

    def set(self, **values: int | float) -> None:
        """Fills fields by name; a pointer is an address. KeyError for a name that is no field."""
        for name, value in values.items():
            packer, offset = self.layout.fields[name]
            packer.pack_into(self.buffer.data, offset, value)

    def get(self, name: str) -> int | float:
        """A field's value."""
        packer, offset = self.layout.fields[name]
        value: int | float = packer.unpack_from(self.buffer.data, offset)[0]
        return value
