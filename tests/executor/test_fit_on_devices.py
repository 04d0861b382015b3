"""What serving a checkpoint takes, where the executor has devices: what `triptych doctor` tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triptych.executor.v1 import executor_pb2 as pb

from services.cli.doctor import model as doctor
from services.common.errors import StartError
from services.executor import devices, loader
from services.executor.config import ExecutorConfig
from services.executor.fit import Fit, fit
from services.executor.ranks.division import Shard
from tests.executor.shim_device import ShimDevice

FREE = 64 << 20


@pytest.fixture(autouse=True)
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CudaDevice", lambda number, built: ShimDevice(free_bytes=FREE))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def fitted(path: Path, **options: object) -> Fit:
    ranks = int(options.get("tp_size", 1))  # type: ignore[call-overload]
    engine = pb.EngineConfig(context_tokens=1024, block_tokens=16, max_slots=4, max_step_tokens=256, tp_size=ranks)
    return fit(path, engine, ExecutorConfig(model=str(path), device="cuda", **options))


def test_a_device_of_its_own_has_room_for_a_rank_whatever_the_others_have(tiny: Path) -> None:
    alone, one_of_two = fitted(tiny), fitted(tiny, tp_size=2)
    weights = [loader.weight_bytes(tiny, torch.float32, Shard(rank, 2, 0), packed=False) for rank in (0, 1)]
    assert list(one_of_two.rank_weight_bytes) == weights and sum(weights) > alone.weight_bytes
    assert alone.kv_bytes == int(0.9 * (FREE - alone.weight_bytes))
    assert one_of_two.kv_bytes == int(0.9 * (FREE - weights[0]))
    assert 2 * one_of_two.block_bytes == alone.block_bytes


def test_doctor_says_whether_norms_are_compiled_and_on_how_many_devices(tiny: Path) -> None:
    told = doctor._compute(fitted(tiny, compile="off", tp_size=2))
    assert told.text.startswith("cuda:0 and those after it, one a rank: ")
    assert "norms, gates and sums are torch's own kernels, since --compile is off" in told.text
    assert told.facts["compiled_graphs"] is False and told.facts["eager_since"] == "--compile is off"
    assert "cuda:0: the model's own code" in doctor._compute(fitted(tiny, compile="off")).text


def test_what_cannot_compile_and_must_is_a_reason_against_starting(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in fitted(tiny).eager_since
    with pytest.raises(StartError, match="--compile is on, but there is no C"):
        fitted(tiny, compile="on")
