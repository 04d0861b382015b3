"""Launches kernels on a GPU through CuPy, on whatever stream the caller's framework is at. Not yet run on hardware."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cupy.cuda import Stream
from cupy.cuda.function import Module
from cupy_backends.cuda.api import driver

from kernels.cubins import Cubins, architecture_for
from kernels.instances import Instance
from kernels.launch import Grid
from kernels.params import Params

_FREE_SHARED_BYTES = 48 * 1024
"""What a kernel may use without asking."""
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of the driver API."""


class CupyDevice:
    """A kernels.launch.Device.

    Loads a module when its kernel is first launched; before a CUDA graph is captured, launch (or `load`) each once.
    """

    def __init__(self, capability: int, stream: Callable[[], int], *, built: Path, cache: Path) -> None:
        """`capability` as 90; `stream` gives the handle of the stream to launch on (torch: `cuda_stream`)."""
        self.architecture = architecture_for(capability)
        self._stream = stream
        self._streams: dict[int, Any] = {}
        self._cubins = Cubins(self.architecture, built, cache)
        self._functions: dict[str, Any] = {}

    def load(self, instance: Instance) -> Any:
        """The loaded function, with leave to use the shared memory it needs."""
        function = self._functions.get(instance.name)
        if function is None:
            code = self._cubins.find(instance)
            module = Module()
            module.load(code.cubin)
            function = self._functions[instance.name] = module.get_function(code.lowered)
            if instance.shared_bytes > _FREE_SHARED_BYTES:
                driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, instance.shared_bytes)
        return function

    def launch(self, instance: Instance, grid: Grid, params: Params) -> None:
        """Queues the grid."""
        function, stream = self.load(instance), self._current_stream()
        function(grid, (instance.threads, 1, 1), (params.by_value,), shared_mem=instance.shared_bytes, stream=stream)

    def _current_stream(self) -> Any:
        """As CuPy knows it; a process has few, so each is wrapped once."""
        handle = self._stream()
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = Stream.from_external(_Handle(handle))
        return stream


class _Handle:
    """A stream of another library, by the protocol of the same name."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the handle."""
        return 0, self._handle
