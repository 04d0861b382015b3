"""Runs the CUDA kernels of kernels/csrc on the CPU. README.md beside this file says what that proves and what not."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kernels import build, nvrtc
from kernels.instances import ARCHITECTURES, Architecture, Instance
from kernels.launch import Grid
from kernels.params import Params

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("TRIPTYCH_SHIM_CACHE") or Path(tempfile.gettempdir()) / f"triptych-hostshim-{os.getuid()}")
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
SANITIZERS = {"address": "address,undefined", "thread": "thread", "none": ""}


class ShimError(RuntimeError):
    """The shim, a sanitizer or the process found a fault in a kernel."""


class _Dim(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", _Dim),
        ("block", _Dim),
        ("shared_bytes", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Fault:
    """A planted fault: `old`, which stands once in `source`, becomes `new`."""

    source: str
    old: str
    new: str


@dataclass
class HostDevice:
    """A kernels.launch.Device. Compiles an instance when it is first launched.

    Arrays whose addresses a launch is given must be made known with `pointer`, and stay alive.
    """

    architecture: Architecture = ARCHITECTURES[90]
    order: str = "forward"
    seed: int = 1
    sanitizer: str | None = None
    """None: the kernels run in this process. Else in one of their own, as kernels with faults had better: watched by
    "address" (and undefined behaviour) or by "thread", or with "none" by nobody."""
    fault: Fault | None = None
    sources: Path = build.SOURCES
    """Where instances' sources are; csrc's headers are found from anywhere."""
    together: tuple[Instance, ...] = ()
    """Instances of one source that are compiled in one go when one of them is launched; that is quicker."""
    known: dict[int, np.ndarray] = field(default_factory=dict)
    shared_bytes_less: int = 0
    """Taken off each launch's shared memory, to see that it is noticed."""

    def pointer(self, array: np.ndarray) -> int:
        """Address of an array, which a kernel may then read and write."""
        if not array.flags.c_contiguous:
            raise ValueError("kernels take contiguous arrays")
        self.known[array.ctypes.data] = array
        return array.ctypes.data

    def launch(self, instance: Instance, grid: Grid, params: Params) -> None:
        """Runs the whole grid. Raises ShimError."""
        shared = max(0, instance.shared_bytes - self.shared_bytes_less) if instance.shared_bytes else 0
        launch = _Launch(_Dim(*grid), _Dim(instance.threads, 1, 1), shared, ORDERS[self.order], self.seed)
        compiled_with = self.together if instance in self.together else (instance,)
        binary = compiled(compiled_with, self.sanitizer, self.fault, self.sources)
        index = compiled_with.index(instance)
        if self.sanitizer:
            self._run_apart(binary, index, launch, params)
            return
        library = ctypes.CDLL(str(binary))
        library.shim_error.restype = ctypes.c_char_p
        if library[f"kernel_{index}"](ctypes.byref(launch), params.buffer.ctypes.data_as(ctypes.c_void_p)):
            raise ShimError(library.shim_error().decode())

    def _run_apart(self, program: Path, index: int, launch: _Launch, params: Params) -> None:
        buffers = {name: self.known[int(at)] for name in params.layout.pointers if (at := params.get(name))}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "launch"
            with path.open("wb") as file:
                file.write(struct.pack("=i", index) + bytes(launch))
                file.write(struct.pack("=q", params.buffer.nbytes) + params.buffer.tobytes())
                file.write(struct.pack("=q", len(buffers)))
                for name, array in buffers.items():
                    file.write(struct.pack("=qq", params.layout.fields[name][1], array.nbytes) + array.tobytes())
            environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 history_size=2"}
            done = subprocess.run([program, path], capture_output=True, text=True, env=environment, timeout=600)
            if done.returncode:
                raise ShimError(f"exit status {done.returncode}: {_gist(done.stderr)}")
            written = path.read_bytes()
        at = 0
        for array in buffers.values():
            array[...] = np.frombuffer(written[at : at + array.nbytes], array.dtype).reshape(array.shape)
            at += array.nbytes


def _gist(stderr: str) -> str:
    """The lines of a sanitizer's report that say what it found, first."""
    lines = [line for line in stderr.splitlines() if "ERROR" in line or "WARNING" in line or "runtime error" in line]
    return "\n".join([*lines[:3], stderr[:3000]])


def compiled(
    instances: Sequence[Instance],
    sanitizer: str | None = None,
    fault: Fault | None = None,
    sources: Path = build.SOURCES,
) -> Path:
    """A shared object (a program, with a sanitizer) whose `kernel_<i>` is instances[i]; from the cache where it is."""
    body = f'#define TRIPTYCH_HOST_SHIM\n#include "{instances[0].source}"\n'
    for i, instance in enumerate(instances):
        call = f"shim::launch(*launch, {instance.name}, params)"
        body += f'extern "C" int kernel_{i}(const shim::Launch* launch, const void* params) {{ return {call}; }}\n'
    if sanitizer:
        kernels = ", ".join(f"kernel_{i}" for i in range(len(instances)))
        body += f'int (*KERNELS[])(const shim::Launch*, const void*) = {{{kernels}}};\n#include "runner.h"\n'
    texts = {path.name: path.read_text() for folder in (build.SOURCES, sources) for path in folder.glob("*.cu*")}
    if fault is not None:
        texts[fault.source] = _with(fault, texts[fault.source])
    digest = hashlib.sha256(f"{body}{sanitizer}{_flags(sanitizer)}{nvrtc.major()}{sorted(texts.items())}".encode())
    for path in sorted(HERE.rglob("*")):
        if path.suffix in ("", ".h", ".cpp") and path.is_file():
            digest.update(path.read_bytes())
    target = CACHE / (digest.hexdigest()[:24] + ("" if sanitizer else ".so"))
    if not target.exists():
        _compile(body, target, sanitizer, texts)
    return target


def _with(fault: Fault, text: str) -> str:
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.source} holds {fault.old!r} {text.count(fault.old)} times, not once")
    return text.replace(fault.old, fault.new)


def _watches(sanitizer: str | None) -> bool:
    return bool(sanitizer and SANITIZERS[sanitizer])


def _flags(sanitizer: str | None) -> list[str]:
    march = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
    return ["-std=c++17", "-O1" if _watches(sanitizer) else "-O2", "-g1", *march, "-fno-strict-aliasing", "-w", "-fPIC"]


def _compile(body: str, target: Path, sanitizer: str | None, texts: Mapping[str, str]) -> None:
    """Compiles kernels (watched) and runtime (not watched) and links them; atomic, several processes may do it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    watched = [f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all"] if _watches(sanitizer) else []
    told = {"address": ["-DSHIM_ASAN"], "thread": ["-DSHIM_TSAN"]}.get(sanitizer or "", [])
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        work = Path(folder)
        for name, text in texts.items():
            (work / name).write_text(text)
        (work / "kernels.cpp").write_text(body)
        includes = [f"-I{work}", f"-I{HERE}", "-isystem", str(nvrtc.headers())]
        _run("g++", *_flags(sanitizer), *watched, *includes, "-c", work / "kernels.cpp", "-o", work / "kernels.o")
        runtime = _runtime(told)
        kind = [] if sanitizer else ["-shared"]
        _run("g++", *kind, *watched, work / "kernels.o", runtime, "-o", work / "linked")
        (work / "linked").replace(target)


def _runtime(told: Sequence[str]) -> Path:
    digest = hashlib.sha256()
    for path in (HERE / "runtime.cpp", *sorted(HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    target = CACHE / f"runtime{''.join(told)}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / "runtime.o"
            _run("g++", *_flags(None), *told, "-c", HERE / "runtime.cpp", "-o", made)
            made.replace(target)
    return target


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    except FileNotFoundError:
        raise ShimError("the CUDA kernels are tested on the CPU with g++, which is missing: install g++") from None
    if done.returncode:
        raise ShimError(f"{' '.join(map(str, command))}\n{done.stderr[:4000]}")
