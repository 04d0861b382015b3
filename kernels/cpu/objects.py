"""Machine code that numba's calls by name: compiled of LLVM's text once, kept beside numba's, loaded at import."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba.core.registry import cpu_target

_, CPU, FEATURES = cpu_target.target_context.codegen().magic_tuple()
"""What numba compiles for: this machine, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""
_HAS = frozenset(FEATURES.split(","))
_X86 = llvm.get_process_triple().startswith("x86_64")


def _lanes() -> int:
    """float32 of a vector register."""
    if "+avx512f" in _HAS:
        return 16
    return 8 if "+avx" in _HAS else 4


LANES = _lanes()
REGISTERS = 16 if _X86 and LANES < 16 else 32
"""Vector registers of a core."""
REGISTERS_A_VECTOR = 16 // LANES
"""That 16 float32 take."""

_loaded: list[Any] = []
"""What holds the code that was loaded: it is called until the process ends."""


def provide(name: str, source: Callable[[], str], functions: list[str]) -> None:
    """Makes `functions` of a module, LLVM's text, known by their names to all that numba compiles or loads later.

    The text is a function of this package's files and the CPU, and so is what is kept.
    """
    machine = _target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(_object_code(name, source, machine)))
    engine.finalize_object()
    _loaded.append(engine)
    for function in functions:
        llvm.add_symbol(function, engine.get_function_address(function))


def _target_machine() -> Any:
    return llvm.Target.from_default_triple().create_target_machine(cpu=CPU, features=FEATURES, opt=3, jit=True)


def _object_code(name: str, source: Callable[[], str], machine: Any) -> bytes:
    path = Path(os.environ["NUMBA_CACHE_DIR"]) / f"{name}-{_state()}.o"
    try:
        digest, code = _split(path.read_bytes())
    except OSError:
        digest, code = b"", b""
    if digest != hashlib.sha256(code).digest():
        code = _compiled(source(), machine)
        _keep(hashlib.sha256(code).digest() + code, path)
    return code


def _split(kept: bytes) -> tuple[bytes, bytes]:
    """A file's digest and code: what is damaged is compiled anew, not run."""
    return kept[:32], kept[32:]


def _compiled(text: str, machine: Any) -> bytes:
    module = llvm.parse_assembly(text)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


def _keep(code: bytes, path: Path) -> None:
    """Whole or not at all, whatever other processes do; where nothing can be kept, it is compiled each time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError:
        return


def _state() -> str:
    """Of what the code is made of: this package's files, LLVM and the CPU."""
    parts = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    facts = [str(llvm.llvm_version_info), llvm.get_process_triple(), CPU, FEATURES]
    return hashlib.sha256(b"\0".join([*parts, *(fact.encode() for fact in facts)])).hexdigest()[:16]
