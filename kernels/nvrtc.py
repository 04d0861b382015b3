"""NVIDIA's run-time compiler, by ctypes: CUDA C++ in, a cubin and the assembler's report out. Needs no GPU.

Library and headers come with two packages of one CUDA version, 12 or 13, and are found beside the interpreter's own; a
Toolkit is such a pair, so that headers of one version never meet the compiler of another.
API: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MAJORS = (12, 13)
"""CUDA versions whose packages are looked for."""
_MODULES = {12: ("nvidia.cuda_nvrtc", "nvidia.cuda_runtime"), 13: ("nvidia.cu13", "nvidia.cu13")}
"""Where the packages of a version keep the library and the headers."""
_WHEELS = {
    12: "nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 (the extra executor-cuda)",
    13: "nvidia-cuda-nvrtc nvidia-cuda-runtime (the extra executor-cuda13)",
}


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


@dataclass(frozen=True)
class Toolkit:
    """A compiler and its headers, of one CUDA version."""

    major: int
    library: Path
    headers: Path
    """Folder of cuda_fp16.h and its like."""


def folder(module: str) -> Path | None:
    """Where a package of NVIDIA's keeps its files, where it is installed."""
    spec = importlib.util.find_spec(module) if importlib.util.find_spec("nvidia") else None
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def installed(major: int) -> Toolkit | None:
    """The toolkit of a CUDA version, where both of its packages are there."""
    compiler, runtime = (folder(module) for module in _MODULES[major])
    library = compiler and compiler / "lib" / f"libnvrtc.so.{major}"
    headers = runtime and runtime / "include"
    if not library or not headers or not library.exists() or not (headers / "cuda_fp16.h").exists():
        return None
    return Toolkit(major, library, headers)


def cupy_major() -> int | None:
    """CUDA version of the CuPy that is installed."""
    for major in MAJORS:
        try:
            importlib.metadata.version(f"cupy-cuda{major}x")
        except importlib.metadata.PackageNotFoundError:
            continue
        return major
    return None


def major() -> int | None:
    """CUDA version to compile with: CuPy's, since a driver need not run a later one's code; without CuPy the lowest."""
    return cupy_major() or next((known for known in MAJORS if installed(known)), None)


def toolkit() -> Toolkit:
    """That of `major`. Raises CompilerMissingError with what to install."""
    wanted = major() or MAJORS[0]
    found = installed(wanted)
    if found is None:
        raise CompilerMissingError(f"NVRTC for CUDA {wanted} is not installed: pip install {_WHEELS[wanted]}")
    return found


def headers() -> Path:
    """Folder of cuda_fp16.h and its like, of the CUDA version of the compiler."""
    return toolkit().headers


@cache
def _library(path: Path) -> ctypes.CDLL:
    for builtins in path.parent.glob(f"libnvrtc-builtins.so.{path.suffix[1:]}.*"):
        ctypes.CDLL(str(builtins))  # NVRTC asks for it by its bare name, and then finds what is loaded already
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")


def version(using: Toolkit | None = None) -> str:
    """Such as "12.9"."""
    library = _library((using or toolkit()).library)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def architectures(using: Toolkit | None = None) -> tuple[int, ...]:
    """Compute capabilities the compiler knows, as 80 or 90."""
    library = _library((using or toolkit()).library)
    count = ctypes.c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(known))
    return tuple(known)


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Calls nvrtcGet<what>Size and nvrtcGet<what>."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def compile_source(
    source: str, file_name: str, names: Sequence[str], options: Sequence[str], using: Toolkit | None = None
) -> Compiled:
    """Compiles the kernels that `names` (name expressions such as "f<float, 4>") instantiate.

    The toolkit's headers are found without an option. Raises CompileError with the compiler's log, CompilerMissingError
    where a package is not installed.
    """
    using = using or toolkit()
    options = [*options, f"-I{using.headers}"]
    library = _library(using.library)
    program = ctypes.c_void_p()
    arguments = (source.encode(), file_name.encode(), 0, None, None)
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), *arguments))
    try:
        for name in names:
            _check(library, library.nvrtcAddNameExpression(program, name.encode()))
        flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = library.nvrtcCompileProgram(program, len(options), flags)
        log = _text(library, program, "ProgramLog").rstrip(b"\0\n").decode()
        if failed:
            raise CompileError(f"{file_name} does not compile with {' '.join(options)}:\n{log}")
        lowered = {}
        for name in names:
            text = ctypes.c_char_p()
            _check(library, library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(text)))
            lowered[name] = (text.value or b"").decode()
        return Compiled(_text(library, program, "CUBIN"), log, lowered)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
