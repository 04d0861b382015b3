"""Modules of a model on a device: which are replaced, by what, and that compiled ones compute the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from services.common.errors import StartError
from services.executor import device_elementwise, device_fusing, loader
from services.executor.attention.reference import ReferenceStep
from services.executor.device_elementwise import Elementwise
from services.executor.device_modules import DeviceAttention, DeviceLayer, DeviceMlp, DeviceNorm, WideAngles
from tests.executor.shim_device import ShimDevice
from tests.executor.test_device_executor import NEW_TOKENS, device_executor, generate, outputs, prompts
from tests.support.checkpoints import check_same_ids, reference_ids, tiny_llama, tiny_model


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return loader.load(path, dtype, lambda _: None, device=ShimDevice()).model


FAMILIES = {
    # of four layers: norms, MLPs, attentions, layers
    "llama": (9, 4, 4, 4),
    "qwen3": (17, 4, 4, 4),
    "qwen2": (9, 4, 4, 4),
    "gemma2": (17, 4, 4, 4),
    "phi": (0, 0, 4, 0),
}
KINDS = (DeviceNorm, DeviceMlp, DeviceAttention, DeviceLayer)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_what_is_replaced_computes_the_same(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    original, fused = loaded(path), loaded(path)
    device_fusing.install(fused, Elementwise())
    assert tuple(sum(isinstance(module, kind) for module in fused.modules()) for kind in KINDS) == FAMILIES[family]
    assert sum(isinstance(module, WideAngles) for module in fused.modules()) == 1
    ids = torch.arange(3, 13)[None]
    wanted, got = (
        model(input_ids=ids, position_ids=torch.arange(10)[None], use_cache=False, attention_step=ReferenceStep())
        for model in (original, fused)
    )
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)


class _Doubled(torch.nn.Module):
    """An RMSNorm by its name and parameters, and something else by what it does."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


class OtherRMSNorm(_Doubled):
    pass


def test_what_computes_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    model = loaded(tiny_llama(tmp_path))
    for layer in model.model.layers:
        layer.input_layernorm = OtherRMSNorm(layer.input_layernorm)
    counts = device_fusing.install(model, Elementwise())
    assert "OtherRMSNorm" not in counts and "LlamaDecoderLayer" not in counts
    assert counts["LlamaRMSNorm"] == 3 and counts["LlamaAttention"] == 2
    assert isinstance(model.model.layers[0].input_layernorm, OtherRMSNorm)


class ScaledLayer(LlamaDecoderLayer):
    """Multiplies what it adds, as some families do."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        made: torch.Tensor = super().forward(hidden_states, **options)
        return hidden_states + 0.3 * (made - hidden_states)


def test_a_layer_that_adds_in_another_way_is_left_as_it_is(tmp_path: Path) -> None:
    model = loaded(tiny_llama(tmp_path))
    for layer in model.model.layers:
        layer.__class__ = ScaledLayer
    counts = device_fusing.install(model, Elementwise())
    assert "ScaledLayer" not in counts and counts["LlamaAttention"] == 2


def test_angles_stay_in_float32_in_a_model_of_16_bits(tmp_path: Path) -> None:
    model = loaded(tiny_llama(tmp_path), torch.bfloat16)
    device_fusing.install(model, Elementwise())
    x = torch.zeros(1, 3, 8, dtype=torch.bfloat16)
    cos, sin = model.model.rotary_emb(x, position_ids=torch.arange(3)[None])
    assert cos.dtype == sin.dtype == torch.float32


class Counting:
    """torch.compile's "aot_eager", and how often it was asked."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        self.compiled += 1
        made: Callable[..., Any] = aot_eager(graph, inputs)
        return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With norms of heads of 64 dimensions, which the kernels know."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=64)


def compiling(device: ShimDevice, made: list[Any], **options: Any) -> Callable[..., Any]:
    def make(path: Path, **others: Any) -> Any:
        made.append(device_executor(path, device=device, **others, **options))
        return made[-1]

    return make


async def test_compiled_steps_of_any_number_of_rows_give_the_ids_of_transformers_and_compile_before_the_first(
    model: Path,
) -> None:
    asked, device, backend, made = prompts(1, 15, 17, 40), ShimDevice(), Counting(), []
    make = compiling(device, made, compile_mode="on", compile_backend=backend)
    requests, _ = await generate(model, asked, device, make=make, budget=24, slots=3, preempt=7)
    check_same_ids(model, asked, outputs(requests), reference_ids(model, asked, NEW_TOKENS, ignore_eos=True))
    assert made[0].elementwise.reason == ""
    # norm, sum with norm, gate: each for one row, and for more.
    assert backend.compiled == 6


@pytest.mark.slow
async def test_inductors_code_gives_the_ids_of_transformers(model: Path) -> None:
    asked, device, made = prompts(1, 15, 17), ShimDevice(), []
    make = compiling(device, made, compile_mode="on")
    requests, _ = await generate(model, asked, device, make=make)
    check_same_ids(model, asked, outputs(requests), reference_ids(model, asked, NEW_TOKENS, ignore_eos=True))
    assert made[0].elementwise.reason == ""


def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise RuntimeError("no such instruction")


async def test_where_compiling_fails_torchs_kernels_serve_and_the_reason_is_told(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, device, made = prompts(1, 15), ShimDevice(), []
    make = compiling(device, made, compile_mode="auto", compile_backend=broken)
    with caplog.at_level(logging.WARNING):
        requests, _ = await generate(model, asked, device, make=make)
    check_same_ids(model, asked, outputs(requests), reference_ids(model, asked, NEW_TOKENS, ignore_eos=True))
    assert "no such instruction" in made[0].elementwise.reason
    assert "torch's own kernels: torch.compile fails" in caplog.text


def test_where_it_must_compile_and_cannot_it_does_not_start() -> None:
    ways = Elementwise("on", backend=broken)
    gain = torch.ones(8)
    with pytest.raises(StartError, match=r"--compile is on, but torch.compile fails: .*; give --compile auto"):
        ways.prepare(lambda rows: ways.norm(1e-5, 0.0)(torch.rand(rows, 8), gain), 4)


def test_P6_what_compiling_needs_and_the_machine_lacks_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_elementwise.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert Elementwise("auto").reason == "there is no C++ compiler (g++, clang++), which torch.compile needs"
    monkeypatch.setattr(device_elementwise, "find_spec", lambda name: None)
    assert Elementwise("auto", "cuda").reason == "triton is not installed"
    with pytest.raises(StartError, match="--compile is on, but there is no C"):
        Elementwise("on")
    assert Elementwise("off").reason == "--compile is off"


def test_P6_what_is_compiled_is_kept_in_the_configured_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    Elementwise("auto")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_memory_that_runs_out_while_compiling_is_no_reason_to_go_on_without() -> None:
    def greedy(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *tensors: (_ for _ in ()).throw(MemoryError())

    ways = Elementwise("auto", backend=greedy)
    with pytest.raises(MemoryError):
        ways.prepare(lambda rows: ways.norm(1e-5, 0.0)(torch.rand(rows, 8), torch.ones(8)), 4)
    assert ways.reason == ""
