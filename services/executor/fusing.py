"""Modules of a loaded model replaced by ones that do the same in fewer passes over memory.

What a module does is not told by its name: each replacement is first compared with the original on random numbers, and
left out where it differs. So a family whose norm, MLP, attention or layer means something else keeps transformers' own.
Modules of one class whose sizes and settings are the same compute the same, so the first of them is compared for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kernels.cpu import compact, tile
from services.executor import stack
from services.executor.attention.contract import Scores
from services.executor.attention.reference import ReferenceStep
from services.executor.fused import FusedAttention, FusedLayer, FusedMlp, FusedNorm, Heads, Norms
from services.executor.packing import PackedLinear
from services.executor.scratch import Scratch

Fused = FusedNorm | FusedMlp | FusedAttention | FusedLayer
Candidates = Callable[[torch.nn.Module, Scratch], Iterator[Fused]]

_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION_PARTS = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "dense"})
_HEAD_NORMS = {"q_norm", "k_norm"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_NORMS_AFTER = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""Of layers that norm what their parts give, too; there post_attention_layernorm is that of the first part."""
_PLAIN = (bool, int, float, str, Scores, Heads)
_NUMBERS = ("layer_idx", "layer")
_PROBE_TOKENS = 3
_TOLERANCE = 1e-4
"""Of a probe, relative to its largest value: far above rounding, far below what another formula gives."""


def install(model: torch.nn.Module) -> dict[str, int]:
    """Replaces what it can in a model whose linear layers are packed; returns how many of which class.

    From the inside out, since a layer is fused of fused parts.
    """
    scratch = Scratch()
    counts: dict[str, int] = {}
    for candidates in (_norms_and_mlps, _attentions, _layers):
        for name in _replace(model, candidates, scratch):
            counts[name] = counts.get(name, 0) + 1
    _stack(model, scratch)
    return counts


def _stack(model: torch.nn.Module, scratch: Scratch) -> None:
    """Makes one module of each list of layers that are alike."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.ModuleList):
            layers = [layer for layer in module if isinstance(layer, FusedLayer)]
            if layers and len(layers) == len(module) and stack.fits(layers):
                model.set_submodule(name, torch.nn.ModuleList([stack.FusedStack(layers, scratch)]))


def _replace(model: torch.nn.Module, candidates: Candidates, scratch: Scratch) -> Iterator[str]:
    """Yields the class of each module that was replaced."""
    replaced: list[str] = []
    verdicts: dict[Hashable, bool] = {}
    # By name, since a list of modules would keep every original's weights until the last is replaced.
    for name in [name for name, _ in model.named_modules()]:
        if any(name.startswith(f"{parent}.") for parent in replaced):
            continue
        module = model.get_submodule(name)
        theirs = _kind(module)
        for place, candidate in enumerate(candidates(module, scratch)):
            kind = (place, theirs, _kind(candidate))
            if kind not in verdicts:
                verdicts[kind] = _agree(module, candidate)
            if verdicts[kind]:
                model.set_submodule(name, candidate)
                replaced.append(name)
                yield type(module).__name__
                break


def _norms_and_mlps(module: torch.nn.Module, scratch: Scratch) -> Iterator[Fused]:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if type(module).__name__.endswith("RMSNorm") and epsilon is not None and weight is not None and weight.ndim == 1:
        yield FusedNorm(weight.detach(), epsilon)
        yield FusedNorm(1 + weight.detach(), epsilon)
    parts = dict(module.named_children())
    if parts.keys() == _MLP_PARTS:
        joined, down = _joined([parts["gate_proj"], parts["up_proj"]]), parts["down_proj"]
        if joined is not None and isinstance(down, PackedLinear):
            yield FusedMlp(joined, down, parts["act_fn"], scratch)


def _attentions(module: torch.nn.Module, scratch: Scratch) -> Iterator[Fused]:
    parts = dict(module.named_children())
    if parts.keys() - _HEAD_NORMS not in _ATTENTION_PARTS:
        return
    joined = _joined([parts["q_proj"], parts["k_proj"], parts["v_proj"]])
    out = parts.get("o_proj", parts.get("dense"))
    if joined is None or not isinstance(out, PackedLinear):
        return
    dim = int(module.head_dim)  # type: ignore[arg-type]
    queries, every = out.weights.depth // dim, joined.weights.outputs // dim
    norms = [parts[name] for name in sorted(_HEAD_NORMS & parts.keys(), reverse=True)]
    fused = [norm for norm in norms if isinstance(norm, FusedNorm) and norm.width == dim]
    if len(fused) != len(norms) or len(fused) == 1 or len({norm.epsilon for norm in fused}) > 1:
        return
    angles = int(getattr(module, "rotary_ndims", dim))  # phi's, which rotates a part of each head
    with torch.inference_mode():
        _, scores = _attended(module, _random(1, _PROBE_TOKENS, joined.weights.depth), angles)
    yield FusedAttention(
        joined,
        out,
        Heads(queries, (every - queries) // 2, dim, angles),
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scores=scores,
        norms=(fused[0], fused[1]) if fused else None,
        scratch=scratch,
    )


def _layers(module: torch.nn.Module, scratch: Scratch) -> Iterator[Fused]:
    parts: dict[str, Any] = dict(module.named_children())
    if parts.keys() - _NORMS_AFTER != _LAYER_PARTS or not isinstance(parts["self_attn"], FusedAttention):
        return
    first, second = parts["input_layernorm"], parts["post_attention_layernorm"]
    third, last = (parts.get(name) for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"))
    if not all(isinstance(norm, FusedNorm) for norm in (first, second, third, last) if norm is not None):
        return
    norms = Norms(first, None, second, None) if third is None else Norms(first, second, third, last)
    yield FusedLayer(norms, parts["self_attn"], parts["mlp"], scratch)


def _joined(layers: Sequence[torch.nn.Module]) -> PackedLinear | None:
    """One layer with the outputs of all; None where their panels do not follow one another."""
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    weights = [layer.weights for layer in packed]
    biases: list[torch.Tensor] = [layer.bias for layer in packed if layer.bias is not None]
    if (
        len(packed) < len(layers)
        or len({(one.panels.dtype == np.float32, one.depth) for one in weights}) > 1
        or any(one.outputs % tile.OUTPUTS for one in weights[:-1])
        or len(biases) not in (0, len(packed))
    ):
        return None
    bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    return PackedLinear(compact.joined(weights), bias)


def _kind(module: torch.nn.Module) -> Hashable:
    """Class, plain settings and shapes of a module and of those in it; not which of a model's layers it is.

    What an attention does otherwise for its number shows in the scores it asks for, which its replacement holds.
    """
    return tuple((name, type(part), _settings(part), _shapes(part)) for name, part in module.named_modules())


def _settings(module: torch.nn.Module) -> Hashable:
    return tuple(
        sorted((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN) and key not in _NUMBERS)
    )


def _shapes(module: torch.nn.Module) -> Hashable:
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in held)


@torch.inference_mode()
def _agree(original: torch.nn.Module, candidate: Fused) -> bool:
    """Whether both make the same of random numbers: rows, or the first tokens of a prompt."""
    probe = _random(1, _PROBE_TOKENS, candidate.width)
    if isinstance(candidate, FusedNorm | FusedMlp):
        expected, got = original(probe), candidate(probe)
    elif isinstance(candidate, FusedAttention):
        expected, got = (_attended(module, probe, candidate.angles)[0] for module in (original, candidate))
    else:
        options = {"position_embeddings": _angles(candidate.self_attn.angles), "attention_step": ReferenceStep()}
        # A copy for each, since the fused one works in place.
        expected, got = (module(probe.clone(), attention_mask=None, **options) for module in (original, candidate))
    return bool((expected - got).abs().max() <= _TOLERANCE * expected.abs().max())


def _attended(attention: torch.nn.Module, x: torch.Tensor, angles: int) -> tuple[torch.Tensor, Scores]:
    """What an attention module makes of x, and how it asked for its scores."""
    step = ReferenceStep()
    out = attention(hidden_states=x, position_embeddings=_angles(angles), attention_mask=None, attention_step=step)
    return out[0], step.scores


def _angles(angles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any numbers will do for cosines and sines: what is made of them is what is compared."""
    cos, sin = _random(2, _PROBE_TOKENS, angles)
    return cos[None], sin[None]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
