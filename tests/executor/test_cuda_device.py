"""The card as the executor's device, as far as that goes without one: torch.cuda and CuPy are stand-ins here."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import instances
from kernels.cubins import Cubins, architecture_for
from services.common.cuda_versions import Driver
from services.common.errors import StartError
from services.executor import cuda_device, devices
from services.executor import main as executor_main
from services.executor.config import ExecutorConfig
from services.executor.cuda_device import CudaDevice
from services.executor.ranks import peers
from services.executor.ranks.follower import Place


class _Cupy:
    """kernels.cupy_device.CupyDevice up to the point where a driver is needed."""

    def __init__(self, capability: int, stream: Callable[[], int], *, built: Path, cache: Path) -> None:
        self.architecture = architecture_for(capability)
        self.stream = stream
        self.cubins = Cubins(self.architecture, built, cache)
        self.cache_folder_at_import = os.environ.get("CUPY_CACHE_DIR")

    def load(self, instance: instances.Instance) -> bytes:
        return self.cubins.find(instance).cubin


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.cuda_stream = name, log, 7

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class _Card:
    """What torch.cuda says of a machine with `count` cards, and what is done there, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, major: int = 9, count: int = 2) -> None:
        self.done: list[str] = []
        self.allocated, self.peak, self.sticky = 100, 0, False
        stream, second = _Stream("current", self.done), _Stream("capturing", self.done)
        properties = types.SimpleNamespace(major=major, minor=0, multi_processor_count=132)
        stand_ins: dict[str, Any] = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_device_properties": lambda number: properties,
            "current_stream": lambda number=None: stream,
            "Stream": type("Stream", (), {"__new__": lambda cls, number: second}),
            "set_device": lambda number: self.done.append(f"set_device {number}"),
            "mem_get_info": lambda number: (1000, 5000),
            "memory_reserved": lambda number: 300,
            "memory_allocated": lambda number: self.allocated,
            "max_memory_allocated": lambda number: self.peak,
            "reset_peak_memory_stats": lambda number: setattr(self, "peak", self.allocated),
            "empty_cache": lambda: self.done.append("empty_cache"),
            "synchronize": self._synchronize,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": object,
            "graph": self._graph,
            "stream": self._on,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.version, "cuda", "12.9")
        monkeypatch.setattr(cuda_device, "cupy_installed", lambda: [(12, "cupy-cuda12x 14.2.0")])
        monkeypatch.setattr(cuda_device, "find_driver", lambda: Driver("570.1", (12, 8)))
        monkeypatch.setitem(sys.modules, "kernels.cupy_device", types.SimpleNamespace(CupyDevice=_Cupy))
        monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)

    def _synchronize(self, number: int) -> None:
        if self.sticky:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @contextlib.contextmanager
    def _graph(self, graph: object, *, pool: str, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        self.done.append(f"capture on {stream.name} into {pool}, {capture_error_mode}")
        yield
        self.done.append("captured")

    @contextlib.contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        self.done.append(f"on {stream.name}")
        yield


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Card:
    return _Card(monkeypatch, tmp_path)


def test_what_the_executor_is_told_of_a_card(card: _Card, tmp_path: Path) -> None:
    device = CudaDevice(1)
    assert (device.name, device.kind, device.torch_device) == ("cuda:1", "cuda", torch.device("cuda", 1))
    assert (device.capability, device.multiprocessors) == (90, 132)
    assert device.kernels.stream() == 7
    assert device.available_bytes() == 1000 + 300 - 100, "what torch keeps for later is free"


def test_P6_caches_lie_in_the_configured_folder_before_cupy_is_imported(card: _Card, tmp_path: Path) -> None:
    device = CudaDevice()
    assert device.kernels.cache_folder_at_import == str(tmp_path / "cache" / "cupy")
    assert device.kernels.cubins.cache == tmp_path / "cache" / "kernels"


def test_P6_a_folder_that_cupy_was_given_is_left_to_it(card: _Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    assert CudaDevice().kernels.cache_folder_at_import == "/elsewhere"


def test_P6_kernels_that_can_be_kept_nowhere_are_an_error_that_says_what_to_do(
    card: _Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a read-only root, where a folder cannot be made; here a file is in its place."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(StartError, match=r"cannot be kept in .*cache/kernels: .*; set TRIPTYCH_CACHE to a folder that"):
        CudaDevice().load_kernels([instances.reference("float32", 64)])


def test_P6_kernels_are_found_where_they_were_built_or_compiled_once(card: _Card, tmp_path: Path) -> None:
    device = CudaDevice()
    device.load_kernels([instances.reference("float32", 64)])
    (kept,) = (tmp_path / "cache" / "kernels").iterdir()
    before = kept.stat().st_mtime_ns
    CudaDevice().load_kernels([instances.reference("float32", 64)])
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cuda": None}, r"torch .* is built without CUDA; install a CUDA build of torch"),
        ({"cupy": []}, "CuPy is not installed; torch is built for CUDA 12: cupy-cuda12x"),
        ({"cupy": [(13, "cupy-cuda13x 14.2.0")]}, "torch is built for CUDA 12, CuPy for 13; install cupy-cuda12x"),
        ({"driver": Driver("470", (11, 4))}, "torch is built for CUDA 12, the driver serves up to 11"),
        ({"driver": None, "count": 0}, "there is no NVIDIA driver; start the executor with --device cpu"),
        ({"count": 0}, "torch finds no device"),
        ({"count": 1}, "--device is cuda:1, there are 1 devices"),
        ({"major": 7}, "no kernels for compute capability 70"),
    ],
)
def test_P6_what_does_not_go_together_is_told_at_the_start(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _Card(monkeypatch, tmp_path, major=changes.get("major", 9), count=changes.get("count", 2))
    if "cuda" in changes:
        monkeypatch.setattr(torch.version, "cuda", changes["cuda"])
    if "cupy" in changes:
        monkeypatch.setattr(cuda_device, "cupy_installed", lambda: changes["cupy"])
    if "driver" in changes:
        monkeypatch.setattr(cuda_device, "find_driver", lambda: changes["driver"])
    with pytest.raises(StartError, match=said):
        CudaDevice(1)


def test_a_steps_height_is_what_it_takes_over_what_is_held(card: _Card) -> None:
    def work() -> None:
        card.peak = 170

    assert CudaDevice().peak_bytes(work) == 70 and card.done == ["empty_cache"]


def test_work_runs_once_on_the_stream_that_captures_it(card: _Card) -> None:
    CudaDevice().capture(lambda: card.done.append("work"))
    assert card.done == [
        "capturing waits for current",
        "on capturing",
        "work",
        "current waits for capturing",
        "capture on capturing into pool, thread_local",
        "work",
        "captured",
    ]


def test_a_device_is_lost_when_it_answers_nothing_any_more(card: _Card) -> None:
    device = CudaDevice()
    assert not device.is_lost(RuntimeError("CUDA error: invalid argument"))
    card.sticky = True
    assert device.is_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not device.is_lost(torch.OutOfMemoryError("too much"))


def test_auto_is_the_first_card_or_the_cpu_with_the_reason(
    card: _Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = devices.choose("auto")
    assert found is not None and found.name == "cuda:0"
    assert devices.choose("cpu") is None
    monkeypatch.setattr(cuda_device, "cupy_installed", list)
    with caplog.at_level(logging.INFO):
        assert devices.choose("auto") is None
    assert "served on the CPU: --device cuda: CuPy is not installed" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda", "tp_size": 3}, "--tp-size is 3, a device a rank, and this machine has 2; lower it, or"),
        ({"device": "cuda:1", "tp_size": 2}, "--device is cuda:1, which is one, and --tp-size 2 ranks take one each"),
        ({"compile": "on"}, "--compile is on, but the device is the CPU"),
        ({"attention_backend": "torch-sdpa", "tp_size": 2}, "--attention-backend is not served with --tp-size yet"),
        ({"cuda_graph_sizes": "1,2"}, "--cuda-graph-sizes is 1,2, but the device is the CPU"),
    ],
)
def test_options_that_are_not_served_with_one_another_are_refused(
    options: dict[str, Any], said: str, card: _Card
) -> None:
    settings = ExecutorConfig(threads=1, **options)
    with pytest.raises(StartError, match=said):
        executor_main._devices(settings)


def test_an_executor_on_a_card_is_made_of_its_options(card: _Card, tiny: Path) -> None:
    settings = ExecutorConfig(threads=1, device="cuda:1", cuda_graph_sizes="4, 1", attention_backend="torch-sdpa")
    executor: Any = executor_main._executor(tiny, settings, executor_main._devices(settings))
    assert executor._device.name == "cuda:1" and executor._graph_sizes == (4, 1)
    assert executor._attention_backend == "torch-sdpa" and executor.dtypes.default == torch.float32
    assert executor.elementwise.reason, "this machine has no triton"


def test_ranks_take_a_card_each_and_are_made_of_the_options(
    card: _Card, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places: list[Place] = []

    def start(place: Place, connection: Any, log_level: str) -> Any:
        places.append(place)
        return types.SimpleNamespace(wait=lambda timeout: 0, kill=lambda: None)

    monkeypatch.setattr(peers, "start_process", start)
    settings = ExecutorConfig(
        threads=1, device="cuda", tp_size=2, compile="off", cuda_graph_sizes="off", kernels=tmp_path, kv_memory_bytes=99
    )
    executor: Any = executor_main._executor(tiny, settings, executor_main._devices(settings))
    executor.close()
    (place,) = places
    assert executor.tp_size == 2 and executor._device.name == "cuda:0" and executor._graph_sizes == ()
    assert (place.rank, place.device, place.compile_mode, place.kernels) == (1, "cuda:1", "off", str(tmp_path))
    assert place.kv_memory_bytes == executor._kv_memory_bytes == 99


def test_too_few_cards_for_the_ranks_leave_auto_on_the_cpu(card: _Card, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert devices.choose_for_ranks("auto", 3) == (None, ())
    assert "served on the CPU: --tp-size is 3, a device a rank, and this machine has 2" in caplog.text
    assert devices.choose_for_ranks("cpu", 3) == (None, ())


def test_without_a_card_the_process_says_so_and_ends(tiny: Path) -> None:
    with pytest.raises(StartError, match="--device cuda: torch"):
        executor_main.main(["--model", str(tiny), "--device", "cuda", "--port", "0"])
