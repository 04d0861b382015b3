"""Modules of a loaded model replaced by ones that do the same in fewer passes over memory.

What a module does is not told by its name: a replacement is first compared with the original on a random row, and left
out where it differs. So a family whose norm or MLP means something else keeps transformers' own. Modules of one class
whose sizes and settings are the same compute the same, so the first of them is compared for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from kernels.cpu import elementwise, linear, pages, tile
from services.executor.packing import PackedLinear

_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_TOLERANCE = 1e-4
"""Of a probe, relative to its largest value: far above rounding, far below what another formula gives."""


def install(model: torch.nn.Module) -> dict[str, int]:
    """Replaces what it can in a model whose linear layers are packed; returns how many of which class."""
    counts: dict[str, int] = {}
    replaced: list[str] = []
    verdicts: dict[Hashable, bool] = {}
    # By name, since a list of modules would keep every original's weights until the last is replaced.
    for name in [name for name, _ in model.named_modules()]:
        if any(name.startswith(f"{parent}.") for parent in replaced):
            continue
        module = model.get_submodule(name)
        for place, candidate in enumerate(_candidates(module)):
            kind = (place, _kind(module))
            if kind not in verdicts:
                verdicts[kind] = _agree(module, candidate)
            if verdicts[kind]:
                model.set_submodule(name, candidate)
                replaced.append(name)
                counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
                break
    return counts


class FusedNorm(torch.nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, gain: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(gain, requires_grad=False)
        self.width = len(gain)
        self._gain = gain.numpy()
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] float32 -> the same shape."""
        rows = x.reshape(-1, self.width).contiguous()
        out = torch.empty(rows.shape)
        elementwise.rms_norm(rows.numpy(), self._gain, self._epsilon, out.numpy())
        return out.view(x.shape)


class FusedMlp(torch.nn.Module):
    """down(act(gate(x)) * up(x)): gate and up are one product; with SiLU their product is one pass."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, act: torch.nn.Module) -> None:
        super().__init__()
        self.width = gate_up.weights.depth
        self.gate_up = gate_up
        self.down_proj = down
        self.act = act
        self._is_silu = type(act).__name__ in ("SiLUActivation", "SiLU")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] float32 -> the same shape."""
        gate_up: torch.Tensor = self.gate_up(x)
        inner_width = gate_up.shape[-1] // 2
        if self._is_silu:
            inner = torch.empty(*x.shape[:-1], inner_width)
            elementwise.silu_multiply(gate_up.view(-1, 2 * inner_width).numpy(), inner.view(-1, inner_width).numpy())
        else:
            inner = self.act(gate_up[..., :inner_width]) * gate_up[..., inner_width:]
        out: torch.Tensor = self.down_proj(inner)
        return out


def _candidates(module: torch.nn.Module) -> Iterator[FusedNorm | FusedMlp]:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if type(module).__name__.endswith("RMSNorm") and epsilon is not None and weight is not None and weight.ndim == 1:
        yield FusedNorm(weight.detach(), epsilon)
        yield FusedNorm(1 + weight.detach(), epsilon)
    if {name for name, _ in module.named_children()} == _MLP_PARTS:
        gate, up, down = (module.get_submodule(part) for part in ("gate_proj", "up_proj", "down_proj"))
        if (joined := _joined(gate, up)) is not None and isinstance(down, PackedLinear):
            yield FusedMlp(joined, down, module.get_submodule("act_fn"))


def _joined(first: torch.nn.Module, second: torch.nn.Module) -> PackedLinear | None:
    """One layer with the outputs of both; None where their panels do not follow one another."""
    if not isinstance(first, PackedLinear) or not isinstance(second, PackedLinear):
        return None
    one, other = first.weights, second.weights
    like = one.panels.dtype == other.panels.dtype and one.panels.shape == other.panels.shape
    if not like or one.outputs % tile.OUTPUTS or (first.bias is None) != (second.bias is None):
        return None
    bias = None
    if first.bias is not None and second.bias is not None:
        bias = torch.nn.Parameter(torch.cat([first.bias, second.bias]), requires_grad=False)
    panels = pages.concatenate([one.panels, other.panels])
    return PackedLinear(linear.Packed(panels, one.outputs + other.outputs), bias)


def _kind(module: torch.nn.Module) -> Hashable:
    """Class, plain settings and shapes of a module and of those in it."""
    return tuple(
        (
            name,
            type(part),
            tuple(
                sorted((key, value) for key, value in vars(part).items() if isinstance(value, bool | int | float | str))
            ),
            tuple((key, tensor.shape, tensor.dtype) for key, tensor in part.state_dict(keep_vars=True).items()),
        )
        for name, part in module.named_modules()
    )


@torch.inference_mode()
def _agree(original: torch.nn.Module, candidate: FusedNorm | FusedMlp) -> bool:
    probe = torch.randn(1, 2, candidate.width, generator=torch.Generator().manual_seed(0))
    expected, got = original(probe), candidate(probe)
    return bool((expected - got).abs().max() <= _TOLERANCE * expected.abs().max())
