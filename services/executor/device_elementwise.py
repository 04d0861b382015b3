"""What lies between a model's products on a device: norms, gates and sums, compiled into few kernels by torch.compile.

Each is a small function of its own, so that nothing of a model need be traceable, and the launches of what is compiled
are captured in CUDA graphs like any others. They are compiled once for any number of rows but 1, and once for 1, before
the first step. Where they cannot be, and before that, torch's own kernels compute the same; `reason` says why.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from services.common import checkpoint
from services.common.errors import StartError
from services.executor.executor import is_out_of_memory

MODES = ("auto", "on", "off")
_VARIANTS = 64
"""Of one function, by dtype, width and rows; torch gives up past it."""
_REASON_CHARACTERS = 300

log = logging.getLogger(__name__)

Function = Callable[..., Any]


def missing(device: str) -> str:
    """What torch.compile needs for tensors on a kind of device and this machine lacks; empty where nothing is."""
    if device == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    compilers = ("gcc", "clang", "cc") if device == "cuda" else ("g++", "clang++")
    own = os.environ.get("CC" if device == "cuda" else "CXX")
    if any(shutil.which(name) for name in ([own] if own else compilers)):
        return ""
    language = "C" if device == "cuda" else "C++"
    return f"there is no {language} compiler ({own or ', '.join(compilers)}), which torch.compile needs"


class Elementwise:
    """The functions of one model. `mode` of MODES: "on" raises StartError where "auto" goes on without; `backend` is
    torch.compile's."""

    def __init__(self, mode: str = "off", device: str = "cpu", backend: str | Function = "inductor") -> None:
        self.reason: str = "--compile is off" if mode == "off" else missing(device)
        """Why nothing is compiled; empty where it is."""
        self._mode = mode
        self._backend = backend
        self._prepared = self._preparing = False
        self._functions: list[_Function] = []
        self._check_required()
        if not self.reason:
            _set_up()
        else:
            self._tell()
        # Of this object alone: one function for all layers that are alike.
        self.norm = lru_cache(maxsize=None)(self._norm)
        self.add = lru_cache(maxsize=None)(self._add)
        self.add_norm = lru_cache(maxsize=None)(self._add_norm)
        self._gated: dict[str, _Function] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Elementwise:
        """Of a copied module, which is a probe: nothing is compiled for it."""
        return Elementwise()

    def prepare(self, run: Callable[[int], object], rows: int, *, together: bool = False) -> None:
        """Compiles whatever `run` calls of a number of rows, up to `rows` of them. Raises StartError where it must be
        and cannot be; where it only may be, `run` goes on with torch's kernels. `together`: other ranks run it too, and
        wait for this one."""
        if self.reason and not together:
            return
        with self._compiling():
            for count in dict.fromkeys((max(2, rows), 1)):
                run(count)
        self._check_required()
        self._tell()

    def gated(self, act: torch.nn.Module) -> Function:
        """gate_up [rows, 2 * width] -> act(gate) * up [rows, width]."""
        kind = repr(act)

        def gated(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            product: torch.Tensor = act(gate) * up
            return product

        if kind not in self._gated:
            self._gated[kind] = self._made(gated)
        return self._gated[kind]

    def _norm(self, epsilon: float, offset: float) -> Function:
        """x [rows, width], gain [width] -> RMSNorm of x, [rows, width]."""

        def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            return rms_norm(x, gain, epsilon, offset)

        return self._made(norm)

    def _add(self, epsilon: float, offset: float) -> Function:
        """x, part [rows, width], gain [width] -> x + RMSNorm of part."""

        def add(x: torch.Tensor, part: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            return x + rms_norm(part, gain, epsilon, offset)

        return self._made(add)

    def _add_norm(self, epsilon: float, offset: float, *, after: bool) -> Function:
        """x, part [rows, width], gain [width], of the norm `after` the part another gain -> x + part, RMSNorm of it."""

        def add_norm(
            x: torch.Tensor, part: torch.Tensor, gain: torch.Tensor, after_gain: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if after_gain is not None:
                part = rms_norm(part, after_gain, epsilon, offset)
            total = x + part
            return total, rms_norm(total, gain, epsilon, offset)

        return self._made(add_norm)

    def _made(self, eager: Function) -> _Function:
        made = _Function(self, eager, None if self.reason else torch.compile(eager, backend=self._backend))
        if self._prepared:
            made.run = made.compiled
        self._functions.append(made)
        return made

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        self._prepared = self._preparing = True
        for function in self._functions:
            function.run = function.compiled
        try:
            yield
        finally:
            self._preparing = False

    @property
    def preparing(self) -> bool:
        """What is called now may still fail to compile."""
        return self._preparing

    def fall_back(self, error: BaseException) -> None:
        """Nothing is compiled from now on."""
        self.reason = (
            f"torch.compile fails: {type(error).__name__}: {' '.join(str(error).split())[:_REASON_CHARACTERS]}"
        )
        for function in self._functions:
            function.run = function.compiled = function.eager

    def _tell(self) -> None:
        if self.reason and self._mode != "off":
            log.warning("norms, gates and sums are torch's own kernels: %s", self.reason)
        elif not self.reason:
            log.info("norms, gates and sums are compiled")

    def _check_required(self) -> None:
        if self._mode == "on" and self.reason:
            raise StartError(f"--compile is on, but {self.reason}; give --compile auto to go on without")


class _Function:
    """One of them."""

    def __init__(self, owner: Elementwise, eager: Function, compiled: Function | None) -> None:
        self.run = self.eager = eager
        self.compiled = compiled or eager
        self._owner = owner

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if not self._owner.preparing:
            return self.run(*tensors)
        # Where ranks compute together, one that cannot compile must go on within the step all the same.
        try:
            for tensor in tensors:
                if tensor.ndim == 2 and len(tensor) > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return self.run(*tensors)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._owner.fall_back(error)
            return self.eager(*tensors)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, epsilon: float, offset: float) -> torch.Tensor:
    """Over the last dimension, in float32 arithmetic; `offset` is added to the gains."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (scaled * (gain.float() + offset)).to(x.dtype)


def _set_up() -> None:
    """Where compiled code is kept, and by whom it is made: this process, which starts no others for it."""
    import torch._dynamo.config
    import torch._inductor.config

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(checkpoint.cache_dir() / "inductor"))
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
