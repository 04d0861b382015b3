"""All layers of a model as one module: a decode step goes through them in one compiled call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from kernels.cpu import compact, decode, tile
from kernels.cpu.paged_attention import get_num_threads
from services.executor.attention.contract import AttentionStep
from services.executor.attention.cpu import CpuStep
from services.executor.fused import Angles, Float32s, FusedLayer, FusedMlp, FusedNorm
from services.executor.packing import PackedLinear
from services.executor.scratch import Scratch


class FusedStack(torch.nn.Module):
    """Layers that are alike, one after the other; stands in their list as the only one.

    All get the same position embeddings. What is no decode of few rows, or runs on another attention backend than the
    CPU's, goes from layer to layer.
    """

    def __init__(self, layers: Sequence[FusedLayer], scratch: Scratch) -> None:
        """Raises ValueError where layers differ in what `fits` asks for."""
        super().__init__()
        if not fits(layers):
            raise ValueError("these layers are not alike, or have parts that the decode kernel does not know")
        self.layers = torch.nn.ModuleList(layers)
        self._heads = layers[0].self_attn.heads
        self._inner = _products(layers[0])[-1].weights.depth
        self._weights = _weights(layers)
        self._counters = decode.counters(len(layers))
        self._threads = get_num_threads()
        self._scratch = scratch

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Angles,
        attention_step: AttentionStep,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, width] float32, contiguous; it is changed to the result, and returned."""
        step = attention_step
        if self.takes(step):
            self._decode(hidden_states[0].numpy(), position_embeddings, step)
            return hidden_states
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings, attention_step=step, **others)
        return hidden_states

    @staticmethod
    def takes(step: AttentionStep) -> TypeGuard[CpuStep]:
        """Whether all layers of such a step are one call."""
        return isinstance(step, CpuStep) and step.is_decode and step.tokens <= decode.MOST_ROWS

    def _decode(self, x: Float32s, angles: Angles, step: CpuStep) -> None:
        cos, sin = (one[0].numpy() for one in angles)
        decode.run(x, self._weights, step.cache.whole, step.rows, cos, sin, self._between(len(x)), self._threads)

    def _between(self, rows: int) -> decode.Buffers:
        heads = self._heads

        def by_head(purpose: str, count: int) -> Float32s:
            return self._scratch.take(purpose, rows, count * heads.dim).array.reshape(rows, count, heads.dim)

        return decode.Buffers(
            projected=by_head("projected", heads.queries + 2 * heads.kv),
            queries=by_head("queries", heads.queries),
            attended=by_head("attended", heads.queries),
            inner=self._scratch.take("inner", rows, self._inner).array,
            counters=self._counters,
        )


def fits(layers: Sequence[FusedLayer]) -> bool:
    """Whether the decode kernel computes what these do: alike, in order, packed in one type, two norms, SiLU."""
    return (
        len({_traits(layer) for layer in layers}) == 1
        and [layer.self_attn.layer for layer in layers] == list(range(len(layers)))
        and all(_is_known(layer) for layer in layers)
    )


def _is_known(layer: FusedLayer) -> bool:
    mlp, norms, width = layer.mlp, layer.norms, layer.width
    if not isinstance(mlp, FusedMlp) or not mlp.is_silu or norms.after_attention or norms.after_mlp:
        return False
    products = _products(layer)
    return (
        norms.before_attention.epsilon == norms.before_mlp.epsilon
        and all(type(one) is PackedLinear for one in products)  # a rank's must meet those of others
        and len({one.weights.panels.dtype for one in products}) == 1
        and layer.self_attn.o_proj.weights.outputs == mlp.down_proj.weights.outputs == width
        and mlp.gate_up.weights.outputs == 2 * mlp.down_proj.weights.depth
        and mlp.down_proj.weights.depth % tile.OUTPUTS == 0
    )


def _traits(layer: FusedLayer) -> Hashable:
    attention = layer.self_attn
    if not isinstance(layer.mlp, FusedMlp):
        return None
    return (
        attention.heads,
        attention.q_norm and attention.q_norm.epsilon,
        layer.norms.before_attention.epsilon,
        tuple((one.weights.panels.shape, one.weights.panels.dtype, one.weights.outputs) for one in _products(layer)),
    )


def _products(layer: FusedLayer) -> tuple[PackedLinear, ...]:
    """In the order in which they run."""
    if not isinstance(layer.mlp, FusedMlp):
        raise TypeError(f"an MLP is {type(layer.mlp).__name__}, not fused")
    return layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up, layer.mlp.down_proj


def _weights(layers: Sequence[FusedLayer]) -> decode.Weights:
    attentions = [layer.self_attn for layer in layers]
    products = [_products(layer) for layer in layers]
    has_bias = any(one.bias is not None for layer in products for one in layer)
    norms = [(one.q_norm, one.k_norm) for one in attentions if one.q_norm is not None and one.k_norm is not None]
    return decode.Weights(
        panels=products[0][0].weights.panels,
        addresses=np.array([[one.weights.panels.ctypes.data for one in layer] for layer in products]),
        outliers=np.array([[compact.outliers_address(one.weights) for one in layer] for layer in products]),
        biases=np.stack([_biases(layer) for layer in products]) if has_bias else np.zeros((len(layers), 0), np.float32),
        gains=_gains([(layer.norms.before_attention, layer.norms.before_mlp) for layer in layers]),
        epsilon=np.float32(layers[0].norms.before_attention.epsilon),
        head_gains=_gains(norms) if norms else np.zeros((len(layers), 2, 0), np.float32),
        head_epsilon=np.float32(norms[0][0].epsilon if norms else 0),
        scales=np.array([one.scores.scale for one in attentions], np.float32),
        windows=np.array([one.scores.window_tokens or 0 for one in attentions]),
        caps=np.array([one.scores.soft_cap or 0 for one in attentions], np.float32),
    )


def _gains(norms: Sequence[tuple[FusedNorm, FusedNorm]]) -> Float32s:
    return np.stack([np.stack([norm.weight.detach().numpy() for norm in pair]) for pair in norms])


def _biases(products: Sequence[PackedLinear]) -> Float32s:
    """Of all outputs, one product after the other; 0 where there is none."""
    biases = [torch.zeros(one.weights.outputs) if one.bias is None else one.bias.detach() for one in products]
    return torch.cat(biases).numpy()
