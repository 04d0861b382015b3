"""Modules are replaced where, and only where, the replacement does what the original did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.executor import fusing, loader
from tests.support.checkpoints import tiny_model

FUSED = {
    "llama": (9, 4),
    "qwen3": (17, 4),  # a norm of queries and one of keys a layer
    "gemma2": (17, 4),  # four norms a layer, of 1 + weight; GELU
    "phi": (0, 0),  # LayerNorm, and an MLP without a gate
}
"""Norms and MLPs of four layers and the last norm."""


@pytest.mark.parametrize("model_type", FUSED)
def test_norms_and_mlps_that_are_understood_are_fused(tmp_path: Path, model_type: str) -> None:
    model = loader.load(tiny_model(tmp_path, model_type), torch.float32, lambda progress: None).model
    norms = [module for module in model.modules() if isinstance(module, fusing.FusedNorm)]
    mlps = [module for module in model.modules() if isinstance(module, fusing.FusedMlp)]
    assert (len(norms), len(mlps)) == FUSED[model_type]


class CenteredRMSNorm(torch.nn.Module):
    """Says that it is one, and takes the mean off first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32), requires_grad=False)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (32,), self.weight, None, self.eps)


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_is_known_by_what_it_does_and_not_by_its_name(plus_one: bool) -> None:
    known = torch.nn.RMSNorm(32, eps=1e-5)
    known.weight.data = torch.randn(32)
    if plus_one:
        known.register_forward_hook(lambda module, args, out: out / module.weight * (1 + module.weight))
    model = torch.nn.ModuleDict({"known": known, "other": CenteredRMSNorm()}).requires_grad_(False)
    x = torch.randn(5, 32)
    expected = known(x)
    fusing.install(model)
    assert isinstance(model["known"], fusing.FusedNorm) and isinstance(model["other"], CenteredRMSNorm)
    torch.testing.assert_close(model["known"](x), expected)


class ScaledRMSNorm(torch.nn.Module):
    """An RMSNorm but for a factor that each has of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32), requires_grad=False)
        self.eps = 1e-5
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * torch.nn.functional.rms_norm(x, (32,), self.weight, self.eps)


def test_what_is_found_of_one_module_holds_for_those_with_the_same_settings_alone() -> None:
    factors = (1.0, 3.0, 1.0)
    model = torch.nn.ModuleDict({str(i): ScaledRMSNorm(factor) for i, factor in enumerate(factors)})
    assert fusing.install(model) == {"ScaledRMSNorm": 2}
    assert [isinstance(module, fusing.FusedNorm) for module in model.values()] == [True, False, True]
