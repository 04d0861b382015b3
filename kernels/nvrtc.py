"""NVIDIA's run-time compiler, by ctypes: CUDA C++ in, a cubin and the assembler's report out. Needs no GPU.

The library comes with the package nvidia-cuda-nvrtc-cu12 and is found beside the interpreter's packages; the headers
with nvidia-cuda-runtime-cu12. API: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class CompilerMissingError(RuntimeError):
    """A package that compiling needs is not installed."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the text is its log."""


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of one source."""

    cubin: bytes
    log: str
    """With ptxas' report (-v)."""
    lowered: dict[str, str]
    """Name of a kernel in the cubin by its name expression."""


def _package(name: str, wheel: str) -> Path:
    spec = importlib.util.find_spec(name) if importlib.util.find_spec("nvidia") else None
    if spec is None or not spec.submodule_search_locations:
        raise CompilerMissingError(f"{name} is not installed: pip install {wheel} (the extra executor-cuda has it)")
    return Path(spec.submodule_search_locations[0])


def headers() -> Path:
    """Folder of cuda_fp16.h and its like, of the CUDA version of the compiler."""
    return _package("nvidia.cuda_runtime", "nvidia-cuda-runtime-cu12") / "include"


@cache
def _library() -> ctypes.CDLL:
    folder = _package("nvidia.cuda_nvrtc", "nvidia-cuda-nvrtc-cu12") / "lib"
    found = sorted(folder.glob("libnvrtc.so.*"))
    if not found:
        raise CompilerMissingError(f"{folder} holds no libnvrtc.so: reinstall nvidia-cuda-nvrtc-cu12")
    library = ctypes.CDLL(str(found[0]))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _check(result: int) -> None:
    if result:
        raise CompileError(f"NVRTC: {_library().nvrtcGetErrorString(result).decode()}")


@cache
def version() -> str:
    """Such as "12.9"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


@cache
def architectures() -> tuple[int, ...]:
    """Compute capabilities the compiler knows, as 80 or 90."""
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(known))
    return tuple(known)


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    """Calls nvrtcGet<what>Size and nvrtcGet<what>."""
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def compile_source(source: str, file_name: str, names: Sequence[str], options: Sequence[str]) -> Compiled:
    """Compiles the kernels that `names` (name expressions such as "f<float, 4>") instantiate.

    Raises CompileError with the compiler's log, CompilerMissingError where a package is not installed.
    """
    library = _library()
    program = ctypes.c_void_p()
    arguments = (source.encode(), file_name.encode(), 0, None, None)
    _check(library.nvrtcCreateProgram(ctypes.byref(program), *arguments))
    try:
        for name in names:
            _check(library.nvrtcAddNameExpression(program, name.encode()))
        flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = library.nvrtcCompileProgram(program, len(options), flags)
        log = _text(program, "ProgramLog").rstrip(b"\0\n").decode()
        if failed:
            raise CompileError(f"{file_name} does not compile with {' '.join(options)}:\n{log}")
        lowered = {}
        for name in names:
            text = ctypes.c_char_p()
            _check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(text)))
            lowered[name] = (text.value or b"").decode()
        return Compiled(_text(program, "CUBIN"), log, lowered)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
