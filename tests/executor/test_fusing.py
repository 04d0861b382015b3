"""Modules are replaced where, and only where, the replacement does what the original did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.executor import fused, fusing, loader, packing
from services.executor.attention.contract import Scores
from services.executor.attention.reference import ReferenceStep
from services.executor.scratch import Scratch
from tests.support.checkpoints import tiny_model

FUSED = {
    "llama": (9, 4, 4, 4),
    "qwen2": (9, 4, 4, 4),  # biases of queries, keys and values
    "qwen3": (17, 4, 4, 4),  # a norm of queries and one of keys a layer
    "gemma2": (17, 4, 4, 4),  # four norms a layer, of 1 + weight; GELU; soft caps
    "gemma3_text": (25, 4, 4, 4),
    "mixtral": (9, 0, 4, 4),  # experts are transformers' own
    "phi": (0, 0, 4, 0),  # LayerNorm, an MLP without a gate, a part of each head rotated, both parts side by side
    "gpt_neox": (0, 0, 0, 0),
}
"""Norms, MLPs, attentions and layers of four layers and the last norm."""


@pytest.mark.parametrize("model_type", FUSED)
def test_modules_that_are_understood_are_fused(tmp_path: Path, model_type: str) -> None:
    model = loader.load(tiny_model(tmp_path, model_type), torch.float32, lambda progress: None).model
    kinds = (fused.FusedNorm, fused.FusedMlp, fused.FusedAttention, fused.FusedLayer)
    counts = tuple(sum(isinstance(module, kind) for module in model.modules()) for kind in kinds)
    assert counts == FUSED[model_type]


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
    assert isinstance(model["known"], fused.FusedNorm) and isinstance(model["other"], CenteredRMSNorm)
    torch.testing.assert_close(model["known"](x), expected)


WIDTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 16


class Attention(torch.nn.Module):
    """Llama's, written out, with parts in which families differ."""

    def __init__(
        self, *, side_by_side: bool = False, late_norm: bool = False, bias: bool = False, layer: int = 0
    ) -> None:
        super().__init__()
        for name, inputs, outputs in (
            ("q_proj", WIDTH, HEADS * DIM),
            ("k_proj", WIDTH, KV_HEADS * DIM),
            ("v_proj", WIDTH, KV_HEADS * DIM),
            ("o_proj", HEADS * DIM, WIDTH),
        ):
            weights = packing.pack(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)))
            values = torch.nn.Parameter(torch.randn(outputs), requires_grad=False) if bias else None
            self.add_module(name, packing.PackedLinear(weights, values))
        if late_norm:
            self.q_norm, self.k_norm = (torch.nn.RMSNorm(DIM, eps=1e-5, elementwise_affine=True) for _ in range(2))
        self.head_dim = DIM
        self.layer_idx = layer
        self._side_by_side = side_by_side

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: None, attention_step: Any):  # type: ignore[no-untyped-def]
        x = hidden_states[0]
        q, k, v = (self.get_submodule(name)(x).view(len(x), -1, DIM) for name in ("q_proj", "k_proj", "v_proj"))
        cos, sin = (one[0][:, None] for one in position_embeddings)
        q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)  # after the rotation, unlike any family
        out = torch.empty(len(x), HEADS, DIM)
        attention_step.attend(0, torch.cat([q, k, v], dim=1), None, Scores(0.3, 2 + self.layer_idx, 5.0), out)
        return self.get_submodule("o_proj")(out.view(1, len(x), -1)), None

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self._side_by_side:  # GPT-J's: a number is turned with the one beside it
            first, second = x[..., ::2], x[..., 1::2]
            turned = torch.stack([-second, first], dim=-1).flatten(-2)
        else:
            turned = torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], dim=-1)
        return x * cos + turned * sin


@pytest.mark.parametrize("bias", [False, True])
def test_attention_is_fused_with_the_scores_it_asks_for(bias: bool) -> None:
    original = Attention(bias=bias)
    model = torch.nn.ModuleDict({"attention": original}).requires_grad_(False)
    assert fusing.install(model) == {"Attention": 1}
    x, (cos, sin) = torch.randn(1, 7, WIDTH), torch.randn(2, 1, 7, DIM)
    options = {"hidden_states": x, "position_embeddings": (cos, sin), "attention_mask": None}
    got, _ = model["attention"](**options, attention_step=ReferenceStep())
    expected, _ = original(**options, attention_step=ReferenceStep())
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("difference", ["side_by_side", "late_norm"])
def test_attention_that_does_something_else_is_kept(difference: str) -> None:
    model = torch.nn.ModuleDict({"attention": Attention(**{difference: True})}).requires_grad_(False)
    fusing.install(model)
    assert isinstance(model["attention"], Attention)


class Layer(torch.nn.Module):
    """One after the other, or both parts of the same input."""

    def __init__(self, attention: torch.nn.Module, *, parallel: bool) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = torch.nn.Linear(WIDTH, WIDTH)
        self.input_layernorm, self.post_attention_layernorm = (torch.nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self._parallel = parallel

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        between = x + self.self_attn(self.input_layernorm(x), **(options | {"attention_mask": None}))[0]
        return between + self.mlp(self.post_attention_layernorm(x if self._parallel else between))


@pytest.mark.parametrize("parallel", [False, True])
def test_a_layer_is_fused_only_where_its_parts_follow_one_another(parallel: bool) -> None:
    model = torch.nn.ModuleDict({"layer": Layer(Attention(), parallel=parallel)}).requires_grad_(False)
    fusing.install(model)
    assert isinstance(model["layer"], Layer if parallel else fused.FusedLayer)
    assert isinstance(model["layer"].self_attn, fused.FusedAttention)


def test_buffers_are_made_once_for_the_most_rows_and_seen_by_all_who_ask() -> None:
    scratch = Scratch()
    wide = scratch.take("a", 8, 4)
    assert scratch.take("a", 8, 4) is wide and wide.array.shape == tuple(wide.tensor.shape) == (8, 4)
    few = scratch.take("a", 2, 4)
    few.tensor[:] = 7.0
    assert (wide.array[:2] == 7.0).all() and scratch.take("a", 8, 4).array.ctypes.data == wide.array.ctypes.data
    assert scratch.take("b", 2, 4).array.ctypes.data != few.array.ctypes.data


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


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the modules that were compared with a replacement."""
    found: list[str] = []
    agree = fusing._agree
    monkeypatch.setattr(
        fusing, "_agree", lambda original, *others: (found.append(type(original).__name__), agree(original, *others))[1]
    )
    return found


def test_layers_that_differ_in_their_number_alone_are_compared_once(tmp_path: Path, probed: list[str]) -> None:
    loader.load(tiny_model(tmp_path, "llama"), torch.float32, lambda progress: None)
    assert sorted(probed) == ["LlamaAttention", "LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm"]


def test_attentions_that_ask_for_other_scores_by_their_number_are_compared_each(probed: list[str]) -> None:
    model = torch.nn.ModuleDict({str(i): Attention(layer=i) for i in (0, 1)}).requires_grad_(False)
    fusing.install(model)
    assert probed == ["Attention"] * 2
    assert [attention.scores.window_tokens for attention in model.values()] == [2, 3]
